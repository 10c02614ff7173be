"""Who was given what: a pure function from pods, kubelet and node to containers' shares of cards.

`SCHEMES` is read top to bottom: what one scheme explains, no later one sees.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qgpu_exporter.allocation.card_totals import card_totals
from qgpu_exporter.allocation.cards import Cards, Device, shares_gpu_instance
from qgpu_exporter.allocation.claims import ClaimUse
from qgpu_exporter.allocation.device_ids import candidates, parse
from qgpu_exporter.allocation.dra import DRA
from qgpu_exporter.allocation.elastic_gpu import ELASTIC_GPU, NANO_GPU
from qgpu_exporter.allocation.gpu_manager import GPU_MANAGER
from qgpu_exporter.allocation.gpushare import ALIYUN_GPUSHARE, VOLCANO_GPUSHARE
from qgpu_exporter.allocation.inputs import AllocationInputs, MemoryUnit
from qgpu_exporter.allocation.koordinator import KOORDINATOR
from qgpu_exporter.allocation.lifecycle import live_pods
from qgpu_exporter.allocation.nvidia import MIG_SLICES, REPLICAS, WHOLE_CARDS
from qgpu_exporter.allocation.qgpu import QGPU
from qgpu_exporter.allocation.scheme import Hold, PodView, Scheme, Surroundings, Unassigned
from qgpu_exporter.allocation.vgpu import HAMI, VOLCANO_VGPU
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    ClaimDevice,
    GpuObject,
    Problem,
)

__all__ = [
    "SCHEMES",
    "AllocationInputs",
    "MemoryUnit",
    "Scheme",
    "allocate",
    "card_totals",
]

SCHEMES: tuple[Scheme, ...] = (
    QGPU,
    ELASTIC_GPU,
    NANO_GPU,
    GPU_MANAGER,
    VOLCANO_VGPU,
    VOLCANO_GPUSHARE,
    ALIYUN_GPUSHARE,
    KOORDINATOR,
    HAMI,
    WHOLE_CARDS,
    MIG_SLICES,
    REPLICAS,
    DRA,
)
"""Those whose proof is an annotation come first, the more general ones last among them."""


def allocate(inputs: AllocationInputs) -> AllocationResult:
    """Every live container's hold on every card and slice, in an order that inputs do not change.

    A bad input (an unreadable annotation, a card that is not here) costs only itself and is a
    `Problem`.  Without any known card there is nothing that a share could be of: no rows, no
    problems, and no claim to be complete.
    """
    if not inputs.cards:
        return AllocationResult(complete=False)
    views, complete = live_pods(inputs)
    surroundings = _surroundings(inputs, views)
    found = _Found()
    for view in views:
        _explain(view, surroundings, found)
    found.problems.update(_mismatches(inputs.gpu_objects or (), inputs.cards))
    return AllocationResult(
        allocations=_memory_once(found.holds.values()),
        problems=tuple(sorted(found.problems, key=_problem_order)),
        conflicts=dict(sorted(found.conflicts.items())),
        unassigned_pods=tuple(sorted(found.unassigned)),
        complete=complete,
    )


@dataclass(slots=True)
class _Found:
    """What the schemes have found so far; a hold's key is what its series is told apart by."""

    holds: dict[tuple[int, str | None, str, str, str], tuple[Device, Allocation]] = field(
        default_factory=dict
    )
    problems: set[Problem] = field(default_factory=set)
    conflicts: Counter[tuple[int, str]] = field(default_factory=Counter)
    unassigned: set[tuple[str, str]] = field(default_factory=set)

    def add(self, scheme: Scheme, view: PodView, hold: Hold) -> None:
        """Keep a hold, unless the container has one on the same device already."""
        key = (hold.device.gpu, hold.device.mig, view.namespace, view.name, hold.container)
        if key not in self.holds:
            self.holds[key] = (hold.device, _allocation(scheme, view, hold))
        elif self.holds[key][1].scheme != scheme.name:
            detail = f"given by {self.holds[key][1].scheme} and by {scheme.name}"
            self.problems.add(view.problem("two_schemes", hold.container, detail, hold.device.gpu))


def _explain(view: PodView, surroundings: Surroundings, found: _Found) -> None:
    """Let every scheme speak of one pod, in order."""
    names = view.resources
    if not names and not any(view.claims.values()):
        return
    rest = view
    for scheme in SCHEMES:
        seen = rest
        if scheme.proof == "annotation":
            mine = scheme.owned(rest, names)
            if not mine:
                continue
            names -= mine
            seen, rest = rest.divide(mine)
            if view.pod is None:
                continue
        holds = []
        for finding in scheme.find(seen, surroundings):
            if isinstance(finding, Hold):
                found.add(scheme, view, finding)
                holds.append(finding)
            elif isinstance(finding, Unassigned):
                found.unassigned.add((view.namespace, view.name))
            else:
                found.problems.add(finding)
        if scheme.proof == "annotation":
            _compare_with_kubelet(seen, holds, surroundings, found)


def _compare_with_kubelet(
    view: PodView, holds: Sequence[Hold], surroundings: Surroundings, found: _Found
) -> None:
    """Count the containers whose device ids name other cards than their annotation does.

    Only ids that the kubelet's choice makes true are compared: most sharing plugins let it pick
    from made-up units and look at the annotation themselves, HAMi's slices included.
    """
    annotated: dict[str, set[int]] = defaultdict(set)
    for hold in holds:
        annotated[hold.container].add(hold.device.gpu)
    for container, gpus in annotated.items():
        listed = set(_named_by_kubelet(view, container, surroundings.cards))
        if not listed or listed == gpus:
            continue
        kinds = [(gpu, "annotation_only") for gpu in sorted(gpus - listed)]
        kinds += [(gpu, "kubelet_only") for gpu in sorted(listed - gpus)]
        found.conflicts.update(kinds)
        detail = f"annotation names {sorted(gpus)}, kubelet {sorted(listed)}"
        found.problems.add(view.problem("card_conflict", container, detail))


def _named_by_kubelet(view: PodView, container: str, cards: Cards) -> Iterator[int]:
    for ids in view.devices.get(container, {}).values():
        for raw in candidates(ids):
            device_id = parse(raw)
            if device_id is not None and device_id.names_card:
                yield from (one.gpu for one in cards.by_id(device_id) if one.slice is None)


def _allocation(scheme: Scheme, view: PodView, hold: Hold) -> Allocation:
    kinds = {container.name: container.kind for container in view.containers}
    return Allocation(
        namespace=view.namespace,
        pod=view.name,
        container=hold.container,
        gpu=hold.device.gpu,
        uuid=hold.device.uuid,
        scheme=scheme.name,
        resource=hold.resource,
        device=hold.device.uuid,
        pod_uid=view.pod.uid if view.pod is not None else None,
        mig=hold.device.mig,
        core_percent=hold.core_percent,
        memory_bytes=hold.memory_bytes,
        greedy_core_percent=hold.greedy_core_percent,
        kind=kinds.get(hold.container, "app"),
        exclusive=hold.exclusive,
        claim=hold.claim,
    )


def _memory_once(
    holds: Iterable[tuple[Device, Allocation]],
) -> tuple[Allocation, ...]:
    """The allocations in order; the memory of a GPU instance stands on one of its holders only.

    Compute instances of one GPU instance share all of its memory: it is given on the row of the
    lowest one that is held, so that sums over containers do not count it again.
    """
    counted: set[tuple[int, int]] = set()
    allocations = []
    for device, allocation in sorted(holds, key=lambda pair: _order(pair[1])):
        slice_ = device.slice
        if slice_ is not None and shares_gpu_instance(device.card, slice_):
            instance = (device.gpu, slice_.gpu_instance)
            if instance in counted:
                allocation = replace(allocation, memory_bytes=None)
            elif allocation.memory_bytes is not None:
                counted.add(instance)
        allocations.append(allocation)
    return tuple(allocations)


def _order(allocation: Allocation) -> tuple[int, tuple[int, ...], str, str, str]:
    mig = tuple(int(part) for part in (allocation.mig or "").split("/") if part.isdigit())
    return allocation.gpu, mig, allocation.namespace, allocation.pod, allocation.container


def _problem_order(problem: Problem) -> tuple[str, str, str, str, int, str]:
    gpu = problem.gpu if problem.gpu is not None else -1
    return problem.kind, problem.namespace, problem.pod, problem.container, gpu, problem.detail


def _mismatches(objects: Iterable[GpuObject], cards: Iterable[Card]) -> Iterator[Problem]:
    """Where the cluster's GPU objects and the driver number the cards differently."""
    by_uuid: Mapping[str, Card] = {card.identity.uuid: card for card in cards}
    for one in objects:
        card = by_uuid.get(one.uuid)
        if card is None:
            detail = f"the GPU object of card {one.index} names {one.uuid}, which is not here"
            yield Problem("card_mismatch", gpu=one.index, detail=detail)
            continue
        identity = card.identity
        if one.index != identity.index:
            detail = f"{one.uuid} has index {one.index} in its GPU object, {identity.index} in NVML"
            yield Problem("card_mismatch", gpu=identity.index, detail=detail)
        if None not in (one.minor, identity.minor) and one.minor != identity.minor:
            detail = f"{one.uuid} has minor {one.minor} in its GPU object, {identity.minor} in NVML"
            yield Problem("card_mismatch", gpu=identity.index, detail=detail)


def _surroundings(inputs: AllocationInputs, views: Iterable[PodView]) -> Surroundings:
    slices = None
    if inputs.slices is not None:
        slices = {(one.driver, one.pool, one.device): one for one in inputs.slices}
    return Surroundings(
        cards=Cards(inputs.cards),
        node=inputs.node,
        node_name=inputs.node_name or (inputs.node.name if inputs.node is not None else None),
        slices=slices,
        claim_use=ClaimUse.of(_claim_uses(views)),
        gpushare_memory_unit=inputs.gpushare_memory_unit,
        volcano_memory_factor=inputs.volcano_memory_factor,
    )


def _claim_uses(views: Iterable[PodView]) -> Iterator[tuple[tuple[str, str, str], ClaimDevice]]:
    """Every holder of a claimed device; init containers aside, which end before the others."""
    for view in views:
        inits = {one.name for one in view.containers if one.kind == "init"}
        for container, claims in view.claims.items():
            if container not in inits:
                for claim in claims:
                    yield (view.namespace, view.name, container), claim
