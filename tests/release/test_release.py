"""What `make release` makes: complete, named by one version, and the same for the same commit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy import build, release
from qgpu_exporter import __version__

Tool = Callable[[str], str]

CHART = f"qgpu-exporter-{__version__}.tgz"
MANIFESTS = f"qgpu-exporter-manifests-{__version__}.tar.gz"
BILL = f"qgpu-exporter-{__version__}.cdx.json"
SDIST = f"qgpu_exporter-{__version__}.tar.gz"
WHEEL = f"qgpu_exporter-{__version__}-py3-none-any.whl"

pytestmark = pytest.mark.xdist_group("release")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that nobody's edit comes between two releases of it."""
    copy = tmp_path_factory.mktemp("release") / "tree"
    made = (".git", ".venv", ".tools", "build", "dist", ".coverage*", "__pycache__", ".*_cache")
    shutil.copytree(build.ROOT, copy, ignore=shutil.ignore_patterns(*made), symlinks=True)
    (copy / ".tools").symlink_to(build.ROOT / ".tools")
    return copy


def released(tree: Path, into: Path) -> Path:
    """What `make release` makes in a tree, moved to `into`."""
    done = subprocess.run(
        [sys.executable, "deploy/release.py"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(shutil.move(tree / "dist", into))


@pytest.fixture(scope="module")
def dist(tree: Path) -> Path:
    return released(tree, tree.parent / "first")


def test_it_is_complete_and_the_checksums_are_right(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == sorted(
        [BILL, CHART, MANIFESTS, SDIST, WHEEL, release.CHECKSUMS]
    )
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", release.CHECKSUMS],
        cwd=dist,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5


def test_the_same_sources_give_the_same_files(tree: Path, dist: Path) -> None:
    again = released(tree, tree.parent / "second")

    def digests(folder: Path) -> dict[str, str]:
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()
        }

    assert digests(again) == digests(dist)


def test_helm_installs_from_the_package(tool: Tool, dist: Path) -> None:
    command = [tool("helm"), "template", "gpus", str(dist / CHART)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kinds = {one["kind"] for one in yaml.safe_load_all(text) if one}
    assert {"DaemonSet", "ClusterRole", "Service"} <= kinds


def test_kubectl_builds_the_packed_manifests(tool: Tool, dist: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / MANIFESTS) as packed:
        packed.extractall(tmp_path, filter="data")
    command = [tool("kubectl"), "kustomize", str(tmp_path / "manifests")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"image: qgpu-exporter:{__version__}" in text


def test_the_wheel_has_its_data_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(dist / WHEEL) as packed:
        names = packed.namelist()
    assert "qgpu_exporter/xid_classes.yaml" in names
    assert "qgpu_exporter/web/static/page.js" in names
    assert "qgpu_exporter/py.typed" in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"qgpu_exporter", f"qgpu_exporter-{__version__}.dist-info"}


def test_the_source_distribution_has_what_builds_it(dist: Path) -> None:
    with tarfile.open(dist / SDIST) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "LICENSE", "qgpu_exporter/cli.py", "deploy/Dockerfile"} <= names
    assert not any(name.startswith((".venv", ".tools", "build/", "dist/")) for name in names)


def test_the_bill_names_every_pinned_package_with_its_hashes(dist: Path) -> None:
    bill = json.loads((dist / BILL).read_text())
    listed = {one["name"].lower(): one for one in bill["components"]}
    text = (build.ROOT / "deploy" / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE))
    assert {name: one["version"] for name, one in listed.items()} == {
        name.lower(): version for name, version in pinned.items()
    }
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "qgpu-exporter"


def test_a_release_of_two_versions_is_refused(tmp_path: Path) -> None:
    chart = tmp_path / "Chart.yaml"
    chart.write_text(f"version: {__version__}\nappVersion: 9.9.9\n")
    with pytest.raises(release.ReleaseError, match=r"appVersion is 9\.9\.9"):
        release.check_versions(chart)


def test_the_requirements_are_those_that_are_tested() -> None:
    folder = build.ROOT / "deploy"
    tested = pins((build.ROOT / "constraints.txt").read_text())
    for name in ("requirements.txt", "requirements-build.txt"):
        pinned = pins((folder / name).read_text())
        assert pinned
        assert {one: tested.get(one) for one in pinned} == pinned, "run `make requirements`"


def test_every_requirement_has_a_hash() -> None:
    for name in ("requirements.txt", "requirements-build.txt"):
        text = (build.ROOT / "deploy" / name).read_text()
        blocks = re.split(r"^(?=[A-Za-z0-9._-]+==)", text, flags=re.MULTILINE)[1:]
        assert all("--hash=sha256:" in block for block in blocks)
        assert "://" not in text


def pins(text: str) -> dict[str, str]:
    """Version by normalised name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}
