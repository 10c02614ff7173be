"""What the allocation is computed from: one value, the latest of every source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qgpu_exporter.model import Card, GpuObject, KubeletList, Node, PodList, SliceDevice

MemoryUnit = Literal["auto", "GiB", "MiB"]


@dataclass(frozen=True, slots=True)
class AllocationInputs:
    """The latest value of each source, and which sources are on; None = it has given none."""

    cards: tuple[Card, ...] = ()
    """Every known card, also those that do not answer."""
    kubelet: KubeletList | None = None
    kubelet_expected: bool = False
    """The kubelet source is on."""
    pods: PodList | None = None
    pods_expected: bool = False
    """The API source is on."""
    pods_overdue: bool = False
    """The API source is on and has given no first list for too long to wait for it."""
    node: Node | None = None
    node_name: str | None = None
    """This node's name, for annotations that say which node they were written for."""
    slices: tuple[SliceDevice, ...] | None = None
    """The devices of this node's ResourceSlices; None: off, or not readable."""
    gpu_objects: tuple[GpuObject, ...] | None = None
    gpushare_memory_unit: MemoryUnit = "auto"
    """Unit of ``aliyun.com/gpu-mem``."""
    volcano_memory_factor: int = 1
    """MiB in one unit of Volcano's memory resources."""
