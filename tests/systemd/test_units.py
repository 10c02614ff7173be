"""The systemd units: systemd takes them, finds them closed, and the exporter takes their flags."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qgpu_exporter import cli, config

Tool = Callable[[str], str]

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
SERVICES = ("qgpu-exporter.service", "qgpu-exporter-textfile.service")
PROGRAM = "/opt/qgpu-exporter/bin/qgpu-exporter"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a program that is there, since verifying looks for it."""
    there = shutil.which("true")
    assert there is not None
    for path in FOLDER.iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace(PROGRAM, there))
    return tmp_path


def test_systemd_takes_them(tool: Tool, units: Path) -> None:
    names = [*SERVICES, "qgpu-exporter-textfile.timer"]
    done = run(tool("systemd-analyze"), "verify", "--man=no", *(str(units / one) for one in names))
    assert (done.returncode, done.stderr + done.stdout) == (0, "")


def test_systemd_would_say_what_is_wrong(tool: Tool, units: Path) -> None:
    path = units / SERVICES[0]
    path.write_text(path.read_text().replace("NoNewPrivileges=", "NoNewPrivilegez="))
    done = run(tool("systemd-analyze"), "verify", "--man=no", str(path))
    assert "NoNewPrivilegez" in done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_systemd_finds_them_closed(tool: Tool, units: Path, name: str) -> None:
    """The exposure is at most 2.5 of 10."""
    command = [tool("systemd-analyze"), "security", "--offline=true", "--threshold=25"]
    done = run(*command, "--no-pager", str(units / name))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_the_exporter_takes_their_flags(name: str) -> None:
    (line,) = (
        one.removeprefix("ExecStart=")
        for one in (FOLDER / name).read_text().splitlines()
        if one.startswith("ExecStart=")
    )
    program, *words = shlex.split(line)
    assert program == PROGRAM
    given = cli.parser().parse_args([one for one in words if not one.startswith("$")])
    flags = {
        option.flag: getattr(given, field)
        for field, option in config.options()
        if getattr(given, field) is not None
    }
    made = config.load(flags, {})
    assert made.kubelet_socket == ""
    assert made.kubernetes_pods == "off"
    assert (given.command, bool(given.output)) in (("serve", False), ("once", True))


def test_tmpfiles_makes_its_directories(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    names = ("root:x:0:0::/:/bin/sh", "prometheus:x:4242:4243::/:/bin/sh")
    (tmp_path / "etc/passwd").write_text("\n".join(names) + "\n")
    (tmp_path / "etc/group").write_text("root:x:0:\nprometheus:x:4243:\n")
    done = run(
        *("systemd-tmpfiles", "--create", f"--root={tmp_path}"),
        str(FOLDER / "qgpu-exporter.tmpfiles.conf"),
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "etc/qgpu-exporter").stat().st_mode & 0o7777 == 0o755
    made = (tmp_path / "var/lib/prometheus/node-exporter").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (4242, 4243, 0o755)
