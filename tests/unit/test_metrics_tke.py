"""The tke dialect: units, sums over cards and containers, and what is not known."""

from __future__ import annotations

from qgpu_exporter.exposition import render
from qgpu_exporter.metrics.tke import TKE, tke_families
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardAllocated,
    ContainerUsage,
    Snapshot,
    UsageResult,
)
from tests.worlds import GIB, NODE, NOW, card_uuid, full_snapshot, identity, reading

NAMES = {
    "gpu_core_usage gpu_mem_usage gpu_core_utilization_percentage gpu_mem_utilization_percentage",
    "gpu_core_allocatable gpu_core_available gpu_core_allocated gpu_mem_allocatable",
    "gpu_mem_available gpu_mem_allocated gpu_enc_utilization_percentage",
    "gpu_dec_utilization_percentage pod_core_usage pod_mem_usage pod_core_utilization_percentage",
    "pod_mem_utilization_percentage pod_core_occupy_node_percentage",
    "pod_mem_occupy_node_percentage pod_core_request pod_mem_request container_assigned_card",
    "container_gpu_utilization container_gpu_memory_total container_core_utilization_percentage",
    "container_mem_utilization_percentage container_request_gpu_memory",
    "container_request_gpu_utilization gpu_count gpu_info gpu_mem_each_card gpu_power_usage",
    "gpu_ecc_mode gpu_ecc_error_count gpu_persistence_mode gpu_temprature",
}


def hold(gpu: int, core: float | None, memory: int | None, container: str = "main") -> Allocation:
    uuid = card_uuid(gpu)
    return Allocation(
        "team", "p", container, gpu, uuid, "qgpu", "tke.cloud.tencent.com/qgpu-core", uuid,
        core_percent=core, memory_bytes=memory,
    )  # fmt: skip


def world(*held: Allocation, used: tuple[ContainerUsage, ...] = ()) -> Snapshot:
    cards = tuple(Card(identity(gpu), reading(gpu), None, 80 * GIB + 1) for gpu in (0, 1))
    return Snapshot(
        NODE,
        NOW,
        cards=cards,
        devices_up=True,
        allocation=AllocationResult(held),
        allocated={0: CardAllocated(120.0, 81 * GIB, 2), 1: CardAllocated(None, None, 1)},
        usage=UsageResult(used),
    )


def values(snapshot: Snapshot, name: str, unit: str = "percent") -> dict[str, float]:
    families = tke_families("cards" if unit == "cards" else "percent")
    shown = {}
    for line in render(families, snapshot).decode().splitlines():
        if line.startswith(f"{name}{{"):
            labels, _, value = line.removeprefix(name).rpartition(" ")
            shown[labels] = float(value)
    return shown


def test_every_documented_name_is_there_and_no_other() -> None:
    documented = {name for line in NAMES for name in line.split()}
    assert {family.name for family in TKE} == documented


POD = '{namespace="team",node="node-1",pod="p"}'
BOTH = (hold(0, 30.0, 2 * GIB), hold(1, 20.0, 3 * GIB), hold(1, 10.0, None, "side"))
USED = (
    ContainerUsage(0, "team", "p", "main", 15.0, 1 * GIB),
    ContainerUsage(1, "team", "p", "main", 10.0, 1 * GIB),
    ContainerUsage(1, "team", "p", "side", 5.0, 0),
)


def test_a_pod_is_the_sum_of_its_containers_and_cards() -> None:
    of = world(*BOTH, used=USED)
    assert values(of, "pod_core_request") == {POD: 60.0}
    assert values(of, "pod_mem_request") == {POD: 5120.0}
    assert values(of, "pod_core_usage") == {POD: 30.0}
    assert values(of, "pod_mem_usage") == {POD: 2048.0}
    assert values(of, "pod_core_utilization_percentage") == {POD: 50.0}
    assert values(of, "pod_mem_utilization_percentage") == {POD: 40.0}
    assert values(of, "pod_core_occupy_node_percentage") == {POD: 15.0}


def test_a_use_that_is_not_known_makes_no_smaller_sum() -> None:
    of = world(*BOTH, used=USED[:2])
    assert values(of, "pod_core_usage") == {}
    assert values(of, "pod_core_request") == {POD: 60.0}
    main = '{container_name="main",namespace="team",node="node-1",pod_name="p"}'
    assert values(of, "container_core_utilization_percentage") == {main: 50.0}


def test_a_container_has_rows_by_card_and_in_total() -> None:
    rest = 'namespace="team",node="node-1",pod_name="p"'
    assert values(world(*BOTH, used=USED), "container_gpu_utilization") == {
        f'{{container_name="main",gpu="gpu0",{rest}}}': 15.0,
        f'{{container_name="main",gpu="gpu1",{rest}}}': 10.0,
        f'{{container_name="main",gpu="total",{rest}}}': 25.0,
        f'{{container_name="side",gpu="gpu1",{rest}}}': 5.0,
        f'{{container_name="side",gpu="total",{rest}}}': 5.0,
    }


def test_the_unit_of_requested_power_is_chosen() -> None:
    name = "container_request_gpu_utilization"
    main = '{container_name="main",namespace="team",node="node-1",pod_name="p",req_of_gpu="total"}'
    assert values(world(*BOTH), name)[main] == 50.0
    assert values(world(*BOTH), name, "cards")[main] == 0.5


def test_what_is_left_is_never_negative_and_counts_whole_gibibytes() -> None:
    first, second = '{card="0",node="node-1"}', '{card="1",node="node-1"}'
    assert values(world(), "gpu_core_available") == {first: 0.0, second: 100.0}
    assert values(world(), "gpu_mem_allocatable") == {first: 80.0, second: 80.0}
    assert values(world(), "gpu_mem_available") == {first: 0.0, second: 80.0}


def test_the_misspelt_name_and_its_kin_have_tke_labels() -> None:
    assert values(full_snapshot(), "gpu_temprature")['{card="0",node="node-1"}'] == 45.0
    aggregate = '{card="0",counter_type="aggregate",node="node-1"}'
    assert values(full_snapshot(), "gpu_ecc_error_count")[aggregate] == 7.0
