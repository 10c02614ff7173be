"""Koordinator: percent of core and of memory, of cards by minor number, written for the pod."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from qgpu_exporter.allocation.annotations import entries, items, json_value
from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.quantity import whole
from qgpu_exporter.allocation.scheme import Finding, Hold, PodView, Scheme, Surroundings, Unassigned
from qgpu_exporter.model import Container

_ALLOCATED = "scheduling.koordinator.sh/device-allocated"
_PREFIX = "koordinator.sh/gpu"
_CORE = "koordinator.sh/gpu-core"
_MEMORY = "koordinator.sh/gpu-memory"
_MEMORY_RATIO = "koordinator.sh/gpu-memory-ratio"
_BOTH = "koordinator.sh/gpu"
"""Percent of a card's core and memory at once."""
_WHOLE = "nvidia.com/gpu"
"""Cards; the scheduler books them like its own."""


@dataclass(frozen=True, slots=True)
class _Amounts:
    core: int = 0
    memory_bytes: int = 0
    memory_ratio: int = 0

    @classmethod
    def read(cls, resources: Mapping[str, object]) -> _Amounts:
        """What a list of resources comes to; ValueError for a bad quantity."""
        counts = {name: whole(str(value)) for name, value in resources.items()}
        both = counts.get(_BOTH, 0) or 100 * counts.get(_WHOLE, 0)
        return cls(
            counts.get(_CORE, 0) or both,
            counts.get(_MEMORY, 0),
            counts.get(_MEMORY_RATIO, 0) or both,
        )

    def __bool__(self) -> bool:
        return bool(self.core or self.memory_bytes or self.memory_ratio)

    def hold(self, container: Container, device: Device) -> Hold:
        memory = self.memory_bytes or None
        if memory is None and self.memory_ratio and device.memory_bytes is not None:
            memory = device.memory_bytes * min(100, self.memory_ratio) // 100
        return Hold(
            container.name,
            device,
            _CORE,
            float(min(100, self.core)) if self.core else None,
            memory,
            exclusive=self.core >= 100 and self.memory_ratio >= 100,
        )


def find(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card.

    The annotation is the pod's.  It is the container's own where only one asks; where several ask
    for one card, each has what it asks for; who has which of several cards is not written.
    """
    asking = list(_asking(view))
    if not asking:
        return
    try:
        allocated = _allocated(view.annotations.get(_ALLOCATED, "{}"))
    except ValueError as error:
        yield view.problem("bad_annotation", detail=str(error))
        return
    alone = sum(1 for container, _ in asking if container.kind != "init") == 1
    for container, asked in asking:
        if isinstance(asked, ValueError):
            yield view.problem("bad_quantity", container.name, str(asked))
        elif not allocated:
            yield Unassigned(container.name)
        elif alone and container.kind != "init":
            yield from _rows(view, node, container, allocated)
        elif len(allocated) == 1:
            yield from _rows(view, node, container, dict.fromkeys(allocated, asked))
        else:
            detail = f"cards {sorted(allocated)} are the pod's; whose each one is, is not written"
            yield view.problem("ambiguous_card", container.name, detail)


def _asking(view: PodView) -> Iterator[tuple[Container, _Amounts | ValueError]]:
    for container in view.askers():
        try:
            asked = _Amounts.read(container.resources)
        except ValueError as error:
            yield container, error
            continue
        if asked:
            yield container, asked


def _allocated(text: str) -> Mapping[int, _Amounts]:
    """What was allocated, by minor number; ValueError where the annotation cannot be read."""
    found = {}
    for value in items(entries(json_value(text)).get("gpu", [])):
        one = entries(value)
        minor = one.get("minor")
        if not isinstance(minor, int):
            raise ValueError("a card without its minor number")
        found[minor] = _Amounts.read(entries(one.get("resources", {})))
    return dict(sorted(found.items()))


def _rows(
    view: PodView, node: Surroundings, container: Container, amounts: Mapping[int, _Amounts]
) -> Iterator[Finding]:
    for minor, amount in amounts.items():
        device = node.cards.by_minor(minor)
        if device is None:
            yield view.problem("unknown_card", container.name, f"there is no card {minor} here")
        else:
            yield amount.hold(container, device)


KOORDINATOR = Scheme(
    "koordinator",
    find,
    proof="annotation",
    resources=(_PREFIX + "*",),
    annotations=(_ALLOCATED,),
    borrowed=(_WHOLE,),
)
