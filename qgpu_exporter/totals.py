"""Folds each reading into the running totals of every card: counters, busy seconds, XIDs; pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from qgpu_exporter.model import (
    BusyTotal,
    CardReading,
    CardTotals,
    CounterTotal,
    RawCounter,
    Reading,
    Sample,
    SeenSamples,
    Totals,
    Xid,
    XidTotal,
)

MICROSECONDS = 1_000_000
LONGEST_SPACING_US = 1_000_000
"""The driver takes a utilisation sample each 1/6 s to 1 s, by product (nvml.h)."""
LOST_SPACINGS = 4
"""A gap of more spacings than this is a stretch that nobody measured."""
SMOOTHING = 8
"""The spacing follows its gaps by one part in so many: entries jitter."""
REWIND_SECONDS = 10.0
"""Samples newer than the round by more than this: the clock was set back after they were taken."""

SAME_INCIDENT_SECONDS = 10.0
"""The driver's event and the kernel's line of one XID come closer together than this."""
MAX_UNPAIRED = 256
MAX_UNPLACED = 64
NO_INSTANCE = 0xFFFFFFFF
"""What the driver puts for the GPU and compute instance of an event of the whole card."""
WRAP_ABOVE = 1 << 31
"""A 32-bit counter that falls has wrapped only if it stood above this; else it was reset."""


def fold(
    totals: Totals,
    reading: Reading,
    *,
    xid_codes: Collection[int] = (),
    known: Collection[str] | None = None,
) -> Totals:
    """The totals after one reading.

    Counters of `xid_codes` are born at 0 with the card, so that `increase()` sees the first
    event.  With `known` (UUIDs of the inventory), totals of all other cards are dropped.  A
    reading with an error changes no card; a card that failed keeps what it has.
    """
    cards = dict(totals.cards)
    for card in reading.cards:
        uuid = card.identity.uuid
        kept = cards.get(uuid) or CardTotals()
        cards[uuid] = _fold_card(kept, card, reading.timestamp_seconds, xid_codes)
    totals = fold_xids(replace(totals, cards=cards), reading.events, reading)
    if known is not None:
        cards = {uuid: card for uuid, card in totals.cards.items() if uuid in known}
        totals = replace(totals, cards=cards)
    return totals


def seen(totals: Totals) -> tuple[SeenSamples, ...]:
    """What the next request tells the reader: newest sample by card and kind, by UUID."""
    return tuple(
        SeenSamples(
            uuid=uuid,
            samples_us={kind: busy.last_timestamp_us for kind, busy in sorted(card.busy.items())},
            processes_us=card.processes_us,
        )
        for uuid, card in sorted(totals.cards.items())
    )


# --------------------------------------------------------------------------- one card


def _fold_card(
    totals: CardTotals, card: CardReading, now_seconds: float, xid_codes: Collection[int]
) -> CardTotals:
    counters = dict(totals.counters)
    for name, raw in _raw_counters(card):
        counters[name] = _count(counters.get(name), raw)
    busy = {kind: _rewound(total, now_seconds) for kind, total in totals.busy.items()}
    for buffer in card.samples:
        busy[buffer.kind] = integrate(busy.get(buffer.kind) or BusyTotal(), buffer.samples)
    instances = {str(piece.gpu_instance) for piece in card.mig_slices}
    return replace(
        totals,
        counters=counters,
        busy=busy,
        xids={code: XidTotal(0) for code in xid_codes} | dict(totals.xids),
        # An instance that was destroyed takes its counts along; its number will name another.
        mig_xids={
            key: total
            for key, total in totals.mig_xids.items()
            if key[1].partition("/")[0] in instances
        },
        processes_us=_newest_process_us(totals.processes_us, card, now_seconds),
        pci_bus_id=card.identity.pci_bus_id or totals.pci_bus_id,
    )


def _newest_process_us(before: int, card: CardReading, now_seconds: float) -> int:
    if before > (now_seconds + REWIND_SECONDS) * MICROSECONDS:
        before = 0
    samples = card.process_window.samples if card.process_window else ()
    return max((sample.timestamp_us for sample in samples), default=before) or before


# --------------------------------------------------------------------------- counters


def _raw_counters(card: CardReading) -> Iterable[tuple[str, RawCounter]]:
    pairs = [
        ("pcie_transmitted_bytes", card.pcie.transmitted_bytes),
        ("pcie_received_bytes", card.pcie.received_bytes),
    ]
    for link in card.nvlinks:
        pairs.append((f"nvlink_{link.link}_transmitted_bytes", link.transmitted_bytes))
        pairs.append((f"nvlink_{link.link}_received_bytes", link.received_bytes))
    return ((name, raw) for name, raw in pairs if raw is not None)


def _count(before: CounterTotal | None, raw: RawCounter) -> CounterTotal:
    """Continue a counter; it starts at the driver's own value, which counts from driver load."""
    if before is None:
        return CounterTotal(raw.value, raw)
    step = raw.value - before.last.value
    if step < 0:
        wrapped = raw.bits == 32 and WRAP_ABOVE < before.last.value < 1 << 32
        step = step + (1 << 32) if wrapped else raw.value
    return CounterTotal(before.total + step, raw)


# --------------------------------------------------------------------------- busy seconds


def integrate(total: BusyTotal, samples: Iterable[Sample]) -> BusyTotal:
    """Busy and covered seconds after these entries, oldest first, one by one.

    An entry is the mean since the entry before it.  Entries that are not newer than the last are
    known already.  Each step depends only on the entry and on `total`, so it does not matter how
    the entries are spread over rounds.
    """
    for sample in samples:
        if sample.timestamp_us > total.last_timestamp_us:
            total = _take(total, sample)
    return total


def _take(total: BusyTotal, sample: Sample) -> BusyTotal:
    gap_us = sample.timestamp_us - total.last_timestamp_us
    usual_us = total.spacing_us or LONGEST_SPACING_US
    if total.last_timestamp_us == 0 or gap_us > LOST_SPACINGS * usual_us:
        # Nothing before this entry, or a lost stretch: it speaks of one spacing, if that is known.
        covered_us = total.spacing_us
        # Where the driver has changed to a slower pace, a few such steps find it.
        spacing_us = min(2 * total.spacing_us, LONGEST_SPACING_US)
    else:
        covered_us = gap_us
        if total.spacing_us:
            spacing_us = max(1, total.spacing_us + (gap_us - total.spacing_us) // SMOOTHING)
        else:
            spacing_us = gap_us
    if not 0 <= sample.ratio <= 1:  # also a NaN
        covered_us = 0
    covered_seconds = covered_us / MICROSECONDS
    return BusyTotal(
        busy_seconds=total.busy_seconds + (sample.ratio * covered_seconds if covered_us else 0.0),
        covered_seconds=total.covered_seconds + covered_seconds,
        last_timestamp_us=sample.timestamp_us,
        spacing_us=min(spacing_us, LONGEST_SPACING_US),
    )


def _rewound(total: BusyTotal, now_seconds: float) -> BusyTotal:
    """Start anew where the clock was set back: else the driver is asked for a time to come."""
    if total.last_timestamp_us <= (now_seconds + REWIND_SECONDS) * MICROSECONDS:
        return total
    return replace(total, last_timestamp_us=0, spacing_us=0)


# --------------------------------------------------------------------------- XIDs


@dataclass(slots=True)
class _XidFold:
    """The parts of the totals that events change, while they are folded."""

    cards: dict[str, CardTotals]
    unpaired: list[Xid]
    compute_instances: Mapping[tuple[str, int], int]
    by_pci: dict[str, str] = field(default_factory=dict)

    def card_of(self, event: Xid) -> str | None:
        if event.uuid is not None:
            return event.uuid if event.uuid in self.cards else None
        return self.by_pci.get(event.pci_bus_id or "")

    def partner(self, event: Xid) -> Xid | None:
        """The same incident as the other origin told it; that one then pairs no more.

        Of several the one about the same instance; one origin may name it and the other not.
        """
        found = [
            other
            for other in self.unpaired
            if other.origin != event.origin
            and (other.uuid, other.xid) == (event.uuid, event.xid)
            and abs(other.timestamp_seconds - event.timestamp_seconds) <= SAME_INCIDENT_SECONDS
        ]
        mig = self.mig_of(event)
        same = [other for other in found if self.mig_of(other) == mig]
        unnamed = [other for other in found if None in (self.mig_of(other), mig)]
        partner = next(iter(same + unnamed), None)
        if partner is not None:
            self.unpaired.remove(partner)
        return partner

    def mig_of(self, event: Xid) -> str | None:
        instance = event.gpu_instance
        if instance is None or instance == NO_INSTANCE or event.uuid is None:
            return None
        compute = event.compute_instance
        if compute is None or compute == NO_INSTANCE:
            return str(instance)
        shared = self.compute_instances.get((event.uuid, instance), 1) > 1
        return f"{instance}/{compute}" if shared else str(instance)

    def take(self, event: Xid) -> None:
        """Count an event whose `uuid` is a known card."""
        partner = None if event.old else self.partner(event)
        counts = not event.old and partner is None
        if counts:
            self.unpaired.append(event)
        card = self.cards[event.uuid or ""]
        xids = {**card.xids, event.xid: _add(card.xids.get(event.xid), event, counts)}
        mig_xids, mig = dict(card.mig_xids), self.mig_of(event)
        if mig is not None and not event.old:
            key = (event.xid, mig)
            # The other origin may have told of the card alone.
            first = counts or (partner is not None and self.mig_of(partner) is None)
            mig_xids[key] = _add(mig_xids.get(key), event, first)
        last_xid = event.xid if counts else card.last_xid
        self.cards[event.uuid or ""] = replace(
            card, xids=xids, mig_xids=mig_xids, last_xid=last_xid
        )


def fold_xids(totals: Totals, events: Iterable[Xid], reading: Reading | None = None) -> Totals:
    """The totals after these events of either origin; each incident counts once.

    Events of a card that is not known yet (the kernel log is read before the first reading) wait,
    the newest `MAX_UNPLACED` of them.  `reading`, the last one, says which MIG instances there are.
    """
    pending = sorted(
        (
            event
            for event in (*totals.unplaced_xids, *events)
            if math.isfinite(event.timestamp_seconds)
        ),
        key=lambda event: event.timestamp_seconds,
    )
    if not pending:
        return totals
    newest = pending[-1].timestamp_seconds
    work = _XidFold(
        cards=dict(totals.cards),
        unpaired=[
            event
            for event in totals.unpaired_xids
            if event.timestamp_seconds >= newest - SAME_INCIDENT_SECONDS
        ],
        compute_instances=_compute_instances(reading.cards if reading is not None else ()),
        by_pci={card.pci_bus_id: uuid for uuid, card in totals.cards.items() if card.pci_bus_id},
    )
    unplaced = []
    for event in pending:
        uuid = work.card_of(event)
        if uuid is None:
            unplaced.append(event)
        else:
            work.take(replace(event, uuid=uuid))
    return replace(
        totals,
        cards=work.cards,
        unpaired_xids=tuple(work.unpaired[-MAX_UNPAIRED:]),
        unplaced_xids=tuple(unplaced[-MAX_UNPLACED:]),
    )


def _add(before: XidTotal | None, event: Xid, counts: bool) -> XidTotal:
    count = (before.count if before else 0) + (1 if counts else 0)
    last = before.last_timestamp_seconds if before else None
    moment = event.timestamp_seconds
    return XidTotal(count, moment if last is None else max(last, moment))


def _compute_instances(cards: Iterable[CardReading]) -> Mapping[tuple[str, int], int]:
    """How many compute instances each (card UUID, GPU instance) has."""
    counts: dict[tuple[str, int], int] = {}
    for card in cards:
        for piece in card.mig_slices:
            if piece.compute_instance is not None:
                key = (card.identity.uuid, piece.gpu_instance)
                counts[key] = counts.get(key, 0) + 1
    return counts
