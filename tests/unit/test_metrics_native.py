"""Native tables: names, absence, and what a card that is down or unknown still shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from qgpu_exporter.exposition import render
from qgpu_exporter.metrics.dcgm import DCGM
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.native_allocation import CONTAINER_LABELS
from qgpu_exporter.metrics.native_node import label_names
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.metrics.tke import TKE
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardIdentity,
    CardReading,
    Memory,
    Node,
    Snapshot,
    StackFact,
)
from tests.worlds import GIB, NODE, NOW, card_uuid, full_snapshot, identity, reading

ALL: tuple[Family[Any, Any], ...] = (*NATIVE, *DCGM, *TKE, *SERVICE)


def lines(snapshot: Snapshot, *prefixes: str) -> list[str]:
    page = render(NATIVE, snapshot).decode().splitlines()
    shown = [line for line in page if not line.startswith("#")]
    return [line for line in shown if not prefixes or line.startswith(prefixes)]


def test_no_name_stands_twice_in_any_dialect() -> None:
    names = Counter(family.name for family in ALL)
    assert [name for name, count in names.items() if count > 1] == []


def test_names_that_are_a_contract_have_their_labels() -> None:
    labels = {family.name: family.scope.labels for family in NATIVE}
    for name in (
        "node_gpu_core_request",
        "node_gpu_memory_request_bytes",
        "node_gpu_core_usage",
        "node_gpu_memory_usage_bytes",
    ):
        assert labels[name] == CONTAINER_LABELS == ("node", "gpu", "namespace", "pod", "container")
    assert labels["node_gpu_up"] == ("node", "gpu")
    assert labels["node_gpu_down_info"] == ("node", "gpu", "reason")
    assert labels["node_gpu_allocation_info"] == (
        *CONTAINER_LABELS,
        "pod_uid",
        "uuid",
        "resource",
        "scheme",
        "device",
    )


@pytest.mark.parametrize("family", NATIVE, ids=[family.name for family in NATIVE])
def test_a_name_says_its_type(family: Family[Snapshot, Any]) -> None:
    name, kind = family.name, family.type
    assert name.startswith("node_gpu_")
    assert name.endswith("_total") == (kind == "counter")
    assert name.endswith("_info") == (kind == "info")
    assert family.help.endswith(".")
    assert family.origin


def test_device_series_carry_no_pod_and_container_series_no_device() -> None:
    for family in NATIVE:
        labels = set(family.scope.labels) | set(family.scope.more_label_names)
        if not {"pod", "pod_uid"} & labels:
            assert not {"namespace", "container"} & labels
        elif family.type != "info" and family.name != "node_gpu_pod_labels":
            assert labels == set(CONTAINER_LABELS)


def test_before_any_answer_there_is_nothing() -> None:
    assert lines(Snapshot(NODE, NOW)) == []


def test_a_card_that_gives_nothing_shows_that_it_answers() -> None:
    card = Card(CardIdentity(0, card_uuid(0)), CardReading(CardIdentity(0, card_uuid(0))))
    assert lines(Snapshot(NODE, NOW, cards=(card,), devices_up=True)) == [
        'node_gpu_cards{node="node-1"} 1.0',
        'node_gpu_cards_answering{node="node-1"} 1.0',
        f'node_gpu_info{{gpu="0",node="node-1",uuid="{card_uuid(0)}"}} 1.0',
        'node_gpu_up{gpu="0",node="node-1"} 1.0',
        'node_gpu_core_capacity{gpu="0",node="node-1"} 100.0',
    ]


def test_a_lost_card_keeps_its_name_its_size_and_its_holders() -> None:
    held = Allocation("team", "p", "c", 0, card_uuid(0), "whole", "nvidia.com/gpu", card_uuid(0))
    snapshot = Snapshot(
        NODE,
        NOW,
        cards=(Card(identity(0), None, "lost", 80 * GIB),),
        devices_up=True,
        allocation=AllocationResult((held,)),
    )
    names = {line.partition("{")[0] for line in lines(snapshot)}
    assert names == {
        "node_gpu_allocation_info",
        "node_gpu_pods_unassigned",
        "node_gpu_cards",
        "node_gpu_cards_answering",
        "node_gpu_info",
        "node_gpu_up",
        "node_gpu_down_info",
        "node_gpu_core_capacity",
        "node_gpu_memory_capacity_bytes",
    }
    assert lines(snapshot, "node_gpu_up", "node_gpu_down", "node_gpu_cards_a") == [
        'node_gpu_cards_answering{node="node-1"} 0.0',
        'node_gpu_up{gpu="0",node="node-1"} 0.0',
        'node_gpu_down_info{gpu="0",node="node-1",reason="lost"} 1.0',
    ]


def test_while_the_driver_as_a_whole_is_silent_no_card_is_called_down() -> None:
    snapshot = Snapshot(NODE, NOW, cards=(Card(identity(0), None, None, 80 * GIB),))
    assert lines(snapshot, "node_gpu_up", "node_gpu_down", "node_gpu_cards") == [
        'node_gpu_cards{node="node-1"} 1.0'
    ]


def test_on_old_drivers_there_is_no_reserve() -> None:
    card = Card(identity(0), reading(0, memory=Memory(80 * GIB, 31 * GIB, 49 * GIB)))
    shown = lines(Snapshot(NODE, NOW, cards=(card,)), "node_gpu_memory_used", "node_gpu_memory_res")
    assert shown == ['node_gpu_memory_used_bytes{gpu="0",node="node-1"} 3.3285996544e+10']


def test_totals_of_what_the_card_no_longer_offers_end() -> None:
    full = full_snapshot()
    assert full.cards is not None
    card = full.cards[0]
    assert card.reading is not None
    quiet = replace(card.reading, pcie=replace(card.reading.pcie, transmitted_bytes=None))
    shown = lines(
        replace(full, cards=(replace(card, reading=quiet),)),
        "node_gpu_pcie_transmitted_bytes_total",
        "node_gpu_pcie_received_bytes_total",
    )
    assert shown == ['node_gpu_pcie_received_bytes_total{gpu="0",node="node-1"} 5e+09']
    # In MIG mode the driver has no samples: a counter that stands still would say idle.
    busy = ("node_gpu_busy_seconds_total", "node_gpu_samples_covered_seconds_total")
    without = replace(card, reading=replace(card.reading, samples=()))
    assert lines(replace(full, cards=(without,)), *busy) == []


def test_before_the_first_pod_list_nothing_is_said_of_waiting_pods() -> None:
    snapshot = Snapshot(NODE, NOW, allocation=AllocationResult(complete=False))
    assert lines(snapshot) == []


def test_an_unreadable_amount_costs_only_itself() -> None:
    node = Node(NODE, allocatable={"nvidia.com/gpu": "4", "elasticgpu.io/gpu-core": "many"})
    assert lines(Snapshot(NODE, NOW, node_object=node)) == [
        'node_gpu_resource_allocatable{node="node-1",resource="nvidia.com/gpu"} 4.0'
    ]


def test_a_file_that_stands_in_two_directories_has_one_time() -> None:
    stack = (
        StackFact("cdi/nvidia.yaml", "570.1", 20.0),
        StackFact("cdi/nvidia.yaml", "550.1", 10.0),
        StackFact("driver_root", "/run/nvidia/driver"),
    )
    assert lines(Snapshot(NODE, NOW, stack=stack)) == [
        'node_gpu_stack_info{node="node-1",subject="cdi/nvidia.yaml",value="570.1"} 1.0',
        'node_gpu_stack_info{node="node-1",subject="cdi/nvidia.yaml",value="550.1"} 1.0',
        'node_gpu_stack_info{node="node-1",subject="driver_root",value="/run/nvidia/driver"} 1.0',
        'node_gpu_stack_timestamp_seconds{node="node-1",subject="cdi/nvidia.yaml"} 20.0',
    ]


@pytest.mark.parametrize(
    ("labels", "named"),
    [
        ({}, []),
        ({"app": "a"}, [("label_app", "a")]),
        (
            {"app.kubernetes.io/name": "a", "myTeam": "b"},
            [("label_app_kubernetes_io_name", "a"), ("label_my_team", "b")],
        ),
        ({"a.b": "2", "a-b": "1"}, [("label_a_b_conflict1", "1"), ("label_a_b_conflict2", "2")]),
        (
            {"a.b": "2", "a-b": "1", "a_b_conflict1": "3"},
            [
                ("label_a_b_conflict2", "1"),
                ("label_a_b_conflict3", "2"),
                ("label_a_b_conflict1", "3"),
            ],
        ),
    ],
)
def test_pod_labels_are_named_as_kube_state_metrics_names_them(
    labels: dict[str, str], named: list[tuple[str, str]]
) -> None:
    assert list(label_names(labels)) == named


def test_pod_labels_only_where_they_are_asked_for_and_only_of_holders() -> None:
    full = full_snapshot()
    assert lines(replace(full, pod_labels_exported=False), "node_gpu_pod_labels") == []
    (line,) = lines(full, "node_gpu_pod_labels")
    assert line == (
        'node_gpu_pod_labels{label_app_kubernetes_io_name="half",'
        'label_team_x_conflict1="1",label_team_x_conflict2="2",label_tier="a",'
        'namespace="team",node="node-1",pod="half",pod_uid="uid-half"} 1.0'
    )
    nobody = replace(full, allocation=None, usage=replace(full.usage, containers=()))
    assert lines(nobody, "node_gpu_pod_labels") == []
