"""One reader child: its start, one question at a time, its log lines, its end; no policy."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

import msgspec

from qgpu_exporter.model import Reading, ReadingRequest

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 16 << 20
"""A reading of 16 cards with full process lists has some hundred kB."""
POLL_SECONDS = 0.02

MAX_LINE_BYTES = 2000
MAX_REMEMBERED_LINES = 256
REPEAT_SECONDS = 3600.0
"""A line that the reader logs again within this time is not logged again."""
WINDOW_SECONDS = 60.0
MAX_LINES_A_WINDOW = 60

_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*)")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Reading)


class ReaderFailure(Exception):
    """No answer; `reason` is ``crash``, ``silent`` or ``garbage``, the text is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Relay:
    """Passes the readers' log lines on: each text once an hour, and not too many at all.

    It outlives the children, so that one that is started again and again does not repeat itself.
    `clock` is monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._window_began = clock()
        self._in_window = 0

    def line(self, raw: bytes) -> None:
        """Log one line of a reader: ``LEVEL message``, or anything that a library prints."""
        text = raw[:MAX_LINE_BYTES].decode(errors="replace").strip()
        now = self._clock()
        if not text or now - self._seen.get(text, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._seen.pop(text, None)
        self._seen[text] = now
        if len(self._seen) > MAX_REMEMBERED_LINES:
            del self._seen[next(iter(self._seen))]
        if now - self._window_began >= WINDOW_SECONDS:
            self._window_began, self._in_window = now, 0
        self._in_window += 1
        if self._in_window == MAX_LINES_A_WINDOW:
            log.warning("reader: more lines than can be read; the rest of this minute is left out")
        if self._in_window >= MAX_LINES_A_WINDOW:
            return
        match = _LEVEL.fullmatch(text)
        level = logging.getLevelNamesMapping()[match[1]] if match else logging.WARNING
        log.log(level, "reader: %s", match[2] if match else text)


class ReaderProcess:
    """A running child; made by `start`.  `out_of_step`: an answer may still be on its way."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        requests: asyncio.WriteTransport,
        answers: tuple[asyncio.ReadTransport, asyncio.StreamReader],
        lines: tuple[asyncio.ReadTransport, asyncio.StreamReader],
        relay: Relay,
    ) -> None:
        self.pid = process.pid
        self.out_of_step = False
        self.answered = False
        self._process = process
        self._requests = requests
        self._answers_transport, self._answers = answers
        self._lines_transport, self._lines = lines
        self._relaying = asyncio.create_task(self._relay(relay))

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str] | None, relay: Relay
    ) -> ReaderProcess:
        """Start `command`; raises `ReaderFailure` where that is not possible.

        It is started by the event loop's own thread: a child that asks to be killed with its
        parent is killed when the thread ends that started it.
        """
        try:
            process = _spawn(command, environment)
        except OSError as error:
            raise ReaderFailure("crash", f"cannot start the reader: {error}") from error
        loop = asyncio.get_running_loop()
        requests, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        answers, lines = asyncio.StreamReader(), asyncio.StreamReader()
        answers_transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(answers), process.stdout
        )
        lines_transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), process.stderr
        )
        return cls(process, requests, (answers_transport, answers), (lines_transport, lines), relay)

    @property
    def alive(self) -> bool:
        """It has not ended; an ended child is reaped by asking."""
        return self._process.poll() is None

    async def ask(self, request: ReadingRequest, seconds: float) -> Reading:
        """One round; raises `ReaderFailure` when there is no good answer within `seconds`."""
        self.out_of_step = True
        payload = _encoder.encode(request)
        self._requests.write(len(payload).to_bytes(4, "big") + payload)
        try:
            async with asyncio.timeout(seconds):
                size = int.from_bytes(await self._answers.readexactly(4), "big")
                if size > MAX_FRAME_BYTES:
                    raise ReaderFailure("garbage", "the reader wrote what is no frame")
                frame = await self._answers.readexactly(size)
            reading = _decoder.decode(frame)
        except TimeoutError:
            detail = f"the reader did not answer within {seconds:g} s"
            raise ReaderFailure("silent", detail) from None
        except asyncio.IncompleteReadError:
            await self._gone(POLL_SECONDS * 5)
            raise ReaderFailure("crash", self.ending) from None
        except msgspec.MsgspecError as error:
            raise ReaderFailure("garbage", f"the reader wrote no reading: {error}") from None
        self.out_of_step = False
        self.answered = True
        return reading

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        status = self._process.poll()
        if status is None:
            return "the reader closed its output"
        if status >= 0:
            return f"the reader ended with status {status}"
        try:
            return f"the reader was ended by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"the reader was ended by signal {-status}"

    def resident_bytes(self) -> int | None:
        """Its resident memory, or None where that cannot be read.

        Read from the /proc of this process's own pid namespace, which is where the child's pid
        means this child; the procfs that is configured may be another namespace's.
        """
        try:
            with open(f"/proc/{self.pid}/status", "rb") as status:
                for line in status:
                    if line.startswith(b"VmRSS:"):
                        return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass
        return None

    async def end(
        self, kill: Callable[[int], None], *, grace_seconds: float, wait_seconds: float
    ) -> bool:
        """End it and say whether it is gone.

        Its input is closed, which a reader obeys unless it is blocked; after `grace_seconds`
        it is killed and waited for, at most `wait_seconds`.
        """
        self._close_input()
        gone = grace_seconds > 0 and await self._gone(grace_seconds)
        if not gone and self.alive:
            # It has not been reaped, so its pid is still its own.
            kill(self.pid)
            gone = await self._gone(wait_seconds)
        if gone or not self.alive:
            # Its last words are in the pipe; only a grandchild could keep that open.
            await asyncio.wait({self._relaying}, timeout=POLL_SECONDS * 5)
        self.forget()
        return not self.alive

    def forget(self) -> None:
        """Let go of its pipes, whatever it does."""
        self._relaying.cancel()
        for transport in (self._answers_transport, self._lines_transport):
            transport.close()
        self._close_input()

    def _close_input(self) -> None:
        if not self._requests.is_closing():  # closing twice is an error in Python 3.11
            self._requests.abort()

    async def _gone(self, seconds: float) -> bool:
        """Wait for its end.  Asked again and again: there is no other reaper to wait for."""
        try:
            async with asyncio.timeout(seconds):
                while self.alive:  # noqa: ASYNC110 - the exit of a child is no event of the loop
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            return False
        return True

    async def _relay(self, relay: Relay) -> None:
        """Read its log lines as they come, so that it never blocks on them."""
        rest = b""
        while chunk := await self._lines.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                relay.line(line)
            if len(rest) > MAX_LINE_BYTES:
                relay.line(rest)
                rest = b""
        relay.line(rest)


def _spawn(
    command: Sequence[str], environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Its own session: Ctrl-C on the terminal is the service's to handle, which then ends it."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if environment is None else dict(environment),
        bufsize=0,
        start_new_session=True,
    )


def kill(pid: int) -> None:
    """SIGKILL; a process that is blocked in the driver takes it only when the driver returns."""
    os.kill(pid, signal.SIGKILL)
