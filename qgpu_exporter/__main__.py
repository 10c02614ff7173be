"""Entry point: `python -m qgpu_exporter` and the `qgpu-exporter` command."""

from __future__ import annotations

import sys

from qgpu_exporter.cli import run


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
