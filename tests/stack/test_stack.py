"""Every expression of every panel, rule, variable and runbook on a real Prometheus; real alerts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.stack import panels
from tests.stack.ask import ask
from tests.stack.processes import wait_for
from tests.stack.receiver import Receiver
from tests.stack.stack import ALERTS, CLUSTER, NODE, ROOT, Stack

pytestmark = pytest.mark.xdist_group("prometheus")

FAST = {
    "exporterDownFor": "1s",
    "cardDownFor": "1s",
    "recoveryActionFor": "1s",
    "xidSeconds": "12",
    "idleOver": "5s",
    "idleFor": "3s",
    "rememberFor": "1h",
}
CARDS = 8

LIMITS = {
    "percent": (0.0, 100.0 * CARDS),
    "percentunit": (0.0, 5.0),
    "celsius": (10.0, 120.0),
    "watt": (1.0, 1000.0 * CARDS),
    "bytes": (0.0, 1e12),
    "Bps": (0.0, 1e12),
    "hertz": (1e8, 1e10),
    "s": (0.0, 3600.0 * CARDS),
    "none": (0.0, 10_000.0),
}

EMPTY = {
    # Nothing is wrong yet.
    "qgpu-fleet: Cards that do not answer A",
    "qgpu-node: Recovery and reasons A",
    "qgpu-node: Recovery and reasons B",
    "qgpu-node: XIDs A",
    "qgpu-node: XIDs B",
    "qgpu-workloads: Use without an allocation A",
    "qgpu-fleet: Cards with the most XIDs A",
    # The simulated cards have no fans, no retired pages and no CDI files.
    "qgpu-node: Fan A",
    "qgpu-node: Remapped rows and retired pages B",
    "qgpu-node: Software of the node A",
    "qgpu-node: Software of the node B",
    # All of them offer these.
    "qgpu-fleet: Power C",
    "qgpu-node: Memory used C",
    "qgpu-node: Temperature C",
    "qgpu-node: Power C",
    "qgpu-node: SM clock B",
    "qgpu-node: Part of the time that clocks were held down B",
    "qgpu-node: Memory errors C",
    "qgpu-node: PCIe traffic C",
    "qgpu-node: PCIe link, of its maximum C",
    "qgpu-node: PCIe packets sent again B",
}
EITHER = {
    "qgpu-workloads: Conflicts and problems A",
    "qgpu-exporter: Failures A",
    "qgpu-exporter: Readers replaced in an hour A",
    "qgpu-exporter: Scrapes and lost series B",
    "qgpu-exporter: Problems with allocations A",
}
"""On a slow machine something may have failed once, or a new pod's card is not known yet."""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, values=FAST, webhook=receiver.url) as running:
        # Rates, and rules over rules, need a few rounds.
        wait_for(
            lambda: running.query(
                "count_over_time(namespace:node_gpu_core_efficiency:ratio[1h]) > 8"
            )
        )
        yield running


# --------------------------------------------------------------------------- expressions


def _unit(panel: dict[str, Any], reference: str) -> str:
    """The unit of a target's values: a table has one for each column."""
    if panel["type"] != "table":
        unit: str = panel["fieldConfig"]["defaults"]["unit"]
        return unit
    names = panel["transformations"][1]["options"]["renameByName"]
    column = names.get(f"Value #{reference}") or names.get("Value")
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == column:
            for item in override["properties"]:
                if item["id"] == "unit":
                    return str(item["value"])
    return "none"


def test_every_panel_has_data_of_its_unit(stack: Stack) -> None:
    empty: set[str] = set()
    wrong: list[tuple[str, float]] = []
    for name, panel, target, uid in panels.targets():
        result = stack.query(panels.fill(target["expr"], uid))
        values = [float(row["value"][1]) for row in result]
        if not values:
            empty.add(name)
        if "not offered" in target.get("legendFormat", ""):
            assert all(math.isnan(value) for value in values), name
            continue
        low, high = LIMITS.get(_unit(panel, target["refId"]), (1.7e12, 2.2e12))
        wrong += [(name, value) for value in values if not low <= value <= high]
    assert wrong == []
    assert empty - EITHER == EMPTY


def _readings(stack: Stack, title: str) -> tuple[set[str], set[str]]:
    """The cards that a graph has values for, and those it says do not offer the reading."""
    found: list[set[str]] = [set(), set()]
    for name, _, target, uid in panels.targets():
        if name.startswith(f"qgpu-node: {title} "):
            absent = "not offered" in target["legendFormat"]
            rows = stack.query(panels.fill(target["expr"], uid))
            found[absent] |= {row["metric"]["gpu"] for row in rows}
    return found[0], found[1]


def test_a_reading_that_is_not_offered_names_the_card(stack: Stack) -> None:
    cards = {str(index) for index in range(CARDS)}
    assert _readings(stack, "Busy") == (cards - {"4"}, {"4"})  # in MIG mode
    assert _readings(stack, "Fan") == (set(), cards)
    assert _readings(stack, "Tensor pipes") == ({"4", "5", "6", "7"}, {"0", "1", "2", "3"})


def test_every_rule_is_evaluated(stack: Stack) -> None:
    _, answer = ask(stack.prometheus_port, "/api/v1/rules")
    rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    written = [
        rule
        for path in ALERTS.glob("*.rules.yml")
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]
    assert len(rules) == len(written)
    for rule in written:
        if "record" in rule:
            assert stack.query(rule["record"]), rule["record"]


def test_variables_have_values(stack: Stack) -> None:
    dashboard = json.loads((ROOT / "dashboards/qgpu-node.json").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for variable in dashboard["templating"]["list"]:
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", str(variable["query"]))
        if match:
            rows = stack.query(f"count by ({match[2]}) ({panels.fill(match[1])})")
            found[variable["name"]] = sorted(row["metric"][match[2]] for row in rows)
    assert found["cluster"] == [CLUSTER]
    assert found["node"] == [NODE]
    assert found["gpu"] == [str(index) for index in range(CARDS)]
    assert found["namespace"] == ["batch", "chat", "platform", "research"]
    assert "chat-a" in found["pod"]


def test_expressions_of_runbooks_are_taken(stack: Stack) -> None:
    names = {"$NODE": NODE, "$GPU": "0", "$NS": "chat", "$POD": "chat-a", "$JOB": "qgpu-exporter"}
    names |= {"$SOURCE": "nvml"}
    for path in sorted((ROOT / "docs/runbooks").glob("*.md")):
        for block in re.findall(
            r"```promql\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL
        ):
            for line in block.splitlines():
                for name, value in names.items():
                    line = line.replace(name, value)
                stack.query(line)


def test_a_shared_card_counts_once_in_published_dashboards(stack: Stack) -> None:
    """Queries of Grafana's dashboard 12239, whose sums a copy for each sharer would multiply."""
    (cards,) = stack.query("count(DCGM_FI_DEV_GPU_TEMP)")
    assert cards["value"][1] == str(CARDS)
    rows = stack.query("count by (gpu) (DCGM_FI_DEV_GPU_TEMP)")
    assert sorted(row["metric"]["gpu"] for row in rows) == [str(index) for index in range(CARDS)]
    powers = stack.query('sum(DCGM_FI_DEV_POWER_USAGE{gpu=~".*"}) / sum(node_gpu_power_watts) ')
    assert float(powers[0]["value"][1]) == pytest.approx(1.0, abs=0.01)


# --------------------------------------------------------------------------- alerts


def _arrives(receiver: Receiver, status: str, **labels: str) -> dict[str, Any]:
    return wait_for(lambda: receiver.find(status, cluster=CLUSTER, node=NODE, **labels))


def test_an_idle_reservation_is_told_and_resolves(stack: Stack, receiver: Receiver) -> None:
    labels = {"alertname": "GpuReservationIdle", "pod": "reserved-idle"}
    alert = _arrives(receiver, "firing", **labels)
    assert alert["receiver"] == "quiet"
    assert alert["labels"] == labels | {
        "cluster": CLUSTER,
        "node": NODE,
        "gpu": "3",
        "namespace": "platform",
        "container": "main",
        "severity": "info",
    }
    assert alert["annotations"]["summary"] == (
        f"platform/reserved-idle (main) holds a share of GPU 3 on node {NODE} and does not use it."
    )
    stack.control("delete-pod?pod=reserved-idle&namespace=platform&grace=0")
    _arrives(receiver, "resolved", **labels)


def test_an_xid_pages_and_clears_by_itself(stack: Stack, receiver: Receiver) -> None:
    stack.control("xid?gpu=1&xid=31")
    stack.control("xid?gpu=1&xid=48")
    labels = {"alertname": "GpuXidCritical", "gpu": "1", "xid": "48"}
    alert = _arrives(receiver, "firing", **labels)
    assert alert["receiver"] == "page"
    assert alert["labels"]["action"] == "workflow_xid_48"
    assert alert["annotations"]["runbook_url"].endswith("/GpuXidCritical.md")
    _arrives(receiver, "resolved", **labels)
    assert receiver.find("firing", alertname="GpuXidCritical", xid="31") is None


def test_a_lost_card_pages_once_and_resolves(stack: Stack, receiver: Receiver) -> None:
    stack.control("lose-card?gpu=6")
    labels = {"alertname": "GpuDown", "gpu": "6"}
    alert = _arrives(receiver, "firing", **labels)
    assert alert["receiver"] == "page"
    assert alert["annotations"]["summary"] == f"GPU 6 of node {NODE} does not answer (lost)."
    assert alert["annotations"]["description"].endswith("Held by research/llm-train-0.")
    stack.control("recover")
    _arrives(receiver, "resolved", **labels)


def test_a_lost_driver_is_told(stack: Stack) -> None:
    stack.control("driver?reason=driver_not_loaded")
    alert = wait_for(lambda: stack.query('ALERTS{alertname="GpuDataMissing"}'))
    assert alert[0]["metric"]["node"] == NODE
    stack.control("recover")
    wait_for(lambda: not stack.query('ALERTS{alertname="GpuDataMissing"}'))


def test_an_exporter_that_is_gone_is_told_and_leaves_panels_empty(
    stack: Stack, receiver: Receiver
) -> None:
    stack.end("demo")
    alert = _arrives(receiver, "firing", alertname="QgpuExporterDown")
    assert alert["receiver"] == "ticket"
    assert alert["annotations"]["summary"] == f"The GPU exporter on {NODE} cannot be scraped."
    for title in ("Busy", "Fan", "Tensor pipes"):
        # A rate still sees the last seconds for a moment.
        wait_for(lambda title=title: _readings(stack, title) == (set(), set()))  # type: ignore[misc] # a default binds the title, which mypy cannot infer


def test_prometheus_has_no_complaint(stack: Stack) -> None:
    text = stack.log("prometheus")
    assert not re.search(r"level=(?:error|warn).*(?:rule|scrape|duplicate|out of order)", text)
