"""The reader process ends with its input and with its parent, whatever the driver does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qgpu_exporter.model import ReadingRequest
from tests.nvml_stub import Stub, presets
from tests.reader_child import HANG_SECONDS, ReaderChild

# Starts a reader whose input stays open when this process dies, and says its pid.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "qgpu_exporter.reader", "--timeout", "1000"])
print(child.pid, flush=True)
time.sleep(1000)
"""


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + HANG_SECONDS
    while Path(f"/proc/{pid}").exists():
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if status == "Z":
            # Adopted by a process that has not looked after it yet.
            return
        assert time.monotonic() < end, "the reader outlives its parent"
        time.sleep(0.02)


def wait_for_call(stub: Stub, call: str) -> None:
    end = time.monotonic() + HANG_SECONDS
    while call not in stub.calls():
        assert time.monotonic() < end, f"{call} was never made"
        time.sleep(0.02)


@pytest.mark.parametrize("backend", ["nvml", "simulated"])
def test_it_ends_when_its_input_ends(tmp_path: Path, backend: str) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    with ReaderChild("--backend", backend, environment=stub.environment()) as child:
        child.ask()
        child.close_input()
        assert child.process.wait(timeout=HANG_SECONDS) == 0
    assert child.errors == ""


def test_it_ends_while_every_call_is_blocked(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"hang.*": 1000})
    with ReaderChild(environment=stub.environment(), timeout_seconds=1000.0) as child:
        child.send(ReadingRequest())
        wait_for_call(stub, "nvmlInitWithFlags")
        child.close_input()
        assert child.process.wait(timeout=HANG_SECONDS) == 0


@pytest.mark.parametrize("blocked", [False, True])
def test_it_dies_with_its_parent(tmp_path: Path, *, blocked: bool) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    if blocked:
        stub.set({"hang.*": 1000})
    read_end, write_end = os.pipe()
    try:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=read_end,
            stdout=subprocess.PIPE,
            env={**os.environ, **stub.environment()},
        )
        assert parent.stdout is not None
        reader = int(parent.stdout.readline())
        # One empty request; the pipe stays open.
        os.write(write_end, b"\x00\x00\x00\x01\x80")
        wait_for_call(stub, "nvmlInitWithFlags")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        wait_until_gone(reader)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("frame", [b"\x00\x00\x00\x01\xc1", b"\xff\xff\xff\xff", b"GET / HTTP/1.1"])
def test_it_ends_on_what_is_no_request(frame: bytes) -> None:
    with ReaderChild("--backend", "simulated") as child:
        assert child.process.stdin is not None
        child.process.stdin.write(frame)
        child.process.stdin.flush()
        assert child.process.wait(timeout=HANG_SECONDS) == 3
    assert child.errors.startswith("ERROR ")
    assert child.errors.count("\n") == 1


def test_half_a_request_at_the_end_is_the_end() -> None:
    with ReaderChild("--backend", "simulated") as child:
        assert child.process.stdin is not None
        child.process.stdin.write(b"\x00\x00\x00\x09\x80")
        child.close_input()
        assert child.process.wait(timeout=HANG_SECONDS) == 0


def test_ctrl_c_is_the_services_to_handle() -> None:
    with ReaderChild("--backend", "simulated") as child:
        child.ask()
        child.process.send_signal(signal.SIGINT)
        assert len(child.ask().cards) == 8


def test_a_wrong_argument_ends_it() -> None:
    with ReaderChild("--backend", "cuda") as child:
        assert child.process.wait(timeout=HANG_SECONDS) == 2
