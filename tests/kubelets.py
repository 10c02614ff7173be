"""What the tests of the kubelet's source share: a clock to set, pods to admit, a way to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from qgpu_exporter.demo.kubelet import FakeKubelet, ListedContainer
from qgpu_exporter.model import KubeletList

T = TypeVar("T")

GPU_0 = "GPU-10000000-0000-4000-8000-000000000000"
GPU_1 = "GPU-20000000-0000-4000-8000-000000000001"
WHOLE = "nvidia.com/gpu"
HANG_SECONDS = 10.0


class ManualClock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def admit(kubelet: FakeKubelet, pod: str, *devices: str, resource: str = WHOLE) -> None:
    """A pod of namespace `lab` whose container `main` holds the devices."""
    held = {resource: devices} if devices else {}
    kubelet.admit("lab", pod, [ListedContainer("main", held)])


def pods(answer: KubeletList | None) -> list[str] | None:
    """Names of the pods of an answer; None: there is none."""
    return None if answer is None else [container.pod for container in answer.containers]


async def until(ask: Callable[[], Awaitable[T]], accept: Callable[[T], bool]) -> T:
    """The first outcome that is accepted; the guard only ends a hang."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            outcome = await ask()
            if accept(outcome):
                return outcome
            await asyncio.sleep(0.02)
