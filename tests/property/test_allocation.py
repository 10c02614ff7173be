"""Allocations of any node that mixes all schemes: order, duplicates, sums, names, the dead."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from qgpu_exporter.allocation import AllocationInputs, allocate, card_totals
from qgpu_exporter.model import (
    Card,
    ClaimDevice,
    Container,
    ContainerKind,
    ContainerState,
    KubeletContainer,
    Pod,
    SliceDevice,
)
from tests.allocation_worlds import (
    NVIDIA,
    QGPU_CARD,
    QGPU_CORE,
    QGPU_MEMORY,
    asking,
    card,
    card_uuid,
    container,
    kubelet,
    mig,
    mig_uuid,
    node,
    pod,
    row,
    world,
)

DRIVER = "gpu.nvidia.com"

Made = tuple[Pod, list[KubeletContainer]]
"""A pod, and what the kubelet lists for it."""
Maker = Callable[[str, int, int], Made]
"""(pod name, card index, percent of core that is still free there) -> a pod that takes it."""


def _alone(
    name: str, asks: Container, annotations: dict[str, str], *rows: KubeletContainer
) -> Made:
    return pod(name, asks, annotations=annotations), list(rows)


def _qgpu(name: str, index: int, core: int) -> Made:
    asks = asking({QGPU_CORE: str(core), QGPU_MEMORY: "1"})
    return _alone(name, asks, {QGPU_CARD + "main": str(index)}, row(name, {QGPU_CORE: ["0-00"]}))


def _elastic(name: str, index: int, core: int) -> Made:
    asks = asking({"elasticgpu.io/gpu-core": str(core), "elasticgpu.io/gpu-memory": "64"})
    return _alone(name, asks, {"elasticgpu.io/container-main": str(index)})


def _gpu_manager(name: str, index: int, core: int) -> Made:
    asks = asking({"tencent.com/vcuda-core": str(core), "tencent.com/vcuda-memory": "1"})
    annotations = {
        "tencent.com/gpu-assigned": "true",
        "tencent.com/predicate-gpu-idx-0": str(index),
    }
    return _alone(name, asks, annotations)


def _hami(name: str, index: int, core: int) -> Made:
    asks = asking({NVIDIA: "1", "nvidia.com/gpumem": "64", "nvidia.com/gpucores": str(core)})
    allocated = {"hami.io/vgpu-devices-allocated": f"{card_uuid(index)},NVIDIA,64,{core}:;"}
    # The kubelet's id is numbered and names any card.
    return _alone(name, asks, allocated, row(name, {NVIDIA: [f"{card_uuid(0)}-{core}"]}))


def _volcano(name: str, index: int, core: int) -> Made:
    asks = asking({"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-cores": str(core)})
    allocated = {"volcano.sh/vgpu-ids-new": f"{card_uuid(index)},NVIDIA,64,{core}:"}
    return _alone(name, asks, allocated)


def _aliyun(name: str, index: int, core: int) -> Made:
    asks = asking({"aliyun.com/gpu-core.percentage": str(core)})
    written = {"gpushare.alibabacloud.com/core-percentage": f'{{"0":{{"{index}":{core}}}}}'}
    return _alone(name, asks, written)


def _koordinator(name: str, index: int, core: int) -> Made:
    asks = asking({"koordinator.sh/gpu-core": str(core)})
    resources = f'{{"koordinator.sh/gpu-core":"{core}"}}'
    gpus = f'{{"gpu":[{{"minor":{index},"resources":{resources}}}]}}'
    return _alone(name, asks, {"scheduling.koordinator.sh/device-allocated": gpus})


def _replica(name: str, index: int, core: int) -> Made:
    rows = row(name, {NVIDIA: [f"{card_uuid(index)}::{core}"]})
    return _alone(name, asking({NVIDIA: "1"}), {}, rows)


SHARING: tuple[Maker, ...] = (
    _qgpu,
    _elastic,
    _gpu_manager,
    _hami,
    _volcano,
    _aliyun,
    _koordinator,
    _replica,
)


def _whole(name: str, index: int) -> Made:
    return _alone(name, asking({NVIDIA: "1"}), {}, row(name, {NVIDIA: [card_uuid(index)]}))


def _claimed(name: str, index: int) -> Made:
    claim = ClaimDevice("demo", f"{name}-claim", DRIVER, "node-1", f"gpu-{index}")
    return _alone(name, container(), {}, row(name, claims=[claim]))


@st.composite
def _cards_and_holders(draw: st.DrawFn) -> tuple[list[Card], list[Made]]:
    """Cards that are whole, shared by any scheme, or cut to slices, each within its 100 percent."""
    cards: list[Card] = []
    made: list[Made] = []
    for index in range(draw(st.integers(1, 4))):
        use = draw(st.sampled_from(["idle", "whole", "claimed", "shared", "mig"]))
        if use == "mig":
            slices = [mig(10 * index + n, n, "1g.10gb") for n in range(draw(st.integers(1, 7)))]
            cards.append(card(index, slices=slices))
            for n in range(draw(st.integers(0, len(slices)))):
                name = f"mig-{index}-{n}"
                rows = row(name, {NVIDIA: [mig_uuid(10 * index + n)]})
                made.append(_alone(name, asking({NVIDIA: "1"}), {}, rows))
            continue
        cards.append(card(index))
        if use == "whole":
            made.append(_whole(f"whole-{index}", index))
        elif use == "claimed":
            made.append(_claimed(f"claimed-{index}", index))
        elif use == "shared":
            free = 100
            for n in range(draw(st.integers(1, 5))):
                core = draw(st.integers(1, 40))
                if core <= free:
                    free -= core
                    maker = draw(st.sampled_from(SHARING))
                    made.append(maker(f"share-{index}-{n}", index, core))
    return cards, made


def _inputs(cards: Sequence[Card], made: Sequence[Made]) -> AllocationInputs:
    slices = tuple(
        SliceDevice(DRIVER, "node-1", f"gpu-{one.identity.index}", "gpu", one.identity.uuid)
        for one in cards
    )
    rows = [one for _, listed in made for one in listed]
    mixed = world(cards, [one for one, _ in made], kubelet(*rows), node())
    return replace(mixed, slices=slices)


@given(_cards_and_holders())
def test_a_valid_node_hands_out_no_more_of_a_card_than_there_is(
    drawn: tuple[list[Card], list[Made]],
) -> None:
    cards, made = drawn
    inputs = _inputs(cards, made)
    result = allocate(inputs)
    assert result.problems == ()
    assert result.conflicts == {}
    assert {one.pod for one in result.allocations} == {one.name for one, _ in made}
    for total in card_totals(result, cards).values():
        assert (total.core_percent or 0) <= 100 + 1e-9
    sums: dict[int, float] = defaultdict(float)
    for allocation in result.allocations:
        sums[allocation.gpu] += allocation.core_percent or 0
    assert all(total <= 100 + 1e-9 for total in sums.values())


@given(_cards_and_holders(), st.randoms(use_true_random=False))
def test_the_order_of_the_inputs_changes_nothing(
    drawn: tuple[list[Card], list[Made]], chance: random.Random
) -> None:
    cards, made = drawn
    inputs = _inputs(cards, made)
    assert inputs.pods is not None
    assert inputs.kubelet is not None
    assert inputs.slices is not None

    def shuffled(rows: KubeletContainer) -> KubeletContainer:
        devices = list(rows.devices.items())
        chance.shuffle(devices)
        return replace(rows, devices=dict(devices))

    def mixed(pods: tuple[Pod, ...]) -> tuple[Pod, ...]:
        return tuple(chance.sample(pods, len(pods)))

    rows = [shuffled(one) for one in inputs.kubelet.containers]
    other = replace(
        inputs,
        cards=tuple(chance.sample(inputs.cards, len(inputs.cards))),
        pods=replace(inputs.pods, pods=mixed(inputs.pods.pods)),
        kubelet=replace(inputs.kubelet, containers=tuple(chance.sample(rows, len(rows)))),
        slices=tuple(chance.sample(inputs.slices, len(inputs.slices))),
    )
    assert allocate(other) == allocate(inputs)


PHASES = st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"])


@given(_cards_and_holders(), st.data())
def test_a_dead_pod_has_no_row(drawn: tuple[list[Card], list[Made]], data: st.DataObject) -> None:
    cards, made = drawn
    dead: set[str] = set()
    changed: list[Made] = []
    for one, rows in made:
        phase = data.draw(PHASES)
        if phase in ("Succeeded", "Failed"):
            dead.add(one.name)
        if data.draw(st.booleans()):
            dead.add(one.name)
            continue_listing = data.draw(st.booleans())
            changed.append((replace(one, name="gone", phase="Failed"), rows * continue_listing))
            continue
        changed.append((replace(one, phase=phase), rows))
    result = allocate(_inputs(cards, changed))
    assert dead.isdisjoint({allocation.pod for allocation in result.allocations})


KINDS: st.SearchStrategy[ContainerKind] = st.sampled_from(["app", "init", "sidecar"])
STATES: st.SearchStrategy[ContainerState | None] = st.sampled_from(
    [None, "waiting", "running", "terminated"]
)


@st.composite
def _containers(draw: st.DrawFn) -> list[Container]:
    count = draw(st.integers(1, 6))
    found = []
    for number in range(count):
        asks = {QGPU_CORE: str(10 + number)} if draw(st.booleans()) else {}
        found.append(
            Container(f"c{number}", draw(KINDS), asks, draw(STATES))  # one share tells its owner
        )
    # A pod lists init containers and sidecars first, in any order among them.
    return sorted(found, key=lambda one: one.kind == "app")


@given(_containers())
def test_a_share_never_goes_to_another_container_of_its_pod(containers: list[Container]) -> None:
    keys = {QGPU_CARD + one.name: "0" for one in containers}
    asked = {one.name: int(one.resources.get(QGPU_CORE, "0")) for one in containers}
    by_name = allocate(world([card(0)], [pod("p", *containers, annotations=keys)], None, node()))
    for allocation in by_name.allocations:
        assert allocation.core_percent == asked[allocation.container]
    holding = {
        one.name
        for one in containers
        if one.resources and (one.kind != "init" or one.state == "running")
    }
    assert {allocation.container for allocation in by_name.allocations} == holding

    # The same shares as HAMi writes them, by position, with or without init containers' slots.
    apps_only = [one for one in containers if one.kind == "app"]
    for placed in (containers, apps_only):
        if {one.name for one in containers if one.resources} != {
            one.name for one in placed if one.resources
        }:
            continue
        slots = "".join(
            f"{card_uuid(0)},NVIDIA,64,{asked[one.name]}:;" if one.resources else ";"
            for one in placed
        )
        hami = [
            replace(one, resources={"nvidia.com/gpumem": "64"} if one.resources else {})
            for one in containers
        ]
        written = {"hami.io/vgpu-devices-allocated": slots}
        by_position = allocate(world([card(0)], [pod("p", *hami, annotations=written)]))
        assert {(a.container, a.core_percent) for a in by_position.allocations} == {
            (name, asked[name]) for name in holding
        }


@given(_cards_and_holders(), st.data())
def test_no_two_rows_of_one_container_on_one_device(
    drawn: tuple[list[Card], list[Made]], data: st.DataObject
) -> None:
    cards, made = drawn
    if not made:
        return
    # One pod with everything that the others have: schemes meet on cards and containers.
    annotations: dict[str, str] = {}
    resources: dict[str, str] = {}
    rows: list[KubeletContainer] = []
    for one, listed in data.draw(st.permutations(made)):
        annotations |= one.annotations
        resources |= one.containers[0].resources
        rows += [replace(listing, pod="all") for listing in listed]
    everything = pod("all", asking(resources), annotations=annotations)
    result = allocate(_inputs(cards, [(everything, rows), *made]))
    keys = Counter((a.gpu, a.mig, a.namespace, a.pod, a.container) for a in result.allocations)
    assert not keys or max(keys.values()) == 1


@given(_cards_and_holders())
def test_no_total_is_told_before_all_pods_are_known(drawn: tuple[list[Card], list[Made]]) -> None:
    cards, made = drawn
    inputs = replace(_inputs(cards, made), pods=None)
    assert card_totals(allocate(inputs), cards) == {}
    assert allocate(inputs).allocations == ()
