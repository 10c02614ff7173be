"""A golden case: its input.yaml, played through the real decoders and core to scrape pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from qgpu_exporter import cgroups, inventory, totals, xids
from qgpu_exporter.exposition import EOF, OPENMETRICS, TEXT, Dropped, Format, render
from qgpu_exporter.metrics.dcgm import dcgm_families
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.tke import tke_families
from qgpu_exporter.model import (
    CardFailure,
    CardIdentity,
    CardReading,
    GpuObject,
    KubeletList,
    Memory,
    MigSlice,
    Node,
    Pod,
    PodList,
    Process,
    ProcessSample,
    ProcessWindow,
    ReaderError,
    Reading,
    SliceDevice,
    Snapshot,
    Totals,
    Xid,
)
from qgpu_exporter.snapshot import JoinInputs, join
from qgpu_exporter.sources import kmsg
from qgpu_exporter.sources.kubernetes.gpus import decode_gpu
from qgpu_exporter.sources.kubernetes.node import decode_node
from qgpu_exporter.sources.kubernetes.pods import decode_pod
from qgpu_exporter.sources.kubernetes.slices import decode_slices
from qgpu_exporter.sources.podresources import decode_json
from qgpu_exporter.usage import fold_core_seconds

MIB = 1024**2
STARTED_SECONDS = 1_700_000_000.0
"""Unix time of a case's first moment; `at` counts from it."""

FAMILIES: Mapping[str, Sequence[Family[Snapshot, Any]]] = {
    "native": NATIVE,
    "dcgm": dcgm_families(),
    "tke": tke_families(),
}


def card_uuid(index: int) -> str:
    """The UUID of the card that has this index, unless its case says otherwise."""
    return f"GPU-{index:08d}-aaaa-4bbb-8ccc-{index:012d}"


class _Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A part of input.yaml: a misspelt key fails its case."""


class MemoryMib(_Strict):
    """Frame buffer in MiB."""

    total: int
    used: int = 0
    reserved: int = 0

    def model(self) -> Memory:
        """The same in bytes; what is not used or reserved is free."""
        free = self.total - self.used - self.reserved
        return Memory(self.total * MIB, self.used * MIB, free * MIB, self.reserved * MIB)


class SliceForm(_Strict):
    """A MIG device; `memory` is that of its GPU instance."""

    gi: int
    profile: str
    memory: MemoryMib
    compute_slices: int | None = None
    ci: int = 0
    uuid: str | None = None
    start: int | None = None

    def model(self) -> MigSlice:
        """The slice as the reader gives it."""
        return MigSlice(
            self.gi,
            self.ci,
            self.uuid,
            self.profile,
            compute_slices=self.compute_slices,
            placement_start=self.start,
            memory=self.memory.model(),
        )


class ProcessForm(_Strict):
    """A process on a card; `sm` is its utilisation sample in percent."""

    pid: int
    memory: int
    sm: float | None = None


class CardForm(_Strict):
    """A card: `uuid` and `minor` follow from the index unless given; `down` is a reason.

    A card that is down and whose `uuid` is an empty text has not told who it is.
    """

    index: int
    uuid: str | None = None
    minor: int | None = None
    pci_bus_id: str | None = None
    memory: MemoryMib | None = None
    mig: list[SliceForm] | None = None
    processes: list[ProcessForm] | None = None
    down: str | None = None
    reading: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further fields of `model.CardReading`, under their names there."""

    @property
    def identity(self) -> CardIdentity:
        """What names the card."""
        number = self.index
        return CardIdentity(
            index=number,
            uuid=card_uuid(number) if self.uuid is None else self.uuid,
            minor=number if self.minor is None else self.minor,
            pci_bus_id=self.pci_bus_id,
        )

    def model(self, timestamp_seconds: float) -> CardReading:
        """The card as the reader gives it; process samples cover the second before."""
        until = int(timestamp_seconds * 1e6)
        processes = self.processes or ()
        samples = tuple(
            ProcessSample(one.pid, until, one.sm / 100) for one in processes if one.sm is not None
        )
        slices = tuple(one.model() for one in self.mig or ())
        card = CardReading(
            self.identity,
            memory=self.memory.model() if self.memory else None,
            mig_enabled=bool(slices) or None,
            mig_compute_slices=7 if slices else None,
            mig_slices=slices,
            processes=None
            if self.processes is None
            else tuple(Process(one.pid, one.memory * MIB, kinds=("compute",)) for one in processes),
            process_window=None
            if self.processes is None
            else ProcessWindow(until - 1_000_000, until, samples),
        )
        more = msgspec.convert({"identity": {"index": 0, "uuid": ""}, **self.reading}, CardReading)
        return replace(card, **{name: getattr(more, name) for name in self.reading})


class EventForm(_Strict):
    """An XID that the driver tells of card `index`, or of one of its instances."""

    index: int
    xid: int
    gi: int | None = None
    ci: int | None = None

    def model(self, timestamp_seconds: float) -> Xid:
        """The event as the reader gives it."""
        uuid = card_uuid(self.index)
        return Xid(timestamp_seconds, self.xid, uuid, None, self.gi, self.ci)


class Moment(_Strict):
    """What the sources say at one time; a key that is not given says the same as before.

    null takes an answer back: the source is on and has none.
    """

    about: str = ""
    at: float = 0.0
    """Seconds since the case's start, of both clocks."""
    cards: list[CardForm] | msgspec.UnsetType | None = msgspec.UNSET
    error: str | None = None
    """Why the reader could ask no card at all; `cards` is then an empty list."""
    events: tuple[EventForm, ...] = ()
    """XIDs that the driver tells with this moment's `cards`."""
    kernel_log: tuple[str, ...] = ()
    """New lines, taken before the moment's `cards` are read."""
    old_kernel_log: tuple[str, ...] = ()
    """Lines that stood there a minute before this moment, and before the exporter started."""
    pods: list[dict[str, Any]] | msgspec.UnsetType | None = msgspec.UNSET
    pods_overdue: bool = False
    pod_resources: list[dict[str, Any]] | msgspec.UnsetType | None = msgspec.UNSET
    """The kubelet's answer; it is asked half a second after the moment's other events."""
    kubelet_asked_at: float | None = None
    node_object: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    resource_slices: list[dict[str, Any]] | msgspec.UnsetType | None = msgspec.UNSET
    gpu_objects: list[dict[str, Any]] | msgspec.UnsetType | None = msgspec.UNSET
    cgroups: dict[int, str] | msgspec.UnsetType | None = msgspec.UNSET
    """The text of /proc/<pid>/cgroup by pid."""


class Case(Moment):
    """The whole of input.yaml: one moment, or `steps` that follow it."""

    node: str = "gpu-node-1"
    dialects: tuple[Literal["native", "dcgm", "tke"], ...] = ("native",)
    families: tuple[str, ...] = (".*",)
    """Which families the page shows: regular expressions for their whole names."""
    gpushare_memory_unit: Literal["auto", "GiB", "MiB"] = "auto"
    volcano_memory_factor: int = 1
    xid_codes: tuple[int, ...] = ()
    """XIDs whose counters are born at 0."""
    steps: tuple[Moment, ...] = ()


def load(path: Path) -> Case:
    """The case of a folder; raises msgspec.ValidationError where its input is not one."""
    return msgspec.convert(yaml.safe_load((path / "input.yaml").read_text()), Case)


@dataclass
class World:
    """The latest of every source, as the service would hold it."""

    case: Case
    backwards: bool = False
    """Every list that has no order of its own is read from its end: nothing may differ."""
    inventory: inventory.Inventory = field(default_factory=inventory.Inventory)
    totals: Totals = field(default_factory=Totals)
    inputs: JoinInputs = field(init=False)
    snapshot: Snapshot | None = None
    first_seen: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        moments = [self.case, *self.case.steps]

        def on(key: str) -> bool:
            return any(getattr(one, key) is not msgspec.UNSET for one in moments)

        self.inputs = JoinInputs(
            node=self.case.node,
            timestamp_seconds=STARTED_SECONDS,
            kubelet_expected=on("pod_resources"),
            pods_expected=on("pods"),
            gpushare_memory_unit=self.case.gpushare_memory_unit,
            volcano_memory_factor=self.case.volcano_memory_factor,
            xid_classes=xids.load(),
        )

    def play(self, moment: Moment) -> Snapshot:
        """The snapshot after a moment."""
        now = STARTED_SECONDS + moment.at
        self.inputs = replace(self.inputs, timestamp_seconds=now, pods_overdue=moment.pods_overdue)
        if moment.pods is not msgspec.UNSET:
            self.inputs = replace(self.inputs, pods=self._pods(moment, now))
        if moment.pod_resources is not msgspec.UNSET:
            self.inputs = replace(self.inputs, kubelet=self._kubelet(moment, now))
        if moment.node_object is not msgspec.UNSET:
            self.inputs = replace(self.inputs, node_object=self._node(moment))
        if moment.resource_slices is not msgspec.UNSET:
            self.inputs = replace(self.inputs, slices=self._slices(moment))
        if moment.gpu_objects is not msgspec.UNSET:
            self.inputs = replace(self.inputs, gpu_objects=self._gpu_objects(moment))
        if moment.cgroups is not msgspec.UNSET:
            given = moment.cgroups
            names = {pid: cgroups.parse(text) for pid, text in (given or {}).items()}
            self.inputs = replace(self.inputs, names=None if given is None else names)
        log = [(line, now - 60, True) for line in moment.old_kernel_log]
        log += [(line, now, False) for line in moment.kernel_log]
        self.totals = totals.fold_xids(
            self.totals, [xid for line in log for xid in _kernel_xids(*line)], self.inputs.reading
        )
        if moment.cards is not msgspec.UNSET:
            self._read(moment, now)
        elif log:
            self.inputs = replace(
                self.inputs,
                cards=inventory.cards(self.inventory, self.inputs.reading, self.totals),
                totals=self.totals,
            )
        self.snapshot = join(self.inputs)
        return self.snapshot

    def _ordered(self, given: Sequence[Any]) -> list[Any]:
        return list(reversed(given)) if self.backwards else list(given)

    def _read(self, moment: Moment, now: float) -> None:
        forms = self._ordered(moment.cards or []) if moment.cards is not msgspec.UNSET else []
        reading = Reading(
            now,
            driver_version="570.86.15",
            cards=tuple(one.model(now) for one in forms if one.down is None),
            failures=tuple(
                CardFailure(one.index, one.down, uuid=one.identity.uuid or None)
                for one in forms
                if one.down is not None
            ),
            events=tuple(one.model(now) for one in moment.events),
            error=ReaderError(moment.error, "") if moment.error is not None else None,
        )
        if moment.cards is not None:
            self.inventory = inventory.fold(self.inventory, reading)
            self.totals = totals.fold(
                self.totals,
                reading,
                xid_codes=self.case.xid_codes,
                known=inventory.uuids(self.inventory),
            )
            self.totals = fold_core_seconds(
                self.totals, reading, self.inputs.names, self.inputs.pods, self.snapshot
            )
        fresh = reading if moment.cards is not None and reading.error is None else None
        self.inputs = replace(
            self.inputs,
            cards=inventory.cards(self.inventory, fresh, self.totals),
            reading=fresh,
            totals=self.totals,
        )

    def _pods(self, moment: Moment, now: float) -> PodList | None:
        if not isinstance(moment.pods, list):
            return None
        return PodList(now, tuple(self._pod(raw, moment.at) for raw in self._ordered(moment.pods)))

    def _pod(self, raw: Mapping[str, Any], at: float) -> Pod:
        pod = decode_pod(raw)
        first_seen = self.first_seen.setdefault(pod.uid, at)
        return replace(pod, first_seen_at_seconds=first_seen)

    def _kubelet(self, moment: Moment, now: float) -> KubeletList | None:
        if not isinstance(moment.pod_resources, list):
            return None
        asked_at = moment.at + 0.5 if moment.kubelet_asked_at is None else moment.kubelet_asked_at
        answer = {"podResources": self._ordered(moment.pod_resources)}
        return KubeletList(asked_at, now, decode_json(answer))

    def _node(self, moment: Moment) -> Node | None:
        return decode_node(moment.node_object) if isinstance(moment.node_object, dict) else None

    def _slices(self, moment: Moment) -> tuple[SliceDevice, ...] | None:
        given = moment.resource_slices
        return decode_slices(self._ordered(given)) if isinstance(given, list) else None

    def _gpu_objects(self, moment: Moment) -> tuple[GpuObject, ...] | None:
        if not isinstance(moment.gpu_objects, list):
            return None
        found = [decode_gpu(raw, self.case.node) for raw in self._ordered(moment.gpu_objects)]
        return tuple(one for one in found if one is not None)


def _kernel_xids(line: str, timestamp_seconds: float, old: bool) -> Iterator[Xid]:
    found = kmsg.parse(line.encode())
    if found is not None:
        yield Xid(
            timestamp_seconds,
            found.xid,
            pci_bus_id=found.pci_bus_id,
            gpu_instance=found.gpu_instance,
            compute_instance=found.compute_instance,
            origin="kmsg",
            old=old,
        )


def pages(case: Case, fmt: Format = TEXT, *, backwards: bool = False) -> Iterator[tuple[str, str]]:
    """(headline, page) of each moment; raises AssertionError where a series had to be dropped."""
    world = World(case, backwards)
    wanted = [re.compile(pattern) for pattern in case.families]
    families = [
        family
        for dialect in case.dialects
        for family in FAMILIES[dialect]
        if any(pattern.fullmatch(family.name) for pattern in wanted)
    ]
    for number, moment in enumerate([case, *case.steps], start=1):
        dropped = Dropped()
        page = render(families, world.play(moment), fmt, dropped=dropped)
        assert dropped.counts == {}, dropped.counts
        headline = f"# {case.about}" if number == 1 else f"# At {moment.at:g} s: {moment.about}"
        yield headline, (page + (EOF if fmt == OPENMETRICS else b"")).decode()


def expected(case: Case) -> str:
    """The whole of expected.prom."""
    return "\n".join(f"{headline}\n\n{page}" for headline, page in pages(case))
