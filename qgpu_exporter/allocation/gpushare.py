"""Volcano's and Alibaba's gpushare: memory of a card that is written once for the whole pod."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qgpu_exporter.allocation.annotations import card_numbers, entries, json_value, numbers
from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.memory_unit import GIB, MIB, infer, memory_of
from qgpu_exporter.allocation.quantity import amount, whole
from qgpu_exporter.allocation.scheme import Finding, Hold, PodView, Scheme, Surroundings, Unassigned
from qgpu_exporter.model import Container, Problem

# --------------------------------------------------------------------------- Volcano

VOLCANO_MEMORY = "volcano.sh/gpu-memory"
VOLCANO_CARDS = "volcano.sh/gpu-number"
_VOLCANO_INDEX = "volcano.sh/gpu-index"


def find_volcano(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card: MiB of one card by NVML index, or whole cards."""
    text = view.annotations.get(_VOLCANO_INDEX, "").strip()
    askers = view.askers()
    for container in askers:
        try:
            memory = amount(container.resources, VOLCANO_MEMORY)
            cards = amount(container.resources, VOLCANO_CARDS)
        except ValueError as error:
            yield view.problem("bad_quantity", container.name, str(error))
            continue
        if not memory and not cards:
            continue
        if not text:
            yield Unassigned(container.name)
            continue
        listed = numbers(text) or ()
        if len(listed) > 1 and (len(askers) > 1 or not cards):
            detail = f"cards {text[:80]} are the pod's; whose each one is, is not written"
            yield view.problem("ambiguous_card", container.name, detail)
            continue
        memory_bytes = memory * MIB * node.volcano_memory_factor or None
        for found in card_numbers(view, container.name, text, node.cards.by_index):
            if not isinstance(found, Device):
                yield found
            elif cards:
                yield _whole(container, found, VOLCANO_CARDS)
            else:
                yield Hold(container.name, found, VOLCANO_MEMORY, memory_bytes=memory_bytes)


def _whole(container: Container, device: Device, resource: str) -> Hold:
    return Hold(container.name, device, resource, 100.0, device.memory_bytes, exclusive=True)


# --------------------------------------------------------------------------- Alibaba

ALIYUN_MEMORY = "aliyun.com/gpu-mem"
ALIYUN_CORE = "aliyun.com/gpu-core.percentage"
_COUNT = "aliyun.com/gpu-count"
_CARD = "ALIYUN_COM_GPU_MEM_IDX"
_CARD_UNITS = "ALIYUN_COM_GPU_MEM_DEV"
_CARD_ASSIGNED = "ALIYUN_COM_GPU_MEM_ASSIGNED"
_MEMORY_BY_CARD = "scheduler.framework.gpushare.allocation"
_MEMORY_ASSIGNED = "scheduler.framework.gpushare.assigned"
_CORE_BY_CARD = "gpushare.alibabacloud.com/core-percentage"


def find_aliyun(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card: units of memory and percent of core, by minor number.

    The older scheduler writes one card for the whole pod; the newer one writes for each container
    the amount on each card.
    """
    if _MEMORY_BY_CARD in view.annotations or _CORE_BY_CARD in view.annotations:
        return _by_container(view, node)
    return _by_pod(view, node)


def _by_pod(view: PodView, node: Surroundings) -> Iterator[Finding]:
    text = view.annotations.get(_CARD, "").strip()
    assigned = text and view.annotations.get(_CARD_ASSIGNED, "true") == "true"
    for container in view.askers():
        try:
            units = amount(container.resources, ALIYUN_MEMORY)
            core = amount(container.resources, ALIYUN_CORE)
        except ValueError as error:
            yield view.problem("bad_quantity", container.name, str(error))
            continue
        if not units and not core:
            continue
        if not assigned:
            yield Unassigned(container.name)
            continue
        for found in card_numbers(view, container.name, text, node.cards.by_minor):
            if isinstance(found, Device):
                yield from _share(view, node, container, found, units, core)
            else:
                yield found


def _by_container(view: PodView, node: Surroundings) -> Iterator[Finding]:
    if view.annotations.get(_MEMORY_ASSIGNED) == "false":
        yield from (Unassigned(container.name) for container in view.askers())
        return
    try:
        memory = _amounts(view.annotations.get(_MEMORY_BY_CARD, "{}"))
        core = _amounts(view.annotations.get(_CORE_BY_CARD, "{}"))
    except ValueError as error:
        yield view.problem("bad_annotation", detail=str(error))
        return
    apps = [container for container in view.containers if container.kind == "app"]
    for position, container in enumerate(apps):
        units_by_card, core_by_card = memory.get(position, {}), core.get(position, {})
        if container.resources and not units_by_card and not core_by_card:
            yield Unassigned(container.name)
        for minor in sorted({*units_by_card, *core_by_card}):
            device = node.cards.by_minor(minor)
            if device is None:
                detail = f"there is no card {minor} here"
                yield view.problem("unknown_card", container.name, detail)
                continue
            units, percent = units_by_card.get(minor, 0), core_by_card.get(minor, 0)
            yield from _share(view, node, container, device, units, percent)


def _amounts(text: str) -> Mapping[int, Mapping[int, int]]:
    """``{"<position>": {"<card>": <amount>}}`` as numbers; ValueError for anything else."""
    return {
        int(position): {int(card): whole(str(units)) for card, units in entries(cards).items()}
        for position, cards in entries(json_value(text)).items()
    }


def _share(
    view: PodView, node: Surroundings, container: Container, device: Device, units: int, core: int
) -> Iterator[Finding]:
    unit = _unit_bytes(view, node, device) if units else None
    if units and unit is None:
        yield Problem("memory_unit", detail=f"unit of {ALIYUN_MEMORY} is not known here")
    yield Hold(
        container.name,
        device,
        ALIYUN_MEMORY,
        float(core) if core else None,
        units * unit if unit is not None else None,
    )


def _unit_bytes(view: PodView, node: Surroundings, device: Device) -> int | None:
    """Bytes in one ``aliyun.com/gpu-mem``: a setting of the whole cluster's device plugin.

    Inferred from what the node offers, else from the card's total that the scheduler wrote.
    """
    if node.gpushare_memory_unit != "auto":
        return GIB if node.gpushare_memory_unit == "GiB" else MIB
    offered = node.node.capacity if node.node is not None else {}
    total = memory_of(node.cards.all, _read(offered, _COUNT))
    return infer(_read(offered, ALIYUN_MEMORY), total, (GIB, MIB)) or infer(
        _read(view.annotations, _CARD_UNITS), device.memory_bytes, (GIB, MIB)
    )


def _read(values: Mapping[str, str], name: str) -> int | None:
    try:
        return amount(values, name) or None
    except ValueError:
        return None


VOLCANO_GPUSHARE = Scheme(
    "volcano_gpushare",
    find_volcano,
    proof="annotation",
    resources=(VOLCANO_MEMORY, VOLCANO_CARDS),
)
ALIYUN_GPUSHARE = Scheme(
    "aliyun_gpushare", find_aliyun, proof="annotation", resources=(ALIYUN_MEMORY, ALIYUN_CORE)
)
