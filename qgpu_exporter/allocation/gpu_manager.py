"""tkestack gpu-manager: percent of core and blocks of memory, by the container's position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qgpu_exporter.allocation.annotations import card_numbers, numbers
from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.indexed import Request, hold, split
from qgpu_exporter.allocation.memory_unit import MIB
from qgpu_exporter.allocation.quantity import amount
from qgpu_exporter.allocation.scheme import Finding, PodView, Scheme, Surroundings, Unassigned
from qgpu_exporter.model import Container

CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"
_MEMORY_UNIT_BYTES = 256 * MIB
_ASSIGNED = "tencent.com/gpu-assigned"
_CARDS = "tencent.com/predicate-gpu-idx-"
"""Followed by the position in ``spec.containers``, which init containers are not part of."""


def find(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card, once the device plugin has said which card it is.

    The scheduler writes an ordinal; the plugin replaces it by the N of /dev/nvidia<N> and then
    sets the mark of assignment.  Before that mark, the number may name another card.
    """
    apps = [container for container in view.containers if container.kind == "app"]
    for position, container in enumerate(apps):
        try:
            core = amount(container.resources, CORE)
            request = Request(core, amount(container.resources, MEMORY))
        except ValueError as error:
            yield view.problem("bad_quantity", container.name, str(error))
            continue
        # Core alone counts from a whole card on; memory alone is no request to this plugin.
        if core >= 100 or (core and request.memory_units):
            yield from _rows(view, node, container, request, _CARDS + str(position))


def _rows(
    view: PodView, node: Surroundings, container: Container, request: Request, key: str
) -> Iterator[Finding]:
    text = view.annotations.get(key, "")
    if view.annotations.get(_ASSIGNED) != "true" or not text:
        yield Unassigned(container.name)
        return
    part = split(request, len(numbers(text) or (0,)))
    for found in card_numbers(view, container.name, text, node.cards.by_minor):
        if isinstance(found, Device):
            yield hold(container, found, CORE, part, _MEMORY_UNIT_BYTES)
        else:
            yield found


GPU_MANAGER = Scheme("gpu_manager", find, proof="annotation", resources=(CORE, MEMORY))
