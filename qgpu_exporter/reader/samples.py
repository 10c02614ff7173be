"""The driver's sample buffers of one card: what is new since the service last took them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pynvml

from qgpu_exporter.model import Sample, SampleBuffer, SeenSamples
from qgpu_exporter.reader import plausible
from qgpu_exporter.reader.calls import Calls, Refusal, check, symbol
from qgpu_exporter.reader.readings import Handle

_KINDS = {
    "gpu": pynvml.NVML_GPU_UTILIZATION_SAMPLES,
    "memory": pynvml.NVML_MEMORY_UTILIZATION_SAMPLES,
    "encoder": pynvml.NVML_ENC_UTILIZATION_SAMPLES,
    "decoder": pynvml.NVML_DEC_UTILIZATION_SAMPLES,
}
"""By the kinds of `model.SampleBuffer`."""
_NO_SAMPLES = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA})
# One nvmlSample_t: timestamp and value.
_ENTRY = struct.Struct("=QQ")
_LONGEST_BUFFER = 4096
FUTURE_US = 60_000_000
"""A sample that claims to be later than this after now would hide all true ones that follow."""


class SampleReader:
    """Reads the four buffers of a card; `clock` gives Unix time in seconds.

    Its length is asked once for each buffer, so that a round makes one call a buffer.
    """

    def __init__(self, calls: Calls, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._clock = clock
        self._lengths: dict[str, int] = {}

    def read(self, handle: Handle, seen: SeenSamples | None) -> tuple[SampleBuffer, ...]:
        """The buffers that the card offers; one without new samples is there and empty."""
        buffers = []
        for kind, number in _KINDS.items():
            since = 0 if seen is None else seen.samples_us.get(kind, 0)
            samples = self._buffer(handle, kind, number, since)
            if samples is not None:
                buffers.append(SampleBuffer(kind, samples))
        return tuple(buffers)

    def _buffer(
        self, handle: Handle, kind: str, number: int, since: int
    ) -> tuple[Sample, ...] | None:
        name = f"nvmlDeviceGetSamples {number}"
        if self._calls.refused(name):
            return None
        if kind not in self._lengths:
            length = self._calls.ask(name, _length, handle, number, since)
            if length is None:
                return None
            self._lengths[kind] = length
        try:
            entries = self._calls.call(name, _fetch, handle, number, since, self._lengths[kind])
        except Refusal as refusal:
            if refusal.code in _NO_SAMPLES:
                return ()
            # The length may have been another one: learn it anew next time.
            del self._lengths[kind]
            if refusal.code == pynvml.NVML_ERROR_NOT_SUPPORTED:
                self._calls.refuse(name)
            self._calls.log_once(name, refusal)
            return None
        latest = int(self._clock() * 1e6) + FUTURE_US
        ratios = {
            stamp: ratio
            for stamp, percent in entries
            if since < stamp <= latest and (ratio := plausible.ratio(percent)) is not None
        }
        return tuple(Sample(stamp, ratios[stamp]) for stamp in sorted(ratios))


def _ask(
    handle: Handle,
    number: int,
    since: int,
    count: ctypes.c_uint,
    entries: ctypes.Array[ctypes.c_char] | None,
) -> int:
    """Fill `count`, and `entries` unless only their number is wanted; the type of their values."""
    kind = ctypes.c_uint(0)
    check(
        symbol("nvmlDeviceGetSamples")(
            handle,
            ctypes.c_uint(number),
            ctypes.c_ulonglong(since),
            ctypes.byref(kind),
            ctypes.byref(count),
            entries,
        )
    )
    return kind.value


def _length(handle: Handle, number: int, since: int) -> int:
    count = ctypes.c_uint(0)
    _ask(handle, number, since, count, None)
    return min(max(count.value, 1), _LONGEST_BUFFER)


def _fetch(handle: Handle, number: int, since: int, length: int) -> list[tuple[int, float]]:
    """(timestamp in us, percent) of each entry."""
    count = ctypes.c_uint(length)
    entries = (ctypes.c_char * (length * _ENTRY.size))()
    double = _ask(handle, number, since, count, entries) == pynvml.NVML_VALUE_TYPE_DOUBLE
    used = memoryview(entries).cast("B")[: min(count.value, length) * _ENTRY.size]
    return [
        (stamp, _double(raw) if double else raw & 0xFFFF_FFFF)
        for stamp, raw in _ENTRY.iter_unpack(used)
    ]


def _double(raw: int) -> float:
    number: float = struct.unpack("=d", struct.pack("=Q", raw))[0]
    return number
