"""The scopes that several tables share: the node, its cards, those that answered, their slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qgpu_exporter.allocation.cards import mig_name
from qgpu_exporter.metrics.family import Scope
from qgpu_exporter.model import Card, CardReading, MigSlice, Snapshot

CardRows = Iterator[tuple[tuple[str, ...], Card]]


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice under its name; `first` of its GPU instance, whose readings it alone then gives."""

    mig: str
    slice: MigSlice
    card: Card
    first: bool


def slices_of(card: Card, reading: CardReading) -> Iterator[Slice]:
    """The slices of a card in the driver's order."""
    seen: set[int] = set()
    for one in reading.mig_slices:
        yield Slice(mig_name(card, one), one, card, one.gpu_instance not in seen)
        seen.add(one.gpu_instance)


def _node(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Snapshot]]:
    yield (snapshot.node,), snapshot


def _cards(snapshot: Snapshot) -> CardRows:
    for card in snapshot.cards or ():
        yield (snapshot.node, str(card.identity.index)), card


def _readings(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], CardReading]]:
    for labels, card in _cards(snapshot):
        if card.reading is not None:
            yield labels, card.reading


def _answering(snapshot: Snapshot) -> CardRows:
    for labels, card in _cards(snapshot):
        if card.reading is not None:
            yield labels, card


def _slices(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Slice]]:
    for labels, card in _cards(snapshot):
        if card.reading is not None:
            for one in slices_of(card, card.reading):
                yield (*labels, one.mig), one


def _gpu_instances(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], MigSlice]]:
    for labels, one in _slices(snapshot):
        if one.first:
            yield (*labels[:-1], str(one.slice.gpu_instance)), one.slice


NODE = Scope("node", ("node",), _node)
CARDS = Scope("known cards", ("node", "gpu"), _cards)
READINGS = Scope("cards that answered", ("node", "gpu"), _readings)
ANSWERING = Scope("cards that answered, with their totals", ("node", "gpu"), _answering)
SLICES = Scope("MIG slices", ("node", "gpu", "mig"), _slices)
GPU_INSTANCES = Scope("MIG GPU instances", ("node", "gpu", "mig"), _gpu_instances)
"""Named by the GPU instance, since its memory and profiling are its compute instances' together."""
