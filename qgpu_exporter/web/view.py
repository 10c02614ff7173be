"""What the web layer is given to show: the one interface between it and the running service."""

from __future__ import annotations

from typing import Protocol

from qgpu_exporter.exposition import Exposition
from qgpu_exporter.model import Snapshot, Status


class View(Protocol):
    """The running service as the web layer sees it; every member is cheap and never blocks."""

    @property
    def exposition(self) -> Exposition:
        """Renders the metrics page; called in one thread at a time."""
        ...

    @property
    def snapshot(self) -> Snapshot | None:
        """The present snapshot, or None while there is none or it is too old to serve."""
        ...

    def status(self) -> Status:
        """The service about itself, now."""
        ...

    def not_ready(self) -> str | None:
        """Why the service is not ready, in one line; None when it is."""
        ...

    def count_scrape(self, outcome: str) -> None:
        """Note a scrape: ``ok`` or ``rejected``."""
        ...
