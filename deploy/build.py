"""Makes the files under deploy/ that follow from others: each is committed, and checked in tests.

`python deploy/build.py` writes them: the chart's copies of rules and dashboards, the part of its
schema about settings, the plain manifests and the example scrape configuration.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from qgpu_exporter import config

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "qgpu-exporter"
MANIFESTS = ROOT / "deploy" / "manifests"
SCHEMA = CHART / "values.schema.json"
NAMESPACE = "qgpu-exporter"

CHART_OWNED = frozenset(
    {
        "web.listen-address",
        "web.probe-address",
        "web.config.file",
        "node-name",
        "devices.backend",
        "devices.simulation",
        "devices.kmsg",
        "devices.xid-classes",
        "kubelet.socket",
        "kubernetes.pods",
        "kubernetes.kubeconfig",
        "dcgm.collectors",
        "path.procfs",
        "path.sysfs",
        "path.kmsg",
        "path.validations",
        "path.cdi",
    }
)
"""Settings that follow from other values of the chart, so that values.settings has them not."""

MANIFEST_SETS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "prometheus-operator": ("serviceMonitor.enabled=true", "prometheusRule.enabled=true"),
}
"""Folder under deploy/manifests -> values; a folder has only what the first one has not, since a
kustomization may not refer to the one around it."""

_DURATION = r"^(0|off|([0-9]+(y|w|d|h|m|s|ms))+)$"
_HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/instance")


# --------------------------------------------------------------------------- the chart's files


def chart_files() -> dict[Path, str]:
    """What the chart needs of other folders, since helm reads nothing outside of it."""
    files = {}
    for path in [ROOT / "alerts" / "values.yaml", *(ROOT / "alerts" / "templates").glob("*.yml")]:
        files[CHART / "files" / "alerts" / path.name] = path.read_text()
    for path in (ROOT / "dashboards").glob("*.json"):
        # Without blanks: all dashboards are in the release's one Secret, which holds 1 MiB.
        text = json.dumps(json.loads(path.read_text()), separators=(",", ":"), ensure_ascii=False)
        files[CHART / "files" / "dashboards" / path.name] = text + "\n"
    return files


def settings_schema() -> dict[str, Any]:
    """JSON schema of values.settings, from the exporter's own settings."""
    root: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for _, option in config.options():
        if option.flag in CHART_OWNED:
            continue
        node = root
        *groups, name = option.flag.split(".")
        for group in groups:
            empty = {"type": "object", "additionalProperties": False, "properties": {}}
            node = node["properties"].setdefault(group, empty)
        node["properties"][name] = {"description": option.help, **_value_schema(option)}
    return root


def _value_schema(option: config.Option[Any]) -> dict[str, Any]:
    """What a value may be: only forms that the exporter's own parser takes too."""
    if option.is_switch:
        return {"type": "boolean"}
    if option.repeatable:
        return {"type": "array", "items": {"type": "string"}}
    if "|" in option.metavar:
        return {"enum": option.metavar.split("|")}
    by_metavar: dict[str, dict[str, Any]] = {
        "DURATION": {"type": "string", "pattern": _DURATION},
        "SIZE": {"type": "string", "pattern": "^[0-9]+(B|KiB|MiB|GiB|kB|MB|GB)?$"},
        "N": {"type": "integer", "minimum": 1},
        "PATH": {"type": "string", "pattern": "^/"},
        "LIST": {"type": "string", "pattern": "^(native|dcgm|tke)( *, *(native|dcgm|tke))*$"},
    }
    return by_metavar.get(option.metavar, {"type": "string"})


def schema() -> dict[Path, str]:
    """The chart's schema with the settings' part made anew."""
    whole = json.loads(SCHEMA.read_text())
    whole["properties"]["settings"] = settings_schema()
    return {SCHEMA: json.dumps(whole, indent=2, ensure_ascii=False) + "\n"}


# --------------------------------------------------------------------------- manifests


def rendered(helm: str, *sets: str) -> list[dict[str, Any]]:
    """The chart's objects with its default values and `sets`, without what only Helm needs."""
    command = [helm, "template", "qgpu-exporter", str(CHART), "--namespace", NAMESPACE]
    command += ["--skip-tests", *(f"--set={one}" for one in sets)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    objects = [one for one in yaml.safe_load_all(output) if one]
    for labels in (found for one in objects for found in _label_maps(one)):
        for label in _HELM_LABELS:
            labels.pop(label, None)
    return objects


def _label_maps(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            if key in ("labels", "matchLabels", "selector") and isinstance(child, dict):
                yield child
            yield from _label_maps(child)
    elif isinstance(value, list):
        for child in value:
            yield from _label_maps(child)


def manifests(helm: str) -> dict[Path, str]:
    """The plain manifests: a folder of objects and a kustomization for each set of values."""
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": NAMESPACE,
            # Host paths are mounted, which the stricter levels refuse.
            "labels": {"pod-security.kubernetes.io/enforce": "privileged"},
        },
    }
    core = [namespace, *rendered(helm)]
    files: dict[Path, str] = {}
    for folder, sets in MANIFEST_SETS.items():
        objects = [one for one in rendered(helm, *sets) if one not in core] if sets else core
        names = []
        for one in objects:
            name = f"{one['kind'].lower()}.yaml"
            names.append(name)
            files[MANIFESTS / folder / name] = _yaml(one)
        kustomization: dict[str, Any] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
        }
        if not folder:
            kustomization["images"] = [{"name": "qgpu-exporter", "newTag": _version()}]
        kustomization["resources"] = names
        files[MANIFESTS / folder / "kustomization.yaml"] = _yaml(kustomization)
    return files


def _version() -> str:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    return str(version)


def _yaml(value: object) -> str:
    head = "# Made by deploy/build.py from the chart.\n"
    return head + yaml.safe_dump(value, sort_keys=False, width=100)


# --------------------------------------------------------------------------- scrape configuration


def relabelings(monitor: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The relabelings of a ServiceMonitor's first endpoint as Prometheus itself spells them."""
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    endpoint = monitor["spec"]["endpoints"][0]
    return [
        {names.get(key, key): value for key, value in one.items()}
        for one in endpoint["relabelings"]
    ]


def scrape_config(helm: str) -> dict[Path, str]:
    """What the Prometheus Operator would make of the ServiceMonitor, for who has no operator."""
    (monitor,) = (
        one
        for one in rendered(helm, "serviceMonitor.enabled=true")
        if one["kind"] == "ServiceMonitor"
    )
    endpoint = monitor["spec"]["endpoints"][0]
    keep = [
        {
            "source_labels": ["__meta_kubernetes_pod_label_app_kubernetes_io_name"],
            "regex": "qgpu-exporter",
            "action": "keep",
        },
        {
            "source_labels": ["__meta_kubernetes_pod_container_port_name"],
            "regex": endpoint["port"],
            "action": "keep",
        },
    ]
    job = {
        "job_name": "qgpu-exporter",
        "honor_labels": endpoint["honorLabels"],
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["scrapeTimeout"],
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [NAMESPACE]}}],
        "relabel_configs": [*keep, *relabelings(monitor)],
    }
    bare = {
        "job_name": "qgpu-exporter-bare-metal",
        "honor_labels": True,
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["scrapeTimeout"],
        "static_configs": [{"targets": ["gpu-node-a.example.com:5678"]}],
    }
    path = ROOT / "deploy" / "examples" / "scrape-config.yml"
    return {path: _yaml({"scrape_configs": [job, bare]})}


# --------------------------------------------------------------------------- writing


def made(helm: str) -> dict[Path, str]:
    """Every made file with its text.  Copies and schema come first, since the rest needs them."""
    return {**chart_files(), **schema(), **manifests(helm), **scrape_config(helm)}


def stray(files: Mapping[Path, str]) -> list[Path]:
    """Files in the folders that are made as a whole, and are not made."""
    folders = (CHART / "files", MANIFESTS)
    found = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if path not in files)


def main() -> int:
    """Write what is made and remove what is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--helm", default="helm", help="the helm program")
    helm = parser.parse_args().helm
    for path, text in {**chart_files(), **schema()}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    files = made(helm)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in stray(files):
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
