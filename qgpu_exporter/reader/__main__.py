"""Entry point of the reader process: a request frame in, a reading frame out, until told to end.

A frame is a 4-byte big-endian length and that many bytes of MessagePack: `model.ReadingRequest`
on standard input, `model.Reading` on standard output, one answer a request.  Log lines go to
standard error as ``LEVEL message``.

Exit codes: 0 when standard input ends, 2 for wrong arguments, 3 for a frame that is no request.
The process also ends when its parent dies, whatever an NVML call may be doing then.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from typing import BinaryIO, Protocol

import msgspec

from qgpu_exporter.model import Reading, ReadingRequest

MAX_REQUEST_BYTES = 1 << 20
EXIT_BAD_FRAME = 3

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger("qgpu_exporter.reader")


class Session(Protocol):
    """What answers a request; `read` returns in bounded time and never raises."""

    def read(self, request: ReadingRequest) -> Reading:
        """One round over all cards."""


class _OneLine(logging.Formatter):
    """A record as one line, whatever its text holds."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).split())


def main(arguments: list[str] | None = None) -> None:
    """Serve requests until standard input ends; never returns."""
    options = _parse(arguments)
    frames = _claim_standard_output()
    _end_with_parent(options.parent)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Ctrl-C reaches the whole process group; the service alone decides when the reader ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests: queue.SimpleQueue[ReadingRequest] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, requests), daemon=True).start()
    _answer(_session(options), requests, frames)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m qgpu_exporter.reader")
    parser.add_argument("--backend", choices=("nvml", "simulated"), default="nvml")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds that a round may take")
    parser.add_argument("--persistence-mode", action="store_true")
    parser.add_argument("--no-gpm", action="store_true")
    parser.add_argument("--simulation", default="", help="scenario file of the simulated backend")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="pid that owns the reader")
    return parser.parse_args(arguments)


def _session(options: argparse.Namespace) -> Session:
    if options.backend == "simulated":
        from qgpu_exporter.reader.simulated import SimulatedSession

        path = options.simulation or os.environ.get("QGPU_EXPORTER_SIMULATION") or None
        return SimulatedSession(path)
    # Imported here so that simulated cards need no NVML bindings.
    from qgpu_exporter.reader.session import NvmlSession

    return NvmlSession(
        timeout_seconds=options.timeout,
        gpm=not options.no_gpm,
        persistence_mode=options.persistence_mode,
    )


def _claim_standard_output() -> BinaryIO:
    """Keep descriptor 1 for frames alone: what a library prints goes to standard error."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(descriptor, "wb")


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies.

    The signal is bound to the parent's thread that started this process: that has to be one that
    lives as long as the service.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the request above; the kernel then stays silent.
    if os.getppid() != parent:
        os._exit(0)


def _receive(stream: BinaryIO, requests: queue.SimpleQueue[ReadingRequest]) -> None:
    """Queue requests; end the process at once when the stream ends or makes no sense.

    It runs apart from the round, so that a blocked driver cannot keep the process alive.
    """
    decoder = msgspec.msgpack.Decoder(ReadingRequest)
    while True:
        header = stream.read(4)
        size = int.from_bytes(header, "big")
        if len(header) < 4:
            os._exit(0)
        if size > MAX_REQUEST_BYTES:
            _log.error("a request of %d bytes is longer than %d", size, MAX_REQUEST_BYTES)
            os._exit(EXIT_BAD_FRAME)
        payload = stream.read(size)
        if len(payload) < size:
            os._exit(0)
        try:
            requests.put(decoder.decode(payload))
        except msgspec.MsgspecError as error:
            _log.error("a frame is no request: %s", error)
            os._exit(EXIT_BAD_FRAME)


def _answer(
    session: Session, requests: queue.SimpleQueue[ReadingRequest], frames: BinaryIO
) -> None:
    encoder = msgspec.msgpack.Encoder()
    while True:
        payload = encoder.encode(session.read(requests.get()))
        try:
            frames.write(len(payload).to_bytes(4, "big") + payload)
            frames.flush()
        except OSError:
            # Nobody reads any more: the service has closed its end.
            os._exit(0)


if __name__ == "__main__":
    main()
