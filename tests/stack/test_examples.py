"""The examples for autoscalers: their queries on a real Prometheus with the demo's pods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests import promql
from tests.stack.processes import wait_for
from tests.stack.stack import ROOT, Stack

pytestmark = pytest.mark.xdist_group("prometheus")

EXAMPLES = ROOT / "deploy" / "examples"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), values={}) as running:
        wait_for(lambda: running.query("rate(node_gpu_core_usage_seconds_total[10s]) > 0"))
        yield running


def _read(name: str) -> Any:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


def _adapter(rule: dict[str, Any], matchers: str) -> str:
    query: str = rule["metricsQuery"]
    return query.replace("<<.LabelMatchers>>", matchers).replace("<<.GroupBy>>", "pod")


def test_the_adapters_queries_give_percent_of_each_pod(stack: Stack) -> None:
    for rule in _read("prometheus-adapter.yml")["rules"]["custom"]:
        assert promql.complaints(rule["seriesQuery"], set()) == []
        query = _adapter(rule, 'namespace="chat",pod=~"chat-a|chat-b"')

        def found(query: str = query) -> dict[str, float] | None:
            """Means over two minutes, most of which had no data yet, begin near 0."""
            rows = stack.query(query)
            values = {row["metric"]["pod"]: float(row["value"][1]) for row in rows}
            return values if values and min(values.values()) > 1 else None

        values = wait_for(found)
        assert values.keys() == {"chat-a", "chat-b"}, rule["name"]
        assert max(values.values()) <= 100, (rule["name"], values)


def test_the_autoscaler_asks_for_what_the_adapter_offers() -> None:
    offered = {rule["name"]["as"] for rule in _read("prometheus-adapter.yml")["rules"]["custom"]}
    for metric in _read("horizontal-pod-autoscaler.yml")["spec"]["metrics"]:
        assert metric["pods"]["metric"]["name"] in offered


def test_kedas_query_gives_one_number(stack: Stack) -> None:
    (trigger,) = _read("keda.yml")["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert promql.complaints(query, set()) == []
    (row,) = stack.query(query.replace("inference-", "chat-"))
    # Two pods at 70 % to 100 % of their work, each in percent of its share.
    assert 2 < float(row["value"][1]) <= 200
    assert stack.query(query) == []
