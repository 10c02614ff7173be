"""The simulated kubelet shows what real ones were seen to show, so that tests may trust it."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket as sockets
import stat
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from qgpu_exporter.demo.kubelet import (
    V1_20,
    V1_33,
    V1_36,
    FakeKubelet,
    KubeletVersion,
    ListedContainer,
)
from qgpu_exporter.model import ClaimDevice
from qgpu_exporter.sources.podresources.qgpu_podresources_pb2 import (
    AllocatableResourcesRequest,
    AllocatableResourcesResponse,
    GetPodResourcesRequest,
    GetPodResourcesResponse,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
)
from tests.kubelets import GPU_0, GPU_1, WHOLE, ManualClock, admit, until

MIG = "nvidia.com/mig-1g.10gb"
EVERY_VERSION = pytest.mark.parametrize("version", [V1_20, V1_33, V1_36], ids=["20", "33", "36"])
NEWER = pytest.mark.parametrize("version", [V1_33, V1_36], ids=["33", "36"])

Listed = dict[str, dict[str, list[tuple[list[str], list[int]]]]]
"""Pod -> container -> (ids, NUMA nodes) of each entry, in the order of the answer."""


class Client:
    """Plain calls over one channel, as any client makes them."""

    def __init__(self, socket: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            f"unix://{socket}",
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 50),
            ],
        )

    async def call(self, method: str, request: Any, response: Any) -> Any:
        send = self._channel.unary_unary(
            f"/v1.PodResourcesLister/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return await send(request)

    async def pods(self) -> Listed:
        answer = await self.call("List", ListPodResourcesRequest(), ListPodResourcesResponse)
        return {
            pod.name: {
                container.name: [
                    (list(entry.device_ids), [node.ID for node in entry.topology.nodes])
                    for entry in container.devices
                ]
                for container in pod.containers
            }
            for pod in answer.pod_resources
        }

    async def get(self, pod: str) -> Any:
        request = GetPodResourcesRequest(pod_name=pod, pod_namespace="lab")
        return await self.call("Get", request, GetPodResourcesResponse)

    async def allocatable(self) -> list[tuple[str, list[str]]]:
        """(Resource, ids) of each entry."""
        answer = await self.call(
            "GetAllocatableResources", AllocatableResourcesRequest(), AllocatableResourcesResponse
        )
        return [(entry.resource_name, list(entry.device_ids)) for entry in answer.devices]

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
def version() -> KubeletVersion:
    return V1_36


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def kubelet(
    tmp_path: os.PathLike[str], version: KubeletVersion, clock: ManualClock
) -> AsyncIterator[FakeKubelet]:
    fake = FakeKubelet(f"{tmp_path}/kubelet.sock", version=version, clock=clock)
    fake.register(WHOLE, {GPU_0: (0,), GPU_1: (1,)})
    fake.register(MIG, {"MIG-a": (0,), "MIG-b": None, "MIG-c": (0, 1)})
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(kubelet: FakeKubelet) -> AsyncIterator[Client]:
    made = Client(kubelet.socket)
    yield made
    await made.close()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details() or ""


async def again(client: Client) -> Listed:
    """The first answer that is no error."""

    async def attempt() -> Listed | None:
        try:
            return await client.pods()
        except grpc.aio.AioRpcError:
            return None

    answer = await until(attempt, lambda answer: answer is not None)
    assert answer is not None
    return answer


@EVERY_VERSION
async def test_an_admitted_pod_is_listed_with_containers_that_hold_nothing(
    kubelet: FakeKubelet, client: Client
) -> None:
    kubelet.admit(
        "lab", "multi", [ListedContainer("main", {WHOLE: [GPU_1]}), ListedContainer("sidecar")]
    )
    admit(kubelet, "cpu-only")
    assert await client.pods() == {
        "multi": {"main": [([GPU_1], [1])], "sidecar": []},
        "cpu-only": {"main": []},
    }


@EVERY_VERSION
async def test_a_finished_pod_holds_nothing_and_is_listed_or_not_by_version(
    kubelet: FakeKubelet, client: Client, version: KubeletVersion
) -> None:
    admit(kubelet, "job", GPU_0)
    kubelet.finish("lab", "job")
    assert await client.pods() == ({"job": {"main": []}} if version.lists_finished_pods else {})
    admit(kubelet, "taker", GPU_0)
    assert (await client.pods())["taker"] == {"main": [([GPU_0], [0])]}
    kubelet.forget("lab", "job")
    assert list(await client.pods()) == ["taker"]


async def test_a_stopped_kubelet_leaves_a_socket_that_refuses(
    kubelet: FakeKubelet, client: Client
) -> None:
    await client.pods()
    await kubelet.stop()
    await kubelet.stop()
    assert stat.S_ISSOCK(os.stat(kubelet.socket).st_mode)
    with sockets.socket(sockets.AF_UNIX) as direct:
        assert direct.connect_ex(kubelet.socket) == errno.ECONNREFUSED
    code, _ = await refused(client.pods())
    assert code is grpc.StatusCode.UNAVAILABLE


@EVERY_VERSION
async def test_a_restarted_kubelet_has_another_socket_and_answers_empty_at_first(
    kubelet: FakeKubelet, client: Client, version: KubeletVersion, clock: ManualClock
) -> None:
    admit(kubelet, "one", GPU_0)
    before = os.stat(kubelet.socket)
    await kubelet.restart()
    after = os.stat(kubelet.socket)
    assert (after.st_ino, after.st_ctime_ns) != (before.st_ino, before.st_ctime_ns)
    assert await again(client) == {}
    clock.now += version.empty_seconds - 0.01
    assert await client.pods() == {}
    clock.now += 0.02
    assert await client.pods() == {"one": {"main": [([GPU_0], [0])]}}


async def test_a_restarted_kubelet_can_be_held_empty(kubelet: FakeKubelet, client: Client) -> None:
    admit(kubelet, "one", GPU_0)
    await kubelet.restart(empty_seconds=math.inf)
    assert await again(client) == {}
    kubelet.load_checkpoint()
    assert list(await client.pods()) == ["one"]


@NEWER
async def test_without_its_plugin_a_device_is_held_but_cannot_be_allocated(
    kubelet: FakeKubelet, client: Client
) -> None:
    admit(kubelet, "one", GPU_0)
    kubelet.unregister(WHOLE)
    assert await client.pods() == {"one": {"main": [([GPU_0], [0])]}}
    assert {resource for resource, _ in await client.allocatable()} == {MIG}


@NEWER
async def test_an_unhealthy_device_is_held_but_cannot_be_allocated(
    kubelet: FakeKubelet, client: Client
) -> None:
    admit(kubelet, "one", GPU_0)
    kubelet.set_health(WHOLE, GPU_0, healthy=False)
    assert await client.pods() == {"one": {"main": [([GPU_0], [0])]}}
    assert (WHOLE, [GPU_0]) not in await client.allocatable()
    kubelet.set_health(WHOLE, GPU_0, healthy=True)
    assert (WHOLE, [GPU_0]) in await client.allocatable()


@NEWER
async def test_what_can_be_allocated_has_one_entry_a_device(client: Client) -> None:
    assert sorted(await client.allocatable()) == [
        (WHOLE, [GPU_0]),
        (WHOLE, [GPU_1]),
        (MIG, ["MIG-a"]),
        (MIG, ["MIG-b"]),
        (MIG, ["MIG-c"]),
    ]


@EVERY_VERSION
async def test_a_resource_is_spread_over_entries(
    kubelet: FakeKubelet, client: Client, version: KubeletVersion
) -> None:
    admit(kubelet, "mig", "MIG-a", "MIG-b", "MIG-c", resource=MIG)
    entries = (await client.pods())["mig"]["main"]
    spread = sorted((node, sorted(ids)) for ids, node in entries)
    if version.entry_per_device:
        assert spread == [
            ([], ["MIG-b"]),
            ([0], ["MIG-a"]),
            ([0], ["MIG-c"]),
            ([1], ["MIG-c"]),
        ]
    else:
        assert spread == [([], ["MIG-b"]), ([0], ["MIG-a", "MIG-c"]), ([1], ["MIG-c"])]


async def test_numa_node_0_is_an_empty_message(kubelet: FakeKubelet, client: Client) -> None:
    admit(kubelet, "one", GPU_0)
    answer = await client.call("List", ListPodResourcesRequest(), ListPodResourcesResponse)
    (entry,) = answer.pod_resources[0].containers[0].devices
    assert [node.SerializeToString() for node in entry.topology.nodes] == [b""]


async def test_the_order_of_an_answer_is_random(
    kubelet: FakeKubelet, client: Client, clock: ManualClock
) -> None:
    for number in range(6):
        admit(kubelet, f"pod-{number}", f"{GPU_0}::{number}", f"{GPU_0}::9")
    answers = []
    for _ in range(20):
        clock.now += 1
        answers.append(await client.pods())
    assert all(answer.keys() == answers[0].keys() for answer in answers)
    assert len({tuple(answer) for answer in answers}) > 10
    assert len({str(answer["pod-0"]) for answer in answers}) == 2


async def test_the_oldest_version_has_list_alone(tmp_path: os.PathLike[str]) -> None:
    kubelet = FakeKubelet(f"{tmp_path}/old.sock", version=V1_20)
    await kubelet.start()
    client = Client(kubelet.socket)
    assert await client.pods() == {}
    for call in (client.allocatable(), client.get("one")):
        code, _ = await refused(call)
        assert code is grpc.StatusCode.UNIMPLEMENTED
    await client.close()
    await kubelet.stop()


@NEWER
async def test_get_knows_only_pods_that_run(kubelet: FakeKubelet, client: Client) -> None:
    admit(kubelet, "one", GPU_0)
    answer = await client.get("one")
    assert answer.pod_resources.containers[0].devices[0].device_ids == [GPU_0]
    kubelet.finish("lab", "one")
    for pod in ("one", "never"):
        assert await refused(client.get(pod)) == (
            grpc.StatusCode.UNKNOWN,
            f"pod {pod} in namespace lab not found",
        )


async def test_the_socket_has_mode_0755(kubelet: FakeKubelet) -> None:
    assert stat.S_IMODE(os.stat(kubelet.socket).st_mode) == 0o755


async def test_who_asks_too_often_is_refused(
    kubelet: FakeKubelet, client: Client, clock: ManualClock
) -> None:
    for _ in range(10):
        await client.pods()
    other = Client(kubelet.socket)
    assert await refused(other.pods()) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "rejected by rate limit",
    )
    await other.close()
    clock.now += 0.015
    await client.pods()
    code, _ = await refused(client.pods())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert kubelet.questions == 13


async def test_devices_of_claims_are_listed(kubelet: FakeKubelet, client: Client) -> None:
    claims = [
        ClaimDevice("lab", "one", "gpu.nvidia.com", "node", "gpu-0", "", ("a/b=c",)),
        ClaimDevice("lab", "one", "gpu.nvidia.com", "node", "gpu-1", "share-1"),
    ]
    kubelet.admit("lab", "dra", [ListedContainer("main", claims=claims)])
    answer = await client.call("List", ListPodResourcesRequest(), ListPodResourcesResponse)
    (claim,) = answer.pod_resources[0].containers[0].dynamic_resources
    assert (claim.claim_namespace, claim.claim_name) == ("lab", "one")
    first, second = claim.claim_resources
    assert (first.driver_name, first.pool_name, first.device_name) == (
        "gpu.nvidia.com",
        "node",
        "gpu-0",
    )
    assert [cdi.name for cdi in first.cdi_devices] == ["a/b=c"]
    assert not first.HasField("share_id")
    assert second.share_id == "share-1"


async def test_an_answer_can_be_slow(kubelet: FakeKubelet, client: Client) -> None:
    kubelet.latency_seconds = 3600.0
    slow = asyncio.create_task(client.pods())

    async def questions() -> int:
        return kubelet.questions

    await until(questions, lambda count: count == 1)
    kubelet.latency_seconds = 0.0
    assert await client.pods() == {}
    assert not slow.done()
    slow.cancel()
    await asyncio.wait([slow])
