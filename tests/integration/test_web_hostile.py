"""Clients that mean harm: they are refused and bounded, and others are served."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from qgpu_exporter.model import Snapshot, Status
from qgpu_exporter.web import connections
from qgpu_exporter.web.connections import Patience
from qgpu_exporter.web.server import Server, WebSettings, serving
from tests import worlds
from tests.web_views import LOCAL, HeldExposition, SetView, full_view

GUARD_SECONDS = 10.0

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def served(
    patience: Patience | None = None, view: SetView | None = None, max_requests: int = 40
) -> AsyncIterator[Server]:
    settings = WebSettings(
        listen_addresses=LOCAL, patience=patience or Patience(), max_requests=max_requests
    )
    async with serving(view or full_view(), settings, wall_clock=lambda: worlds.NOW) as server:
        yield server


async def said(server: Server, data: bytes) -> bytes:
    """What the server says to these bytes until it ends the connection."""
    reader, writer = await asyncio.open_connection(*server.addresses[0])
    try:
        writer.write(data)
        async with asyncio.timeout(GUARD_SECONDS):
            return await reader.read()
    finally:
        writer.close()


async def is_served(server: Server) -> bool:
    answer = await said(server, b"GET /-/healthy HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    return answer.startswith(b"HTTP/1.1 200 OK")


def request(*lines: bytes, target: bytes = b"/metrics") -> bytes:
    return b"\r\n".join([b"GET " + target + b" HTTP/1.1", b"Host: a", *lines, b"", b""])


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"x" * 150 + b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        request(b"no colon"),
        request(b"X: a\x00b"),
        request(b"Content-Length: -1"),
        request(b"Content-Length: 1", b"Content-Length: 2"),
        request(b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        request(target=b"/" + b"a" * 20_000),
        request(b"X: " + b"a" * 20_000),
        request(*(b"X-%d: a" % number for number in range(500))),
    ],
    ids=[
        "tls", "nonsense", "version", "header", "nul", "length", "lengths", "smuggled", "line",
        "field", "fields",
    ],
)  # fmt: skip
async def test_what_is_no_request_is_refused_without_a_log_line(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server:
        answer = await said(server, data)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 400 Bad Request", b"HTTP/1.0 400 Bad Request"))
        assert b"X-Content-Type-Options: nosniff" in head
        assert body == b"bad request\n"
        assert await is_served(server)
    assert [one for one in caplog.records if one.levelno >= logging.INFO] == []


async def test_a_body_is_refused_and_not_read() -> None:
    async with served() as server:
        answer = await said(server, request(b"Content-Length: 1000000000"))
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"Connection: close" in answer
        assert await is_served(server)


@pytest.mark.parametrize(
    "data",
    [
        request(b"Content-Encoding: gzip", b"Content-Length: 3", b"Connection: close") + b"abc",
        request(b"Transfer-Encoding: chunked", b"Connection: close") + b"zz\r\n\r\n",
        request(b"Content-Length: 9", b"Connection: close") + b"short",
        request(b"Expect: 100-continue", b"Content-Length: 9", b"Connection: close"),
        b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\nabc",
    ],
    ids=["encoded", "chunked", "short", "continue", "connect"],
)
async def test_a_broken_body_is_refused_without_a_log_line(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server:
        answer = await said(server, data)
        assert re.search(rb"^HTTP/1\.[01] 4(00|13) ", answer, re.MULTILINE), answer
        assert await is_served(server)
    assert [one for one in caplog.records if one.levelno >= logging.INFO] == []


@pytest.mark.parametrize("target", [b"/metrics", b"/-/healthy", b"/nowhere"])
async def test_an_expectation_is_not_repeated(target: bytes) -> None:
    async with served() as server:
        answer = await said(
            server, request(b"Expect: <b>a</b>", b"Connection: close", target=target)
        )
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 417 ")
    assert body == b"expectation failed\n"


@pytest.mark.parametrize(
    "target",
    [
        b"/%0d%0aSet-Cookie:%20a=b",
        b"/metrics%0d%0aX-Injected:%20a",
        b"/?a=%0d%0aX-Injected:%20a",
        b"/static/page.js%00.png",
    ],
)
async def test_nothing_of_a_request_gets_into_a_head(target: bytes) -> None:
    async with served() as server:
        answer = await said(server, request(b"Connection: close", target=target))
    head = answer.partition(b"\r\n\r\n")[0]
    assert b"X-Injected" not in head
    assert b"Set-Cookie" not in head


async def test_a_reason_of_many_lines_is_one() -> None:
    view = full_view()
    view.reason = "waiting\r\nX-Injected: a\r\n\r\nfor nothing"
    async with served(view=view) as server:
        answer = await said(server, request(b"Connection: close", target=b"/-/ready"))
    assert answer.endswith(b"\r\n\r\nwaiting X-Injected: a for nothing\n")


async def test_endless_lists_are_not_read() -> None:
    lists = [b"Accept: " + b"application/openmetrics-text," * 250] * 20
    codings = [b"Accept-Encoding: " + b"gzip," * 1500] * 20
    async with served() as server:
        answer = await said(server, request(b"Connection: close", *lists, *codings))
    head = answer.partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert b"Content-Encoding" not in head


async def test_a_client_that_says_nothing_is_cut_off() -> None:
    async with served(Patience(first_request=0.1)) as server:
        assert await said(server, b"") == b""


async def test_a_client_that_says_it_slowly_is_cut_off() -> None:
    async with served(Patience(first_request=0.2)) as server:
        reader, writer = await asyncio.open_connection(*server.addresses[0])
        ended = asyncio.create_task(reader.read())
        async with asyncio.timeout(GUARD_SECONDS):
            writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            while not ended.done():
                writer.write(b"a")
                await asyncio.wait([ended], timeout=0.05)
        assert isinstance(ended.exception(), ConnectionError) or ended.result() == b""
        writer.close()


async def test_a_connection_that_is_kept_without_a_request_is_ended() -> None:
    async with served(Patience(next_request=0.2)) as server:
        answer = await said(server, request(target=b"/-/healthy"))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"Connection: close" not in answer


async def test_a_client_that_does_not_read_is_cut_off_and_its_place_is_free_again() -> None:
    view = NotedView(large_snapshot(), worlds.full_status())
    async with served(Patience(next_request=1.0), view, max_requests=1) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, server.addresses[0])
        await loop.sock_sendall(slow, request())
        async with asyncio.timeout(GUARD_SECONDS):
            await view.counted.wait()
            answer = b""
            while not answer.startswith(b"HTTP/1.1 200"):
                answer = await said(server, request(b"Connection: close"))
        slow.close()
    assert view.counts["ok"] == 2
    assert view.counts["rejected"] >= 1


class NotedView(SetView):
    """Says when a page was made."""

    def __init__(self, snapshot: Snapshot, status: Status) -> None:
        super().__init__(snapshot, status)
        self.counted = asyncio.Event()

    def count_scrape(self, outcome: str) -> None:
        """Count, and say so."""
        super().count_scrape(outcome)
        self.counted.set()


def large_snapshot() -> Snapshot:
    """A snapshot whose page does not fit into the sockets' buffers."""
    snapshot = worlds.full_snapshot()
    assert snapshot.allocation is not None
    held = snapshot.allocation.allocations[0]
    many = tuple(replace(held, pod=f"pod-{number}-{'x' * 50_000}") for number in range(100))
    return replace(snapshot, allocation=replace(snapshot.allocation, allocations=many))


async def test_silent_connections_do_not_keep_others_out() -> None:
    async with served() as server:
        opened: list[Stream] = [
            await asyncio.open_connection(*server.addresses[0])
            for _ in range(connections.MAX_CONNECTIONS + 20)
        ]
        assert await is_served(server)
        for _, writer in opened:
            writer.close()


async def test_connections_that_are_kept_do_not_keep_others_out() -> None:
    async with served() as server:
        opened: list[Stream] = []
        for _ in range(connections.MAX_CONNECTIONS):
            reader, writer = await asyncio.open_connection(*server.addresses[0])
            writer.write(request(target=b"/-/healthy"))
            await reader.readuntil(b"healthy\n")
            opened.append((reader, writer))
        assert await is_served(server)
        for _, writer in opened:
            writer.close()


async def test_connections_that_are_answered_are_not_cut_off_for_others() -> None:
    exposition = HeldExposition()
    view = SetView(worlds.full_snapshot(), worlds.full_status(), exposition)
    async with served(view=view) as server:
        first, asking = await asyncio.open_connection(*server.addresses[0])
        asking.write(request(b"Connection: close"))
        assert await asyncio.to_thread(exposition.entered.wait, GUARD_SECONDS)
        opened: list[Stream] = [
            await asyncio.open_connection(*server.addresses[0])
            for _ in range(connections.MAX_CONNECTIONS + 20)
        ]
        assert await is_served(server)
        exposition.let.set()
        async with asyncio.timeout(GUARD_SECONDS):
            assert (await first.read()).startswith(b"HTTP/1.1 200 OK")
        for writer in (asking, *(one for _, one in opened)):
            writer.close()


async def test_the_end_does_not_wait_for_clients_that_stay() -> None:
    async with served() as server:
        _, silent = await asyncio.open_connection(*server.addresses[0])
        reader, kept = await asyncio.open_connection(*server.addresses[0])
        kept.write(request(target=b"/-/healthy"))
        await reader.readuntil(b"healthy\n")
    silent.close()
    kept.close()
