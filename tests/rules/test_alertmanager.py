"""Alertmanager's example: its routes by amtool, its inhibition by a real Alertmanager."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stack.ask import ask
from tests.stack.processes import Running, alertmanager, free_port, wait_for

CONFIG = Path(__file__).resolve().parents[2] / "alerts" / "alertmanager.example.yml"

Tool = Callable[[str], str]
CARD = {"cluster": "a", "node": "n1", "gpu": "0"}


def _amtool(tool: Tool, *arguments: str) -> str:
    done = subprocess.run(
        [tool("amtool"), *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_amtool_takes_the_configuration(tool: Tool) -> None:
    assert "SUCCESS" in _amtool(tool, "check-config", str(CONFIG))


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ({"alertname": "GpuDown", "severity": "critical", **CARD}, "page"),
        ({"alertname": "GpuXidCritical", "severity": "critical", "xid": "79", **CARD}, "page"),
        ({"alertname": "GpuXidContained", "severity": "warning", "xid": "94", **CARD}, "ticket"),
        ({"alertname": "GpuXidApplication", "severity": "info", "xid": "31", **CARD}, "quiet"),
        ({"alertname": "GpuReservationIdle", "severity": "info", "namespace": "ml"}, "quiet"),
        ({"alertname": "GpuUsageWithoutAllocation", "severity": "warning"}, "tenants"),
        ({"alertname": "GpuContainerMemoryOverShare", "severity": "warning"}, "tenants"),
        ({"alertname": "QgpuExporterSourceFailing", "severity": "warning"}, "ticket"),
        ({"alertname": "QgpuExporterDown", "severity": "warning"}, "ticket"),
        ({"alertname": "QgpuExporterAbsent", "severity": "info"}, "quiet"),
    ],
    ids=lambda value: value["alertname"] if isinstance(value, dict) else value,
)
def test_routes(tool: Tool, labels: dict[str, str], receiver: str) -> None:
    pairs = [f"{name}={value}" for name, value in labels.items()]
    found = _amtool(tool, "config", "routes", "test", f"--config.file={CONFIG}", *pairs)
    assert found == receiver


# --------------------------------------------------------------------------- inhibition

SENT = {
    "lost": {"alertname": "GpuDown", "severity": "critical", **CARD},
    "its XID": {"alertname": "GpuXidCritical", "severity": "critical", "xid": "79", **CARD},
    "its holder": {
        "alertname": "GpuReservationIdle",
        "severity": "info",
        "namespace": "ml",
        "pod": "p",
        "container": "c",
        **CARD,
    },
    "another card": {
        "alertname": "GpuXidCritical",
        "severity": "critical",
        "xid": "79",
        **CARD,
        "gpu": "1",
    },
    "the same card of another cluster": {
        "alertname": "GpuRowRemapPending",
        "severity": "warning",
        **CARD,
        "cluster": "b",
    },
    "the node": {"alertname": "GpuAllocatableLow", "severity": "warning", "cluster": "a"}
    | {"node": "n1", "resource": "nvidia.com/gpu"},
    "a node that is down": {
        "alertname": "KubeNodeNotReady",
        "severity": "warning",
        "cluster": "a",
        "node": "n2",
    },
    "a card of it": {
        "alertname": "GpuDown",
        "severity": "critical",
        "cluster": "a",
        "node": "n2",
        "gpu": "0",
    },
    "its exporter": {
        "alertname": "QgpuExporterDown",
        "severity": "warning",
        "cluster": "a",
        "node": "n2",
    },
}
SILENCED = {"its XID", "its holder", "a card of it", "its exporter"}


@pytest.mark.xdist_group("prometheus")
def test_a_lost_card_and_a_node_that_is_down_silence_what_follows(
    tool: Tool, tmp_path: Path
) -> None:
    port = free_port()
    command = [
        *alertmanager(tool("alertmanager")),
        f"--config.file={CONFIG}",
        f"--storage.path={tmp_path}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with Running(command, tmp_path / "alertmanager.log"):
        sent = [{"labels": labels} for labels in SENT.values()]
        wait_for(lambda: ask(port, "/api/v2/alerts", body=sent)[0] == 200)
        names = {tuple(sorted(labels.items())): name for name, labels in SENT.items()}

        def silenced() -> set[str] | None:
            _, alerts = ask(port, "/api/v2/alerts")
            found = {
                names[tuple(sorted(alert["labels"].items()))]
                for alert in alerts
                if alert["status"]["inhibitedBy"]
            }
            return found if len(alerts) == len(SENT) and len(found) >= len(SILENCED) else None

        assert wait_for(silenced) == SILENCED
