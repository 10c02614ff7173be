"""Starts and stops the HTTP servers: the main one behind its gate, and the plain one for probes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from qgpu_exporter.config import ConfigError, Settings
from qgpu_exporter.web.access import Access
from qgpu_exporter.web.connections import Connection, Listener, Patience, Plain, Security
from qgpu_exporter.web.responses import SECURITY_HEADERS, text
from qgpu_exporter.web.routes import Routes
from qgpu_exporter.web.view import View
from qgpu_exporter.web.web_config import WebConfigError
from qgpu_exporter.web.web_config_file import WebConfigFile

log = logging.getLogger(__name__)

MAX_HEAD_LINE_BYTES = 8190
MAX_HEADERS = 64
SHUTDOWN_SECONDS = 2.0
"""How long answers that are being written may take once the service is to end."""

MAX_TOLD = 100

Address = tuple[str | None, int]

_told: set[str] = set()

# A line for each scrape tells nobody anything.
_no_access_log = logging.getLogger(f"{__name__}.access")
_no_access_log.setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class WebSettings:
    """What the web layer needs of the settings; port 0 takes any free one."""

    listen_addresses: tuple[Address, ...] = ((None, 5678),)
    probe_addresses: tuple[Address, ...] = ()
    telemetry_path: str = "/metrics"
    max_requests: int = 40
    config_file: str | None = None
    patience: Patience = field(default_factory=Patience)

    @classmethod
    def of(cls, settings: Settings) -> WebSettings:
        """The part of all settings that matters here."""
        return cls(
            listen_addresses=settings.web_listen_address,
            probe_addresses=settings.web_probe_address,
            telemetry_path=settings.web_telemetry_path,
            max_requests=settings.web_max_requests,
            config_file=settings.web_config_file or None,
        )


class Server:
    """The running servers."""

    def __init__(self, main: Listener, probes: Listener | None, *, tls: bool) -> None:
        self._main = main
        self._probes = probes
        self._tls = tls

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) that the main server is bound to."""
        return self._main.addresses

    @property
    def probe_addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) that the probes' own server is bound to."""
        return self._probes.addresses if self._probes is not None else ()

    @property
    def urls(self) -> tuple[str, ...]:
        """Where a person on this machine finds the main server."""
        scheme = "https" if self._tls else "http"
        return tuple(f"{scheme}://{_shown(host)}:{port}/" for host, port in self.addresses)

    def __str__(self) -> str:
        return ", ".join(self.urls)


@asynccontextmanager
async def serving(
    view: View,
    settings: WebSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
) -> AsyncIterator[Server]:
    """Serve `view` inside; raises `ConfigError` for an address or a web configuration file.

    `clock` is monotonic and `wall_clock` Unix time, in seconds.
    """
    try:
        config_file = WebConfigFile(settings.config_file, wall_clock)
    except WebConfigError as error:
        raise ConfigError(f"--web.config.file: {error}") from None
    async with AsyncExitStack() as stack:
        executor = ThreadPoolExecutor(1, thread_name_prefix="render")
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        routes = Routes(
            view,
            telemetry_path=settings.telemetry_path,
            max_requests=settings.max_requests,
            executor=executor,
            wall_clock=wall_clock,
        )
        access = Access(config_file.current, routes.is_probe, clock)
        stack.callback(access.close)
        main = await stack.enter_async_context(
            _listening(
                _main_app(routes, access),
                config_file,
                settings.listen_addresses,
                settings.patience,
                "listen-address",
            )
        )
        probes = None
        if settings.probe_addresses:
            probes = await stack.enter_async_context(
                _listening(
                    _probe_app(routes),
                    Plain(),
                    settings.probe_addresses,
                    settings.patience,
                    "probe-address",
                )
            )
        yield Server(main, probes, tls=config_file.context() is not None)


class _RequestHandler(web.RequestHandler):
    """aiohttp's, but what is no request gets an answer that repeats nothing, and no log line."""

    __slots__ = ()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send; an expectation is refused before any middleware, in a text that repeats it."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp.text = "expectation failed\n"
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: object, **named: object) -> None:
        """What aiohttp did not expect; a stranger may repeat it, so once for each kind."""
        _log_once(named.get("exc_info"), "a connection failed: %s", str(args[0]))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read; ends the connection."""
        log.debug("%s sent what is no request: %s", request.remote, message or exc)
        answer = text(status, "bad request" if status < 500 else "internal error")
        _set_headers(answer, SECURITY_HEADERS)
        answer.force_close()
        return answer


@asynccontextmanager
async def _listening(
    app: web.Application,
    security: Security,
    addresses: tuple[Address, ...],
    patience: Patience,
    flag: str,
) -> AsyncIterator[Listener]:
    """One application on its addresses, until the end."""
    connections: dict[object, Connection] = {}
    app[_CONNECTIONS] = connections
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    manager = runner.server
    if manager is None:  # pragma: no cover -- setup has just made it
        raise RuntimeError("aiohttp has no server")
    make_handler = partial(
        _RequestHandler,
        manager,
        loop=asyncio.get_running_loop(),
        access_log=_no_access_log,
        keepalive_timeout=patience.next_request,
        lingering_time=1.0,
        # No body is read, so none is unpacked.
        auto_decompress=False,
        max_line_size=MAX_HEAD_LINE_BYTES,
        max_field_size=MAX_HEAD_LINE_BYTES,
        max_headers=MAX_HEADERS,
    )
    listener = Listener(make_handler, security, connections, patience)
    try:
        try:
            await listener.listen(addresses)
        except OSError as error:
            raise ConfigError(f"--web.{flag}: cannot listen: {error.strerror or error}") from None
        yield listener
    finally:
        listener.stop_listening()
        await listener.stopped()
        await runner.cleanup()
        listener.abort_all()


_CONNECTIONS: web.AppKey[dict[object, Connection]] = web.AppKey("connections", dict)


def _main_app(routes: Routes, access: Access) -> web.Application:
    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await access.answer(request, handler)

    async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
        _set_headers(response, access.headers())

    app = web.Application(middlewares=[_begin, _errors, gate, _without_body])
    app.on_response_prepare.append(add_headers)
    routes.add_to(app)
    return app


def _probe_app(routes: Routes) -> web.Application:
    async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
        _set_headers(response, SECURITY_HEADERS)

    app = web.Application(middlewares=[_begin, _errors, _without_body])
    app.on_response_prepare.append(add_headers)
    routes.add_probes_to(app)
    return app


def _set_headers(response: web.StreamResponse, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        response.headers[name] = value
    response.headers["Server"] = "qgpu-exporter"


@web.middleware
async def _begin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection that a whole head has come."""
    connection = request.app[_CONNECTIONS].get(request.protocol)
    if connection is None:
        return await handler(request)
    connection.request_began()
    try:
        return await handler(request)
    finally:
        connection.request_ended()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what goes wrong into a short answer that repeats nothing of the request."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed:
        return text(405, "only GET and HEAD", {"Allow": "GET, HEAD"})
    except web.HTTPException as error:
        return text(error.status, error.reason.lower())
    except Exception as error:  # noqa: BLE001 -- whatever it is, the client gets an answer
        # A stranger may repeat the request that shows a fault of ours.
        _log_once(error, "a request failed: %s", request.match_info.handler.__qualname__)
        return text(500, "internal error")


def _log_once(error: object, line: str, place: str) -> None:
    """Log an exception with its traceback, the first time that one of its kind is at `place`."""
    kind = f"{type(error).__name__} at {place}"
    if kind not in _told and len(_told) < MAX_TOLD:
        _told.add(kind)
        log.error(line, kind, exc_info=error if isinstance(error, BaseException) else None)


@web.middleware
async def _without_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a body: no endpoint reads one."""
    if request.body_exists:
        refused = text(413, "no request here has a body")
        refused.force_close()
        return refused
    return await handler(request)


def _shown(host: str) -> str:
    """The host as a person would write it in a browser on this machine."""
    if host in ("::", "0.0.0.0"):
        return "localhost"
    return f"[{host}]" if ":" in host else host
