"""Gives each process's use of a card to its container, and says what is left over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from qgpu_exporter.model import (
    AllocationResult,
    Card,
    CardReading,
    CardRemainder,
    CgroupNames,
    ContainerUsage,
    HostUsage,
    Pod,
    PodList,
    Totals,
    UsageResult,
)
from qgpu_exporter.usage.owners import Owner, Owners, outside_owner
from qgpu_exporter.usage.samples import IDLE, ProcessUse, card_core_ratio, process_uses
from qgpu_exporter.usage.slices import Key, SliceUse, is_mig, slice_uses


@dataclass(frozen=True, slots=True)
class UsageInputs:
    """What the attribution looks at; None: that source is off or failing."""

    cards: tuple[Card, ...] = ()
    allocation: AllocationResult | None = None
    pods: PodList | None = None
    names: Mapping[int, CgroupNames] | None = None
    """By host pid; a pid that is absent is of a process that has ended."""
    totals: Totals = Totals()


def attribute(inputs: UsageInputs) -> UsageResult:
    """What each container uses of each card, per card in a stable order.

    A card without process readings has no rows, nor has any card while `names` is None, MIG
    slices with one holder aside: their own readings speak.  A holder without a process uses 0,
    where no process of the card can be its own unnoticed.
    """
    owners = Owners(inputs.pods)
    containers: list[ContainerUsage] = []
    host: list[HostUsage] = []
    remainders: list[CardRemainder] = []
    for card in sorted(inputs.cards, key=lambda card: card.identity.index):
        if card.reading is None:
            continue
        use = _CardUse(card.identity.index, card.reading, inputs, owners)
        rows = use.containers()
        containers += rows
        host += use.host()
        remainder = use.remainder(rows)
        if remainder is not None:
            remainders.append(remainder)
    return UsageResult(tuple(containers), tuple(host), tuple(remainders))


@dataclass(slots=True)
class _Sum:
    """The processes of one owner on one card."""

    pids: set[int] = field(default_factory=set)
    """Those that hold memory now; a process that is only in the samples has let go of it."""
    memory: list[int | None] = field(default_factory=list)
    uses: list[ProcessUse] = field(default_factory=list)

    @property
    def memory_bytes(self) -> int | None:
        """Sum, or None where one process's memory is not told: a part is not the whole."""
        known = [one for one in self.memory if one is not None]
        return sum(known) if len(known) == len(self.memory) else None

    @property
    def core_percent(self) -> float | None:
        return _percent(use.sm_ratio for use in self.uses)

    @property
    def encoder_percent(self) -> float | None:
        return _percent(use.encoder_ratio for use in self.uses)

    @property
    def decoder_percent(self) -> float | None:
        return _percent(use.decoder_ratio for use in self.uses)


def _percent(ratios: Iterable[float | None]) -> float | None:
    total = 0.0
    for ratio in ratios:
        if ratio is None:
            return None
        total += ratio
    # Ratios come as whole percents: what binary fractions add to a sum of them is cut off.
    return round(100 * total, 9)


class _CardUse:
    """One card's processes, sorted by whom they belong to."""

    def __init__(self, gpu: int, reading: CardReading, inputs: UsageInputs, owners: Owners) -> None:
        self._gpu = gpu
        self._reading = reading
        self._owners = owners
        self._totals = inputs.totals
        self._mig = is_mig(reading)
        names = inputs.names
        self._memory_known = names is not None and reading.processes is not None
        window = reading.process_window if names is not None and not self._mig else None
        self._core_known = window is not None
        self._allocations_known = inputs.allocation is not None and inputs.allocation.complete
        self._allocations = [
            row
            for row in (inputs.allocation.allocations if inputs.allocation else ())
            if row.gpu == gpu
        ]
        self._held: dict[Key, _Sum] = {}
        self._uids: dict[Key, str | None] = {}
        self._outside: dict[tuple[str, str], _Sum] = defaultdict(_Sum)
        self._instance_users: dict[int, set[Key | None]] = defaultdict(set)
        self._doubtful_pods: set[tuple[str, str]] = set()
        self._doubtful_card = False
        for row in self._allocations:
            key = row.namespace, row.pod, row.container
            uid = row.pod_uid or owners.pod_uid(row.namespace, row.pod)
            self._uids[key] = self._uids.get(key) or uid
        self._holders: AbstractSet[Key] = frozenset(self._uids)
        if names is not None:
            self._sort(names, process_uses(window) if window is not None else {})
        self._slices = self._slice_uses()

    # ------------------------------------------------------------------ sorting

    def _sort(self, names: Mapping[int, CgroupNames], uses: Mapping[int, ProcessUse]) -> None:
        memory: dict[int, dict[tuple[int | None, int | None], int | None]] = defaultdict(dict)
        instances: dict[int, set[int]] = defaultdict(set)
        for process in self._reading.processes or ():
            place = process.gpu_instance, process.compute_instance
            before = memory[process.pid].get(place)
            # In the compute and the graphics list a process has the same memory twice.
            memory[process.pid][place] = (
                process.memory_bytes if before is None else max(before, process.memory_bytes or 0)
            )
            if process.gpu_instance is not None:
                instances[process.pid].add(process.gpu_instance)
        for pid in sorted({*memory, *uses}):
            key, total = self._owner_of(names.get(pid))
            if pid in memory:
                total.pids.add(pid)
                total.memory += memory[pid].values()
            total.uses.append(uses.get(pid, IDLE))
            for gpu_instance in instances[pid]:
                self._instance_users[gpu_instance].add(key)

    def _owner_of(self, names: CgroupNames | None) -> tuple[Key | None, _Sum]:
        found = self._owners.find(names) if names is not None else None
        if isinstance(found, Owner):
            self._uids[found.key] = found.pod_uid
            return found.key, self._held.setdefault(found.key, _Sum())
        if isinstance(found, Pod):
            self._doubtful_pods.add((found.namespace, found.name))
        if names is not None and not self._owners.known:
            # Without the API's pods, any holder of this card may be this container.
            self._doubtful_card |= bool(names.containers or names.pod_uids)
        return None, self._outside[outside_owner(names)]

    def _slice_uses(self) -> Mapping[Key, tuple[SliceUse | None, ...]]:
        if not self._mig:
            return {}
        return slice_uses(self._reading, self._allocations, self._instance_users)

    # ------------------------------------------------------------------ rows

    def containers(self) -> list[ContainerUsage]:
        """A row for each container that holds or uses something of the card."""
        rows = [self._container(key) for key in sorted({*self._holders, *self._held})]
        return [row for row in rows if row is not None]

    def _container(self, key: Key) -> ContainerUsage | None:
        total = self._held.get(key)
        if total is None and not self._doubtful_card and key[:2] not in self._doubtful_pods:
            total = _Sum()
        memory = total.memory_bytes if self._memory_known and total else None
        core = total.core_percent if self._core_known and total else None
        if self._mig:
            core = self._slice_core(key)
            memory = self._slice_memory(key) if memory is None else memory
        row = ContainerUsage(
            self._gpu,
            *key,
            core_percent=core,
            memory_bytes=memory,
            encoder_percent=total.encoder_percent if self._core_known and total else None,
            decoder_percent=total.decoder_percent if self._core_known and total else None,
            processes=len(total.pids) if self._memory_known and total else None,
            core_seconds=self._core_seconds(key, core),
            allocated=not self._allocations_known or key in self._holders,
        )
        values = (row.core_percent, row.memory_bytes, row.processes)
        return row if any(value is not None for value in values) else None

    def _core_seconds(self, key: Key, core: float | None) -> float | None:
        uid = self._uids.get(key)
        if uid is None or core is None:
            # A counter that stands still would say that nothing was used.
            return None
        # Born at 0 with the container's first row, so that increase() sees its first use.
        return self._totals.container_core_seconds.get((self._gpu, *key, uid), 0.0)

    def _slice_core(self, key: Key) -> float | None:
        ratios = [use.core_ratio if use else None for use in self._slices.get(key, ())]
        return _percent(ratios) if ratios else None

    def _slice_memory(self, key: Key) -> int | None:
        uses = self._slices.get(key, ())
        known = [use.memory_bytes for use in uses if use and use.memory_bytes is not None]
        return sum(known) if uses and len(known) == len(uses) else None

    def host(self) -> list[HostUsage]:
        """A row for each owner that is no known container, of processes that are there now."""
        return [
            HostUsage(
                self._gpu,
                kind,
                name,
                total.core_percent if self._core_known else None,
                total.memory_bytes if self._memory_known else None,
                len(total.pids) if self._memory_known else None,
            )
            for (kind, name), total in sorted(self._outside.items())
        ]

    def remainder(self, rows: list[ContainerUsage]) -> CardRemainder | None:
        """The card's own reading less what the rows say; None where there is nothing to say."""
        without = None
        if self._allocations_known and (self._memory_known or self._core_known):
            without = len(self._held.keys() - self._holders)
        left = CardRemainder(self._gpu, self._core_left(rows), self._memory_left(rows), without)
        return left if left != CardRemainder(self._gpu) else None

    def _core_left(self, rows: list[ContainerUsage]) -> float | None:
        used = [row.core_percent for row in rows if row.core_percent is not None]
        card = card_core_ratio(self._reading)
        if card is None or not (self._core_known or used):
            return None
        # Two samplers: containers may sum to more than the card says, and are left as they are.
        return round(max(0.0, 100 * card - sum(used)), 9)

    def _memory_left(self, rows: list[ContainerUsage]) -> int | None:
        used = [row.memory_bytes for row in rows if row.memory_bytes is not None]
        memory = self._reading.memory
        if memory is None or not (self._memory_known or used):
            return None
        # The card's figure and the processes' are read one after the other.  When they
        # contradict each other nobody knows the rest, and any number would break the sum.
        left = memory.used_bytes - sum(used)
        return left if left >= 0 else None
