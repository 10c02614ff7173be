"""The devices source over the real reader and our library: what only both together can show."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qgpu_exporter.model import Reading
from qgpu_exporter.sources.devices import Devices
from tests.nvml_stub import Stub, presets

GUARD_SECONDS = 20.0
"""Only against a hang: no verdict depends on it."""
MIB = 1 << 20


class FastClock:
    """A monotonic clock that runs fast enough for pauses between readers to cost nothing."""

    def __call__(self) -> float:
        return time.monotonic() * 100


@asynccontextmanager
async def devices(
    stub: Stub,
    *arguments: str,
    max_memory_bytes: int = 1 << 30,
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Devices]:
    source = Devices(
        command=[sys.executable, "-m", "qgpu_exporter.reader", "--timeout", "10", *arguments],
        environment={**os.environ, **stub.environment(), **(environment or {})},
        timeout_seconds=10.0,
        max_memory_bytes=max_memory_bytes,
        clock=FastClock(),
        wall_clock=time.time,
        jitter=lambda: 0.0,
    )
    try:
        yield source
    finally:
        await source.stop()


async def until(source: Devices, wanted: Callable[[Reading | None], bool]) -> Reading | None:
    async with asyncio.timeout(GUARD_SECONDS):
        while True:
            reading = await source.read()
            if wanted(reading):
                return reading
            await asyncio.sleep(0.02)


async def test_a_leaking_driver_meets_the_ceiling(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"leak": 8 * MIB})
    async with devices(stub, "--persistence-mode", max_memory_bytes=120 * MIB) as source:
        await until(source, lambda _: source.reader_health.restarts.get("memory", 0) >= 2)
        reading = await until(source, lambda reading: reading is not None)
    assert reading is not None
    assert [card.persistence_mode for card in reading.cards] == [False]


async def test_the_same_driver_loses_nothing_where_it_is_not_asked(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"leak": 8 * MIB})
    async with devices(stub, max_memory_bytes=120 * MIB) as source:
        for _ in range(40):
            assert await source.read() is not None
        assert source.reader_health.restarts == {}


async def test_after_an_upgrade_a_new_reader_loads_the_new_library(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    place = tmp_path / "driver"
    place.mkdir()
    shutil.copy(stub.library, place)
    async with devices(stub, environment={"LD_LIBRARY_PATH": str(place)}) as source:
        first = await source.read()
        assert first is not None
        # The kernel has another version now, and the library of the running reader does not fit.
        stub.set({"error.nvmlDeviceGetCount_v2": 18, "error.nvmlInitWithFlags": 18})
        await until(source, lambda _: source.health.failures.get("mismatch", 0) >= 1)
        assert source.unusable_since_seconds is not None
        stub.set({"error.nvmlDeviceGetCount_v2": None, "error.nvmlInitWithFlags": None})
        stub.set({"nvmlSystemGetDriverVersion": "590.48.01"})
        second = await until(source, lambda reading: reading is not None)
        assert second is not None
        assert (first.driver_version, second.driver_version) == ("580.95.05", "590.48.01")
        assert source.reader_health.restarts["mismatch"] >= 1
        assert source.unusable_since_seconds is None


async def test_a_crash_in_the_driver_costs_one_round(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    async with devices(stub) as source:
        assert await source.read() is not None
        stub.set({"0.crash.nvmlDeviceGetPowerUsage": 1})
        assert await source.read() is None
        assert source.health.up is False
        stub.set({"0.crash.nvmlDeviceGetPowerUsage": None})
        assert await until(source, lambda reading: reading is not None) is not None
        assert source.reader_health.restarts == {"crash": 1}


async def test_a_reader_that_is_blocked_for_ever_ends_at_once(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"0.hang.*": 1000})
    source = Devices(
        command=[sys.executable, "-m", "qgpu_exporter.reader", "--timeout", "0.2"],
        environment={**os.environ, **stub.environment()},
        timeout_seconds=10.0,
        max_memory_bytes=1 << 30,
        clock=time.monotonic,
        wall_clock=time.time,
    )
    reading = await source.read()
    assert reading is not None
    assert [failure.reason for failure in reading.failures] == ["timeout"]
    pid = source.reader_health.pid
    async with asyncio.timeout(GUARD_SECONDS):
        await source.stop()
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
