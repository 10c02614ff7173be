"""Builders of small made-up nodes: cards, pods and kubelet rows for the tests of allocations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qgpu_exporter.allocation import AllocationInputs, allocate
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardIdentity,
    CardReading,
    ClaimDevice,
    Container,
    ContainerKind,
    ContainerState,
    KubeletContainer,
    KubeletList,
    Memory,
    MigSlice,
    Node,
    Pod,
    PodList,
)

MIB = 1024**2
GIB = 1024**3

QGPU_CORE = "tke.cloud.tencent.com/qgpu-core"
QGPU_MEMORY = "tke.cloud.tencent.com/qgpu-memory"
QGPU_GREEDY = "tke.cloud.tencent.com/qgpu-core-greedy"
QGPU_CARD = "tke.cloud.tencent.com/qgpu-pgpu-"
NVIDIA = "nvidia.com/gpu"


def card_uuid(index: int) -> str:
    """The UUID of made-up card `index`."""
    return f"GPU-{index:08x}-1111-4222-8333-{index:012x}"


def mig_uuid(number: int) -> str:
    """The UUID of made-up slice `number`."""
    return f"MIG-{number:08x}-5555-5666-8777-{number:012x}"


def card(
    index: int,
    *,
    minor: int | None = None,
    memory_bytes: int | None = 24 * GIB,
    slices: Sequence[MigSlice] = (),
    compute_slices: int | None = 7,
    answers: bool = True,
) -> Card:
    """A card whose minor number is its index unless said otherwise."""
    identity = CardIdentity(index, card_uuid(index), index if minor is None else minor)
    mig = compute_slices if slices else None
    reading = CardReading(identity, mig_slices=tuple(slices), mig_compute_slices=mig)
    return Card(
        identity,
        reading if answers else None,
        None if answers else "timeout",
        memory_bytes,
        mig,
    )


def mig(
    number: int,
    gpu_instance: int,
    profile: str,
    *,
    compute_instance: int = 0,
    compute_slices: int = 1,
    memory_bytes: int = 10 * GIB,
    placement_start: int | None = None,
    uuid: bool = True,
) -> MigSlice:
    """A slice; `number` makes its UUID."""
    return MigSlice(
        gpu_instance,
        compute_instance,
        mig_uuid(number) if uuid else None,
        profile,
        compute_slices=compute_slices,
        placement_start=placement_start,
        memory=Memory(memory_bytes, 0),
    )


def container(
    name: str = "main",
    kind: ContainerKind = "app",
    state: ContainerState | None = "running",
    claims: tuple[str, ...] = (),
    **resources: str,
) -> Container:
    """A container without resources; see `asking`."""
    return Container(name, kind, resources, state, claims=claims)


def asking(
    resources: Mapping[str, str],
    name: str = "main",
    kind: ContainerKind = "app",
    state: ContainerState | None = "running",
) -> Container:
    """A container that asks for these resources."""
    return Container(name, kind, resources, state)


def qgpu(
    core: str | None = None,
    memory: str | None = None,
    greedy: str | None = None,
    name: str = "main",
    kind: ContainerKind = "app",
    state: ContainerState | None = "running",
) -> Container:
    """A container that asks for qGPU shares."""
    amounts = {QGPU_CORE: core, QGPU_MEMORY: memory, QGPU_GREEDY: greedy}
    return asking({k: v for k, v in amounts.items() if v is not None}, name, kind, state)


def pod(
    name: str,
    *containers: Container,
    annotations: Mapping[str, str] | None = None,
    phase: str = "Running",
    terminating: bool = False,
    first_seen: float = 0.0,
    uid: str | None = None,
) -> Pod:
    """A running pod of namespace `demo`."""
    return Pod(
        "demo",
        name,
        uid or f"uid-{name}",
        phase,
        annotations or {},
        containers=containers,
        terminating=terminating,
        first_seen_at_seconds=first_seen,
    )


def row(
    pod_name: str,
    devices: Mapping[str, Sequence[str]] | None = None,
    *,
    name: str = "main",
    claims: Sequence[ClaimDevice] = (),
) -> KubeletContainer:
    """What the kubelet lists for one container of a pod of namespace `demo`."""
    held = {resource: tuple(sorted(ids)) for resource, ids in (devices or {}).items()}
    return KubeletContainer("demo", pod_name, name, held, tuple(claims))


def kubelet(*rows: KubeletContainer, asked_at: float = 10.0) -> KubeletList:
    """An answer of the kubelet."""
    return KubeletList(asked_at, 1000.0, rows)


def node(
    labels: Mapping[str, str] | None = None, allocatable: Mapping[str, str] | None = None
) -> Node:
    """The node's own object."""
    return Node("node-1", labels or {}, allocatable=allocatable or {})


def world(
    cards: Sequence[Card],
    pods: Sequence[Pod] | None = None,
    listed: KubeletList | None = None,
    of_node: Node | None = None,
) -> AllocationInputs:
    """Inputs whose API and kubelet sources are on where they have given something."""
    return AllocationInputs(
        cards=tuple(cards),
        kubelet=listed,
        kubelet_expected=listed is not None,
        pods=PodList(1000.0, tuple(pods)) if pods is not None else None,
        pods_expected=pods is not None,
        node=of_node,
        node_name="node-1",
    )


Share = tuple[str, str, int, str | None, float | None, int | None]


def shares(result: AllocationResult) -> list[Share]:
    """(pod, container, gpu, mig, core percent, memory bytes) of each allocation, in order."""

    def share(one: Allocation) -> Share:
        return (one.pod, one.container, one.gpu, one.mig, one.core_percent, one.memory_bytes)

    return [share(one) for one in result.allocations]


def shares_of(inputs: AllocationInputs) -> list[Share]:
    """The shares that these inputs come to."""
    return shares(allocate(inputs))


def problems_of(inputs: AllocationInputs) -> list[tuple[str, str, str]]:
    """(kind, pod, container) of each problem, in order."""
    return [(one.kind, one.pod, one.container) for one in allocate(inputs).problems]
