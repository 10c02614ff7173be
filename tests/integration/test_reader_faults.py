"""What goes wrong with the driver costs only what it concerns; real bindings, our library."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from qgpu_exporter.model import CardFailure, Reading, Temperatures
from tests.nvml_stub import Stub, presets
from tests.reader_child import ReaderChild


def down(reading: Reading) -> dict[int, str]:
    return {failure.index: failure.reason for failure in reading.failures}


def up(reading: Reading) -> list[int]:
    return [card.identity.index for card in reading.cards]


def t4s(directory: Path, count: int) -> Stub:
    return Stub(directory, [presets.t4(index) for index in range(count)])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (15, "lost"),
        (16, "reset_required"),
        (999, "unknown_error"),
        (4, "no_permission"),
        (8, "error"),
    ],
)
def test_one_bad_card_of_four_costs_only_itself_and_comes_back(
    tmp_path: Path, code: int, reason: str
) -> None:
    stub = t4s(tmp_path, 4)
    with ReaderChild(environment=stub.environment()) as child:
        assert up(child.ask()) == [0, 1, 2, 3]
        stub.set({"1.error.*": code})
        for _ in range(2):
            reading = child.ask()
            assert reading.error is None
            assert up(reading) == [0, 2, 3]
            assert [failure.uuid for failure in reading.failures] == [presets.uuid(1)]
            assert down(reading) == {1: reason}
        stub.set({"1.error.*": None})
        assert up(child.ask()) == [0, 1, 2, 3]
    assert "Traceback" not in child.errors


def test_a_card_that_is_bad_from_the_start_has_no_uuid(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 2)
    stub.set({"0.error.nvmlDeviceGetHandleByIndex_v2": 15})
    with ReaderChild(environment=stub.environment()) as child:
        reading = child.ask()
    assert up(reading) == [1]
    assert reading.failures == (
        CardFailure(0, "lost", "nvmlDeviceGetHandleByIndex: GPU is lost", None),
    )


def test_a_hanging_card_is_left_alone_until_it_returns(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 3)
    with ReaderChild(environment=stub.environment(), timeout_seconds=1.0) as child:
        child.ask_until(lambda reading: up(reading) == [0, 1, 2])
        stub.set({"1.hang.nvmlDeviceGetTemperatureV": 1000})
        reading = child.ask_until(lambda reading: up(reading) == [0, 2])
        assert down(reading) == {1: "timeout"}
        assert reading.failures[0].uuid == presets.uuid(1)
        stub.forget_calls()
        child.ask_until(lambda reading: up(reading) == [0, 2])
        assert [call for call in stub.calls() if call.endswith(" 1")] == []
        stub.set({"1.hang.nvmlDeviceGetTemperatureV": None})
        child.ask_until(lambda reading: up(reading) == [0, 1, 2])


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceRegisterEvents"])
def test_a_card_that_hangs_at_first_contact_hides_no_other(tmp_path: Path, call: str) -> None:
    stub = t4s(tmp_path, 2)
    stub.set({f"0.hang.{call}": 1000})
    with ReaderChild(environment=stub.environment(), timeout_seconds=1.0) as child:
        reading = child.ask_until(lambda reading: up(reading) == [1])
        assert down(reading) == {0: "timeout"}


def test_one_call_that_fails_costs_one_field_and_one_line(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    with ReaderChild(environment=stub.environment()) as child:
        whole = child.ask().cards[0]
        stub.set({"0.error.nvmlDeviceGetPowerUsage": 999})
        for _ in range(3):
            card = child.ask().cards[0]
            assert card.power == replace(whole.power, draw_watts=None)
            assert replace(card, power=whole.power, process_window=whole.process_window) == whole
    assert child.errors == "WARNING card 0: nvmlDeviceGetPowerUsage: Unknown Error\n"


def test_no_fan_is_no_fault(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    with ReaderChild(environment=stub.environment()) as child:
        card = child.ask().cards[0]
        assert card.fan_ratio is None
        assert card.temperatures.gpu_celsius == 40.0
        stub.forget_calls()
        child.ask()
        assert "nvmlDeviceGetFanSpeed 0" not in stub.calls()
    assert child.errors == ""


def test_an_old_driver_lacks_only_what_it_lacks(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4(0)], old_driver=True)
    with ReaderChild(environment=stub.environment()) as child:
        reading = child.ask()
        stub.forget_calls()
        again = child.ask()
        calls = stub.calls()
    card = reading.cards[0]
    assert reading.cuda_version == "13.0"
    assert card.identity.pci_bus_id == "00000000:01:00.0"
    assert card.memory is not None
    assert card.memory.reserved_bytes is None
    assert card.memory.used_bytes == (388 + 1032) * presets.MIB
    assert card.temperatures == Temperatures(
        gpu_celsius=40.0,
        shutdown_limit_celsius=96.0,
        slowdown_limit_celsius=93.0,
        max_operating_limit_celsius=85.0,
    )
    assert card.clock_event_reasons is not None
    assert card.clock_event_reasons["gpu_idle"]
    assert card.processes is not None
    assert [(process.pid, process.kinds) for process in card.processes] == [(675, ("graphics",))]
    assert card.utilization.jpeg_ratio is None
    assert again.cards[0].memory == card.memory
    assert "nvmlDeviceGetMemoryInfo 0" in calls
    assert child.errors == ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "driver_not_loaded"), (18, "mismatch"), (999, "unknown_error"), (4, "no_permission")],
)
def test_a_library_that_cannot_start_is_tried_again(tmp_path: Path, code: int, reason: str) -> None:
    stub = t4s(tmp_path, 1)
    stub.set({"error.nvmlInitWithFlags": code})
    with ReaderChild(environment=stub.environment()) as child:
        for _ in range(2):
            reading = child.ask()
            assert reading.error is not None
            assert reading.error.reason == reason
            assert reading.error.detail
            assert reading.cards == ()
        stub.set({"error.nvmlInitWithFlags": None})
        assert up(child.ask()) == [0]


def test_a_library_that_comes_later_is_found(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    place = tmp_path / "mounted-later"
    place.mkdir()
    environment = stub.environment() | {"LD_LIBRARY_PATH": str(place)}
    with ReaderChild(environment=environment) as child:
        reading = child.ask()
        assert reading.error is not None
        assert reading.error.reason == "library_not_found"
        shutil.copy(stub.library, place)
        assert up(child.ask()) == [0]


def test_an_initialisation_that_blocks_is_said_and_ends_with_the_input(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    stub.set({"hang.nvmlInitWithFlags": 1000})
    with ReaderChild(environment=stub.environment(), timeout_seconds=0.2) as child:
        for _ in range(2):
            reading = child.ask()
            assert reading.error is not None
            assert reading.error.reason == "timeout"
        child.close_input()
        assert child.process.wait(timeout=30) == 0


def test_a_machine_without_cards_is_no_fault(tmp_path: Path) -> None:
    with ReaderChild(environment=Stub(tmp_path).environment()) as child:
        reading = child.ask()
    assert reading.error is None
    assert (reading.cards, reading.failures) == ((), ())
    assert reading.driver_version == "580.95.05"


def test_a_library_that_forgot_its_start_is_started_again_in_the_same_round(
    tmp_path: Path,
) -> None:
    stub = t4s(tmp_path, 2)
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        stub.set({"forget": 1})
        assert up(child.ask()) == [0, 1]
    assert stub.calls().count("nvmlInitWithFlags") == 2


def test_unknown_on_all_cards_is_tried_once_with_a_new_start(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 2)
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        stub.set({"0.error.*": 999, "1.error.*": 999})
        for _ in range(3):
            reading = child.ask()
            assert reading.error is not None
            assert reading.error.reason == "unknown_error"
        assert stub.calls().count("nvmlInitWithFlags") == 2
        assert stub.calls().count("nvmlShutdown") == 1
        stub.set({"0.error.*": None, "1.error.*": None})
        assert up(child.ask()) == [0, 1]


def test_a_card_that_only_the_library_still_knows_is_unknown(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 2)
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        faults = {
            f"1.error.{name}": 999
            for name in (
                "nvmlDeviceGetFieldValues",
                "nvmlDeviceGetMemoryInfo_v2",
                "nvmlDeviceGetMemoryInfo",
                "nvmlDeviceGetTemperatureV",
                "nvmlDeviceGetTemperature",
            )
        }
        stub.set(faults)
        assert down(child.ask()) == {1: "unknown_error"}


def test_memory_without_a_second_version_is_asked_by_the_first(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    stub.set({"0.error.nvmlDeviceGetMemoryInfo_v2": 999})
    with ReaderChild(environment=stub.environment()) as child:
        memory = child.ask().cards[0].memory
        stub.forget_calls()
        child.ask()
        assert "nvmlDeviceGetMemoryInfo_v2 0" not in stub.calls()
    assert memory is not None
    assert (memory.used_bytes, memory.reserved_bytes) == (1420 * presets.MIB, None)


def test_a_card_without_memory_of_its_own_has_no_memory_reading(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    stub.set({"0.nvmlDeviceGetMemoryInfo": None})
    with ReaderChild(environment=stub.environment()) as child:
        card = child.ask().cards[0]
    assert card.memory is None
    assert card.temperatures.gpu_celsius == 40.0


def test_another_card_under_an_index_is_another_card(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    with ReaderChild(environment=stub.environment()) as child:
        assert child.ask().cards[0].identity.model == "Tesla T4"
        stub.set({f"0.{key}": None for key in presets.t4(0)})
        stub.set({f"0.{key}": value for key, value in presets.l40s(7).items()})
        card = child.ask().cards[0]
    assert card.identity.uuid == presets.uuid(7)
    assert card.identity.model == "NVIDIA L40S"
    assert card.identity.index == 0
    assert card.utilization.ofa_ratio == 0.0
    assert card.retired_pages.pending is None


def test_a_card_that_was_taken_out_is_no_longer_asked(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 2)
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        stub.set({"count": 1})
        reading = child.ask()
        assert (up(reading), down(reading)) == ([0], {})
        stub.set({"count": 2})
        assert up(child.ask()) == [0, 1]


def test_a_lost_card_that_came_back_is_found_with_a_new_start_in_the_end(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 2)
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        stub.set({"1.stale": 1})
        for _ in range(59):
            assert down(child.ask()) == {1: "lost"}
        assert stub.calls().count("nvmlInitWithFlags") == 1
        assert up(child.ask()) == [0, 1]
        assert stub.calls().count("nvmlInitWithFlags") == 2


def test_a_card_that_stays_lost_costs_ever_fewer_new_starts(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 2)
    stub.set({"1.error.*": 15})
    with ReaderChild(environment=stub.environment()) as child:
        starts = []
        for _ in range(185):
            assert up(child.ask()) == [0]
            starts.append(stub.calls().count("nvmlInitWithFlags"))
    assert [starts.index(count) for count in (1, 2, 3)] == [0, 59, 179]


def test_a_crash_of_the_library_ends_the_process(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        stub.set({"0.crash.nvmlDeviceGetTemperatureV": 1})
        with pytest.raises(AssertionError, match="the reader has ended"):
            child.ask()
        assert child.process.wait(timeout=30) == -signal.SIGSEGV


def test_what_the_library_prints_breaks_no_frame(tmp_path: Path) -> None:
    stub = t4s(tmp_path, 1)
    stub.set({"print": 1})
    with ReaderChild(environment=stub.environment()) as child:
        assert up(child.ask()) == [0]
        assert up(child.ask()) == [0]
    assert "NVML stub: nvmlDeviceGetUUID" in child.errors


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.parametrize("asked", [False, True])
def test_persistence_mode_is_asked_only_on_request(tmp_path: Path, *, asked: bool) -> None:
    lost = 4 << 20
    rounds = 10
    stub = t4s(tmp_path, 1)
    stub.set({"leak": lost})
    flags = ["--persistence-mode"] if asked else []
    with ReaderChild(*flags, environment=stub.environment()) as child:
        child.ask()
        before = resident_bytes(child.process.pid)
        readings = [child.ask() for _ in range(rounds)]
        grown = resident_bytes(child.process.pid) - before
    modes = {card.persistence_mode for reading in readings for card in reading.cards}
    calls = stub.calls().count("nvmlDeviceGetPersistenceMode 0")
    assert (modes, calls) == (({False}, rounds + 1) if asked else ({None}, 0))
    assert (grown >= rounds * lost) == asked
