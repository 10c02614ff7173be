"""The text of /proc/PID/cgroup -> the names of containers, pods and owners in it; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qgpu_exporter.model import CgroupNames

SHORT_ID = 12
"""Digits of a container id that docker, podman and crictl show to people."""

# Path parts are looked at one by one and from either end, never the path from its start: a process
# of another cgroup namespace is shown by a path relative to the reader's, such as
# `/../../kubepods-besteffort.slice/...`, in which any of the outer parts may be missing.
_POD = re.compile(
    r"(?:^|-)pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|:|$)"
)
_CONTAINER = re.compile(r"(?P<runtime>[a-z0-9_.-]*)[-:](?P<id>[0-9a-f]{64})(?:\.scope)?")
_BARE_CONTAINER = re.compile(r"[0-9a-f]{64}")
_FUSED_CONTAINER = re.compile(r"\.slice:(?P<runtime>[a-z0-9_-]+):(?P<id>[0-9a-f]{64})$")
"""containerd with the cgroupfs driver under a kubelet that names cgroups as systemd does."""

_CRI_RUNTIMES = ("cri-containerd", "crio")
_OWNER_BY_RUNTIME = {
    "docker": "docker",
    "libpod": "podman",
    "libpod-payload": "podman",
    "nerdctl": "containerd",
}
_SLURM_JOB = re.compile(r"job_(\d+)")
_USER_SLICE = re.compile(r"user-(\d+)\.slice")
_UNIT = re.compile(r".+\.(?:service|scope)")
_LXC = re.compile(r"lxc(?:\.payload)?\.(.+)")
_RANK = {
    "docker": 0,
    "podman": 0,
    "containerd": 0,
    "container": 0,
    "lxc": 1,
    "slurm": 1,
    "user": 2,
    "systemd": 3,
}
"""Of two owners in one file the nearer to the workload counts: a container over a session."""


@dataclass(frozen=True, slots=True)
class _Found:
    runtime: str
    container_id: str


def parse(text: str) -> CgroupNames:
    """All names in a cgroup file, outermost first; empty where there is none.

    Reads cgroup v1, v2 and hybrid files: every line counts, since not every hierarchy carries the
    container's path.  A pod's UID is given with dashes, a static pod's as its 32 hex digits.  A
    container that stands below a pod carries that pod's UID, any other carries None.
    """
    containers: dict[tuple[str | None, str], None] = {}
    pod_uids: dict[str, None] = {}
    owners: list[tuple[str, str]] = []
    for segments in _paths(text):
        uid: str | None = None
        for segment in segments:
            if found_pod := _POD.search(segment):
                uid = found_pod[1].replace("_", "-")
                pod_uids.setdefault(uid)
            if found := _container(segment):
                containers.setdefault((uid, found.container_id))
        if owner := _owner(segments):
            owners.append(owner)
    if pod_uids or not owners:
        return CgroupNames(tuple(containers), tuple(pod_uids))
    kind, name = min(owners, key=lambda owner: _RANK[owner[0]])
    return CgroupNames(tuple(containers), (), kind, name)


def _paths(text: str) -> Iterator[list[str]]:
    """The parts of each line's path; lines that say nothing are left out."""
    for line in text.splitlines():
        path = line.split(":", 2)[-1].strip().removesuffix(" (deleted)")
        segments = [segment for segment in path.split("/") if segment not in {"", ".."}]
        if segments:
            yield segments


def _container(segment: str) -> _Found | None:
    if fused := _FUSED_CONTAINER.search(segment):
        return _Found(fused["runtime"], fused["id"])
    if _BARE_CONTAINER.fullmatch(segment):
        return _Found("", segment)
    found = _CONTAINER.fullmatch(segment)
    # conmon watches over a container from outside it.
    if found is None or found["runtime"].endswith("conmon"):
        return None
    return _Found(found["runtime"], found["id"])


def _owner(segments: list[str]) -> tuple[str, str] | None:
    """(kind, name) of what a path belongs to outside Kubernetes."""
    return (
        _container_owner(segments)
        or _slurm_owner(segments)
        or _lxc_owner(segments)
        or _first(("user", found[1]) for s in segments if (found := _USER_SLICE.fullmatch(s)))
        or _first(("systemd", s) for s in segments if _UNIT.fullmatch(s) and not _container(s))
    )


def _container_owner(segments: list[str]) -> tuple[str, str] | None:
    if segments[0] == "ecs" and len(segments) > 1:
        return "docker", segments[-1][:SHORT_ID]
    if segments[0] == "docker" and len(segments) > 1:
        # Containers have their id there, builds `buildkit/<id>`.
        build = segments[1] == "buildkit" and len(segments) > 2
        return "docker", segments[2 if build else 1][:SHORT_ID]
    for segment in segments:
        found = _container(segment)
        if found is None or found.runtime in _CRI_RUNTIMES:
            continue
        if kind := _OWNER_BY_RUNTIME.get(found.runtime):
            return kind, found.container_id[:SHORT_ID]
        if segments[0] == "libpod_parent":
            return "podman", found.container_id[:SHORT_ID]
        # `/<namespace>/<id>` is containerd's own; a lone id may be any runtime's.
        kind = "containerd" if segments[0] != segment else "container"
        return kind, found.container_id[:SHORT_ID]
    return None


def _slurm_owner(segments: list[str]) -> tuple[str, str] | None:
    if not any("slurm" in segment for segment in segments):
        return None
    return _first(("slurm", found[1]) for s in segments if (found := _SLURM_JOB.fullmatch(s)))


def _lxc_owner(segments: list[str]) -> tuple[str, str] | None:
    if segments[0] == "lxc" and len(segments) > 1:
        return "lxc", segments[1]
    return _first(("lxc", found[1]) for s in segments if (found := _LXC.fullmatch(s)))


def _first(found: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    return next(iter(found), None)
