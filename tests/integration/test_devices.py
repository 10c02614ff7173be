"""The devices source with real children: ones that answer, crash, hang, grow, babble or stay."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from qgpu_exporter.model import ReaderHealth, SeenSamples
from qgpu_exporter.sources.devices import Devices
from qgpu_exporter.sources.reader_process import kill

FAKE = Path(__file__).with_name("fake_reader.py")
ROOT = FAKE.parents[2]
GUARD_SECONDS = 10.0
"""Only against a hang: no verdict depends on it."""
UUID = "GPU-5a000000-0000-4000-8000-000000000000"
GIB = 1 << 30


class HandClock:
    """A monotonic clock that moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A directory in which fake readers find what to do, and the source under test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = HandClock()
        self.made: list[Devices] = []

    def devices(
        self,
        *behaviours: str,
        timeout_seconds: float = GUARD_SECONDS,
        max_memory_bytes: int = GIB,
        kill: Callable[[int], None] = kill,
        kill_wait_seconds: float = GUARD_SECONDS,
    ) -> Devices:
        (self.directory / "behaviours").write_text("\n".join(behaviours))
        devices = Devices(
            command=[sys.executable, str(FAKE), str(self.directory)],
            environment={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout_seconds=timeout_seconds,
            max_memory_bytes=max_memory_bytes,
            clock=self.clock,
            wall_clock=lambda: 1_754_000_000.0,
            start_seconds=0.0,
            grace_seconds=0.0,
            kill_wait_seconds=kill_wait_seconds,
            kill=kill,
            jitter=lambda: 1.0,
        )
        self.made.append(devices)
        return devices

    def terminate(self, pid: int) -> None:
        """What a blocked driver makes of a kill: the fake ignores it, once it is so far."""
        for _ in range(int(GUARD_SECONDS * 100)):
            if (self.directory / f"stubborn-{pid}").exists():
                break
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)

    def pids(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.directory / "pids").read_text().split()]
        except FileNotFoundError:
            return []


def exists(pid: int) -> bool:
    """Also a zombie exists."""
    return Path(f"/proc/{pid}").exists()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(GUARD_SECONDS):
        while not condition():  # noqa: ASYNC110 - what happens in other processes is no event here
            await asyncio.sleep(0.01)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """No child outlives a test, and none is a zombie after it."""
    rig = Rig(tmp_path)
    yield rig
    for devices in rig.made:
        await devices.stop()
        for pid in rig.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await until(lambda devices=devices: devices.reader_health.left_behind == 0)  # type: ignore[misc] # mypy infers no type for a lambda's default
    assert [pid for pid in rig.pids() if exists(pid)] == []
    await asyncio.sleep(0)  # the transports' last callbacks


# --------------------------------------------------------------------------- a good child


async def test_one_child_answers_all_rounds(rig: Rig) -> None:
    devices = rig.devices("answer")
    assert (devices.health.up, devices.reader_health.pid) == (None, None)
    assert rig.pids() == []
    first = await devices.read()
    second = await devices.read((SeenSamples(UUID),))
    assert first is not None
    assert second is not None
    assert (first.calls, second.calls) == (1, 2)
    assert (first.driver_version, second.driver_version) == ("", UUID)
    assert devices.latest is second
    assert devices.health.up is True
    assert devices.health.last_success_timestamp_seconds == 1_754_000_000.0
    assert devices.reader_health == ReaderHealth(pid=rig.pids()[0])
    assert len(rig.pids()) == 1


async def test_rounds_wait_for_each_other(rig: Rig) -> None:
    devices = rig.devices("answer")
    readings = await asyncio.gather(*(devices.read() for _ in range(5)))
    assert [reading.calls for reading in readings if reading] == [1, 2, 3, 4, 5]
    assert len(rig.pids()) == 1


async def test_log_lines_are_relayed_once_and_not_too_many(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qgpu_exporter.sources.reader_process")
    devices = rig.devices("chatty:one")
    await devices.read()
    await devices.read()
    await devices.stop()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines[0] == ("INFO", "reader: round one")
    assert lines[1][0] == "WARNING"
    assert lines[1][1].startswith("reader: library prints xxx")
    assert len(lines[1][1]) <= 2010
    assert lines.count(("INFO", "reader: round one")) == 1
    assert lines.count(("WARNING", "reader: line 7")) == 1
    assert len(lines) == 60
    assert lines[-1] == (
        "WARNING",
        "reader: more lines than can be read; the rest of this minute is left out",
    )


# --------------------------------------------------------------------------- failing children


@pytest.mark.parametrize(
    ("behaviour", "reason", "detail"),
    [
        ("crash", "crash", "the reader ended with status 7"),
        ("signal", "crash", "the reader was ended by SIGABRT"),
        ("close", "crash", "the reader closed its output"),
        ("garbage", "garbage", "the reader wrote what is no frame"),
        (
            "nonsense",
            "garbage",
            "the reader wrote no reading: Expected `float`, got `str` - at `$.timestamp_seconds`",
        ),
    ],
)
async def test_failing_child_is_replaced_after_a_pause(
    rig: Rig, behaviour: str, reason: str, detail: str
) -> None:
    devices = rig.devices(behaviour, "answer")
    assert await devices.read() is None
    health = devices.health
    assert (health.up, health.detail, health.failures) == (False, detail, {reason: 1})
    assert devices.reader_health == ReaderHealth(restarts={reason: 1})
    assert not exists(rig.pids()[0])
    pause = devices.retry_after_seconds
    assert pause == 1.0
    assert await devices.read() is None
    assert len(rig.pids()) == 1
    rig.clock.now += 1.0
    assert devices.retry_after_seconds is None
    assert await devices.read() is not None
    assert (devices.health.up, devices.health.detail) == (True, "")
    assert devices.health.failures == {reason: 1}


async def test_silent_child_is_killed_and_replaced(rig: Rig) -> None:
    devices = rig.devices("silent", timeout_seconds=0.2)
    assert await devices.read() is None
    assert devices.health.detail == "the reader did not answer within 0.2 s"
    assert devices.reader_health.restarts == {"silent": 1}
    await until(lambda: not any(exists(pid) for pid in rig.pids()))


async def test_child_that_ended_between_rounds_is_noticed(rig: Rig) -> None:
    devices = rig.devices("answer")
    await devices.read()
    os.kill(rig.pids()[0], signal.SIGKILL)
    await until(lambda: devices.reader_health.pid is None)
    assert await devices.read() is None
    assert devices.health.detail == "the reader was ended by SIGKILL"
    rig.clock.now += 1.0
    assert await devices.read() is not None


async def test_command_that_does_not_exist(rig: Rig) -> None:
    devices = Devices(
        command=[str(rig.directory / "none")],
        timeout_seconds=1.0,
        max_memory_bytes=GIB,
        clock=rig.clock,
        wall_clock=lambda: 0.0,
    )
    assert await devices.read() is None
    assert devices.health.detail.startswith("cannot start the reader: ")
    assert devices.reader_health.restarts == {"crash": 1}
    await devices.stop()


async def test_pauses_double_up_to_a_minute_and_end_with_a_steady_child(rig: Rig) -> None:
    devices = rig.devices(*["crash"] * 8, "crash:2", "answer")
    pauses = []
    for _ in range(8):
        assert await devices.read() is None
        pauses.append(devices.retry_after_seconds)
        rig.clock.now += pauses[-1] or 0.0
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert await devices.read() is not None
    rig.clock.now += 60.0
    assert await devices.read() is None
    assert devices.retry_after_seconds == 1.0


async def test_child_above_the_ceiling_is_replaced_and_its_reading_counts(rig: Rig) -> None:
    devices = rig.devices("grow", "answer", max_memory_bytes=64 << 20)
    reading = await devices.read()
    assert reading is not None
    assert devices.health.up is True
    assert devices.reader_health == ReaderHealth(restarts={"memory": 1})
    rig.clock.now += 1.0
    assert await devices.read() is not None
    assert devices.reader_health == ReaderHealth(rig.pids()[1], {"memory": 1})


async def test_cancelled_round_leaves_no_answer_for_the_next_one(rig: Rig) -> None:
    devices = rig.devices("silent", "answer")
    asking = asyncio.create_task(devices.read())
    await until(lambda: len(rig.pids()) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    reading = await devices.read()
    assert reading is not None
    assert reading.calls == 1
    assert not exists(rig.pids()[0])


# --------------------------------------------------------------------------- a failing driver


@pytest.mark.parametrize("reason", ["library_not_found", "driver_not_loaded", "no_permission"])
async def test_reader_without_a_driver_is_asked_again(rig: Rig, reason: str) -> None:
    devices = rig.devices(f"error:{reason}")
    assert await devices.read() is None
    assert await devices.read() is None
    assert (devices.health.up, devices.health.detail) == (False, f"it is {reason}")
    assert devices.health.failures == {reason: 2}
    assert len(rig.pids()) == 1
    assert devices.unusable_since_seconds is None
    assert devices.latest is None


@pytest.mark.parametrize("reason", ["mismatch", "unknown_error"])
async def test_fault_that_lasts_as_long_as_the_process_gets_a_new_reader(
    rig: Rig, reason: str
) -> None:
    devices = rig.devices(f"error:{reason}", f"error:{reason}", "answer")
    assert await devices.read() is None
    since = [devices.unusable_since_seconds]
    rig.clock.now += 1.0
    assert await devices.read() is None
    since.append(devices.unusable_since_seconds)
    assert devices.reader_health.restarts == {reason: 2}
    rig.clock.now += 2.0
    assert await devices.read() is not None
    since.append(devices.unusable_since_seconds)
    assert since == [1000.0, 1000.0, None]
    assert len(set(rig.pids())) == 3


async def test_all_cards_unknown_is_a_failure_that_still_names_the_cards(rig: Rig) -> None:
    devices = rig.devices("all:unknown_error", "answer")
    reading = await devices.read()
    assert reading is not None
    assert [failure.reason for failure in reading.failures] == ["unknown_error"] * 2
    assert devices.health.up is False
    assert devices.health.failures == {"unknown_error": 1}
    assert devices.unusable_since_seconds == 1000.0
    assert devices.reader_health.restarts == {"unknown_error": 1}


async def test_reader_whose_cards_are_all_blocked_is_replaced_after_a_minute(rig: Rig) -> None:
    devices = rig.devices("all:timeout", "answer")
    for moment in (1000.0, 1030.0, 1059.0):
        rig.clock.now = moment
        assert await devices.read() is not None
        assert devices.health.up is True
    assert devices.reader_health.restarts == {}
    rig.clock.now = 1060.0
    await devices.read()
    assert devices.reader_health.restarts == {"unanswered": 1}


async def test_reader_with_one_blocked_card_is_replaced_only_after_long(rig: Rig) -> None:
    devices = rig.devices("one:timeout", "answer")
    await devices.read()
    rig.clock.now += 1799.0
    await devices.read()
    assert devices.reader_health.restarts == {}
    rig.clock.now += 1.0
    await devices.read()
    assert devices.reader_health.restarts == {"unanswered": 1}


async def test_lost_cards_are_no_reason_for_a_new_reader(rig: Rig) -> None:
    devices = rig.devices("all:lost")
    for _ in range(3):
        assert await devices.read() is not None
        rig.clock.now += 3600.0
    assert devices.reader_health.restarts == {}


# --------------------------------------------------------------------------- children that stay


async def test_children_that_cannot_be_killed_do_not_multiply(rig: Rig) -> None:
    devices = rig.devices(
        "stubborn:close",
        "stubborn:close",
        "answer",
        kill=rig.terminate,
        kill_wait_seconds=0.05,
    )
    for left in (1, 2):
        assert await devices.read() is None
        assert devices.reader_health.left_behind == left
        rig.clock.now += 60.0
    for _ in range(3):
        assert await devices.read() is None
        rig.clock.now += 60.0
    assert devices.health.failures == {"crash": 2, "stuck": 3}
    assert devices.health.detail.startswith("2 readers cannot be killed")
    assert len(rig.pids()) == 2
    os.kill(rig.pids()[0], signal.SIGKILL)
    await until(lambda: devices.reader_health.left_behind == 1)
    assert await devices.read() is not None
    assert devices.health.up is True
    assert not exists(rig.pids()[0])


# --------------------------------------------------------------------------- letting go


async def test_released_reader_is_gone_and_comes_back(rig: Rig) -> None:
    devices = rig.devices("answer")
    await devices.read()
    await devices.release("MIG is being reconfigured")
    assert not exists(rig.pids()[0])
    assert (devices.health.up, devices.health.released) == (False, True)
    assert devices.health.detail == "MIG is being reconfigured"
    assert await devices.read() is None
    await devices.release("MIG is being reconfigured")
    assert devices.reader_health == ReaderHealth(restarts={"released": 1})
    devices.resume()
    assert await devices.read() is not None
    assert (devices.health.up, devices.health.released) == (True, False)
    assert devices.health.failures == {}


async def test_release_for_a_time_ends_by_itself(rig: Rig) -> None:
    devices = rig.devices("answer")
    await devices.read()
    await devices.release("asked for", until_seconds=1300.0)
    rig.clock.now = 1299.0
    assert await devices.read() is None
    rig.clock.now = 1300.0
    assert not devices.released
    assert await devices.read() is not None


async def test_release_and_stop_do_not_wait_for_a_round(rig: Rig) -> None:
    devices = rig.devices("silent")
    asking = asyncio.create_task(devices.read())
    await until(lambda: len(rig.pids()) == 1)
    await devices.release("asked for")
    assert await asyncio.wait_for(asking, GUARD_SECONDS) is None
    assert devices.health.failures == {}
    devices.resume()
    asking = asyncio.create_task(devices.read())
    await until(lambda: len(rig.pids()) == 2)
    await devices.stop()
    assert await asyncio.wait_for(asking, GUARD_SECONDS) is None
    assert not any(exists(pid) for pid in rig.pids())
    assert await devices.read() is None


async def test_release_says_so_when_the_driver_is_still_held(rig: Rig) -> None:
    devices = rig.devices("stubborn", kill=rig.terminate, kill_wait_seconds=0.05)
    asking = asyncio.create_task(devices.read())
    await until(lambda: len(rig.pids()) == 1)
    await devices.release("asked for")
    await asking
    assert devices.health.detail == ("asked for; a reader that cannot be killed still holds it")


async def test_stop_before_the_first_round_is_nothing(rig: Rig) -> None:
    devices = rig.devices("answer")
    await devices.stop()
    assert await devices.read() is None
    assert rig.pids() == []


async def test_children_end_with_a_service_that_is_killed(tmp_path: Path) -> None:
    """The child's input closes with its parent."""
    (tmp_path / "behaviours").write_text("answer")
    script = f"""
import asyncio, sys
from qgpu_exporter.sources.devices import Devices
import time
async def main():
    devices = Devices(command=[sys.executable, {str(FAKE)!r}, {str(tmp_path)!r}],
        timeout_seconds=10, max_memory_bytes=1 << 40, clock=time.monotonic, wall_clock=time.time)
    assert await devices.read() is not None
    print("ready", flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    service = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert service.stdout is not None
    async with asyncio.timeout(GUARD_SECONDS):
        assert await service.stdout.readline() == b"ready\n"
    child = int((tmp_path / "pids").read_text())
    assert exists(child)
    service.kill()
    await service.wait()
    await until(lambda: not exists(child) or "Z" in state(child))


def state(pid: int) -> str:
    """The process's state letter; an orphan of ours may wait for a slow init to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
