"""What the tests of the API server's sources share: server, fast timing, waiting for effects."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from qgpu_exporter.demo.apiserver import ApiServer
from qgpu_exporter.model import PodList
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.pods import Pods
from qgpu_exporter.sources.kubernetes.watch import Timing

# A thousand modules, which a busy machine loads for longer than any guard below waits.
importlib.import_module("kubernetes_asyncio.client")

NODE = "gpu-node-a"
HANG_SECONDS = 10.0

FAST = Timing(
    backoff_seconds=0.01,
    max_backoff_seconds=0.05,
    silence_seconds=5.0,
    watch_seconds=(290, 590),
    settle_seconds=0.02,
)
"""Retries at once, so that no test waits for a pause."""


class Source(Protocol):
    """What all sources have in common."""

    async def run(self, changed: Callable[[], None]) -> None: ...


def pod(name: str, *, uid: str = "", node: str | None = NODE, **metadata: Any) -> dict[str, Any]:
    """A running pod of one container that asks for a whole card."""
    return {
        "metadata": {"namespace": "demo", "name": name, "uid": uid or f"uid-{name}", **metadata},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        },
        "status": {"phase": "Running"},
    }


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[ApiServer]:
    """A running API server without TLS."""
    server = ApiServer(**{"too_large_seconds": 0.01, **settings})
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(
    server: ApiServer, folder: Path, *, token: str | None = None
) -> AsyncIterator[Connection]:
    """A connection to the server by a kubeconfig."""
    kubeconfig = server.write_kubeconfig(folder / "kubeconfig", token=token)
    connection = Connection(str(kubeconfig))
    try:
        yield connection
    finally:
        await connection.close()


class Changes:
    """Counts the calls of a source's callback."""

    def __init__(self, also: Callable[[], None] | None = None) -> None:
        self.count = 0
        self._also = also

    def __call__(self) -> None:
        self.count += 1
        if self._also is not None:
            self._also()


@asynccontextmanager
async def running(source: Source, also: Callable[[], None] | None = None) -> AsyncIterator[Changes]:
    """The source's task, for as long as the context lasts; `also` is called at each change."""
    changes = Changes(also)
    task = asyncio.create_task(source.run(changes))
    try:
        yield changes
    finally:
        assert not task.done(), "the source ended by itself"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def pods_source(connection: Connection, **settings: Any) -> Pods:
    """The pods of `NODE`, with fast timing and real clocks."""
    return Pods(
        connection,
        NODE,
        **{"clock": time.monotonic, "wall_clock": time.time, "timing": FAST, **settings},
    )


@asynccontextmanager
async def following(server: ApiServer, folder: Path, **settings: Any) -> AsyncIterator[Pods]:
    """The pods of a server, followed."""
    async with connected(server, folder) as connection:
        source = pods_source(connection, **settings)
        async with running(source):
            yield source


async def until(condition: Callable[[], bool]) -> None:
    """Wait for an effect; a hang fails the test."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110 -- the effect is a value, which sets no event
            await asyncio.sleep(0.002)


def names(latest: PodList | None) -> list[str] | None:
    """The pods' names, None where there is no list yet."""
    return None if latest is None else [one.name for one in latest.pods]


async def until_names(source: Pods, *expected: str) -> None:
    """Wait until exactly these pods are known."""
    await until(lambda: names(source.latest) == sorted(expected))


async def until_up(source: Pods) -> None:
    """Wait until the source is up."""
    await until(lambda: source.health.up is True)
