"""The tke dialect: the names, labels and units that users of TKE's GPU exporters have.

Memory is in MiB, except in the qGPU families about what is given away, which count GiB; container
families repeat their cards as ``total``, so a sum over them counts twice, as it always did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from qgpu_exporter.metrics.family import Family, Scope, itself, present
from qgpu_exporter.metrics.native_allocation import Share, shares
from qgpu_exporter.metrics.scopes import CARDS, NODE
from qgpu_exporter.model import Allocation, Card, CardAllocated, CardReading, Snapshot

TkeFamily = Family[Snapshot, Any]
RequestUnit = Literal["percent", "cards"]

MIB = 1 << 20
GIB = 1 << 30
WHOLE_CARD = 100
QGPU_SCHEME = "qgpu"
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Use:
    """What a container uses and was given; of one card, or in sum; None: not known."""

    used_core: float | None = None
    used_memory: float | None = None
    """Bytes."""
    core: float | None = None
    memory: float | None = None
    """Bytes."""


@dataclass(frozen=True, slots=True)
class PodUse:
    """What a pod uses and was given, beside what the node has."""

    use: Use
    node_core: float
    node_memory: float | None


# --------------------------------------------------------------------------- sums


def _sum(amounts: Iterable[float | None]) -> float | None:
    """None where any amount is not known: a sum without it would be too small."""
    known = list(amounts)
    found = [amount for amount in known if amount is not None]
    return sum(found) if found and len(found) == len(known) else None


def _given(amounts: Iterable[float | None]) -> float | None:
    """The sum of what was given; None where nothing was."""
    found = [amount for amount in amounts if amount is not None]
    return sum(found) if found else None


def _total(uses: Iterable[Use]) -> Use:
    parts = list(uses)
    return Use(
        _sum(part.used_core for part in parts),
        _sum(part.used_memory for part in parts),
        _given(part.core for part in parts),
        _given(part.memory for part in parts),
    )


def _uses(snapshot: Snapshot) -> dict[tuple[str, str, str], dict[int, Use]]:
    """By (namespace, pod, container) and gpu index: use where it is known, share where given."""
    given: dict[tuple[int, str, str, str], Share] = {}
    if snapshot.allocation is not None:
        given = shares(snapshot.allocation.allocations)
    used = {
        (one.gpu, one.namespace, one.pod, one.container): one for one in snapshot.usage.containers
    }
    found: dict[tuple[str, str, str], dict[int, Use]] = {}
    for key in sorted({*given, *used}):
        share, use = given.get(key, Share()), used.get(key)
        gpu, *names = key
        found.setdefault((names[0], names[1], names[2]), {})[gpu] = Use(
            use.core_percent if use else None,
            use.memory_bytes if use else None,
            share.core_percent,
            share.memory_bytes,
        )
    return found


# --------------------------------------------------------------------------- rows


def _cards(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Card]]:
    for (node, gpu), card in CARDS.rows(snapshot):
        yield (gpu, node), card


def _readings(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], CardReading]]:
    for labels, card in _cards(snapshot):
        if card.reading is not None:
            yield labels, card.reading


def _ecc_errors(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int | None]]:
    for labels, reading in _readings(snapshot):
        ecc = reading.ecc
        yield (*labels, "aggregate"), _ecc_sum(ecc.corrected_aggregate, ecc.uncorrected_aggregate)
        yield (*labels, "volatile"), _ecc_sum(ecc.corrected_volatile, ecc.uncorrected_volatile)


def _ecc_sum(corrected: int | None, uncorrected: int | None) -> int | None:
    total = _sum((corrected, uncorrected))
    return None if total is None else int(total)


def _info(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Card]]:
    for labels, card in _cards(snapshot):
        identity = card.identity
        yield (*labels, identity.model or "", snapshot.driver_version or "", identity.uuid), card


def _allocated(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], tuple[Card, CardAllocated]]]:
    for labels, card in _cards(snapshot):
        allocated = snapshot.allocated.get(card.identity.index)
        if allocated is not None:
            yield labels, (card, allocated)


def _qgpu_shares(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Share]]:
    result = snapshot.allocation
    held = [one for one in result.allocations if one.scheme == QGPU_SCHEME] if result else []
    for (gpu, namespace, pod, container), share in shares(tuple(held)).items():
        yield (str(gpu), container, namespace, pod), share


def _pods(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], PodUse]]:
    by_pod: dict[tuple[str, str], list[Use]] = {}
    for (namespace, pod, _), by_card in _uses(snapshot).items():
        by_pod.setdefault((namespace, pod), []).extend(by_card.values())
    cards = snapshot.cards or ()
    memory = _sum(card.memory_total_bytes for card in cards)
    for (namespace, pod), uses in by_pod.items():
        row = PodUse(_total(uses), WHOLE_CARD * len(cards), memory)
        yield (namespace, snapshot.node, pod), row


def _containers(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Use]]:
    for (namespace, pod, container), by_card in _uses(snapshot).items():
        yield (namespace, pod, container, snapshot.node), _total(by_card.values())


def _container_totals(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Use]]:
    for labels, use in _containers(snapshot):
        yield (*labels, TOTAL), use


def _container_cards(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Use]]:
    for (namespace, pod, container), by_card in _uses(snapshot).items():
        labels = (namespace, pod, container, snapshot.node)
        for gpu, use in sorted(by_card.items()):
            yield (*labels, f"gpu{gpu}"), use
        yield (*labels, TOTAL), _total(by_card.values())


def _assigned(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int]]:
    result = snapshot.allocation
    held: tuple[Allocation, ...] = result.allocations if result else ()
    for gpu, namespace, pod, container in shares(held):
        yield (namespace, pod, container, snapshot.node, str(gpu)), gpu


_CONTAINER = ("namespace", "pod_name", "container_name", "node")
_CARD = Scope("known cards", ("card", "node"), _cards)
_READING = Scope("cards that answered", ("card", "node"), _readings)
_ECC = Scope("ECC counters", ("card", "node", "counter_type"), _ecc_errors)
_INFO = Scope("known cards, by name", ("card", "node", "type", "driver", "UUID"), _info)
_ALLOCATED = Scope("known cards, once allocations are complete", ("card", "node"), _allocated)
_QGPU = Scope("qGPU shares", ("card", "container_name", "namespace", "pod_name"), _qgpu_shares)
_POD = Scope("pods that hold or use a card", ("namespace", "node", "pod"), _pods)
_BY_CONTAINER = Scope("containers that hold or use a card", _CONTAINER, _containers)
_BY_GPU = Scope("containers by card and in total", (*_CONTAINER, "gpu"), _container_cards)
_BY_GPU_MEMORY = Scope(
    "containers by card and in total", (*_CONTAINER, "gpu_memory"), _container_cards
)
_REQUESTED = Scope("containers in total", (*_CONTAINER, "req_of_gpu"), _container_totals)
_REQUESTED_MEMORY = Scope(
    "containers in total", (*_CONTAINER, "req_of_gpu_memory"), _container_totals
)
_ASSIGNED = Scope("containers by card", (*_CONTAINER, "card"), _assigned)

# --------------------------------------------------------------------------- values


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio * 100, 6)


def _part(amount: float | None, whole: float | None) -> float | None:
    """In percent; None without a whole."""
    return None if amount is None or not whole else 100 * amount / whole


def _in(unit: int, amount: float | None) -> float | None:
    return None if amount is None else amount / unit


def _used_memory(reading: CardReading) -> float | None:
    return _in(MIB, reading.memory.used_bytes) if reading.memory else None


def _used_memory_percent(reading: CardReading) -> float | None:
    memory = reading.memory
    return _part(memory.used_bytes, memory.total_bytes) if memory else None


def _whole_gibibytes(card: Card) -> int | None:
    """As qGPU's device plugin counts a card's memory."""
    return None if card.memory_total_bytes is None else card.memory_total_bytes // GIB


def _available_core(row: tuple[Card, CardAllocated]) -> float:
    return max(0, WHOLE_CARD - (row[1].core_percent or 0))


def _available_memory(row: tuple[Card, CardAllocated]) -> float | None:
    card, allocated = row
    whole = _whole_gibibytes(card)
    return None if whole is None else max(0, whole - (allocated.memory_bytes or 0) / GIB)


def _hundred(_: object) -> int:
    return WHOLE_CARD


def _requested(unit: RequestUnit) -> Callable[[Use], float | None]:
    """TKE's exporter counts percent, gpu-manager counted cards under the same name."""
    return lambda use: _in(WHOLE_CARD if unit == "cards" else 1, use.core)


def _gauge(
    name: str,
    help: str,  # noqa: A002 -- the format's own word for it
    scope: Scope[Snapshot, Any],
    value: Callable[[Any], float | None],
) -> TkeFamily:
    return Family(name, "gauge", help, scope, value, "as the native family of the same fact")


# --------------------------------------------------------------------------- tables

_HARDWARE: tuple[TkeFamily, ...] = (
    _gauge(
        "gpu_count",
        "Cards of the node.",
        NODE,
        lambda snapshot: None if snapshot.cards is None else len(snapshot.cards),
    ),
    _gauge("gpu_info", "Type, driver and UUID of the card.", _INFO, present),
    _gauge(
        "gpu_mem_each_card",
        "Memory of the card in MiB.",
        _CARD,
        lambda card: _in(MIB, card.memory_total_bytes),
    ),
    _gauge(
        "gpu_power_usage",
        "Power draw in watts.",
        _READING,
        lambda reading: reading.power.draw_watts,
    ),
    _gauge("gpu_ecc_mode", "1 if ECC is on.", _READING, lambda reading: reading.ecc.enabled),
    _gauge(
        "gpu_ecc_error_count",
        "ECC errors, corrected and not, by counter type.",
        _ECC,
        itself,
    ),
    _gauge(
        "gpu_persistence_mode",
        "1 if persistence mode is on; only with --devices.persistence-mode.",
        _READING,
        lambda reading: reading.persistence_mode,
    ),
    _gauge(
        "gpu_temprature",
        "Temperature of the GPU in degrees Celsius (the name is spelt as TKE's exporter has it).",
        _READING,
        lambda reading: reading.temperatures.gpu_celsius,
    ),
)

_CARDS: tuple[TkeFamily, ...] = (
    _gauge(
        "gpu_core_usage",
        "Computing power of the card in use in percent.",
        _READING,
        lambda reading: _percent(reading.utilization.gpu_ratio),
    ),
    _gauge("gpu_mem_usage", "Memory of the card in use in MiB.", _READING, _used_memory),
    _gauge(
        "gpu_core_utilization_percentage",
        "Utilisation of the card in percent.",
        _READING,
        lambda reading: _percent(reading.utilization.gpu_ratio),
    ),
    _gauge(
        "gpu_mem_utilization_percentage",
        "Memory of the card in use in percent.",
        _READING,
        _used_memory_percent,
    ),
    _gauge(
        "gpu_enc_utilization_percentage",
        "Utilisation of the encoders in percent.",
        _READING,
        lambda reading: _percent(reading.utilization.encoder_ratio),
    ),
    _gauge(
        "gpu_dec_utilization_percentage",
        "Utilisation of the decoders in percent.",
        _READING,
        lambda reading: _percent(reading.utilization.decoder_ratio),
    ),
    _gauge("gpu_core_allocatable", "Computing power of the card: 100 percent.", _CARD, _hundred),
    _gauge(
        "gpu_core_available",
        "Computing power of the card that nobody holds in percent.",
        _ALLOCATED,
        _available_core,
    ),
    _gauge(
        "gpu_core_allocated",
        "Computing power that the container holds by qGPU in percent of a card.",
        _QGPU,
        lambda share: share.core_percent,
    ),
    _gauge("gpu_mem_allocatable", "Memory of the card in whole GiB.", _CARD, _whole_gibibytes),
    _gauge(
        "gpu_mem_available",
        "Memory of the card that nobody holds in GiB.",
        _ALLOCATED,
        _available_memory,
    ),
    _gauge(
        "gpu_mem_allocated",
        "Memory that the container holds by qGPU in GiB.",
        _QGPU,
        lambda share: _in(GIB, share.memory_bytes),
    ),
)

_PODS: tuple[TkeFamily, ...] = (
    _gauge(
        "pod_core_usage",
        "Computing power that the pod uses in percent of a card.",
        _POD,
        lambda row: row.use.used_core,
    ),
    _gauge(
        "pod_mem_usage",
        "Memory that the pod uses in MiB.",
        _POD,
        lambda row: _in(MIB, row.use.used_memory),
    ),
    _gauge(
        "pod_core_utilization_percentage",
        "Computing power that the pod uses in percent of what it requested.",
        _POD,
        lambda row: _part(row.use.used_core, row.use.core),
    ),
    _gauge(
        "pod_mem_utilization_percentage",
        "Memory that the pod uses in percent of what it requested.",
        _POD,
        lambda row: _part(row.use.used_memory, row.use.memory),
    ),
    _gauge(
        "pod_core_occupy_node_percentage",
        "Computing power that the pod uses in percent of the node's.",
        _POD,
        lambda row: _part(row.use.used_core, row.node_core),
    ),
    _gauge(
        "pod_mem_occupy_node_percentage",
        "Memory that the pod uses in percent of the node's.",
        _POD,
        lambda row: _part(row.use.used_memory, row.node_memory),
    ),
    _gauge(
        "pod_core_request",
        "Computing power that the pod requested in percent of a card.",
        _POD,
        lambda row: row.use.core,
    ),
    _gauge(
        "pod_mem_request",
        "Memory that the pod requested in MiB.",
        _POD,
        lambda row: _in(MIB, row.use.memory),
    ),
)


def _container_families(unit: RequestUnit) -> tuple[TkeFamily, ...]:
    words = "percent of a card" if unit == "percent" else "cards"
    return (
        _gauge(
            "container_assigned_card",
            "Number of a card that the container holds.",
            _ASSIGNED,
            itself,
        ),
        _gauge(
            "container_gpu_utilization",
            "Computing power that the container uses in percent of a card.",
            _BY_GPU,
            lambda use: use.used_core,
        ),
        _gauge(
            "container_gpu_memory_total",
            "Memory that the container uses in MiB.",
            _BY_GPU_MEMORY,
            lambda use: _in(MIB, use.used_memory),
        ),
        _gauge(
            "container_core_utilization_percentage",
            "Computing power that the container uses in percent of what it requested.",
            _BY_CONTAINER,
            lambda use: _part(use.used_core, use.core),
        ),
        _gauge(
            "container_mem_utilization_percentage",
            "Memory that the container uses in percent of what it requested.",
            _BY_CONTAINER,
            lambda use: _part(use.used_memory, use.memory),
        ),
        _gauge(
            "container_request_gpu_memory",
            "Memory that the container requested in MiB.",
            _REQUESTED_MEMORY,
            lambda use: _in(MIB, use.memory),
        ),
        _gauge(
            "container_request_gpu_utilization",
            f"Computing power that the container requested in {words} (--tke.request-unit).",
            _REQUESTED,
            _requested(unit),
        ),
    )


def tke_families(request_unit: RequestUnit = "percent") -> tuple[TkeFamily, ...]:
    """The families of the dialect; products disagree about the unit of one of them."""
    return (*_CARDS, *_PODS, *_container_families(request_unit), *_HARDWARE)


TKE: tuple[TkeFamily, ...] = tke_families()
