"""The dcgm dialect: families with the names and labels of dcgm-exporter.

A card in MIG mode gives its own readings once, in rows without GPU_I_ID; what its slices give
(memory and profiling) is in their rows instead, so that a sum counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qgpu_exporter.metrics.dcgm_fields import FIELDS, Entity
from qgpu_exporter.metrics.family import Family, Scope
from qgpu_exporter.metrics.scopes import slices_of
from qgpu_exporter.model import Allocation, AllocationResult, MigSlice, Snapshot

DcgmFamily = Family[Snapshot, Entity]


@dataclass(frozen=True, slots=True)
class ChosenField:
    """A row of a counters file: the field, and the type and help that it is shown with."""

    name: str
    type: Literal["gauge", "counter"]
    help: str


LABELS: Mapping[str, Callable[[Entity], str | None]] = {
    "DCGM_FI_DRIVER_VERSION": lambda entity: entity.snapshot.driver_version,
    "DCGM_FI_NVML_VERSION": lambda entity: entity.snapshot.nvml_version,
    "DCGM_FI_DEV_BRAND": lambda entity: entity.card.identity.brand,
    "DCGM_FI_DEV_SERIAL": lambda entity: entity.card.identity.serial,
    "DCGM_FI_DEV_VBIOS_VERSION": lambda entity: entity.card.identity.vbios_version,
}
"""Every DCGM field that can be a label of all series."""

DEFAULT_LABELS = ("DCGM_FI_DRIVER_VERSION",)

# --------------------------------------------------------------------------- rows


def only_holder(
    result: AllocationResult | None, gpu: int, gpu_instance: int | None = None
) -> Allocation | None:
    """The one container that holds the card or the GPU instance; None for none or several.

    While allocations are not complete only a holder that the device proves to be alone counts.
    """
    if result is None:
        return None
    holds = [one for one in result.allocations if one.gpu == gpu]
    if gpu_instance is not None:
        holds = [
            one
            for one in holds
            if one.mig is not None and one.mig.partition("/")[0] == str(gpu_instance)
        ]
    elif any(one.mig is not None for one in holds):
        return None
    if not result.complete:
        holds = [one for one in holds if one.exclusive]
    holders = {(one.namespace, one.pod, one.container) for one in holds}
    return holds[0] if len(holders) == 1 else None


def _entities(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Entity]]:
    for card in snapshot.cards or ():
        reading = card.reading
        if reading is None:
            continue
        labels = (str(card.identity.index), card.identity.uuid, snapshot.node)
        holder = only_holder(snapshot.allocation, card.identity.index)
        yield labels, Entity(card, reading, snapshot, None, holder)
        for one in slices_of(card, reading):
            if one.first:
                instance = one.slice.gpu_instance
                holder = only_holder(snapshot.allocation, card.identity.index, instance)
                yield labels, Entity(card, reading, snapshot, one.slice, holder)


def _instance_profile(piece: MigSlice) -> str | None:
    """The GPU instance's profile; a compute instance's has its own slices in front (``1c.``)."""
    head, _, rest = (piece.profile or "").partition(".")
    return rest if rest and head.endswith("c") else piece.profile


def _scope(labels: Sequence[str], hostname_label: str) -> Scope[Snapshot, Entity]:
    def more_labels(entity: Entity) -> Iterator[tuple[str, str]]:
        identity = entity.card.identity
        named: dict[str, str | None] = {
            "pci_bus_id": identity.pci_bus_id,
            "device": None if identity.minor is None else f"nvidia{identity.minor}",
            "modelName": identity.model,
        }
        if entity.slice is not None:
            named["GPU_I_ID"] = str(entity.slice.gpu_instance)
            named["GPU_I_PROFILE"] = _instance_profile(entity.slice)
        if entity.holder is not None:
            named["namespace"] = entity.holder.namespace
            named["pod"] = entity.holder.pod
            named["container"] = entity.holder.container
        named |= {name: LABELS[name](entity) for name in labels}
        return ((name, value) for name, value in named.items() if value is not None)

    return Scope(
        "cards and GPU instances that answered",
        ("gpu", "UUID", hostname_label),
        _entities,
        more_labels,
        (
            "pci_bus_id",
            "device",
            "modelName",
            "GPU_I_ID",
            "GPU_I_PROFILE",
            "namespace",
            "pod",
            "container",
            *labels,
        ),
    )


def dcgm_families(
    fields: Sequence[ChosenField] | None = None,
    labels: Sequence[str] = DEFAULT_LABELS,
    hostname_label: str = "Hostname",
) -> tuple[DcgmFamily, ...]:
    """The families of the dialect; `fields` and `labels` of a counters file, None: all fields.

    Raises KeyError for a field or label that is not in `FIELDS` or `LABELS`.
    """
    scope = _scope(tuple(labels), hostname_label)
    if fields is None:
        fields = [
            ChosenField(field.name, field.type, field.help)
            for field in FIELDS.values()
            if field.by_default
        ]
    return tuple(
        Family(
            chosen.name,
            chosen.type,
            chosen.help,
            scope,
            FIELDS[chosen.name].value,
            FIELDS[chosen.name].origin,
            FIELDS[chosen.name].since,
        )
        for chosen in fields
    )


DCGM: tuple[DcgmFamily, ...] = dcgm_families()
