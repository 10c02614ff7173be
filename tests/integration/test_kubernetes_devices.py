"""Node, ResourceSlices and GPU objects over real HTTP: each version, absence and recovery."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from qgpu_exporter.demo.apianswers import Answer
from qgpu_exporter.model import GpuObject, SliceDevice
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.gpus import GpuObjects
from qgpu_exporter.sources.kubernetes.node import NodeObject
from qgpu_exporter.sources.kubernetes.slices import ResourceSlices
from tests.integration.kubernetes_following import (
    FAST,
    NODE,
    connected,
    running,
    serving,
    until,
)

CARD = "GPU-d0000000-0000-4000-8000-000000000001"


def node_source(connection: Connection) -> NodeObject:
    return NodeObject(connection, NODE, wall_clock=time.time, timing=FAST)


def slices_source(connection: Connection, *, recheck_seconds: float = 0.02) -> ResourceSlices:
    return ResourceSlices(
        connection,
        NODE,
        wall_clock=time.time,
        timing=FAST,
        recheck_seconds=recheck_seconds,
    )


def is_off(source: ResourceSlices) -> bool:
    return source.health is None


def resource_slice(
    name: str, device: str, *, node: str = NODE, driver: str = "gpu.nvidia.com", generation: int = 1
) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {
            "nodeName": node,
            "driver": driver,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [
                {
                    "name": device,
                    "attributes": {"type": {"string": "gpu"}, "uuid": {"string": CARD}},
                    "capacity": {"memory": {"value": "40Gi"}},
                }
            ],
        },
    }


def device(name: str) -> SliceDevice:
    return SliceDevice("gpu.nvidia.com", NODE, name, "gpu", CARD)


# --------------------------------------------------------------------------- node


async def test_the_node_is_followed(tmp_path: Path) -> None:
    async with serving() as server, connected(server, tmp_path) as connection:
        server.put("nodes", {"metadata": {"name": "other"}})
        server.put("nodes", {"metadata": {"name": NODE, "labels": {"a": "1"}}})
        source = node_source(connection)
        async with running(source) as changes:
            await until(lambda: source.latest is not None)
            assert changes.count == 1
            server.patch("nodes", f"/{NODE}", {"metadata": {"labels": {"a": "2"}}})
            await until(lambda: source.latest is not None and source.latest.labels == {"a": "2"})
            assert source.health.up is True
        assert server.requests[0].query["fieldSelector"] == f"metadata.name={NODE}"


async def test_a_node_that_the_cluster_does_not_have_is_a_failure(tmp_path: Path) -> None:
    async with serving() as server, connected(server, tmp_path) as connection:
        source = node_source(connection)
        async with running(source):
            await until(lambda: source.health.up is False)
            assert source.latest is None
            assert "--node-name" in source.health.detail
            server.put("nodes", {"metadata": {"name": NODE}})
            await until(lambda: source.health.up is True)
            server.delete("nodes", f"/{NODE}")
            await until(lambda: source.health.up is False)
            assert source.latest is None


async def test_no_right_to_read_nodes_is_a_failure(tmp_path: Path) -> None:
    async with serving() as server, connected(server, tmp_path) as connection:
        server.allowed.discard("nodes")
        source = node_source(connection)
        async with running(source):
            await until(lambda: source.health.failures.get("forbidden", 0) >= 1)
            assert source.health.up is False


# --------------------------------------------------------------------------- slices


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        (("v1", "v1beta2", "v1beta1"), "v1"),
        (("v1beta1", "v1beta2"), "v1beta2"),
        (("v1beta1",), "v1beta1"),
        (("v1alpha3", "v1beta1"), "v1beta1"),
    ],
)
async def test_slices_in_the_best_version_served(
    served: tuple[str, ...], asked: str, tmp_path: Path
) -> None:
    async with serving(dra_versions=served) as server, connected(server, tmp_path) as connection:
        server.put("resourceslices", resource_slice("one", "gpu-0"))
        server.put("resourceslices", resource_slice("two", "gpu-0", node="other"))
        server.put("resourceslices", resource_slice("three", "nic-0", driver="nic.example.com"))
        source = slices_source(connection)
        async with running(source):
            await until(lambda: source.latest == (device("gpu-0"),))
            server.put("resourceslices", resource_slice("four", "gpu-1", generation=2))
            await until(lambda: source.latest == (device("gpu-1"),))
            assert source.health is not None
            assert source.health.up is True
        watches = [one for one in server.requests if one.verb == "watch"]
        assert watches[0].path == f"/apis/resource.k8s.io/{asked}/resourceslices"
        assert watches[0].query["fieldSelector"] == (
            f"spec.nodeName={NODE},spec.driver=gpu.nvidia.com"
        )


async def test_a_version_without_slices_is_passed_over(tmp_path: Path) -> None:
    async with serving(dra_versions=("v1", "v1beta1")) as server:
        server.put("resourceslices", resource_slice("one", "gpu-0"))
        server.fail(Answer.refusal(404, "NotFound", "no such resource"), verb="list")
        async with connected(server, tmp_path) as connection:
            source = slices_source(connection)
            async with running(source):
                await until(lambda: source.latest == (device("gpu-0"),))
            assert server.requests[-1].path == "/apis/resource.k8s.io/v1beta1/resourceslices"


async def test_without_the_api_slices_are_off_until_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(dra_versions=()) as server, connected(server, tmp_path) as connection:
        source = slices_source(connection)
        assert not is_off(source)
        async with running(source):
            await until(lambda: len(server.requests) >= 5)
            assert is_off(source)
            assert source.latest is None
            said = [one.getMessage() for one in caplog.records if one.name.endswith("slices")]
            why = "the cluster has no API for dynamic resource allocation"
            assert said == [f"ResourceSlices are not read: {why}"]
            server.put("resourceslices", resource_slice("one", "gpu-0"))
            server.dra_versions = ("v1",)
            await until(lambda: source.latest == (device("gpu-0"),))
            assert not is_off(source)


async def test_without_the_right_slices_are_off_also_where_it_is_taken_away(
    tmp_path: Path,
) -> None:
    async with serving() as server, connected(server, tmp_path) as connection:
        server.put("resourceslices", resource_slice("one", "gpu-0"))
        server.allowed.discard("resourceslices")
        source = slices_source(connection)
        async with running(source):
            await until(lambda: is_off(source))
            server.allowed.add("resourceslices")
            await until(lambda: source.latest == (device("gpu-0"),))
            await until(lambda: server.open_watches == 1)
            server.allowed.discard("resourceslices")
            server.reset_watches()
            await until(lambda: is_off(source))
            assert source.latest is None


async def test_an_answer_that_is_no_group_does_not_switch_slices_off(tmp_path: Path) -> None:
    async with serving() as server, connected(server, tmp_path) as connection:
        server.put("resourceslices", resource_slice("one", "gpu-0"))
        server.fail(Answer(200, b"[]"), verb="discovery")
        server.fail(Answer.refusal(500, "InternalError", "odd"), verb="list")
        source = slices_source(connection, recheck_seconds=3600.0)
        async with running(source):
            await until(lambda: source.latest == (device("gpu-0"),))
            assert source.health is not None
            assert source.health.failures == {"not_json": 1, "server_error": 1}


async def test_a_failing_server_does_not_switch_slices_off(tmp_path: Path) -> None:
    async with serving() as server, connected(server, tmp_path) as connection:
        server.put("resourceslices", resource_slice("one", "gpu-0"))
        server.fail(Answer.page(502), verb="discovery", times=2)
        source = slices_source(connection, recheck_seconds=3600.0)
        async with running(source):
            await until(lambda: source.latest == (device("gpu-0"),))
            assert source.health is not None
            assert source.health.failures == {"server_error": 2}


# --------------------------------------------------------------------------- GPU objects


async def test_gpu_objects_of_this_node(tmp_path: Path) -> None:
    def gpu(name: str, index: int, node: str, label: str) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "labels": {"elasticgpu.io/node": label}},
            "spec": {
                "index": index,
                "uuid": f"GPU-{index}",
                "path": f"/dev/nvidia{index + 4}",
                "memory": 1024,
                "nodeName": node,
            },
        }

    async with serving() as server, connected(server, tmp_path) as connection:
        server.put("gpus", gpu("a-01", 1, NODE, NODE))
        server.put("gpus", gpu("a-00", 0, NODE, NODE))
        server.put("gpus", gpu("b-00", 0, "other", "other"))
        server.put("gpus", gpu("c-00", 0, "other", NODE))
        source = GpuObjects(connection, NODE, wall_clock=time.time, timing=FAST)
        async with running(source):
            expected = (GpuObject(0, "GPU-0", 4), GpuObject(1, "GPU-1", 5))
            await until(lambda: source.latest == expected)
            server.delete("gpus", "/a-01")
            await until(lambda: source.latest == expected[:1])
            assert source.health.up is True


async def test_gpu_objects_that_may_not_be_read_are_a_failure(tmp_path: Path) -> None:
    async with serving() as server, connected(server, tmp_path) as connection:
        server.allowed.discard("gpus")
        source = GpuObjects(connection, NODE, wall_clock=time.time, timing=FAST)
        async with running(source):
            await until(lambda: source.health.up is False)
            assert "forbidden" in source.health.failures
            assert source.latest is None
