"""The cards' source: starts the reader child, asks it, and ends or replaces it when it must be."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from qgpu_exporter.model import (
    ReaderError,
    ReaderHealth,
    Reading,
    ReadingRequest,
    SeenSamples,
    SourceHealth,
)
from qgpu_exporter.sources import HealthRecord, SourceError
from qgpu_exporter.sources.reader_process import ReaderFailure, ReaderProcess, Relay, kill

log = logging.getLogger(__name__)

START_SECONDS = 30.0
"""More time for a child's first answer: without persistence each card takes seconds to wake."""
GRACE_SECONDS = 2.0
"""Beyond the timeout that the reader itself keeps, before it counts as silent."""
KILL_WAIT_SECONDS = 2.0
STOP_GRACE_SECONDS = 0.5
MAX_LEFT_BEHIND = 2
"""A driver that blocks for ever would else get one more blocked child each time."""

BACK_OFF_SECONDS = 1.0
MAX_BACK_OFF_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""A child that lived this long ends the row of failures."""

NO_ANSWER_SECONDS = 60.0
"""When no card has answered for this long, a new reader is tried."""
CARD_NO_ANSWER_SECONDS = 1800.0
"""When one card has not answered for this long, a new reader is tried."""

NEW_READER_FAULTS = frozenset({"mismatch", "unknown_error"})
"""Faults that a process keeps until it ends: it cannot load another library."""


class Devices:
    """One reader and its readings.

    `command` is the reader's command line and `environment` its environment (None: this one's);
    `clock` is monotonic and `wall_clock` Unix time, in seconds.  `kill` ends a process by its pid.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        timeout_seconds: float,
        max_memory_bytes: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        environment: Mapping[str, str] | None = None,
        start_seconds: float = START_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        kill_wait_seconds: float = KILL_WAIT_SECONDS,
        kill: Callable[[int], None] = kill,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.latest: Reading | None = None
        self._command = command
        self._environment = environment
        self._deadline_seconds = timeout_seconds + grace_seconds
        self._start_seconds = start_seconds
        self._max_memory_bytes = max_memory_bytes
        self._clock = clock
        self._kill_wait_seconds = kill_wait_seconds
        self._kill = kill
        self._jitter = jitter
        self._record = HealthRecord("nvml", wall_clock)
        self._relay = Relay(clock)
        self._one_round = asyncio.Lock()
        self._child: ReaderProcess | None = None
        self._started_at = 0.0
        self._left_behind: list[ReaderProcess] = []
        self._restarts: dict[str, int] = {}
        self._failures_in_row = 0
        self._not_before = clock()
        self._unusable_since: float | None = None
        self._unanswered_since: dict[int, float] = {}
        self._none_answered_since: float | None = None
        self._released = False
        self._released_until: float | None = None
        self._stopped = False

    # ------------------------------------------------------------------ what others look at

    @property
    def health(self) -> SourceHealth:
        """The state of the source ``nvml``."""
        return self._record.health

    @property
    def reader_health(self) -> ReaderHealth:
        """The state of the child; its pid is of this process's own pid namespace."""
        return ReaderHealth(
            pid=self._child.pid if self._child is not None and self._child.alive else None,
            restarts=dict(sorted(self._restarts.items())),
            left_behind=sum(child.alive for child in self._left_behind),
        )

    @property
    def unusable_since_seconds(self) -> float | None:
        """Monotonic time since when the library and the driver have not matched, or every card
        has answered UNKNOWN; None while that is not so, or while released."""
        return self._unusable_since

    @property
    def released(self) -> bool:
        """The driver was let go, and `read` refuses."""
        if (
            self._released
            and self._released_until is not None
            and self._clock() >= self._released_until
        ):
            self.resume()
        return self._released

    @property
    def released_for_seconds(self) -> float | None:
        """How long the driver stays let go; None while it is not, or until `resume` alone."""
        if not self.released or self._released_until is None:
            return None
        return max(self._released_until - self._clock(), 0.0)

    @property
    def retry_after_seconds(self) -> float | None:
        """How long until a new child may be started; None while there is nothing to wait for."""
        waits = not self._released and not self._stopped and self._child is None
        remaining = self._not_before - self._clock()
        return remaining if waits and remaining > 0 else None

    # ------------------------------------------------------------------ a round

    async def read(self, seen: tuple[SeenSamples, ...] = ()) -> Reading | None:
        """One round; None when there is no reading, and `health` says why.

        Rounds wait for each other.  A reading whose cards all failed is a reading; one with an
        error is not returned.
        """
        async with self._one_round:
            if self.released or self._stopped:
                return None
            began = self._clock()
            child = await self._ready_child()
            if child is None:
                return None
            seconds = self._deadline_seconds + (0.0 if child.answered else self._start_seconds)
            try:
                reading = await child.ask(ReadingRequest(seen), seconds)
            except ReaderFailure as failure:
                if child is self._child:  # else it was ended on purpose while it was asked
                    self._record.failed(SourceError(failure.reason, str(failure)))
                    await self._replace(failure.reason)
                return None
            if child is not self._child:
                return None
            return await self._take(reading, self._clock() - began)

    async def _ready_child(self) -> ReaderProcess | None:
        child = self._child
        if child is not None and child.alive and not child.out_of_step:
            return child
        if child is not None:
            if child.out_of_step:  # its round was cancelled
                await self._end_child()
            else:
                self._record.failed(SourceError("crash", child.ending))
                await self._replace("crash")
        self._left_behind = [left for left in self._left_behind if left.alive]
        if len(self._left_behind) >= MAX_LEFT_BEHIND:
            self._record.failed(
                SourceError(
                    "stuck",
                    f"{MAX_LEFT_BEHIND} readers cannot be killed, since the driver blocks them; "
                    "reset the GPU or reboot the node",
                )
            )
            return None
        if self._clock() < self._not_before:
            return None
        return await self._start()

    async def _start(self) -> ReaderProcess | None:
        try:
            child = await ReaderProcess.start(self._command, self._environment, self._relay)
        except ReaderFailure as failure:
            self._record.failed(SourceError(failure.reason, str(failure)))
            self._count(failure.reason)
            self._back_off(lived_seconds=0.0)
            return None
        self._child = child
        self._started_at = self._clock()
        self._unanswered_since.clear()
        self._none_answered_since = None
        if self.released or self._stopped:  # while it was started
            await self._end_child()
            return None
        return child

    async def _take(self, reading: Reading, duration_seconds: float) -> Reading | None:
        fault = _fault(reading)
        if fault is not None:
            self._record.failed(SourceError(fault.reason, fault.detail))
            if fault.reason in NEW_READER_FAULTS:
                if self._unusable_since is None:
                    self._unusable_since = self._clock()
                await self._replace(fault.reason)
            else:
                self._unusable_since = None
            return reading if reading.error is None else None
        self._unusable_since = None
        self._record.succeeded(duration_seconds)
        self.latest = reading
        await self._replace_if_worn(reading)
        return reading

    async def _replace_if_worn(self, reading: Reading) -> None:
        """Replace a reader that answers, but has grown or cannot reach its cards any more."""
        if self._child is None:  # ended meanwhile
            return
        resident = self._child.resident_bytes()
        if resident is not None and resident > self._max_memory_bytes:
            self._relay.line(
                b"WARNING is replaced: its memory is above the ceiling of %d bytes"
                % self._max_memory_bytes
            )
            await self._replace("memory")
        elif self._unanswered_for_long(reading):
            self._relay.line(b"WARNING is replaced: cards have not answered for long")
            await self._replace("unanswered")

    def _unanswered_for_long(self, reading: Reading) -> bool:
        now = self._clock()
        silent = {failure.index for failure in reading.failures if failure.reason == "timeout"}
        self._unanswered_since = {
            index: self._unanswered_since.get(index, now) for index in sorted(silent)
        }
        all_silent = bool(silent) and not reading.cards and len(silent) == len(reading.failures)
        if not all_silent:
            self._none_answered_since = None
        elif self._none_answered_since is None:
            self._none_answered_since = now
        if self._none_answered_since is not None:
            return now - self._none_answered_since >= NO_ANSWER_SECONDS
        # For one card's sake the others pause only if that leaves no blocked child: two of those
        # would cost all cards.
        longest = max((now - since for since in self._unanswered_since.values()), default=0.0)
        return longest >= CARD_NO_ANSWER_SECONDS and not self._left_behind

    # ------------------------------------------------------------------ replacing

    async def _replace(self, reason: str) -> None:
        """End the child; the next one is started by a later round, after a pause."""
        lived_seconds = self._clock() - self._started_at
        self._count(reason)
        await self._end_child()
        self._back_off(lived_seconds)

    def _count(self, reason: str) -> None:
        self._restarts[reason] = self._restarts.get(reason, 0) + 1

    def _back_off(self, lived_seconds: float) -> None:
        if lived_seconds >= STEADY_SECONDS:
            self._failures_in_row = 0
        pause = min(BACK_OFF_SECONDS * 2.0**self._failures_in_row, MAX_BACK_OFF_SECONDS)
        self._failures_in_row = min(self._failures_in_row + 1, 10)
        self._not_before = self._clock() + pause * (0.5 + 0.5 * self._jitter())

    async def _end_child(self, grace_seconds: float = 0.0) -> bool:
        """End the child, or leave it behind; say whether it is gone."""
        child, self._child = self._child, None
        if child is None:
            return True
        # It counts as left behind until it is gone, also when the waiting is cancelled.
        self._left_behind.append(child)
        gone = await child.end(
            self._kill, grace_seconds=grace_seconds, wait_seconds=self._kill_wait_seconds
        )
        if gone:
            self._left_behind.remove(child)
        else:
            log.error("reader %d cannot be killed and is left behind", child.pid)
        return gone

    # ------------------------------------------------------------------ letting go

    async def release(self, reason: str, until_seconds: float | None = None) -> None:
        """Let go of the driver at once: end the child and refuse to read.

        Until `resume`, or until the monotonic time `until_seconds`.  Calling it again while
        released changes the reason and the time only.
        """
        self._released = True
        self._released_until = until_seconds
        self._unusable_since = None
        if self._child is not None:
            self._count("released")
            await self._end_child()
        self._left_behind = [left for left in self._left_behind if left.alive]
        held = "; a reader that cannot be killed still holds it" if self._left_behind else ""
        self._record.released(reason + held)

    def resume(self) -> None:
        """Read again; the next round starts a child at once."""
        self._released = False
        self._released_until = None
        self._not_before = self._clock()

    async def stop(self) -> None:
        """End the child for good, within 5 s also when the driver blocks it."""
        self._stopped = True
        await self._end_child(STOP_GRACE_SECONDS)


def _fault(reading: Reading) -> ReaderError | None:
    """Why the round as a whole is a failure, or None."""
    if reading.error is not None:
        return reading.error
    failures = reading.failures
    if failures and not reading.cards and all(f.reason == "unknown_error" for f in failures):
        return ReaderError(
            "unknown_error",
            "every card answers UNKNOWN: the container may have lost its device nodes "
            "(for instance by a daemon-reload of systemd); it has to be made anew",
        )
    return None
