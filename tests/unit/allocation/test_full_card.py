"""A card that is handed out whole in slices: its parts are no exact binary numbers, its sum is."""

from __future__ import annotations

import pytest

from qgpu_exporter.allocation import card_totals
from qgpu_exporter.model import Allocation, AllocationResult, Card, CardAllocated, CardIdentity


@pytest.mark.parametrize("one_pod", [True, False])
def test_seven_sevenths_are_the_whole_card(one_pod: bool) -> None:
    allocations = tuple(
        Allocation(
            namespace="demo",
            pod="all" if one_pod else f"pod-{instance}",
            container=f"c-{instance}",
            gpu=0,
            uuid=f"MIG-{instance}",
            scheme="mig",
            resource="nvidia.com/mig-1g.10gb",
            device=f"MIG-{instance}",
            mig=str(instance),
            core_percent=100 / 7,
        )
        for instance in range(7)
    )
    cards = (Card(CardIdentity(0, "GPU-0")),)
    totals = card_totals(AllocationResult(allocations), cards)
    assert totals == {0: CardAllocated(core_percent=100.0, containers=7)}
