"""The rule files: up to date, tested by promtool, and naming only what is there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from qgpu_exporter import xids
from tests import promql

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "alerts"
RUNBOOKS = ROOT / "docs" / "runbooks"
UNIT_TESTS = sorted(Path(__file__).parent.glob("*.yml"))
SEVERITIES = {"critical", "warning", "info"}
SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mending")
RECORDED_UNITS = {"percent", "bytes", "ratio", "seconds1h", "bool", "count"}

Tool = Callable[[str], str]


def _build() -> ModuleType:
    """alerts/build.py is a script of its own folder, no module of a package."""
    specification = importlib.util.spec_from_file_location("alerts_build", ALERTS / "build.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = []
    for path in sorted(ALERTS.glob("*.rules.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            rules += group["rules"]
    return rules


RULES = _rules()
ALERTING = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --------------------------------------------------------------------------- the files


def test_rule_files_are_up_to_date() -> None:
    build = _build()
    for name, text in build.rule_files(build.load_values()).items():
        assert (ALERTS / name).read_text(encoding="utf-8") == text, f"run alerts/build.py ({name})"
    names = {path.name for path in ALERTS.glob("templates/*.rules.yml")}
    assert {path.name for path in ALERTS.glob("*.rules.yml")} == names


def test_every_value_is_used_and_every_place_has_one() -> None:
    build = _build()
    used: set[str] = set()
    for path in ALERTS.glob("templates/*.rules.yml"):
        used |= build.placeholders(path.read_text(encoding="utf-8"))
    assert used == build.load_values().keys()


def test_own_values_render_into_another_folder(tmp_path: Path, tool: Tool) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("xidSeconds: 1800\nrunbookBase: https://wiki.example.com/gpu\n")
    command = [sys.executable, str(ALERTS / "build.py")]
    _run([*command, "--values", str(own), "--output", str(tmp_path)])
    text = (tmp_path / "alerts.rules.yml").read_text()
    assert "< 1800" in text
    assert "runbook_url: 'https://wiki.example.com/gpu/GpuDown.md'" in text
    _run([tool("promtool"), "check", "rules", str(tmp_path / "alerts.rules.yml")])


def test_an_unknown_value_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("xidSecond: 1800\n")
    command = [sys.executable, str(ALERTS / "build.py")]
    done = subprocess.run(
        [*command, "--values", str(own), "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "no such value: xidSecond\n")


@pytest.mark.parametrize("path", sorted(ALERTS.glob("*.rules.yml")), ids=lambda path: path.name)
def test_promtool_takes_the_rules(path: Path, tool: Tool) -> None:
    _run([tool("promtool"), "check", "rules", str(path)])


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.name)
def test_promtool_unit_tests(path: Path, tool: Tool) -> None:
    _run([tool("promtool"), "test", "rules", str(path)])


def _minutes(text: str) -> int:
    """Minutes of promtool's ``1h5m``."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?", text)
    assert match is not None, text
    return 60 * int(match[1] or 0) + int(match[2] or 0)


def _checks(case: dict[str, Any]) -> dict[str, list[tuple[int, bool]]]:
    """(minute, whether it fires) in the order of time, by alert."""
    found: dict[str, list[tuple[int, bool]]] = {}
    for check in case["promql_expr_test"]:
        match = re.fullmatch(r'ALERTS\{alertname="(\w+)",alertstate="firing"\}', check["expr"])
        if match:
            at = (_minutes(check["eval_time"]), bool(check["exp_samples"]))
            found.setdefault(match[1], []).append(at)
    return {name: sorted(checks) for name, checks in found.items()}


def test_every_alert_is_seen_to_be_quiet_to_fire_and_to_clear() -> None:
    seen: set[str] = set()
    for path in UNIT_TESTS:
        for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for name, checks in _checks(case).items():
                fires = [fires for _, fires in checks]
                if True in fires and not fires[0] and not fires[-1]:
                    seen.add(name)
    assert sorted(ALERTING.keys() - seen) == []


# --------------------------------------------------------------------------- what they name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_name_only_what_is_there(rule: dict[str, Any]) -> None:
    assert promql.complaints(rule["expr"], RECORDED) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_fix_no_job_and_keep_the_cluster(rule: dict[str, Any]) -> None:
    labels = {label for _, label in promql.matched_labels(rule["expr"])}
    assert not labels & {"job", "instance", "cluster", "namespace", "pod"}
    for clause in re.findall(r"\bby \(([^)]*)\)", rule["expr"]):
        assert clause.startswith("cluster"), clause
    for clause in re.findall(r"\bon \(([^)]*)\)", rule["expr"]):
        assert clause.startswith("cluster"), clause


def test_the_sticky_gauge_is_not_used() -> None:
    for rule in RULES:
        assert "DCGM_" not in rule["expr"]
        assert "vector(0)" not in rule["expr"]


def test_recorded_names_end_in_their_unit() -> None:
    assert {name.rpartition(":")[2] for name in RECORDED} == RECORDED_UNITS
    for rule in RULES:
        if rule.get("record", "").endswith(":bytes"):
            names = promql.metric_names(rule["expr"])
            assert any(name.endswith("bytes") for name in names), rule["record"]


# --------------------------------------------------------------------------- alerts


@pytest.mark.parametrize("name", sorted(ALERTING))
def test_alerts_say_what_and_where(name: str) -> None:
    rule = ALERTING[name]
    base = _build().load_values()["runbookBase"]
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"{base}/{name}.md"
    kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
    labels = set(kept[1].split(", ")) if kept else set()
    for label in labels & {"node", "gpu", "namespace", "pod", "container", "resource", "model"}:
        assert f"$labels.{label}" in rule["annotations"]["summary"], label


def test_information_is_off_by_default_or_about_tenants() -> None:
    for path in ("alerts.rules.yml", "info.rules.yml"):
        groups = yaml.safe_load((ALERTS / path).read_text(encoding="utf-8"))["groups"]
        severities = {rule["labels"]["severity"] for group in groups for rule in group["rules"]}
        assert severities == ({"info"} if path == "info.rules.yml" else SEVERITIES)


def _actions(alert: str) -> frozenset[str]:
    match = re.search(r'node_gpu_xid_info\{action=~?"([^"]*)"\}', ALERTING[alert]["expr"])
    assert match is not None
    return frozenset(match[1].split("|"))


def test_no_xid_is_in_two_tiers() -> None:
    assert _actions("GpuXidCritical") == xids.PAGE_CLASSES
    assert _actions("GpuXidContained") == xids.WARN_CLASSES
    tiers = [_actions(f"GpuXid{tier}") for tier in ("Critical", "Contained", "Application")]
    assert sum(len(tier) for tier in tiers) == len(frozenset().union(*tiers))


@pytest.mark.parametrize(
    ("code", "tier"),
    [(code, "page") for code in (48, 62, 64, 74, 79, 95, 119, 120, 144, 150)]
    + [(94, "warn")]
    + [(code, "none") for code in (13, 31, 43, 45, 68)],
)
def test_xids_by_tier(code: int, tier: str) -> None:
    action = xids.load()[code]
    paging = action in _actions("GpuXidCritical")
    warning = action in _actions("GpuXidContained")
    assert (paging, warning) == (tier == "page", tier == "warn")


def test_codes_that_page_or_warn_are_counted_from_zero() -> None:
    classes = xids.load()
    wanted = _actions("GpuXidCritical") | _actions("GpuXidContained")
    assert xids.alerting(classes) == {code for code, name in classes.items() if name in wanted}


# --------------------------------------------------------------------------- runbooks


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == ALERTING.keys()


@pytest.mark.parametrize("name", sorted(ALERTING))
def test_runbooks_have_their_parts(name: str) -> None:
    lines = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"# {name}"
    assert [line[3:] for line in lines if line.startswith("## ")] == list(SECTIONS)
    for name_in_text in re.findall(r"(?<![\w:])(?:node_gpu|qgpu_exporter)_\w+", "\n".join(lines)):
        assert name_in_text in promql.FAMILIES, name_in_text


def test_the_list_of_runbooks_is_complete() -> None:
    text = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    for name, rule in ALERTING.items():
        assert f"| [{name}]({name}.md) | {rule['labels']['severity']} |" in text
