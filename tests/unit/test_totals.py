"""What a sequence of readings adds up to: counters, busy seconds, XIDs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from qgpu_exporter import totals
from qgpu_exporter.model import (
    BusyTotal,
    CardIdentity,
    CardReading,
    CardTotals,
    MigSlice,
    NvLink,
    Pcie,
    ProcessSample,
    ProcessWindow,
    RawCounter,
    ReaderError,
    Reading,
    Sample,
    SampleBuffer,
    SeenSamples,
    Totals,
    Xid,
    XidTotal,
)

UUID = "GPU-5a000000-0000-4000-8000-000000000000"
OTHER = "GPU-5a000000-0000-4000-8000-000000000001"
PCI = "00000000:3B:00.0"
CARD = CardReading(CardIdentity(0, UUID, pci_bus_id=PCI))
NOW = 1_754_000_000.0
ALL_ONES = 4294967295


def reading(*cards: CardReading, at: float = NOW, events: tuple[Xid, ...] = ()) -> Reading:
    return Reading(at, cards=cards, events=events)


def received(value: int, bits: Literal[32, 64] = 64) -> Reading:
    return reading(replace(CARD, pcie=Pcie(received_bytes=RawCounter(value, bits))))


def counter_after(*readings: Reading) -> int:
    state = Totals()
    for one in readings:
        state = totals.fold(state, one)
    return state.cards[UUID].counters["pcie_received_bytes"].total


# --------------------------------------------------------------------------- counters


def test_counter_continues_the_drivers_own_value() -> None:
    assert counter_after(received(1000)) == 1000
    assert counter_after(received(1000), received(1750)) == 1750


def test_fall_of_a_32_bit_counter_from_above_half_is_a_wrap() -> None:
    assert counter_after(received(0xFFFF_FF00, 32), received(0x100, 32)) == 0x1_0000_0100


def test_fall_of_a_32_bit_counter_from_below_half_is_a_reset() -> None:
    assert counter_after(received(0x7FFF_0000, 32), received(0x100, 32)) == 0x7FFF_0100


def test_fall_of_a_64_bit_counter_is_a_reset() -> None:
    assert counter_after(received(0xFFFF_FF00, 64), received(0x100, 64)) == 0xFFFF_FF00 + 0x100


def test_counter_that_a_round_could_not_read_goes_on_after_it() -> None:
    assert counter_after(received(10), reading(CARD), reading(), received(25)) == 25


def test_counters_of_links_are_named_by_link() -> None:
    link = NvLink(3, transmitted_bytes=RawCounter(5), received_bytes=RawCounter(7))
    state = totals.fold(Totals(), reading(replace(CARD, nvlinks=(link,))))
    found = {name: total.total for name, total in state.cards[UUID].counters.items()}
    assert found == {"nvlink_3_transmitted_bytes": 5, "nvlink_3_received_bytes": 7}


# --------------------------------------------------------------------------- busy seconds


def samples(*pairs: tuple[int, float]) -> tuple[Sample, ...]:
    return tuple(Sample(timestamp_us, ratio) for timestamp_us, ratio in pairs)


def test_first_entry_only_says_where_the_count_begins() -> None:
    total = totals.integrate(BusyTotal(), samples((10_000_000, 1.0)))
    assert total == BusyTotal(0.0, 0.0, 10_000_000, 0)


def test_each_entry_speaks_of_the_time_since_the_entry_before() -> None:
    total = totals.integrate(
        BusyTotal(), samples((10_000_000, 1.0), (11_000_000, 0.5), (12_500_000, 1.0))
    )
    assert (total.busy_seconds, total.covered_seconds) == (2.0, 2.5)


def test_entries_that_come_again_count_once() -> None:
    entries = samples((10_000_000, 0.0), (11_000_000, 1.0), (12_000_000, 1.0))
    once = totals.integrate(BusyTotal(), entries)
    assert totals.integrate(once, entries) == once
    assert once.busy_seconds == 2.0


def test_lost_stretch_counts_one_spacing() -> None:
    entries = samples((10_000_000, 0.0), (10_500_000, 1.0), (11_000_000, 1.0), (31_000_000, 1.0))
    total = totals.integrate(BusyTotal(), entries)
    assert (total.busy_seconds, total.covered_seconds) == (1.5, 1.5)
    assert total.last_timestamp_us == 31_000_000


def test_slower_pace_of_the_driver_is_found_again() -> None:
    quick = samples(*((10_000_000 + 200_000 * step, 1.0) for step in range(10)))
    slow = samples(*((12_000_000 + 1_000_000 * step, 1.0) for step in range(10)))
    total = totals.integrate(totals.integrate(BusyTotal(), quick), slow)
    # 1.8 s at the quick pace, 0.2 s to the first slow one, then one spacing for the first slow gap.
    assert total.covered_seconds == pytest.approx(1.8 + 0.2 + 0.2 + 8 * 1.0)


@pytest.mark.parametrize("ratio", [1.01, -0.1, float("nan"), float("inf")])
def test_impossible_entry_covers_nothing(ratio: float) -> None:
    entries = samples((10_000_000, 0.0), (11_000_000, ratio), (12_000_000, 0.5))
    total = totals.integrate(BusyTotal(), entries)
    assert (total.busy_seconds, total.covered_seconds) == (0.5, 1.0)


def test_kinds_are_kept_apart_and_told_to_the_reader() -> None:
    card = replace(
        CARD,
        samples=(
            SampleBuffer("gpu", samples((1_000_000, 0.0), (2_000_000, 1.0))),
            SampleBuffer("memory", samples((1_500_000, 0.0), (2_500_000, 0.25))),
        ),
        process_window=ProcessWindow(
            0, 9_000_000, (ProcessSample(7, 3_000_000, 0.5), ProcessSample(8, 2_900_000, 0.1))
        ),
    )
    state = totals.fold(Totals(), reading(card))
    busy = {kind: total.busy_seconds for kind, total in state.cards[UUID].busy.items()}
    assert busy == {"gpu": 1.0, "memory": 0.25}
    assert totals.seen(state) == (
        SeenSamples(UUID, {"gpu": 2_000_000, "memory": 2_500_000}, processes_us=3_000_000),
    )


def test_clock_that_is_set_back_starts_the_buffers_anew() -> None:
    def at(seconds: float, *pairs: tuple[int, float]) -> Reading:
        buffer = SampleBuffer("gpu", samples(*pairs))
        return reading(replace(CARD, samples=(buffer,)), at=seconds)

    state = totals.fold(Totals(), at(5000.0, (4_999_000_000, 1.0), (5_000_000_000, 1.0)))
    state = totals.fold(state, at(1400.0))
    assert totals.seen(state)[0].samples_us == {"gpu": 0}
    state = totals.fold(state, at(1402.0, (1_401_000_000, 1.0), (1_402_000_000, 0.5)))
    assert state.cards[UUID].busy["gpu"].busy_seconds == 1.5


def test_newest_process_sample_is_kept_over_rounds_without_any() -> None:
    window = ProcessWindow(0, 9_000_000, (ProcessSample(7, 3_000_000, 0.5),))
    state = totals.fold(Totals(), reading(replace(CARD, process_window=window)))
    state = totals.fold(state, reading(replace(CARD, process_window=ProcessWindow(0, 9_500_000))))
    assert state.cards[UUID].processes_us == 3_000_000
    state = totals.fold(state, reading(CARD, at=-100.0))
    assert state.cards[UUID].processes_us == 0


# --------------------------------------------------------------------------- XIDs


def test_counters_are_born_at_zero_with_the_card() -> None:
    state = totals.fold(Totals(), reading(CARD), xid_codes=(48, 79))
    assert state.cards[UUID].xids == {48: XidTotal(0), 79: XidTotal(0)}
    state = totals.fold(state, reading(CARD, events=(Xid(NOW, 79, UUID),)), xid_codes=(48, 79))
    assert state.cards[UUID].xids == {48: XidTotal(0), 79: XidTotal(1, NOW)}


def test_equal_xids_count_each_and_the_last_code_stays() -> None:
    events = (Xid(NOW, 31, UUID), Xid(NOW + 60, 31, UUID), Xid(NOW + 3600, 94, UUID))
    card = totals.fold(Totals(), reading(CARD, events=events)).cards[UUID]
    assert card.xids == {31: XidTotal(2, NOW + 60), 94: XidTotal(1, NOW + 3600)}
    assert card.last_xid == 94


def kmsg(at: float, xid: int, *, pci: str = PCI, old: bool = False) -> Xid:
    return Xid(at, xid, pci_bus_id=pci, origin="kmsg", old=old)


@pytest.mark.parametrize("driver_first", [True, False])
def test_incident_that_both_origins_tell_counts_once(driver_first: bool) -> None:
    state = totals.fold(Totals(), reading(CARD))
    driver, kernel = Xid(NOW, 79, UUID), kmsg(NOW + 1.5, 79)
    for event in (driver, kernel) if driver_first else (kernel, driver):
        state = totals.fold_xids(state, (event,))
    assert state.cards[UUID].xids == {79: XidTotal(1, NOW + 1.5)}
    # The pair is complete: the next event is another incident.
    state = totals.fold_xids(state, (kmsg(NOW + 3, 79),))
    assert state.cards[UUID].xids == {79: XidTotal(2, NOW + 3)}


def test_two_events_and_two_lines_are_two_incidents() -> None:
    state = totals.fold(Totals(), reading(CARD))
    state = totals.fold_xids(state, (Xid(NOW, 31, UUID), Xid(NOW + 1, 31, UUID)))
    state = totals.fold_xids(state, (kmsg(NOW, 31), kmsg(NOW + 1, 31)))
    assert state.cards[UUID].xids[31].count == 2


def test_events_far_apart_or_of_other_codes_are_no_pair() -> None:
    state = totals.fold(Totals(), reading(CARD))
    state = totals.fold_xids(state, (Xid(NOW, 31, UUID), kmsg(NOW + 1, 13), kmsg(NOW + 11, 31)))
    assert {code: total.count for code, total in state.cards[UUID].xids.items()} == {13: 1, 31: 2}


def test_old_lines_set_only_the_time() -> None:
    state = totals.fold(Totals(), reading(CARD), xid_codes=(79,))
    state = totals.fold_xids(state, (kmsg(NOW - 500, 79, old=True),))
    assert state.cards[UUID].xids == {79: XidTotal(0, NOW - 500)}
    assert state.cards[UUID].last_xid is None
    state = totals.fold_xids(state, (Xid(NOW - 499, 79, UUID),))
    assert state.cards[UUID].xids == {79: XidTotal(1, NOW - 499)}


def test_lines_that_come_before_the_first_reading_wait_for_their_card() -> None:
    state = totals.fold_xids(Totals(), (kmsg(NOW, 79), kmsg(NOW, 43, pci="00000000:86:00.0")))
    assert state.cards == {}
    state = totals.fold(state, reading(CARD))
    assert state.cards[UUID].xids == {79: XidTotal(1, NOW)}
    assert [event.xid for event in state.unplaced_xids] == [43]


def test_waiting_lines_are_bounded_and_the_newest_stay() -> None:
    events = [kmsg(NOW + step, 43) for step in range(1000)]
    state = totals.fold_xids(Totals(), events)
    assert [event.timestamp_seconds for event in state.unplaced_xids] == [
        NOW + step for step in range(936, 1000)
    ]


def test_unpaired_events_are_bounded() -> None:
    state = totals.fold(Totals(), reading(CARD))
    state = totals.fold_xids(state, [Xid(NOW, 31, UUID)] * 1000)
    assert state.cards[UUID].xids[31].count == 1000
    assert len(state.unpaired_xids) == totals.MAX_UNPAIRED


def test_lost_card_still_gets_its_event() -> None:
    state = totals.fold(Totals(), reading(CARD))
    state = totals.fold_xids(totals.fold(state, reading()), (kmsg(NOW, 79),))
    assert state.cards[UUID].xids == {79: XidTotal(1, NOW)}


def mig_card(*instances: tuple[int, int]) -> CardReading:
    slices = tuple(MigSlice(gi, ci, None, None) for gi, ci in instances)
    return replace(CARD, mig_slices=slices)


def test_all_ones_is_the_whole_card_and_an_instance_is_named() -> None:
    events = (Xid(NOW, 94, UUID, None, ALL_ONES, ALL_ONES), Xid(NOW + 1, 94, UUID, None, 9, 0))
    card = totals.fold(Totals(), reading(mig_card((9, 0)), events=events)).cards[UUID]
    assert card.xids[94].count == 2
    assert card.mig_xids == {(94, "9"): XidTotal(1, NOW + 1)}


def test_shared_instance_is_named_with_its_compute_instance() -> None:
    events = (Xid(NOW, 94, UUID, None, 2, 1), Xid(NOW, 31, UUID, None, 2, ALL_ONES))
    card = totals.fold(Totals(), reading(mig_card((2, 0), (2, 1)), events=events)).cards[UUID]
    assert card.mig_xids == {(94, "2/1"): XidTotal(1, NOW), (31, "2"): XidTotal(1, NOW)}


@pytest.mark.parametrize("named_by_kernel", [True, False])
@pytest.mark.parametrize("driver_first", [True, False])
def test_incident_of_an_instance_counts_once_there_too(
    driver_first: bool, named_by_kernel: bool
) -> None:
    now = reading(mig_card((2, 0), (2, 1)))
    driver, kernel = Xid(NOW, 94, UUID, None, 2, 1), kmsg(NOW + 1, 94)
    if named_by_kernel:
        kernel = replace(kernel, gpu_instance=2, compute_instance=1)
    state = totals.fold(Totals(), now)
    for event in (driver, kernel) if driver_first else (kernel, driver):
        state = totals.fold_xids(state, (event,), now)
    card = state.cards[UUID]
    assert card.xids[94].count == 1
    assert {key: total.count for key, total in card.mig_xids.items()} == {(94, "2/1"): 1}


def test_instance_that_is_gone_takes_its_counts_along() -> None:
    event = Xid(NOW, 94, UUID, None, 9, 0)
    state = totals.fold(Totals(), reading(mig_card((9, 0)), events=(event,)))
    state = totals.fold(state, reading(mig_card((2, 0))))
    assert state.cards[UUID].mig_xids == {}
    assert state.cards[UUID].xids[94].count == 1


# --------------------------------------------------------------------------- whole rounds


def test_cards_that_are_not_known_any_more_are_dropped() -> None:
    second = CardReading(CardIdentity(1, OTHER))
    state = totals.fold(Totals(), reading(CARD, second))
    assert set(totals.fold(state, reading(CARD)).cards) == {UUID, OTHER}
    assert set(totals.fold(state, reading(CARD), known={UUID}).cards) == {UUID}


def test_failed_round_changes_no_card() -> None:
    state = totals.fold(Totals(), received(10), xid_codes=(79,))
    failed = Reading(NOW, error=ReaderError("unknown_error", "no card answers"))
    assert totals.fold(state, failed, xid_codes=(79,), known={UUID}) == state


def test_container_seconds_are_left_to_the_usage_fold() -> None:
    key = (0, "ns", "pod", "main", "uid")
    state = totals.fold(Totals(container_core_seconds={key: 5.0}), reading(CARD))
    assert state.container_core_seconds == {key: 5.0}
    assert state.cards[UUID] == CardTotals(pci_bus_id=PCI)
