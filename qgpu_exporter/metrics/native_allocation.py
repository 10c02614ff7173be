"""Native families of allocations: who was given what, in sum and as a fact to join on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qgpu_exporter.allocation.quantity import parse
from qgpu_exporter.metrics.family import Family, Scope, itself, present
from qgpu_exporter.metrics.scopes import NODE
from qgpu_exporter.model import Allocation, CardAllocated, Snapshot

AllocationFamily = Family[Snapshot, Any]

CONTAINER_LABELS = ("node", "gpu", "namespace", "pod", "container")
"""The label names of every family about a container's share of a card."""

_GPU_DOMAINS = ("nvidia.com/", "tencent.com/vcuda")
MIG_CONFIG_STATE = "nvidia.com/mig.config.state"


@dataclass(frozen=True, slots=True)
class Share:
    """What one container holds of one card; several slices of it summed, None: no guarantee."""

    core_percent: float | None = None
    memory_bytes: int | None = None
    greedy_core_percent: float | None = None


def shares(allocations: tuple[Allocation, ...]) -> dict[tuple[int, str, str, str], Share]:
    """By (gpu, namespace, pod, container), in the order of the allocations."""
    found: dict[tuple[int, str, str, str], Share] = {}
    for one in allocations:
        key = (one.gpu, one.namespace, one.pod, one.container)
        before = found.get(key, Share())
        memory = _sum(before.memory_bytes, one.memory_bytes)
        found[key] = Share(
            _sum(before.core_percent, one.core_percent),
            None if memory is None else int(memory),
            _sum(before.greedy_core_percent, one.greedy_core_percent),
        )
    return found


def _sum(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


# --------------------------------------------------------------------------- rows


def _shares(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Share]]:
    if snapshot.allocation is not None:
        for (gpu, *names), share in shares(snapshot.allocation.allocations).items():
            yield (snapshot.node, str(gpu), *names), share


def _allocations(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Allocation]]:
    for one in snapshot.allocation.allocations if snapshot.allocation else ():
        labels = (snapshot.node, str(one.gpu), one.namespace, one.pod, one.container)
        facts = (one.pod_uid or "", one.uuid, one.resource, one.scheme, one.device)
        yield (*labels, *facts), one


def _claims(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Allocation]]:
    for one in snapshot.allocation.allocations if snapshot.allocation else ():
        if (claim := one.claim) is not None:
            labels = (snapshot.node, str(one.gpu), one.namespace, one.pod, one.container)
            names = (claim.claim_namespace, claim.claim_name)
            device = (claim.driver, claim.pool, claim.device, claim.share_id)
            yield (*labels, one.uuid, *names, *device), one


def _allocated(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], CardAllocated]]:
    for gpu, allocated in sorted(snapshot.allocated.items()):
        yield (snapshot.node, str(gpu)), allocated


def _conflicts(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int]]:
    if snapshot.allocation is not None:
        for (gpu, kind), count in sorted(snapshot.allocation.conflicts.items()):
            yield (snapshot.node, str(gpu), kind), count


def _problems(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int]]:
    kinds = (
        [problem.kind for problem in snapshot.allocation.problems] if snapshot.allocation else []
    )
    for kind in sorted(set(kinds)):
        yield (snapshot.node, kind), kinds.count(kind)


def _allocatable(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], str]]:
    for resource, amount in sorted(_amounts(snapshot).items()):
        if resource.startswith(_GPU_DOMAINS) or "gpu" in resource.lower():
            yield (snapshot.node, resource), amount


def _amounts(snapshot: Snapshot) -> dict[str, str]:
    return dict(snapshot.node_object.allocatable) if snapshot.node_object else {}


def _mig_config(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], str]]:
    labels = snapshot.node_object.labels if snapshot.node_object else {}
    if state := labels.get(MIG_CONFIG_STATE):
        yield (snapshot.node, state), state


_SHARES = Scope("containers by card", CONTAINER_LABELS, _shares)
_ALLOCATIONS = Scope(
    "allocations",
    (*CONTAINER_LABELS, "pod_uid", "uuid", "resource", "scheme", "device"),
    _allocations,
)
_CLAIMS = Scope(
    "devices of claims",
    (
        *CONTAINER_LABELS,
        "uuid",
        "claim_namespace",
        "claim_name",
        "driver",
        "pool",
        "device",
        "share_id",
    ),
    _claims,
)
_ALLOCATED = Scope("known cards, once allocations are complete", ("node", "gpu"), _allocated)
_CONFLICTS = Scope("contradictions about a card", ("node", "gpu", "kind"), _conflicts)
_PROBLEMS = Scope("kinds of problems", ("node", "kind"), _problems)
_ALLOCATABLE = Scope("GPU resources of the node", ("node", "resource"), _allocatable)
_MIG_CONFIG = Scope("state of the MIG configuration", ("node", "state"), _mig_config)


# --------------------------------------------------------------------------- values


def _handed_out(part: str) -> Callable[[CardAllocated], float | None]:
    """0 on a card that nobody holds; None where somebody holds it without a guaranteed amount."""

    def value(allocated: CardAllocated) -> float | None:
        amount: float | None = getattr(allocated, part)
        return 0 if amount is None and not allocated.containers else amount

    return value


def _unassigned(snapshot: Snapshot) -> int | None:
    result = snapshot.allocation
    return len(result.unassigned_pods) if result is not None and result.complete else None


ALLOCATION: tuple[AllocationFamily, ...] = (
    Family(
        "node_gpu_core_request",
        "gauge",
        "Computing power that the container was given, in percent of one card (100 is a whole "
        "card).",
        _SHARES,
        lambda share: share.core_percent,
        "allocation scheme",
    ),
    Family(
        "node_gpu_memory_request_bytes",
        "gauge",
        "GPU memory that the container was given, in bytes.",
        _SHARES,
        lambda share: share.memory_bytes,
        "allocation scheme",
    ),
    Family(
        "node_gpu_core_greedy_request",
        "gauge",
        "Computing power that an offline container may take while others leave it, in percent of "
        "one card; no part of node_gpu_core_request.",
        _SHARES,
        lambda share: share.greedy_core_percent,
        "resource tke.cloud.tencent.com/qgpu-core-greedy",
    ),
    Family(
        "node_gpu_allocation_info",
        "info",
        "The container holds the card, a share of it, or a slice (uuid and device are the "
        "slice's).",
        _ALLOCATIONS,
        present,
        "allocation scheme",
    ),
    Family(
        "node_gpu_dra_claim_info",
        "info",
        "The claim by which the container holds the device.",
        _CLAIMS,
        present,
        "kubelet pod-resources, dynamic resources",
    ),
    Family(
        "node_gpu_core_allocated",
        "gauge",
        "Computing power of the card that is given away, in percent; more than 100 is "
        "over-commitment.",
        _ALLOCATED,
        _handed_out("core_percent"),
        "sum over allocations",
    ),
    Family(
        "node_gpu_memory_allocated_bytes",
        "gauge",
        "Memory of the card that is given away, in bytes.",
        _ALLOCATED,
        _handed_out("memory_bytes"),
        "sum over allocations",
    ),
    Family(
        "node_gpu_containers",
        "gauge",
        "Containers that hold the card, a share or a slice of it.",
        _ALLOCATED,
        lambda allocated: allocated.containers,
        "count over allocations",
    ),
    Family(
        "node_gpu_allocation_conflicts",
        "gauge",
        "Containers for which the kubelet and the pod's annotation name different cards.",
        _CONFLICTS,
        itself,
        "kubelet pod-resources against annotations",
    ),
    Family(
        "node_gpu_allocation_problems",
        "gauge",
        "Present contradictions and unreadable facts about allocations, by kind.",
        _PROBLEMS,
        itself,
        "allocation schemes",
    ),
    Family(
        "node_gpu_pods_unassigned",
        "gauge",
        "Pods of the node that ask for a share of a card and have no card written down yet.",
        NODE,
        _unassigned,
        "pods' annotations",
    ),
    Family(
        "node_gpu_resource_allocatable",
        "gauge",
        "What the node offers of a GPU resource, in the resource's own unit.",
        _ALLOCATABLE,
        lambda amount: float(parse(amount)),
        "node object, status.allocatable",
    ),
    Family(
        "node_gpu_mig_config_state",
        "gauge",
        "1 with the present state of the node's MIG configuration.",
        _MIG_CONFIG,
        present,
        "node label nvidia.com/mig.config.state",
    ),
)
