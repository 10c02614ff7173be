"""The processes source on directories shaped like /proc: what is cached, and when it says no."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
from pathlib import Path

import pytest

from qgpu_exporter.model import CgroupNames, SourceHealth
from qgpu_exporter.sources import SourceError
from qgpu_exporter.sources.processes import KNOWN_SECONDS, UNKNOWN_SECONDS, Processes

UID = "5ab3c1de-0f21-4c6b-9a57-7d1e2f3a4b5c"
ID = "c0ffee" * 10 + "0001"
OTHER_ID = "beef" * 16
POD = CgroupNames(((UID, ID),), (UID,))
OTHER_POD = CgroupNames(((UID, OTHER_ID),), (UID,))
RUNTIME = CgroupNames(owner_kind="systemd", owner="containerd.service")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def source(path: Path | str, clock: Clock | None = None, *, room: int = 4096) -> Processes:
    return Processes(
        procfs=str(path),
        clock=clock or Clock(),
        wall_clock=lambda: 1_700_000_000.0,
        max_processes=room,
    )


def add(
    path: Path, pid: int, cgroup: str, start: int | None = 500, *, comm: str = "python"
) -> None:
    """A process; `start` None: without a stat file."""
    folder = path / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(f"0::{cgroup}\n")
    if start is not None:
        write_stat(folder, pid, start, comm=comm)


def write_stat(folder: Path, pid: int, start: int, *, comm: str = "x", flags: int = 0) -> None:
    between = " ".join(["0"] * 12)
    (folder / "stat").write_text(f"{pid} ({comm}) S 1 1 1 0 -1 {flags} {between} {start} 0 0\n")


def in_pod(container_id: str = ID) -> str:
    return f"/kubepods/burstable/pod{UID}/{container_id}"


# --------------------------------------------------------------------------- the cache


def test_a_process_is_named_by_its_cgroups(tmp_path: Path) -> None:
    add(tmp_path, 7, in_pod())
    add(tmp_path, 8, "/system.slice/containerd.service")
    add(tmp_path, 9, "/")
    assert source(tmp_path).resolve([9, 8, 7, 7, 6, 0, -1]) == {
        7: POD,
        8: RUNTIME,
        9: CgroupNames(),
    }


def test_a_container_is_read_once_and_again_after_a_time(tmp_path: Path) -> None:
    clock = Clock()
    processes = source(tmp_path, clock)
    add(tmp_path, 7, in_pod())
    assert processes.resolve([7]) == {7: POD}
    add(tmp_path, 7, in_pod(OTHER_ID))
    clock.now += KNOWN_SECONDS - 1
    assert processes.resolve([7]) == {7: POD}
    clock.now += 2
    assert processes.resolve([7]) == {7: OTHER_POD}


def test_no_container_is_believed_for_seconds_only(tmp_path: Path) -> None:
    clock = Clock()
    processes = source(tmp_path, clock)
    add(tmp_path, 7, "/system.slice/containerd.service")
    assert processes.resolve([7]) == {7: RUNTIME}
    add(tmp_path, 7, in_pod())
    clock.now += UNKNOWN_SECONDS - 1
    assert processes.resolve([7]) == {7: RUNTIME}
    clock.now += 2
    assert processes.resolve([7]) == {7: POD}


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    processes = source(tmp_path)
    add(tmp_path, 7, in_pod(), 500)
    assert processes.resolve([7]) == {7: POD}
    add(tmp_path, 7, in_pod(OTHER_ID), 501)
    assert processes.resolve([7]) == {7: OTHER_POD}


def test_a_process_that_has_ended_is_left_out(tmp_path: Path) -> None:
    processes = source(tmp_path)
    add(tmp_path, 7, in_pod())
    add(tmp_path, 8, in_pod())
    processes.resolve([7, 8])
    shutil.rmtree(tmp_path / "7")
    assert processes.resolve([7, 8]) == {8: POD}


def test_an_exiting_process_keeps_the_container_it_was_in(tmp_path: Path) -> None:
    # cgroup v1 shows `/` for a process that is on its way out and may still hold the card.
    processes = source(tmp_path)
    add(tmp_path, 7, in_pod())
    processes.resolve([7])
    add(tmp_path, 7, "/")
    assert processes.resolve([7]) == {7: POD}


@pytest.mark.parametrize("comm", ["a b", "a) S 1 (b", "((", ") 0 0 0", ""])
def test_a_command_of_any_shape_hides_no_start_time(tmp_path: Path, comm: str) -> None:
    processes = source(tmp_path)
    add(tmp_path, 7, in_pod(), 500, comm=comm)
    assert processes.resolve([7]) == {7: POD}
    add(tmp_path, 7, in_pod(OTHER_ID), 501, comm=comm)
    assert processes.resolve([7]) == {7: OTHER_POD}


@pytest.mark.parametrize("stat", [None, "", "7 (x", "7 (x) S 1 1", "7 (x) " + "y " * 30])
def test_without_a_start_time_nothing_is_cached(tmp_path: Path, stat: str | None) -> None:
    processes = source(tmp_path)
    add(tmp_path, 7, in_pod(), None)
    if stat is not None:
        (tmp_path / "7" / "stat").write_text(stat)
    assert processes.resolve([7]) == {7: POD}
    add(tmp_path, 7, in_pod(OTHER_ID), None)
    assert processes.resolve([7]) == {7: OTHER_POD}
    assert processes.cached == 0


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    add(tmp_path, 7, "/")
    (tmp_path / "7" / "cgroup").write_bytes(b"0::/\xff\xfe\n4:memory:" + in_pod().encode())
    assert source(tmp_path).resolve([7]) == {7: POD}


def test_a_hundred_thousand_short_lived_processes_leave_the_cache_flat(tmp_path: Path) -> None:
    room, batch = 1000, 1000
    processes = source(tmp_path, room=room)
    shared = tmp_path / "process"
    shared.mkdir()
    (shared / "cgroup").write_text(f"0::{in_pod()}\n")
    write_stat(shared, 1, 0)
    pids = range(1, batch + 1)
    for pid in pids:
        (tmp_path / str(pid)).symlink_to("process")
    processes.resolve(pids)
    processes.resolve(pids)
    gc.collect()
    before = len(gc.get_objects())
    for generation in range(1, 101):
        write_stat(shared, 1, generation)
        assert len(processes.resolve(pids)) == batch
        assert processes.cached == room
    gc.collect()
    # Each entry holds several objects and was replaced a hundred times.
    assert len(gc.get_objects()) - before < room


# --------------------------------------------------------------------------- what is no procfs


def reason(path: Path | str) -> str:
    with pytest.raises(SourceError) as caught:
        source(path).resolve([7])
    assert "--path.procfs" in str(caught.value) or caught.value.reason == "hidepid"
    assert "\n" not in str(caught.value)
    return caught.value.reason


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert reason(tmp_path / "host" / "proc") == "not_found"


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "proc").write_text("")
    assert reason(tmp_path / "proc") == "not_found"


def test_a_mount_point_without_its_mount(tmp_path: Path) -> None:
    assert reason(tmp_path) == "empty"


def test_a_procfs_of_another_pid_namespace(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to("1")
    add(tmp_path, 1, in_pod())
    add(tmp_path, 7, in_pod())
    assert reason(tmp_path) == "not_host"
    add(tmp_path, 2, in_pod(), comm="kthreadd")
    assert reason(tmp_path) == "not_host"


def test_a_procfs_with_a_kernel_thread_is_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to("7")
    add(tmp_path, 1, "/init.scope")
    add(tmp_path, 2, "/")
    write_stat(tmp_path / "2", 2, 0, flags=0x208040)
    add(tmp_path, 7, in_pod())
    assert source(f"{tmp_path}/").resolve([7]) == {7: POD}


def test_a_procfs_that_hides_processes(tmp_path: Path) -> None:
    (tmp_path / "self").symlink_to("7")
    add(tmp_path, 7, in_pod())
    assert reason(tmp_path) == "hidepid"


async def test_a_file_that_cannot_be_read_says_which(tmp_path: Path) -> None:
    add(tmp_path, 7, in_pod())
    (tmp_path / "7" / "cgroup").unlink()
    (tmp_path / "7" / "cgroup").mkdir()
    processes = source(tmp_path)
    assert await processes.ask([7]) is None
    assert processes.health.failures == {"error": 1}
    assert processes.health.detail == f"reading {tmp_path}/7/cgroup: Is a directory"


# --------------------------------------------------------------------------- asking


async def test_asking_keeps_the_health(tmp_path: Path) -> None:
    processes = source(tmp_path / "proc")
    assert processes.health == SourceHealth("processes")
    assert await processes.ask([7]) is None
    failed = processes.health
    assert failed.up is False
    assert failed.failures == {"not_found": 1}
    assert failed.detail.startswith(f"{tmp_path}/proc is not there: ")
    (tmp_path / "proc").mkdir()
    add(tmp_path / "proc", 7, in_pod())
    assert await processes.ask([7]) == {7: POD}
    assert processes.health == SourceHealth(
        "processes",
        up=True,
        last_success_timestamp_seconds=1_700_000_000.0,
        read_duration_seconds=0.0,
        failures={"not_found": 1},
    )


async def test_a_read_that_hangs_is_given_up_and_not_joined(tmp_path: Path) -> None:
    add(tmp_path, 7, in_pod())
    os.unlink(tmp_path / "7" / "cgroup")
    os.mkfifo(tmp_path / "7" / "cgroup")
    processes = Processes(
        procfs=str(tmp_path),
        clock=Clock(),
        wall_clock=lambda: 0.0,
        timeout_seconds=0.05,
    )
    assert await processes.ask([7]) is None
    assert processes.health.failures == {"timeout": 1}
    assert await processes.ask([8]) is None
    assert processes.health.failures == {"timeout": 2}
    # The hanging read gets its text; from then on the source answers again.
    thread = processes._thread
    assert thread is not None
    await asyncio.to_thread((tmp_path / "7" / "cgroup").write_text, f"0::{in_pod()}\n")
    await asyncio.to_thread(thread.join, 10)
    assert await processes.ask([7]) == {7: POD}
    assert processes.health.up is True


async def test_a_question_may_follow_the_last_answer_at_once(tmp_path: Path) -> None:
    add(tmp_path, 7, in_pod())
    processes = source(tmp_path)
    # The thread that answered has not ended yet when its answer is taken.
    for _ in range(200):
        assert await processes.ask([7]) == {7: POD}
    assert processes.health.failures == {}
