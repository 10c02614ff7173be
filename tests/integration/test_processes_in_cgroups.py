"""Real processes in real cgroups and namespaces, read by the processes source.

Cgroups are made below a folder of their own in the machine's hierarchies.  Where that or a
namespace is refused, as in a container without rights, the same test reads a copy of /proc with
what the kernel would show there: the verdict is then the parser's and the join's alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from qgpu_exporter.model import CgroupNames, Container
from qgpu_exporter.sources.processes import Processes
from tests.usage_worlds import (
    Use,
    card,
    container_id,
    core,
    held,
    memory_mib,
    pod,
    pods,
    uid,
    use_of,
)

ROOT = Path(__file__).parents[2]
NOBODY = 65534
GUARD_SECONDS = 10.0
RESOLVE = """
import json, os, sys, time
from qgpu_exporter.sources import SourceError
from qgpu_exporter.sources.processes import Processes
procfs, user, *pids = sys.argv[1:]
if user != "same" and int(user) != os.geteuid():
    os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
source = Processes(procfs=procfs, clock=time.monotonic, wall_clock=time.time)
try:
    names = source.resolve(map(int, pids))
    print(json.dumps({pid: [one.containers, one.pod_uids] for pid, one in names.items()}))
except SourceError as error:
    print(json.dumps(error.reason))
"""


def kubepods(number: int, container: int) -> str:
    """Path of a container's cgroup, as containerd's systemd driver names it."""
    pod_slice = f"kubepods-besteffort-pod{uid(number).replace('-', '_')}.slice"
    return (
        f"kubepods.slice/kubepods-besteffort.slice/{pod_slice}/"
        f"cri-containerd-{container_id(container)}.scope"
    )


def names(number: int | None, container: int) -> CgroupNames:
    """What is read out of such a path; `number` None: where the pod is out of sight."""
    if number is None:
        return CgroupNames(((None, container_id(container)),))
    return CgroupNames(((uid(number), container_id(container)),), (uid(number),))


def hierarchy(version: int) -> Path | None:
    """Mount point of cgroup v2, or of any one of v1."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == ("cgroup2" if version == 2 else "cgroup"):
            return Path(where)
    return None


def shows_the_host() -> bool:
    """Whether /proc is the initial pid namespace's, by its fixed inode number."""
    return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"


def allowed(*command: str) -> bool:
    """Whether the machine lets us run this."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Cgroups:
    """Puts sleeping processes into cgroups, and takes all away at the end."""

    def __init__(self, version: int, copy: Path) -> None:
        self._version = version
        self._copy = copy
        self._stack = ExitStack()
        self._made: list[Path] = []
        mount = hierarchy(version)
        self.top = mount / f"qgpu-exporter-test-{os.getpid()}" if mount else None
        self.real = self._try() and shows_the_host()
        self.procfs = "/proc" if self.real else str(copy)

    def _try(self) -> bool:
        try:
            if self.top is not None:
                self._make(self.top)
        except OSError:
            return False
        return self.top is not None

    def _make(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make(path.parent)
        path.mkdir()
        self._made.append(path)

    def start(self, path: str, shown: str | None = None) -> int:
        """A process in the cgroup of this path; a copy shows `shown` where given."""
        sleeper = subprocess.Popen(["sleep", "600"])
        self._stack.callback(sleeper.wait)
        self._stack.callback(sleeper.kill)
        if self.real:
            (self.folder(path) / "cgroup.procs").write_text(str(sleeper.pid))
            return sleeper.pid
        folder = self._copy / str(sleeper.pid)
        folder.mkdir(parents=True)
        line = "0::" if self._version == 2 else "4:memory:"
        other = "0::/system.slice/containerd.service\n" if self._version == 1 else ""
        (folder / "cgroup").write_text(f"{line}{shown or f'/{path}'}\n{other}")
        (folder / "stat").write_text(Path(f"/proc/{sleeper.pid}/stat").read_text())
        return sleeper.pid

    def folder(self, path: str) -> Path:
        """The folder of a cgroup, made if it is not there."""
        assert self.top is not None
        folder = self.top / path
        self._make(folder)
        if (folder / "cpuset.mems").exists():
            # A v1 cpuset takes no process before it has CPUs and memory nodes.
            for made in self._made:
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (made / name).write_text((made.parent / name).read_text())
        return folder

    def close(self) -> None:
        """End the processes and remove the cgroups, innermost first; again does nothing."""
        self._stack.close()
        while self._made:
            path = self._made.pop()
            give_up = time.monotonic() + GUARD_SECONDS
            while True:
                try:
                    path.rmdir()
                    break
                except OSError:
                    # A cgroup stays busy for a moment after its last process.
                    assert time.monotonic() < give_up, f"{path} stays busy"
                    time.sleep(0.01)


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def cgroups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cgroups]:
    made = Cgroups(request.param, tmp_path / "proc")
    try:
        yield made
    finally:
        made.close()


def source(procfs: str) -> Processes:
    return Processes(procfs=procfs, clock=time.monotonic, wall_clock=time.time)


def resolve(procfs: str, pids: list[int], *, prefix: list[str], user: int | str = "same") -> object:
    """What a process of its own, started by `prefix`, reads: names by pid, or a reason."""
    command = [*prefix, sys.executable, "-c", RESOLVE, procfs, str(user), *map(str, pids)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if isinstance(answer, str):
        return answer
    return {
        int(pid): CgroupNames(tuple((one, other) for one, other in containers), tuple(uids))
        for pid, (containers, uids) in answer.items()
    }


def test_processes_of_two_containers_and_of_none(cgroups: Cgroups) -> None:
    first = cgroups.start(kubepods(1, 11))
    second = cgroups.start(kubepods(1, 12))
    third = cgroups.start(kubepods(1, 12) + "/worker")
    host = cgroups.start("system.slice/train.service")
    found = source(cgroups.procfs).resolve([first, second, third, host])
    listed = pods(
        pod(
            "two",
            1,
            [
                Container("a", state="running", container_id=container_id(11)),
                Container("b", state="running", container_id=container_id(12)),
            ],
        )
    )
    uses = [Use(first, 10, 1), Use(second, 20, 2), Use(third, 40, 4), Use(host, 80, 8)]
    result = use_of([card(0, uses, used_mib=200)], found, listed, [held("two", container="a")])
    assert memory_mib(result) == {(0, "two", "a"): 10, (0, "two", "b"): 60}
    assert core(result) == {(0, "two", "a"): 1.0, (0, "two", "b"): 6.0}
    assert [(one.owner_kind, one.owner, one.processes) for one in result.host] == [
        ("systemd", "train.service", 1)
    ]


def test_a_process_that_has_ended(cgroups: Cgroups) -> None:
    pid = cgroups.start(kubepods(1, 11))
    processes = source(cgroups.procfs)
    assert processes.resolve([pid]) == {pid: names(1, 11)}
    cgroups.close()
    if not cgroups.real:
        for file in (Path(cgroups.procfs) / str(pid)).iterdir():
            file.unlink()
    assert processes.resolve([pid]) == {}


def test_a_reader_in_a_cgroup_namespace_of_its_own(cgroups: Cgroups) -> None:
    mine, sibling, other = kubepods(1, 11), kubepods(1, 12), kubepods(2, 21)
    near = "/../" + sibling.rpartition("/")[2]
    far = "/../../" + "/".join(other.split("/")[2:])
    pids = [cgroups.start(mine, "/"), cgroups.start(sibling, near), cgroups.start(other, far)]
    prefix: list[str] = []
    if cgroups.real and allowed("unshare", "--cgroup", "true"):
        entry = f'echo $$ > {cgroups.folder(mine)}/cgroup.procs && exec unshare --cgroup "$@"'
        prefix = ["sh", "-c", entry, "sh"]
        assert (
            subprocess.run(
                [*prefix, "grep", "-h", "/[.][.]/cri-", f"/proc/{pids[1]}/cgroup"],
                capture_output=True,
                check=False,
            )
            .stdout.strip()
            .endswith(near.encode())
        )
    found = resolve(cgroups.procfs, pids, prefix=prefix)
    assert isinstance(found, dict)
    # The reader's own container has no name in its own namespace.
    assert found[pids[0]] == CgroupNames()
    assert found[pids[1]] == names(None, 12)
    assert found[pids[2]] == names(2, 21)


def test_a_reader_without_rights(cgroups: Cgroups) -> None:
    pid = cgroups.start(kubepods(1, 11))
    user = NOBODY if cgroups.real and os.geteuid() == 0 else os.geteuid()
    assert resolve(cgroups.procfs, [pid], prefix=[], user=user) == {pid: names(1, 11)}


PID_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]
IN_USER_NAMESPACE = ["unshare", "--user", "--map-root-user", *PID_NAMESPACE[1:]]


def test_a_reader_in_a_pid_namespace_of_its_own_attributes_nothing() -> None:
    prefixes = [one for one in (PID_NAMESPACE, IN_USER_NAMESPACE) if allowed(*one, "true")]
    # Where no namespace can be made, this is a container: its own /proc is not the host's.
    assert prefixes or not shows_the_host()
    assert resolve("/proc", [1, 2, 3], prefix=prefixes[0] if prefixes else []) == "not_host"


def test_a_mounted_host_proc_serves_a_pid_namespace_of_its_own(
    cgroups: Cgroups, tmp_path: Path
) -> None:
    pid = cgroups.start(kubepods(1, 11))
    prefix: list[str] = []
    procfs = cgroups.procfs
    if cgroups.real and allowed(*PID_NAMESPACE, "true"):
        host = tmp_path / "host-proc"
        host.mkdir()
        script = (
            f"mount --make-rprivate / && mount --bind /proc {host} && "
            f"mount -o remount,ro,bind {host} && mount -t proc proc /proc && "
            f'test ! -e /proc/{pid} && exec "$@"'
        )
        prefix = ["unshare", "--pid", "--fork", "--mount", "sh", "-c", script, "sh"]
        procfs = str(host)
    assert resolve(procfs, [pid], prefix=prefix) == {pid: names(1, 11)}


def for_all(folder: Path) -> Path:
    """Make a folder below pytest's that other users may enter."""
    folder.mkdir()
    for path in (folder, *folder.parents):
        if path == Path(tempfile.gettempdir()):
            break
        path.chmod(0o755)
    return folder


@pytest.mark.parametrize("refused", ["1/stat", "7/stat", "7/cgroup"])
def test_a_proc_that_may_not_be_read(tmp_path: Path, refused: str) -> None:
    procfs = for_all(tmp_path / "proc")
    (procfs / "self").symlink_to("7")
    for pid, flags in ((1, 0), (2, 0x208040), (7, 0)):
        folder = for_all(procfs / str(pid))
        (folder / "stat").write_text(f"{pid} (x) S 1 1 1 0 -1 {flags} {'0 ' * 12}{pid} 0\n")
        (folder / "cgroup").write_text(f"0::/{kubepods(1, 11)}\n")
    user = os.geteuid() or NOBODY
    assert resolve(str(procfs), [7], prefix=[], user=user) == {7: names(1, 11)}
    (procfs / refused).chmod(0)
    # A process that cannot be told leaves all others' zeroes uncertain too.
    assert resolve(str(procfs), [2, 7], prefix=[], user=user) == "no_permission"


def test_a_proc_that_hides_processes(tmp_path: Path) -> None:
    hidden = for_all(tmp_path / "hidden")
    script = f'mount -t proc -o hidepid=2 proc {hidden} && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if not allowed(*prefix, "true"):
        # As the kernel shows it: itself and its own processes.
        (hidden / "self").symlink_to("77")
        (hidden / "77").mkdir()
        prefix = []
    user = NOBODY if prefix else os.geteuid()
    assert resolve(str(hidden), [1], prefix=prefix, user=user) == "hidepid"
