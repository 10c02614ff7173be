"""Every device plugin's spelling of a device: an id of the kubelet becomes a parsed value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceId:
    """What a device id names: a card or a slice by UUID, or a card by minor number.

    `names_card` is False where the plugin lets the kubelet pick any id and decides the card
    elsewhere, so that the id proves nothing against an annotation.
    """

    uuid: str | None = None
    """Of a card (``GPU-``) or of a slice (``MIG-``)."""
    minor: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    shared: bool = False
    """One of several ids of the same card or slice: a replica."""
    names_card: bool = True


_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Before driver R470 a slice had no UUID of its own: MIG-GPU-<card>/<gi>/<ci>.
_LEGACY_SLICE = re.compile(rf"MIG-(GPU-{_HEX})/([0-9]+)/([0-9]+)(::[0-9]+)?", re.IGNORECASE)
# NVIDIA "::<n>"; Alibaba gpushare "-_-<n>", one a memory unit; HAMi, Volcano and AWS "-<n>".
_UUID = re.compile(rf"((?:GPU|MIG)-{_HEX})(?:(::[0-9]+)|-_-[0-9]+|-[0-9]+)?", re.IGNORECASE)
# GKE counts cards by the N of /dev/nvidiaN and names slices by their GPU instance.
_GKE = re.compile(r"nvidia([0-9]+)(?:/gi([0-9]+))?(/vgpu[0-9]+)?")


def candidates(ids: Iterable[str]) -> Iterator[str]:
    """The ids that may name a device; the others can be a hundred thousand units of something."""
    return (one for one in ids if one.startswith(("GPU-", "MIG-", "nvidia")))


def parse(device_id: str) -> DeviceId | None:
    """What `device_id` names, the most specific spelling first; None where it names no device.

    Units of a card (elastic-gpu's ``0-07``, tkestack's ``tencent.com/vcuda-core-13``) are such
    ids: kubelet picks them at random, and the card is written elsewhere.
    """
    if match := _LEGACY_SLICE.fullmatch(device_id):
        uuid, gpu_instance, compute_instance, replica = match.groups()
        return DeviceId(
            uuid=uuid,
            gpu_instance=int(gpu_instance),
            compute_instance=int(compute_instance),
            shared=replica is not None,
        )
    if match := _UUID.fullmatch(device_id):
        uuid, replica = match.groups()
        plain = len(uuid) == len(device_id)
        return DeviceId(uuid=uuid, shared=not plain, names_card=plain or replica is not None)
    if match := _GKE.fullmatch(device_id):
        minor, instance, replica = match.groups()
        return DeviceId(
            minor=int(minor),
            gpu_instance=int(instance) if instance is not None else None,
            shared=replica is not None,
        )
    return None
