"""Writes the dashboards' JSON files from their Python sources: `python -m dashboards.build`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import exporter, fleet, node, shares, workloads

FOLDER = Path(__file__).resolve().parent


def dashboards() -> dict[str, str]:
    """Each file's name and content."""
    pages = [module.build() for module in (fleet, node, workloads, shares, exporter)]
    return {
        f"{page.uid}.json": json.dumps(
            page.builder.build(), cls=JSONEncoder, sort_keys=True, indent=2
        )
        + "\n"
        for page in pages
    }


def main() -> int:
    """Write all files."""
    for name, text in dashboards().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
