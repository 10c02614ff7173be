"""MIG devices and their profiling while they come, go and change; real bindings, our library."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from qgpu_exporter.model import CardReading, MigSlice, Process, Profiling
from tests.nvml_stub import Stub, card, presets
from tests.nvml_stub.presets import MIB
from tests.reader_child import ReaderChild

WINDOW_SECONDS = 0.11
"""The driver gives nothing for two samples that are closer than 0.1 s."""


def instances(slices: Sequence[MigSlice]) -> list[tuple[int, int | None]]:
    return [(part.gpu_instance, part.compute_instance) for part in slices]


def ask_later(child: ReaderChild) -> CardReading:
    """A round after which both profiling samples are far enough apart."""
    time.sleep(WINDOW_SECONDS)
    reading = child.ask()
    assert reading.error is None
    return reading.cards[0]


def device(place: int, gpu_instance: int, compute_instance: int = 0) -> presets.Card:
    return presets.mig_device(
        0,
        place,
        instances=(gpu_instance, compute_instance),
        name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        slices=(1, 1),
        multiprocessors=16,
        memory=(9984, 9),
    )


# ------------------------------------------------------------------ which devices there are


def test_gaps_between_devices_are_normal(tmp_path: Path) -> None:
    values = {
        key: value for key, value in presets.h100_mig().items() if not key.startswith("mig.1.")
    }
    with ReaderChild(environment=Stub(tmp_path, [values]).environment()) as child:
        assert instances(child.ask().cards[0].mig_slices) == [(2, 0), (9, 0), (10, 0)]
    assert child.errors == ""


def test_a_device_that_goes_after_it_was_listed_is_left_out(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    with ReaderChild(environment=stub.environment()) as child:
        for code in (2, 6):
            stub.set({"0.mig.1.error.*": code})
            assert instances(child.ask().cards[0].mig_slices) == [(2, 0), (9, 0), (10, 0)]
            stub.set({"0.mig.1.error.*": None})
            part = child.ask().cards[0].mig_slices[1]
            assert (part.gpu_instance, part.memory is not None) == (3, True)
    assert child.errors == ""


def test_a_device_that_goes_between_its_calls_costs_no_other(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        stub.set(
            {
                "0.mig.1.error.nvmlDeviceGetMemoryInfo_v2": 2,
                "0.mig.1.error.nvmlDeviceGetMemoryInfo": 2,
                "0.mig.1.error.nvmlDeviceGetComputeRunningProcesses_v3": 2,
            }
        )
        slices = child.ask().cards[0].mig_slices
        assert [part.memory is not None for part in slices] == [True, False, True, True]
        stub.set({"0.mig.1.error.nvmlDeviceGetMemoryInfo_v2": None})
        slices = child.ask().cards[0].mig_slices
        assert [part.memory is not None for part in slices] == [True, True, True, True]


def test_mig_mode_is_followed_while_running(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    with ReaderChild(environment=stub.environment()) as child:
        found = child.ask().cards[0]
        assert len(found.mig_slices) == 4
        assert found.utilization.gpu_ratio is None
        stub.set(
            card(
                {
                    "nvmlDeviceGetMigMode": "0,1",
                    "nvmlDeviceGetUtilizationRates": "12,3",
                    **{f"mig.{place}.nvmlDeviceGetUUID": None for place in range(4)},
                }
            )
        )
        found = child.ask().cards[0]
        assert (found.mig_enabled, found.mig_pending) == (False, True)
        assert (found.mig_slices, found.mig_compute_slices) == ((), None)
        assert found.utilization.gpu_ratio == 0.12
        stub.set(card({"nvmlDeviceGetMigMode": "1,1", "nvmlDeviceGetUtilizationRates": None}))
        stub.set(card(device(0, 7)))
        found = child.ask().cards[0]
        assert instances(found.mig_slices) == [(7, 0)]
        assert found.mig_compute_slices == 7
        assert found.utilization.gpu_ratio is None


def test_an_old_uuid_may_be_another_device_in_the_next_round(tmp_path: Path) -> None:
    values = presets.a100_mig()
    stub = Stub(tmp_path, [values])
    legacy = f"MIG-{presets.uuid(0)}/3/0"
    stub.set({"0.mig.0.nvmlDeviceGetUUID": legacy})
    with ReaderChild(environment=stub.environment()) as child:
        part = child.ask().cards[0].mig_slices[0]
        assert (part.uuid, part.profile) == (legacy, "1g.20gb")
        stub.set({"0.mig.0.nvmlDeviceGetName": "NVIDIA A100-SXM4-80GB MIG 1g.10gb+me"})
        part = child.ask().cards[0].mig_slices[0]
        assert (part.uuid, part.profile) == (legacy, "1g.10gb+me")


def test_compute_instances_share_a_gpu_instance(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    stub.set(card(device(4, 2, 1)))
    stub.set(
        {
            "0.mig.4.nvmlDeviceGetName": "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb",
            "0.mig.4.nvmlDeviceGetComputeRunningProcesses": f"77:{MIB}",
            "0.mig.0.nvmlDeviceGetMPSComputeRunningProcesses": f"76:{MIB}:2:0",
            "0.mig.2.nvmlDeviceGetComputeRunningProcesses": f"78:{0xFFFF_FFFF_FFFF_FFFF}:9:0",
        }
    )
    with ReaderChild(environment=stub.environment()) as child:
        found = child.ask().cards[0]
    assert instances(found.mig_slices) == [(2, 0), (2, 1), (3, 0), (9, 0), (10, 0)]
    assert found.mig_slices[1].profile == "1c.3g.40gb"
    assert found.processes == (
        Process(76, MIB, 2, 0, ("mps",)),
        Process(77, MIB, 2, 1, ("compute",)),
        Process(78, None, 9, 0, ("compute",)),
    )


def test_placement_where_the_driver_tells_it(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig(0), presets.h100_mig(1)])
    stub.set({"0.instance.2": "0,4", "0.instance.3": "4,2", "0.instance.9": "6,1"})
    stub.set({"0.instance.10": "7,1"})
    with ReaderChild(environment=stub.environment()) as child:
        first, second = child.ask().cards
    placements = [(part.placement_start, part.memory_slices) for part in first.mig_slices]
    assert placements == [(0, 4), (4, 2), (6, 1), (7, 1)]
    assert {part.placement_start for part in second.mig_slices} == {None}
    assert child.errors == ""


# ------------------------------------------------------------------ profiling


def test_profiling_of_card_and_instances_from_the_second_round_on(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    stub.set(card({"gpm.12": "nan", "gpm.13": "inf", "gpm.4": 100.5, "gpm.6": -1}))
    stub.set(card({"gpm.7": 100, "gpm.11": 140737488355328.0, "gpm.61": "!3"}))
    with ReaderChild(environment=stub.environment()) as child:
        found = child.ask().cards[0]
        assert found.profiling is None
        assert {part.profiling for part in found.mig_slices} == {None}
        found = ask_later(child)
    assert found.profiling is not None
    assert found.profiling.window_seconds >= WINDOW_SECONDS
    assert found.profiling == Profiling(
        window_seconds=found.profiling.window_seconds,
        graphics_engine_ratio=0.03,
        sm_active_ratio=0.03,
        sm_occupancy_ratio=0.125,
        tensor_ratio=0.25,
        tensor_half_ratio=1.0,
        dram_active_ratio=0.4,
        pcie_transmitted_bytes_per_second=2 * MIB,
        pcie_received_bytes_per_second=4 * MIB,
        nvdec_ratios={"0": 0.0},
    )
    assert [part.profiling and part.profiling.sm_active_ratio for part in found.mig_slices] == [
        0.3,
        0.2,
        0.1,
        0.1,
    ]


def test_an_instance_made_again_begins_anew(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        assert all(part.profiling for part in ask_later(child).mig_slices)
        stub.set({"0.mig.0.nvmlDeviceGetUUID": presets.mig_uuid(0, 40)})
        slices = ask_later(child).mig_slices
        assert [part.profiling is None for part in slices] == [True, False, False, False]
        assert all(part.profiling for part in ask_later(child).mig_slices)
        stub.set({"0.mig.3.nvmlDeviceGetUUID": None})
        assert len(ask_later(child).mig_slices) == 3
        taken = stub.calls().count("nvmlGpmSampleAlloc")
        freed = stub.calls().count("nvmlGpmSampleFree")
    # Two buffers each for the card and three instances are in use.
    assert taken - freed == 8


def test_profiling_that_fails_again_and_again_is_switched_off_with_one_line(
    tmp_path: Path,
) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    stub.set({"0.error.nvmlGpmMigSampleGet": 4})
    with ReaderChild(environment=stub.environment()) as child:
        found = [ask_later(child) for _ in range(4)][-1]
        assert found.profiling is not None
        assert {part.profiling for part in found.mig_slices} == {None}
        stub.forget_calls()
        ask_later(child)
        assert "nvmlGpmMigSampleGet 0" not in stub.calls()
    assert child.errors == (
        "WARNING card 0: profiling of the GPU instances is off: "
        "nvmlGpmMigSampleGet: Insufficient Permissions\n"
    )


def test_profiling_can_be_off(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig()])
    with ReaderChild("--no-gpm", environment=stub.environment()) as child:
        child.ask()
        assert ask_later(child).profiling is None
    assert [call for call in stub.calls() if "Gpm" in call] == []


def test_rounds_that_follow_at_once_give_no_profiling_and_break_none(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h200()])
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        for _ in range(5):
            child.ask()
        assert ask_later(child).profiling is not None
    assert child.errors == ""
