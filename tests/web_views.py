"""A view whose every part a test sets, and the web layer started over it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import aiohttp

from qgpu_exporter.exposition import TEXT, Exposition, Format
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.model import Snapshot, Status
from qgpu_exporter.web.server import Server, WebSettings, serving
from tests import worlds

LOCAL = (("127.0.0.1", 0),)
GUARD_SECONDS = 10.0
"""Only against a hang."""


class SetView:
    """What the web layer shows; tests write its attributes."""

    def __init__(
        self, snapshot: Snapshot | None, status: Status, exposition: Exposition | None = None
    ) -> None:
        self.exposition = exposition or Exposition(NATIVE, SERVICE)
        self.snapshot = snapshot
        self.present_status = status
        self.reason: str | None = None
        self.counts: dict[str, int] = {}

    def status(self) -> Status:
        """The status that the test set."""
        return self.present_status

    def not_ready(self) -> str | None:
        """The reason that the test set."""
        return self.reason

    def count_scrape(self, outcome: str) -> None:
        """Count, as the service does."""
        self.counts[outcome] = self.counts.get(outcome, 0) + 1


class HeldExposition(Exposition):
    """Renders only once it is let."""

    def __init__(self) -> None:
        super().__init__(NATIVE, SERVICE)
        self.entered = threading.Event()
        self.let = threading.Event()

    def page(
        self,
        snapshot: Snapshot | None,
        status: Status,
        fmt: Format = TEXT,
        names: Collection[str] | None = None,
    ) -> bytes:
        """The page, later."""
        self.entered.set()
        self.let.wait(GUARD_SECONDS)
        return super().page(snapshot, status, fmt, names)


def full_view() -> SetView:
    """A node of which everything is known."""
    return SetView(worlds.full_snapshot(), worlds.full_status())


@asynccontextmanager
async def client_of(
    view: SetView, settings: WebSettings | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, Server]]:
    """A client whose base is the running server."""
    chosen = settings or WebSettings(listen_addresses=LOCAL)
    async with serving(view, chosen, wall_clock=lambda: worlds.NOW) as server:
        headers = {"Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(
            server.urls[0], auto_decompress=False, headers=headers
        ) as client:
            yield client, server
