"""Asks /proc which cgroups a process is in; the only reader of other processes' files."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable, Mapping

from cachetools import TTLCache

from qgpu_exporter.cgroups import parse
from qgpu_exporter.model import CgroupNames, SourceHealth
from qgpu_exporter.sources import HealthRecord, SourceError

KNOWN_SECONDS = 300.0
"""A process stays in its container; one that an administrator moves is seen after this."""
UNKNOWN_SECONDS = 3.0
"""A container's first process is in the runtime's cgroup for a moment, so a path that names no
container holds for a short time only."""
MAX_PROCESSES = 4096
"""More than the processes that 16 cards run at one time."""
MAX_FILE_BYTES = 1 << 16
"""A cgroup file has a line of at most 4 KiB for each of some 13 hierarchies."""
TIMEOUT_SECONDS = 5.0
"""Reading /proc takes microseconds; on a node in trouble it may wait for the kernel's locks."""

KERNEL_THREAD = 0x00200000
"""PF_KTHREAD in the flags of /proc/PID/stat (proc(5), field 9)."""

_GONE = {errno.ENOENT, errno.ESRCH, errno.ENOTDIR}
_REFUSED = {errno.EACCES, errno.EPERM}


class Processes:
    """Names of processes by host pid, cached by pid and start time.

    The driver gives pids of the host's (initial) pid namespace, so `procfs` must show that one.
    That is so where pid 2 is a kernel thread, which no other pid namespace has.  A directory
    without `self` is no procfs but a copy of one, and is taken as it is once it has a pid.

    `clock` is monotonic, `wall_clock` Unix time, both in seconds.
    """

    def __init__(
        self,
        *,
        procfs: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        max_processes: int = MAX_PROCESSES,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._procfs = procfs.rstrip("/") or "/"
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._record = HealthRecord("processes", wall_clock)
        self._known: TTLCache[tuple[int, int], CgroupNames, float] = TTLCache(
            max_processes, KNOWN_SECONDS, timer=clock
        )
        self._unknown: TTLCache[tuple[int, int], CgroupNames, float] = TTLCache(
            max_processes, UNKNOWN_SECONDS, timer=clock
        )
        self._thread: threading.Thread | None = None
        self._answer: _Answer | None = None

    @property
    def health(self) -> SourceHealth:
        """The source's health; reasons: ``not_found``, ``empty``, ``not_host``, ``hidepid``,
        ``no_permission``, ``timeout``, ``error``."""
        return self._record.health

    @property
    def cached(self) -> int:
        """Processes in the cache."""
        return len(self._known) + len(self._unknown)

    async def ask(self, pids: Iterable[int]) -> Mapping[int, CgroupNames] | None:
        """As `resolve`, in a thread and with a deadline; None and a failed health on an error."""
        started = self._clock()
        try:
            names = await self._in_thread(list(pids))
        except SourceError as error:
            self._record.failed(error)
            return None
        self._record.succeeded(self._clock() - started)
        return names

    async def _in_thread(self, pids: list[int]) -> Mapping[int, CgroupNames]:
        if self._answer is not None and not self._answer.given:
            # A read that hangs is never joined by a second one.
            raise SourceError("timeout", self._hangs())
        self._answer = answer = _Answer(asyncio.get_running_loop())
        # A daemon thread, unlike an executor's: one that hangs does not keep the service from
        # ending.
        self._thread = threading.Thread(
            target=lambda: answer.give(lambda: self.resolve(pids)), name="processes", daemon=True
        )
        self._thread.start()
        try:
            # Not wait_for: before Python 3.12 it can swallow a cancellation.
            async with asyncio.timeout(self._timeout_seconds):
                return await answer.future
        except TimeoutError:
            raise SourceError("timeout", self._hangs()) from None

    def _hangs(self) -> str:
        return f"reading {self._procfs} has not returned within {self._timeout_seconds:g} s"

    def resolve(self, pids: Iterable[int]) -> Mapping[int, CgroupNames]:
        """The names in each process's cgroups; blocks.

        A process that has ended is left out; one in no cgroup has empty names.  Raises
        `SourceError` when `procfs` cannot tell of the host's processes: then it tells of none,
        since the same number is another process elsewhere.
        """
        real = self._check()
        try:
            found = {pid: self._names(pid, real) for pid in sorted(set(pids)) if pid > 0}
        except OSError as error:
            raise self._failure(error) from error
        return {pid: names for pid, names in found.items() if names is not None}

    # ------------------------------------------------------------------ one process

    def _names(self, pid: int, real: bool) -> CgroupNames | None:
        stat = self._read(pid, "stat")
        if stat is None and real:
            return None
        start = _stat_field(stat, 22)
        key = pid, start if start is not None else -1
        cached = self._known.get(key) or self._unknown.get(key)
        if cached is not None and start is not None:
            return cached
        text = self._read(pid, "cgroup")
        if text is None:
            return None
        names = parse(text)
        # Without a start time a reused pid could not be told from its forerunner.
        if start is not None:
            certain = bool(names.containers or names.pod_uids)
            (self._known if certain else self._unknown)[key] = names
        return names

    def _read(self, pid: int, name: str) -> str | None:
        """A file of a process, or None when the process has ended."""
        try:
            with open(f"{self._procfs}/{pid}/{name}", "rb") as file:
                return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    # ------------------------------------------------------------------ whose processes

    def _check(self) -> bool:
        """Whether `procfs` is a real one (True) or a copy; raises when it is not the host's."""
        if not os.path.lexists(f"{self._procfs}/self"):
            self._check_copy()
            return False
        try:
            first, second = self._read(1, "stat"), self._read(2, "stat")
        except OSError as error:
            raise self._failure(error) from error
        if first is None:
            raise SourceError(
                "hidepid",
                f"{self._procfs} hides other users' processes: remount it without hidepid, or "
                "run as root with CAP_SYS_PTRACE or in the group of its gid= option",
            )
        if not (_stat_field(second, 9) or 0) & KERNEL_THREAD:
            raise SourceError(
                "not_host",
                f"{self._procfs} does not show the host's processes, by whose pids the driver "
                "speaks: mount the host's /proc and name it with --path.procfs, or set hostPID",
            )
        return True

    def _check_copy(self) -> None:
        try:
            with os.scandir(self._procfs) as entries:
                if any(entry.name.isdecimal() for entry in entries):
                    return
        except OSError as error:
            raise self._failure(error) from error
        raise SourceError(
            "empty",
            f"{self._procfs} has no processes: mount the host's /proc there, or name it with "
            "--path.procfs",
        )

    def _failure(self, error: OSError) -> SourceError:
        if error.errno in _GONE:
            return SourceError(
                "not_found",
                f"{self._procfs} is not there: mount the host's /proc, or name it with "
                "--path.procfs",
            )
        if error.errno in _REFUSED:
            return SourceError(
                "no_permission",
                f"{error.filename} may not be read: a security module (SELinux, AppArmor) or "
                f"the mount (hidepid) forbids it: {error.strerror}",
            )
        return SourceError("error", f"reading {error.filename}: {error.strerror or error}")


def _stat_field(stat: str | None, number: int) -> int | None:
    """A numeric field of /proc/PID/stat, counted from 1 as proc(5) does; None where unreadable."""
    # The second field is the command in brackets, which may itself hold brackets and spaces.
    fields = (stat or "").rpartition(")")[2].split()
    try:
        return int(fields[number - 3])
    except (IndexError, ValueError):
        return None


class _Answer:
    """Carries a thread's outcome to the loop that waits for it, if that still does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[Mapping[int, CgroupNames]] = loop.create_future()
        self.given = False
        """The work is done; the thread itself may live a moment longer."""

    def give(self, work: Callable[[], Mapping[int, CgroupNames]]) -> None:
        try:
            outcome: Mapping[int, CgroupNames] | Exception = work()
        except Exception as error:  # noqa: BLE001 - raised again where the answer is awaited
            outcome = error
        self.given = True
        try:
            self._loop.call_soon_threadsafe(self._set, outcome)
        except RuntimeError:
            pass  # The loop was closed meanwhile: nobody waits.

    def _set(self, outcome: Mapping[int, CgroupNames] | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
