"""join(): the latest of every source -> one Snapshot; pure, and the only place where they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qgpu_exporter.allocation import AllocationInputs, MemoryUnit, allocate, card_totals
from qgpu_exporter.model import (
    Card,
    CgroupNames,
    GpuObject,
    KubeletList,
    Node,
    PodList,
    Reading,
    SliceDevice,
    Snapshot,
    StackFact,
    Totals,
)
from qgpu_exporter.usage import UsageInputs, attribute


@dataclass(frozen=True, slots=True)
class JoinInputs:
    """The latest value of every source; None: not known (off, failing, or not yet answered)."""

    node: str
    timestamp_seconds: float
    cards: tuple[Card, ...] | None = None
    """Of the inventory; None while NVML has never answered."""
    reading: Reading | None = None
    """The last reading, None once it is too old."""
    totals: Totals = Totals()
    names: Mapping[int, CgroupNames] | None = None
    """By pid; None: the processes source is off or failing."""
    kubelet_expected: bool = False
    kubelet: KubeletList | None = None
    pods_expected: bool = False
    pods: PodList | None = None
    pods_overdue: bool = False
    """No first list came within its time: what the kubelet alone proves is shown."""
    node_object: Node | None = None
    slices: tuple[SliceDevice, ...] | None = None
    gpu_objects: tuple[GpuObject, ...] | None = None
    stack: tuple[StackFact, ...] = ()
    gpushare_memory_unit: MemoryUnit = "auto"
    volcano_memory_factor: int = 1
    xid_classes: Mapping[int, str] = field(default_factory=dict)
    pod_labels_exported: bool = False


def join(inputs: JoinInputs) -> Snapshot:
    """One snapshot; the same inputs in any order give an equal one."""
    cards = inputs.cards or ()
    result = None
    if inputs.kubelet_expected or inputs.pods_expected:
        result = allocate(_allocation_inputs(inputs, cards))
    usage = attribute(
        UsageInputs(
            cards=cards,
            allocation=result,
            pods=inputs.pods,
            names=inputs.names,
            totals=inputs.totals,
        )
    )
    reading = inputs.reading
    return Snapshot(
        node=inputs.node,
        timestamp_seconds=inputs.timestamp_seconds,
        driver_version=reading.driver_version if reading else None,
        nvml_version=reading.nvml_version if reading else None,
        cuda_version=reading.cuda_version if reading else None,
        cards=inputs.cards,
        devices_up=reading is not None,
        allocation=result,
        usage=usage,
        pods=inputs.pods,
        node_object=inputs.node_object,
        stack=inputs.stack,
        allocated=card_totals(result, cards) if result is not None and result.complete else {},
        xid_classes=inputs.xid_classes,
        pod_labels_exported=inputs.pod_labels_exported,
    )


def _allocation_inputs(inputs: JoinInputs, cards: tuple[Card, ...]) -> AllocationInputs:
    return AllocationInputs(
        cards=cards,
        kubelet=inputs.kubelet,
        kubelet_expected=inputs.kubelet_expected,
        pods=inputs.pods,
        pods_expected=inputs.pods_expected,
        pods_overdue=inputs.pods_overdue,
        node=inputs.node_object,
        node_name=inputs.node,
        slices=inputs.slices,
        gpu_objects=inputs.gpu_objects,
        gpushare_memory_unit=inputs.gpushare_memory_unit,
        volcano_memory_factor=inputs.volcano_memory_factor,
    )
