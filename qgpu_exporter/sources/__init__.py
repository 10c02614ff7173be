"""What every source shares: its error and the bookkeeping of its health, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from qgpu_exporter.model import SourceHealth, SourceName

log = logging.getLogger(__name__)


class SourceError(Exception):
    """A source could not answer; `reason` is a short snake_case word, the text is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class HealthRecord:
    """Keeps one source's health: an immutable value that each outcome replaces.

    Logs a failure once when its text changes, and the recovery once; `wall_clock` gives Unix
    seconds.
    """

    def __init__(self, source: SourceName, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._logged = ""
        self.health = SourceHealth(source)

    def succeeded(self, duration_seconds: float | None = None) -> None:
        """Note an answer."""
        if self._logged:
            log.info("source %s answers again", self.health.source)
            self._logged = ""
        self.health = replace(
            self.health,
            up=True,
            last_success_timestamp_seconds=self._wall_clock(),
            read_duration_seconds=duration_seconds,
            detail="",
            released=False,
        )

    def failed(self, error: SourceError) -> None:
        """Note a failure."""
        failures = dict(self.health.failures)
        failures[error.reason] = failures.get(error.reason, 0) + 1
        detail = str(error)
        if detail != self._logged:
            log.warning("source %s failed (%s): %s", self.health.source, error.reason, detail)
            self._logged = detail
        self.health = replace(
            self.health, up=False, failures=failures, detail=detail, released=False
        )

    def released(self, detail: str) -> None:
        """Note that the source was let go on purpose."""
        if not self.health.released:
            log.info("source %s released: %s", self.health.source, detail)
        self.health = replace(self.health, up=False, detail=detail, released=True)
