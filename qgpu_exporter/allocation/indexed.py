"""Shares whose card is written by container name as a list of NVML indices: qGPU and its kin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qgpu_exporter.allocation.annotations import card_numbers, numbers
from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.quantity import amount
from qgpu_exporter.allocation.scheme import (
    Finding,
    Hold,
    PodView,
    Surroundings,
    Unassigned,
)
from qgpu_exporter.model import Container, Problem

_CARD_KEYS = (
    "tke.cloud.tencent.com/qgpu-pgpu-",
    "elasticgpu.io/container-",
    "nano-gpu/container-",
)
"""Each followed by the container's name; a cluster's scheduler writes one of them."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one container asks for over all of its cards; 0 = nothing of it."""

    core: int
    memory_units: int
    greedy_core: int = 0

    def __bool__(self) -> bool:
        return bool(self.core or self.memory_units or self.greedy_core)


@dataclass(frozen=True, slots=True)
class Part:
    """A container's share of each one of its cards."""

    core: int
    memory_units: int
    greedy_core: int = 0
    whole: bool = False


def split(request: Request, cards: int) -> Part:
    """An even split over `cards` cards, rounded down on each, as the scheduler books it.

    100 percent of a card is the card: all of its memory, whatever is written beside it.
    """
    core = min(100, request.core // cards)
    return Part(core, request.memory_units // cards, request.greedy_core // cards, core == 100)


def hold(
    container: Container, device: Device, resource: str, part: Part, unit_bytes: int | None
) -> Hold:
    """The row for one card; without a unit, memory is unknown and a whole card's is the card's."""
    memory = None
    if part.whole:
        memory = device.memory_bytes
    elif part.memory_units and unit_bytes is not None:
        memory = part.memory_units * unit_bytes
    return Hold(
        container=container.name,
        device=device,
        resource=resource,
        core_percent=float(part.core) if part.core else None,
        memory_bytes=memory,
        greedy_core_percent=float(part.greedy_core) if part.greedy_core else None,
        exclusive=part.whole,
    )


@dataclass(frozen=True, slots=True)
class Names:
    """The resource names of one scheme, each in all its spellings; the first is the primary one."""

    core: tuple[str, ...]
    memory: tuple[str, ...] = ()
    greedy: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexedShares:
    """The rows of one pod: `unit` gives the bytes in one unit of memory, None where unknown."""

    view: PodView
    node: Surroundings
    names: Names
    unit: Callable[[], int | None]

    def find(self) -> Iterator[Finding]:
        """The rows of every container that asks for one of `names`, card by card."""
        for container in self.view.askers():
            try:
                request = Request(
                    amount(container.resources, *self.names.core),
                    amount(container.resources, *self.names.memory),
                    amount(container.resources, *self.names.greedy),
                )
            except ValueError as error:
                yield self.view.problem("bad_quantity", container.name, str(error))
                continue
            if request:
                yield from self._rows(container, request)

    def _rows(self, container: Container, request: Request) -> Iterator[Finding]:
        text = self._written(container) or self._only_card()
        if text is None:
            yield Unassigned(container.name)
            return
        devices = []
        for found in card_numbers(self.view, container.name, text, self.node.cards.by_index):
            if isinstance(found, Device):
                devices.append(found)
            else:
                yield found
        if not devices:
            return
        # Cards that are not here take their part too: the others' shares do not grow.
        listed = len(numbers(text) or ())
        part = split(request, listed)
        if request.core > 100 * listed:
            detail = f"{request.core} percent of core on {listed} card(s)"
            yield self.view.problem("card_count", container.name, detail)
        unit_bytes = self.unit() if part.memory_units and not part.whole else None
        if part.memory_units and not part.whole and unit_bytes is None:
            # Of the node, not of the pod: one problem however many pods there are.
            yield Problem("memory_unit", detail=f"unit of {self.names.memory[0]} is not known here")
        resource = next((n for n in self.names.core if n in container.resources), None)
        for device in devices:
            yield hold(container, device, resource or self.names.core[0], part, unit_bytes)

    def _written(self, container: Container) -> str | None:
        for key in _CARD_KEYS:
            text = self.view.annotations.get(key + container.name, "")
            if text.strip():
                return text
        return None

    def _only_card(self) -> str | None:
        """The index of the only card there can be: where the node has one and offers one.

        Schedulers leave pods that came past them without an annotation; a wrong card would be
        worse than none, so that both the driver and the node's object have to say that there is
        no other.
        """
        pod, cards, node = self.view.pod, self.node.cards.all, self.node.node
        if pod is None or pod.phase != "Running" or len(cards) != 1 or node is None:
            return None
        if not any(node.allocatable.get(name) == "100" for name in self.names.core):
            return None
        return str(cards[0].identity.index)
