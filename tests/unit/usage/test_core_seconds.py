"""How the seconds of a whole card add up, and which of them are kept."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from qgpu_exporter.model import (
    AllocationResult,
    CgroupNames,
    PodList,
    ProcessSample,
    Snapshot,
    Totals,
)
from qgpu_exporter.usage import fold_core_seconds
from tests.usage_worlds import (
    START_US,
    Use,
    card,
    cgroup,
    held,
    mig_slice,
    pod,
    pods,
    reading,
    uid,
    with_window,
)

SECOND_US = 1_000_000
LISTED = pods(pod("a", 1), pod("b", 2))
NAMES = {11: cgroup(uid(1), 1), 12: cgroup(uid(2), 2)}
A = (0, "demo", "a", "c", uid(1))
B = (0, "demo", "b", "c", uid(2))


def fold(
    totals: Totals,
    since: float,
    until: float,
    *samples: tuple[int, float, float | None],
    names: Mapping[int, CgroupNames] | None = None,
    listed: PodList | None = LISTED,
) -> Totals:
    """One round of card 0; times in seconds from `START_US`, samples as (pid, time, ratio)."""
    given = [ProcessSample(pid, START_US + int(at * 1e6), ratio) for pid, at, ratio in samples]
    one = with_window(card(0), START_US + int(since * 1e6), START_US + int(until * 1e6), *given)
    return fold_core_seconds(totals, reading(one), NAMES if names is None else names, listed)


def seconds(totals: Totals) -> Mapping[tuple[int, str, str, str, str], float]:
    return {key: round(value, 6) for key, value in totals.container_core_seconds.items()}


def test_a_sample_speaks_of_the_time_since_the_one_before() -> None:
    totals = fold(Totals(), 0, 5, (11, 5, 0.5), (12, 4, 0.25))
    assert seconds(totals) == {A: 2.5, B: 1.0}
    totals = fold(totals, 5, 10, (11, 6, 1.0), (11, 10, 0.5), (12, 10, 0.0))
    assert seconds(totals) == {A: 5.5, B: 1.0}


def test_a_round_without_samples_adds_nothing() -> None:
    totals = fold(Totals(), 0, 5, (11, 5, 0.5))
    assert seconds(fold(totals, 5, 10)) == {A: 2.5}


def test_after_an_idle_stretch_a_sample_counts_for_one_round_at_most() -> None:
    totals = fold(Totals(), 0, 5, (11, 5, 0.5))
    totals = fold(totals, 5, 600)
    # The reader may name its newest sample as the window's beginning: nobody measured so long.
    assert seconds(fold(totals, 5, 605, (11, 605, 1.0))) == {A: 8.5}


def test_the_first_round_without_a_beginning_adds_nothing() -> None:
    one = with_window(card(0), 0, START_US, ProcessSample(11, START_US, 1.0))
    totals = fold_core_seconds(Totals(), reading(one), NAMES, LISTED)
    assert seconds(totals) == {A: 0.0}
    assert seconds(fold(totals, 0, 5, (11, 5, 1.0))) == {A: 5.0}


def test_repeated_and_impossible_samples_add_nothing() -> None:
    totals = fold(Totals(), 0, 5, (11, 0, 1.0), (11, 5, 0.5), (11, 5, 0.5), (12, 5, 7.0))
    assert seconds(totals) == {A: 2.5, B: 0.0}
    assert seconds(fold(totals, 5, 10, (11, 10, None))) == {A: 2.5, B: 0.0}


def test_a_clock_set_back_never_takes_away() -> None:
    totals = fold(Totals(), 1000, 1005, (11, 1005, 1.0))
    totals = fold(totals, 0, 5, (11, 5, 1.0))
    assert seconds(totals) == {A: 10.0}
    assert seconds(fold(totals, 10, 9, (11, 10.5, 1.0)))[A] >= 10.0


def test_processes_of_no_container_add_nothing() -> None:
    assert seconds(fold(Totals(), 0, 5, (13, 5, 1.0))) == {}
    names = {13: CgroupNames(owner_kind="systemd", owner="x.service")}
    assert seconds(fold(Totals(), 0, 5, (13, 5, 1.0), names=names)) == {}


def test_a_failing_source_of_processes_loses_only_its_rounds() -> None:
    totals = fold(Totals(), 0, 5, (11, 5, 1.0))
    one = with_window(
        card(0),
        START_US + 5 * SECOND_US,
        START_US + 10 * SECOND_US,
        ProcessSample(11, START_US + 10 * SECOND_US, 1.0),
    )
    totals = fold_core_seconds(totals, reading(one), None, LISTED)
    assert seconds(fold(totals, 10, 15, (11, 15, 1.0))) == {A: 10.0}


def test_pods_that_are_gone_are_dropped_and_do_not_come_back() -> None:
    totals = fold(Totals(), 0, 5, (11, 5, 1.0), (12, 5, 1.0))
    totals = fold(totals, 5, 10, (11, 10, 1.0), (12, 10, 1.0), listed=pods(pod("b", 2)))
    assert seconds(totals) == {B: 10.0}
    recreated = pods(pod("a", 9), pod("b", 2))
    totals = fold(totals, 10, 15, (11, 15, 1.0), listed=recreated)
    assert seconds(totals) == {B: 10.0}


def test_while_the_pods_are_not_known_nothing_changes() -> None:
    totals = fold(Totals(), 0, 5, (11, 5, 1.0))
    assert seconds(fold(totals, 5, 10, (11, 10, 1.0), listed=None)) == {A: 5.0}


def test_each_card_counts_for_itself() -> None:
    cards = [card(0, [Use(11, 1, 100)]), card(1, [Use(11, 1, 50)])]
    totals = fold_core_seconds(Totals(), reading(*cards), NAMES, LISTED)
    assert seconds(totals) == {A: 4.999, (1, *A[1:]): 2.4995}


@pytest.mark.parametrize(("known", "expected"), [(True, {A: 1.5}), (False, {})])
def test_a_slice_counts_for_its_one_holder(
    known: bool, expected: Mapping[tuple[int, str, str, str, str], float]
) -> None:
    one = card(0, [Use(11, 1, gi=1)], slices=[mig_slice(1, "3g.40gb", 26, engine=0.7)])
    rows = AllocationResult((held("a", mig="1", exclusive=True),))
    snapshot = Snapshot("n", 0.0, allocation=rows)
    totals = fold_core_seconds(Totals(), reading(one), NAMES, LISTED, snapshot if known else None)
    assert seconds(totals) == expected


def test_a_slice_that_others_use_too_counts_for_nobody() -> None:
    one = card(0, [Use(12, 1, gi=1)], slices=[mig_slice(1, "3g.40gb", 26, engine=0.7)])
    rows = AllocationResult((held("a", mig="1", exclusive=True),))
    totals = fold_core_seconds(
        Totals(), reading(one), NAMES, LISTED, Snapshot("n", 0.0, allocation=rows)
    )
    assert seconds(totals) == {}


def test_churn_leaves_no_trace() -> None:
    totals = Totals()
    for at in range(200):
        pids = range(1000 + 50 * at, 1050 + 50 * at)
        names = {pid: cgroup(uid(1), 1) for pid in pids}
        totals = fold(totals, at, at + 1, *((pid, at + 1, 0.01) for pid in pids), names=names)
    assert seconds(totals) == {A: 100.0}
    assert len(totals.cards) == 1
