"""Keeps which cards the node has, by index, UUID and PCI address, over rounds and readers; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

from qgpu_exporter.model import (
    Card,
    CardFailure,
    CardIdentity,
    CardReading,
    CardTotals,
    DownReason,
    MigSlice,
    Reading,
    Totals,
)

MISSING: DownReason = "missing"


@dataclass(frozen=True, slots=True)
class KnownCard:
    """A card as it was last seen; `down_reason` is of the last round."""

    identity: CardIdentity
    """`uuid` is empty for a card that has never given one: no label, and nothing is kept of it."""
    memory_total_bytes: int | None = None
    mig_compute_slices: int | None = None
    last_mig_slices: tuple[MigSlice, ...] = ()
    """Allocations name slices while their card is silent."""
    down_reason: DownReason | None = None


@dataclass(frozen=True, slots=True)
class IndexChange:
    """A UUID that was found under another index than before."""

    uuid: str
    before: int
    now: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """The node's cards by NVML index: an index has one card, a UUID has one index."""

    cards: Mapping[int, KnownCard] | None = None
    """None: no round has succeeded yet."""
    index_changes: int = 0
    """Count since start."""
    changes: tuple[IndexChange, ...] = ()
    """Of the last round."""


def fold(inventory: Inventory, reading: Reading) -> Inventory:
    """The inventory after one round; a round with an error says nothing about cards.

    What the round lists under an index is that index's card, whatever was there before (a
    replaced card).  A known card that the round does not list stays under its old index as
    ``missing``, unless another card has that index now.
    """
    if reading.error is not None:
        return replace(inventory, changes=())
    before = inventory.cards or {}
    found = {card.identity.index: _seen(before, card) for card in reading.cards}
    uuids = {card.identity.uuid for card in found.values()}
    # First those that say who they are: they may tell who another one cannot be.
    for failure in sorted(reading.failures, key=lambda failure: (not failure.uuid, failure.index)):
        if failure.index not in found and (not failure.uuid or failure.uuid not in uuids):
            found[failure.index] = _failed(before, failure, uuids)
            uuids.add(found[failure.index].identity.uuid)
    for index, card in before.items():
        if index not in found and card.identity.uuid and card.identity.uuid not in uuids:
            found[index] = replace(card, down_reason=MISSING)
    found = _places_given_up(found, reading.cards)
    changes = _changes(before, found)
    return Inventory(
        cards=dict(sorted(found.items())),
        index_changes=inventory.index_changes + len(changes),
        changes=changes,
    )


def cards(inventory: Inventory, reading: Reading | None, totals: Totals) -> tuple[Card, ...] | None:
    """Every known card in index order, with its reading of this round; None before the first.

    `reading` is the round that was folded last, or None when it is too old or failed as a whole:
    then no card has a reading and none has a reason, since nothing is known about it.
    """
    if inventory.cards is None:
        return None
    fresh = reading is not None and reading.error is None
    readings: dict[tuple[int, str], CardReading] = {}
    if reading is not None and fresh:
        for card in reading.cards:
            readings[card.identity.index, card.identity.uuid] = card
    return tuple(
        Card(
            identity=known.identity,
            reading=readings.get((index, known.identity.uuid)),
            down_reason=known.down_reason if fresh else None,
            memory_total_bytes=known.memory_total_bytes,
            mig_compute_slices=known.mig_compute_slices,
            last_mig_slices=known.last_mig_slices,
            totals=totals.cards.get(known.identity.uuid, CardTotals()),
        )
        for index, known in inventory.cards.items()
    )


def uuids(inventory: Inventory) -> frozenset[str]:
    """The UUIDs of all known cards, missing ones too: whose totals are kept."""
    known = inventory.cards or {}
    return frozenset(card.identity.uuid for card in known.values() if card.identity.uuid)


def _by_uuid(known: Mapping[int, KnownCard]) -> dict[str, KnownCard]:
    return {card.identity.uuid: card for card in known.values() if card.identity.uuid}


def _seen(before: Mapping[int, KnownCard], card: CardReading) -> KnownCard:
    """A card that answered: capacities that this round could not read are kept."""
    kept = _by_uuid(before).get(card.identity.uuid)
    total = card.memory.total_bytes if card.memory else None
    if total is None and kept is not None:
        total = kept.memory_total_bytes
    return KnownCard(
        identity=_merged(kept.identity if kept else None, card.identity),
        memory_total_bytes=total,
        # Unlike memory, this one has a None of its own: MIG is off.
        mig_compute_slices=card.mig_compute_slices,
        last_mig_slices=card.mig_slices,
    )


def _merged(before: CardIdentity | None, now: CardIdentity) -> CardIdentity:
    """The identity of this round, what it could not read filled from before (one UUID)."""
    if before is None:
        return now
    read = {field.name: getattr(now, field.name) for field in fields(now)}
    return replace(before, **{name: value for name, value in read.items() if value is not None})


def _failed(
    before: Mapping[int, KnownCard], failure: CardFailure, elsewhere: set[str]
) -> KnownCard:
    """A card that failed, as the one that it says it is, else as the one that stood there before.

    A new reader knows no UUID of a card that it cannot reach, and may number the cards anew: the
    card that stood there is not this one if it was found elsewhere.
    """
    if failure.uuid:
        kept = _by_uuid(before).get(failure.uuid)
    else:
        kept = before.get(failure.index)
        if kept is not None and kept.identity.uuid in elsewhere:
            kept = None
    if kept is None:
        return KnownCard(
            CardIdentity(failure.index, failure.uuid or ""), down_reason=failure.reason
        )
    identity = replace(kept.identity, index=failure.index)
    return replace(kept, identity=identity, down_reason=failure.reason)


def _places_given_up(
    found: Mapping[int, KnownCard], answering: Collection[CardReading]
) -> dict[int, KnownCard]:
    """A card that is down has no minor number or PCI address that an answering one now has."""
    minors = {card.identity.minor for card in answering}
    addresses = {card.identity.pci_bus_id for card in answering}

    def without_taken(card: KnownCard) -> KnownCard:
        identity = card.identity
        if card.down_reason is None:
            return card
        if identity.minor in minors:
            identity = replace(identity, minor=None)
        if identity.pci_bus_id in addresses:
            identity = replace(identity, pci_bus_id=None)
        return replace(card, identity=identity)

    return {index: without_taken(card) for index, card in found.items()}


def _changes(
    before: Mapping[int, KnownCard], now: Mapping[int, KnownCard]
) -> tuple[IndexChange, ...]:
    old = {uuid: card.identity.index for uuid, card in _by_uuid(before).items()}
    return tuple(
        IndexChange(uuid, old[uuid], card.identity.index)
        for uuid, card in _by_uuid(now).items()
        if uuid in old and old[uuid] != card.identity.index
    )
