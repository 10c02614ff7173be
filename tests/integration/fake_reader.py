"""A reader child that does what it is told: `fake_reader.py DIRECTORY`.

Each start appends its pid to DIRECTORY/pids and behaves as the line of DIRECTORY/behaviours with
that number says, the last line for all later starts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from qgpu_exporter.model import (
    CardFailure,
    CardIdentity,
    CardReading,
    ReaderError,
    Reading,
    ReadingRequest,
)

DECODER = msgspec.msgpack.Decoder(ReadingRequest)
CARD = CardReading(CardIdentity(0, "GPU-5a000000-0000-4000-8000-000000000000"))


def ask(stream: BinaryIO) -> ReadingRequest | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    return DECODER.decode(stream.read(int.from_bytes(header, "big")))


def send(payload: bytes) -> None:
    sys.stdout.buffer.write(len(payload).to_bytes(4, "big") + payload)
    sys.stdout.buffer.flush()


def wait_for_ever() -> None:
    while True:
        time.sleep(3600)


def stubborn(directory: Path, *, closing: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (directory / f"stubborn-{os.getpid()}").touch()
    if closing:
        os.close(1)
    wait_for_ever()


def answer(behaviour: str, request: ReadingRequest, number: int) -> Reading:
    what, _, detail = behaviour.partition(":")
    if what == "error":
        return Reading(float(number), error=ReaderError(detail, f"it is {detail}"))
    if what == "all":
        return Reading(
            float(number), failures=(CardFailure(0, detail), CardFailure(1, detail)), calls=number
        )
    if what == "one":
        return Reading(float(number), cards=(CARD,), failures=(CardFailure(1, detail),))
    seen = ",".join(sorted(card.uuid for card in request.seen))
    return Reading(float(number), driver_version=seen, cards=(CARD,), calls=number)


def misbehave(behaviour: str, number: int, directory: Path) -> None:
    what, _, detail = behaviour.partition(":")
    if what == "crash" and number >= int(detail or 1):
        os._exit(7)
    if what == "signal":
        os.kill(os.getpid(), signal.SIGABRT)
    if what == "close":
        os.close(1)
        wait_for_ever()
    if what == "silent":
        wait_for_ever()
    if what == "stubborn":
        stubborn(directory, closing=detail == "close")
    if what == "garbage":
        sys.stdout.buffer.write(b"NVML says hello\n" * 100_000)
        sys.stdout.buffer.flush()
        wait_for_ever()
    if what == "nonsense":
        send(msgspec.msgpack.encode({"timestamp_seconds": "soon"}))
        wait_for_ever()
    if what == "chatty":
        sys.stderr.write(f"INFO round {detail}\nlibrary prints {'x' * 100_000}\n\n")
        for line in range(1000):
            sys.stderr.write(f"WARNING line {line}\n")
        sys.stderr.flush()


def main() -> None:
    directory = Path(sys.argv[1])
    behaviours = (directory / "behaviours").read_text().split()
    with (directory / "pids").open("a+") as pids:
        pids.seek(0)
        start = len(pids.read().split())
        pids.write(f"{os.getpid()}\n")
    behaviour = behaviours[min(start, len(behaviours) - 1)]
    grown = []
    number = 0
    while (request := ask(sys.stdin.buffer)) is not None:
        number += 1
        misbehave(behaviour, number, directory)
        if behaviour == "grow":
            grown.append(b"\x01" * (64 << 20))
        send(msgspec.msgpack.encode(answer(behaviour, request, number)))


if __name__ == "__main__":
    main()
