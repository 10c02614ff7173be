"""The exporter with the chart's role, or less: an API server refuses what it does not name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chart import charts
from tests.chart.charts import Tool, objects, template
from tests.integration.services import Cluster, Page, cluster, running

FLAGS = ["--interval=1s", "--devices.backend=simulated"]


def granted(tool: Tool, *sets: str) -> set[tuple[str, str]]:
    """(resource, verb) of the rendered role."""
    found = objects(template(tool, sets=sets))
    return {(resource, verb) for _, resource, verb in charts.rules(found)}


def restrict(node: Cluster, rights: set[tuple[str, str]]) -> None:
    """Let the API server refuse what the role does not name."""
    node.api.allowed = {resource for resource, _ in rights}


def asked(node: Cluster) -> set[tuple[str, str]]:
    """(resource, verb) of what the exporter has asked for; discovery is everybody's right."""
    return {(one.resource, one.verb) for one in node.api.requests if one.verb != "discovery"}


def shows_the_share(page: Page) -> bool:
    return page.value("node_gpu_core_request", pod="p1", gpu="0") == 50.0


@pytest.mark.parametrize(
    ("sets", "flags", "sources"),
    [
        ((), ("--kubernetes.dra=off",), {"kubernetes", "node"}),
        (
            ("settings.kubernetes.dra=auto",),
            ("--kubernetes.dra=auto",),
            {"kubernetes", "node", "resourceslices"},
        ),
        (
            ("settings.kubernetes.gpu-objects=true",),
            ("--kubernetes.dra=off", "--kubernetes.gpu-objects"),
            {"kubernetes", "node", "elasticgpu"},
        ),
    ],
)
async def test_the_role_is_enough_and_all_of_it_is_used(
    tool: Tool,
    tmp_path: Path,
    sets: tuple[str, ...],
    flags: tuple[str, ...],
    sources: set[str],
) -> None:
    rights = granted(tool, *sets)
    async with cluster(tmp_path) as node:
        restrict(node, rights)
        node.share("p1", 0, core=50, memory=4)
        async with running(*node.flags(), *FLAGS, *flags) as service:
            page = await service.until(
                lambda page: shows_the_share(page) and all(page.up(one) == 1 for one in sources)
            )
            await service.until(
                lambda _: (
                    {one for one, verb in asked(node) if verb == "watch"}
                    == {resource for resource, _ in rights}
                )
            )
    known = page.by("source", "qgpu_exporter_source_up")
    assert {name for name, value in known.items() if value} >= sources
    assert asked(node) <= rights
    assert {resource for resource, _ in asked(node)} == {resource for resource, _ in rights}


async def test_without_the_right_to_nodes_only_the_node_s_facts_are_missing(
    tool: Tool, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as node:
        restrict(node, {one for one in granted(tool) if one[0] != "nodes"})
        node.whole("p1", ["GPU-00000000-0000-4000-8000-000000000001"])
        async with running(*node.flags(), *FLAGS, "--kubernetes.dra=off") as service:
            page = await service.until(
                lambda page: page.up("node") == 0 and page.up("kubernetes") == 1
            )
            assert page.rows("node_gpu_up")
            assert page.value(
                "qgpu_exporter_source_failures_total", source="node", reason="forbidden"
            )
            complaints = [line for line in service.complaints() if "nodes" in line]
    assert len(complaints) == 1
    assert "ClusterRole" in complaints[0]


async def test_without_any_right_the_cards_are_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as node:
        restrict(node, set())
        node.share("p1", 0, core=50, memory=4)
        async with running(*node.flags(), *FLAGS) as service:
            page = await service.until(
                lambda page: page.up("kubernetes") == 0 and bool(page.rows("node_gpu_up"))
            )
    assert page.rows("node_gpu_core_request") == []
    assert page.up("podresources") == 1
