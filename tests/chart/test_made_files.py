"""The files under deploy/ that are made from others are current, and kustomize takes them."""

from __future__ import annotations

import json
import subprocess

import jsonschema
import pytest

from deploy import build
from qgpu_exporter import config
from tests.chart import charts
from tests.chart.charts import Tool, objects, only, template
from tests.chart.test_rendering import KUBERNETES, OPERATOR_KINDS, validate


def test_made_files_are_current(tool: Tool) -> None:
    made = build.made(tool("helm"))
    stale = [
        str(path) for path, text in made.items() if not path.is_file() or path.read_text() != text
    ]
    assert stale == [], "run `make chart`"
    assert build.stray(made) == [], "run `make chart`"


def kustomized(tool: Tool, folder: str) -> list[charts.Object]:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(build.MANIFESTS / folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return objects(done.stdout)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_manifests(tool: Tool, version: str) -> None:
    found = kustomized(tool, "")
    assert sorted(one["kind"] for one in found) == [
        "ClusterRole",
        "ClusterRoleBinding",
        "DaemonSet",
        "Namespace",
        "Service",
        "ServiceAccount",
    ]
    for one in found:
        validate(one, version)


def test_manifests_do_what_the_chart_does(tool: Tool) -> None:
    plain = only(kustomized(tool, ""), "DaemonSet")["spec"]["template"]["spec"]
    chart = only(objects(template(tool)), "DaemonSet")["spec"]["template"]["spec"]
    # Only the release's name differs.
    assert plain["containers"] == chart["containers"]
    assert plain["volumes"] == chart["volumes"]


def test_the_operator_s_manifests_select_the_service(tool: Tool) -> None:
    found = kustomized(tool, "prometheus-operator")
    assert {one["kind"] for one in found} <= set(OPERATOR_KINDS)
    wanted = only(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    labels = only(kustomized(tool, ""), "Service")["metadata"]["labels"]
    assert wanted.items() <= labels.items()


def test_every_setting_is_the_chart_s_or_a_value() -> None:
    schema = json.loads(build.SCHEMA.read_text())["properties"]["settings"]
    in_schema: set[str] = set()

    def collect(node: dict[str, object], prefix: str) -> None:
        properties = node["properties"]
        assert isinstance(properties, dict)
        for name, child in properties.items():
            if "properties" in child:
                collect(child, f"{prefix}{name}.")
            else:
                in_schema.add(prefix + name)

    collect(schema, "")
    flags = {option.flag for _, option in config.options()}
    assert in_schema | build.CHART_OWNED == flags
    assert not in_schema & build.CHART_OWNED


@pytest.mark.parametrize(
    ("flag", "value", "taken"),
    [
        ("devices.timeout", "1m30s", True),
        ("devices.timeout", "500ms", True),
        ("devices.timeout", "90", False),
        ("devices.timeout", "", False),
        ("devices.exit-after", "off", True),
        ("devices.max-memory", "300MiB", True),
        ("devices.max-memory", "300Mi", False),
        ("metrics.dialects", "native,tke", True),
        ("metrics.dialects", "native,", False),
        ("web.telemetry-path", "metrics", False),
    ],
)
def test_the_schema_and_the_exporter_agree(flag: str, value: str, taken: bool) -> None:
    schema = build.settings_schema()
    group, name = flag.split(".")
    if taken:
        jsonschema.validate({group: {name: value}}, schema)
        config.load({flag: [value]}, {})
    else:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({group: {name: value}}, schema)
        with pytest.raises(config.ConfigError):
            config.load({flag: [value]}, {})
