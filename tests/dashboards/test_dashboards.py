"""The dashboards' JSON: up to date, sound in structure, and naming only what is there."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import build
from dashboards.panels import NOTHING, UIDS, VARIABLES
from tests import promql

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "dashboards").glob("*.json"))
FOREIGN = {
    "process_resident_memory_bytes",
    "scrape_duration_seconds",
    "scrape_samples_scraped",
}
"""What Prometheus and its client library give beside our tables."""


def _recorded() -> set[str]:
    rules = itertools.chain.from_iterable(
        group["rules"]
        for path in (ROOT / "alerts").glob("*.rules.yml")
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    )
    return {rule["record"] for rule in rules if "record" in rule}


RECORDED = _recorded()
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FILES
}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something, without the rows between them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def _each_panel() -> Iterator[Any]:
    for uid, dashboard in DASHBOARDS.items():
        for panel in panels(dashboard):
            yield pytest.param(panel, id=f"{uid}: {panel['title']}")


PANELS = list(_each_panel())
SINGLE = {"qgpu-shares": {"node", "gpu"}, "qgpu-node": {"node"}}
"""Variables of which one value is chosen, since a graph of all of them could not be read."""


def test_files_are_up_to_date() -> None:
    made = build.dashboards()
    assert {path.name for path in FILES} == made.keys()
    for path in FILES:
        assert path.read_text(encoding="utf-8") == made[path.name], "run python -m dashboards.build"


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_dashboards_can_be_imported_as_they_are(uid: str) -> None:
    dashboard = DASHBOARDS[uid]
    assert dashboard["uid"] == uid
    assert dashboard["schemaVersion"] >= 36
    assert dashboard.keys().isdisjoint({"__inputs", "__requires", "id"})
    assert "DS_PROMETHEUS" not in json.dumps(dashboard)
    assert dashboard["description"]


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_panels_have_unique_numbers_and_do_not_overlap(uid: str) -> None:
    everything = DASHBOARDS[uid]["panels"]
    numbers = [panel["id"] for panel in everything]
    assert len(set(numbers)) == len(numbers)
    titles = [panel["title"] for panel in panels(DASHBOARDS[uid])]
    assert len(set(titles)) == len(titles)
    cells: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        assert place["w"] >= 1
        assert place["x"] + place["w"] <= 24
        mine = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & mine, panel["title"]
        cells |= mine
    height = max(y for _, y in cells) + 1
    assert cells == set(itertools.product(range(24), range(height))), "a gap"


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_variables(uid: str) -> None:
    variables = {one["name"]: one for one in DASHBOARDS[uid]["templating"]["list"]}
    assert list(variables) == ["datasource", *VARIABLES]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for name in VARIABLES:
        variable = variables[name]
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        if name in SINGLE.get(uid, ()):
            assert not variable.get("includeAll")
        else:
            # Also series without the label, as where there is one cluster alone.
            assert (variable["includeAll"], variable["allValue"]) == (True, ".*")
            assert variable["current"]["value"] == "$__all"


@pytest.mark.parametrize("panel", PANELS)
def test_panels_say_what_they_show(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["noValue"]
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["options"]
    assert panel["targets"]
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)
    for target in panel["targets"]:
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        if panel["type"] == "table":
            assert (target["format"], target["instant"]) == ("table", True)
        else:
            assert target["legendFormat"]
    if panel["type"] == "timeseries":
        assert panel["options"]["legend"]["showLegend"] is True


@pytest.mark.parametrize("panel", PANELS)
def test_numbers_and_bars_are_of_now(panel: dict[str, Any]) -> None:
    """Over a time, the last value of an exporter that is gone would look like the present one."""
    if panel["type"] in {"stat", "bargauge"}:
        for target in panel["targets"]:
            assert target["instant"] is True
            assert not target.get("range")
            assert target.get("format") != "table"


@pytest.mark.parametrize("panel", PANELS)
def test_colours_are_of_states(panel: dict[str, Any]) -> None:
    """A number that is neither good nor bad has no colour of either."""
    if panel["type"] == "stat":
        steps = [step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert steps in (["text"], ["green", "red"])


@pytest.mark.parametrize(
    ("uid", "panel"),
    [
        pytest.param(uid, panel, id=f"{uid}: {panel['title']}")
        for uid, dashboard in DASHBOARDS.items()
        if "node" not in SINGLE.get(uid, ())
        for panel in panels(dashboard)
        if panel["type"] != "table"
    ],
)
def test_a_hundred_nodes_are_no_hundred_lines(uid: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        if re.search(r"\{\{(?!cluster|resource)", target["legendFormat"]):
            assert re.search(r"\b(?:top|bottom)k\((?:\d+), ", target["expr"]), uid


@pytest.mark.parametrize("panel", PANELS)
def test_an_empty_table_says_why_and_an_empty_cell_is_short(panel: dict[str, Any]) -> None:
    if panel["type"] == "table":
        assert len(panel["fieldConfig"]["defaults"]["noValue"]) > 10
        named = set(panel["transformations"][1]["options"]["renameByName"].values())
        cells = {
            override["matcher"]["options"]: item["value"]
            for override in panel["fieldConfig"]["overrides"]
            for item in override["properties"]
            if item["id"] == "noValue"
        }
        assert cells.keys() == named
        assert set(cells.values()) <= {"-", "none", "not offered", "not known"}


@pytest.mark.parametrize("panel", PANELS)
def test_expressions_name_only_what_is_there(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression = re.sub(r"\bNaN\b", "1", target["expr"])
        complaints = promql.complaints(expression, RECORDED | FOREIGN)
        assert complaints == []
        for metric, label in promql.matched_labels(expression):
            assert label not in {"job", "instance"}, (metric, label)
        assert "exported_" not in expression


@pytest.mark.parametrize("panel", PANELS)
def test_expressions_keep_the_cluster(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for clause in re.findall(r"\b(?:by|on) \(([^)]*)\)", target["expr"]):
            labels = clause.split(", ")
            assert labels[0] == "cluster" or "alertname" in labels, target["expr"]


@pytest.mark.parametrize("panel", PANELS)
def test_not_offered_differs_from_not_scraped(panel: dict[str, Any]) -> None:
    """A zero in place of nothing is allowed for counts of events, joined with what lives."""
    for target in panel["targets"]:
        assert "vector(" not in target["expr"]
        for alternative in re.findall(r"\bor (0 \* .*)", target["expr"]):
            assert re.fullmatch(
                r"0 \* count\((?:node_gpu_cards|qgpu_exporter_build_info)(?:\{[^}]*\})?\)",
                alternative,
            )
    readings = [
        target for target in panel["targets"] if "not offered" in target.get("legendFormat", "")
    ]
    for target in readings:
        assert "node_gpu_up" in target["expr"]
        assert panel["fieldConfig"]["defaults"]["noValue"] == NOTHING


@pytest.mark.parametrize("panel", PANELS)
def test_links_keep_only_labels_that_a_line_has(panel: dict[str, Any]) -> None:
    """A label that is not there would be sent as the text of its placeholder."""
    linkless = {
        override["matcher"]["options"]
        for override in panel["fieldConfig"]["overrides"]
        if {"id": "links", "value": []} in override["properties"]
    }
    for link in panel["fieldConfig"]["defaults"].get("links", ()):
        for label in re.findall(r"\$\{__field\.labels\.(\w+)\}", link["url"]):
            for target in panel["targets"]:
                if target["legendFormat"] not in linkless:
                    assert f"{{{{{label}}}}}" in target["legendFormat"], label


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_links_keep_node_card_and_pod(uid: str) -> None:
    dashboard = DASHBOARDS[uid]
    assert {link["url"] for link in dashboard["links"]} == {
        f"/d/{other}" for other in UIDS if other != uid
    }
    for link in dashboard["links"]:
        assert (link["includeVars"], link["keepTime"]) == (True, True)
    text = json.dumps(panels(dashboard))
    addresses = re.findall(r'"url": "(/d/[^"]*)"', text)
    assert addresses
    for address in addresses:
        target, _, query = address.partition("?")
        assert target.removeprefix("/d/") in UIDS
        assert "${__url_time_range}" in query
        assert "${datasource:queryparam}" in query
        for name in VARIABLES:
            assert f"${{{name}:queryparam}}" in query or f"&var-{name}=${{__" in query
