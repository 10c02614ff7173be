"""The image: built without a daemon, started from its own root file system, and scraped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deploy import image

pytestmark = [pytest.mark.xdist_group("image"), pytest.mark.timeout(900)]

# As the chart runs it but for the user: a read-only root, no capability, no way to more rights.
START = """
set -e
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/tmp"
mount -o remount,ro,bind "$1"
root=$1; shift
exec chroot "$root" setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all env -i "$@"
"""


@pytest.fixture(scope="module")
def built(tool: Callable[[str], str]) -> Iterator[image.Image]:
    yield image.build(tool("buildah"), tool("mmdebstrap"))
    for name in ("storage", "run", "context"):
        shutil.rmtree(image.FOLDER / name, ignore_errors=True)


def environment(built: image.Image) -> list[str]:
    return [*built.config["config"]["Env"], "HOME=/tmp"]


@contextmanager
def started(built: image.Image, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The image's entry point with arguments, in namespaces of its own."""
    command = [*environment(built), *built.config["config"]["Entrypoint"], *arguments]
    isolated = ["unshare", "--mount", "--pid", "--fork", "bash", "-c", START]
    process = subprocess.Popen(
        [*isolated, "start", str(built.root), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # unshare's own --kill-child is undone by the change of user.
        process_group=0,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def fetch(url: str, process: subprocess.Popen[str], wanted: str) -> str:
    """The page once it contains `wanted`; guarded against a hang."""
    page = ""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 (loopback)
                page = answer.read().decode()
        except (urllib.error.URLError, ConnectionError):
            page = ""
        if wanted in page:
            return page
        time.sleep(0.2)
    output = process.communicate()[0] if process.poll() is not None else ""
    pytest.fail(f"{url} has no {wanted}: {page[-500:]}{output[-2000:]}")


def test_it_starts_as_nobody_on_a_read_only_root_and_is_scraped(built: image.Image) -> None:
    port = free_port()
    with started(built, "demo", "--web.listen-address", f"127.0.0.1:{port}") as process:
        page = fetch(f"http://127.0.0.1:{port}/metrics", process, "node_gpu_core_usage{")
        assert 'qgpu_exporter_source_up{source="podresources"} 1.0' in page
        assert 'qgpu_exporter_source_up{source="kubernetes"} 1.0' in page
        assert re.search(r'^node_gpu_core_request\{container="[^"]+",gpu="0"', page, re.MULTILINE)
        fetch(f"http://127.0.0.1:{port}/", process, "<html")


def test_without_driver_it_serves_and_says_what_is_missing(built: image.Image) -> None:
    port = free_port()
    arguments = ["--web.listen-address", f"127.0.0.1:{port}", "--node-name", "bare"]
    with started(built, *arguments) as process:
        failures = 'qgpu_exporter_source_failures_total{reason="library_not_found",source="nvml"}'
        page = fetch(f"http://127.0.0.1:{port}/metrics", process, failures)
    assert 'qgpu_exporter_source_up{source="nvml"} 0.0' in page
    assert "node_gpu_up" not in page


def test_it_says_its_version(built: image.Image) -> None:
    with started(built, "--version") as process:
        said, _ = process.communicate(timeout=60)
    assert re.fullmatch(r"qgpu-exporter \d+\.\d+\.\d+ \(Python 3\.\d+\.\d+\)\n", said)


def test_no_compiler_no_pip_and_no_cache_are_in_it(built: image.Image) -> None:
    programs = {
        path.name
        for folder in ("usr/bin", "opt/qgpu-exporter/bin")
        for path in (built.root / folder).iterdir()
    }
    unwanted = re.compile(r"pip[\d.]*|(?:.*-)?(?:gcc|cc|g\+\+|ld|as|make)(?:-[\d.]+)?")
    assert sorted(name for name in programs if unwanted.fullmatch(name)) == []
    packages = {path.name for path in site_packages(built).iterdir()}
    assert not packages & {"pip", "setuptools", "wheel", "hatchling"}
    assert not any((built.root / "var/lib/apt/lists").glob("*Packages*"))
    assert not (built.root / "src").exists()


def site_packages(built: image.Image) -> Path:
    (found,) = built.root.glob("opt/qgpu-exporter/lib/python3*/site-packages")
    return found


def test_its_packages_take_less_than_70_mb(built: image.Image) -> None:
    files = [path for path in site_packages(built).rglob("*") if path.is_file()]
    on_disk = sum(path.lstat().st_blocks * 512 for path in files)
    assert on_disk < 70_000_000


def test_its_files_have_one_time(built: image.Image) -> None:
    times = {int(path.lstat().st_mtime) for path in (built.root / "opt").rglob("*")}
    assert times == {image.TIMESTAMP}


def test_its_configuration(built: image.Image) -> None:
    config = built.config["config"]
    assert config["Entrypoint"] == ["qgpu-exporter"]
    assert config["User"] == "65534:65534"
    assert config["ExposedPorts"] == {"5678/tcp": {}}
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "qgpu-exporter"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert re.fullmatch(r"\d+\.\d+\.\d+", labels["org.opencontainers.image.version"])
    assert built.config["architecture"] in ("amd64", "arm64")


def test_it_has_every_package_of_the_requirements_and_no_other(built: image.Image) -> None:
    installed = {
        re.sub(r"[-_.]+", "-", path.name.removesuffix(".dist-info").rpartition("-")[0]).lower()
        for path in site_packages(built).glob("*.dist-info")
    }
    text = (image.ROOT / "deploy/requirements.txt").read_text()
    pinned = {name.lower() for name in re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE)}
    assert installed == pinned | {"qgpu-exporter"}


def test_nothing_in_it_may_be_run_with_more_rights(built: image.Image) -> None:
    more = [
        str(path)
        for path in (built.root / "opt").rglob("*")
        if path.lstat().st_mode & 0o6000 or (os.path.isfile(path) and path.stat().st_mode & 0o022)
    ]
    assert more == []
