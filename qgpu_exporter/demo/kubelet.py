"""A kubelet as its pod-resources socket shows it: a real gRPC server over a made-up list of pods.

It behaves as kubelets of three kinds were seen to behave (`KubeletVersion`): in random order, a
resource spread over several entries, empty after a restart, refusing who asks too often.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import grpc.aio

from qgpu_exporter.model import ClaimDevice
from qgpu_exporter.sources.podresources.qgpu_podresources_pb2 import (
    AllocatableResourcesRequest,
    AllocatableResourcesResponse,
    CDIDevice,
    ClaimResource,
    ContainerDevices,
    ContainerResources,
    DynamicResource,
    GetPodResourcesRequest,
    GetPodResourcesResponse,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    NUMANode,
    PodResources,
    TopologyInfo,
)

SERVICE = "v1.PodResourcesLister"
SOCKET_MODE = 0o755

QUESTIONS_PER_SECOND = 100.0
QUESTIONS_AT_ONCE = 10.0
"""The kubelet's limit from 1.27 on, of all its clients together."""

NumaNodes = tuple[int, ...] | None
"""NUMA nodes of a device; None: the plugin tells none."""

Fault = Literal["hang", "garbage", "rate_limited", "unimplemented", "unknown", "internal"]
"""How every call fails: by no answer at all, by bytes that are no message, or by a status."""


@dataclass(frozen=True, slots=True)
class KubeletVersion:
    """What differs between kubelets, as far as this API shows it."""

    has_get: bool
    """Serves Get and GetAllocatableResources."""
    lists_finished_pods: bool
    """A pod that has ended stays listed, without devices, until the API server forgets it."""
    entry_per_device: bool
    """List has one entry a device id, else one a resource and NUMA node."""
    limits_rate: bool
    empty_seconds: float
    """How long it answers OK and empty after a restart."""


V1_20 = KubeletVersion(False, True, False, False, 0.1)
V1_33 = KubeletVersion(True, True, True, True, 1.0)
V1_36 = KubeletVersion(True, False, True, True, 1.0)


@dataclass(frozen=True, slots=True)
class ListedContainer:
    """A container of a listed pod: resource -> device ids, and the devices of its claims."""

    name: str
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    claims: Sequence[ClaimDevice] = ()


PodKey = tuple[str, str]
"""(namespace, name)."""


class FakeKubelet:
    """Serves `socket` between `start` and `stop`; `clock` is monotonic and in seconds."""

    def __init__(
        self,
        socket: str,
        *,
        version: KubeletVersion = V1_36,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = socket
        self.fault: Fault | None = None
        self.latency_seconds = 0.0
        self.refuse_next = 0
        """How many of the next calls the rate limit refuses, whatever it holds."""
        self.questions = 0
        """Calls that arrived, refused ones included."""
        self._version = version
        self._random = random.Random(seed)
        self._clock = clock
        self._limit = _RateLimit(clock)
        self._server: grpc.aio.Server | None = None
        self._pods: dict[PodKey, tuple[ListedContainer, ...]] = {}
        self._plugins: dict[str, dict[str, NumaNodes]] = {}
        self._unhealthy: set[tuple[str, str]] = set()
        self._numa: dict[tuple[str, str], NumaNodes] = {}
        self._empty_until = 0.0

    # ------------------------------------------------------------------ the process

    async def start(self) -> None:
        """Make the socket anew and serve it."""
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handlers(),))
        server.add_insecure_port(f"unix:{self.socket}")
        await server.start()
        os.chmod(self.socket, SOCKET_MODE)
        self._server = server

    async def stop(self) -> None:
        """End as a kubelet does: calls break off, the socket file stays and refuses."""
        if self._server is None:
            return
        kept = f"{self.socket}.kept"
        os.link(self.socket, kept)
        server, self._server = self._server, None
        await server.stop(None)
        os.replace(kept, self.socket)

    async def restart(self, empty_seconds: float | None = None) -> None:
        """Stop and start; then answer OK and empty for a time, by default the version's.

        `math.inf` means until `load_checkpoint`.
        """
        await self.stop()
        seconds = self._version.empty_seconds if empty_seconds is None else empty_seconds
        self._empty_until = self._clock() + seconds
        await self.start()

    def load_checkpoint(self) -> None:
        """Know all pods again, now."""
        self._empty_until = -math.inf

    # ------------------------------------------------------------------ device plugins

    def register(self, resource: str, devices: Mapping[str, NumaNodes]) -> None:
        """A device plugin offers the devices, each with its NUMA nodes."""
        self._plugins[resource] = dict(devices)
        self._numa.update({(resource, device): nodes for device, nodes in devices.items()})

    def unregister(self, resource: str) -> None:
        """The plugin is gone: nothing can be allocated, who holds a device keeps it."""
        self._plugins.pop(resource, None)

    def set_health(self, resource: str, device: str, *, healthy: bool) -> None:
        """The plugin reports a device as healthy or not."""
        if healthy:
            self._unhealthy.discard((resource, device))
        else:
            self._unhealthy.add((resource, device))

    # ------------------------------------------------------------------ pods

    def admit(self, namespace: str, pod: str, containers: Iterable[ListedContainer]) -> None:
        """Start a pod: its devices are listed from now on, before anything of it runs.

        A plain init container is none of `containers`: its device belongs to the main one.
        """
        self._pods[namespace, pod] = tuple(containers)

    def finish(self, namespace: str, pod: str) -> None:
        """All containers of the pod have ended: its devices are free."""
        if self._version.lists_finished_pods:
            ended = self._pods.get((namespace, pod), ())
            self._pods[namespace, pod] = tuple(ListedContainer(item.name) for item in ended)
        else:
            self.forget(namespace, pod)

    def forget(self, namespace: str, pod: str) -> None:
        """The API server has deleted the pod."""
        self._pods.pop((namespace, pod), None)

    # ------------------------------------------------------------------ answering

    def _handlers(self) -> grpc.GenericRpcHandler:
        requests: dict[str, tuple[Any, Callable[[Any], Any]]] = {
            "List": (ListPodResourcesRequest, self._list)
        }
        if self._version.has_get:
            requests["GetAllocatableResources"] = (AllocatableResourcesRequest, self._allocatable)
            requests["Get"] = (GetPodResourcesRequest, self._get)
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    self._behaviour(answer), request_deserializer=request.FromString
                )
                for name, (request, answer) in requests.items()
            },
        )

    def _behaviour(self, answer: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        """The handler that answers with `answer(request)`, or fails as it is told to."""

        async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
            self.questions += 1
            if self.latency_seconds:
                await asyncio.sleep(self.latency_seconds)
            if self.fault == "hang":
                await asyncio.Event().wait()
            if self.fault == "garbage":
                return b"\xff\xfe not a message"
            if self.fault == "unimplemented":
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"unknown service {SERVICE}")
            if self.fault == "unknown":
                await context.abort(grpc.StatusCode.UNKNOWN, "something went wrong")
            if self.fault == "internal":
                await context.abort(grpc.StatusCode.INTERNAL, "something went wrong")
            if self._refuses():
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
            try:
                return bytes(answer(request).SerializeToString())
            except LookupError as error:
                # A plain error of the kubelet's code has no code of its own.
                await context.abort(grpc.StatusCode.UNKNOWN, str(error.args[0]))
                raise

        return handle

    def _refuses(self) -> bool:
        if self.refuse_next > 0:
            self.refuse_next -= 1
            return True
        if self.fault == "rate_limited":
            return True
        return self._version.limits_rate and not self._limit.allows()

    def _present(self) -> Mapping[PodKey, tuple[ListedContainer, ...]]:
        return {} if self._clock() < self._empty_until else self._pods

    def _list(self, _: ListPodResourcesRequest) -> ListPodResourcesResponse:
        pods = [self._pod(key, containers) for key, containers in self._present().items()]
        self._random.shuffle(pods)
        return ListPodResourcesResponse(pod_resources=pods)

    def _get(self, request: GetPodResourcesRequest) -> GetPodResourcesResponse:
        key = (request.pod_namespace, request.pod_name)
        containers = self._present().get(key)
        if containers is None or not any(item.devices or item.claims for item in containers):
            raise LookupError(f"pod {key[1]} in namespace {key[0]} not found")
        return GetPodResourcesResponse(pod_resources=self._pod(key, containers))

    def _allocatable(self, _: AllocatableResourcesRequest) -> AllocatableResourcesResponse:
        entries = [
            _entry(resource, [device], nodes)
            for resource, devices in self._plugins.items()
            for device, nodes in devices.items()
            if (resource, device) not in self._unhealthy
        ]
        self._random.shuffle(entries)
        return AllocatableResourcesResponse(devices=entries)

    def _pod(self, key: PodKey, containers: Iterable[ListedContainer]) -> PodResources:
        listed = [
            ContainerResources(
                name=container.name,
                devices=self._entries(container),
                dynamic_resources=_claims(container.claims),
            )
            for container in containers
        ]
        return PodResources(namespace=key[0], name=key[1], containers=listed)

    def _entries(self, container: ListedContainer) -> list[ContainerDevices]:
        """One entry a device and NUMA node, or one a resource and NUMA node."""
        entries = []
        for resource, ids in container.devices.items():
            by_node: dict[int | None, list[str]] = {}
            for device in self._random.sample(list(ids), len(ids)):
                for node in self._numa.get((resource, device)) or (None,):
                    by_node.setdefault(node, []).append(device)
            for node, devices in by_node.items():
                nodes = None if node is None else (node,)
                groups = [[device] for device in devices]
                if not self._version.entry_per_device:
                    groups = [devices]
                entries += [_entry(resource, group, nodes) for group in groups]
        self._random.shuffle(entries)
        return entries


class _RateLimit:
    """A bucket that fills with time; every call takes one from it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = QUESTIONS_AT_ONCE
        self._filled_at = clock()

    def allows(self) -> bool:
        """Whether a call may pass now."""
        now = self._clock()
        self._left += (now - self._filled_at) * QUESTIONS_PER_SECOND
        self._left = min(self._left, QUESTIONS_AT_ONCE)
        self._filled_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _entry(resource: str, devices: Sequence[str], nodes: NumaNodes) -> ContainerDevices:
    topology = None
    if nodes is not None:
        topology = TopologyInfo(nodes=[NUMANode(ID=node) for node in nodes])
    return ContainerDevices(resource_name=resource, device_ids=devices, topology=topology)


def _claims(claims: Sequence[ClaimDevice]) -> list[DynamicResource]:
    by_claim: dict[tuple[str, str], list[ClaimResource]] = {}
    for claim in claims:
        by_claim.setdefault((claim.claim_namespace, claim.claim_name), []).append(
            ClaimResource(
                cdi_devices=[CDIDevice(name=name) for name in claim.cdi_devices],
                driver_name=claim.driver,
                pool_name=claim.pool,
                device_name=claim.device,
                share_id=claim.share_id or None,
            )
        )
    return [
        DynamicResource(claim_namespace=namespace, claim_name=name, claim_resources=resources)
        for (namespace, name), resources in by_claim.items()
    ]
