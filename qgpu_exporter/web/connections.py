"""Accepts connections and bounds them: how many, how long without a request, how long in one.

It accepts by itself, since asyncio's own servers take one TLS context for good, in which neither
client authorities nor versions can be taken back, and show nobody a connection that has not shaken
hands yet, so that nothing could bound those.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Open at the same time; a Prometheus holds one, a browser up to six."""
ACCEPT_PAUSE_SECONDS = 1.0
BACKLOG = 128


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take, in seconds."""

    first_request: float = 10.0
    """In which a new connection must have shown a whole request head."""
    next_request: float = 75.0
    """In which a request must be answered and the next one shown; scrapes come more often."""
    handshake: float = 10.0


class Security(Protocol):
    """What decides how a new connection is protected."""

    def context(self) -> ssl.SSLContext | None:
        """The TLS settings for a connection that begins now; None: plain HTTP."""
        ...

    def refusal(self, certificate: object) -> str | None:
        """Why a client with this certificate (as `getpeercert` gives it) is refused, or None."""
        ...


class Plain:
    """Plain HTTP for everybody."""

    def context(self) -> ssl.SSLContext | None:
        """No TLS."""
        return None

    def refusal(self, _certificate: object) -> str | None:
        """Nobody is refused."""
        return None


class Connection(asyncio.Protocol):
    """One client: hands everything to aiohttp's handler, and ends what lasts too long.

    A client that sends its request byte by byte, reads its answer byte by byte, or says nothing,
    is cut off when its time is over.
    """

    def __init__(self, handler: asyncio.Protocol, listener: Listener) -> None:
        self.handler = handler
        self.asked = False
        """Whether a request was ever complete on it."""
        self.answering = False
        self._listener = listener
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there, and its handshake is done."""
        self._transport = transport
        reason = self._listener.security.refusal(transport.get_extra_info("peercert"))
        if reason is not None:
            self._listener.tell_once(reason)
            self.abort()
            return
        self._listener.connections[self.handler] = self
        self._end_in(self._listener.patience.first_request)
        self.handler.connection_made(transport)

    def request_began(self) -> None:
        """A request head is complete: the time for it and for the next one begins."""
        self.asked = self.answering = True
        self._end_in(self._listener.patience.next_request)

    def request_ended(self) -> None:
        """The answer is made: from now on the connection may be given up for a new one."""
        self.answering = False
        connections = self._listener.connections
        if connections.pop(self.handler, None) is not None:
            connections[self.handler] = self

    def abort(self) -> None:
        """Cut the connection off; what was not sent is lost."""
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()

    def _end_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def data_received(self, data: bytes) -> None:
        """Hand on."""
        if self.handler in self._listener.connections:
            self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        """Hand on."""
        return self.handler.eof_received()

    def pause_writing(self) -> None:
        """Hand on."""
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        """Hand on."""
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener.connections.pop(self.handler, None) is not None:
            self.handler.connection_lost(exc)


class Listener:
    """The listening sockets of one server, and its open connections, which it keeps in a dict.

    The TLS context is asked for at each connection, so that new certificates hold at once.
    """

    def __init__(
        self,
        make_handler: Callable[[], asyncio.Protocol],
        security: Security,
        connections: dict[object, Connection],
        patience: Patience,
    ) -> None:
        self.security = security
        self.patience = patience
        self.connections = connections
        """By aiohttp's handler, that which was last answered longest ago first."""
        self._make_handler = make_handler
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._welcomes: set[asyncio.Task[None]] = set()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """Those of the welcomes that wait for a client's part of TLS, oldest first."""
        self._told: set[str] = set()

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each socket, the port as bound."""
        return tuple((name[0], name[1]) for name in (one.getsockname() for one in self._sockets))

    def tell_once(self, line: str) -> None:
        """Log a warning that would otherwise repeat for each client."""
        if line not in self._told and len(self._told) < 100:
            self._told.add(line)
            log.warning("%s", line)

    async def listen(self, addresses: Iterable[tuple[str | None, int]]) -> None:
        """Bind every address, then accept; raises OSError and leaves nothing bound."""
        for host, port in addresses:
            try:
                self._sockets += await _bind(host, port)
            except OSError as error:
                self._close_sockets()
                reason = (error.strerror or str(error)).partition(" (while")[0]
                raise OSError(error.errno, f"{host or ''}:{port}: {reason}") from None
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept_forever(one)) for one in self._sockets]

    def stop_listening(self) -> None:
        """Accept nothing more; connections that are open stay."""
        for task in (*self._accepting, *self._welcomes):
            task.cancel()
        self._close_sockets()

    async def stopped(self) -> None:
        """Wait until nothing is accepted or shaken hands with any more."""
        ending = (*self._accepting, *self._welcomes)
        if ending:
            await asyncio.wait(ending)

    def abort_all(self) -> None:
        """Cut off every connection."""
        for connection in list(self.connections.values()):
            connection.abort()

    def _close_sockets(self) -> None:
        for one in self._sockets:
            one.close()

    async def _accept_forever(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except ConnectionError:
                continue
            except OSError as error:
                # Out of file descriptors, most likely: some will be given back.
                self.tell_once(f"connections cannot be accepted: {error.strerror}")
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if self._has_room():
                self._begin(client)
            else:
                client.close()
            # Who gave way is gone only when the loop has run.
            await asyncio.sleep(0)

    def _has_room(self) -> bool:
        """Whether one more may come; who has waited longest and is not being answered gives way."""
        if len(self.connections) + len(self._welcomes) < MAX_CONNECTIONS:
            return True
        if self._handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
            return True
        waiting = [one for one in self.connections.values() if not one.answering]
        if waiting:
            # The first in the dict of those that have never asked, else the first of all.
            min(waiting, key=lambda one: one.asked).abort()
            return True
        self.tell_once(f"more than {MAX_CONNECTIONS} connections: new ones are closed")
        return False

    def _begin(self, client: socket.socket) -> None:
        client.setblocking(False)
        context = self.security.context()
        task = asyncio.get_running_loop().create_task(self._welcome(client, context))
        self._welcomes.add(task)
        if context is not None:
            self._handshakes[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            self._welcomes.discard(task)
            self._handshakes.pop(task, None)
            if task.cancelled():
                client.close()

        task.add_done_callback(ended)

    async def _welcome(self, client: socket.socket, context: ssl.SSLContext | None) -> None:
        """Shake hands; a client that cannot is gone without a log line, as scanners come often."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._make_handler(), self),
                client,
                ssl=context,
                ssl_handshake_timeout=self.patience.handshake if context else None,
            )
        except (OSError, TimeoutError) as error:
            client.close()
            log.debug("a connection ended before its first request: %s", error)


async def _bind(host: str | None, port: int) -> list[socket.socket]:
    """Listening sockets for a host's every address; all interfaces are one, of both families."""
    if host is None:
        if socket.has_dualstack_ipv6():
            return [
                _ready(
                    socket.create_server(
                        ("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
                    )
                )
            ]
        host = "0.0.0.0"
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            sockets.append(
                _ready(socket.create_server(address[:2], family=family, backlog=BACKLOG))
            )
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


def _ready(listening: socket.socket) -> socket.socket:
    listening.setblocking(False)
    return listening
