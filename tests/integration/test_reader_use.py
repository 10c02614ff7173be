"""Processes, sample buffers and XID events as the driver hands them out; our library."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from qgpu_exporter import totals
from qgpu_exporter.model import (
    CardReading,
    Process,
    ProcessSample,
    Reading,
    Sample,
    SampleBuffer,
    SeenSamples,
    Totals,
    Xid,
)
from tests.nvml_stub import Stub, card, presets
from tests.nvml_stub.presets import MIB
from tests.reader_child import ReaderChild

NOT_AVAILABLE = 0xFFFF_FFFF_FFFF_FFFF
WHOLE_CARD = 0xFFFF_FFFF


def now_us() -> int:
    return int(time.time() * 1e6)


def seen(index: int = 0, *, samples_us: int = 0, processes_us: int = 0) -> SeenSamples:
    kinds = dict.fromkeys(("gpu", "memory", "encoder", "decoder"), samples_us)
    return SeenSamples(presets.uuid(index), kinds, processes_us)


def used(found: CardReading) -> list[tuple[int, float | None]]:
    assert found.process_window is not None
    return [(sample.pid, sample.sm_ratio) for sample in found.process_window.samples]


# ------------------------------------------------------------------ lists


def test_a_process_in_two_lists_counts_once(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set(
        card(
            {
                "nvmlDeviceGetComputeRunningProcesses": f"20:{5 * MIB},10:{NOT_AVAILABLE},0:7",
                "nvmlDeviceGetGraphicsRunningProcesses": f"20:{5 * MIB},30:{2**64 - 2}",
                "nvmlDeviceGetMPSComputeRunningProcesses": f"10:{3 * MIB},4294967295:1",
            }
        )
    )
    with ReaderChild(environment=stub.environment()) as child:
        found = child.ask().cards[0]
    assert found.processes == (
        Process(10, 3 * MIB, kinds=("compute", "mps")),
        Process(20, 5 * MIB, kinds=("compute", "graphics")),
        Process(30, None, kinds=("graphics",)),
    )


def test_a_long_list_is_whole(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    pids = range(1000, 1700)
    stub.set({"0.nvmlDeviceGetComputeRunningProcesses": ",".join(f"{pid}:1" for pid in pids)})
    with ReaderChild(environment=stub.environment()) as child:
        found = child.ask().cards[0].processes
    assert found is not None
    assert [process.pid for process in found if "compute" in process.kinds] == list(pids)


def test_no_list_and_an_empty_list_are_two_things(tmp_path: Path) -> None:
    names = ("Compute", "Graphics", "MPSCompute")
    keys = [f"nvmlDeviceGet{name}RunningProcesses" for name in names]
    refused = presets.t4(0) | dict.fromkeys(keys, "!4")
    empty = presets.t4(1) | dict.fromkeys(keys, "")
    stub = Stub(tmp_path, [refused, empty])
    with ReaderChild(environment=stub.environment()) as child:
        first, second = child.ask().cards
    assert (first.processes, second.processes) == (None, ())
    assert child.errors.count("Insufficient Permissions") == 3


# ------------------------------------------------------------------ what processes use


def test_an_idle_card_has_a_window_without_samples(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    with ReaderChild(environment=stub.environment()) as child:
        first = child.ask().cards[0].process_window
        second = child.ask().cards[0].process_window
    assert first is not None
    assert second is not None
    assert (first.samples, second.samples) == ((), ())
    assert second.since_us == first.until_us
    assert child.errors == ""


def uses(*samples: tuple[int, int, int]) -> dict[str, object]:
    """(pid, timestamp, percent of the SMs) of each sample."""
    lines = (f"{pid}:{at}:{percent}:1:0:0" for pid, at, percent in samples)
    return {"0.nvmlDeviceGetProcessUtilization": ",".join(lines)}


def test_old_samples_do_not_come_again_and_late_ones_are_not_lost(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    at = now_us() - 900_000
    first = ((704, at + 600, 80), (9, at + 200, 7))
    stub.set(uses(*first))
    with ReaderChild(environment=stub.environment()) as child:
        found = child.ask(seen(processes_us=at)).cards[0]
        assert found.process_window is not None
        assert found.process_window.since_us == at
        assert found.process_window.until_us > at + 900_000
        assert found.process_window.samples == (
            ProcessSample(9, at + 200, 0.07, 0.01, 0.0, 0.0),
            ProcessSample(704, at + 600, 0.8, 0.01, 0.0, 0.0),
        )
        # One of a process whose time lags behind, and one of the other process.
        later = (*first, (9, at + 400, 30), (704, at + 900, 50))
        stub.set(uses(*later))
        found = child.ask(seen(processes_us=at + 600)).cards[0]
        assert used(found) == [(9, 0.3), (704, 0.5)]
        for _ in range(2):
            assert used(child.ask(seen(processes_us=at + 900)).cards[0]) == []


def test_a_new_reader_does_not_repeat_what_the_one_before_delivered(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    at = now_us() - 900_000
    stub.set(uses((704, at, 80), (704, at + 1, 60)))
    with ReaderChild(environment=stub.environment()) as child:
        assert used(child.ask(seen(processes_us=at)).cards[0]) == [(704, 0.6)]


def test_samples_that_cannot_be_are_dropped(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    at = now_us() - 100_000
    stub.set(
        {
            "0.nvmlDeviceGetProcessUtilization": (
                f"0:{at}:5:5:5:5,11:{at}:101:40:4294967295:0,12:{2**64 - 1}:5:5:5:5"
            )
        }
    )
    with ReaderChild(environment=stub.environment()) as child:
        found = child.ask(seen(processes_us=at - 1)).cards[0]
    assert found.process_window is not None
    assert found.process_window.samples == (ProcessSample(11, at, None, 0.4, None, 0.0),)


@pytest.mark.parametrize("older", [None, "!13", "9:0:0:0:0:0"])
def test_the_newer_call_serves_where_the_older_is_absent_or_mute(
    tmp_path: Path, older: str | None
) -> None:
    stub = Stub(tmp_path, [presets.l40s() | {"nvmlDeviceGetUtilizationRates": "97,50"}])
    stub.set(
        {
            "0.nvmlDeviceGetProcessUtilization": older,
            "0.nvmlDeviceGetProcessesUtilizationInfo": "9:0:95:40:1:2",
        }
    )
    with ReaderChild(environment=stub.environment()) as child:
        readings = [child.ask(seen()).cards[0] for _ in range(6)]
        last = readings[-1].process_window
    assert last is not None
    assert [
        (sample.sm_ratio, sample.memory_ratio, sample.encoder_ratio, sample.decoder_ratio)
        for sample in last.samples
    ] == [(0.95, 0.4, 0.01, 0.02)]


def test_an_idle_card_is_no_reason_for_the_newer_call(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4() | {"nvmlDeviceGetUtilizationRates": "0,0"}])
    with ReaderChild(environment=stub.environment()) as child:
        for _ in range(12):
            child.ask()
    assert "nvmlDeviceGetProcessesUtilizationInfo 0" not in stub.calls()


# ------------------------------------------------------------------ sample buffers


def test_only_new_samples_come_in_order_and_plausible(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    at = now_us() - 5_000_000
    stub.set(
        {
            "0.nvmlDeviceGetSamples.1": (
                f"{at + 2}:70,{at}:50,{at + 1}:60,{at + 3}:101,{2**63}:5,{at + 4}:0"
            ),
            "0.nvmlDeviceGetSamples.4": None,
        }
    )
    with ReaderChild(environment=stub.environment()) as child:
        assert child.ask(seen(samples_us=at)).cards[0].samples == (
            SampleBuffer("gpu", (Sample(at + 1, 0.6), Sample(at + 2, 0.7), Sample(at + 4, 0.0))),
            SampleBuffer("memory", ()),
            SampleBuffer("encoder", ()),
        )
        again = child.ask(seen(samples_us=at + 4)).cards[0].samples
        assert again[0] == SampleBuffer("gpu", ())


def test_a_second_on_and_a_second_off_is_half(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"0.nvmlDeviceGetSamples.1": "wave:2000000:1000000:166667"})
    running = Totals()
    stamps: set[int] = set()
    with ReaderChild(environment=stub.environment()) as child:
        for _ in range(3):
            reading = child.ask(*totals.seen(running))
            (buffer, *_) = reading.cards[0].samples
            fresh = {sample.timestamp_us for sample in buffer.samples}
            assert not fresh & stamps
            stamps |= fresh
            running = totals.fold(running, reading)
            time.sleep(0.2)
    busy = running.cards[presets.uuid(0)].busy["gpu"]
    # Entries without a gap, each once.
    assert len(stamps) > 120
    assert max(stamps) - min(stamps) == (len(stamps) - 1) * 166_667
    assert busy.covered_seconds == pytest.approx((max(stamps) - min(stamps)) / 1e6, abs=0.2)
    assert busy.busy_seconds / busy.covered_seconds == pytest.approx(0.5, abs=0.03)


# ------------------------------------------------------------------ XIDs


def test_xids_come_with_the_reading_after_them(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4(0), presets.h100_mig(1)])
    stub.set({"event.1": "0:13"})
    with ReaderChild(environment=stub.environment()) as child:
        began = time.time()
        # What happened before the registration is not told.
        assert child.ask().events == ()
        stub.set({"event.2": f"0:31:{WHOLE_CARD}:{WHOLE_CARD}", "event.3": "1:94:9:0"})
        events: list[Xid] = []

        def all_came(reading: Reading) -> bool:
            events.extend(reading.events)
            return len(events) >= 2

        child.ask_until(all_came)
        assert child.ask().events == ()
    whole, instance = events
    assert began <= whole.timestamp_seconds <= time.time()
    assert whole == Xid(
        whole.timestamp_seconds, 31, presets.uuid(0), "00000000:01:00.0", origin="nvml"
    )
    assert instance == Xid(
        instance.timestamp_seconds, 94, presets.uuid(1), "00000000:02:00.0", 9, 0
    )


def test_cards_register_again_after_an_error(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    with ReaderChild(environment=stub.environment()) as child:
        child.ask()
        stub.set({"error.nvmlEventSetWait_v2": 15})
        child.ask_until(lambda _: "nvmlEventSetFree" in stub.calls())
        stub.set({"error.nvmlEventSetWait_v2": None})
        child.ask_until(lambda _: stub.calls().count("nvmlDeviceRegisterEvents 0") >= 2)
        stub.set({"event.1": "0:79"})
        reading = child.ask_until(lambda reading: bool(reading.events))
        assert [event.xid for event in reading.events] == [79]
    assert child.errors.count("waiting for XID events failed") == 1


def test_a_card_without_events_is_no_fault(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"0.noevents": 1})
    with ReaderChild(environment=stub.environment()) as child:
        for _ in range(3):
            assert child.ask().events == ()
    assert stub.calls().count("nvmlDeviceRegisterEvents 0") == 1
    assert child.errors == ""
