"""Whole cards, MIG slices, replicas, qGPU and elastic-gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qgpu_exporter.allocation import SCHEMES, allocate, card_totals
from qgpu_exporter.model import AllocationResult, CardAllocated, GpuObject
from tests.allocation_worlds import (
    GIB,
    MIB,
    NVIDIA,
    QGPU_CARD,
    QGPU_CORE,
    QGPU_MEMORY,
    asking,
    card,
    card_uuid,
    kubelet,
    mig,
    mig_uuid,
    node,
    pod,
    problems_of,
    qgpu,
    row,
    shares,
    shares_of,
    world,
)


def test_schemes_have_distinct_names_and_the_annotated_ones_come_first() -> None:
    assert len({scheme.name for scheme in SCHEMES}) == len(SCHEMES)
    proofs = [scheme.proof for scheme in SCHEMES]
    assert proofs == sorted(proofs)


# ------------------------------------------------------------- whole cards


def test_whole_cards_of_any_resource() -> None:
    listed = kubelet(
        row("a", {NVIDIA: [card_uuid(1), card_uuid(0)]}),
        row("b", {"example.com/accelerator": [card_uuid(2)]}),
    )
    result = allocate(world([card(0), card(1), card(2, memory_bytes=None)], None, listed))
    assert shares(result) == [
        ("a", "main", 0, None, 100.0, 24 * GIB),
        ("a", "main", 1, None, 100.0, 24 * GIB),
        ("b", "main", 2, None, 100.0, None),
    ]
    assert {(a.scheme, a.exclusive, a.device == a.uuid) for a in result.allocations} == {
        ("whole", True, True)
    }
    assert result.allocations[2].resource == "example.com/accelerator"


def test_a_minor_number_is_not_an_index() -> None:
    listed = kubelet(row("by-file", {NVIDIA: ["nvidia0"]}))
    found = shares_of(world([card(0, minor=4), card(1, minor=0)], None, listed))
    assert found == [("by-file", "main", 1, None, 100.0, 24 * GIB)]


def test_an_id_of_no_card_here_is_a_problem_and_other_devices_are_none() -> None:
    listed = kubelet(
        row(
            "a", {NVIDIA: [card_uuid(9)], "example.com/nic": ["0000:08:00.0", "0-07", "nvidiactl"]}
        ),
        row("b", {NVIDIA: ["nvidia7"]}),
        row("c", {NVIDIA: [card_uuid(0)]}),
    )
    inputs = world([card(0)], None, listed)
    assert shares_of(inputs) == [("c", "main", 0, None, 100.0, 24 * GIB)]
    assert problems_of(inputs) == [("unknown_card", "a", "main"), ("unknown_card", "b", "main")]


def test_the_slices_of_a_silent_card_are_unknown_and_no_problem() -> None:
    listed = kubelet(row("a", {NVIDIA: [mig_uuid(1)]}))
    silent = world([card(0, answers=False)], None, listed)
    assert (shares_of(silent), problems_of(silent)) == ([], [])
    answering = world([card(0)], None, listed)
    assert problems_of(answering) == [("unknown_card", "a", "main")]


def test_a_card_that_never_answered_has_no_name_to_be_found_by() -> None:
    nameless = card(0, answers=False)
    nameless = replace(nameless, identity=replace(nameless.identity, uuid="", minor=None))
    listed = kubelet(row("a", {NVIDIA: ["nvidia0"]}))
    share = pod("b", qgpu("20"), annotations={QGPU_CARD + "main": "0"})
    inputs = world([nameless], [pod("a", asking({NVIDIA: "1"})), share], listed, node())
    assert shares_of(inputs) == [("b", "main", 0, None, 20.0, None)]


def test_a_device_under_two_resources_is_one_row() -> None:
    listed = kubelet(row("a", {NVIDIA: [card_uuid(0)], "example.com/gpu": [card_uuid(0)]}))
    inputs = world([card(0)], None, listed)
    (one,) = allocate(inputs).allocations
    assert (one.resource, problems_of(inputs)) == ("example.com/gpu", [])


def test_a_silent_card_keeps_its_holders() -> None:
    listed = kubelet(row("a", {NVIDIA: [card_uuid(0)]}))
    found = shares_of(world([card(0, answers=False)], None, listed))
    assert found == [("a", "main", 0, None, 100.0, 24 * GIB)]


# ------------------------------------------------------------- MIG


def test_slices_by_uuid_by_place_and_as_gke_spells_them() -> None:
    slices = [
        mig(1, 2, "3g.40gb", compute_slices=3, memory_bytes=40 * GIB),
        mig(2, 3, "2g.20gb", compute_slices=2, memory_bytes=20 * GIB),
        mig(3, 9, "1g.10gb"),
    ]
    listed = kubelet(
        row("uuid", {"nvidia.com/mig-3g.40gb": [mig_uuid(1)]}),
        row("place", {"nvidia.com/mig-2g.20gb": [f"MIG-{card_uuid(0)}/3/0"]}),
        row("gke", {NVIDIA: ["nvidia0/gi9"]}),
    )
    result = allocate(world([card(0, slices=slices)], None, listed))
    assert shares(result) == [
        ("uuid", "main", 0, "2", 100 * 3 / 7, 40 * GIB),
        ("place", "main", 0, "3", 100 * 2 / 7, 20 * GIB),
        ("gke", "main", 0, "9", 100 / 7, 10 * GIB),
    ]
    assert [a.uuid for a in result.allocations] == [mig_uuid(1), mig_uuid(2), mig_uuid(3)]
    assert {(a.scheme, a.exclusive) for a in result.allocations} == {("mig", True)}


def test_compute_instances_of_one_gpu_instance_count_its_memory_once() -> None:
    slices = [
        mig(1, 1, "1c.3g.40gb", compute_instance=0, memory_bytes=40 * GIB),
        mig(2, 1, "2c.3g.40gb", compute_instance=1, compute_slices=2, memory_bytes=40 * GIB),
    ]
    listed = kubelet(row("a", {NVIDIA: [mig_uuid(2)]}), row("b", {NVIDIA: [mig_uuid(1)]}))
    inputs = world([card(0, slices=slices)], None, listed)
    assert shares_of(inputs) == [
        ("b", "main", 0, "1/0", 100 / 7, 40 * GIB),
        ("a", "main", 0, "1/1", 100 * 2 / 7, None),
    ]
    total = card_totals(allocate(inputs), inputs.cards)[0]
    assert total == CardAllocated(100 / 7 + 100 * 2 / 7, 40 * GIB, 2)


def test_replicas_of_compute_instances_have_no_memory_to_count() -> None:
    slices = [mig(1, 1, "1c.3g.40gb"), mig(2, 1, "1c.3g.40gb", compute_instance=1)]
    listed = kubelet(row("a", {NVIDIA: [f"{mig_uuid(1)}::0"]}), row("b", {NVIDIA: [mig_uuid(2)]}))
    assert shares_of(world([card(0, slices=slices)], None, listed)) == [
        ("a", "main", 0, "1/0", None, None),
        ("b", "main", 0, "1/1", 100 / 7, 10 * GIB),
    ]


def test_a_slice_without_uuid_is_named_by_its_place() -> None:
    slices = [mig(1, 5, "1g.10gb", uuid=False)]
    listed = kubelet(row("a", {NVIDIA: ["nvidia0/gi5"]}))
    (found,) = allocate(
        world([card(0, slices=slices, compute_slices=None)], None, listed)
    ).allocations
    assert (found.device, found.uuid) == (f"{card_uuid(0)}/5", f"{card_uuid(0)}/5")
    assert found.core_percent is None


# ------------------------------------------------------------- replicas


def test_time_slicing_guarantees_nothing_and_counts_a_card_once_a_container() -> None:
    listed = kubelet(
        row("a", {NVIDIA: [f"{card_uuid(0)}::0", f"{card_uuid(0)}::3"]}),
        row("b", {"nvidia.com/gpu.shared": [f"{card_uuid(0)}::7"]}),
        row("c", {NVIDIA: ["nvidia0/vgpu2"]}),
    )
    inputs = world([card(0)], None, listed)
    assert shares_of(inputs) == [
        ("a", "main", 0, None, None, None),
        ("b", "main", 0, None, None, None),
        ("c", "main", 0, None, None, None),
    ]
    result = allocate(inputs)
    assert {(a.scheme, a.exclusive) for a in result.allocations} == {("replicas", False)}
    assert card_totals(result, inputs.cards) == {0: CardAllocated(None, None, 3)}


def test_numbered_replicas_without_an_annotation_are_told_by_card() -> None:
    ids = [f"{card_uuid(0)}-4", f"{card_uuid(0)}-5", f"{card_uuid(1)}-3", f"{card_uuid(0)}-8"]
    found = shares_of(world([card(0), card(1)], None, kubelet(row("a", {NVIDIA: ids}))))
    assert [one[2] for one in found] == [0, 1]


def test_shared_slices() -> None:
    slices = [mig(1, 2, "3g.40gb", compute_slices=3)]
    listed = kubelet(
        row("a", {"nvidia.com/mig-3g.40gb": [f"{mig_uuid(1)}::0"]}),
        row("b", {"nvidia.com/mig-3g.40gb.shared": [f"{mig_uuid(1)}::7"]}),
    )
    mps = node({"nvidia.com/gpu.sharing-strategy": "mps", "nvidia.com/gpu.replicas": "4"})
    found = shares_of(world([card(0, slices=slices)], None, listed, mps))
    assert found == [("a", "main", 0, "2", None, None), ("b", "main", 0, "2", None, None)]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"sharing-strategy": "mps", "replicas": "3"}, (200 / 3, 16 * GIB)),
        ({"sharing-strategy": "time-slicing", "replicas": "3"}, (None, None)),
        ({"sharing-strategy": "mps"}, (None, None)),
        ({"sharing-strategy": "mps", "replicas": "many"}, (None, None)),
        ({"sharing-strategy": "mps", "replicas": "0"}, (None, None)),
    ],
)
def test_mps_guarantees_an_equal_part(
    labels: dict[str, str], expected: tuple[float | None, int | None]
) -> None:
    listed = kubelet(row("a", {NVIDIA: [f"{card_uuid(0)}::0", f"{card_uuid(0)}::2"]}))
    of_node = node({f"nvidia.com/gpu.{key}": value for key, value in labels.items()})
    found = shares_of(world([card(0)], None, listed, of_node))
    assert found == [("a", "main", 0, None, *expected)]


# ------------------------------------------------------------- qGPU


def test_two_pods_share_one_card_by_name() -> None:
    half_a = pod("a", qgpu("50", "11"), annotations={QGPU_CARD + "main": "0"})
    half_b = pod("b", qgpu("50", "11"), annotations={"elasticgpu.io/container-main": " 0 "})
    inputs = world([card(0), card(1)], [half_b, half_a], of_node=node())
    assert shares_of(inputs) == [
        ("a", "main", 0, None, 50.0, 11 * GIB),
        ("b", "main", 0, None, 50.0, 11 * GIB),
    ]
    (one, _) = allocate(inputs).allocations
    assert (one.scheme, one.resource, one.pod_uid) == ("qgpu", QGPU_CORE, "uid-a")
    assert card_totals(allocate(inputs), inputs.cards) == {
        0: CardAllocated(100.0, 22 * GIB, 2),
        1: CardAllocated(None, None, 0),
    }


def test_whole_cards_of_qgpu_have_all_memory() -> None:
    four = pod("p", qgpu("400"), annotations={QGPU_CARD + "main": "3,0,15,12"})
    cards = [card(index) for index in range(16)]
    found = allocate(world(cards, [four], of_node=node())).allocations
    assert [(a.gpu, a.core_percent, a.memory_bytes, a.exclusive) for a in found] == [
        (gpu, 100.0, 24 * GIB, True) for gpu in (0, 3, 12, 15)
    ]


@pytest.mark.parametrize(
    ("core", "memory", "per_card"),
    [("160", "60", (80.0, 30)), ("121", "31", (60.0, 15))],
)
def test_a_share_over_two_cards_is_split_and_floored(
    core: str, memory: str, per_card: tuple[float, int]
) -> None:
    split = pod("p", qgpu(core, memory), annotations={QGPU_CARD + "main": "0,1"})
    found = shares_of(world([card(0), card(1)], [split], of_node=node()))
    assert found == [("p", "main", gpu, None, per_card[0], per_card[1] * GIB) for gpu in (0, 1)]


def test_online_offline_and_normal_pods() -> None:
    on_card_0 = {QGPU_CARD + "main": "0"}
    pods = [
        pod("normal", qgpu("25", "6"), annotations=on_card_0),
        pod("offline", qgpu(None, "8", "90"), annotations=on_card_0),
        pod("online", qgpu(None, "5"), annotations=on_card_0),
    ]
    result = allocate(world([card(0)], pods, of_node=node()))
    assert shares(result) == [
        ("normal", "main", 0, None, 25.0, 6 * GIB),
        ("offline", "main", 0, None, None, 8 * GIB),
        ("online", "main", 0, None, None, 5 * GIB),
    ]
    assert [a.greedy_core_percent for a in result.allocations] == [None, 90.0, None]


@pytest.mark.parametrize("core", ["25", "2.5e1", "25000m", "0.025k"])
def test_quantities_in_every_spelling(core: str) -> None:
    one = pod("p", qgpu(core, "2"), annotations={QGPU_CARD + "main": "0"})
    found = shares_of(world([card(0)], [one], of_node=node()))
    assert found == [("p", "main", 0, None, 25.0, 2 * GIB)]


def test_a_bad_quantity_or_annotation_costs_only_its_own_container() -> None:
    pods = [
        pod("cores", qgpu("a lot", "2"), annotations={QGPU_CARD + "main": "0"}),
        pod("half", qgpu("2.5", "2"), annotations={QGPU_CARD + "main": "0"}),
        pod("list", qgpu("20", "2"), annotations={QGPU_CARD + "main": "0;1"}),
        pod("minus", qgpu("20", "2"), annotations={QGPU_CARD + "main": "-1"}),
        pod("ok", qgpu("20", "2"), annotations={QGPU_CARD + "main": "0"}),
    ]
    inputs = world([card(0)], pods, of_node=node())
    assert shares_of(inputs) == [("ok", "main", 0, None, 20.0, 2 * GIB)]
    assert problems_of(inputs) == [
        ("bad_annotation", "list", "main"),
        ("bad_annotation", "minus", "main"),
        ("bad_quantity", "cores", "main"),
        ("bad_quantity", "half", "main"),
    ]


def test_a_card_that_is_not_here_has_no_series_and_the_others_share_stays() -> None:
    one = pod("p", qgpu("120", "20"), annotations={QGPU_CARD + "main": "0,8"})
    inputs = world([card(0), card(1)], [one], of_node=node())
    assert shares_of(inputs) == [("p", "main", 0, None, 60.0, 10 * GIB)]
    assert problems_of(inputs) == [("unknown_card", "p", "main")]


def test_more_core_than_the_written_cards_have_is_a_problem() -> None:
    one = pod("p", qgpu("200"), annotations={QGPU_CARD + "main": "1"})
    inputs = world([card(0), card(1)], [one], of_node=node())
    assert shares_of(inputs) == [("p", "main", 1, None, 100.0, 24 * GIB)]
    assert problems_of(inputs) == [("card_count", "p", "main")]


def test_a_pod_without_a_card_annotation_is_on_no_card_and_counted() -> None:
    bare = pod("bare", qgpu("30", "6"))
    result = allocate(world([card(0), card(1)], [bare], of_node=node()))
    assert (shares(result), result.unassigned_pods) == ([], (("demo", "bare"),))


def test_a_running_pod_without_annotation_is_on_the_only_card_that_there_can_be() -> None:
    bare = pod("bare", qgpu("30", "6"))
    offers_one = node(allocatable={QGPU_CORE: "100"})
    found = shares_of(world([card(0)], [bare], of_node=offers_one))
    assert found == [("bare", "main", 0, None, 30.0, 6 * GIB)]
    for doubtful in (
        world([card(0)], [bare], of_node=node(allocatable={QGPU_CORE: "200"})),
        world([card(0)], [replace(bare, phase="Pending")], of_node=offers_one),
        world([card(0)], [bare]),
    ):
        assert allocate(doubtful).unassigned_pods == (("demo", "bare"),)


def test_requests_of_zero_are_no_request() -> None:
    nothing = pod("p", qgpu("0", "0"), annotations={QGPU_CARD + "main": "0"})
    result = allocate(world([card(0)], [nothing], of_node=node()))
    assert (result.allocations, result.unassigned_pods) == ((), ())


def units(result: AllocationResult) -> list[int | None]:
    return [a.memory_bytes // 10 if a.memory_bytes else None for a in result.allocations]


@pytest.mark.parametrize(
    ("labels", "allocatable", "unit"),
    [
        ({"tke.cloud.tencent.com/qgpu.memory-unit": "1G"}, {}, GIB),
        ({"tke.cloud.tencent.com/qgpu.memory-unit": "128M"}, {}, 128 * MIB),
        ({"tke.cloud.tencent.com/qgpu.memory-unit": "pages"}, {}, None),
        ({"tke.cloud.tencent.com/qgpu.memory-unit": "0G"}, {}, None),
        ({}, {QGPU_CORE: "200", QGPU_MEMORY: "48"}, GIB),
        ({}, {QGPU_CORE: "200", QGPU_MEMORY: "384"}, 128 * MIB),
        # One of two equal cards shares; the total alone would look like twice the unit.
        ({}, {QGPU_CORE: "100", QGPU_MEMORY: "192"}, 128 * MIB),
        ({}, {QGPU_CORE: "200", QGPU_MEMORY: "100"}, GIB),
        ({}, {QGPU_CORE: "200", QGPU_MEMORY: "?"}, GIB),
        ({}, {}, GIB),
    ],
)
def test_the_unit_of_memory(
    labels: dict[str, str], allocatable: dict[str, str], unit: int | None
) -> None:
    one = pod("p", qgpu("20", "10"), annotations={QGPU_CARD + "main": "0"})
    inputs = world([card(0), card(1)], [one], of_node=node(labels, allocatable))
    assert units(allocate(inputs)) == [unit]
    assert [p.kind for p in allocate(inputs).problems] == (["memory_unit"] if unit is None else [])


def test_cards_of_unknown_memory_tell_no_unit() -> None:
    one = pod("p", qgpu("20", "10"), annotations={QGPU_CARD + "main": "0"})
    of_node = node(allocatable={QGPU_CORE: "100", QGPU_MEMORY: "192"})
    inputs = world([card(0, memory_bytes=None)], [one], of_node=of_node)
    assert units(allocate(inputs)) == [GIB]


def test_an_unreadable_node_costs_memory_only_and_is_one_problem() -> None:
    on_card_0 = {QGPU_CARD + "main": "0"}
    pods = [
        pod("a", qgpu("20", "10"), annotations=on_card_0),
        pod("b", qgpu("30", "4"), annotations=on_card_0),
        pod("c", qgpu("100"), annotations={QGPU_CARD + "main": "1"}),
    ]
    inputs = world([card(0), card(1)], pods)
    assert shares_of(inputs) == [
        ("a", "main", 0, None, 20.0, None),
        ("b", "main", 0, None, 30.0, None),
        ("c", "main", 1, None, 100.0, 24 * GIB),
    ]
    assert problems_of(inputs) == [("memory_unit", "", "")]


# ------------------------------------------------------------- elastic-gpu, nano-gpu


@pytest.mark.parametrize("domain", ["elasticgpu.io", "elasticgpu.com"])
def test_elastic_gpu_counts_memory_in_mib(domain: str) -> None:
    asks = asking({f"{domain}/gpu-core": "30", f"{domain}/gpu-memory": "2048"})
    one = pod("p", asks, annotations={"elasticgpu.io/container-main": "1"})
    # The ids are units that the kubelet picks: their card part means nothing.
    listed = kubelet(row("p", {f"{domain}/gpu-core": ["0-00", "0-01"]}))
    result = allocate(world([card(0), card(1)], [one], listed))
    assert shares(result) == [("p", "main", 1, None, 30.0, 2 * GIB)]
    assert (result.allocations[0].scheme, result.allocations[0].resource) == (
        "elastic_gpu",
        f"{domain}/gpu-core",
    )


def test_nano_gpu_shares_percent_of_a_card() -> None:
    asks = asking({"nano-gpu/gpu-percent": "70"})
    one = pod("p", asks, annotations={"nano-gpu/container-main": "0"})
    assert shares_of(world([card(0)], [one])) == [("p", "main", 0, None, 70.0, None)]


# ------------------------------------------------------------- the cluster's GPU objects


def test_gpu_objects_that_number_cards_differently_are_problems() -> None:
    objects = (
        GpuObject(0, card_uuid(0), 0),
        GpuObject(2, card_uuid(1), 1),
        GpuObject(2, card_uuid(2), 7),
        GpuObject(3, card_uuid(9), 3),
    )
    inputs = replace(world([card(0), card(1), card(2)], []), gpu_objects=objects)
    assert [(p.kind, p.gpu) for p in allocate(inputs).problems] == [
        ("card_mismatch", 1),
        ("card_mismatch", 2),
        ("card_mismatch", 3),
    ]


def test_one_device_given_twice_is_one_row() -> None:
    both = pod("p", asking({QGPU_CORE: "100", NVIDIA: "1"}), annotations={QGPU_CARD + "main": "0"})
    listed = kubelet(row("p", {NVIDIA: [card_uuid(0)]}))
    inputs = world([card(0)], [both], listed, node())
    assert shares_of(inputs) == [("p", "main", 0, None, 100.0, 24 * GIB)]
    assert problems_of(inputs) == [("two_schemes", "p", "main")]
