"""The kernel log as a source of XIDs: follows /dev/kmsg and keeps what nobody has taken yet."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from qgpu_exporter.model import SourceHealth, Xid
from qgpu_exporter.sources import HealthRecord, SourceError

FALLEN_OFF_THE_BUS = 79
SAME_FALL_SECONDS = 10.0
"""The driver prints a card's fall twice: as an XID and in words."""
RECORD_BYTES = 8192
"""The longest record that the kernel gives."""
MAX_LINE_BYTES = 4 * RECORD_BYTES
MAX_EVENTS = 1024
MAX_FALLS = 64
RECORDS_A_TURN = 200
QUIET_SECONDS = 60.0
"""How often it is read where nothing says that there is something, to see that it still can be."""
END_SECONDS = 1.0
"""A pause where the path is no device and is at its end."""
RETRY_SECONDS = 30.0

_HEADER = re.compile(rb"(\d+),\d+,(\d+),[^;]*;")
"""Priority, sequence number, microseconds since boot, flags (Linux's ABI document on dev-kmsg)."""
_STAMP = r"(?:<\d+>)?(?:\[ *(?:(?P<uptime>\d+\.\d+)|[^\]]*)\] *)?(?:kernel: *)?"
_ADDRESS = r"(?P<domain>[0-9a-f]{4,8}:)?(?P<slot>[0-9a-f]{2}:[0-9a-f]{2})(?P<function>\.[0-7])?"
_XID = re.compile(
    _STAMP + r"NVRM: Xid \((?:PCI:)?" + _ADDRESS + r"(?: GPU-I:(?P<gpu_instance>\d{1,3}))?"
    r"(?: GPU-CI:(?P<compute_instance>\d{1,3}))?\): (?P<xid>[1-9]\d{0,4})(?:,|$)",
    re.IGNORECASE,
)
_FALL = re.compile(
    _STAMP + r"NVRM: GPU (?:at )?(?:PCI:)?" + _ADDRESS + r"(?!\w).*fallen off the bus",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class KernelXid:
    """What one line of the log says."""

    xid: int
    pci_bus_id: str
    """As NVML spells it: ``00000000:3B:00.0``."""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    uptime_seconds: float | None = None
    """Time since boot, where the line carries it."""
    in_words: bool = False
    """A fall off the bus, told in words."""


def parse(line: bytes) -> KernelXid | None:
    """The XID of one line, in the kernel's record form or as dmesg and syslog print it, or None.

    Only ``NVRM: Xid (<address>): <number>`` and the sentence about a fall off the bus count.  The
    address may lack ``PCI:``, its domain or its function.  Lines that programs have written to
    the log are none of the kernel's.
    """
    uptime_seconds = None
    header = _HEADER.match(line)
    if header:
        if int(header[1]) >> 3 != 0:  # the facility; 0 is the kernel
            return None
        uptime_seconds = int(header[2]) / 1e6
        line = line[header.end() :]
    text = line.decode(errors="replace")
    match = _XID.match(text)
    fall = None if match else _FALL.match(text)
    found = match or fall
    if found is None:
        return None
    if uptime_seconds is None and found["uptime"] is not None:
        uptime_seconds = float(found["uptime"])
    domain = (found["domain"] or "0:").rstrip(":").rjust(8, "0")
    return KernelXid(
        xid=int(match["xid"]) if match else FALLEN_OFF_THE_BUS,
        pci_bus_id=f"{domain}:{found['slot']}{found['function'] or '.0'}".upper(),
        gpu_instance=_number(match["gpu_instance"]) if match else None,
        compute_instance=_number(match["compute_instance"]) if match else None,
        uptime_seconds=uptime_seconds,
        in_words=fall is not None,
    )


def _number(digits: str | None) -> int | None:
    return int(digits) if digits is not None else None


class KernelLog:
    """Follows the log at `path`; what stood in it before the start is marked as old.

    `wall_clock` is Unix time and `clock` monotonic, both in seconds; `read` reads a descriptor.
    """

    def __init__(
        self,
        path: str,
        *,
        wall_clock: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[int, int], bytes] = os.read,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._path = path
        self._wall_clock = wall_clock
        self._clock = clock
        self._read = read
        self._retry_seconds = retry_seconds
        self._record = HealthRecord("kmsg", wall_clock)
        self._events: deque[Xid] = deque(maxlen=MAX_EVENTS)
        self._falls: dict[str, KernelXid] = {}
        self._fell_at: dict[str, float] = {}
        self._rest = b""

    @property
    def health(self) -> SourceHealth:
        """The state of the source ``kmsg``."""
        return self._record.health

    def take(self) -> tuple[Xid, ...]:
        """The events since the last call, in the log's order, the newest `MAX_EVENTS` of them."""
        events = tuple(self._events)
        self._events.clear()
        return events

    async def run(self, changed: Callable[[], None]) -> None:
        """Follow the log until cancelled; calls `changed` on news and on a change of health."""
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    await self._follow(descriptor, changed)
                finally:
                    os.close(descriptor)
            except OSError as error:
                self._record.failed(_source_error(self._path, error))
                changed()
            await asyncio.sleep(self._retry_seconds)

    async def _follow(self, descriptor: int, changed: Callable[[], None]) -> None:
        """Read what is there (old), then each record as it comes; ends only by an error."""
        self._rest = b""
        old = True
        while True:
            at_end = await self._drain(descriptor, old=old)
            old = False
            news = self._record.health.up is not True or bool(self._events)
            self._record.succeeded()
            if news:
                changed()
            if at_end:
                await asyncio.sleep(END_SECONDS)
            else:
                await _readable(descriptor, QUIET_SECONDS)

    async def _drain(self, descriptor: int, *, old: bool) -> bool:
        """Read until there is no more; True where that is the end of a file and not of a queue."""
        turn = 0
        while True:
            turn += 1
            if turn % RECORDS_A_TURN == 0:
                await asyncio.sleep(0)
            try:
                chunk = self._read(descriptor, RECORD_BYTES)
            except BlockingIOError:
                return False
            except BrokenPipeError:
                # Records were overwritten before they were read; the next read goes on after them.
                continue
            if not chunk:
                return True
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._rest = self._rest[:MAX_LINE_BYTES]
            for line in lines:
                self._take_line(line, old=old)

    def _take_line(self, line: bytes, *, old: bool) -> None:
        found = parse(line)
        if found is None:
            return
        moment = self._wall_clock()
        if old:
            if found.uptime_seconds is None:
                return
            # The kernel stamps by a clock that runs since boot and drifts from the wall clock;
            # for a line that comes now, now is the better time.
            moment -= max(0.0, self._clock() - found.uptime_seconds)
        if found.xid == FALLEN_OFF_THE_BUS and self._known_fall(found, moment):
            return
        self._events.append(
            Xid(
                timestamp_seconds=moment,
                xid=found.xid,
                pci_bus_id=found.pci_bus_id,
                gpu_instance=found.gpu_instance,
                compute_instance=found.compute_instance,
                origin="kmsg",
                old=old,
            )
        )

    def _known_fall(self, found: KernelXid, moment: float) -> bool:
        """Whether this line tells again, in its other form, of a fall that was just told.

        The words may be repeated; two XIDs are two falls.
        """
        before = self._falls.get(found.pci_bus_id)
        if (
            before is not None
            and abs(moment - self._fell_at[found.pci_bus_id]) <= SAME_FALL_SECONDS
            and (found.in_words or before.in_words)
        ):
            if not found.in_words:
                self._falls[found.pci_bus_id] = found
            return True
        if len(self._falls) >= MAX_FALLS and before is None:
            oldest = next(iter(self._falls))
            del self._falls[oldest], self._fell_at[oldest]
        self._falls[found.pci_bus_id] = found
        self._fell_at[found.pci_bus_id] = moment
        return False


async def _readable(descriptor: int, seconds: float) -> None:
    """Wait until there is something to read, at most `seconds`."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(seconds):
            await ready.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(descriptor)


def _source_error(path: str, error: OSError) -> SourceError:
    if error.errno in {errno.EACCES, errno.EPERM}:
        return SourceError(
            "no_permission",
            f"may not read {path}: needs the file's permission and, where "
            "kernel.dmesg_restrict is set, the capability SYSLOG",
        )
    if error.errno in {errno.ENOENT, errno.ENXIO, errno.ENODEV}:
        return SourceError("not_found", f"there is no kernel log at {path}: is it mounted?")
    return SourceError("error", f"cannot read {path}: {error.strerror or error}")
