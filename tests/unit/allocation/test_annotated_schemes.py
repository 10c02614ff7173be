"""Schemes whose card is written in an annotation: gpu-manager, vGPU, gpushare, Koordinator."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

import pytest

from qgpu_exporter.allocation import allocate
from qgpu_exporter.model import Container, Node
from tests.allocation_worlds import (
    GIB,
    MIB,
    NVIDIA,
    asking,
    card,
    card_uuid,
    container,
    kubelet,
    mig,
    mig_uuid,
    node,
    pod,
    problems_of,
    row,
    shares,
    shares_of,
    world,
)

# ------------------------------------------------------------- tkestack gpu-manager

VCUDA = {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "8"}


def vcuda_pod(name: str, assigned: str = "true", **cards: str) -> list[object]:
    annotations = {f"tencent.com/predicate-gpu-idx-{key[1:]}": text for key, text in cards.items()}
    one = pod(
        name,
        container("init", "init", "terminated"),
        container("first"),
        asking(VCUDA, "second"),
        annotations={"tencent.com/gpu-assigned": assigned, **annotations},
    )
    ids = {"tencent.com/vcuda-core": [f"tencent.com/vcuda-core-{n}" for n in range(30)]}
    listed = kubelet(row(name, ids, name="second"))
    result = allocate(world([card(0, minor=1), card(1, minor=0)], [one], listed))
    return [shares(result), [p.kind for p in result.problems], len(result.unassigned_pods)]


def test_gpu_manager_counts_app_containers_and_names_minor_numbers() -> None:
    assert vcuda_pod("p", _1="0") == [[("p", "second", 1, None, 30.0, 2 * GIB)], [], 0]


def test_gpu_manager_s_number_is_no_card_before_it_is_assigned() -> None:
    assert vcuda_pod("p", "false", _1="0") == [[], [], 1]
    assert vcuda_pod("p", _0="0") == [[], [], 1]


def test_gpu_manager_with_a_wrong_card_or_list() -> None:
    assert vcuda_pod("p", _1="7") == [[], ["unknown_card"], 0]
    assert vcuda_pod("p", _1="all") == [[], ["bad_annotation"], 0]


@pytest.mark.parametrize(
    ("core", "memory", "expected"),
    [
        ("200", None, [(100.0, 24 * GIB), (100.0, 24 * GIB)]),
        ("50", None, []),
        ("0", "4", []),
        ("half", "4", []),
    ],
)
def test_gpu_manager_s_requests_that_count(
    core: str, memory: str | None, expected: list[tuple[float, int]]
) -> None:
    asks = {"tencent.com/vcuda-core": core}
    if memory is not None:
        asks["tencent.com/vcuda-memory"] = memory
    annotations = {"tencent.com/gpu-assigned": "true", "tencent.com/predicate-gpu-idx-0": "0,1"}
    one = pod("p", asking(asks), annotations=annotations)
    found = shares_of(world([card(0), card(1)], [one]))
    assert [share[4:] for share in found] == expected


def test_gpu_manager_s_finished_init_container_has_no_place_of_its_own() -> None:
    asks = asking(VCUDA, "main", state="running")
    annotations = {"tencent.com/gpu-assigned": "true", "tencent.com/predicate-gpu-idx-0": "0"}
    one = pod("p", asking(VCUDA, "early", "init"), asks, annotations=annotations)
    assert [share[1] for share in shares_of(world([card(0)], [one]))] == ["main"]


# ------------------------------------------------------------- HAMi

ALLOCATED = "hami.io/vgpu-devices-allocated"
HAMI = {NVIDIA: "1", "nvidia.com/gpumem": "1000"}


def entry(index: int, memory: int, core: int, mark: str = "") -> str:
    return f"{card_uuid(index)}{mark},NVIDIA,{memory},{core}:"


def five_containers(second: dict[str, str]) -> list[Container]:
    names = ["a", "b", "c", "d", "e"]
    return [asking(second, name) if name == "b" else container(name) for name in names]


@pytest.mark.parametrize(
    "text",
    [
        f",,0,0:;{entry(0, 1000, 0)};,,0,0:;,,0,0:;,,0,0:;",
        f";{entry(0, 1000, 0)};;;;",
        f";{entry(0, 1000, 0)};;;",
        # Its slots are shifted, and only one container asks.
        f"{entry(0, 1000, 0)};;,,0,0:;,,0,0:;,,0,0:;",
    ],
)
@pytest.mark.parametrize("resource", [NVIDIA, "nvidia.com/vgpu"])
def test_hami_s_empty_slots_hold_their_place(text: str, resource: str) -> None:
    asks = {resource: "1", "nvidia.com/gpumem": "1000"}
    one = pod("p", *five_containers(asks), annotations={ALLOCATED: text})
    result = allocate(world([card(0)], [one]))
    assert shares(result) == [("p", "b", 0, None, None, 1000 * MIB)]
    assert (result.allocations[0].scheme, result.allocations[0].resource) == ("hami", resource)


def test_hami_s_slots_of_init_containers_differ_by_version() -> None:
    containers = [container("init", "init", "terminated"), asking(HAMI, "x"), container("y")]
    for text in (f";{entry(0, 1000, 20)};;", f"{entry(0, 1000, 20)};;"):
        one = pod("p", *containers, annotations={ALLOCATED: text})
        assert shares_of(world([card(0)], [one])) == [("p", "x", 0, None, 20.0, 1000 * MIB)]


def test_hami_s_renamed_resources_go_by_position() -> None:
    text = f";{entry(0, 1000, 5)};"
    containers = [container("x"), asking({"example.com/vgpu": "1"}, "y")]
    one = pod("p", *containers, annotations={ALLOCATED: text})
    # The kubelet's numbered ids are made up on such a pod: they name another card here.
    listed = kubelet(row("p", {"example.com/vgpu": [f"{card_uuid(1)}-3"]}, name="y"))
    found = shares_of(world([card(0), card(1)], [one], listed))
    assert found == [("p", "y", 0, None, 5.0, 1000 * MIB)]


def test_slots_that_fit_no_containers_are_a_problem() -> None:
    one = pod("p", asking(HAMI, "x"), asking(HAMI, "y"), annotations={ALLOCATED: entry(0, 1, 1)})
    inputs = world([card(0)], [one])
    assert (shares_of(inputs), problems_of(inputs)) == ([], [("bad_annotation", "p", "")])


def test_a_cut_entry_costs_only_its_own_pod() -> None:
    bad = pod("bad", asking(HAMI), annotations={ALLOCATED: f"{card_uuid(0)},NVIDIA:;"})
    good = pod("good", asking(HAMI), annotations={ALLOCATED: f"{entry(0, 2000, 10)};"})
    inputs = world([card(0)], [bad, good])
    assert shares_of(inputs) == [("good", "main", 0, None, 10.0, 2000 * MIB)]
    assert problems_of(inputs) == [("bad_annotation", "bad", "main")]


def test_an_ended_init_container_s_slot_is_no_row() -> None:
    ended = asking(HAMI, "init", "init", "terminated")
    text = f"{entry(0, 1000, 20)};{entry(0, 2000, 30)};"
    one = pod("p", ended, asking(HAMI, "main"), annotations={ALLOCATED: text})
    inputs = world([card(0)], [one])
    assert shares_of(inputs) == [("p", "main", 0, None, 30.0, 2000 * MIB)]


def test_only_what_hami_allocated_counts() -> None:
    both = {
        "hami.io/vgpu-devices-to-allocate": f"{entry(0, 4000, 20)};",
        ALLOCATED: f"{entry(1, 4000, 20)};",
        "hami.io/bind-phase": "success",
        "hami.io/vgpu-node": "node-1",
    }
    one = pod("p", asking(HAMI), annotations=both)
    inputs = world([card(0), card(1)], [one])
    assert shares_of(inputs) == [("p", "main", 1, None, 20.0, 4000 * MIB)]


@pytest.mark.parametrize(
    "annotations",
    [
        {"hami.io/vgpu-devices-to-allocate": f"{entry(0, 4000, 20)};"},
        {ALLOCATED: f"{entry(0, 4000, 20)};", "hami.io/vgpu-node": "node-2"},
        {ALLOCATED: f"{entry(0, 4000, 20)};", "hami.io/bind-phase": "failed"},
        {},
    ],
)
def test_a_plan_another_node_s_or_a_failed_allocation_is_none(annotations: dict[str, str]) -> None:
    one = pod("p", asking(HAMI), annotations=annotations)
    listed = kubelet(row("p", {NVIDIA: [f"{card_uuid(0)}-1"]}))
    result = allocate(world([card(0)], [one], listed))
    assert (shares(result), result.unassigned_pods) == ([], (("demo", "p"),))


def test_entries_of_one_card_are_one_row_and_all_cards_are_told() -> None:
    text = entry(0, 1000, 30) + entry(0, 500, 30) + entry(1, 2000, 0) + entry(7, 1, 1) + ";"
    one = pod("p", asking(HAMI), annotations={ALLOCATED: text})
    inputs = world([card(0), card(1)], [one])
    assert shares_of(inputs) == [
        ("p", "main", 0, None, 60.0, 1500 * MIB),
        ("p", "main", 1, None, None, 2000 * MIB),
    ]
    assert problems_of(inputs) == [("unknown_card", "p", "main")]


def test_memory_that_was_asked_for_and_lost_is_never_zero() -> None:
    asks = {NVIDIA: "1", "nvidia.com/gpumem": "16Gi"}
    one = pod("p", asking(asks), annotations={ALLOCATED: f"{entry(0, 0, 0)};"})
    inputs = world([card(0)], [one])
    assert shares_of(inputs) == [("p", "main", 0, None, None, None)]
    assert problems_of(inputs) == [("bad_annotation", "p", "main")]


MADE = [mig(1, 2, "3g.40gb", compute_slices=3, memory_bytes=40 * GIB), mig(2, 9, "1g.10gb")]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({"migUUID": mig_uuid(1)}, ("2", 300 / 7, 40 * GIB)),
        ({"gpuUUID": card_uuid(0), "gpuInstanceID": 9}, ("9", 100 / 7, 10 * GIB)),
        ({"migUUID": mig_uuid(5)}, (None, 45.0, 10240 * MIB)),
        (None, (None, 45.0, 10240 * MIB)),
    ],
)
def test_hami_s_slices(
    made: dict[str, object] | None, expected: tuple[str | None, float, int]
) -> None:
    annotations = {ALLOCATED: f"{entry(0, 10240, 45, '[1-0]')};"}
    if made is not None:
        made = {"containerIndex": 0, "deviceIndex": 0, **made}
        annotations["hami.io/vgpu-mig-allocations"] = json.dumps([made])
    one = pod("p", asking(HAMI), annotations=annotations)
    # HAMi's own plugin gives the kubelet unnumbered ids of slices that it does not keep to.
    listed = kubelet(row("p", {NVIDIA: [mig_uuid(2)]}))
    result = allocate(world([card(0, slices=MADE)], [one], listed))
    assert shares(result) == [("p", "main", 0, *expected)]
    assert (result.problems, dict(result.conflicts)) == ((), {})


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"containerIndex": "0"}]', "[" * 100_000])
def test_unreadable_slices_leave_the_card(text: str) -> None:
    annotations = {
        ALLOCATED: f"{entry(0, 10240, 45, '[1-0]')};",
        "hami.io/vgpu-mig-allocations": text,
    }
    inputs = world([card(0, slices=MADE)], [pod("p", asking(HAMI), annotations=annotations)])
    assert shares_of(inputs) == [("p", "main", 0, None, 45.0, 10240 * MIB)]
    assert problems_of(inputs) == [("bad_annotation", "p", "")]


def test_a_card_that_kubelet_and_annotation_name_differently_is_a_conflict() -> None:
    one = pod("p", asking(HAMI), annotations={ALLOCATED: f"{entry(1, 4000, 20)};"})
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0)]}))
    result = allocate(world([card(0), card(1)], [one], listed))
    assert shares(result) == [("p", "main", 1, None, 20.0, 4000 * MIB)]
    assert dict(result.conflicts) == {(0, "kubelet_only"): 1, (1, "annotation_only"): 1}
    assert [(p.kind, p.pod) for p in result.problems] == [("card_conflict", "p")]
    agreeing = kubelet(row("p", {NVIDIA: [f"{card_uuid(1)}::0"]}))
    assert allocate(world([card(0), card(1)], [one], agreeing)).conflicts == {}


# ------------------------------------------------------------- Volcano vGPU

VGPU = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "100"}


def test_volcano_vgpu_counts_memory_by_its_factor_and_ends_without_semicolon() -> None:
    text = f"{entry(0, 100, 25)};;{entry(1, 50, 0)}"
    containers = [asking(VGPU, "x"), container("y"), asking(VGPU, "z")]
    one = pod("p", *containers, annotations={"volcano.sh/vgpu-ids-new": text})
    ids = {"volcano.sh/vgpu-number": [f"{card_uuid(1)}-0"]}
    inputs = world([card(0), card(1)], [one], kubelet(row("p", ids, name="x")))
    assert shares_of(replace(inputs, volcano_memory_factor=10)) == [
        ("p", "x", 0, None, 25.0, 1000 * MIB),
        ("p", "z", 1, None, None, 500 * MIB),
    ]


def test_volcano_vgpu_of_another_node() -> None:
    annotations = {
        "volcano.sh/vgpu-ids-new": f"{entry(0, 100, 25)}",
        "volcano.sh/vgpu-node": "node-2",
    }
    result = allocate(world([card(0)], [pod("p", asking(VGPU), annotations=annotations)]))
    assert (result.allocations, result.unassigned_pods) == ((), (("demo", "p"),))


# ------------------------------------------------------------- Volcano gpushare


def gpushare(text: str | None, *containers: Container) -> list[object]:
    annotations = {"volcano.sh/gpu-index": text} if text is not None else {}
    one = pod("p", *containers, annotations=annotations)
    inputs = world([card(0, minor=1), card(1, minor=0)], [one])
    result = allocate(inputs)
    return [
        [share[1:] for share in shares(result)],
        [problem.kind for problem in result.problems],
        len(result.unassigned_pods),
    ]


def test_volcano_gpushare() -> None:
    memory = {"volcano.sh/gpu-memory": "2048"}
    shared = [("a", 1, None, None, 2 * GIB), ("b", 1, None, None, 2 * GIB)]
    assert gpushare("1", asking(memory, "a"), asking(memory, "b")) == [shared, [], 0]
    both = asking({"volcano.sh/gpu-number": "2"}, "a")
    whole = [("a", 0, None, 100.0, 24 * GIB), ("a", 1, None, 100.0, 24 * GIB)]
    assert gpushare("0,1", both, container("b")) == [whole, [], 0]
    assert gpushare(None, both) == [[], [], 1]
    assert gpushare("9", both) == [[], ["unknown_card"], 0]
    assert gpushare("?", both) == [[], ["bad_annotation"], 0]
    assert gpushare("0", asking({"volcano.sh/gpu-memory": "1.5"})) == [[], ["bad_quantity"], 0]
    assert gpushare("0", asking({"volcano.sh/gpu-memory": "0"})) == [[], [], 0]
    one = asking({"volcano.sh/gpu-number": "1"}, "b")
    one_each = [asking({"volcano.sh/gpu-number": "1"}, "a"), one]
    assert gpushare("0,1", *one_each) == [[], ["ambiguous_card"] * 2, 0]


# ------------------------------------------------------------- Alibaba gpushare


def aliyun(
    annotations: dict[str, str],
    *containers: Container,
    of_node: Node | None = None,
    unit: Literal["auto", "GiB", "MiB"] = "GiB",
) -> list[object]:
    one = pod("p", *containers, annotations=annotations)
    inputs = world([card(0, minor=1), card(1, minor=0)], [one], of_node=of_node)
    result = allocate(replace(inputs, gpushare_memory_unit=unit))
    return [
        [share[1:] for share in shares(result)],
        [problem.kind for problem in result.problems],
        len(result.unassigned_pods),
    ]


def units(count: str, name: str = "main", core: str | None = None) -> Container:
    core_asked = {"aliyun.com/gpu-core.percentage": core} if core else {}
    return asking({"aliyun.com/gpu-mem": count, **core_asked}, name)


FIRST = {"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}


def test_the_older_aliyun_scheduler_names_one_minor_number_for_the_pod() -> None:
    expected = [("a", 1, None, None, 2 * GIB), ("b", 1, None, None, 3 * GIB)]
    assert aliyun(FIRST, units("2", "a"), units("3", "b")) == [expected, [], 0]
    waiting = {**FIRST, "ALIYUN_COM_GPU_MEM_ASSIGNED": "false"}
    assert aliyun(waiting, units("2")) == [[], [], 1]
    assert aliyun({}, units("2")) == [[], [], 1]
    assert aliyun({**FIRST, "ALIYUN_COM_GPU_MEM_IDX": "-1"}, units("2")) == [
        [],
        ["bad_annotation"],
        0,
    ]
    assert aliyun({**FIRST, "ALIYUN_COM_GPU_MEM_IDX": "5"}, units("2")) == [[], ["unknown_card"], 0]
    assert aliyun(FIRST, units("some")) == [[], ["bad_quantity"], 0]
    assert aliyun(FIRST, units("0")) == [[], [], 0]


MEMORY = "scheduler.framework.gpushare.allocation"
CORE = "gpushare.alibabacloud.com/core-percentage"


def test_the_newer_aliyun_scheduler_names_amounts_by_position_and_card() -> None:
    by_container = {MEMORY: '{"0":{"1":1},"1":{"0":7,"1":2}}', CORE: '{"0":{"1":50}}'}
    containers = [container("init", "init", "terminated"), units("1", "a", "50"), units("9", "b")]
    assert aliyun(by_container, *containers) == [
        [
            ("a", 0, None, 50.0, GIB),
            ("b", 0, None, None, 2 * GIB),
            ("b", 1, None, None, 7 * GIB),
        ],
        [],
        0,
    ]
    assert aliyun({MEMORY: '{"1":{"0":7}}'}, units("1", "a"), units("7", "b")) == [
        [("b", 1, None, None, 7 * GIB)],
        [],
        1,
    ]
    assert aliyun({MEMORY: '{"0":{"4":7}}'}, units("7")) == [[], ["unknown_card"], 0]
    waiting = {MEMORY: '{"0":{"0":7}}', "scheduler.framework.gpushare.assigned": "false"}
    assert aliyun(waiting, units("7")) == [[], [], 1]
    ended = replace(units("7"), kind="ephemeral")
    assert aliyun({MEMORY: '{"0":{"0":7}}'}, ended) == [[], [], 0]


@pytest.mark.parametrize("text", ["", "[]", '{"0": 1}', '{"a": {}}', '{"0":{"0":"x"}}'])
def test_an_unreadable_allocation_is_a_problem(text: str) -> None:
    assert aliyun({MEMORY: text}, units("7")) == [[], ["bad_annotation"], 0]


@pytest.mark.parametrize(
    ("capacity", "card_units", "unit"),
    [
        ({"aliyun.com/gpu-mem": "48", "aliyun.com/gpu-count": "2"}, None, GIB),
        ({"aliyun.com/gpu-mem": "24576", "aliyun.com/gpu-count": "1"}, None, MIB),
        ({}, "24", GIB),
        ({"aliyun.com/gpu-mem": "x"}, "24576", MIB),
        ({}, None, None),
        ({"aliyun.com/gpu-mem": "500", "aliyun.com/gpu-count": "2"}, None, None),
    ],
)
def test_aliyun_s_unit_of_memory_is_inferred(
    capacity: dict[str, str], card_units: str | None, unit: int | None
) -> None:
    annotations = {**FIRST, **({"ALIYUN_COM_GPU_MEM_DEV": card_units} if card_units else {})}
    of_node = replace(node(), capacity=capacity)
    memory = 2 * unit if unit else None
    problems = [] if unit else ["memory_unit"]
    found = aliyun(annotations, units("2"), of_node=of_node, unit="auto")
    assert found == [[("main", 1, None, None, memory)], problems, 0]
    assert aliyun(annotations, units("2"), of_node=of_node, unit="MiB")[0] == [
        ("main", 1, None, None, 2 * MIB)
    ]


# ------------------------------------------------------------- Koordinator

DEVICES = "scheduling.koordinator.sh/device-allocated"


def koordinator(
    text: str | None, *containers: Container, listed: dict[str, list[str]] | None = None
) -> list[object]:
    one = pod("p", *containers, annotations={} if text is None else {DEVICES: text})
    rows = kubelet(*([row("p", listed)] if listed else []))
    result = allocate(world([card(0, minor=1), card(1, minor=0)], [one], rows))
    return [
        [share[1:] for share in shares(result)],
        [problem.kind for problem in result.problems],
        len(result.unassigned_pods),
    ]


def allocated(**minors: dict[str, str]) -> str:
    gpus = [
        {"minor": int(key[1:]), "resources": {f"koordinator.sh/{n}": v for n, v in value.items()}}
        for key, value in minors.items()
    ]
    return json.dumps({"gpu": gpus, "rdma": [{"minor": 0}]})


def percent(core: str, ratio: str, name: str = "main") -> Container:
    asks = {"koordinator.sh/gpu-core": core, "koordinator.sh/gpu-memory-ratio": ratio}
    return asking(asks, name)


HALF = {"gpu-core": "50", "gpu-memory": "11520Mi", "gpu-memory-ratio": "50"}
ALL = {"gpu-core": "100", "gpu-memory-ratio": "100"}


def test_koordinator_names_minor_numbers_for_the_pod() -> None:
    assert koordinator(allocated(_1=HALF), percent("50", "50")) == [
        [("main", 0, None, 50.0, 11520 * MIB)],
        [],
        0,
    ]
    shared = [("a", 0, None, 20.0, 24 * GIB // 5), ("b", 0, None, 30.0, 24 * GIB * 3 // 10)]
    both = [percent("20", "20", "a"), percent("30", "30", "b")]
    assert koordinator(allocated(_1=HALF), *both) == [shared, [], 0]
    assert koordinator(allocated(_1=ALL, _0=ALL), *both) == [[], ["ambiguous_card"] * 2, 0]


def test_koordinator_s_whole_cards_by_any_name() -> None:
    whole = [("main", 0, None, 100.0, 24 * GIB), ("main", 1, None, 100.0, 24 * GIB)]
    for name, count in (("nvidia.com/gpu", "2"), ("koordinator.sh/gpu", "200")):
        found = koordinator(allocated(_1=ALL, _0=ALL), asking({name: count}))
        assert found == [whole, [], 0]


def test_koordinator_and_the_kubelet_disagree() -> None:
    found = koordinator(allocated(_1=ALL), asking({NVIDIA: "1"}), listed={NVIDIA: [card_uuid(1)]})
    assert found == [[("main", 0, None, 100.0, 24 * GIB)], ["card_conflict"], 0]


def test_koordinator_s_unreadable_or_missing_annotation() -> None:
    asks = percent("50", "50")
    assert koordinator(None, asks) == [[], [], 1]
    assert koordinator('{"rdma": []}', asks) == [[], [], 1]
    assert koordinator(allocated(_9=HALF), asks) == [[], ["unknown_card"], 0]
    for text in ("?", "[]", '{"gpu": {}}', '{"gpu": [{"minor": "0"}]}', '{"gpu": [1]}'):
        assert koordinator(text, asks) == [[], ["bad_annotation"], 0]
    assert koordinator(allocated(_1=HALF), percent("x", "1")) == [[], ["bad_quantity"], 0]
    assert koordinator(allocated(_1=HALF), container()) == [[], [], 0]
    assert koordinator(allocated(_1=HALF), percent("0", "0")) == [[], [], 0]


def test_text_that_no_page_can_carry_is_quoted_in_problems() -> None:
    half_a_pair = '{"gpu": "\\ud800"}'
    one = pod("p", percent("50", "50"), annotations={DEVICES: half_a_pair})
    (problem,) = allocate(world([card(0)], [one])).problems
    assert problem.detail == "not a JSON list: '\\ud800'"


def test_koordinator_s_init_container_has_what_it_asks_of_the_pod_s_card() -> None:
    asks = {"koordinator.sh/gpu-core": "10", "koordinator.sh/gpu-memory": "1Gi"}
    found = koordinator(allocated(_1=HALF), asking(asks, "warm", "init"), percent("50", "50"))
    assert found[0] == [
        ("main", 0, None, 50.0, 11520 * MIB),
        ("warm", 0, None, 10.0, GIB),
    ]
