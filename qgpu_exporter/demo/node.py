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
