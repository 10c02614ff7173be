"""Devices of resource claims, with and without the node's ResourceSlices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from qgpu_exporter.allocation import allocate
from qgpu_exporter.model import (
    AllocationResult,
    Card,
    ClaimDevice,
    KubeletContainer,
    MigSlice,
    SliceDevice,
)
from tests.allocation_worlds import (
    GIB,
    card,
    card_uuid,
    kubelet,
    mig,
    mig_uuid,
    row,
    shares,
    world,
)

DRIVER = "gpu.nvidia.com"
WHOLE = (0, None, 100.0, 24 * GIB)


def claim(device: str, name: str = "claim", driver: str = DRIVER, share: str = "") -> ClaimDevice:
    return ClaimDevice("demo", name, driver, "node-1", device, share)


def listed(
    device: str,
    driver: str = DRIVER,
    *,
    kind: str | None = None,
    uuid: str | None = None,
    parent_uuid: str | None = None,
    profile: str | None = None,
    placement_start: int | None = None,
) -> SliceDevice:
    return SliceDevice(driver, "node-1", device, kind, uuid, parent_uuid, profile, placement_start)


def found(
    cards: Sequence[Card],
    slices: Sequence[SliceDevice] | None,
    *rows: KubeletContainer,
) -> AllocationResult:
    inputs = world(cards, None, kubelet(*rows))
    return allocate(replace(inputs, slices=None if slices is None else tuple(slices)))


def test_a_whole_card_by_its_resource_slice() -> None:
    # The name's number is a minor number of before a reboot: the slice is right.
    slices = [listed("gpu-7", kind="gpu", uuid=card_uuid(0))]
    result = found([card(0)], slices, row("p", claims=[claim("gpu-7")]))
    assert shares(result) == [("p", "main", *WHOLE)]
    (one,) = result.allocations
    assert (one.scheme, one.resource, one.exclusive) == ("dra", DRIVER, True)
    assert one.claim == claim("gpu-7")


def test_a_static_slice_by_its_uuid() -> None:
    made = [mig(1, 2, "3g.40gb", compute_slices=3, memory_bytes=40 * GIB)]
    slices = [listed("gpu-0-mig-3g40gb-9-0", kind="mig", uuid=mig_uuid(1))]
    rows = row("p", claims=[claim("gpu-0-mig-3g40gb-9-0")])
    result = found([card(0, slices=made)], slices, rows)
    assert shares(result) == [("p", "main", 0, "2", 300 / 7, 40 * GIB)]


def one_g(start: int | None, number: int) -> MigSlice:
    return mig(number, 7 + number, "1g.10gb+me", placement_start=start)


@pytest.mark.parametrize(
    ("made", "expected", "problems"),
    [
        ([one_g(0, 1), one_g(1, 2)], ["9"], []),
        ([one_g(None, 1)], ["8"], []),
        ([one_g(None, 1), one_g(None, 2)], [], ["ambiguous_slice"]),
        ([one_g(0, 1)], [], ["unknown_card"]),
        ([], [], ["unknown_card"]),
    ],
)
def test_a_slice_that_was_made_for_its_claim(
    made: list[MigSlice], expected: list[str], problems: list[str]
) -> None:
    device = "gpu-0-mig-1g10gb-me-20-1"
    slices = [
        listed(
            device,
            kind="mig",
            parent_uuid=card_uuid(0),
            profile="1g.10gb.me",
            placement_start=1,
        )
    ]
    for known in (slices, None):
        result = found([card(0, slices=made)], known, row("p", claims=[claim(device)]))
        assert [one.mig for one in result.allocations] == expected
        assert [one.kind for one in result.problems] == problems


def test_without_slices_the_driver_s_names_tell_the_minor_number() -> None:
    cards = [card(0, minor=1), card(1, minor=0)]
    result = found(cards, None, row("p", claims=[claim("gpu-0")]))
    assert shares(result) == [("p", "main", 1, None, 100.0, 24 * GIB)]
    missing = found(cards, None, row("p", claims=[claim("gpu-5")]))
    assert [one.kind for one in missing.problems] == ["unknown_card"]
    other = found(cards, None, row("p", claims=[claim("gpu-0", driver="nic.example.com")]))
    assert (other.allocations, other.problems) == ((), ())


def test_a_device_that_cannot_be_resolved() -> None:
    slices = [
        listed("gpu-0", kind="gpu", uuid=card_uuid(8)),
        listed("gpu-1-mig-x-1-0", kind="mig", uuid=mig_uuid(8)),
        listed("gpu-2-mig-x-1-0", kind="mig", parent_uuid=card_uuid(9), profile="x"),
        listed("gpu-vfio-0", kind="vfio", uuid=card_uuid(0)),
        listed("channel-0", "compute-domain.nvidia.com", kind="channel"),
    ]

    def kinds(device: str, driver: str = DRIVER, *, answers: bool = True) -> list[str]:
        rows = row("p", claims=[claim(device, driver=driver)])
        result = found([card(0, answers=answers)], slices, rows)
        assert result.allocations == ()
        return [one.kind for one in result.problems]

    assert kinds("gpu-0") == ["unknown_card"]
    assert kinds("gpu-1-mig-x-1-0") == ["unknown_card"]
    assert kinds("gpu-1-mig-x-1-0", answers=False) == []
    assert kinds("gpu-2-mig-x-1-0") == ["unknown_card"]
    assert kinds("gpu-vfio-0") == []
    assert kinds("gpu-9") == ["unknown_device"]
    assert kinds("channel-0", "compute-domain.nvidia.com") == []
    assert kinds("nic-0", "nic.example.com") == []


SLICES = [listed(f"gpu-{n}", kind="gpu", uuid=card_uuid(n)) for n in range(2)]
CARDS = [card(0), card(1)]


def test_a_shared_claim_has_several_owners_and_guarantees_none_of_them() -> None:
    rows = [row("a", claims=[claim("gpu-0")]), row("b", claims=[claim("gpu-0")])]
    result = found(CARDS, SLICES, *rows)
    assert shares(result) == [
        ("a", "main", 0, None, None, None),
        ("b", "main", 0, None, None, None),
    ]
    assert [one.exclusive for one in result.allocations] == [False, False]


def test_a_share_of_a_device_guarantees_nothing() -> None:
    result = found(CARDS, SLICES, row("a", claims=[claim("gpu-0", share="s1")]))
    assert shares(result) == [("a", "main", 0, None, None, None)]


def test_a_monitor_that_is_let_in_to_every_device_takes_nothing_from_its_owner() -> None:
    rows = [
        row("monitor", claims=[claim("gpu-0", "all"), claim("gpu-1", "all")]),
        row("owner", claims=[claim("gpu-0", "mine")]),
    ]
    assert shares(found(CARDS, SLICES, *rows)) == [
        ("monitor", "main", 0, None, None, None),
        ("owner", "main", *WHOLE),
        ("monitor", "main", 1, None, 100.0, 24 * GIB),
    ]


def test_two_claims_of_one_size_on_one_device_guarantee_nothing() -> None:
    rows = [row("a", claims=[claim("gpu-0", "x")]), row("b", claims=[claim("gpu-0", "y")])]
    result = found(CARDS, SLICES, *rows)
    assert [one.core_percent for one in result.allocations] == [None, None]
