"""Every block of the pages that can run is run; every other one says here why it cannot."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from deploy.build import CHART
from qgpu_exporter import config
from qgpu_exporter.web.web_config_file import check_web_config
from tests.chart import charts
from tests.chart.charts import Tool
from tests.chart.test_rendering import validate
from tests.docs.pages import ROOT, Block, blocks
from tests.integration.services import running

CANNOT_RUN: Mapping[str, str] = {
    r"make (demo|test|demo-stack)\b": "started by tests/integration/as_installed and by CI itself",
    r"kubectl ": "needs a cluster",
    r"(sudo )?(nvidia-smi|lspci|dmesg|ipmitool|fuser) ?": "reads the hardware of a GPU node",
    r"(ls -l|cat) /": "reads files of a GPU node",
    r"ps ": "looks for a process that hangs in a GPU node's driver",
    r"curl .*\| jq ": "needs jq where the reader sits; test_web_routes.py asks for the same page",
    r"systemctl ": "changes the host's services; the units are judged in tests/systemd",
    r"systemd-tmpfiles ": "changes the host; run below a root of its own in tests/systemd",
    r"install -m": "changes the host",
    r"python3 -m venv /opt": "the host's /opt; tests/image makes the same environment",
    r"/opt/qgpu-exporter/bin/pip ": "the host's /opt; tests/image installs with the same hashes",
    r"pip-audit ": "asks a service on the internet",
    r"QGPU_EXPORTER_ARGS=": "the content of a file",
}

ADDRESS = re.compile(r"(127\.0\.0\.1|localhost|\$[A-Z_]+):5678")
"""Where the pages have the exporter; here it is the demo."""

SHIM = """\
#!/bin/sh
exec {command} "$@"
"""


def commands(block: Block) -> list[str]:
    """The commands of a block, continued lines joined; a block with a heredoc is one command."""
    text = block.text.replace("\\\n", " ")
    if "<<" in text:
        return [text]
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def runnable(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in CANNOT_RUN)


SHELL = [block for block in blocks("sh") if any(runnable(one) for one in commands(block))]


def shims(tool: Tool, folder: Path) -> None:
    """Programs under the names that the pages use, which touch neither a cluster nor the host."""
    helm = f'/bin/bash -c \'exec "{tool("helm")}" "$@" --dry-run=client\' helm'
    programs = {
        "helm": helm,
        "curl": tool("curl"),
        "kubectl": tool("kubectl"),
        "promtool": tool("promtool"),
        "python": sys.executable,
        "qgpu-exporter": f"{sys.executable} -m qgpu_exporter",
    }
    for name, command in programs.items():
        path = folder / name
        path.write_text(SHIM.format(command=command))
        path.chmod(0o755)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
async def test_commands(tool: Tool, tmp_path: Path, block: Block) -> None:
    for name in ("deploy", "alerts", "dashboards", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "web.yml").write_text("rate_limit: {interval: 1s}\n")
    (tmp_path / "bin").mkdir()
    shims(tool, tmp_path / "bin")
    script = "set -eu\n" + "\n".join(filter(runnable, commands(block)))
    if ADDRESS.search(script):
        async with running("demo") as service:
            await service.until(lambda page: bool(page.rows("node_gpu_core_usage")))
            script = ADDRESS.sub(service.url.removeprefix("http://"), script)
            done = await asyncio.to_thread(run, script, tmp_path)
    else:
        done = await asyncio.to_thread(run, script, tmp_path)
    # `check` rightly fails on a machine without a driver, and says so.
    without_driver = done.returncode == 1 and "libnvidia-ml.so.1 is not found" in done.stdout
    assert done.returncode == 0 or without_driver, done.stdout + done.stderr


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
    }
    script = script.replace("/tmp/", f"{folder}/")
    return subprocess.run(
        ["/bin/bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("block", blocks("sh"), ids=lambda block: block.name)
def test_a_shell_understands_it(block: Block) -> None:
    done = subprocess.run(
        ["/bin/bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_reasons_are_needed() -> None:
    every = [one for block in blocks("sh") for one in commands(block)]
    unneeded = [
        pattern
        for pattern in CANNOT_RUN
        if not any(re.match(pattern, command) for command in every)
    ]
    assert unneeded == []


# --------------------------------------------------------------------------- other languages


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_yaml(tool: Tool, tmp_path: Path, block: Block) -> None:
    """Objects of Kubernetes, values of the chart, settings or a web configuration: all judged."""
    path = tmp_path / "block.yaml"
    path.write_text(block.text)
    content = yaml.safe_load(block.text)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    if "apiVersion" in content:
        validate(content, "1.33")
    elif "scrape_configs" in content:
        command = [tool("promtool"), "check", "config", "--syntax-only", str(path)]
        subprocess.run(command, check=True, capture_output=True)
    elif block.page.name == "web-configuration.md":
        # Its certificates are not here; all else is right.
        faults = check_web_config(str(path))
        assert [one for one in faults if "cannot be read: No such file" not in one] == []
    elif block.page.name == "configuration.md":
        made = config.load({}, {}, str(path))
        assert made.devices_exit_after == 600.0
    else:
        assert content.keys() <= values.keys()
        sets = ["--set=driver.runtimeClassName="]
        charts.helm(tool, "template", "gpus", str(CHART), "-f", str(path), *sets)


@pytest.mark.parametrize("block", blocks("promql"), ids=lambda block: block.name)
def test_promql(tool: Tool, tmp_path: Path, block: Block) -> None:
    """One expression over several lines, or one a line."""
    lines = [line for line in block.text.splitlines() if line.split("#")[0].strip()]
    whole = promtool(tool, tmp_path, [block.text])
    if whole.returncode:
        each = promtool(tool, tmp_path, lines)
        assert each.returncode == 0, each.stdout + each.stderr


def promtool(tool: Tool, folder: Path, expressions: list[str]) -> subprocess.CompletedProcess[str]:
    path = folder / "rules.yml"
    rules = [{"record": f"page:{number}", "expr": one} for number, one in enumerate(expressions)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}))
    return subprocess.run(
        [tool("promtool"), "check", "rules", str(path)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_is_the_code_s_own(block: Block) -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "qgpu_exporter").rglob("*.py"))
    for part in re.split(r"\n\n\n", textwrap.dedent(block.text).strip()):
        assert part in sources


def test_every_language_is_judged() -> None:
    judged = {"sh", "yaml", "promql", "python", ""}
    languages = {block.language for block in blocks(*judged, "json", "console", "bash", "text")}
    assert languages <= judged | {"json", "text"}
