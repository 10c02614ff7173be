"""What cards of each generation answer becomes their reading, and bounded work; our library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qgpu_exporter.model import (
    CardIdentity,
    CardReading,
    Clocks,
    Ecc,
    Memory,
    NvLink,
    Pcie,
    Power,
    Process,
    RawCounter,
    RemappedRows,
    RetiredPages,
    SampleBuffer,
    Temperatures,
    Utilization,
)
from tests.nvml_stub import Stub, Values, card, presets
from tests.nvml_stub.presets import LONG, MIB, field
from tests.reader_child import ReaderChild

NO_ERRORS = Ecc(True, True, 0, 0, 0, 0)
IDLE_BUFFERS = tuple(SampleBuffer(kind, ()) for kind in ("gpu", "memory", "encoder", "decoder"))
OLD_COUNTED_REASONS = {
    "power": 0.0,
    "sw_power_cap": 0.0,
    "thermal": 0.0,
    "sync_boost": 0.0,
    "board_limit": 0.0,
    "low_utilization": 0.0,
    "reliability": 0.0,
}
COUNTED_REASONS = OLD_COUNTED_REASONS | {
    "sw_thermal_slowdown": 0.0,
    "hw_thermal_slowdown": 0.0,
    "hw_power_brake_slowdown": 0.0,
}


def reasons(*active: str) -> dict[str, bool]:
    names = (
        "gpu_idle",
        "applications_clocks_setting",
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "display_clock_setting",
    )
    return {name: name in active for name in names}


def read(directory: Path, values: Values) -> CardReading:
    with ReaderChild(environment=Stub(directory, [values]).environment()) as child:
        reading = child.ask()
    assert reading.error is None
    assert reading.failures == ()
    assert child.errors == ""
    return reading.cards[0]


def test_t4(tmp_path: Path) -> None:
    found = read(tmp_path, presets.t4())
    assert found.process_window is not None
    assert found.process_window.samples == ()
    assert replace(found, process_window=None) == CardReading(
        identity=CardIdentity(
            index=0,
            uuid="GPU-c0de0000-0000-4000-8000-000000000000",
            minor=0,
            pci_bus_id="00000000:01:00.0",
            model="Tesla T4",
            serial="1650000000000",
            brand="nvidia",
            architecture="turing",
            numa_node=0,
        ),
        memory=Memory(15360 * MIB, 1032 * MIB, 13940 * MIB, 388 * MIB),
        bar1=Memory(256 * MIB, 5 * MIB, 251 * MIB),
        utilization=Utilization(0.0, 0.0, 0.0, 0.0),
        clocks=Clocks(
            585_000_000,
            585_000_000,
            5_000_000_000,
            810_000_000,
            1_590_000_000,
            1_590_000_000,
            5_001_000_000,
            1_470_000_000,
        ),
        temperatures=Temperatures(
            gpu_celsius=40.0,
            shutdown_limit_celsius=96.0,
            slowdown_limit_celsius=93.0,
            max_operating_limit_celsius=85.0,
        ),
        power=Power(
            draw_watts=26.78,
            enforced_limit_watts=70.0,
            default_limit_watts=70.0,
            energy_joules=90_000.0,
        ),
        pcie=Pcie(generation=3, max_generation=3, width=8, max_width=16, replays=0),
        ecc=NO_ERRORS,
        retired_pages=RetiredPages(0, 0, pending=False),
        clock_event_reasons=reasons(),
        clock_event_seconds=OLD_COUNTED_REASONS,
        performance_state=0,
        compute_mode="default",
        virtualization_mode="passthrough",
        samples=IDLE_BUFFERS,
        processes=(Process(675, 22 * MIB, kinds=("graphics",)),),
    )


def test_l40s_under_an_encoding_load(tmp_path: Path) -> None:
    found = read(tmp_path, presets.l40s())
    assert found.utilization == Utilization(0.09, 0.02, 0.59, 0.0, 0.0, 0.0)
    assert found.temperatures == Temperatures(gpu_celsius=54.0)
    assert found.power == Power(110.24, 110.24, 110.01, 350.0, 350.0, 90_000.0)
    assert found.remapped_rows == RemappedRows(0, 0, pending=False, failure=False)
    assert found.retired_pages == RetiredPages()
    assert found.clock_event_seconds == COUNTED_REASONS | {
        "power": 204.642816,
        "sw_power_cap": 204.642816,
    }
    assert found.recovery_action == "none"
    assert (found.fabric_state, found.mig_enabled, found.profiling) == (None, None, None)
    assert found.processes == (
        Process(20037, 538 * MIB, kinds=("compute",)),
        Process(20038, 681 * MIB, kinds=("compute",)),
    )


def test_h200_under_load(tmp_path: Path) -> None:
    found = read(tmp_path, presets.h200())
    assert found.memory == Memory(143771 * MIB, 32362 * MIB, 110795 * MIB, 614 * MIB)
    assert found.utilization == Utilization(1.0, 0.07, 0.0, 0.0, 0.0, 0.0)
    assert found.temperatures == Temperatures(gpu_celsius=52.0, memory_celsius=41.0)
    assert found.pcie == Pcie(
        5, 5, 16, 16, 0, 0, RawCounter(5_000_000_000), RawCounter(7_000_000_000)
    )
    assert len(found.nvlinks) == 18
    assert found.nvlinks[17] == NvLink(
        link=17,
        active=True,
        speed_bytes_per_second=26_562_000_000,
        transmitted_bytes=RawCounter(1017 * 1024),
        received_bytes=RawCounter(2017 * 1024),
        errors={"crc_flit": 0, "replay": 0, "recovery": 0},
    )
    assert (found.fabric_state, found.fabric_status, found.fabric_health_mask) == (
        "completed",
        0,
        0,
    )
    assert (found.mig_enabled, found.mig_pending, found.mig_slices) == (False, False, ())
    assert found.mig_compute_slices is None


def test_h100_in_mig_mode_gives_no_utilisation(tmp_path: Path) -> None:
    found = read(tmp_path, presets.h100_mig())
    assert found.utilization == Utilization()
    assert (found.samples, found.process_window) == ((), None)
    assert found.memory == Memory(81559 * MIB, 59 * MIB, 81022 * MIB, 478 * MIB)
    assert found.temperatures == Temperatures(gpu_celsius=42.0, memory_celsius=48.0)
    assert found.power.draw_watts == 71.27
    assert found.pcie.replays == 9
    assert found.remapped_rows == RemappedRows()
    assert (found.mig_enabled, found.mig_pending, found.mig_compute_slices) == (True, True, 7)
    assert found.processes == ()
    assert [
        (
            part.gpu_instance,
            part.compute_instance,
            part.profile,
            part.compute_slices,
            part.multiprocessors,
            part.memory and (part.memory.total_bytes // MIB, part.memory.used_bytes // MIB),
        )
        for part in found.mig_slices
    ] == [
        (2, 0, "3g.40gb", 3, 60, (40448, 26)),
        (3, 0, "2g.20gb", 2, 32, (20096, 17)),
        (9, 0, "1g.10gb", 1, 16, (9984, 9)),
        (10, 0, "1g.10gb", 1, 16, (9984, 9)),
    ]


def test_a100_in_mig_mode(tmp_path: Path) -> None:
    found = read(tmp_path, presets.a100_mig())
    assert found.temperatures == Temperatures(
        gpu_celsius=27.0,
        memory_celsius=44.0,
        shutdown_limit_celsius=92.0,
        slowdown_limit_celsius=89.0,
        memory_limit_celsius=95.0,
        max_operating_limit_celsius=85.0,
    )
    assert found.profiling is None
    assert found.mig_compute_slices == 7
    assert [(part.gpu_instance, part.uuid, part.profile) for part in found.mig_slices] == [
        (instance, presets.mig_uuid(0, place), "1g.20gb")
        for place, instance in enumerate((3, 4, 5, 6))
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # The fields of the fifth NVLink generation; the older ones stay at zero there.
        (
            {
                "field.138.0": field(0, LONG),
                "field.139.0": field(0, LONG),
                "field.202.0": field(5000, LONG),
                "field.204.0": field(6000, LONG),
            },
            NvLink(0, None, None, RawCounter(5000), RawCounter(6000)),
        ),
        # Before the fields with a scope: an id for each link.
        (
            {
                "field.32": field(1),
                "field.39": field(2),
                "field.46": field(3),
                "field.148": field(5),
            },
            NvLink(0, errors={"crc_flit": 1, "crc_data": 2, "replay": 3, "ecc": 5}),
        ),
        ({"field.165.0": field(0)}, NvLink(0, active=False)),
    ],
)
def test_nvlinks_of_other_generations(tmp_path: Path, values: Values, expected: NvLink) -> None:
    found = read(tmp_path, {**presets.t4(), "field.91": field(1), **values})
    assert found.nvlinks == (expected,)


def test_a_32_bit_counter_says_so(tmp_path: Path) -> None:
    found = read(tmp_path, presets.t4() | {"field.197": field(0xFFFF_FF00)})
    assert found.pcie.transmitted_bytes == RawCounter(0xFFFF_FF00, 32)
    assert found.pcie.received_bytes is None


def test_a_field_that_fails_is_not_what_stands_in_its_place(tmp_path: Path) -> None:
    found = read(tmp_path, presets.h200() | {"field.82": "!3", "field.230": "!999"})
    assert found.temperatures == Temperatures(gpu_celsius=52.0)
    assert found.recovery_action is None


def test_the_licence_is_asked_of_vgpu_guests_alone(tmp_path: Path) -> None:
    values = presets.t4() | {"nvmlDeviceGetGridLicensableFeatures_v4": 1}
    assert read(tmp_path / "a", values).vgpu_licensed is None
    guest = values | {"nvmlDeviceGetVirtualizationMode": 2}
    assert read(tmp_path / "b", guest).vgpu_licensed is True
    without = guest | {"nvmlDeviceGetGridLicensableFeatures_v4": 0}
    assert read(tmp_path / "c", without).vgpu_licensed is False


def test_names_that_are_no_names_are_absent(tmp_path: Path) -> None:
    stub = Stub(
        tmp_path,
        [
            presets.t4()
            | {
                "nvmlDeviceGetSerial": "0",
                "nvmlDeviceGetName": r"\xff\xfe",
                "nvmlDeviceGetPciInfo": "nowhere",
                "nvmlDeviceGetMemoryAffinity": 3,
                "nvmlDeviceGetBrand": 77,
            }
        ],
    )
    with ReaderChild(environment=stub.environment()) as child:
        identity = child.ask().cards[0].identity
    assert identity == CardIdentity(index=0, uuid=presets.uuid(0), minor=0, architecture="turing")


# ------------------------------------------------------------------ bounded work


def rounds(stub: Stub, child: ReaderChild, count: int) -> list[list[str]]:
    """The calls of each round, after the first two, which find out what is offered."""
    child.ask()
    child.ask()
    found = []
    for _ in range(count):
        stub.forget_calls()
        assert child.ask().failures == ()
        found.append(sorted(stub.calls()))
    return found


def test_calls_grow_with_cards_and_with_nothing_else(tmp_path: Path) -> None:
    counts = {}
    for cards in (1, 4, 16):
        stub = Stub(tmp_path / str(cards), [presets.t4(index) for index in range(cards)])
        if cards == 16:
            stub.set(
                {
                    f"{index}.nvmlDeviceGetComputeRunningProcesses": ",".join(
                        f"{pid}:{MIB}" for pid in range(1000, 1050)
                    )
                    for index in range(cards)
                }
            )
        with ReaderChild(environment=stub.environment()) as child:
            first, second = rounds(stub, child, 2)
        assert first == second
        counts[cards] = len(first)
    of_a_card = counts[1] - 1
    assert of_a_card <= 32
    assert counts == {1: 1 + of_a_card, 4: 1 + 4 * of_a_card, 16: 1 + 16 * of_a_card}


def test_calls_grow_by_eight_for_each_mig_device(tmp_path: Path) -> None:
    values = presets.h100_mig()
    stub = Stub(tmp_path, [values])
    with ReaderChild("--no-gpm", environment=stub.environment()) as child:
        (four,) = rounds(stub, child, 1)
        stub.set({f"0.{key}": None for key in values if key.startswith("mig.3.")})
        (three,) = rounds(stub, child, 1)
    # What it is (5), its memory and two process lists; its place is asked for, there or not.
    gone = [call for call in four if call.endswith(" 0.3")]
    assert len(four) - len(three) == len(gone) == 8


def test_one_call_for_all_fields(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h200(0), presets.h200(1)])
    with ReaderChild(environment=stub.environment()) as child:
        for calls in rounds(stub, child, 2):
            fetched = [call for call in calls if call.startswith("nvmlDeviceGetFieldValues")]
            assert fetched == ["nvmlDeviceGetFieldValues 0", "nvmlDeviceGetFieldValues 1"]


def test_the_reading_says_how_many_calls_it_took(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h200(0), presets.t4(1)])
    with ReaderChild("--no-gpm", environment=stub.environment()) as child:
        child.ask()
        stub.forget_calls()
        reading = child.ask()
        assert reading.calls == len(stub.calls())


def test_what_is_refused_is_asked_again_rarely(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    with ReaderChild("--no-gpm", environment=stub.environment()) as child:
        for _ in range(121):
            child.ask()
        assert stub.calls().count("nvmlDeviceGetFanSpeed 0") == 2
        stub.set(card({"nvmlDeviceGetFanSpeed": 30}))
        ratios = {child.ask().cards[0].fan_ratio for _ in range(120)}
        assert child.ask().cards[0].fan_ratio == 0.3
    assert ratios == {None, 0.3}
