"""How many bytes one unit of a memory resource is, where only the node's total tells it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qgpu_exporter.model import Card

MIB = 1024**2
GIB = 1024**3


def memory_of(cards: Iterable[Card], count: int | None) -> int | None:
    """Bytes of memory of `count` of the cards; None where that depends on which ones."""
    known = [card.memory_total_bytes for card in cards]
    sizes = [size for size in known if size is not None]
    if not sizes or len(sizes) != len(known):
        return None
    if count is None or count == len(sizes):
        return sum(sizes)
    return sizes[0] * count if len(set(sizes)) == 1 else None


def infer(units: int | None, total_bytes: int | None, candidates: Sequence[int]) -> int | None:
    """The candidate by which `units` of memory come to `total_bytes`; None where none does.

    A plugin rounds down for each card and may leave out the driver's reserve, so that a unit
    looks larger than it is, by less than its double (a card of 14.8 GiB counts 14 or 15).
    """
    if not units or not total_bytes:
        return None
    apparent = total_bytes / units
    fitting = [unit for unit in candidates if 0.95 * unit <= apparent < 2 * unit]
    return fitting[0] if len(fitting) == 1 else None
