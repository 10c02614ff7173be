"""The chart rendered with a case's values: objects, the exporter's command, and what Helm says."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qgpu_exporter import cli, config

Tool = Callable[[str], str]
Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "qgpu-exporter"
PRESETS = ROOT / "deploy" / "helm" / "values"
OWN = Path(__file__).parent / "values"
GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = "monitoring"

CASES: Mapping[str, Path] = {
    path.stem: path for folder in (OWN, PRESETS) for path in sorted(folder.glob("*.yaml"))
}
"""Every set of values that is rendered: the tests' own and those that the docs install with."""


class HelmError(Exception):
    """Helm refused; the text is what it said."""


def helm(tool: Tool, *arguments: str) -> str:
    """What helm prints; raises `HelmError`."""
    done = subprocess.run([tool("helm"), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HelmError(done.stderr + done.stdout)
    return done.stdout


def template(tool: Tool, case: str = "default", sets: Sequence[str] = ()) -> str:
    """The rendered chart as text."""
    return _template(tool, case, tuple(sets))


@cache
def _template(tool: Tool, case: str, sets: tuple[str, ...]) -> str:
    command = ["template", "gpus", str(CHART), "--namespace", NAMESPACE, "-f", str(CASES[case])]
    return helm(tool, *command, *(f"--set={one}" for one in sets))


def objects(text: str) -> list[Object]:
    """The objects of a rendering."""
    return [one for one in yaml.safe_load_all(text) if one]


def only(found: Sequence[Object], kind: str) -> Object:
    """The one object of a kind that is no part of `helm test`."""
    (one,) = (
        one
        for one in found
        if one["kind"] == kind and "helm.sh/hook" not in one["metadata"].get("annotations", {})
    )
    return one


def pod_specs(found: Sequence[Object]) -> Iterator[Object]:
    """The specs of all pods, those of `helm test` too."""
    for one in found:
        if one["kind"] == "DaemonSet":
            yield one["spec"]["template"]["spec"]
        elif one["kind"] == "Pod":
            yield one["spec"]


def exporter(found: Sequence[Object]) -> Object:
    """The exporter's container."""
    containers = only(found, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    (container,) = (one for one in containers if one["name"] == "exporter")
    assert isinstance(container, dict)
    return container


def settings(container: Object) -> config.Settings:
    """What the exporter makes of the container's arguments and environment."""
    given = cli.parser().parse_args(container["args"])
    flags = {
        option.flag: getattr(given, name)
        for name, option in config.options()
        if getattr(given, name) is not None
    }
    environment = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return config.load(flags, environment)


def rules(found: Sequence[Object]) -> set[tuple[str, str, str]]:
    """(API group, resource, verb) of everything that the role allows."""
    return {
        (group, resource, verb)
        for one in found
        if one["kind"] in ("ClusterRole", "Role")
        for rule in one["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
