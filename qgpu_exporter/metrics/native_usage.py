"""Native families of usage: what each container uses of a card, and what nobody accounts for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qgpu_exporter.metrics.family import Family, Scope
from qgpu_exporter.metrics.native_allocation import CONTAINER_LABELS
from qgpu_exporter.model import CardRemainder, ContainerUsage, HostUsage, Snapshot

UsageFamily = Family[Snapshot, Any]

_LISTS = "process lists of NVML, joined through /proc"
_SAMPLES = "nvmlDeviceGetProcessUtilization (nvmlDeviceGetProcessesUtilizationInfo), GPM on MIG"


def _containers(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], ContainerUsage]]:
    for one in snapshot.usage.containers:
        yield (snapshot.node, str(one.gpu), one.namespace, one.pod, one.container), one


def _host(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], HostUsage]]:
    for one in snapshot.usage.host:
        yield (snapshot.node, str(one.gpu), one.owner_kind, one.owner), one


def _remainders(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], CardRemainder]]:
    for one in snapshot.usage.remainders:
        yield (snapshot.node, str(one.gpu)), one


_CONTAINERS = Scope("containers that use a card", CONTAINER_LABELS, _containers)
_HOST = Scope("owners outside Kubernetes", ("node", "gpu", "owner_kind", "owner"), _host)
_REMAINDERS = Scope("cards whose use is attributed", ("node", "gpu"), _remainders)

USAGE: tuple[UsageFamily, ...] = (
    Family(
        "node_gpu_core_usage",
        "gauge",
        "Computing power that the container used lately, in percent of one card.",
        _CONTAINERS,
        lambda one: one.core_percent,
        _SAMPLES,
    ),
    Family(
        "node_gpu_memory_usage_bytes",
        "gauge",
        "GPU memory that the container uses, in bytes.",
        _CONTAINERS,
        lambda one: one.memory_bytes,
        _LISTS,
    ),
    Family(
        "node_gpu_core_usage_seconds_total",
        "counter",
        "Computing power that the container used, in seconds of a whole card.",
        _CONTAINERS,
        lambda one: one.core_seconds,
        _SAMPLES,
    ),
    Family(
        "node_gpu_encoder_usage",
        "gauge",
        "Video encoding that the container used lately, in percent of one card.",
        _CONTAINERS,
        lambda one: one.encoder_percent,
        _SAMPLES,
    ),
    Family(
        "node_gpu_decoder_usage",
        "gauge",
        "Video decoding that the container used lately, in percent of one card.",
        _CONTAINERS,
        lambda one: one.decoder_percent,
        _SAMPLES,
    ),
    Family(
        "node_gpu_container_processes",
        "gauge",
        "Processes of the container on the card.",
        _CONTAINERS,
        lambda one: one.processes,
        _LISTS,
    ),
    Family(
        "node_gpu_core_usage_unattributed",
        "gauge",
        "Computing power used lately that no container accounts for, in percent of the card.",
        _REMAINDERS,
        lambda one: one.core_percent,
        _SAMPLES,
    ),
    Family(
        "node_gpu_memory_usage_unattributed_bytes",
        "gauge",
        "Memory in use that no container accounts for, in bytes; with node_gpu_memory_usage_bytes "
        "it sums to the card's.",
        _REMAINDERS,
        lambda one: one.memory_bytes,
        _LISTS,
    ),
    Family(
        "node_gpu_usage_without_allocation",
        "gauge",
        "Containers that use the card and were not given it.",
        _REMAINDERS,
        lambda one: one.containers_without_allocation,
        _LISTS,
    ),
    Family(
        "node_gpu_host_process_core_usage",
        "gauge",
        "Computing power that an owner outside Kubernetes used lately, in percent of one card; "
        "part of the unattributed rest.",
        _HOST,
        lambda one: one.core_percent,
        _SAMPLES,
    ),
    Family(
        "node_gpu_host_process_memory_usage_bytes",
        "gauge",
        "GPU memory that an owner outside Kubernetes uses, in bytes; part of the unattributed "
        "rest.",
        _HOST,
        lambda one: one.memory_bytes,
        _LISTS,
    ),
    Family(
        "node_gpu_host_processes",
        "gauge",
        "Processes on the card of an owner outside Kubernetes.",
        _HOST,
        lambda one: one.processes,
        _LISTS,
    ),
)
