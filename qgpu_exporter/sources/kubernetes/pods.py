"""This node's pods: a copy of what the API server lists, cut down to what decides about GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from qgpu_exporter.model import (
    Container,
    ContainerKind,
    ContainerState,
    Pod,
    PodList,
    SourceHealth,
)
from qgpu_exporter.sources import HealthRecord
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.objects import (
    Metadata,
    annotations_of,
    decode,
    extended_resources,
)
from qgpu_exporter.sources.kubernetes.watch import Reflection, Timing

_CONFIG_HASH = "kubernetes.io/config.hash"
_CONTAINER_ID = re.compile(r"(?:[a-z0-9.-]+://)?([0-9a-f]{64})")

_Amounts = dict[str, str | int | float | None]


class _ClaimReference(msgspec.Struct):
    name: str


class _Resources(msgspec.Struct):
    limits: _Amounts | None = None
    requests: _Amounts | None = None
    claims: list[_ClaimReference] | None = None


class _Container(msgspec.Struct):
    name: str
    resources: _Resources | None = None
    restart_policy: str | None = msgspec.field(default=None, name="restartPolicy")


class _PodClaim(msgspec.Struct):
    name: str
    claim: str | None = msgspec.field(default=None, name="resourceClaimName")


class _Spec(msgspec.Struct):
    node_name: str | None = msgspec.field(default=None, name="nodeName")
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = msgspec.field(default=None, name="initContainers")
    ephemeral_containers: list[_Container] | None = msgspec.field(
        default=None, name="ephemeralContainers"
    )
    claims: list[_PodClaim] | None = msgspec.field(default=None, name="resourceClaims")


class _Present(msgspec.Struct):
    """An object of which only its being there matters."""


class _State(msgspec.Struct):
    waiting: _Present | None = None
    running: _Present | None = None
    terminated: _Present | None = None


class _ContainerStatus(msgspec.Struct):
    name: str
    container_id: str | None = msgspec.field(default=None, name="containerID")
    state: _State | None = None


class _RequestMapping(msgspec.Struct):
    container: str = msgspec.field(name="containerName")


class _ExtendedClaim(msgspec.Struct):
    claim: str = msgspec.field(name="resourceClaimName")
    mappings: list[_RequestMapping] | None = msgspec.field(default=None, name="requestMappings")


class _PodStatus(msgspec.Struct):
    phase: str | None = None
    containers: list[_ContainerStatus] | None = msgspec.field(
        default=None, name="containerStatuses"
    )
    init_containers: list[_ContainerStatus] | None = msgspec.field(
        default=None, name="initContainerStatuses"
    )
    ephemeral_containers: list[_ContainerStatus] | None = msgspec.field(
        default=None, name="ephemeralContainerStatuses"
    )
    claims: list[_PodClaim] | None = msgspec.field(default=None, name="resourceClaimStatuses")
    extended_claim: _ExtendedClaim | None = msgspec.field(
        default=None, name="extendedResourceClaimStatus"
    )


class _Pod(msgspec.Struct):
    metadata: Metadata
    spec: _Spec | None = None
    status: _PodStatus | None = None


def decode_pod(
    raw: bytes | Mapping[str, Any],
    *,
    keep_labels: re.Pattern[str] | None = None,
    first_seen_at_seconds: float = 0.0,
) -> Pod:
    """A pod from its JSON, or from the value of that JSON.

    Kept are the annotations of `objects.KEPT_PREFIXES` and the labels whose whole name
    `keep_labels` matches.  Raises one of `objects.UNREADABLE` for what is no pod.
    """
    return _pod(decode(raw, _Pod), keep_labels, first_seen_at_seconds)


def _pod(wire: _Pod, keep_labels: re.Pattern[str] | None, first_seen_at_seconds: float) -> Pod:
    metadata, status = wire.metadata, wire.status or _PodStatus()
    annotations = annotations_of(metadata)
    return Pod(
        namespace=metadata.namespace or "",
        name=metadata.name,
        uid=metadata.uid,
        phase=status.phase or "Pending",
        annotations=annotations,
        labels={
            key: value
            for key, value in sorted((metadata.labels or {}).items())
            if value is not None and keep_labels is not None and keep_labels.fullmatch(key)
        },
        containers=tuple(_containers(wire.spec or _Spec(), status)),
        terminating=metadata.deletion_timestamp is not None,
        config_hash=annotations.get(_CONFIG_HASH),
        first_seen_at_seconds=first_seen_at_seconds,
    )


def _containers(spec: _Spec, status: _PodStatus) -> Iterator[Container]:
    groups: tuple[
        tuple[
            Literal["init", "app", "ephemeral"],
            list[_Container] | None,
            list[_ContainerStatus] | None,
        ],
        ...,
    ] = (
        ("init", spec.init_containers, status.init_containers),
        ("app", spec.containers, status.containers),
        ("ephemeral", spec.ephemeral_containers, status.ephemeral_containers),
    )
    claims = _claims_by_container(spec, status)
    for group, containers, statuses in groups:
        by_name = {one.name: one for one in statuses or ()}
        for container in containers or ():
            kind: ContainerKind = group
            if group == "init" and container.restart_policy == "Always":
                kind = "sidecar"
            resources = container.resources or _Resources()
            told = by_name.get(container.name)
            yield Container(
                name=container.name,
                kind=kind,
                resources=extended_resources(resources.limits, resources.requests),
                state=_state(told.state if told else None),
                container_id=_container_id(told.container_id if told else None),
                claims=claims.get(container.name, ()),
            )


def _state(state: _State | None) -> ContainerState | None:
    if state is None:
        return None
    if state.running is not None:
        return "running"
    if state.terminated is not None:
        return "terminated"
    # An empty state is a waiting one: so says the API's documentation.
    return "waiting"


def _container_id(text: str | None) -> str | None:
    match = _CONTAINER_ID.fullmatch(text or "")
    return match[1] if match else None


def _claims_by_container(spec: _Spec, status: _PodStatus) -> dict[str, tuple[str, ...]]:
    """The names of the ResourceClaims of each container.

    A container names an entry of the pod, the entry a claim; where the claim is made from a
    template, only the status knows its name.  The claim that stands for extended resources is in
    no spec at all.
    """
    names = {one.name: one.claim for one in (*(spec.claims or ()), *(status.claims or ()))}
    claims: dict[str, set[str]] = {}
    for container in (*(spec.init_containers or ()), *(spec.containers or ())):
        resources = container.resources or _Resources()
        for reference in resources.claims or ():
            claim = names.get(reference.name)
            if claim:
                claims.setdefault(container.name, set()).add(claim)
    if status.extended_claim is not None:
        for mapping in status.extended_claim.mappings or ():
            claims.setdefault(mapping.container, set()).add(status.extended_claim.claim)
    return {container: tuple(sorted(found)) for container, found in claims.items()}


class Pods:
    """The pods bound to one node; `clock` is monotonic, `wall_clock` Unix time, in seconds."""

    def __init__(
        self,
        connection: Connection,
        node: str,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        keep_labels: re.Pattern[str] | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._node = node
        self._clock = clock
        self._keep_labels = keep_labels
        self._first_seen: dict[str, float] = {}
        self._health = HealthRecord("kubernetes", wall_clock)
        self._reflection = Reflection(
            connection,
            "/api/v1/pods",
            {"fieldSelector": f"spec.nodeName={node}"},
            self._decode,
            self._health,
            wall_clock=wall_clock,
            timing=timing,
        )
        self.latest: PodList | None = None
        """The pods of the last list with all events since; None before the first list."""

    @property
    def health(self) -> SourceHealth:
        """How the source does."""
        return self._health.health

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep `latest` current until cancelled; calls `changed` when a pod came, changed, went."""

        def publish(differs: bool) -> None:
            self._publish()
            if differs:
                changed()

        await self._reflection.run(publish)

    def _publish(self) -> None:
        pods = sorted(
            self._reflection.objects.values(), key=lambda pod: (pod.namespace, pod.name, pod.uid)
        )
        self._first_seen = {pod.uid: pod.first_seen_at_seconds for pod in pods}
        self.latest = PodList(self._reflection.timestamp_seconds, tuple(pods))

    def _decode(self, raw: bytes) -> Pod | None:
        wire = decode(raw, _Pod)
        if wire.spec is None or wire.spec.node_name != self._node:
            return None
        first_seen = self._first_seen.setdefault(wire.metadata.uid, self._clock())
        return _pod(wire, self._keep_labels, first_seen)
