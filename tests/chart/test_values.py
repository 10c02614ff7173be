"""Values that the chart refuses, and what its notes say of those that it takes."""

from __future__ import annotations

import pytest

from tests.chart import charts
from tests.chart.charts import NAMESPACE, Tool, helm


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("driver.access=magic", "/driver/access"),
        ("driver.acces=runtime", "acces"),
        ("driver.root=run/nvidia", "/driver/root"),
        ("driver.access=host", "driver.libraryPath must name"),
        ("settings.devices.exit-afer=10m", "exit-afer"),
        ("settings.devices.exit-after=10", "/settings/devices/exit-after"),
        ("settings.interval=five", "/settings/interval"),
        ("settings.metrics.dialects=native\\,dgcm", "/settings/metrics/dialects"),
        ("settings.kubelet.socket=/x", "/settings"),
        ("settings.devices.gpm=maybe", "/settings/devices/gpm"),
        ("settings.web.max-requests=0", "/settings/web/max-requests"),
        ("web.port=70000", "/web/port"),
        ("web.port=metrics", "/web/port"),
        ("web.scheme=ftp", "/web/scheme"),
        ("image.digest=latest", "/image/digest"),
        ("nodes.select=some", "/nodes/select"),
        ("extraResources.nvidia\\.com/gpu=1", "/extraResources"),
        ("extraResources.nvidia\\.com/mig-1g\\.10gb=1", "/extraResources"),
        ("resources.limits.cpu=lots", "/resources/limits/cpu"),
        ("prometheusRule.enabled=true,prometheusRule.values.noSuch=1", "has no noSuch"),
        ("serviceMonitor.enabled=true,podMonitor.enabled=true", "enable one"),
        ("extraArgs={serve}", "/extraArgs/0"),
        ("tolerations=all", "/tolerations"),
    ],
)
def test_refused(tool: Tool, wrong: str, said: str) -> None:
    with pytest.raises(charts.HelmError) as error:
        helm(tool, "template", "gpus", str(charts.CHART), f"--set={wrong}")
    assert said in str(error.value)


def notes(tool: Tool, *sets: str) -> str:
    text = helm(
        *(tool, "install", "gpus", str(charts.CHART), "--namespace", NAMESPACE),
        *("--dry-run=client", "--set", "serviceMonitor.enabled=true"),
        *(f"--set={one}" for one in sets),
    )
    return " ".join(text.partition("NOTES:")[2].split())


def test_notes_say_how_to_check(tool: Tool) -> None:
    said = notes(tool)
    assert "helm test gpus -n monitoring" in said
    assert "exec daemonset/gpus-qgpu-exporter -- qgpu-exporter check" in said
    assert "port-forward" in said


def test_notes_warn_of_double_sums(tool: Tool) -> None:
    assert "switch dcgm-exporter off, then set settings.metrics.dialects" in notes(tool)
    assert "every sum of DCGM_FI_* doubles" in notes(
        tool, "settings.metrics.dialects=native\\,dcgm"
    )


def test_notes_warn_of_what_cannot_work(tool: Tool) -> None:
    assert "WARNING" not in notes(tool)
    assert "WARNING: driver.access=gke" in notes(tool, "driver.access=gke")
    assert "WARNING: kernelLog" in notes(tool, "kernelLog.enabled=true")
    assert "WARNING: the kubelet's socket is root's" in notes(tool, "runAsRoot=false")
