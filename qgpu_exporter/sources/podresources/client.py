"""Asks the kubelet which container holds which device; keeps its last good answer for a time."""

from __future__ import annotations

import asyncio
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import grpc
import grpc.aio

from qgpu_exporter.model import KubeletList, SourceHealth
from qgpu_exporter.sources import HealthRecord, SourceError
from qgpu_exporter.sources.podresources.decode import decode_bytes
from qgpu_exporter.sources.podresources.failure import (
    SocketIdentity,
    from_rpc_error,
    is_rate_limited,
    socket_identity,
)
from qgpu_exporter.sources.podresources.qgpu_podresources_pb2 import ListPodResourcesRequest

LIST_METHOD = "/v1.PodResourcesLister/List"

MAX_MESSAGE_BYTES = 64 << 20
"""gRPC's own limit of 4 MiB is below what nodes with a device id for each MiB of GPU memory
answer (20 MB were seen), and without any the exporter's memory is the kubelet's to fill."""

DECODE_IN_THREAD_BYTES = 64 << 10
"""A smaller answer (about 600 ids) is decoded in a millisecond, less than it pays to leave."""

CLOSE_SECONDS = 1.0
"""How long gRPC may take to let go of a question about the channel's state."""

DOUBT_SECONDS = 5.0
"""How long a restarted kubelet's empty answer is doubted; 0.1 s (1.20) to 1.0 s (1.36) were seen
until it had read its checkpoint."""

RECONNECT_BACKOFF_MS = (100, 2000)
"""First and longest pause between attempts to connect; gRPC's own grow to 120 s."""

RATE_LIMIT_PAUSE_SECONDS = 0.05
RATE_LIMIT_LAST_PAUSE_SECONDS = 1.0
"""Mean of the first pause after a refusal (they double), and the longest; the kubelet lets 100
questions a second pass, of all its clients together."""


def present(socket: str) -> bool:
    """Whether this host has a kubelet as far as the socket's directory tells; "" is none.

    A directory that may not be looked at counts as there: the source then says what is wrong.
    """
    if not socket:
        return False
    try:
        status = os.stat(os.path.dirname(os.path.abspath(socket)))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return stat.S_ISDIR(status.st_mode)


@dataclass(frozen=True, slots=True)
class _Good:
    """The last answer that was believed, and the connection that it came over."""

    answer: KubeletList
    socket: SocketIdentity
    connection: int


class PodResources:
    """The kubelet's pod-resources API over one long-lived channel.

    One question at a time; `clock` is monotonic, `wall_clock` Unix time, both in seconds.  An
    answer is good until `max_age_seconds` after it was asked for, whatever fails meanwhile.
    """

    def __init__(
        self,
        *,
        socket: str,
        max_age_seconds: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        timeout_seconds: float = 10.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._socket = os.path.abspath(socket)
        self._max_age_seconds = max_age_seconds
        self._timeout_seconds = timeout_seconds
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._health = HealthRecord("podresources", wall_clock)
        self._channel: grpc.aio.Channel | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._connection = 0
        self._good: _Good | None = None
        self._doubt_since: float | None = None

    @property
    def latest(self) -> KubeletList | None:
        """The last good answer, None before the first and once it is older than its age limit."""
        if self._good is None:
            return None
        age = self._clock() - self._good.answer.asked_at_seconds
        return self._good.answer if age <= self._max_age_seconds else None

    @property
    def health(self) -> SourceHealth:
        """How the last question went."""
        return self._health.health

    async def ask(self, pods_alive: Callable[[], bool | None] = lambda: None) -> KubeletList | None:
        """Ask List once and return `latest`; a failure is noted in `health` and never raised.

        `pods_alive` says whether the API server shows any pod of `latest` as alive; None: nobody
        knows.  It is called only where an answer is empty after a reconnection.
        """
        started_at = self._clock()
        try:
            new = await self._question()
        except SourceError as error:
            self._doubt_since = None
            self._health.failed(error)
            return self.latest
        if not self._is_doubtful(new, pods_alive):
            self._good = new
            self._doubt_since = None
            self._health.succeeded(self._clock() - started_at)
        else:
            self._doubt(new.answer.asked_at_seconds)
        return self.latest

    async def close(self) -> None:
        """Close the channel; a later `ask` opens another."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher], timeout=CLOSE_SECONDS)
            self._watcher = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    # ------------------------------------------------------------------ believing an answer

    def _doubt(self, asked_at_seconds: float) -> None:
        """Keep the answer from before; that is no failure until it takes unusually long."""
        if self._doubt_since is None:
            self._doubt_since = asked_at_seconds
        elif self._clock() - self._doubt_since > DOUBT_SECONDS:
            self._health.failed(
                SourceError(
                    "empty_after_restart",
                    "since its restart the kubelet lists no device, but the API server shows pods"
                    " that hold some; its answer from before counts until --kubelet.max-age",
                )
            )

    def _is_doubtful(self, new: _Good, pods_alive: Callable[[], bool | None]) -> bool:
        """A restarted kubelet answers OK and empty until it has read its checkpoint."""
        good = self._good
        if new.answer.containers or good is None or not good.answer.containers:
            return False
        if self.latest is None:
            return False
        if new.socket == good.socket and self._connection == good.connection:
            return False
        alive = pods_alive()
        if alive is not None:
            return alive
        since = self._doubt_since
        return since is None or self._clock() - since <= DOUBT_SECONDS

    # ------------------------------------------------------------------ calling

    async def _question(self) -> _Good:
        # Both are noted before the call: a restart meanwhile then counts as one after it.
        socket, connection = socket_identity(self._socket), self._connection
        asked_at, raw = await self._call()
        if len(raw) <= DECODE_IN_THREAD_BYTES:
            containers = decode_bytes(raw)
        else:
            containers = await asyncio.to_thread(decode_bytes, raw)
        return _Good(KubeletList(asked_at, self._wall_clock(), containers), socket, connection)

    async def _call(self) -> tuple[float, bytes]:
        """(When it was asked, the serialized answer); asks again where the rate limit refuses."""
        list_pods: grpc.aio.UnaryUnaryMultiCallable[ListPodResourcesRequest, bytes]
        list_pods = self._open().unary_unary(
            LIST_METHOD, request_serializer=ListPodResourcesRequest.SerializeToString
        )
        pause = RATE_LIMIT_PAUSE_SECONDS
        while True:
            asked_at = self._clock()
            try:
                raw = await list_pods(ListPodResourcesRequest(), timeout=self._timeout_seconds)
            except grpc.aio.AioRpcError as error:
                if not is_rate_limited(error) or pause > RATE_LIMIT_LAST_PAUSE_SECONDS:
                    raise from_rpc_error(
                        error, self._socket, self._timeout_seconds, self._max_message_bytes
                    ) from error
            else:
                return asked_at, raw
            # Clients that were refused together must not come again together.
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - spreads load only
            pause *= 2

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                f"unix://{quote(self._socket)}",
                options=[
                    ("grpc.max_receive_message_length", self._max_message_bytes),
                    ("grpc.enable_http_proxy", 0),
                    ("grpc.use_local_subchannel_pool", 1),
                    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[0]),
                    ("grpc.min_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[1]),
                    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[1]),
                ],
            )
            self._watcher = asyncio.create_task(self._count_connections(self._channel))
        return self._channel

    async def _count_connections(self, channel: grpc.aio.Channel) -> None:
        """Count the times that the channel had to connect."""
        state = channel.get_state()
        while True:
            await channel.wait_for_state_change(state)
            if state is grpc.ChannelConnectivity.READY:
                self._connection += 1
            state = channel.get_state()
