"""What the kubelet's device ids prove by themselves: whole cards, MIG slices and replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.device_ids import DeviceId, candidates, parse
from qgpu_exporter.allocation.quantity import whole
from qgpu_exporter.allocation.scheme import Finding, Hold, PodView, Scheme, Surroundings
from qgpu_exporter.model import Container, Node

_SHARING_STRATEGY = "nvidia.com/gpu.sharing-strategy"
_REPLICAS = "nvidia.com/gpu.replicas"


@dataclass(frozen=True, slots=True)
class _Resolved:
    container: Container
    resource: str
    device: Device
    shared: bool


def _resolve(raw: str, node: Surroundings) -> tuple[DeviceId | None, tuple[Device, ...]]:
    """A device id and what it names here; an id that is a known UUID needs no known spelling."""
    base, separator, _ = raw.partition("::")
    known = node.cards.by_uuid(base)
    if known is not None:
        return DeviceId(uuid=base, shared=bool(separator)), (known,)
    device_id = parse(raw)
    return device_id, node.cards.by_id(device_id) if device_id is not None else ()


def _resolved(view: PodView, node: Surroundings) -> Iterator[_Resolved]:
    for container in view.holders():
        for resource, ids in sorted(view.devices.get(container.name, {}).items()):
            for raw in candidates(ids):
                device_id, devices = _resolve(raw, node)
                if device_id is not None:
                    for device in devices:
                        yield _Resolved(container, resource, device, device_id.shared)


def whole_cards(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a card; and a problem for each id that names a card or slice that is not here."""
    for found in _resolved(view, node):
        if found.device.slice is None and not found.shared:
            yield _exclusive(found)
    for container in view.holders():
        for ids in view.devices.get(container.name, {}).values():
            for raw in candidates(ids):
                device_id, devices = _resolve(raw, node)
                if device_id is not None and not devices and not _may_be_hidden(device_id, node):
                    detail = f"device id {raw} names no card of this node"
                    yield view.problem("unknown_card", container.name, detail)


def _may_be_hidden(device_id: DeviceId, node: Surroundings) -> bool:
    """A slice of a card that does not answer now cannot be looked up: no contradiction."""
    slice_id = device_id.gpu_instance is not None or (device_id.uuid or "").startswith("MIG-")
    return slice_id and not node.cards.all_answer


def mig_slices(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a slice that nothing else shares."""
    for found in _resolved(view, node):
        if found.device.slice is not None and not found.shared:
            yield _exclusive(found)


def _exclusive(found: _Resolved) -> Hold:
    return Hold(
        container=found.container.name,
        device=found.device,
        resource=found.resource,
        core_percent=found.device.core_percent,
        memory_bytes=found.device.memory_bytes,
        exclusive=True,
    )


def replicas(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a card or slice, however many of its replicas the container holds.

    Time-slicing guarantees nothing.  MPS bounds each client to an equal part of compute and
    memory, so there a replica has a share; the number of replicas is the node's label.
    """
    parts = _mps_parts(node.node)
    held: dict[tuple[str, str, str], tuple[_Resolved, int]] = {}
    for found in _resolved(view, node):
        if found.shared:
            key = (found.container.name, found.resource, found.device.uuid)
            held[key] = (found, held[key][1] + 1 if key in held else 1)
    for found, count in held.values():
        core, memory = None, None
        if parts is not None and found.device.slice is None:
            core = 100 * count / parts
            total = found.device.memory_bytes
            memory = total * count // parts if total is not None else None
        yield Hold(found.container.name, found.device, found.resource, core, memory)


def _mps_parts(node: Node | None) -> int | None:
    """Into how many parts MPS cuts a card here; None where it does not, or nobody says."""
    if node is None or node.labels.get(_SHARING_STRATEGY) != "mps":
        return None
    try:
        return whole(node.labels.get(_REPLICAS, "")) or None
    except ValueError:
        return None


WHOLE_CARDS = Scheme("whole", whole_cards, proof="kubelet")
MIG_SLICES = Scheme("mig", mig_slices, proof="kubelet")
REPLICAS = Scheme("replicas", replicas, proof="kubelet")
