"""XIDs in the kernel log: its lines as they are, and following it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qgpu_exporter.model import Xid
from qgpu_exporter.sources.kmsg import MAX_EVENTS, KernelLog, KernelXid, parse

GUARD_SECONDS = 10.0
"""Only against a hang: no verdict depends on it."""
PCI = "00000000:3B:00.0"
NOW = 1_754_000_000.0
UPTIME = 5000.0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "4,1200,171167620236,-;NVRM: Xid (PCI:0000:3b:00): 120, pid='<unknown>', GSP Error",
            KernelXid(120, PCI, uptime_seconds=171167.620236),
        ),
        (
            "[171167.620236] NVRM: Xid (PCI:0000:3b:00): 119, pid=12, name=python, Timeout",
            KernelXid(119, PCI, uptime_seconds=171167.620236),
        ),
        (
            "[Wed Jul 31 23:14:18 2024] NVRM: Xid (PCI:0000:86:00): 43, pid=1045242, name=x, Ch 8",
            KernelXid(43, "00000000:86:00.0"),
        ),
        ("[...] NVRM: Xid (0000:3b:00): 14, Channel 00000001", KernelXid(14, PCI)),
        ("NVRM: Xid (PCI:0000:3b:00): 79", KernelXid(79, PCI)),
        (
            "kernel: NVRM: Xid (PCI:0000:3b:00): 45, pid=1, Ch 00000001 caused by previous Xid 149",
            KernelXid(45, PCI),
        ),
        (
            "NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1",
            KernelXid(149, "00000019:01:00.0"),
        ),
        ("NVRM: Xid (PCI:00010000:3b:00.0): 31, x", KernelXid(31, "00010000:3B:00.0")),
        (
            "6,1,2000000,-;NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, Contained: SM (0x1).",
            KernelXid(94, PCI, gpu_instance=5, uptime_seconds=2.0),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:09 GPU-CI:01): 13, Graphics",
            KernelXid(13, PCI, gpu_instance=9, compute_instance=1),
        ),
        (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4",
            KernelXid(154, "00000009:01:00.0"),
        ),
        (
            "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
            KernelXid(79, PCI, in_words=True),
        ),
        (
            "NVRM: GPU 18:00.0: GPU has fallen off the bus.",
            KernelXid(79, "00000000:18:00.0", in_words=True),
        ),
        (
            "3,9,1000000,-;NVRM: GPU at PCI:0000:3b:00: GPU-x has fallen off the bus",
            KernelXid(79, PCI, uptime_seconds=1.0, in_words=True),
        ),
    ],
)
def test_line_that_tells_of_an_xid(line: str, expected: KernelXid) -> None:
    assert parse(line.encode()) == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        " SUBSYSTEM=pci",
        "NVRM: GPU at PCI:0000:3b:00: GPU-509665ad-b600-4c93-8616-d754b23d636d",
        "NVRM: GPU Board Serial Number: 0000000000000",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: GPU4 RPC history (CPU -> GSP):",
        "NVRM:     -1    103  GSP_RM_ALLOC          0x0000000000002080 0x0000000000000004",
        "NVRM: Xid (PCI:0000:3b:00): 0, nothing",
        "NVRM: Xid (PCI:0000:3b:00): 5x, nothing",
        "NVRM: Xid (PCI:0000:3b:00): -5, nothing",
        "NVRM: Xid (PCI:0000:3b:00): 123456, nothing",
        "NVRM: Xid (PCI:zzzz:3b:00): 79, nothing",
        "a program says NVRM: Xid (PCI:0000:3b:00): 79, nothing",
        # The facility of a program's own line: user (1), not kernel (0).
        "12,1201,171167620236,-;NVRM: Xid (PCI:0000:3b:00): 79, made up",
        "\ufffd\x00\x1b[31m",
    ],
)
def test_line_that_tells_of_none(line: str) -> None:
    assert parse(line.encode()) is None


# --------------------------------------------------------------------------- following


def record(text: str, uptime_us: int = 4_900_000_000) -> bytes:
    return f"4,7,{uptime_us},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n".encode()


def xid(code: int, uptime_us: int = 4_900_000_000) -> bytes:
    return record(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1", uptime_us)


class Follower:
    """A kernel log that follows a named pipe, which a writer of ours keeps open."""

    def __init__(self, path: Path, log: KernelLog) -> None:
        self.path = path
        self.log = log
        self.changed = asyncio.Event()
        self.events: list[Xid] = []
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def write(self, text: bytes) -> None:
        os.write(self.descriptor, text)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(GUARD_SECONDS):
            while not condition():
                await self.changed.wait()
                self.changed.clear()
                self.events.extend(self.log.take())

    async def codes(self, count: int) -> list[tuple[int, bool]]:
        await self.until(lambda: len(self.events) >= count)
        return [(event.xid, event.old) for event in self.events]


@asynccontextmanager
async def following(
    tmp_path: Path, *before: bytes, read: Callable[[int, int], bytes] = os.read
) -> AsyncIterator[Follower]:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = KernelLog(
        str(path), wall_clock=lambda: NOW, clock=lambda: UPTIME, read=read, retry_seconds=0.01
    )
    follower = Follower(path, log)
    for text in before:
        follower.write(text)
    task = asyncio.create_task(log.run(follower.changed.set))
    try:
        await follower.until(lambda: log.health.up is not None)
        yield follower
    finally:
        task.cancel()
        await asyncio.wait({task})
        os.close(follower.descriptor)


async def test_lines_from_before_the_start_are_old_and_dated_by_their_stamps(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, xid(31, 4_900_000_000), xid(43, 1_000_000)) as follower:
        follower.write(xid(13))
        assert await follower.codes(3) == [(31, True), (43, True), (13, False)]
        assert [event.timestamp_seconds for event in follower.events] == [
            NOW - 100.0,
            NOW - 4999.0,
            NOW,
        ]
        assert follower.events[2] == Xid(NOW, 13, pci_bus_id=PCI, origin="kmsg")
        assert follower.log.health.up is True


async def test_old_line_without_a_time_is_left_out(tmp_path: Path) -> None:
    async with following(tmp_path, b"NVRM: Xid (PCI:0000:3b:00): 31, x\n") as follower:
        follower.write(b"NVRM: Xid (PCI:0000:3b:00): 43, x\n")
        assert await follower.codes(1) == [(43, False)]


async def test_record_that_comes_in_pieces(tmp_path: Path) -> None:
    async with following(tmp_path) as follower:
        text = xid(94)
        for start in range(0, len(text), 5):
            follower.write(text[start : start + 5])
            await asyncio.sleep(0)
        assert await follower.codes(1) == [(94, False)]


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([xid(79), record("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.")], [79]),
        ([record("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."), xid(79)], [79]),
        ([record("NVRM: GPU 3b:00.0: GPU has fallen off the bus.")] * 3, [79]),
        ([record("NVRM: GPU 3b:00.0: GPU has fallen off the bus."), xid(79), xid(79)], [79, 79]),
        ([xid(79), record("NVRM: GPU 86:00.0: GPU has fallen off the bus.")], [79, 79]),
    ],
)
async def test_one_fall_off_the_bus_is_one_event(
    tmp_path: Path, lines: list[bytes], codes: list[int]
) -> None:
    async with following(tmp_path) as follower:
        for line in lines:
            follower.write(line)
        follower.write(xid(31))
        await follower.until(lambda: any(event.xid == 31 for event in follower.events))
        assert [event.xid for event in follower.events] == [*codes, 31]


async def test_overwritten_records_are_passed_over(tmp_path: Path) -> None:
    overruns = iter([True, False, True])

    def read(descriptor: int, size: int) -> bytes:
        if next(overruns, False):
            raise BrokenPipeError
        return os.read(descriptor, size)

    async with following(tmp_path, xid(31), read=read) as follower:
        follower.write(xid(43))
        assert await follower.codes(2) == [(31, True), (43, False)]
        assert follower.log.health.failures == {}


async def test_events_that_nobody_takes_are_bounded(tmp_path: Path) -> None:
    async with following(tmp_path) as follower:
        seen = 0

        async def write_until_read(text: bytes) -> None:
            for start in range(0, len(text), 4096):
                piece = text[start : start + 4096]
                await retry(lambda: follower.write(piece))  # noqa: B023 - awaited before the next

        async def retry(write: Callable[[], None]) -> None:
            async with asyncio.timeout(GUARD_SECONDS):
                while True:
                    try:
                        return write()
                    except BlockingIOError:  # the pipe is full: let the log be read
                        await asyncio.sleep(0)

        text = b"".join(xid(1000 + number) for number in range(3 * MAX_EVENTS))
        await write_until_read(text + xid(7))
        async with asyncio.timeout(GUARD_SECONDS):
            while not follower.log._events or follower.log._events[-1].xid != 7:
                await asyncio.sleep(0)
                seen += 1
        events = follower.log.take()
        assert len(events) == MAX_EVENTS
        assert events[0].xid == 1000 + 2 * MAX_EVENTS + 1
        assert follower.log.take() == ()


async def outcome(path: Path, then: Callable[[KernelLog], Awaitable[None]]) -> None:
    log = KernelLog(str(path), wall_clock=lambda: NOW, retry_seconds=0.01)
    changed = asyncio.Event()
    task = asyncio.create_task(log.run(changed.set))
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await changed.wait()
            await then(log)
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_missing_log_is_told_and_found_once_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"

    async def then(log: KernelLog) -> None:
        assert log.health.detail == f"there is no kernel log at {path}: is it mounted?"
        path.write_bytes(xid(31, 1_000_000))
        while log.health.up is False:  # noqa: ASYNC110 - the guard around it ends a hang
            await asyncio.sleep(0.01)
        assert [(event.xid, event.old) for event in log.take()] == [(31, True)]

    await outcome(path, then)


async def test_path_that_is_no_log_is_an_error(tmp_path: Path) -> None:
    async def then(log: KernelLog) -> None:
        assert log.health.up is False
        assert log.health.detail == f"cannot read {tmp_path}: Is a directory"
        assert "error" in log.health.failures

    await outcome(tmp_path, then)
