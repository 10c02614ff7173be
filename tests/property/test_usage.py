"""Properties of the attribution over random nodes: nothing is lost, doubled, mixed or made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from qgpu_exporter.cgroups import parse
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CgroupNames,
    Container,
    Pod,
    PodList,
    Totals,
    UsageResult,
)
from qgpu_exporter.usage import UsageInputs, attribute, fold_core_seconds
from tests.usage_worlds import (
    ROUND_US,
    START_US,
    Use,
    card,
    cgroup,
    container_id,
    held,
    mig_slice,
    reading,
    uid,
)

T = TypeVar("T")
CARDS = 3
PODS = 4
CONTAINERS = 2
OUTSIDE = ("/", "/init.scope", "/user.slice/user-7.slice", f"/docker/{container_id(99)}")


@dataclass(frozen=True)
class World:
    """A node; each pid has one home, which decides what is right."""

    cards: tuple[Card, ...]
    pods: PodList
    names: dict[int, CgroupNames]
    allocations: tuple[Allocation, ...]

    def use(self, totals: Totals | None = None) -> UsageResult:
        return attribute(
            UsageInputs(
                self.cards,
                AllocationResult(self.allocations),
                self.pods,
                self.names,
                totals or Totals(),
            )
        )


def listed_pod(number: int, phase: str) -> Pod:
    ids = [container_id(10 * number + one) for one in range(CONTAINERS)]
    containers = tuple(
        Container(f"c{one}", state="running", container_id=ids[one]) for one in range(CONTAINERS)
    )
    return Pod("demo", f"p{number}", uid(number), phase, containers=containers)


uses = st.builds(
    Use,
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(0, 3000)),
    st.one_of(st.none(), st.integers(0, 120)),
    st.one_of(st.none(), st.integers(1, 3)),
    st.sampled_from([("compute",), ("graphics",)]),
)
pieces = st.builds(
    mig_slice,
    st.integers(1, 3),
    st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb"]),
    st.integers(0, 900),
    engine=st.one_of(st.none(), st.floats(-0.5, 1.5)),
)
cards_drawn = st.lists(
    st.builds(
        card,
        st.just(0),
        st.one_of(st.none(), st.lists(uses, max_size=8)),
        used_mib=st.one_of(st.none(), st.integers(0, 9000)),
        gpu=st.one_of(st.none(), st.integers(0, 130)),
        slices=st.one_of(
            st.just([]),
            st.lists(pieces, max_size=3, unique_by=lambda piece: piece.gpu_instance),
        ),
        window=st.booleans(),
    ),
    min_size=1,
    max_size=CARDS,
)


def _indexed(drawn: list[Card]) -> tuple[Card, ...]:
    cards = []
    for index, one in enumerate(drawn):
        assert one.reading is not None
        identity = replace(one.identity, index=index, uuid=f"GPU-{index}")
        cards.append(
            replace(one, identity=identity, reading=replace(one.reading, identity=identity))
        )
    return tuple(cards)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    phases = draw(
        st.lists(
            st.sampled_from(["Running", "Running", "Pending", "Succeeded", "gone"]),
            min_size=PODS,
            max_size=PODS,
        )
    )
    pods = [listed_pod(n, phase) for n, phase in enumerate(phases) if phase != "gone"]
    homes = [cgroup(uid(n), 10 * n + c) for n in range(PODS) for c in range(CONTAINERS)]
    homes += [parse(f"0::{path}\n") for path in OUTSIDE]
    names = draw(st.dictionaries(st.integers(1, 12), st.sampled_from(homes)))
    living = [pod.name for pod in pods if pod.phase in ("Running", "Pending")]
    rows = st.builds(
        held,
        st.sampled_from(living),
        st.integers(0, CARDS - 1),
        container=st.sampled_from([f"c{one}" for one in range(CONTAINERS)]),
        mig=st.sampled_from([None, "1", "2", "3"]),
        exclusive=st.booleans(),
    )
    allocations = draw(st.lists(rows, max_size=6)) if living else []
    return World(_indexed(draw(cards_drawn)), PodList(0.0, tuple(pods)), names, tuple(allocations))


@given(worlds())
def test_memory_of_containers_and_the_remainder_is_the_cards(world: World) -> None:
    result = world.use()
    for left in result.remainders:
        rows = [row for row in result.containers if row.gpu == left.gpu]
        used = sum(row.memory_bytes for row in rows if row.memory_bytes is not None)
        reading_ = world.cards[left.gpu].reading
        memory = reading_.memory if reading_ else None
        if left.memory_bytes is not None:
            assert memory is not None
            assert left.memory_bytes >= 0
            assert used + left.memory_bytes == memory.used_bytes
        elif memory is not None and any(row.memory_bytes is not None for row in rows):
            assert used > memory.used_bytes


@given(worlds())
def test_core_is_never_negative_or_scaled(world: World) -> None:
    result = world.use()
    for row in result.containers:
        assert row.core_percent is None or row.core_percent >= 0
    for left in result.remainders:
        reading_ = world.cards[left.gpu].reading
        if left.core_percent is None or reading_ is None:
            continue
        rows = [row for row in result.containers if row.gpu == left.gpu]
        used = sum(row.core_percent for row in rows if row.core_percent is not None)
        ratio = reading_.utilization.gpu_ratio
        assert ratio is not None
        assert ratio <= 1
        assert left.core_percent == round(max(0.0, 100 * ratio - used), 9)


@given(worlds())
def test_each_row_is_once_of_a_living_container_with_something_to_say(world: World) -> None:
    result = world.use()
    living = {
        (pod.name, container.name)
        for pod in world.pods.pods
        if pod.phase in ("Running", "Pending")
        for container in pod.containers
    }
    keys = Counter((row.gpu, row.namespace, row.pod, row.container) for row in result.containers)
    assert all(count == 1 for count in keys.values())
    assert {(pod, container) for _, _, pod, container in keys} <= living
    assert list(keys) == sorted(keys)
    owners = [(row.gpu, row.owner_kind, row.owner) for row in result.host]
    assert owners == sorted(set(owners))


@given(worlds())
def test_each_process_counts_on_each_of_its_cards_once(world: World) -> None:
    result = world.use()
    for one in world.cards:
        if one.reading is None or one.reading.processes is None:
            mine = [row for row in result.host if row.gpu == one.identity.index]
            assert all(row.processes is None and row.memory_bytes is None for row in mine)
            continue
        pids = {process.pid for process in one.reading.processes}
        gpu = one.identity.index
        counted = sum(row.processes or 0 for row in result.containers if row.gpu == gpu)
        counted += sum(row.processes or 0 for row in result.host if row.gpu == gpu)
        assert counted == len(pids)


def _mixed(values: Iterable[T], random: Random) -> tuple[T, ...]:
    given_order = list(values)
    return tuple(random.sample(given_order, len(given_order)))


@given(worlds(), st.randoms(use_true_random=False))
def test_order_does_not_matter(world: World, random: Random) -> None:
    cards = []
    for one in world.cards:
        assert one.reading is not None
        read = one.reading
        if read.processes is not None:
            read = replace(read, processes=_mixed(read.processes, random))
        cards.append(replace(one, reading=read))
    other = World(
        _mixed(cards, random),
        replace(world.pods, pods=_mixed(world.pods.pods, random)),
        dict(_mixed(world.names.items(), random)),
        _mixed(world.allocations, random),
    )
    assert other.use() == world.use()


@given(worlds())
def test_no_process_readings_no_usage_but_a_slices_own(world: World) -> None:
    result = world.use()
    for one in world.cards:
        read = one.reading
        assert read is not None
        if read.processes is None and not read.mig_slices:
            gpu = one.identity.index
            assert not [row for row in result.containers if row.gpu == gpu]
            assert not [row for row in result.remainders if row.gpu == gpu]


@given(st.lists(worlds(), min_size=1, max_size=4))
def test_core_seconds_grow_and_are_bounded_by_living_containers(rounds: list[World]) -> None:
    totals = Totals()
    before = totals.container_core_seconds
    for number, world in enumerate(rounds):
        since = START_US + number * ROUND_US
        cards = []
        for one in world.cards:
            assert one.reading is not None
            window = one.reading.process_window
            if window is not None:
                shift = since - window.since_us
                window = replace(
                    window,
                    since_us=since,
                    until_us=window.until_us + shift,
                    samples=tuple(
                        replace(sample, timestamp_us=sample.timestamp_us + shift)
                        for sample in window.samples
                    ),
                )
            cards.append(replace(one, reading=replace(one.reading, process_window=window)))
        totals = fold_core_seconds(totals, reading(*cards), world.names, world.pods)
        after = totals.container_core_seconds
        alive = {pod.uid for pod in world.pods.pods if pod.phase in ("Running", "Pending")}
        assert {key[-1] for key in after} <= alive
        for key, seconds in after.items():
            # A process keeps at most one card busy for one round; here 12 pids, each once.
            assert before.get(key, 0.0) <= seconds <= before.get(key, 0.0) + 12 * ROUND_US / 1e6
        before = after
