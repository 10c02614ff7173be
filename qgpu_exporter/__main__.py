"""Entry point: `python -m qgpu_exporter` and the `qgpu-exporter` command."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    # Loading the program takes a second: a signal in it must neither be lost (a container's first
    # process has no default for SIGTERM) nor end it with a traceback.  `serve` sets its own.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from qgpu_exporter.cli import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
