"""Busy seconds whatever the spread of samples over rounds, and their rate for a known load."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from qgpu_exporter import totals
from qgpu_exporter.model import (
    BusyTotal,
    CardIdentity,
    CardReading,
    NvLink,
    Pcie,
    RawCounter,
    Reading,
    Sample,
    SampleBuffer,
    Totals,
)

UUID = "GPU-5a000000-0000-4000-8000-000000000000"
ENTRIES = st.lists(
    st.tuples(st.integers(0, 30_000_000), st.floats(-0.5, 1.5)), min_size=1, max_size=60
)


def sequence(gaps: list[tuple[int, float]]) -> list[Sample]:
    moment, entries = 1_000_000, []
    for gap, ratio in gaps:
        moment += gap
        entries.append(Sample(moment, ratio))
    return entries


@given(ENTRIES, st.lists(st.integers(0, 60)), st.integers(0, 5))
def test_any_spread_over_rounds_gives_the_same_total(
    gaps: list[tuple[int, float]], cuts: list[int], again: int
) -> None:
    """Also where each round repeats some entries of the round before."""
    entries = sequence(gaps)
    whole = totals.integrate(BusyTotal(), entries)
    spread, start = BusyTotal(), 0
    for cut in [*sorted(cuts), len(entries)]:
        spread = totals.integrate(spread, entries[max(0, start - again) : cut])
        start = max(start, min(cut, len(entries)))
    assert spread == whole


@given(ENTRIES)
def test_busy_is_within_covered_and_covered_within_the_time(gaps: list[tuple[int, float]]) -> None:
    entries = sequence(gaps)
    total = totals.integrate(BusyTotal(), entries)
    span_seconds = (entries[-1].timestamp_us - entries[0].timestamp_us) / 1e6
    assert 0 <= total.busy_seconds <= total.covered_seconds + 1e-9
    assert total.covered_seconds <= span_seconds + 1e-9


@given(st.integers(0, 1_999_999), st.sampled_from([1, 2, 5]))
def test_one_second_on_one_second_off_reads_a_half(phase_us: int, round_seconds: int) -> None:
    """Sampled each 1/6 s, scraped each 15 s, its rate over each minute, whatever the phase."""

    def busy_until(moment_us: int) -> int:
        whole, rest = divmod(moment_us + phase_us, 2_000_000)
        return whole * 1_000_000 + min(rest, 1_000_000)

    start_us = 1_000_000_000
    entries = deque(
        Sample(now, (busy_until(now) - busy_until(before)) / (now - before))
        for before, now in pairwise(start_us + step * 1_000_000 // 6 for step in range(6 * 196))
    )
    state, scrapes = Totals(), []
    for second in range(1, 196):
        now_us = start_us + second * 1_000_000
        if second % round_seconds == 0:
            ready = []
            while entries and entries[0].timestamp_us <= now_us:
                ready.append(entries.popleft())
            card = CardReading(CardIdentity(0, UUID), samples=(SampleBuffer("gpu", tuple(ready)),))
            state = totals.fold(state, Reading(now_us / 1e6, cards=(card,)))
        if second % 15 == 0:
            scrapes.append(state.cards[UUID].busy["gpu"])
    assert len(scrapes) == 13
    for first, last in zip(scrapes, scrapes[4:], strict=False):
        assert abs((last.busy_seconds - first.busy_seconds) / 60 - 0.5) <= 0.03
        assert abs((last.covered_seconds - first.covered_seconds) / 60 - 1) <= 0.03


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([32, 64])), min_size=1))
def test_totals_of_counters_never_fall(values: list[tuple[int, int]]) -> None:
    state, before = Totals(), -1
    for value, bits in values:
        raw = RawCounter(value, 32 if bits == 32 else 64)
        card = CardReading(
            CardIdentity(0, UUID),
            pcie=Pcie(received_bytes=raw),
            nvlinks=(NvLink(3, transmitted_bytes=raw), NvLink(4)),
        )
        state = totals.fold(state, Reading(0.0, cards=(card,)))
        counters = state.cards[UUID].counters
        assert set(counters) == {"pcie_received_bytes", "nvlink_3_transmitted_bytes"}
        total = counters["pcie_received_bytes"].total
        assert counters["nvlink_3_transmitted_bytes"].total == total
        assert total >= before
        before = total
