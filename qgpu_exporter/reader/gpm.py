"""Profiling through NVML's GPM (Hopper and later), of one card and its GPU instances.

A reading is the difference of two samples of the same entity; each entity keeps its two buffers
and swaps them.  GPM and DCGM use the same hardware counters and can disturb each other.  Whether
the driver answers for GPU instances without any privilege has not been tried on real hardware.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pynvml

from qgpu_exporter.model import Profiling
from qgpu_exporter.reader import plausible
from qgpu_exporter.reader.calls import Calls, CardDown, Refusal
from qgpu_exporter.reader.readings import Handle

_log = logging.getLogger("qgpu_exporter.reader")

_SHORTEST_SECONDS = 0.1
"""NVML's bound between the samples of one reading."""
_LONGEST_SECONDS = 120.0
"""A sample this old speaks of a time that other rounds should have covered: it is replaced."""
_FAILURES = 3
"""Failures in a row after which an entity's kind is not asked again."""

CARD = None
"""The entity that is the whole card; the others are GPU instances by number."""

_RATIOS = {
    "graphics_engine_ratio": pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm_active_ratio": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_ratio": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "integer_ratio": pynvml.NVML_GPM_METRIC_INTEGER_UTIL,
    "tensor_ratio": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "tensor_double_ratio": pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL,
    "tensor_half_ratio": pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL,
    "tensor_integer_ratio": pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL,
    "dram_active_ratio": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "fp64_ratio": pynvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32_ratio": pynvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16_ratio": pynvml.NVML_GPM_METRIC_FP16_UTIL,
}
_RATES = {
    "pcie_transmitted_bytes_per_second": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_received_bytes_per_second": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_transmitted_bytes_per_second": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_received_bytes_per_second": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}
# First metric and number of engines.
_ENGINES = {
    "nvdec_ratios": (pynvml.NVML_GPM_METRIC_NVDEC_0_UTIL, 8),
    "nvjpg_ratios": (pynvml.NVML_GPM_METRIC_NVJPG_0_UTIL, 8),
    "ofa_ratios": (pynvml.NVML_GPM_METRIC_NVOFA_0_UTIL, 2),
}


def _metrics() -> Iterator[int]:
    yield from _RATIOS.values()
    yield from _RATES.values()
    for first, number in _ENGINES.values():
        yield from range(first, first + number)


_METRICS = tuple(_metrics())


class _Entity:
    """The two sample buffers of a card or GPU instance."""

    def __init__(self, owner: str, newer: Any, older: Any) -> None:
        self.owner = owner
        self.newer = newer
        self.older = older
        self.taken_at: float | None = None


class GpmReader:
    """Reads the profiling of one card; `clock` is monotonic, in seconds."""

    def __init__(self, calls: Calls, label: str, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._label = label
        self._clock = clock
        self._entities: dict[int | None, _Entity] = {}
        self._failures = {"card": 0, "GPU instances": 0}
        self._off: set[str] = set()
        self._supported: bool | None = None
        self._request: Any = None

    def forget(self, *, initialised_again: bool) -> None:
        """The handle is new: nothing of before is valid.

        Buffers of a library that was initialised again are left to it.
        """
        if not initialised_again:
            for entity in self._entities.values():
                self._free(entity)
        self._entities.clear()
        self._failures = dict.fromkeys(self._failures, 0)
        self._off.clear()
        self._supported = None

    def read(self, handle: Handle, owners: Mapping[int | None, str]) -> dict[int | None, Profiling]:
        """The profiling of the card (`CARD`) and of its GPU instances, as far as two samples and
        the driver allow.  An entity whose owner stays the same is the same entity."""
        if not self._supports(handle):
            return {}
        for key in [
            key for key, entity in self._entities.items() if owners.get(key) != entity.owner
        ]:
            self._free(self._entities.pop(key))
        found: dict[int | None, Profiling] = {}
        for key, owner in owners.items():
            kind = "card" if key is CARD else "GPU instances"
            if kind in self._off:
                continue
            try:
                profiling = self._entity(handle, key, owner)
                self._failures[kind] = 0
            except Refusal as refusal:
                self._failed(kind, key, refusal)
                continue
            if profiling is not None:
                found[key] = profiling
        return found

    def _supports(self, handle: Handle) -> bool:
        if self._supported is None:
            answer = self._calls.ask(
                "nvmlGpmQueryDeviceSupport", pynvml.nvmlGpmQueryDeviceSupport, handle
            )
            if answer is None:
                # Refused for a while, or a passing error: `ask` knows which.
                return False
            self._supported = answer.isSupportedDevice == 1
        return self._supported

    def _failed(self, kind: str, key: int | None, refusal: Refusal) -> None:
        entity = self._entities.pop(key, None)
        if entity is not None:
            self._free(entity)
        gone = (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if key is not CARD and refusal.code in gone:
            # The instance was destroyed after it was listed.
            return
        self._failures[kind] += 1
        if self._failures[kind] >= _FAILURES:
            self._off.add(kind)
            _log.warning("%s: profiling of the %s is off: %s", self._label, kind, refusal)

    def _entity(self, handle: Handle, key: int | None, owner: str) -> Profiling | None:
        entity = self._entities.get(key)
        if entity is None:
            entity = _Entity(owner, self._allocate(), self._allocate())
            self._entities[key] = entity
        now = self._clock()
        before = entity.taken_at
        if before is not None and now - before < _SHORTEST_SECONDS:
            return None
        entity.taken_at = None
        entity.newer, entity.older = entity.older, entity.newer
        if key is CARD:
            self._call(pynvml.nvmlGpmSampleGet, handle, entity.newer)
        else:
            self._call(pynvml.nvmlGpmMigSampleGet, handle, key, entity.newer)
        entity.taken_at = now
        if before is None or now - before > _LONGEST_SECONDS:
            return None
        return self._difference(entity, now - before)

    def _difference(self, entity: _Entity, window_seconds: float) -> Profiling | None:
        if self._request is None:
            self._request = pynvml.c_nvmlGpmMetricsGet_t()
        request = self._request
        ctypes.memset(ctypes.byref(request), 0, ctypes.sizeof(request))
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1 = entity.older
        request.sample2 = entity.newer
        metrics = request.metrics
        for place, metric in enumerate(_METRICS):
            metrics[place].metricId = metric
        try:
            self._call(pynvml.nvmlGpmMetricsGet, request)
        except Refusal as refusal:
            if refusal.code == pynvml.NVML_ERROR_NO_DATA:
                return None
            raise
        values = {}
        for place, number in enumerate(_METRICS):
            metric = metrics[place]
            if metric.nvmlReturn == pynvml.NVML_SUCCESS:
                values[number] = metric.value
        return _profiling(values, window_seconds)

    def _allocate(self) -> Any:
        return self._call(pynvml.nvmlGpmSampleAlloc)

    def _free(self, entity: _Entity) -> None:
        for buffer in (entity.newer, entity.older):
            try:
                self._call(pynvml.nvmlGpmSampleFree, buffer)
            except Refusal as refusal:
                self._calls.log_once("nvmlGpmSampleFree", refusal)
            except CardDown as down:
                _log.debug("a profiling buffer was not freed: %s", down)

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        return self._calls.call(function.__name__, function, *arguments)


def _profiling(values: dict[int, float], window_seconds: float) -> Profiling:
    fields: dict[str, Any] = {
        name: plausible.ratio(values.get(metric)) for name, metric in _RATIOS.items()
    }
    for name, metric in _RATES.items():
        fields[name] = plausible.bytes_per_second(values.get(metric))
    fields |= {
        name: {
            str(number): ratio
            for number in range(count)
            if (ratio := plausible.ratio(values.get(first + number))) is not None
        }
        for name, (first, count) in _ENGINES.items()
    }
    return Profiling(window_seconds, **fields)
