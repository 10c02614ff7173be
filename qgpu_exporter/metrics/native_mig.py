"""Native families of MIG slices, and of the profiling that cards and slices share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qgpu_exporter.metrics.family import Family, Scope, itself, present
from qgpu_exporter.metrics.scopes import (
    ANSWERING,
    GPU_INSTANCES,
    READINGS,
    SLICES,
    Slice,
)
from qgpu_exporter.model import Card, MigSlice, Profiling, Snapshot

MigFamily = Family[Snapshot, Any]

GPM = "NVML GPM"
GPM_SINCE = "Hopper"

_RATIOS = (
    ("graphics_engine_active", "graphics_engine_ratio", "the graphics or compute engine was busy"),
    ("sm_active", "sm_active_ratio", "a multiprocessor had a warp, averaged over all"),
    ("sm_occupancy", "sm_occupancy_ratio", "warps were resident, of the most possible"),
    ("integer_active", "integer_ratio", "the integer pipes were busy"),
    ("tensor_active", "tensor_ratio", "any tensor pipe was busy"),
    ("tensor_double_active", "tensor_double_ratio", "the FP64 tensor pipes (DFMA) were busy"),
    ("tensor_half_active", "tensor_half_ratio", "the FP16 tensor pipes (HMMA) were busy"),
    ("tensor_integer_active", "tensor_integer_ratio", "the integer tensor pipes (IMMA) were busy"),
    ("dram_active", "dram_active_ratio", "the memory was sending or receiving"),
    ("fp64_active", "fp64_ratio", "the FP64 pipes were busy"),
    ("fp32_active", "fp32_ratio", "the FP32 pipes were busy"),
    ("fp16_active", "fp16_ratio", "the FP16 pipes were busy"),
)
_RATES = (
    ("pcie_transmitted", "sent over PCIe, headers included"),
    ("pcie_received", "received over PCIe, headers included"),
    ("nvlink_transmitted", "sent over NVLink"),
    ("nvlink_received", "received over NVLink"),
)
_ENGINES = (
    ("nvdec", "nvdec_ratios", "a video decoder (NVDEC)"),
    ("nvjpg", "nvjpg_ratios", "a JPEG decoder (NVJPG)"),
    ("optical_flow", "ofa_ratios", "an optical flow accelerator (OFA)"),
)


# --------------------------------------------------------------------------- profiling


def _engine_rows(
    scope: Scope[Snapshot, Any], attribute: str
) -> Callable[[Snapshot], Iterator[tuple[tuple[str, ...], float]]]:
    def rows(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], float]]:
        for labels, source in scope.rows(snapshot):
            profiling: Profiling | None = source.profiling
            if profiling is not None:
                ratios: Mapping[str, float] = getattr(profiling, attribute)
                for engine, ratio in sorted(ratios.items()):
                    yield (*labels, engine), ratio

    return rows


def _profiled(attribute: str) -> Callable[[Any], float | None]:
    def value(source: Any) -> float | None:
        found = getattr(source.profiling, attribute, None)
        return found if isinstance(found, int | float) else None

    return value


def _profiling_families(prefix: str, whose: str, scope: Scope[Snapshot, Any]) -> list[MigFamily]:
    """The same families for cards and for slices, which differ in scope and prefix only."""
    families: list[MigFamily] = [
        Family(
            f"{prefix}{name}_ratio",
            "gauge",
            f"Part of the last profiling window in which {what}, 0 to 1, {whose}.",
            scope,
            _profiled(attribute),
            GPM,
            GPM_SINCE,
        )
        for name, attribute, what in _RATIOS
    ]
    families += (
        Family(
            f"{prefix}{name}_bytes_per_second",
            "gauge",
            f"Bytes a second {what} over the last profiling window, {whose}.",
            scope,
            _profiled(f"{name}_bytes_per_second"),
            GPM,
            GPM_SINCE,
        )
        for name, what in _RATES
    )
    for name, attribute, what in _ENGINES:
        engines = Scope(
            f"{name} engines {whose}",
            (*scope.labels, "engine"),
            _engine_rows(scope, attribute),
        )
        families.append(
            Family(
                f"{prefix}{name}_active_ratio",
                "gauge",
                f"Part of the last profiling window in which {what} was busy, 0 to 1, {whose}.",
                engines,
                itself,
                GPM,
                GPM_SINCE,
            )
        )
    families.append(
        Family(
            f"{prefix}profiling_window_seconds",
            "gauge",
            f"Length of the last profiling window in seconds, {whose}.",
            scope,
            _profiled("window_seconds"),
            GPM,
            GPM_SINCE,
        )
    )
    return families


# --------------------------------------------------------------------------- slices


def _info_labels(one: Slice) -> Iterator[tuple[str, str]]:
    piece = one.slice
    for name, value in (
        ("uuid", piece.uuid),
        ("profile", piece.profile),
        ("gpu_instance", piece.gpu_instance),
        ("compute_instance", piece.compute_instance),
        ("placement_start", piece.placement_start),
    ):
        if value is not None:
            yield name, str(value)


_SLICE_INFO = Scope(
    "MIG slices, with what names them",
    SLICES.labels,
    SLICES.rows,
    _info_labels,
    ("uuid", "profile", "gpu_instance", "compute_instance", "placement_start"),
)


def _core_capacity(one: Slice) -> float | None:
    whole = one.card.mig_compute_slices
    mine = one.slice.compute_slices
    return 100 * mine / whole if mine is not None and whole else None


def _memory(part: str) -> Callable[[MigSlice], int | None]:
    def value(piece: MigSlice) -> int | None:
        found = getattr(piece.memory, part, None)
        return found if isinstance(found, int) else None

    return value


def _enabled(card: Card) -> bool | None:
    return card.reading.mig_enabled if card.reading else None


def _pending(card: Card) -> bool | None:
    return card.reading.mig_pending if card.reading else None


SLICE_FAMILIES: tuple[MigFamily, ...] = (
    Family(
        "node_gpu_mig_enabled",
        "gauge",
        "1 if the card is in MIG mode.",
        ANSWERING,
        _enabled,
        "nvmlDeviceGetMigMode, current",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_enabled_pending",
        "gauge",
        "1 if the card is in MIG mode after its next reset.",
        ANSWERING,
        _pending,
        "nvmlDeviceGetMigMode, pending",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_info",
        "info",
        "A MIG slice: mig is the GPU instance, or GPU instance/compute instance where it has "
        "several.",
        _SLICE_INFO,
        present,
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_core_capacity",
        "gauge",
        "Computing power of the slice in percent of its card.",
        SLICES,
        _core_capacity,
        "nvmlDeviceGetAttributes_v2, compute slices",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_multiprocessors",
        "gauge",
        "Streaming multiprocessors of the slice.",
        SLICES,
        lambda one: one.slice.multiprocessors,
        "nvmlDeviceGetAttributes_v2, multiprocessorCount",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_memory_capacity_bytes",
        "gauge",
        "Memory of the GPU instance in bytes; compute instances share it.",
        GPU_INSTANCES,
        _memory("total_bytes"),
        "nvmlDeviceGetMemoryInfo_v2 of the slice, total",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_memory_used_bytes",
        "gauge",
        "Memory of the GPU instance in use in bytes.",
        GPU_INSTANCES,
        _memory("used_bytes"),
        "nvmlDeviceGetMemoryInfo_v2 of the slice, used",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_memory_free_bytes",
        "gauge",
        "Free memory of the GPU instance in bytes.",
        GPU_INSTANCES,
        _memory("free_bytes"),
        "nvmlDeviceGetMemoryInfo_v2 of the slice, free",
        "Ampere",
    ),
    Family(
        "node_gpu_mig_memory_reserved_bytes",
        "gauge",
        "Memory of the GPU instance that the driver reserves for itself in bytes.",
        GPU_INSTANCES,
        _memory("reserved_bytes"),
        "nvmlDeviceGetMemoryInfo_v2 of the slice, reserved",
        "Ampere",
    ),
)

PROFILING: tuple[MigFamily, ...] = tuple(
    _profiling_families("node_gpu_", "of the whole card", READINGS)
)
MIG: tuple[MigFamily, ...] = (
    *SLICE_FAMILIES,
    *_profiling_families("node_gpu_mig_", "of the GPU instance", GPU_INSTANCES),
)
