"""The simulated node as a whole: starts and stops its servers, files and schedule."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from qgpu_exporter.demo.control import Control
from qgpu_exporter.demo.schedule import follow_schedule
from qgpu_exporter.demo.workloads import NODE
from qgpu_exporter.demo.world import World

GUIDE = """\
A simulated node; the exporter that reads it is the real one.

  {where}/          the node on a page
  {where}/metrics   what Prometheus scrapes
  {where}/caches    what the exporter believes, and why

Look at
  node_gpu_core_request, node_gpu_core_usage       cards 0 and 1: qGPU shares beside their use
  node_gpu_allocation_info                         who holds which card, slice or replica
  node_gpu_memory_usage_unattributed_bytes         card 0: a process outside Kubernetes
  node_gpu_core_usage{{pod="reserved-idle"}}         card 3: held and not used
  node_gpu_mig_memory_used_bytes                   card 4: MIG slices
  pod="report-1", "report-2", ...                  card 1: they come, finish and go
  pod="flaky"                                      card 1: it keeps dying, and its share

Let something happen (curl {control}/ tells the rest)
  curl -X POST '{control}/lose-card?gpu=3'
  curl -X POST '{control}/add-pod?pod=mine&gpu=0&core=10&memory=4'
  curl -X POST '{control}/delete-pod?pod=mine'
  curl -X POST '{control}/kubelet/stop'
  curl -X POST '{control}/recover'

The far ends: {socket}, {kubeconfig}, {procfs}, {simulation}
"""


class SimulatedNode:
    """A node whose far ends are made up: point the real exporter at them.

    With `schedule` pods come and go by themselves; `sleep` lets time pass between the steps of a
    pod; `control_port` 0 is any free one.
    """

    def __init__(
        self,
        *,
        schedule: bool = True,
        control_port: int = 0,
        seed: int = 1,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = NODE
        self._directory = Path(tempfile.mkdtemp(prefix="qgpu-demo-"))
        self.world = World(self._directory, seed=seed, sleep=sleep)
        self._control = Control(self.world)
        self._control_port = control_port
        self._with_schedule = schedule
        self._schedule: asyncio.Task[None] | None = None

    @property
    def socket(self) -> str:
        """Path of the kubelet's pod-resources socket."""
        return self.world.kubelet.socket

    @property
    def kubeconfig(self) -> str:
        """Path of a kubeconfig for the API server."""
        return str(self._directory / "kubeconfig")

    @property
    def procfs(self) -> str:
        """Path of what stands for the host's /proc."""
        return str(self.world.processes.path)

    @property
    def simulation(self) -> str:
        """Path of the simulated reader's scenario file."""
        return str(self.world.cards.path)

    @property
    def control_url(self) -> str:
        """URL at which people and tests make things happen; GET tells what there is."""
        return self._control.url

    def guide(self, address: tuple[str | None, int]) -> str:
        """What to look at, for a person: `address` is where the exporter listens."""
        host = address[0] or "127.0.0.1"
        where = f"http://{f'[{host}]' if ':' in host else host}:{address[1]}"
        return GUIDE.format(
            where=where,
            control=self.control_url,
            socket=self.socket,
            kubeconfig=self.kubeconfig,
            procfs=self.procfs,
            simulation=self.simulation,
        )

    async def __aenter__(self) -> Self:
        try:
            self.world.populate()
            await self.world.kubelet.start()
            await self.world.api.start()
            self.world.api.write_kubeconfig(Path(self.kubeconfig))
            await self._control.start(self._control_port)
        except BaseException:
            await self.__aexit__()
            raise
        if self._with_schedule:
            self._schedule = asyncio.create_task(follow_schedule(self.world))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._schedule is not None:
            self._schedule.cancel()
            await asyncio.wait([self._schedule])
        await self._control.stop()
        await self.world.kubelet.stop()
        await self.world.api.stop()
        shutil.rmtree(self._directory)
