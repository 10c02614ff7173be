"""Dynamic resource allocation: devices of claims, which the node's ResourceSlices name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.claims import device_key
from qgpu_exporter.allocation.scheme import Finding, Hold, PodView, Scheme, Surroundings
from qgpu_exporter.model import ClaimDevice, SliceDevice

NVIDIA_DRIVER = "gpu.nvidia.com"
_DEVICE = re.compile(r"gpu-([0-9]+)(?:-mig-(.+)-[0-9]+-([0-9]+))?")
"""``gpu-<minor>``, or ``gpu-<parent's minor>-mig-<profile>-<profile id>-<placement start>``."""


class _Unresolved(Exception):
    """A claim's device that cannot be found here; the kind is empty where that is no problem."""

    def __init__(self, kind: str = "", detail: str = "") -> None:
        super().__init__(detail)
        self.kind = kind


def find(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and device; a device that several containers share guarantees nothing."""
    for container in view.holders():
        for claim in view.claims.get(container.name, ()):
            try:
                device = _device(claim, node)
            except _Unresolved as error:
                if error.kind:
                    yield view.problem(error.kind, container.name, str(error))
                continue
            shared = node.claim_use.is_shared(claim)
            yield Hold(
                container.name,
                device,
                claim.driver,
                None if shared else device.core_percent,
                None if shared else device.memory_bytes,
                exclusive=not shared,
                claim=claim,
            )


def _device(claim: ClaimDevice, node: Surroundings) -> Device:
    if node.slices is None:
        return _by_name(claim, node)
    listed = node.slices.get(device_key(claim))
    if listed is None:
        if claim.driver != NVIDIA_DRIVER:
            raise _Unresolved
        raise _Unresolved("unknown_device", f"{claim.device} is in no ResourceSlice of this node")
    if listed.kind == "vfio":
        # Handed through to a virtual machine: the driver of this node does not see it.
        raise _Unresolved
    return _by_slice(listed, node)


def _by_slice(listed: SliceDevice, node: Surroundings) -> Device:
    if listed.uuid is not None:
        device = node.cards.by_uuid(listed.uuid)
        if device is not None:
            return device
        raise _missing(listed.uuid, node, is_slice=listed.kind != "gpu")
    if listed.parent_uuid is None:
        raise _Unresolved
    parent = node.cards.by_uuid(listed.parent_uuid)
    if parent is None:
        raise _missing(listed.parent_uuid, node, is_slice=False)
    return _placed(parent, listed.profile, listed.placement_start, node)


def _by_name(claim: ClaimDevice, node: Surroundings) -> Device:
    """Without ResourceSlices: the driver's names tell minor number, profile and placement.

    Minor numbers may change with a reboot, and the names with a release of the driver, so that
    they serve only where the slices cannot be read.
    """
    match = _DEVICE.fullmatch(claim.device) if claim.driver == NVIDIA_DRIVER else None
    if match is None:
        raise _Unresolved
    card = node.cards.by_minor(int(match[1]))
    if card is None:
        raise _missing(claim.device, node, is_slice=False)
    if match[2] is None:
        return card
    return _placed(card, match[2], int(match[3]), node)


def _placed(
    parent: Device, profile: str | None, placement_start: int | None, node: Surroundings
) -> Device:
    """A slice that is made when it is claimed, and so has no UUID in the ResourceSlice."""
    candidates = node.cards.by_placement(parent, profile, placement_start)
    if len(candidates) == 1:
        return candidates[0]
    place = f"slice {profile} at {placement_start} of card {parent.gpu}"
    if candidates:
        raise _Unresolved("ambiguous_slice", f"{place} is one of {len(candidates)}")
    raise _missing(place, node, is_slice=True)


def _missing(name: str, node: Surroundings, *, is_slice: bool) -> _Unresolved:
    """A slice of a card that does not answer now cannot be looked up: no contradiction."""
    if is_slice and not node.cards.all_answer:
        return _Unresolved()
    return _Unresolved("unknown_card", f"{name} is not on this node")


DRA = Scheme("dra", find, proof="kubelet")
