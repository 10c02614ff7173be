"""HAMi and Volcano vGPU: cards by UUID with their shares, by the container's position."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from qgpu_exporter.allocation.annotations import entries, items, json_value
from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.device_ids import DeviceId
from qgpu_exporter.allocation.memory_unit import MIB
from qgpu_exporter.allocation.scheme import Finding, Hold, PodView, Scheme, Surroundings, Unassigned
from qgpu_exporter.model import Container

_ENTRY = re.compile(
    r"([^,:;\[\]]+)(\[[0-9]+-[0-9]+\])?,[^,]*,([0-9]{1,12}),([0-9]{1,6})(?:,[^:]*)?"
)
"""``<uuid>[<a>-<b>],<type>,<memory>,<core>``; the brackets mark a slice, by the plugin's own
numbers, which the driver does not know."""


@dataclass(frozen=True, slots=True)
class _Entry:
    uuid: str
    memory_units: int
    core: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """What one container was given; `broken` where an entry cannot be read."""

    entries: tuple[_Entry, ...] = ()
    broken: bool = False

    @property
    def empty(self) -> bool:
        return not self.entries and not self.broken


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where one of the two writes, and what its resources are called."""

    allocated: str
    node: str
    phase: str
    count: tuple[str, ...]
    """Resources that count shares; the first is the primary one."""
    memory: str
    others: tuple[str, ...] = ()
    slices: str | None = None
    counts_units: bool = False
    """Memory is in the units of the resource rather than in MiB."""

    @property
    def resources(self) -> tuple[str, ...]:
        """All names by which a container asks for a share."""
        return (*self.count, self.memory, *self.others)


def _slot(text: str) -> _Slot:
    found = []
    for part in filter(None, text.strip().split(":")):
        # Some versions fill the place of a container without a share with an entry of nothing.
        if part.replace(",", "").strip("0") == "":
            continue
        match = _ENTRY.fullmatch(part)
        if match is None:
            return _Slot(broken=True)
        found.append(_Entry(match[1], int(match[3]), int(match[4])))
    return _Slot(tuple(found))


def _placed(
    text: str, view: PodView, askers: frozenset[str]
) -> list[tuple[int, Container, _Slot]] | None:
    """(slot number, container, slot) for each slot that is not empty; None where none fits.

    Every slot ends with a semicolon, or is parted from the next by one.  Init containers come
    first since HAMi 2.9 and have no slot before it: the number of slots tells.  Where that lays
    a share on a container that asks for none, it is no fit; where as many containers ask as
    slots are filled, their order still tells.
    """
    slots = [_slot(part) for part in text.split(";")]
    ended = slots[:-1] if slots[-1].empty else slots
    declared = [one for one in view.containers if one.kind != "ephemeral"]
    apps = [one for one in declared if one.kind == "app"]
    for given in (ended, slots):
        for layout in (declared, apps):
            if len(given) == len(layout):
                filled = [(n, layout[n], slot) for n, slot in enumerate(given) if not slot.empty]
                if not askers or {one.name for _, one, _ in filled} == askers:
                    return filled
    filled_slots = [(number, slot) for number, slot in enumerate(ended) if not slot.empty]
    asking = [one for one in declared if one.name in askers]
    if asking and len(filled_slots) == len(asking):
        pairs = zip(filled_slots, asking, strict=True)
        return [(number, one, slot) for (number, slot), one in pairs]
    return None


def _find(view: PodView, node: Surroundings, dialect: Dialect) -> Iterator[Finding]:
    asking = [one for one in view.containers if set(one.resources) & set(dialect.resources)]
    askers = frozenset(one.name for one in asking)
    text = view.annotations.get(dialect.allocated, "").strip()
    if not text or not _of_this_node(view, node, dialect):
        yield from (Unassigned(one.name) for one in asking if one.name in view.holding)
        return
    placed = _placed(text, view, askers)
    if placed is None:
        detail = f"its slots do not fit the containers: {text[:80]!r}"
        yield view.problem("bad_annotation", detail=detail)
        return
    slices: Mapping[int, Mapping[int, Device]] = {}
    try:
        slices = _slices(view, node, dialect)
    except ValueError as error:
        yield view.problem("bad_annotation", detail=str(error))
    for number, container, slot in placed:
        if container.name in view.holding:
            given = _Given(view, node, dialect, container)
            yield from given.rows(slot, slices.get(number, {}))


def _of_this_node(view: PodView, node: Surroundings, dialect: Dialect) -> bool:
    """A pod that was bound elsewhere than planned, or not at all, keeps the plan's annotations."""
    planned = view.annotations.get(dialect.node)
    elsewhere = planned and node.node_name and planned != node.node_name
    return not elsewhere and view.annotations.get(dialect.phase) != "failed"


def _slices(
    view: PodView, node: Surroundings, dialect: Dialect
) -> Mapping[int, Mapping[int, Device]]:
    """By slot and entry number, the slice, where the plugin wrote down which one it made."""
    text = view.annotations.get(dialect.slices, "") if dialect.slices is not None else ""
    found: dict[int, dict[int, Device]] = {}
    for value in items(json_value(text)) if text else ():
        one = entries(value)
        slot, entry = one.get("containerIndex"), one.get("deviceIndex")
        if not isinstance(slot, int) or not isinstance(entry, int):
            raise ValueError("a slice without its container's and device's number")
        device = node.cards.by_uuid(str(one.get("migUUID", "")))
        if device is None:
            instance = one.get("gpuInstanceID")
            place = DeviceId(
                uuid=str(one.get("gpuUUID", "")),
                gpu_instance=instance if isinstance(instance, int) else -1,
            )
            device = next(iter(node.cards.by_id(place)), None)
        if device is not None and device.slice is not None:
            found.setdefault(slot, {})[entry] = device
    return found


@dataclass(slots=True)
class _Share:
    core: int = 0
    memory_units: int = 0


@dataclass(slots=True)
class _Given:
    """One container's rows: several entries of one card are one row with their sum."""

    view: PodView
    node: Surroundings
    dialect: Dialect
    container: Container
    shares: dict[str, tuple[Device, _Share]] = field(default_factory=dict)

    def rows(self, slot: _Slot, slices: Mapping[int, Device]) -> Iterator[Finding]:
        name = self.container.name
        if slot.broken:
            yield self.view.problem("bad_annotation", name, "a device of it cannot be read")
            return
        for number, entry in enumerate(slot.entries):
            device = slices.get(number) or self.node.cards.by_uuid(entry.uuid)
            if device is None:
                detail = f"there is no card {entry.uuid} here"
                yield self.view.problem("unknown_card", name, detail)
                continue
            _, share = self.shares.setdefault(device.uuid, (device, _Share()))
            share.core += entry.core
            share.memory_units += entry.memory_units
        yield from self._holds()

    def _holds(self) -> Iterator[Finding]:
        resources = self.container.resources
        resource = next((n for n in self.dialect.count if n in resources), self.dialect.count[0])
        unit = MIB * (self.node.volcano_memory_factor if self.dialect.counts_units else 1)
        for device, share in self.shares.values():
            if device.slice is not None:
                yield Hold(
                    self.container.name,
                    device,
                    resource,
                    device.core_percent,
                    device.memory_bytes,
                    exclusive=True,
                )
                continue
            if not share.memory_units and resources.get(self.dialect.memory, "0") != "0":
                detail = "it asks for memory, and none is written down"
                yield self.view.problem("bad_annotation", self.container.name, detail)
            yield Hold(
                self.container.name,
                device,
                resource,
                # No core is no limit of core, and so no share of it.
                float(share.core) if share.core else None,
                share.memory_units * unit if share.memory_units else None,
            )


_HAMI = Dialect(
    allocated="hami.io/vgpu-devices-allocated",
    node="hami.io/vgpu-node",
    phase="hami.io/bind-phase",
    count=("nvidia.com/gpu", "nvidia.com/vgpu"),
    memory="nvidia.com/gpumem",
    others=("nvidia.com/gpumem-percentage", "nvidia.com/gpucores", "nvidia.com/priority"),
    slices="hami.io/vgpu-mig-allocations",
)
_VOLCANO = Dialect(
    allocated="volcano.sh/vgpu-ids-new",
    node="volcano.sh/vgpu-node",
    phase="volcano.sh/bind-phase",
    count=("volcano.sh/vgpu-number",),
    memory="volcano.sh/vgpu-memory",
    others=("volcano.sh/vgpu-memory-percentage", "volcano.sh/vgpu-cores"),
    counts_units=True,
)


def find_hami(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card; only what was allocated counts, never what is planned."""
    return _find(view, node, _HAMI)


def find_volcano(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card."""
    return _find(view, node, _VOLCANO)


HAMI = Scheme(
    "hami",
    find_hami,
    proof="annotation",
    resources=(_HAMI.memory, *_HAMI.others, "nvidia.com/vgpu"),
    annotations=("hami.io/vgpu-devices-*",),
    # Its count resource is NVIDIA's by name, and can be renamed: on its pods all that is left is
    # its own, since the ids that the kubelet lists there are made-up numbers of cards.
    borrowed=("*",),
)
VOLCANO_VGPU = Scheme(
    "volcano_vgpu", find_volcano, proof="annotation", resources=_VOLCANO.resources
)
