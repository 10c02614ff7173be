"""Starts the programs of the stack as children, and ends them whatever happens."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

T = TypeVar("T")

HANG_SECONDS = 120.0
"""Only a guard: what must come is waited for, and this ends a wait for what never does."""


class Running:
    """A program with its output in a file; ended by SIGTERM, and by SIGKILL if that does not do."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def interrupt(self) -> int:
        """Send what Ctrl-C sends, and return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(HANG_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        with self.log.open("wb") as output:
            # A group of its own, so that a Ctrl-C reaches the parent alone, which ends them all.
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(
    answer: Callable[[], T | None], seconds: float = HANG_SECONDS, pause: float = 0.2
) -> T:
    """The first answer that is neither None nor false; raises TimeoutError after the guard."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = answer()
        if found:
            return found
        time.sleep(pause)
    raise TimeoutError(f"no answer within {seconds:.0f} s")


# --------------------------------------------------------------------------- alertmanager

_TEMPLATES = Path("/usr/share/prometheus/alertmanager")
"""Debian's Alertmanager reads its built-in templates from here, wherever it is unpacked."""
_WITH_TEMPLATES = (
    "mount -t tmpfs none /usr/share && mkdir /usr/share/prometheus"
    f' && ln -s "$1" {_TEMPLATES} && shift && exec "$@"'
)


def alertmanager(program: str) -> list[str]:
    """The command that starts a Debian Alertmanager, installed or only unpacked.

    An unpacked one gets a mount namespace of its own, in which its templates are where it looks;
    where that is forbidden and we are root, a link in the system does.
    """
    if _TEMPLATES.is_dir():
        return [program]
    unpacked = Path(program).parents[1] / "share/prometheus/alertmanager"
    apart = ["unshare", "--map-root-user", "--mount", "sh", "-c", _WITH_TEMPLATES, "sh"]
    trial = subprocess.run(
        [*apart, str(unpacked), "true"], capture_output=True, text=True, check=False, timeout=30
    )
    if trial.returncode == 0:
        return [*apart, str(unpacked), program]
    _TEMPLATES.parent.mkdir(exist_ok=True)
    _TEMPLATES.symlink_to(unpacked)
    return [program]
