"""Who wants what of the simulated node: its pods, their shares of its cards, their work there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qgpu_exporter.model import ClaimDevice, ContainerKind
from qgpu_exporter.reader.simulated import SLICES, card_uuid, memory_total_bytes, slice_uuid

NODE = "demo-node"

QGPU_CORE = "tke.cloud.tencent.com/qgpu-core"
QGPU_MEMORY = "tke.cloud.tencent.com/qgpu-memory"
QGPU_GREEDY_CORE = "tke.cloud.tencent.com/qgpu-core-greedy"
QGPU_CARD = "tke.cloud.tencent.com/qgpu-pgpu-"
"""Annotation, followed by a container's name: the indices of its cards."""
GPU = "nvidia.com/gpu"
SHARED_GPU = "nvidia.com/gpu.shared"
DRA_DRIVER = "gpu.nvidia.com"

QGPU_CARDS = (0, 1)
SHARED_CARD = 2
WHOLE_CARDS = (3, 5, 6)
CLAIM_CARD = 7
REPLICAS = 4

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Work:
    """A process of a container on a card; ratios are of the card, or of the slice named."""

    gpu: int
    memory_bytes: int
    sm_ratio: float
    gpu_instance: int | None = None


@dataclass(frozen=True, slots=True)
class WorkContainer:
    """A container: what it asks for, which devices it is given, and what it does with them.

    `units` are devices of a plugin that makes up its ids, a count by resource: which ones a
    container gets says nothing about the card.
    """

    name: str
    resources: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    claims: tuple[ClaimDevice, ...] = ()
    work: tuple[Work, ...] = ()
    kind: ContainerKind = "app"


@dataclass(frozen=True, slots=True)
class Workload:
    """A pod as its owner writes it, with the scheduler's annotations."""

    namespace: str
    name: str
    containers: tuple[WorkContainer, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


def qgpu_pod(
    namespace: str,
    name: str,
    cards: Iterable[int],
    *,
    core: int = 0,
    greedy_core: int = 0,
    memory: int,
    work: Iterable[Work] = (),
) -> Workload:
    """A pod with a qGPU share; `core` in percent of a card, `memory` in GiB, over all cards."""
    amounts = {QGPU_CORE: core, QGPU_GREEDY_CORE: greedy_core, QGPU_MEMORY: memory}
    amounts = {resource: amount for resource, amount in amounts.items() if amount}
    container = WorkContainer(
        "main",
        resources={resource: str(amount) for resource, amount in amounts.items()},
        units=amounts,
        work=tuple(work),
    )
    index = ",".join(str(card) for card in cards)
    return Workload(namespace, name, (container,), {f"{QGPU_CARD}main": index}, {"app": name})


def device_pod(
    namespace: str, name: str, resource: str, devices: Iterable[str], work: Iterable[Work] = ()
) -> Workload:
    """A pod with devices that the kubelet's ids name: cards, slices or replicas."""
    ids = tuple(devices)
    container = WorkContainer(
        "main", {resource: str(len(ids))}, {}, {resource: ids}, (), tuple(work)
    )
    return Workload(namespace, name, (container,), {}, {"app": name})


def inventory() -> dict[str, dict[str, tuple[int, ...] | None]]:
    """What the node's device plugins offer: resource -> device id -> NUMA nodes."""
    offered: dict[str, dict[str, tuple[int, ...] | None]] = {
        QGPU_CORE: _units(100),
        QGPU_GREEDY_CORE: _units(100),
        QGPU_MEMORY: _units(memory_total_bytes(QGPU_CARDS[0]) // _GIB),
        SHARED_GPU: {replica(number): (0,) for number in range(REPLICAS)},
        GPU: {card_uuid(card): (0 if card < 6 else 1,) for card in WHOLE_CARDS},
    }
    for part in SLICES:
        uuid = slice_uuid(part.gpu_instance)
        offered.setdefault(f"nvidia.com/mig-{part.profile}", {})[uuid] = (0,)
    return offered


def replica(number: int) -> str:
    """Device id of a time-sliced replica of the shared card."""
    return f"{card_uuid(SHARED_CARD)}::{number}"


def _units(per_card: int) -> dict[str, tuple[int, ...] | None]:
    return {f"{card}-{unit:02d}": None for card in QGPU_CARDS for unit in range(per_card)}


def _claimed() -> Workload:
    device = f"gpu-{CLAIM_CARD}"
    cdi = f"k8s.gpu.nvidia.com/claim=1c7d0000-0000-4000-8000-000000000007-{device}"
    claim = ClaimDevice("platform", "speech-gpu", DRA_DRIVER, NODE, device, "", (cdi,))
    container = WorkContainer("main", claims=(claim,), work=(Work(CLAIM_CARD, 30 * _GIB, 0.45),))
    return Workload("platform", "speech", (container,), {}, {"app": "speech"})


def _training() -> Workload:
    """Two cards on two NUMA nodes; an init container uses one of them first."""
    cards = WHOLE_CARDS[1:]
    init = WorkContainer("fetch", {GPU: "1"}, kind="init", work=(Work(cards[0], _GIB, 0.1),))
    sidecar = WorkContainer("monitor", kind="sidecar")
    main = WorkContainer(
        "train",
        {GPU: str(len(cards))},
        devices={GPU: tuple(card_uuid(card) for card in cards)},
        work=tuple(Work(card, 68 * _GIB, 0.95) for card in cards),
    )
    return Workload("research", "llm-train-0", (init, sidecar, main), {}, {"app": "llm-train"})


def _sliced(name: str, gpu_instance: int, memory_bytes: int, sm_ratio: float) -> Workload:
    profile = next(part.profile for part in SLICES if part.gpu_instance == gpu_instance)
    return device_pod(
        "research",
        name,
        f"nvidia.com/mig-{profile}",
        [slice_uuid(gpu_instance)],
        [Work(4, memory_bytes, sm_ratio, gpu_instance)],
    )


def always_there() -> tuple[Workload, ...]:
    """The pods that run from the start; card 1 has room for one that comes and goes."""
    return (
        qgpu_pod("chat", "chat-a", [0], core=30, memory=12, work=[Work(0, 10 * _GIB, 0.28)]),
        qgpu_pod("chat", "chat-b", [0], core=50, memory=20, work=[Work(0, 17 * _GIB, 0.4)]),
        qgpu_pod("batch", "filler", [0], greedy_core=20, memory=6, work=[Work(0, 3 * _GIB, 0.1)]),
        CRASHING,
        device_pod("research", "notebook-0", SHARED_GPU, [replica(0)], [Work(2, 6 * _GIB, 0.3)]),
        device_pod("research", "notebook-1", SHARED_GPU, [replica(1)], [Work(2, 2 * _GIB, 0.05)]),
        device_pod("platform", "reserved-idle", GPU, [card_uuid(3)]),
        _sliced("finetune", 2, 30 * _GIB, 0.9),
        _sliced("evaluate", 3, 9 * _GIB, 0.5),
        _sliced("rerank", 9, 4 * _GIB, 0.2),
        _training(),
        _claimed(),
    )


CRASHING = qgpu_pod("batch", "flaky", [1], core=25, memory=8, work=[Work(1, 5 * _GIB, 0.6)])
"""Its process dies again and again; the pod keeps its share."""


def nightly(number: int) -> Workload:
    """The pod that comes, finishes and goes."""
    return qgpu_pod(
        "batch", f"report-{number}", [1], core=50, memory=16, work=[Work(1, 12 * _GIB, 0.45)]
    )


HOST_PROCESSES: tuple[tuple[str, str, Work], ...] = (
    ("videowall", "/system.slice/videowall.service", Work(0, _GIB // 2, 0.03)),
)
"""(Program's name, cgroup, what it does) of processes outside Kubernetes."""
