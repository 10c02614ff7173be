"""The kubelet's source against a kubelet that restarts, refuses, hangs and answers nonsense."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import socket as sockets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from qgpu_exporter.demo.kubelet import V1_36, FakeKubelet, Fault, ListedContainer
from qgpu_exporter.model import KubeletContainer, KubeletList
from qgpu_exporter.sources.podresources import PodResources, present
from tests.kubelets import GPU_0, GPU_1, WHOLE, ManualClock, admit, pods, until

MAX_AGE = 60.0


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[FakeKubelet]:
    fake = FakeKubelet(str(tmp_path / "kubelet.sock"), version=V1_36)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def source(kubelet: FakeKubelet, clock: ManualClock) -> AsyncIterator[PodResources]:
    made = make(kubelet.socket, clock)
    yield made
    await made.close()


def make(socket: str, clock: ManualClock, timeout_seconds: float = 10.0) -> PodResources:
    return PodResources(
        socket=socket,
        max_age_seconds=MAX_AGE,
        clock=clock,
        wall_clock=lambda: clock.now + 1e9,
        timeout_seconds=timeout_seconds,
    )


def up(source: PodResources) -> bool | None:
    return source.health.up


async def answered(source: PodResources) -> None:
    """Ask until the kubelet has answered (again), believed or not."""

    async def ask() -> bool:
        before = source.health.failures
        await source.ask()
        return source.health.failures == before

    await until(ask, bool)


async def test_an_answer_has_its_times_and_stable_content(
    kubelet: FakeKubelet, source: PodResources
) -> None:
    assert (source.health.up, source.latest) == (None, None)
    admit(kubelet, "two", GPU_1, GPU_0)
    admit(kubelet, "cpu-only")
    admit(kubelet, "one", f"{GPU_0}::1", resource="nvidia.com/gpu.shared")
    expected = KubeletList(
        asked_at_seconds=1000.0,
        timestamp_seconds=1e9 + 1000.0,
        containers=(
            KubeletContainer("lab", "one", "main", {"nvidia.com/gpu.shared": (f"{GPU_0}::1",)}),
            KubeletContainer("lab", "two", "main", {WHOLE: (GPU_0, GPU_1)}),
        ),
    )
    for _ in range(5):
        assert await source.ask() == expected
    assert source.latest == expected
    assert up(source) is True
    assert source.health.last_success_timestamp_seconds == 1e9 + 1000.0
    assert source.health.failures == {}


async def test_on_an_unbroken_connection_empty_is_true(
    kubelet: FakeKubelet, source: PodResources
) -> None:
    admit(kubelet, "one", GPU_0)
    assert pods(await source.ask()) == ["one"]
    kubelet.finish("lab", "one")
    assert pods(await source.ask(lambda: True)) == []
    assert up(source) is True


async def test_a_restarted_kubelets_empty_answer_wipes_nothing(
    kubelet: FakeKubelet, source: PodResources, clock: ManualClock
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    clock.now += 2
    await kubelet.restart(empty_seconds=math.inf)
    await answered(source)
    assert pods(source.latest) == ["one"]
    assert source.latest is not None
    assert source.latest.asked_at_seconds == 1000.0
    kubelet.load_checkpoint()
    admit(kubelet, "two", GPU_1)
    assert pods(await source.ask()) == ["one", "two"]
    assert up(source) is True


async def test_without_the_api_server_the_doubt_ends_after_five_seconds(
    kubelet: FakeKubelet, source: PodResources, clock: ManualClock
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    await kubelet.restart(empty_seconds=math.inf)
    await answered(source)
    clock.now += 5
    assert pods(await source.ask()) == ["one"]
    clock.now += 0.5
    assert pods(await source.ask()) == []
    assert up(source) is True
    # From now on this connection is unbroken again.
    admit(kubelet, "two", GPU_1)
    kubelet.load_checkpoint()
    assert pods(await source.ask()) == ["one", "two"]


async def test_the_doubt_begins_anew_with_each_restart(
    kubelet: FakeKubelet, source: PodResources, clock: ManualClock
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    for _ in range(3):
        await kubelet.restart(empty_seconds=math.inf)
        await answered(source)
        clock.now += 4
        assert pods(await source.ask()) == ["one"]
        await kubelet.stop()
        await source.ask()
        await kubelet.start()
    assert pods(source.latest) == ["one"]


async def test_with_the_api_server_the_doubt_lasts_while_it_shows_the_pods(
    kubelet: FakeKubelet, source: PodResources, clock: ManualClock
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    await kubelet.restart(empty_seconds=math.inf)
    await answered(source)
    clock.now += 30
    assert pods(await source.ask(lambda: True)) == ["one"]
    assert up(source) is False
    assert source.health.failures["empty_after_restart"] == 1
    clock.now += 31
    assert source.latest is None
    assert pods(await source.ask(lambda: True)) == []
    assert up(source) is True


async def test_with_the_api_server_the_doubt_ends_when_the_pods_are_gone(
    kubelet: FakeKubelet, source: PodResources
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    await kubelet.restart(empty_seconds=math.inf)
    await answered(source)
    assert pods(await source.ask(lambda: False)) == []


async def test_a_new_socket_is_noticed_by_its_ctime_where_the_inode_is_the_same(
    kubelet: FakeKubelet, source: PodResources
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    before = os.stat(kubelet.socket)
    os.chmod(kubelet.socket, 0o700)
    kubelet.finish("lab", "one")
    after = os.stat(kubelet.socket)
    assert before.st_ino == after.st_ino
    assert before.st_ctime_ns != after.st_ctime_ns
    assert pods(await source.ask()) == ["one"]


async def test_a_new_connection_is_noticed_where_the_socket_is_the_same(
    kubelet: FakeKubelet, tmp_path: Path, clock: ManualClock
) -> None:
    path = str(tmp_path / "between.sock")
    between = Between(kubelet.socket)
    server = await asyncio.start_unix_server(between.forward, path)
    source = make(path, clock)
    try:
        admit(kubelet, "one", GPU_0)
        assert pods(await source.ask()) == ["one"]
        kubelet.finish("lab", "one")
        await between.cut()
        await answered(source)
        assert pods(source.latest) == ["one"]
    finally:
        await source.close()
        server.close()
        await between.cut()


class Between:
    """Passes connections on to another socket until they are cut."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._open: set[asyncio.Task[None]] = set()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_unix_connection(self._socket)
        pumps = {
            asyncio.create_task(pump(reader, onward_writer)),
            asyncio.create_task(pump(onward_reader, writer)),
        }
        self._open |= pumps
        await asyncio.wait(pumps)
        self._open -= pumps

    async def cut(self) -> None:
        """Cut what is open, and wait until it is."""
        pumps = set(self._open)
        for task in pumps:
            task.cancel()
        if pumps:
            await asyncio.wait(pumps)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    finally:
        writer.transport.abort()


async def test_the_last_answer_outlives_a_dead_kubelet_until_its_age(
    kubelet: FakeKubelet, source: PodResources, clock: ManualClock
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    await kubelet.stop()
    clock.now += MAX_AGE
    assert pods(await source.ask()) == ["one"]
    assert up(source) is False
    assert set(source.health.failures) == {"unavailable"}
    assert source.health.last_success_timestamp_seconds == 1e9 + 1000.0
    clock.now += 0.001
    assert await source.ask() is None
    await kubelet.start()
    await until(source.ask, lambda answer: answer is not None)
    assert pods(source.latest) == ["one"]
    assert up(source) is True
    assert source.health.detail == ""


async def test_a_refused_connection_is_named(kubelet: FakeKubelet, source: PodResources) -> None:
    await kubelet.stop()
    await source.ask()
    assert "connection refused; the kubelet is down or restarting" in source.health.detail


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("unimplemented", "unimplemented", "Kubernetes 1.20 or later"),
        ("garbage", "garbage", "not a pod-resources message"),
        ("unknown", "error", "UNKNOWN: something went wrong"),
        ("internal", "error", "INTERNAL: something went wrong"),
    ],
)
async def test_a_failing_call_is_named_and_costs_nothing_that_is_known(
    kubelet: FakeKubelet, source: PodResources, fault: Fault, reason: str, words: str
) -> None:
    admit(kubelet, "one", GPU_0)
    await source.ask()
    kubelet.fault = fault
    assert pods(await source.ask()) == ["one"]
    assert up(source) is False
    assert source.health.failures == {reason: 1}
    assert words in source.health.detail
    kubelet.fault = None
    await source.ask()
    assert up(source) is True
    assert source.health.failures == {reason: 1}


async def test_a_hanging_kubelet_is_given_up(kubelet: FakeKubelet, clock: ManualClock) -> None:
    kubelet.fault = "hang"
    source = make(kubelet.socket, clock, timeout_seconds=0.2)
    assert await source.ask() is None
    await source.close()
    assert source.health.failures == {"timeout": 1}
    assert "within 0.2 s" in source.health.detail


async def test_refusals_of_the_rate_limit_are_asked_again(
    kubelet: FakeKubelet, source: PodResources
) -> None:
    admit(kubelet, "one", GPU_0)
    kubelet.refuse_next = 2
    assert pods(await source.ask()) == ["one"]
    assert kubelet.questions == 3
    assert source.health.failures == {}


async def test_a_kubelet_that_refuses_for_ever_is_named(
    kubelet: FakeKubelet, source: PodResources
) -> None:
    kubelet.fault = "rate_limited"
    assert await source.ask() is None
    assert kubelet.questions == 6
    assert source.health.failures == {"rate_limited": 1}
    assert "more than 100 times a second" in source.health.detail


def fill(kubelet: FakeKubelet, ids: int) -> None:
    """A card beside so many ids of 100 bytes."""
    padding = [f"pad-{number:096d}" for number in range(ids)]
    kubelet.admit(
        "lab", "big", [ListedContainer("main", {WHOLE: [GPU_0], "example.com/pad": padding})]
    )


async def test_an_answer_of_six_mebibytes_is_read(
    kubelet: FakeKubelet, source: PodResources
) -> None:
    fill(kubelet, 60_000)
    answer = await source.ask()
    assert answer is not None
    (container,) = answer.containers
    assert container.devices[WHOLE] == (GPU_0,)
    assert len(container.devices["example.com/pad"]) == 60_000
    assert container.devices["example.com/pad"][:1] == ("pad-" + 96 * "0",)
    assert up(source) is True


async def test_a_larger_answer_than_the_cap_is_refused_and_not_asked_again(
    kubelet: FakeKubelet, clock: ManualClock
) -> None:
    fill(kubelet, 12_000)
    source = PodResources(
        socket=kubelet.socket,
        max_age_seconds=MAX_AGE,
        clock=clock,
        wall_clock=clock,
        max_message_bytes=1 << 20,
    )
    assert await source.ask() is None
    await source.close()
    assert kubelet.questions == 1
    assert source.health.failures == {"too_large": 1}
    assert "larger than 1 MiB" in source.health.detail


async def test_a_missing_socket_is_named_and_found_once_it_is_there(
    tmp_path: Path, clock: ManualClock
) -> None:
    path = tmp_path / "later" / "kubelet.sock"
    source = make(str(path), clock)
    assert not present(str(path))
    assert await source.ask() is None
    path.parent.mkdir()
    assert present(str(path))
    assert await source.ask() is None
    assert source.health.failures == {"socket_missing": 2}
    assert "--root-dir" in source.health.detail
    kubelet = FakeKubelet(str(path))
    await kubelet.start()
    admit(kubelet, "one", GPU_0)
    assert pods(await source.ask()) == ["one"]
    await source.close()
    await kubelet.stop()


async def test_what_is_no_kubelet_is_named(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "kubelet.sock"
    path.write_text("")
    source = make(str(path), clock)
    await source.ask()
    assert source.health.failures == {"not_a_socket": 1}
    path.unlink()

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(talk, str(path))
    await source.ask()
    await source.close()
    server.close()
    assert source.health.failures == {"not_a_socket": 1, "unavailable": 1}
    assert "not the kubelet" in source.health.detail


@pytest.fixture(params=["socket", "directory"])
def closed_socket(request: pytest.FixtureRequest) -> Iterator[str]:
    """A socket that only its owner may reach, or nobody where the tests do not run as root."""
    # Not in pytest's own folder, which another user may not enter at all.
    folder = Path(f"/tmp/qgpu-exporter-{os.getpid()}")
    folder.mkdir(mode=0o755)
    path = folder / "kubelet.sock"
    nobody = os.geteuid() != 0
    with sockets.socket(sockets.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0 if nobody else 0o700)
        if request.param == "directory":
            folder.chmod(0 if nobody else 0o700)
        yield str(path)
    folder.chmod(0o700)
    shutil.rmtree(folder)


async def test_a_socket_of_another_user_is_named(clock: ManualClock, closed_socket: str) -> None:
    source = make(closed_socket, clock)
    effective = os.geteuid()
    try:
        if effective == 0:
            os.seteuid(65534)
        await source.ask()
    finally:
        os.seteuid(effective)
        await source.close()
    assert source.health.failures == {"permission_denied": 1}
    assert "run as root" in source.health.detail


async def test_a_mounted_socket_file_of_an_ended_kubelet_is_named(
    kubelet: FakeKubelet, clock: ManualClock
) -> None:
    # As behind a mount of the file alone, the open descriptor leads to a file without a name.
    descriptor = os.open(kubelet.socket, os.O_PATH)
    source = make(f"/proc/self/fd/{descriptor}", clock)
    await kubelet.restart()
    await source.ask()
    await source.close()
    os.close(descriptor)
    assert source.health.failures == {"socket_replaced": 1}
    assert "mount its directory" in source.health.detail


def test_no_directory_is_no_kubelet(tmp_path: Path) -> None:
    assert not present("")
    assert not present(str(tmp_path / "kubelet" / "kubelet.sock"))
    (tmp_path / "file").write_text("")
    assert not present(str(tmp_path / "file" / "kubelet.sock"))
    assert present(str(tmp_path / "kubelet.sock"))
    # What cannot be told is asked, so that its health says what is wrong.
    assert present(f"/{300 * 'x'}/kubelet.sock")
