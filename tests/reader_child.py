"""A reader process for tests: started for real, asked over its pipes, always ended."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import msgspec

from qgpu_exporter.model import Reading, ReadingRequest, SeenSamples

HANG_SECONDS = 30.0
"""No test waits longer for an answer: a reader that is silent that long has failed it."""


class ReaderChild:
    """One child, to be used with `with`; `errors` is what it wrote on standard error."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 10.0,
    ) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "qgpu_exporter.reader"),
                *("--timeout", str(timeout_seconds)),
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONFAULTHANDLER": "0", **(environment or {})},
        )
        self.errors = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        _, errors = self.process.communicate()
        self.errors = errors.decode()
        if error is not None:
            print(self.errors, file=sys.stderr)

    def ask(self, *seen: SeenSamples) -> Reading:
        """One round."""
        self.send(ReadingRequest(seen))
        return self.receive()

    def ask_until(self, wanted: Callable[[Reading], bool]) -> Reading:
        """Rounds until one is as wanted; a guard ends a test that waits in vain."""
        end = time.monotonic() + HANG_SECONDS
        while not wanted(reading := self.ask()):
            assert time.monotonic() < end, f"the last reading was {reading}"
            time.sleep(0.05)
        return reading

    def send(self, request: ReadingRequest) -> None:
        """Write a request."""
        assert self.process.stdin is not None
        payload = msgspec.msgpack.encode(request)
        self.process.stdin.write(len(payload).to_bytes(4, "big") + payload)
        self.process.stdin.flush()

    def receive(self) -> Reading:
        """Read an answer."""
        size = int.from_bytes(self._exactly(4), "big")
        return msgspec.msgpack.decode(self._exactly(size), type=Reading)

    def close_input(self) -> None:
        """What the service does to end it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None

    def _exactly(self, size: int) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        data = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(data) < size:
                assert selector.select(HANG_SECONDS), "the reader is silent"
                chunk = os.read(descriptor, size - len(data))
                assert chunk, "the reader has ended"
                data += chunk
        return data
