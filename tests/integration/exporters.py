"""A real poller over a simulated node, and the page that a scrape of it would get."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

# Loaded before any guard runs: on a busy machine that alone takes seconds.
import kubernetes_asyncio.client  # noqa: F401

from qgpu_exporter import xids
from qgpu_exporter.demo import SimulatedNode
from qgpu_exporter.exposition import Exposition
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.model import Status
from qgpu_exporter.poller import Poller, PollerSettings, Sources
from qgpu_exporter.sources.devices import Devices
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.node import NodeObject
from qgpu_exporter.sources.kubernetes.pods import Pods
from qgpu_exporter.sources.kubernetes.slices import ResourceSlices
from qgpu_exporter.sources.podresources import PodResources
from qgpu_exporter.sources.processes import Processes

GUARD_SECONDS = 10.0
"""Only against a hang: no test's verdict is how long something took."""

HOUR = 3600.0


@dataclass
class Exporter:
    """The running poller and the node that it watches."""

    node: SimulatedNode
    poller: Poller
    exposition: Exposition
    running: asyncio.Task[None]

    def lines(self, name: str) -> list[str]:
        """The samples of one family as a scrape would get them now."""
        status = Status(
            version="test",
            revision="",
            python_version="",
            started_timestamp_seconds=0.0,
            sources=self.poller.sources.health(),
            reader=self.poller.sources.devices.reader_health,
        )
        page = self.exposition.page(self.poller.snapshot, status, names={name}).decode()
        return [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]

    def pods(self, name: str) -> set[str]:
        """Values of the label `pod` in one family."""
        return {line.partition('pod="')[2].partition('"')[0] for line in self.lines(name)}


async def until(happened: Callable[[], bool]) -> None:
    """Wait until it has happened; the guard's end is the test's failure."""
    async with asyncio.timeout(GUARD_SECONDS):
        while not happened():  # noqa: ASYNC110 - what is waited for is a scrape's content
            await asyncio.sleep(0.02)


@asynccontextmanager
async def exporting(
    settings: PollerSettings | None = None,
    *,
    kubelet: bool = True,
    api: bool = True,
    refused: Iterable[str] = (),
    max_age_seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Exporter]:
    """An exporter of a simulated node without a schedule, from its first full snapshot on.

    The API server lets it read all but the `refused` resources.
    """
    classes = xids.load(None)
    async with SimulatedNode(schedule=False) as node:
        node.world.api.allowed.difference_update(refused)
        made = replace(
            settings or PollerSettings("", interval_seconds=HOUR, timeout_seconds=3.0),
            node=node.name,
            kubelet_max_age_seconds=max_age_seconds,
            xid_classes=classes,
            xid_codes=xids.alerting(classes),
        )
        connection = Connection(node.kubeconfig, environment={})
        command = [sys.executable, "-m", "qgpu_exporter.reader", "--backend", "simulated"]
        sources = Sources(
            devices=Devices(
                command=[*command, "--timeout", "3", "--simulation", node.simulation],
                timeout_seconds=3.0,
                max_memory_bytes=1 << 30,
                clock=clock,
                wall_clock=time.time,
            ),
            processes=Processes(procfs=node.procfs, clock=clock, wall_clock=time.time),
        )
        if kubelet:
            sources.podresources = PodResources(
                socket=node.socket,
                max_age_seconds=max_age_seconds,
                clock=clock,
                wall_clock=time.time,
            )
        if api:
            sources.pods = Pods(connection, node.name, clock=clock, wall_clock=time.time)
            sources.node = NodeObject(connection, node.name, wall_clock=time.time)
            sources.slices = ResourceSlices(connection, node.name, wall_clock=time.time)
        poller = Poller(made, sources, clock=clock, wall_clock=time.time)
        running = asyncio.create_task(poller.run())
        exporter = Exporter(node, poller, Exposition(NATIVE, SERVICE), running)
        try:
            await until(lambda: running.done() or poller.not_ready() is None)
            if running.done():
                await running
            yield exporter
        finally:
            running.cancel()
            await asyncio.wait([running])
            await sources.devices.stop()
            if sources.podresources is not None:
                await sources.podresources.close()
            await connection.close()
