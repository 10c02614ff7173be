"""The node as a JSON document: what the exporter believes and why; docs/api.md describes it."""

from __future__ import annotations

from typing import Any

from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardReading,
    CardTotals,
    ContainerUsage,
    Memory,
    MigSlice,
    Pod,
    Snapshot,
    SourceHealth,
    Status,
    XidTotal,
)

VERSION = 1
"""Raised when a field goes or changes its meaning; new fields may come at any time."""

Document = dict[str, Any]


def node_document(
    snapshot: Snapshot | None, status: Status, now: float, *, not_ready: str | None = None
) -> Document:
    """The document at Unix time `now`.

    A value that is not known is null, and a list that is not known is null rather than empty.
    """
    timestamp = (
        status.snapshot_timestamp_seconds if snapshot is None else snapshot.timestamp_seconds
    )
    document: Document = {
        "version": VERSION,
        "now_timestamp_seconds": now,
        "exporter": {
            "version": status.version,
            "revision": status.revision,
            "python_version": status.python_version,
            "started_timestamp_seconds": status.started_timestamp_seconds,
        },
        "not_ready": not_ready,
        "snapshot_timestamp_seconds": timestamp,
        "snapshot_age_seconds": _age(now, timestamp),
        "snapshot_stale": status.snapshot_stale,
        **_nothing(),
        "sources": [_source(one, now) for one in status.sources],
        "reader": None,
    }
    if status.reader is not None:
        document["reader"] = {
            "pid": status.reader.pid,
            "restarts": dict(status.reader.restarts),
            "left_behind": status.reader.left_behind,
        }
    if snapshot is not None:
        document.update(_node(snapshot))
    return document


def _nothing() -> Document:
    """The fields of a node of which nothing is known."""
    return {
        "node": None,
        "driver": None,
        "cards": None,
        "pods": None,
        "allocations": None,
        "allocations_complete": False,
        "usage": None,
        "problems": [],
        "conflicts": [],
        "unassigned_pods": [],
        "stack": [],
    }


def _node(snapshot: Snapshot) -> Document:
    allocation = snapshot.allocation
    holders_known = allocation is not None and allocation.complete
    return {
        "node": snapshot.node,
        "driver": {
            "up": snapshot.devices_up,
            "driver_version": snapshot.driver_version,
            "nvml_version": snapshot.nvml_version,
            "cuda_version": snapshot.cuda_version,
        },
        "cards": _cards(snapshot),
        "pods": _pods(snapshot),
        **(_allocation(allocation) if allocation is not None else {}),
        "usage": {
            "containers": [
                _usage(one, holders_known=holders_known) for one in snapshot.usage.containers
            ],
            "host": [
                {
                    "gpu": one.gpu,
                    "owner_kind": one.owner_kind,
                    "owner": one.owner,
                    "core_percent": one.core_percent,
                    "memory_bytes": one.memory_bytes,
                    "processes": one.processes,
                }
                for one in snapshot.usage.host
            ],
        },
        "stack": [
            {
                "subject": one.subject,
                "value": one.value,
                "timestamp_seconds": one.timestamp_seconds,
            }
            for one in snapshot.stack
        ],
    }


# --------------------------------------------------------------------------- cards


def _cards(snapshot: Snapshot) -> list[Document] | None:
    if snapshot.cards is None:
        return None
    remainders = {one.gpu: one for one in snapshot.usage.remainders}
    cards = []
    for card in snapshot.cards:
        index = card.identity.index
        entry = _card(card, snapshot)
        allocated, remainder = snapshot.allocated.get(index), remainders.get(index)
        entry["allocated"] = allocated and {
            "core_percent": allocated.core_percent,
            "memory_bytes": allocated.memory_bytes,
            "containers": allocated.containers,
        }
        entry["unattributed"] = remainder and {
            "core_percent": remainder.core_percent,
            "memory_bytes": remainder.memory_bytes,
            "containers_without_allocation": remainder.containers_without_allocation,
        }
        cards.append(entry)
    return cards


def _card(card: Card, snapshot: Snapshot) -> Document:
    identity, reading = card.identity, card.reading
    return {
        "gpu": identity.index,
        "uuid": identity.uuid,
        "minor_number": identity.minor,
        "pci_bus_id": identity.pci_bus_id,
        "model": identity.model,
        "serial": identity.serial,
        "numa_node": identity.numa_node,
        "up": reading is not None,
        "down_reason": card.down_reason,
        "memory_total_bytes": card.memory_total_bytes,
        "mig_compute_slices": card.mig_compute_slices,
        "readings": _readings(reading) if reading is not None else None,
        "xids": _xids(card.totals, snapshot),
    }


def _readings(reading: CardReading) -> Document:
    """The readings that tell how a card does; the rest is on the metrics page."""
    reasons = reading.clock_event_reasons
    return {
        "memory": _memory(reading.memory),
        "gpu_utilization_ratio": reading.utilization.gpu_ratio,
        "memory_utilization_ratio": reading.utilization.memory_ratio,
        "temperature_celsius": reading.temperatures.gpu_celsius,
        "slowdown_limit_celsius": reading.temperatures.slowdown_limit_celsius,
        "power_watts": reading.power.draw_watts,
        "power_limit_watts": reading.power.enforced_limit_watts,
        "performance_state": reading.performance_state,
        "clock_event_reasons": (
            None if reasons is None else sorted(name for name, active in reasons.items() if active)
        ),
        "ecc_uncorrected_volatile": reading.ecc.uncorrected_volatile,
        "row_remap_pending": reading.remapped_rows.pending,
        "row_remap_failure": reading.remapped_rows.failure,
        "pages_retired_pending": reading.retired_pages.pending,
        "recovery_action": reading.recovery_action,
        "mig_enabled": reading.mig_enabled,
        "mig_pending": reading.mig_pending,
        "mig_slices": [_slice(one) for one in reading.mig_slices],
        "processes": None if reading.processes is None else len(reading.processes),
    }


def _memory(memory: Memory | None) -> Document | None:
    if memory is None:
        return None
    return {
        "total_bytes": memory.total_bytes,
        "used_bytes": memory.used_bytes,
        "free_bytes": memory.free_bytes,
        "reserved_bytes": memory.reserved_bytes,
    }


def _slice(one: MigSlice) -> Document:
    compute = "" if one.compute_instance is None else f"/{one.compute_instance}"
    return {
        "gpu_instance": one.gpu_instance,
        "compute_instance": one.compute_instance,
        "device": f"{one.gpu_instance}{compute}",
        "uuid": one.uuid,
        "profile": one.profile,
        "compute_slices": one.compute_slices,
        "memory_slices": one.memory_slices,
        "placement_start": one.placement_start,
        "memory": _memory(one.memory),
    }


def _xids(totals: CardTotals, snapshot: Snapshot) -> list[Document]:
    """XIDs that happened; counters that were born at zero are left out."""
    whole: list[tuple[int, str | None, XidTotal]] = [
        (xid, None, total) for xid, total in totals.xids.items()
    ]
    slices = [(xid, mig, total) for (xid, mig), total in totals.mig_xids.items()]
    return [
        {
            "xid": xid,
            "mig": mig,
            "class": snapshot.xid_classes.get(xid),
            "count": total.count,
            "last_timestamp_seconds": total.last_timestamp_seconds,
        }
        for xid, mig, total in sorted([*whole, *slices], key=lambda one: (one[0], one[1] or ""))
        if total.count or total.last_timestamp_seconds is not None
    ]


# --------------------------------------------------------------------------- pods


def _pods(snapshot: Snapshot) -> list[Document] | None:
    """The pods that hold, ask for or use a card: others are nobody's business here."""
    if snapshot.pods is None:
        return None
    result = snapshot.allocation
    names = {(one.namespace, one.pod) for one in result.allocations} if result else set()
    names |= {(one.namespace, one.pod) for one in snapshot.usage.containers}
    names |= set(result.unassigned_pods) if result else set()
    return [
        _pod(pod, with_labels=snapshot.pod_labels_exported)
        for pod in snapshot.pods.pods
        if (pod.namespace, pod.name) in names
    ]


def _pod(pod: Pod, *, with_labels: bool) -> Document:
    entry: Document = {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "phase": pod.phase,
        "terminating": pod.terminating,
        "containers": [
            {
                "name": one.name,
                "kind": one.kind,
                "state": one.state,
                "resources": dict(one.resources),
                "claims": list(one.claims),
            }
            for one in pod.containers
        ],
    }
    if with_labels:
        entry["labels"] = dict(pod.labels)
    return entry


def _allocation(result: AllocationResult) -> Document:
    return {
        "allocations": [_held(one) for one in result.allocations],
        "allocations_complete": result.complete,
        "problems": [
            {
                "kind": one.kind,
                "namespace": one.namespace,
                "pod": one.pod,
                "container": one.container,
                "gpu": one.gpu,
                "detail": one.detail,
            }
            for one in result.problems
        ],
        "conflicts": [
            {"gpu": gpu, "kind": kind, "containers": count}
            for (gpu, kind), count in sorted(result.conflicts.items())
        ],
        "unassigned_pods": [
            {"namespace": namespace, "pod": pod} for namespace, pod in result.unassigned_pods
        ],
    }


def _held(one: Allocation) -> Document:
    claim = one.claim
    return {
        "namespace": one.namespace,
        "pod": one.pod,
        "container": one.container,
        "container_kind": one.kind,
        "pod_uid": one.pod_uid,
        "gpu": one.gpu,
        "mig": one.mig,
        "uuid": one.uuid,
        "device": one.device,
        "scheme": one.scheme,
        "resource": one.resource,
        "core_percent": one.core_percent,
        "memory_bytes": one.memory_bytes,
        "greedy_core_percent": one.greedy_core_percent,
        "exclusive": one.exclusive,
        "claim": claim
        and {
            "namespace": claim.claim_namespace,
            "name": claim.claim_name,
            "driver": claim.driver,
            "pool": claim.pool,
            "device": claim.device,
        },
    }


def _usage(one: ContainerUsage, *, holders_known: bool) -> Document:
    return {
        "gpu": one.gpu,
        "namespace": one.namespace,
        "pod": one.pod,
        "container": one.container,
        "core_percent": one.core_percent,
        "memory_bytes": one.memory_bytes,
        "encoder_percent": one.encoder_percent,
        "decoder_percent": one.decoder_percent,
        "processes": one.processes,
        "allocated": one.allocated if holders_known else None,
    }


# --------------------------------------------------------------------------- health


def _source(health: SourceHealth, now: float) -> Document:
    return {
        "source": health.source,
        "up": health.up,
        "released": health.released,
        "last_success_timestamp_seconds": health.last_success_timestamp_seconds,
        "age_seconds": _age(now, health.last_success_timestamp_seconds),
        "read_duration_seconds": health.read_duration_seconds,
        "failures": dict(health.failures),
        "detail": health.detail,
    }


def _age(now: float, timestamp: float | None) -> float | None:
    """Seconds since `timestamp`; a clock that was set back gives 0, not less."""
    return None if timestamp is None else round(max(0.0, now - timestamp), 3)
