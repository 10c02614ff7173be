"""The node's JSON: exact values of a full node, and of one of which nothing is known."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec

from qgpu_exporter.model import AllocationResult, Status
from qgpu_exporter.web.document import node_document
from tests import worlds

NOW = worlds.NOW + 2.0


def test_nothing_known_is_null_and_not_empty() -> None:
    document = node_document(None, Status("1", "", "3.11", NOW - 1), NOW, not_ready="starting")
    assert document == {
        "version": 1,
        "now_timestamp_seconds": NOW,
        "exporter": {
            "version": "1",
            "revision": "",
            "python_version": "3.11",
            "started_timestamp_seconds": NOW - 1,
        },
        "not_ready": "starting",
        "snapshot_timestamp_seconds": None,
        "snapshot_age_seconds": None,
        "snapshot_stale": False,
        "node": None,
        "driver": None,
        "cards": None,
        "pods": None,
        "allocations": None,
        "allocations_complete": False,
        "usage": None,
        "problems": [],
        "conflicts": [],
        "unassigned_pods": [],
        "stack": [],
        "sources": [],
        "reader": None,
    }


def test_a_full_node() -> None:
    document = node_document(worlds.full_snapshot(), worlds.full_status(), NOW)
    assert json.loads(msgspec.json.encode(document)) == document
    assert (document["node"], document["snapshot_age_seconds"]) == ("node-1", 2.0)
    assert document["driver"] == {
        "up": True,
        "driver_version": "570.133.20",
        "nvml_version": "12.570.133.20",
        "cuda_version": "12.8",
    }
    assert [(card["gpu"], card["up"], card["down_reason"]) for card in document["cards"]] == [
        (0, True, None),
        (1, True, None),
        (2, True, None),
        (3, False, "lost"),
    ]
    assert document["cards"][0]["unattributed"] == {
        "core_percent": 5.0,
        "memory_bytes": 17 * worlds.GIB,
        "containers_without_allocation": 1,
    }
    assert document["cards"][1]["unattributed"] is None
    assert document["cards"][0]["allocated"] == {
        "core_percent": 50.0,
        "memory_bytes": 28 * worlds.GIB,
        "containers": 2,
    }
    assert document["cards"][0]["xids"] == [
        {
            "xid": 94,
            "mig": None,
            "class": "restart_app",
            "count": 2,
            "last_timestamp_seconds": worlds.NOW - 60,
        },
        {
            "xid": 94,
            "mig": "1",
            "class": "restart_app",
            "count": 1,
            "last_timestamp_seconds": worlds.NOW - 60,
        },
    ]
    assert document["cards"][3]["readings"] is None
    assert document["cards"][3]["memory_total_bytes"] == 80 * worlds.GIB
    assert [one["device"] for one in document["cards"][1]["readings"]["mig_slices"]] == [
        "1/0",
        "2/0",
        "2/1",
        "9",
    ]


def test_who_holds_what_and_why() -> None:
    document = node_document(worlds.full_snapshot(), worlds.full_status(), NOW)
    assert document["allocations_complete"] is True
    assert document["allocations"][0] == {
        "namespace": "team",
        "pod": "half",
        "container": "main",
        "container_kind": "app",
        "pod_uid": "uid-half",
        "gpu": 0,
        "mig": None,
        "uuid": worlds.card_uuid(0),
        "device": worlds.card_uuid(0),
        "scheme": "qgpu",
        "resource": "tke.cloud.tencent.com/qgpu-core",
        "core_percent": 50.0,
        "memory_bytes": 20 * worlds.GIB,
        "greedy_core_percent": None,
        "exclusive": False,
        "claim": None,
    }
    assert document["allocations"][3]["claim"] == {
        "namespace": "team",
        "name": "claim-x",
        "driver": "gpu.nvidia.com",
        "pool": "node-1",
        "device": "gpu-2",
    }
    assert document["problems"] == [
        {
            "kind": "unknown_card",
            "namespace": "team",
            "pod": "lost",
            "container": "main",
            "gpu": None,
            "detail": "card 9",
        }
    ]
    assert document["conflicts"] == [{"gpu": 0, "kind": "card", "containers": 1}]
    assert document["unassigned_pods"] == [{"namespace": "team", "pod": "waiting"}]


def test_whether_a_user_holds_its_card_is_null_while_nobody_knows() -> None:
    snapshot = worlds.full_snapshot()
    document = node_document(snapshot, worlds.full_status(), worlds.NOW)
    assert {one["allocated"] for one in document["usage"]["containers"]} == {True, False}
    for unknown in (None, AllocationResult(complete=False)):
        document = node_document(
            replace(snapshot, allocation=unknown), worlds.full_status(), worlds.NOW
        )
        assert {one["allocated"] for one in document["usage"]["containers"]} == {None}


def test_the_age_of_every_source() -> None:
    document = node_document(worlds.full_snapshot(), worlds.full_status(), NOW)
    assert [(one["source"], one["up"], one["age_seconds"]) for one in document["sources"]] == [
        ("nvml", True, 2.0),
        ("podresources", False, 62.0),
        ("kubernetes", None, None),
    ]
    assert document["sources"][1]["failures"] == {"unavailable": 3}
    assert document["reader"] == {"pid": 4242, "restarts": {"crash": 1}, "left_behind": 0}


def test_a_clock_that_was_set_back_gives_no_age_below_zero() -> None:
    document = node_document(worlds.full_snapshot(), worlds.full_status(), worlds.NOW - 100)
    assert document["snapshot_age_seconds"] == 0.0


def test_labels_only_where_they_are_exported() -> None:
    snapshot = worlds.full_snapshot()
    document = node_document(snapshot, worlds.full_status(), NOW)
    assert document["pods"][0]["labels"]["tier"] == "a"
    document = node_document(
        replace(snapshot, pod_labels_exported=False), worlds.full_status(), NOW
    )
    assert "labels" not in document["pods"][0]


def test_only_pods_that_have_to_do_with_a_card() -> None:
    snapshot = worlds.full_snapshot()
    assert snapshot.pods is not None
    other = replace(snapshot.pods.pods[0], name="web-server")
    snapshot = replace(snapshot, pods=replace(snapshot.pods, pods=(*snapshot.pods.pods, other)))
    document = node_document(snapshot, worlds.full_status(), NOW)
    assert [pod["name"] for pod in document["pods"]] == [
        "half",
        "mig",
        "offline",
        "thief",
        "waiting",
        "whole",
    ]
