"""What the schemes hand out of each card: a sum over the allocations, pod by pod."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from qgpu_exporter.model import Allocation, AllocationResult, Card, CardAllocated


def card_totals(result: AllocationResult, cards: Iterable[Card]) -> Mapping[int, CardAllocated]:
    """By GPU index, for every known card; empty while the allocations are not complete.

    A pod counts with the larger of its init containers' largest share and the sum of the others',
    since an init container ends before the app containers start.
    """
    if not result.complete:
        return {}
    by_card: dict[int, list[Allocation]] = defaultdict(list)
    for allocation in result.allocations:
        by_card[allocation.gpu].append(allocation)
    return {
        card.identity.index: _total(by_card[card.identity.index])
        for card in sorted(cards, key=lambda card: card.identity.index)
    }


def _total(allocations: Sequence[Allocation]) -> CardAllocated:
    memory = _sum_over_pods(allocations, lambda allocation: allocation.memory_bytes)
    return CardAllocated(
        core_percent=_sum_over_pods(allocations, lambda allocation: allocation.core_percent),
        memory_bytes=int(memory) if memory is not None else None,
        containers=len({(a.namespace, a.pod, a.container) for a in allocations}),
    )


def _sum_over_pods(
    allocations: Iterable[Allocation], value: Callable[[Allocation], float | None]
) -> float | None:
    pods: dict[tuple[str, str], tuple[dict[str, float], list[float]]] = {}
    for allocation in allocations:
        amount = value(allocation)
        if amount is None:
            continue
        inits, others = pods.setdefault((allocation.namespace, allocation.pod), ({}, []))
        if allocation.kind == "init":
            inits[allocation.container] = inits.get(allocation.container, 0) + amount
        else:
            others.append(amount)
    if not pods:
        return None
    # Exact sums: seven sevenths of a card must not be more than the card.
    return math.fsum(max(math.fsum(others), 0, *inits.values()) for inits, others in pods.values())
