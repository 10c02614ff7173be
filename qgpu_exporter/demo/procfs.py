"""A made-up /proc: the few files of each process that tell whose it is, in a directory."""

from __future__ import annotations

import shutil
from pathlib import Path

_FIELDS_AFTER_START_TIME = 30
"""`stat` has 52 fields, the start time is the 22nd."""


class FakeProcfs:
    """Writes `<path>/<pid>/{cgroup,comm,stat}`; there is no `self`, since nobody lives in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ticks = 0
        path.mkdir()
        # A host's first two; by the second, readers know that these are a host's processes.
        self.add(1, "systemd", "/init.scope")
        self.add(2, "kthreadd", "/")

    def add(self, pid: int, comm: str, cgroup: str) -> None:
        """A process starts in a cgroup (v2, as the host sees it)."""
        self._ticks += 1
        folder = self.path / str(pid)
        folder.mkdir()
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        # pid, comm, state, ppid, and what stands before the start time.
        head = f"{pid} ({comm}) S 1 " + "0 " * 17
        (folder / "stat").write_text(
            f"{head}{self._ticks} {' '.join(['0'] * _FIELDS_AFTER_START_TIME)}\n"
        )

    def remove(self, pid: int) -> None:
        """The process has ended."""
        shutil.rmtree(self.path / str(pid), ignore_errors=True)


def container_cgroup(pod_uid: str, container_id: str) -> str:
    """The cgroup of a container as containerd's systemd driver names it (class BestEffort)."""
    pod = f"kubepods-besteffort-pod{pod_uid.replace('-', '_')}.slice"
    return f"/kubepods.slice/kubepods-besteffort.slice/{pod}/cri-containerd-{container_id}.scope"
