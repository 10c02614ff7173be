"""The commands of the chart's other pods do what they are there for: `helm test`, and waiting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.chart import charts
from tests.chart.charts import Tool, objects, only, template
from tests.integration.services import running


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    assert command[0] == "python3"
    return subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, check=False, timeout=60
    )


def test_no_scrape_goes_to_the_test_pod(tool: Tool) -> None:
    """Its name, label and hook are such that the Service does not select it."""
    found = objects(template(tool))
    (pod,) = (one for one in found if one["kind"] == "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    selector = only(found, "Service")["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items()


def scrape(tool: Tool, url: str, sets: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (pod,) = (one for one in objects(template(tool, sets=sets)) if one["kind"] == "Pod")
    (container,) = pod["spec"]["containers"]
    service = "http://gpus-qgpu-exporter:5678"
    return run([word.replace(service, url) for word in container["command"]])


async def test_helm_test_tells_an_exporter_from_what_is_none(tool: Tool) -> None:
    async with running("demo") as service:
        await service.ready()
        good = scrape(tool, service.url)
        assert good.returncode == 0, good.stderr
        assert "node_gpu" in good.stdout
        behind_a_password = scrape(tool, service.url, ("web.configSecret=web",))
        assert behind_a_password.returncode == 0, behind_a_password.stderr
        other_page = scrape(tool, f"{service.url}/-/healthy?")
        assert other_page.returncode == 1
    assert scrape(tool, service.url).returncode == 1


def test_waiting_ends_with_the_toolkit(tool: Tool, tmp_path: Path) -> None:
    found = objects(template(tool, "gpu-operator", [f"stack.validations={tmp_path}"]))
    spec = only(found, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = spec["initContainers"]
    (tmp_path / "toolkit-ready").touch()
    assert run(container["command"]).returncode == 0
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == str(tmp_path)
    assert charts.exporter(found)["volumeMounts"]
