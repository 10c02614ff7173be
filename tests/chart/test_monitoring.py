"""What the chart gives the Prometheus Operator and Grafana: monitors, rules, dashboards."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from alerts import build as alerts
from tests.chart import charts
from tests.chart.charts import Tool, objects, only, template


@pytest.mark.parametrize(
    ("kind", "key", "flag"),
    [
        ("ServiceMonitor", "endpoints", "serviceMonitor.enabled=true"),
        ("PodMonitor", "podMetricsEndpoints", "podMonitor.enabled=true"),
    ],
)
def test_monitors_keep_the_series_own_labels(tool: Tool, kind: str, key: str, flag: str) -> None:
    (endpoint,) = only(objects(template(tool, sets=[flag])), kind)["spec"][key]
    assert endpoint == {
        "port": "metrics",
        "path": "/metrics",
        "scheme": "http",
        "interval": "15s",
        "scrapeTimeout": "10s",
        "honorLabels": True,
        "relabelings": [
            {
                "action": "replace",
                "sourceLabels": ["__meta_kubernetes_pod_node_name"],
                "targetLabel": "instance",
            },
            {
                "action": "replace",
                "sourceLabels": ["__meta_kubernetes_pod_node_name"],
                "targetLabel": "node",
            },
            {"action": "labeldrop", "regex": "pod|container|namespace|service|endpoint"},
        ],
    }


def test_a_monitor_speaks_tls(tool: Tool) -> None:
    (endpoint,) = only(objects(template(tool, "everything")), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["path"] == "/gpu"
    assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == "gpu-ca"
    assert endpoint["basicAuth"]["username"] == {"name": "gpu-scrape", "key": "username"}


def rule_groups(tool: Tool, *sets: str) -> list[dict[str, object]]:
    found = objects(template(tool, sets=["prometheusRule.enabled=true", *sets]))
    groups = only(found, "PrometheusRule")["spec"]["groups"]
    assert isinstance(groups, list)
    return groups


def test_rules_are_those_of_the_rule_files(tool: Tool) -> None:
    files = alerts.rule_files(alerts.load_values())
    wanted = [
        group
        for name in sorted(files)
        if name != "info.rules.yml"
        for group in yaml.safe_load(files[name])["groups"]
    ]
    assert rule_groups(tool) == wanted
    informing = yaml.safe_load(files["info.rules.yml"])["groups"]
    with_info = rule_groups(tool, "prometheusRule.info=true")
    assert [group for group in with_info if group not in wanted] == informing


def test_rules_have_the_site_s_thresholds(tool: Tool) -> None:
    own = {"cardDownFor": "7m", "idleCorePercent": "3", "runbookBase": "https://wiki.example.com"}
    files = alerts.rule_files(alerts.load_values() | own)
    sets = [f"prometheusRule.values.{name}={value}" for name, value in own.items()]
    wanted = [
        group
        for name in sorted(files)
        if name != "info.rules.yml"
        for group in yaml.safe_load(files[name])["groups"]
    ]
    assert rule_groups(tool, *sets) == wanted


def test_promtool_takes_the_rules(tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": rule_groups(tool, "prometheusRule.info=true")}))
    done = subprocess.run(
        [tool("promtool"), "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboards_are_config_maps_for_the_sidecar(tool: Tool) -> None:
    found = [
        one
        for one in objects(template(tool, sets=["dashboards.enabled=true"]))
        if one["kind"] == "ConfigMap"
    ]
    shown = {name: json.loads(text) for one in found for name, text in one["data"].items()}
    sources = (charts.ROOT / "dashboards").glob("*.json")
    assert shown == {path.name: json.loads(path.read_text()) for path in sources}
    assert shown
    for one in found:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(one)) < 1 << 20  # what an object may hold
    assert len({one["metadata"]["name"] for one in found}) == len(found)
