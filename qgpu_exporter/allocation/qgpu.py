"""Tencent qGPU: percent of core and units of memory on the cards that its scheduler wrote down."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qgpu_exporter.allocation.indexed import IndexedShares, Names
from qgpu_exporter.allocation.memory_unit import GIB, MIB, infer, memory_of
from qgpu_exporter.allocation.quantity import whole
from qgpu_exporter.allocation.scheme import Finding, PodView, Scheme, Surroundings

CORE = "tke.cloud.tencent.com/qgpu-core"
MEMORY = "tke.cloud.tencent.com/qgpu-memory"
GREEDY_CORE = "tke.cloud.tencent.com/qgpu-core-greedy"
"""Core of low-priority pods: what the others leave idle, so that it guarantees nothing."""

_UNIT_LABEL = "tke.cloud.tencent.com/qgpu.memory-unit"
_UNIT = re.compile(r"([0-9]{1,6})([GM])")
_NAMES = Names(core=(CORE,), memory=(MEMORY,), greedy=(GREEDY_CORE,))


def memory_unit_bytes(node: Surroundings) -> int | None:
    """Bytes in one ``qgpu-memory``; None where the node's object cannot be read.

    The label says ``1G`` (GiB) or ``128M`` (128 MiB).  It can be switched off: then the unit by
    which the node's allocatable amount matches its cards' memory, else GiB, which came first.
    """
    if node.node is None:
        return None
    label = node.node.labels.get(_UNIT_LABEL)
    if label is not None:
        match = _UNIT.fullmatch(label)
        if match is None or int(match[1]) == 0:
            return None
        return int(match[1]) * (GIB if match[2] == "G" else MIB)
    core = _offered(node, CORE)
    cards = core // 100 if core else None
    total = memory_of(node.cards.all, cards)
    return infer(_offered(node, MEMORY), total, (GIB, 128 * MIB)) or GIB


def _offered(node: Surroundings, resource: str) -> int | None:
    try:
        return whole(node.node.allocatable.get(resource, "")) if node.node is not None else None
    except ValueError:
        return None


def find(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card; core is in percent of a card, split evenly over its cards."""
    return IndexedShares(view, node, _NAMES, lambda: memory_unit_bytes(node)).find()


QGPU = Scheme("qgpu", find, proof="annotation", resources=(CORE, MEMORY, GREEDY_CORE))
