"""docs/metrics.md from the tables and docs/configuration.md from the settings; prints either."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from qgpu_exporter import config
from qgpu_exporter.metrics.dcgm import DCGM
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native_allocation import ALLOCATION
from qgpu_exporter.metrics.native_card import (
    CLOCKS,
    ERRORS,
    IDENTITY,
    LINKS,
    MEMORY,
    POWER,
    STATE,
    TEMPERATURES,
    UTILIZATION,
)
from qgpu_exporter.metrics.native_mig import MIG, PROFILING
from qgpu_exporter.metrics.native_node import NODE_FAMILIES
from qgpu_exporter.metrics.native_usage import USAGE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.metrics.tke import TKE

AnyFamily = Family[Any, Any]

SECTIONS: tuple[tuple[str, str, Sequence[AnyFamily]], ...] = (
    ("Allocations", "native", ALLOCATION),
    ("Usage", "native", USAGE),
    ("Cards", "native", IDENTITY),
    ("Memory", "native", MEMORY),
    ("Utilisation", "native", UTILIZATION),
    ("Clocks", "native", CLOCKS),
    ("Temperatures", "native", TEMPERATURES),
    ("Power", "native", POWER),
    ("PCIe, NVLink and fabric", "native", LINKS),
    ("Errors and recovery", "native", ERRORS),
    ("State", "native", STATE),
    ("Profiling", "native", PROFILING),
    ("MIG", "native", MIG),
    ("Pods and software of the node", "native", NODE_FAMILIES),
    ("The exporter itself", "always", SERVICE),
    ("Names of dcgm-exporter", "dcgm", DCGM),
    ("Names of TKE's exporters", "tke", TKE),
)
"""Every table: title, dialect (as --metrics.dialects has it) and families."""

INTRODUCTION = """\
# Metrics

Made from the tables in `qgpu_exporter/metrics/` by `make docs`; edit those instead.

A series that is absent says that the value is not offered here: by this card, this driver, or
because its source does not answer (`qgpu_exporter_source_up`). A zero is a measurement.

*Since* is the GPU generation that first offers a value. Labels in brackets are there only where
they are known. `process_*` (the service) and `qgpu_exporter_reader_process_*` (its reader
process) are those of the Prometheus client library.

Which dialects are exported is chosen by `--metrics.dialects`; `native,dcgm` is the default.
In OpenMetrics a counter of another dialect is of type unknown, since its name does not end in
`_total`.
"""

_UNITS = (
    ("(in MHz)", "MHz"),
    ("(in C)", "°C"),
    ("(in W)", "W"),
    ("(in mJ)", "mJ"),
    ("(in MiB)", "MiB"),
    ("(in ns)", "ns"),
    ("(in %)", "%"),
    ("(in MB/s)", "MB/s"),
    ("(in B/s)", "B/s"),
    ("in MiB", "MiB"),
    ("GiB", "GiB"),
    ("percent", "%"),
    ("watts", "W"),
    ("Celsius", "°C"),
)
"""Words of a help text that tell the unit where the name has none; the first found counts."""


def unit(family: AnyFamily) -> str:
    """The unit of a family's values as a reader knows it; empty for plain numbers."""
    if family.name.endswith("_bytes_per_second"):
        return "bytes/s"
    if family.unit:
        return family.unit
    return next((shown for words, shown in _UNITS if words in family.help), "")


def markdown() -> str:
    """The whole page, ending with one newline."""
    parts = [INTRODUCTION]
    parts += (_section(*section) for section in SECTIONS)
    return "\n".join(parts)


def _section(title: str, dialect: str, families: Sequence[AnyFamily]) -> str:
    head = f"## {title}\n\nDialect: {dialect}.\n" if dialect != "always" else f"## {title}\n"
    rows = [_row(_cells(family)) for family in families]
    names = ("Name", "Type", "Unit", "Labels", "Meaning", "Origin", "Since")
    return "\n".join([head, _row(names), _row(["---"] * len(names)), *rows, ""])


def _cells(family: AnyFamily) -> tuple[str, ...]:
    fixed = [f"`{label}`" for label in family.scope.labels]
    optional = [f"[`{label}`]" for label in family.scope.more_label_names]
    return (
        f"`{family.name}`",
        family.type,
        unit(family),
        " ".join(fixed + optional),
        family.help,
        family.origin,
        family.since,
    )


def _row(cells: Iterable[str]) -> str:
    shown = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(shown)} |"


CONFIGURATION = """\
# Configuration

Made from the settings in `qgpu_exporter/config.py` by `make docs`; edit those instead.

Every setting is a flag, an environment variable and a key of the YAML file that `--config.file`
(or `QGPU_EXPORTER_CONFIG_FILE`) names. A flag is stronger than a variable, a variable than the
file, the file than the default. In a variable a list is separated by commas; an empty variable is
as if it were not there. In the file the dots may be written as nested keys:

```yaml
interval: 10s
metrics:
  dialects: native
devices.exit-after: 10m
web:
  listen-address: [":5678", "127.0.0.1:5679"]
```

A wrong setting ends the command with exit code 2 and one line that names the flag, the variable,
or the file and its line. Durations are written as Prometheus does (`500ms`, `5s`, `1m30s`), sizes
with their unit (`256MiB`). The node's name is `--node-name`, else `$NODE_NAME`, else the host name.

TLS, authentication and rate limit are in a [file of their own](web-configuration.md).
"""


def configuration() -> str:
    """The page of all settings, ending with one newline."""
    parts = [CONFIGURATION]
    group = ""
    for _, option in config.options():
        if option.group != group:
            group = option.group
            head = ("Flag", "Variable", "Value", "Default", "Meaning")
            parts.append(f"\n## {group}\n\n{_row(head)}\n{_row(['---'] * len(head))}\n")
        parts.append(_row(_setting_cells(option)) + "\n")
    return "".join(parts)


def _setting_cells(option: config.Option[Any]) -> tuple[str, ...]:
    value = "true|false" if option.is_switch else option.metavar
    words = [f"`{word}`" for word in value.split("|")]
    times = ", may be repeated" if option.repeatable else ""
    default = f"`{option.default_text}`" if option.default_text else ""
    return (
        f"`--{option.flag}`",
        f"`{option.environment}`",
        " ".join(words) + times,
        default,
        option.help,
    )


PAGES = {"metrics": markdown, "configuration": configuration}


def main() -> None:
    """Print the page that the first argument names, the metrics without one."""
    print(PAGES[(sys.argv[1:] or ["metrics"])[0]](), end="")


if __name__ == "__main__":
    main()
