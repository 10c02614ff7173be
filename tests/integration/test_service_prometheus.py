"""A real Prometheus and promtool on the demo: series end with their pods, every name is good."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.integration.services import GUARD_SECONDS, Service, running
from tests.promtool.test_promtool import findings

NATIVE = "--metrics.dialects=native"
EVERY = "--metrics.dialects=native,dcgm,tke"
CARDS = 8
MINE = '{namespace="demo", pod="mine"}'


@dataclass
class Prometheus:
    """A running server; `select` is an instant query now."""

    session: aiohttp.ClientSession
    url: str

    async def select(self, expression: str) -> list[dict[str, Any]]:
        """The series of an answer; none while the server does not answer yet."""
        where = f"{self.url}/api/v1/query"
        try:
            async with self.session.get(where, params={"query": expression}) as answer:
                if answer.status != 200:  # it still reads its log
                    return []
                found: list[dict[str, Any]] = (await answer.json())["data"]["result"]
                return found
        except aiohttp.ClientConnectionError:
            return []

    async def value(self, expression: str) -> float:
        """The one value of an answer, 0 where there is none."""
        found = await self.select(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0

    async def until(self, expression: str, wanted: float) -> None:
        """Wait until an answer is at least so large."""
        async with asyncio.timeout(GUARD_SECONDS):
            while await self.value(expression) < wanted:  # noqa: ASYNC110 - its scrapes are its own
                await asyncio.sleep(0.2)

    async def scraped_anew(self) -> None:
        """Wait for a scrape that began after this call."""
        # One may be under way.
        await self.until("count_over_time(up[1h])", await self.value("count_over_time(up[1h])") + 2)


def configure(folder: Path, target: str) -> None:
    """Write the configuration, which is JSON and so YAML."""
    scrape = {"job_name": "gpu", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    folder.mkdir()
    (folder / "prometheus.yml").write_text(json.dumps(config))


@asynccontextmanager
async def prometheus(program: str, target: str, folder: Path) -> AsyncIterator[Prometheus]:
    """A Prometheus that scrapes one target each second, its data below `folder`."""
    configure(folder, target)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as session:
            yield Prometheus(session, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        await process.wait()


async def control_of(demo: Service) -> str:
    """Where the demo says that things can be made to happen."""
    assert demo.process.stdout is not None
    async with asyncio.timeout(GUARD_SECONDS):
        while line := (await demo.process.stdout.readline()).decode():
            if found := re.search(r"curl (http://\S+)/ tells", line):
                return found[1]
    raise AssertionError("the demo tells no address")


async def make_happen(control: str, action: str) -> None:
    """Ask the demo for something, and wait until it has happened."""
    async with (
        asyncio.timeout(GUARD_SECONDS),
        aiohttp.ClientSession() as session,
        session.post(f"{control}/{action}") as answer,
    ):
        assert answer.status == 200, await answer.text()


def identities(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The series' labels, in a fixed order."""
    return sorted((one["metric"] for one in found), key=lambda one: sorted(one.items()))


async def test_series_end_with_their_pod_and_come_back_with_the_next(
    tool: Callable[[str], str], tmp_path: Path
) -> None:
    add = "add-pod?pod=mine&gpu=3"
    async with running("demo", EVERY) as demo:
        control = await control_of(demo)
        # The card is free once the pod that only keeps it has gone.
        await make_happen(control, "delete-pod?namespace=platform&pod=reserved-idle&grace=0")
        await make_happen(control, add)
        async with prometheus(tool("prometheus"), demo.url, tmp_path / "prometheus") as server:
            await server.until(f"count(node_gpu_memory_usage_bytes{MINE})", 1)
            requests = await server.select(f"node_gpu_core_request{MINE}")
            first = identities(requests)
            assert len(first) == 1
            assert first[0]["gpu"] == "3"
            assert await server.value("count(node_gpu_up == 1)") == CARDS

            await make_happen(control, "delete-pod?pod=mine&grace=0")
            await demo.until(lambda page: 'pod="mine"' not in page.text)
            await server.scraped_anew()
            # Without staleness, five minutes of the last value would follow.
            assert await server.select(MINE) == []
            assert await server.value("count(node_gpu_up == 1)") == CARDS
            assert await server.value('count(node_gpu_power_watts{gpu="3"})') == 1

            await make_happen(control, add)
            await server.until(f"count(node_gpu_core_request{MINE})", 1)
            assert identities(await server.select(f"node_gpu_core_request{MINE}")) == first


async def test_the_demos_page_is_clean(tool: Callable[[str], str]) -> None:
    async with running("demo", NATIVE) as demo:
        await demo.ready()
        page = await demo.until(lambda page: len(page.rows("node_gpu_core_usage")) > 0)
    names = {one.name for one in page.samples}
    assert {"node_gpu_up", "node_gpu_core_request", "process_open_fds"} <= names
    assert findings(tool("promtool"), page.text.encode()) == []
