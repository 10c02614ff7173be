"""Every device plugin's spelling of a device."""

from __future__ import annotations

import pytest

from qgpu_exporter.allocation.device_ids import DeviceId, parse

CARD = "GPU-0a1b2c3d-1111-4222-8333-0123456789ab"
SLICE = "MIG-0a1b2c3d-1111-5222-8333-0123456789ab"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (CARD, DeviceId(uuid=CARD)),
        (f"{CARD}::7", DeviceId(uuid=CARD, shared=True)),
        (f"{CARD}-7", DeviceId(uuid=CARD, shared=True, names_card=False)),
        (f"{CARD}-_-24186", DeviceId(uuid=CARD, shared=True, names_card=False)),
        (SLICE, DeviceId(uuid=SLICE)),
        (f"{SLICE}::7", DeviceId(uuid=SLICE, shared=True)),
        (f"MIG-{CARD}/1/0", DeviceId(uuid=CARD, gpu_instance=1, compute_instance=0)),
        (
            f"MIG-{CARD}/13/2::3",
            DeviceId(uuid=CARD, gpu_instance=13, compute_instance=2, shared=True),
        ),
        ("nvidia12", DeviceId(minor=12)),
        ("nvidia0/vgpu3", DeviceId(minor=0, shared=True)),
        ("nvidia0/gi7", DeviceId(minor=0, gpu_instance=7)),
        ("nvidia0/gi7/vgpu1", DeviceId(minor=0, gpu_instance=7, shared=True)),
    ],
)
def test_an_id_that_names_a_device(text: str, meaning: DeviceId) -> None:
    assert parse(text) == meaning


@pytest.mark.parametrize(
    "text",
    [
        "0-07",
        "1-15109",
        "94",
        "tencent.com/vcuda-core-13",
        "tencent.com/vcuda-memory-268435456-2",
        "0000:08:00.0",
        "nvidiactl",
        f"{CARD}-memory-1",
        f"{CARD}::",
        f"{CARD}x",
        CARD[:-1],
        "",
    ],
)
def test_an_id_that_names_none(text: str) -> None:
    assert parse(text) is None
