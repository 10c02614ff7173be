"""The processes of one card: the lists of who is on it, and what each has used of it since."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator

import pynvml

from qgpu_exporter.model import Process, ProcessSample, ProcessWindow, SeenSamples
from qgpu_exporter.reader import plausible
from qgpu_exporter.reader.calls import OF_MIG, Calls, Refusal, check, symbol
from qgpu_exporter.reader.readings import Handle
from qgpu_exporter.reader.samples import FUTURE_US

_FUNCTIONS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}
# One entry of the lists: pid, memory, GPU instance, compute instance; before version 2 without
# the instances.
_ENTRY = struct.Struct("=I4xQII")
_OLD_ENTRY = struct.Struct("=I4xQ")
_VERSIONS = (("_v3", _ENTRY), ("_v2", _ENTRY), ("", _OLD_ENTRY))
_REFUSED_LISTS = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION})
_LARGEST_PID = 1 << 22
"""The kernel's bound; 0 is an entry that was never filled."""
_FIRST_ROOM = 64
_MOST_ROOM = 1 << 16
_NO_SAMPLES = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA})

# One nvmlProcessUtilizationSample_t, and one nvmlProcessUtilizationInfo_v1_t.
_USE = struct.Struct("=I4xQIIII")
_USE_INFO = struct.Struct("=QIIIIIII4x")
_FIRST_WINDOW_US = 1_000_000
"""The longest sampling period of the driver."""
_LONGEST_WINDOW_US = 10_000_000
"""A reader that takes over from another one does not ask for more of the past than this."""
_BUSY_RATIO = 0.05
_SILENT_ROUNDS = 5
"""Rounds in which a busy card's processes all use 0 before the newer call is tried: one GPU
generation answers the older one with zeroes alone."""

RawUse = tuple[int, int, int, int, int, int]
"""pid, timestamp in us, and the percentages of SM, memory, encoder, decoder."""


class ProcessLister:
    """Reads the process lists of one card and of its MIG devices; pids are the host's."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._room = _FIRST_ROOM
        self._first_version: dict[str, int] = {}

    def read(
        self, handle: Handle, mig: list[tuple[Handle, int, int]]
    ) -> tuple[Process, ...] | None:
        """Each process once per instance, by pid; None where no list is offered.

        With `mig` (handle, GPU instance, compute instance) the lists are those of the devices:
        asking the card for all of them at once needs a right that others do not.
        """
        found: dict[tuple[int, int | None, int | None], tuple[int | None, set[str]]] = {}
        offered = False
        for owner, instance, tag in self._owners(handle, mig):
            for kind, function in _FUNCTIONS.items():
                entries = self._list(owner, function, tag)
                if entries is None:
                    continue
                offered = True
                for pid, memory, gpu_instance, compute_instance in entries:
                    where = instance or (gpu_instance, compute_instance)
                    known, kinds = found.setdefault((pid, *where), (None, set()))
                    both = [part for part in (known, memory) if part is not None]
                    # Both lists give the same memory for a process that is in both.
                    found[pid, *where] = (max(both, default=None), kinds | {kind})
        if not offered:
            return None
        return tuple(
            Process(pid, memory, gpu_instance, compute_instance, tuple(sorted(kinds)))
            for (pid, gpu_instance, compute_instance), (memory, kinds) in sorted(
                found.items(),
                key=lambda item: tuple(-1 if part is None else part for part in item[0]),
            )
        )

    @staticmethod
    def _owners(
        handle: Handle, mig: list[tuple[Handle, int, int]]
    ) -> Iterator[tuple[Handle, tuple[int, int] | None, str]]:
        if not mig:
            yield handle, None, ""
        for device, gpu_instance, compute_instance in mig:
            yield device, (gpu_instance, compute_instance), OF_MIG

    def _list(
        self, handle: Handle, function: str, tag: str
    ) -> list[tuple[int, int | None, int | None, int | None]] | None:
        if self._calls.refused(function + tag):
            return None
        for version, entry in _VERSIONS[self._first_version.get(function, 0) :]:
            try:
                return list(_entries(self._fetch(handle, function + version, entry), entry))
            except Refusal as refusal:
                if refusal.code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    # The driver is older; the version before has another name.
                    self._first_version[function] = self._first_version.get(function, 0) + 1
                    continue
                lasting = refusal.code in _REFUSED_LISTS
                if lasting:
                    self._calls.refuse(function + tag)
                if lasting or not tag:
                    # Any other error of a MIG device: it may have gone since it was listed.
                    self._calls.log_once(function, refusal)
                return None
        return None

    def _fetch(self, handle: Handle, name: str, entry: struct.Struct) -> memoryview:
        while True:
            room = self._room
            count = ctypes.c_uint(room)
            entries = (ctypes.c_char * (room * entry.size))()
            try:
                self._calls.call(name, _checked, name, handle, ctypes.byref(count), entries)
            except Refusal as refusal:
                if refusal.code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE or room >= _MOST_ROOM:
                    raise
                # More processes may start before the next call.
                self._room = min(_MOST_ROOM, max(2 * room, 2 * count.value))
                continue
            return memoryview(entries).cast("B")[: min(count.value, room) * entry.size]


def _checked(name: str, *arguments: object) -> bool:
    check(symbol(name)(*arguments))
    return True


def _entries(
    raw: memoryview, entry: struct.Struct
) -> Iterator[tuple[int, int | None, int | None, int | None]]:
    for fields in entry.iter_unpack(raw):
        pid = fields[0]
        if not 0 < pid <= _LARGEST_PID:
            continue
        memory = plausible.process_bytes(fields[1])
        instances = fields[2:] or (None, None)
        gpu_instance, compute_instance = (plausible.instance(part) for part in instances)
        yield pid, memory, gpu_instance, compute_instance


class ProcessSampler:
    """Reads what each process of one card has used; `clock` gives Unix time in seconds."""

    def __init__(self, calls: Calls, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._clock = clock
        self._delivered: dict[int, int] = {}
        self._until: int | None = None
        self._ask_from: int | None = None
        self._room = _FIRST_ROOM
        self._silent = 0
        self._newer_call = False

    def read(
        self, handle: Handle, seen: SeenSamples | None, card_ratio: float | None
    ) -> ProcessWindow | None:
        """The new samples, and the time since the round before, of which they speak; None where
        the card offers none.  A process without a sample has used nothing.

        `card_ratio` is the card's own utilisation, to tell silence from idleness.
        """
        now = int(self._clock() * 1e6)
        since = self._since(now, seen)
        # The driver means over all samples since this time.  The samples of one answer carry a
        # time each, so it is the oldest of them; what came before is dropped here.
        asked = self._ask_from if self._ask_from is not None else since
        used = self._uses(handle, min(asked, since))
        if used is None:
            return None
        samples = self._fresh(used, min(asked, since), now + FUTURE_US)
        self._judge(samples, card_ratio)
        stamps = [sample.timestamp_us for sample in samples]
        self._ask_from = max(min(asked, since), min(stamps, default=now - _FIRST_WINDOW_US))
        # What is not newer than the time asked for next cannot come again.
        self._delivered = {pid: at for pid, at in self._delivered.items() if at > self._ask_from}
        self._until = max([now, *stamps])
        return ProcessWindow(since, self._until, samples)

    def _since(self, now: int, seen: SeenSamples | None) -> int:
        if self._until is not None and self._until <= now:
            return self._until
        newest = seen.processes_us if seen is not None else 0
        if 0 < newest <= now:
            return max(newest, now - _LONGEST_WINDOW_US)
        # The first round, or the clock was set back.
        self._delivered.clear()
        self._ask_from = None
        return now - _FIRST_WINDOW_US

    def _uses(self, handle: Handle, last: int) -> list[RawUse] | None:
        for newer in (self._newer_call, not self._newer_call):
            name = (
                "nvmlDeviceGetProcessesUtilizationInfo"
                if newer
                else "nvmlDeviceGetProcessUtilization"
            )
            if self._calls.refused(name):
                continue
            try:
                return self._attempt(handle, name, last, newer=newer)
            except Refusal as refusal:
                if refusal.code in (
                    pynvml.NVML_ERROR_NOT_SUPPORTED,
                    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                    pynvml.NVML_ERROR_NO_PERMISSION,
                    pynvml.NVML_ERROR_INVALID_ARGUMENT,
                    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
                ):
                    self._calls.refuse(name)
                    self._calls.log_once(name, refusal)
                    continue
                self._calls.log_once(name, refusal)
                return None
        return None

    def _attempt(self, handle: Handle, name: str, last: int, *, newer: bool) -> list[RawUse]:
        while True:
            room = self._room
            count = ctypes.c_uint(room)
            try:
                fetch = _newer_uses if newer else _older_uses
                return self._calls.call(name, fetch, handle, count, last)
            except Refusal as refusal:
                if refusal.code in _NO_SAMPLES:
                    return []
                if refusal.code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE or room >= _MOST_ROOM:
                    raise
                self._room = min(_MOST_ROOM, max(2 * room, 2 * count.value))

    def _fresh(self, used: list[RawUse], asked: int, latest: int) -> tuple[ProcessSample, ...]:
        """What was not delivered before, by process."""
        fresh: dict[tuple[int, int], ProcessSample] = {}
        for pid, stamp, *percents in used:
            if not 0 < pid <= _LARGEST_PID or not self._delivered.get(pid, asked) < stamp <= latest:
                continue
            ratios = [plausible.ratio(percent) for percent in percents]
            fresh[pid, stamp] = ProcessSample(pid, stamp, *ratios)
        for pid, stamp in fresh:
            self._delivered[pid] = max(stamp, self._delivered.get(pid, 0))
        return tuple(fresh[key] for key in sorted(fresh))

    def _judge(self, samples: tuple[ProcessSample, ...], card_ratio: float | None) -> None:
        if card_ratio is None or card_ratio < _BUSY_RATIO:
            return
        if any(sample.sm_ratio for sample in samples):
            self._silent = 0
            return
        self._silent += 1
        if self._silent >= _SILENT_ROUNDS:
            self._silent = 0
            self._newer_call = not self._newer_call


def _older_uses(handle: Handle, count: ctypes.c_uint, last: int) -> list[RawUse]:
    room = count.value
    entries = (ctypes.c_char * (room * _USE.size))()
    check(
        symbol("nvmlDeviceGetProcessUtilization")(
            handle, entries, ctypes.byref(count), ctypes.c_ulonglong(last)
        )
    )
    raw = memoryview(entries).cast("B")[: min(count.value, room) * _USE.size]
    return list(_USE.iter_unpack(raw))


def _newer_uses(handle: Handle, count: ctypes.c_uint, last: int) -> list[RawUse]:
    room = count.value
    entries = (pynvml.c_nvmlProcessUtilizationInfo_v1_t * room)()
    infos = pynvml.c_nvmlProcessesUtilizationInfo_v1_t()
    infos.version = pynvml.ProcessesUtilizationInfo_v1
    infos.processSamplesCount = room
    infos.lastSeenTimeStamp = last
    infos.procUtilArray = entries
    code = symbol("nvmlDeviceGetProcessesUtilizationInfo")(handle, ctypes.byref(infos))
    count.value = infos.processSamplesCount
    check(code)
    raw = memoryview(bytes(entries))[: min(count.value, room) * _USE_INFO.size]
    return [
        (pid, stamp, sm, memory, encoder, decoder)
        for stamp, pid, sm, memory, encoder, decoder, _, _ in _USE_INFO.iter_unpack(raw)
    ]
