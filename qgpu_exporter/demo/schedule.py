"""What happens on the simulated node by itself: one pod comes and goes, another keeps dying."""

from __future__ import annotations

import asyncio
import itertools

from qgpu_exporter.demo.workloads import CRASHING, nightly
from qgpu_exporter.demo.world import NoSuchPod, Refused, World

AWAY_SECONDS = 5.0
RUNS_SECONDS = 20.0
FINISHED_SECONDS = 10.0
UP_SECONDS = 12.0
BACK_OFF_SECONDS = 8.0


async def follow_schedule(world: World) -> None:
    """Run both until cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_come_and_go(world))
        group.create_task(_crash(world))


async def _come_and_go(world: World) -> None:
    for number in itertools.count(1):
        await world.sleep(AWAY_SECONDS)
        workload = nightly(number)
        key = f"{workload.namespace}/{workload.name}"
        try:
            await world.create(workload)
            await world.sleep(RUNS_SECONDS)
            world.finish(key)
            await world.sleep(FINISHED_SECONDS)
            await world.delete(key)
        except (NoSuchPod, Refused):
            # Somebody has deleted it, or taken its room: the next one may have more luck.
            pass


async def _crash(world: World) -> None:
    while True:
        await world.sleep(UP_SECONDS)
        try:
            await world.crash(f"{CRASHING.namespace}/{CRASHING.name}", BACK_OFF_SECONDS)
        except NoSuchPod:
            pass
