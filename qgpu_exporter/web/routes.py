"""The endpoints: what each path answers; who may ask is decided before, by `access`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import TypeVar

import msgspec
from aiohttp import web

from qgpu_exporter.exposition import Format, negotiate
from qgpu_exporter.model import Snapshot, Status
from qgpu_exporter.web import page
from qgpu_exporter.web.document import node_document
from qgpu_exporter.web.responses import MIN_GZIP_BYTES, compressed, send, takes_gzip, text
from qgpu_exporter.web.view import View

log = logging.getLogger(__name__)

T = TypeVar("T")

RENDER_SECONDS = 30.0
"""Longest that an answer may take to be made, whatever the client says."""
SCRAPE_MARGIN_SECONDS = 0.5
"""Left of the scraper's own timeout for the way back, as blackbox_exporter does."""

MAX_LIST_LENGTH = 4096
"""Of a header that is a list; Prometheus sends 300 characters, and more would hold up the loop."""

STATIC_TYPES: Mapping[str, str] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Every file that is served; they are read at the start, so no path of a client reaches a disk."""


class Overloaded(Exception):
    """As many answers as allowed are being made or written."""


class Late(Exception):
    """The answer was not made in the time that the client waits."""


class Limiter:
    """Makes answers in one thread, one at a time; at most `limit` are in the house."""

    def __init__(self, executor: ThreadPoolExecutor, limit: int) -> None:
        self._executor = executor
        self._limit = limit
        self._inside = 0

    def __enter__(self) -> None:
        if self._inside >= self._limit:
            raise Overloaded
        self._inside += 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1

    async def made(self, make: Callable[[], T], seconds: float = RENDER_SECONDS) -> T:
        """The value of `make`, which runs in the thread; raises `Late`."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, make)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            raise Late from None


class Routes:
    """The handlers over one view.

    `wall_clock` is Unix time in seconds; `executor` has one thread, as `Exposition` asks.
    """

    def __init__(
        self,
        view: View,
        *,
        telemetry_path: str,
        max_requests: int,
        executor: ThreadPoolExecutor,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._view = view
        self._telemetry_path = telemetry_path
        self._wall_clock = wall_clock
        self._scrapes = Limiter(executor, max_requests)
        # Apart, so that open status pages never cost a scrape.
        self._looks = Limiter(executor, max_requests)
        self._static = _static_files()

    def add_to(self, app: web.Application) -> None:
        """Add every endpoint; GET brings HEAD with it, other methods are 405."""
        self.add_probes_to(app)
        add = app.router.add_get
        add(self._telemetry_path, self.metrics)
        if self._telemetry_path != "/":
            add("/", self.status_page)
        add("/caches", self.caches)
        add("/api/v1/node", self.node)
        for name in self._static:
            add(f"/static/{name}", self.static)

    def add_probes_to(self, app: web.Application) -> None:
        """Add /-/healthy and /-/ready alone."""
        app.router.add_get("/-/healthy", self.healthy)
        app.router.add_get("/-/ready", self.ready)

    def is_probe(self, request: web.Request) -> bool:
        """Whether the request is for one of the two endpoints that need no credentials."""
        return request.match_info.handler in (self.healthy, self.ready)

    # ------------------------------------------------------------------ probes

    async def healthy(self, _request: web.Request) -> web.StreamResponse:
        """200 while the loop lives."""
        return text(200, "healthy")

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        """200, or 503 with the reason."""
        reason = self._view.not_ready()
        if reason is None:
            return text(200, "ready")
        return text(503, " ".join(reason.split()))

    # ------------------------------------------------------------------ metrics

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """The metrics page in the format that the client asks for."""
        format_ = negotiate(_joined(request, "Accept"))
        gzipped = takes_gzip(_joined(request, "Accept-Encoding"))
        names = request.query.getall("name[]", None)
        try:
            with self._scrapes:
                snapshot, status = self._view.snapshot, self._view.status()

                def make() -> bytes:
                    return self._page(snapshot, status, format_, names, gzipped=gzipped)

                body = await self._scrapes.made(make, _patience(request))
                self._view.count_scrape("ok")
                return await send(request, body, format_.content_type, gzipped=gzipped)
        except (Overloaded, Late) as error:
            self._view.count_scrape("rejected")
            return _busy(error)

    def _page(
        self,
        snapshot: Snapshot | None,
        status: Status,
        format_: Format,
        names: list[str] | None,
        *,
        gzipped: bool,
    ) -> bytes:
        wanted = None if names is None else frozenset(names)
        body = self._view.exposition.page(snapshot, status, format_, wanted)
        return compressed(body) if gzipped else body

    # ------------------------------------------------------------------ what is believed

    async def node(self, request: web.Request) -> web.StreamResponse:
        """The node as compact JSON."""
        return await self._json(request, indent=0)

    async def caches(self, request: web.Request) -> web.StreamResponse:
        """The same JSON, laid out for people."""
        return await self._json(request, indent=2)

    async def _json(self, request: web.Request, *, indent: int) -> web.StreamResponse:
        view = self._view
        snapshot, status, now = view.snapshot, view.status(), self._wall_clock()
        not_ready = view.not_ready()

        def make() -> bytes:
            document = node_document(snapshot, status, now, not_ready=not_ready)
            body = msgspec.json.encode(document)
            return msgspec.json.format(body, indent=indent) + b"\n" if indent else body

        return await self._look(request, make, "application/json; charset=utf-8")

    async def status_page(self, request: web.Request) -> web.StreamResponse:
        """The live page."""
        snapshot, status, now = self._view.snapshot, self._view.status(), self._wall_clock()

        def make() -> bytes:
            document = node_document(snapshot, status, now)
            return page.html(document, self._telemetry_path).encode("utf-8", "replace")

        return await self._look(request, make, "text/html; charset=utf-8")

    async def _look(
        self, request: web.Request, make: Callable[[], bytes], content_type: str
    ) -> web.StreamResponse:
        gzipped = takes_gzip(_joined(request, "Accept-Encoding"))
        try:
            with self._looks:
                body = await self._looks.made(lambda: compressed(make()) if gzipped else make())
                return await send(request, body, content_type, gzipped=gzipped)
        except (Overloaded, Late) as error:
            return _busy(error)

    async def static(self, request: web.Request) -> web.StreamResponse:
        """A file of the page, asked for anew each time, so that an upgrade shows at once."""
        name = request.path.rpartition("/")[2]
        body, zipped, tag = self._static[name]
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag, "Cache-Control": "no-cache"})
        gzipped = len(body) >= MIN_GZIP_BYTES and takes_gzip(_joined(request, "Accept-Encoding"))
        headers = {
            "ETag": tag,
            "Cache-Control": "no-cache",
            "Content-Type": STATIC_TYPES[name],
            "Vary": "Accept-Encoding",
        }
        if gzipped:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=zipped if gzipped else body, headers=headers)


def _static_files() -> dict[str, tuple[bytes, bytes, str]]:
    """name -> (bytes, the same gzipped, entity tag)."""
    folder = resources.files("qgpu_exporter.web") / "static"
    files = {}
    for name in STATIC_TYPES:
        body = (folder / name).read_bytes()
        files[name] = (body, compressed(body), f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return files


def _joined(request: web.Request, name: str) -> str | None:
    """All lines of a header as one list, as RFC 9110 says that they mean; None: none to be read."""
    lines = request.headers.getall(name, [])
    joined = ", ".join(lines)
    return joined if lines and len(joined) <= MAX_LIST_LENGTH else None


def _patience(request: web.Request) -> float:
    """Seconds in which the page must be made, by what the scraper says it waits."""
    try:
        stated = float(request.headers.get("X-Prometheus-Scrape-Timeout-Seconds", ""))
    except ValueError:
        return RENDER_SECONDS
    if not math.isfinite(stated) or stated <= 0:
        return RENDER_SECONDS
    return min(max(stated - SCRAPE_MARGIN_SECONDS, stated / 2), RENDER_SECONDS)


def _busy(error: Exception) -> web.Response:
    line = "too many requests at a time" if isinstance(error, Overloaded) else "not made in time"
    return text(503, line, {"Retry-After": "1"})
