"""A real Prometheus with the ServiceMonitor's relabelings: no card carries the exporter's pod."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy import build
from tests.chart.charts import Tool, objects, only, template
from tests.integration.services import GUARD_SECONDS, running
from tests.stack.processes import Running, free_port

pytestmark = pytest.mark.xdist_group("prometheus")

# What the Prometheus Operator gives every target of a ServiceMonitor.
TARGET = {
    "namespace": "monitoring",
    "pod": "qgpu-exporter-abcde",
    "container": "exporter",
    "service": "qgpu-exporter",
    "endpoint": "metrics",
    "__meta_kubernetes_pod_node_name": "gpu-node-a",
}


def job(name: str, target: str, relabelings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "job_name": name,
        "honor_labels": True,
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": [{"targets": [target], "labels": TARGET}],
        "relabel_configs": list(relabelings),
    }


@asynccontextmanager
async def prometheus(
    tool: Tool, folder: Path, jobs: Sequence[dict[str, Any]]
) -> AsyncIterator[str]:
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": list(jobs)}))
    address = f"127.0.0.1:{free_port()}"
    command = [tool("prometheus"), f"--config.file={config}", f"--web.listen-address={address}"]
    with Running([*command, f"--storage.tsdb.path={folder / 'data'}"], folder / "prometheus.log"):
        yield f"http://{address}"


async def series(api: str, query: str, wanted: int = 0) -> list[dict[str, str]]:
    """Labels of what a query finds, once it finds at least `wanted`."""
    async with asyncio.timeout(GUARD_SECONDS), aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(f"{api}/api/v1/query", params={"query": query}) as answer:
                    found = [one["metric"] for one in (await answer.json())["data"]["result"]]
            except (aiohttp.ClientError, KeyError):
                found = []
            if len(found) >= wanted:
                return found
            await asyncio.sleep(0.2)


CARD = '{__name__=~"(node_gpu|DCGM|qgpu_exporter)_.*"'


async def test_no_series_carries_the_exporter_s_own_pod(tool: Tool, tmp_path: Path) -> None:
    monitor = only(objects(template(tool, sets=["serviceMonitor.enabled=true"])), "ServiceMonitor")
    chart = build.relabelings(monitor)
    without_labeldrop = [one for one in chart if one["action"] != "labeldrop"]
    async with running("demo", "--interval=1s") as service:
        await service.until(lambda page: bool(page.rows("node_gpu_core_usage")))
        target = service.url.removeprefix("http://")
        jobs = [job("chart", target, chart), job("honour-only", target, without_labeldrop)]
        async with prometheus(tool, tmp_path, jobs) as api:
            # Pods' own labels arrive, and so do cards.
            requests = await series(api, 'node_gpu_core_request{job="chart"}', wanted=2)
            assert all(one["pod"] and one["pod"] != TARGET["pod"] for one in requests)
            cards = await series(api, 'node_gpu_up{job="chart"}', wanted=8)
            assert {tuple(sorted(one)) for one in cards} == {
                ("__name__", "gpu", "instance", "job", "node")
            }
            assert {one["instance"] for one in cards} == {"gpu-node-a"}
            for label in ("namespace", "pod", "container", "service", "endpoint"):
                query = f'{CARD},job="chart",{label}="{TARGET[label]}"}}'
                assert await series(api, query) == []
                assert await series(api, f'{{job="chart",{label}="{TARGET[label]}"}}') == []
            # What the labeldrop is for: with honor_labels alone each card has the exporter's pod.
            wrong = await series(api, 'node_gpu_up{job="honour-only"}', wanted=8)
            assert {one["pod"] for one in wrong} == {TARGET["pod"]}
