"""Builds the image without a daemon and without an image registry, over a base made here.

The base comes from the machine's own Debian sources (mmdebstrap), the image from deploy/Dockerfile
(buildah, isolation chroot), the wheels from pip with the hashes of deploy/requirements*.txt.
Needs root on Debian.  `python deploy/image.py` prints where the root file system is.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "image"
CONTEXT = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "deploy/Dockerfile",
    "deploy/requirements.txt",
    "deploy/requirements-build.txt",
    "deploy/slim.py",
)
"""Files that the Dockerfile copies, beside the package."""
TIMESTAMP = 1_700_000_000
ATTEMPTS = 4
"""A registry's hiccup is over after a few seconds."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: its root file system, and what its configuration says."""

    root: Path
    config: dict[str, Any]


def run(command: Sequence[str | Path], *, attempts: int = 1, text: str | None = None) -> str:
    """Run a command and return its output; raises SystemExit with the end of what it said."""
    said = ""
    for attempt in range(attempts):
        time.sleep(5 * attempt)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr or done.stdout)[-3000:]
    raise SystemExit(f"{' '.join(map(str, command))[:200]}: {said}")


def debian_sources() -> tuple[str, str]:
    """(release, lines of a sources.list) of the machine's own Debian."""
    about = Path("/etc/os-release").read_text()
    release = re.search(r"^VERSION_CODENAME=(\w+)$", about, re.MULTILINE)
    if release is None:
        raise SystemExit("/etc/os-release names no release: the base is made on Debian")
    line = "$(ORIGIN) deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    targets = run(["apt-get", "indextargets", "--format", line, "Created-By: Packages"])
    own = re.compile(rf"Debian (deb \S+ {release[1]}\S* \S+)")
    lines = {match[1] for match in map(own.fullmatch, targets.splitlines()) if match}
    return release[1], "\n".join(sorted(lines)) + "\n"


def python_version() -> str:
    """Version of Debian's python3, such as 3.11, which is the base's."""
    shown = run(["apt-cache", "show", "--no-all-versions", "python3"])
    version = re.search(r"^Version: (\d+\.\d+)\.", shown, re.MULTILINE)
    if version is None:
        raise SystemExit("apt-cache knows no python3")
    return version[1]


def make_base(mmdebstrap: str) -> Path:
    """The base's archive; made once, `make clean` removes it."""
    release, sources = debian_sources()
    archive = FOLDER / f"base-{release}.tar"
    if not archive.is_file():
        half = archive.with_suffix(".half")
        include = ["--variant=apt", "--include=ca-certificates", "--format=tar", "--quiet"]
        retries = '--aptopt=Acquire::Retries "3"'
        command = [mmdebstrap, *include, retries, release, str(half), "-"]
        run(command, attempts=ATTEMPTS, text=sources)
        half.rename(archive)
    return archive


def make_context() -> Path:
    """The build context: what the Dockerfile copies, with wheels, so that nothing is fetched."""
    context = FOLDER / "context"
    shutil.rmtree(context, ignore_errors=True)
    for name in CONTEXT:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, context / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "qgpu_exporter", context / "qgpu_exporter", ignore=ignored)
    wheels = FOLDER / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    pip += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "-d", str(wheels)]
    pip += ["--python-version", python_version(), "--find-links", str(wheels)]
    for name in ("requirements.txt", "requirements-build.txt"):
        run([*pip, "-r", ROOT / "deploy" / name], attempts=ATTEMPTS)
    shutil.copytree(wheels, context / "deploy" / "wheels")
    return context


def build(buildah: str, mmdebstrap: str) -> Image:
    """Build base and image anew (the downloads are kept) and unpack the image."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not any(Path("/var/lib/apt/lists").glob("*_Packages*")):
        run(["apt-get", "-q", "update"], attempts=ATTEMPTS)
    archive, context = make_base(mmdebstrap), make_context()
    for name in ("storage", "run"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    places = ["--root", str(FOLDER / "storage"), "--runroot", str(FOLDER / "run")]
    base = [buildah, *places, "--storage-driver", "vfs"]
    (FOLDER / "Dockerfile.base").write_text(f"FROM scratch\nADD {archive.name} /\n")
    bud = [*base, "bud", "--isolation", "chroot", "--layers=false"]
    run([*bud, "-t", "localhost/base", "-f", FOLDER / "Dockerfile.base", FOLDER])
    arguments = ["--build-arg", "BASE=localhost/base"]
    arguments += ["--build-arg", "PIP_FLAGS=--no-index --find-links=/src/deploy"]
    arguments += ["--build-arg", f"SOURCE_DATE_EPOCH={TIMESTAMP}", "--timestamp", str(TIMESTAMP)]
    dockerfile = context / "deploy" / "Dockerfile"
    arguments += ["-t", "localhost/qgpu-exporter", "-f", str(dockerfile), str(context)]
    run([*bud, *arguments], attempts=2)
    container = run([*base, "from", "localhost/qgpu-exporter"]).strip()
    root = run([*base, "mount", container]).strip()
    shown = json.loads(run([*base, "inspect", "--type", "image", "localhost/qgpu-exporter"]))
    return Image(Path(root), shown["OCIv1"])


def main() -> None:
    """Build with the tools of the system."""
    image = build(shutil.which("buildah") or "buildah", shutil.which("mmdebstrap") or "mmdebstrap")
    print(image.root)


if __name__ == "__main__":
    main()
