"""What a MIG slice's own readings say about its holder, and when they say nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qgpu_exporter.model import Memory, Profiling
from tests.usage_worlds import (
    MIB,
    Use,
    card,
    cgroup,
    core,
    held,
    memory_mib,
    mig_slice,
    pod,
    pods,
    remainder,
    row,
    uid,
    use_of,
)

LISTED = pods(pod("a", 1), pod("b", 2))
NAMES = {11: cgroup(uid(1), 1), 12: cgroup(uid(2), 2)}


def test_the_one_holder_uses_what_its_slice_does_in_percent_of_the_card() -> None:
    slices = [
        mig_slice(1, "3g.40gb", 26, engine=0.7, sm=0.5),
        mig_slice(2, "1g.10gb", 9, engine=0.28),
        mig_slice(3, "1g.10gb+me", 9, engine=0.14),
    ]
    one = card(0, [], used_mib=59, slices=slices, window=False)
    assert one.reading is not None
    one = replace(one, reading=replace(one.reading, profiling=Profiling(5.0, 0.4)))
    rows = [
        held("a", mig="1", exclusive=True),
        held("b", mig="2", exclusive=True),
        held("b", mig="3", exclusive=True),
    ]
    result = use_of([one], {}, LISTED, rows)
    assert core(result) == {(0, "a", "c"): 30.0, (0, "b", "c"): 6.0}
    assert remainder(result).core_percent == 4.0
    # The process lists say that nobody holds memory; what the slices keep is nobody's.
    assert memory_mib(result) == {(0, "a", "c"): 0, (0, "b", "c"): 0}
    assert remainder(result).memory_bytes == 59 * MIB
    # Their readings need no other source.
    without = use_of([one], None, LISTED, rows)
    assert core(without) == core(result)
    assert memory_mib(without) == {(0, "a", "c"): 26, (0, "b", "c"): 18}
    assert remainder(without).memory_bytes == 15 * MIB
    assert remainder(without).containers_without_allocation is None


def test_the_share_of_a_card_with_four_slices() -> None:
    one = card(0, [], slices=[mig_slice(1, "2g.12gb", 0, sm=0.5)])
    assert one.reading is not None
    one = replace(one, reading=replace(one.reading, mig_compute_slices=4))
    result = use_of([one], {}, LISTED, [held("a", mig="1", exclusive=True)])
    assert core(result) == {(0, "a", "c"): 25.0}


def test_memory_of_processes_on_slices() -> None:
    slices = [mig_slice(1, "3g.40gb", 1100), mig_slice(2, "1g.10gb", 600)]
    uses = [Use(11, 1000, gi=1), Use(11, 200, gi=2), Use(12, 300, gi=2)]
    rows = [held("a", mig="1", exclusive=True), held("b", mig="2", exclusive=True)]
    result = use_of([card(0, uses, used_mib=1700, slices=slices)], NAMES, LISTED, rows)
    assert memory_mib(result) == {(0, "a", "c"): 1200, (0, "b", "c"): 300}
    assert (row(result, "a").processes, row(result, "b").processes) == (1, 1)
    assert remainder(result).memory_bytes == 200 * MIB


def test_where_processes_memory_is_not_told_the_slices_serves_its_holder() -> None:
    slices = [mig_slice(1, "3g.40gb", 1100)]
    rows = [held("a", mig="1", exclusive=True)]
    one = card(0, [Use(11, None, gi=1)], used_mib=1200, slices=slices)
    result = use_of([one], NAMES, LISTED, rows)
    assert memory_mib(result) == {(0, "a", "c"): 1100}
    assert remainder(result).memory_bytes == 100 * MIB


def test_no_profiling_no_core_usage() -> None:
    slices = [mig_slice(1, "3g.40gb", 26), mig_slice(2, "2g.20gb", 17)]
    one = card(0, [Use(11, 10, gi=1, sm=None)], slices=slices)
    result = use_of([one], NAMES, LISTED, [held("a", mig="1", exclusive=True)])
    assert core(result) == {(0, "a", "c"): None}
    assert row(result, "a").core_seconds is None
    assert remainder(result).core_percent is None


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan"), float("inf")])
def test_an_impossible_ratio_is_no_reading(ratio: float) -> None:
    slices = [mig_slice(1, "3g.40gb", 26, engine=ratio)]
    result = use_of([card(0, [], slices=slices)], {}, LISTED, [held("a", mig="1", exclusive=True)])
    assert core(result) == {(0, "a", "c"): None}


def test_a_shared_slice_tells_nothing_of_either() -> None:
    slices = [mig_slice(1, "3g.40gb", 26, engine=0.5)]
    rows = [held("a", mig="1"), held("b", mig="1")]
    result = use_of([card(0, None, slices=slices)], {}, LISTED, rows)
    assert result.containers == ()
    assert remainder(use_of([card(0, [], slices=slices)], {}, LISTED, rows)).core_percent is None


def test_a_replica_of_a_slice_tells_nothing_even_while_it_is_alone() -> None:
    slices = [mig_slice(1, "3g.40gb", 26, engine=0.5)]
    result = use_of([card(0, None, slices=slices)], {}, LISTED, [held("a", mig="1")])
    assert result.containers == ()


def test_somebody_else_on_the_slice() -> None:
    slices = [mig_slice(1, "3g.40gb", 1100, engine=0.5)]
    rows = [held("a", mig="1", exclusive=True)]
    for uses, names in (
        ([Use(11, 10, gi=1), Use(12, 20, gi=1)], NAMES),
        ([Use(99, 20, gi=1)], {}),
    ):
        result = use_of([card(0, uses, slices=slices)], names, LISTED, rows)
        assert core(result)[0, "a", "c"] is None


def test_two_compute_instances_of_one_holder() -> None:
    memory = Memory(40448 * MIB, 100 * MIB)
    first = replace(mig_slice(1, "1c.3g.40gb", 0, engine=0.7), memory=memory)
    second = replace(mig_slice(1, "2c.3g.40gb", 0, ci=1, engine=0.7), memory=memory)
    one = card(0, None, used_mib=120, slices=[first, second])
    mine = [held("a", mig="1/0", exclusive=True), held("a", mig="1/1", exclusive=True)]
    result = use_of([one], {}, LISTED, mine)
    # The instance's readings are one for both.
    assert core(result) == {(0, "a", "c"): 30.0}
    assert memory_mib(result) == {(0, "a", "c"): 100}
    others = [held("a", mig="1/0", exclusive=True), held("b", mig="1/1", exclusive=True)]
    assert use_of([one], {}, LISTED, others).containers == ()


def test_a_holder_of_a_slice_that_says_nothing_and_one_that_does() -> None:
    slices = [mig_slice(1, "3g.40gb", 26, engine=0.7), mig_slice(2, "1g.10gb", 9)]
    rows = [held("a", mig="1", exclusive=True), held("a", mig="2", exclusive=True)]
    result = use_of([card(0, [], slices=slices)], {}, LISTED, rows)
    assert core(result) == {(0, "a", "c"): None}


def test_a_card_in_mig_mode_ignores_process_utilisation() -> None:
    slices = [mig_slice(1, "3g.40gb", 26)]
    one = card(0, [Use(11, 10, 40, gi=1)], gpu=90, slices=slices)
    result = use_of([one], NAMES, LISTED, [held("a", mig="1", exclusive=True)])
    assert core(result) == {(0, "a", "c"): None}
    assert row(result, "a").encoder_percent is None
    assert remainder(result).core_percent is None


def test_a_profile_that_names_nothing_falls_back_on_the_compute_slices() -> None:
    known = replace(mig_slice(1, "2g.20gb", 0, engine=0.7), profile=None)
    unknown = replace(known, compute_slices=None)
    rows = [held("a", mig="1", exclusive=True)]
    assert core(use_of([card(0, [], slices=[known])], {}, LISTED, rows)) == {(0, "a", "c"): 20.0}
    assert core(use_of([card(0, [], slices=[unknown])], {}, LISTED, rows)) == {(0, "a", "c"): None}
