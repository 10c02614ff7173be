"""Several clusters, with and without the label, and two exporters of one node: nothing breaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.stack import panels
from tests.stack.ask import ask
from tests.stack.processes import wait_for
from tests.stack.stack import CLUSTER, NODE, Stack

pytestmark = pytest.mark.xdist_group("prometheus")

ALSO: tuple[Mapping[str, str], ...] = (
    {"cluster": "other", "node": NODE},
    # Another address in the same cluster, as while one exporter takes over from another.
    {"cluster": CLUSTER, "node": NODE, "instance": "second"},
    # A cluster that gives its name and no label of the target's node, and one that gives neither.
    {"cluster": "third"},
    {},
)
CLUSTERS = ("", CLUSTER, "other", "third")
CARDS = 8


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    values = {"cardDownFor": "1s"}
    with Stack(tmp_path_factory.mktemp("stack"), values=values, also=ALSO) as running:
        efficiency = "count_over_time(namespace:node_gpu_core_efficiency:ratio[1h]) > 3"
        wait_for(lambda: len(running.query(f"group by (cluster) ({efficiency})")) == len(CLUSTERS))
        yield running


def test_every_expression_and_rule_can_be_evaluated(stack: Stack) -> None:
    for _, _, target, uid in panels.targets():
        stack.query(panels.fill(target["expr"], uid))
    _, answer = ask(stack.prometheus_port, "/api/v1/rules")
    rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


def test_a_card_counts_once_in_each_cluster(stack: Stack) -> None:
    """Whoever scraped it: five targets are four nodes of one name."""
    found = {
        name: [row["value"][1] for row in stack.query(panels.fill(target["expr"]))]
        for name, _, target, _ in panels.targets()
        if name in {"qgpu-fleet: Nodes A", "qgpu-fleet: Cards A"}
    }
    assert found == {
        "qgpu-fleet: Nodes A": [str(len(CLUSTERS))],
        "qgpu-fleet: Cards A": [str(CARDS * len(CLUSTERS))],
    }
    recorded = 'sum by (cluster) (container:node_gpu_core_request:percent{pod="llm-train-0"})'
    assert [row["value"][1] for row in stack.query(recorded)] == ["200"] * len(CLUSTERS)


def test_a_lost_card_alerts_once_in_each_cluster(stack: Stack) -> None:
    stack.control("lose-card?gpu=6")

    def firing() -> list[dict[str, Any]] | None:
        found = stack.query('ALERTS{alertname="GpuDown",alertstate="firing"}')
        return found if len(found) >= len(CLUSTERS) else None

    alerts = wait_for(firing)
    assert sorted(row["metric"].get("cluster", "") for row in alerts) == list(CLUSTERS)
    assert {(row["metric"]["node"], row["metric"]["gpu"]) for row in alerts} == {(NODE, "6")}
