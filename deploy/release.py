"""Makes dist/: what a release consists of, each file the same for the same commit.

Source distribution, wheel, chart, manifests, bill of materials, and the checksums of all.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import yaml

from deploy.build import CHART, MANIFESTS, ROOT
from qgpu_exporter import __version__
from tests import tools

DIST = ROOT / "dist"
CHECKSUMS = "SHA256SUMS"


class ReleaseError(Exception):
    """Something does not go together; the text says what."""


def check_versions(chart_file: Path = CHART / "Chart.yaml") -> None:
    """Refuse a release whose parts name different versions, or that the changelog does not know."""
    chart = yaml.safe_load(chart_file.read_text())
    for name in ("version", "appVersion"):
        if chart[name] != __version__:
            raise ReleaseError(f"Chart.yaml: {name} is {chart[name]}, the package is {__version__}")
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    if f"\nARG VERSION={__version__}\n" not in dockerfile:
        raise ReleaseError(f"deploy/Dockerfile: VERSION is not {__version__}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    if f"## [{__version__}]" not in changes and "## [Unreleased]" not in changes:
        raise ReleaseError(f"CHANGELOG.md knows neither {__version__} nor anything unreleased")


def commit_time() -> int:
    """Unix time of the last commit, or a fixed one outside a repository."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"],  # noqa: S607 - the one on the path
        capture_output=True,
        text=True,
        check=False,
    )
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip() else 1_700_000_000


def archive(path: Path, files: Mapping[str, Path], moment: int) -> None:
    """A tar.gz whose bytes depend on names, contents and `moment` alone."""
    data = BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, source in sorted(files.items()):
            content = source.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), moment, 0o644
            tar.addfile(entry, BytesIO(content))
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=moment) as packed:
        packed.write(data.getvalue())


def make(dist: Path) -> list[Path]:
    """Fill the folder; returns the files, checksums last."""
    check_versions()
    moment = commit_time()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(moment)}
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(build, check=True, env=environment, stdout=subprocess.DEVNULL)
    charts = {
        f"qgpu-exporter/{path.relative_to(CHART)}": path
        for path in CHART.rglob("*")
        if path.is_file()
    }
    # helm package gives other bytes each time, so helm only judges.
    subprocess.run([tools.find("helm"), "lint", "--strict", "--quiet", CHART], check=True)
    archive(dist / f"qgpu-exporter-{__version__}.tgz", charts, moment)
    manifests = {
        f"manifests/{path.relative_to(MANIFESTS)}": path
        for path in MANIFESTS.rglob("*")
        if path.is_file()
    }
    archive(dist / f"qgpu-exporter-manifests-{__version__}.tar.gz", manifests, moment)
    bill = dist / f"qgpu-exporter-{__version__}.cdx.json"
    subprocess.run(bill_of_materials(bill), check=True, cwd=ROOT)
    files = sorted(dist.iterdir())
    sums = "".join(f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files)
    (dist / CHECKSUMS).write_text(sums)
    return [*files, dist / CHECKSUMS]


def bill_of_materials(path: Path) -> list[str]:
    """The command that writes the bill of materials (CycloneDX) of the image's Python packages."""
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "requirements",
        "--pyproject",
        "pyproject.toml",
    ]
    command += ["--mc-type", "application", "--output-reproducible", "--of", "JSON"]
    return [*command, "-o", str(path), "deploy/requirements.txt"]


def main() -> int:
    """Make dist/ anew and name its files."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    try:
        for path in make(DIST):
            print(path.relative_to(ROOT))
    except (ReleaseError, tools.MissingToolError) as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
