"""Whose pod counts, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qgpu_exporter.allocation import allocate, card_totals
from qgpu_exporter.model import CardAllocated, ClaimDevice, ContainerState, PodList, SliceDevice
from tests.allocation_worlds import (
    GIB,
    NVIDIA,
    QGPU_CARD,
    asking,
    card,
    card_uuid,
    container,
    kubelet,
    node,
    pod,
    qgpu,
    row,
    shares,
    shares_of,
    world,
)

ONE_GPU = {NVIDIA: "1"}
WHOLE = (0, None, 100.0, 24 * GIB)


def held(name: str = "train", **of_row: str) -> list[tuple[object, ...]]:
    return [(name, of_row.get("name", "main"), *WHOLE)]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_finished_pod_holds_nothing_though_the_kubelet_lists_it(phase: str) -> None:
    finished = pod("train", asking(ONE_GPU, state="terminated"), phase=phase)
    listed = kubelet(row("train", {NVIDIA: [card_uuid(0)]}))
    assert shares_of(world([card(0)], [finished], listed)) == []


def test_a_crash_looping_container_keeps_its_card() -> None:
    looping = pod("train", asking(ONE_GPU, state="waiting"))
    listed = kubelet(row("train", {NVIDIA: [card_uuid(0)]}))
    assert shares_of(world([card(0)], [looping], listed)) == held()


def test_a_terminating_pod_holds_until_its_containers_have_ended() -> None:
    listed = kubelet(row("train", {NVIDIA: [card_uuid(0)]}))
    ending = pod("train", asking(ONE_GPU), container("log", state="terminated"), terminating=True)
    assert shares_of(world([card(0)], [ending], listed)) == held()
    ended = pod(
        "train",
        container("prepare", "init", "terminated"),
        asking(ONE_GPU, state="terminated"),
        terminating=True,
    )
    assert shares_of(world([card(0)], [ended], listed)) == []


def test_a_terminating_pod_that_never_started_holds_until_it_is_deleted() -> None:
    never = pod("train", asking(ONE_GPU, state=None), phase="Pending", terminating=True)
    listed = kubelet(row("train", {NVIDIA: [card_uuid(0)]}))
    assert shares_of(world([card(0)], [never], listed)) == held()


def test_a_pod_that_the_api_does_not_list_has_no_row() -> None:
    listed = kubelet(row("gone", {NVIDIA: [card_uuid(0)]}))
    assert shares_of(world([card(0)], [], listed)) == []


def test_a_new_pod_of_the_same_name_inherits_no_row() -> None:
    again = pod("train-0", asking(ONE_GPU), uid="second", first_seen=20.0)
    stale = kubelet(row("train-0", {NVIDIA: [card_uuid(0)]}), asked_at=20.0)
    assert shares_of(world([card(0)], [again], stale)) == []
    fresh = kubelet(row("train-0", {NVIDIA: [card_uuid(0)]}), asked_at=20.001)
    (allocation,) = allocate(world([card(0)], [again], fresh)).allocations
    assert (allocation.pod, allocation.pod_uid) == ("train-0", "second")


def test_of_two_live_pods_of_one_name_the_later_one_counts() -> None:
    on = {QGPU_CARD + "main": "0"}
    before = pod("db-0", qgpu("30"), annotations=on, uid="z-first", first_seen=1.0)
    after = pod("db-0", qgpu("40"), annotations=on, uid="a-second", first_seen=2.0)
    for pods in ([before, after], [after, before]):
        assert shares_of(world([card(0)], pods)) == [("db-0", "main", 0, None, 40.0, None)]
    ended = replace(after, phase="Failed")
    assert shares_of(world([card(0)], [before, ended])) == [("db-0", "main", 0, None, 30.0, None)]


def test_a_part_of_the_pool_of_two_init_containers_is_not_guessed() -> None:
    starting = pod(
        "p",
        asking({NVIDIA: "2"}, "large", "init", "waiting"),
        asking(ONE_GPU, "small", "init"),
        asking(ONE_GPU, state="waiting"),
    )
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0)]}))
    assert shares_of(world([card(0)], [starting], listed)) == [("p", "main", *WHOLE)]
    # The larger one had the whole pool while it ran; of it, the kubelet lists what was handed on.
    large, small, main = starting.containers
    running = (replace(large, state="running"), replace(small, state="waiting"), main)
    found = shares_of(world([card(0)], [replace(starting, containers=running)], listed))
    assert found == [("p", "large", *WHOLE), ("p", "main", *WHOLE)]


def test_a_count_that_cannot_be_read_hands_nothing_on() -> None:
    starting = pod("p", asking({NVIDIA: "one"}, "warm", "init"), asking(ONE_GPU, state="waiting"))
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0)]}))
    assert shares_of(world([card(0)], [starting], listed)) == [("p", "main", *WHOLE)]


def test_without_the_api_the_kubelet_s_list_counts() -> None:
    listed = kubelet(row("train", {NVIDIA: [card_uuid(0)]}))
    inputs = world([card(0)], None, listed)
    assert shares_of(inputs) == held()
    assert allocate(inputs).allocations[0].pod_uid is None
    assert allocate(inputs).complete


def test_before_the_first_pod_list_nothing_is_said() -> None:
    listed = kubelet(row("train", {NVIDIA: [card_uuid(0)]}))
    waiting = replace(world([card(0)], None, listed), pods_expected=True)
    result = allocate(waiting)
    assert (result.allocations, result.complete) == ((), False)
    assert card_totals(result, waiting.cards) == {}


def test_an_overdue_pod_list_leaves_what_the_kubelet_alone_proves() -> None:
    listed = kubelet(
        row("train", {NVIDIA: [card_uuid(0)]}),
        row("share", {"tke.cloud.tencent.com/qgpu-core": [f"{card_uuid(0)}"]}),
    )
    overdue = replace(world([card(0)], None, listed), pods_expected=True, pods_overdue=True)
    result = allocate(overdue)
    assert shares(result) == held()
    assert not result.complete


def test_a_kubelet_that_is_on_and_has_no_answer_leaves_totals_out() -> None:
    sharing = pod("share", qgpu("50", "4"), annotations={QGPU_CARD + "main": "0"})
    inputs = replace(world([card(0)], [sharing], of_node=node()), kubelet_expected=True)
    result = allocate(inputs)
    assert shares(result) == [("share", "main", 0, None, 50.0, 4 * GIB)]
    assert not result.complete


def test_without_any_known_card_there_are_neither_rows_nor_problems() -> None:
    sharing = pod("share", qgpu("50", "4"), annotations={QGPU_CARD + "main": "0"})
    result = allocate(world([], [sharing], of_node=node()))
    assert (result.allocations, result.problems, result.complete) == ((), (), False)


def test_a_plain_init_container_holds_while_it_runs() -> None:
    def at(state: ContainerState) -> list[str]:
        init = qgpu("40", "4", name="warm", kind="init", state=state)
        both = pod(
            "p",
            init,
            qgpu("30", "2"),
            annotations={QGPU_CARD + "warm": "0", QGPU_CARD + "main": "0"},
        )
        return [one[1] for one in shares_of(world([card(0)], [both], of_node=node()))]

    assert at("waiting") == ["main"]
    assert at("running") == ["main", "warm"]
    assert at("terminated") == ["main"]


def test_a_sidecar_holds_as_long_as_its_pod() -> None:
    sides = pod(
        "p",
        qgpu("10", "1", name="warm", kind="init", state="terminated"),
        qgpu("20", "4", name="side", kind="sidecar"),
        container("main"),
        annotations={QGPU_CARD + "warm": "0", QGPU_CARD + "side": "0"},
    )
    assert shares_of(world([card(0)], [sides], of_node=node())) == [
        ("p", "side", 0, None, 20.0, 4 * GIB)
    ]


def test_a_running_init_container_holds_the_card_that_is_listed_under_the_main_one() -> None:
    starting = pod("p", asking(ONE_GPU, "warm", "init"), asking(ONE_GPU, state="waiting"))
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0)]}))
    inputs = world([card(0)], [starting], listed)
    assert shares_of(inputs) == [("p", "main", *WHOLE), ("p", "warm", *WHOLE)]
    totals = card_totals(allocate(inputs), inputs.cards)
    assert totals == {0: CardAllocated(100.0, 24 * GIB, 2)}


def test_a_part_of_a_container_s_cards_is_not_guessed_for_an_init_container() -> None:
    starting = pod("p", asking(ONE_GPU, "warm", "init"), asking({NVIDIA: "2"}, state="waiting"))
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0), card_uuid(1)]}))
    names = [one[1] for one in shares_of(world([card(0), card(1)], [starting], listed))]
    assert names == ["main", "main"]


def test_a_large_init_container_holds_what_several_containers_are_listed_with() -> None:
    starting = pod(
        "p",
        asking(ONE_GPU, "small", "init", "terminated"),
        asking({NVIDIA: "2"}, "large", "init"),
        asking(ONE_GPU, "a", state="waiting"),
        asking(ONE_GPU, "b", state="waiting"),
    )
    listed = kubelet(
        row("p", {NVIDIA: [card_uuid(0)]}, name="a"), row("p", {NVIDIA: [card_uuid(1)]}, name="b")
    )
    found = shares_of(world([card(0), card(1)], [starting], listed))
    assert [one[1:3] for one in found] == [("a", 0), ("large", 0), ("b", 1), ("large", 1)]
    # While the smaller one runs, nobody says which of the two cards it has.
    smaller = replace(
        starting,
        containers=(
            replace(starting.containers[0], state="running"),
            replace(starting.containers[1], state="waiting"),
            *starting.containers[2:],
        ),
    )
    found = shares_of(world([card(0), card(1)], [smaller], listed))
    assert [one[1:3] for one in found] == [("a", 0), ("b", 1)]


def test_a_running_init_container_shares_the_claim_that_the_main_one_is_listed_with() -> None:
    starting = pod("p", container("warm", "init", claims=("p-gpu",)), container(state=None))
    claim = ClaimDevice("demo", "p-gpu", "gpu.nvidia.com", "node-1", "gpu-0")
    listed = kubelet(row("p", claims=[claim]))
    inputs = replace(
        world([card(0)], [starting], listed),
        slices=(SliceDevice("gpu.nvidia.com", "node-1", "gpu-0", "gpu", card_uuid(0)),),
    )
    assert shares_of(inputs) == [("p", "main", *WHOLE), ("p", "warm", *WHOLE)]


def test_an_unlisted_container_of_a_listed_pod_is_not_there() -> None:
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0)]}, name="other"))
    assert shares_of(world([card(0)], [pod("p", asking(ONE_GPU))], listed)) == []


def test_an_ephemeral_container_is_never_a_holder_and_never_keeps_a_pod() -> None:
    ended = pod(
        "p",
        asking(ONE_GPU, state="terminated"),
        container("debug", "ephemeral", "running"),
        terminating=True,
    )
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0)]}))
    inputs = world([card(0)], [ended], listed)
    assert shares_of(inputs) == []
    alive = replace(inputs, pods=PodList(0.0, (replace(ended, terminating=False),)))
    assert shares_of(alive) == [("p", "main", *WHOLE)]
