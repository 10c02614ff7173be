"""Reads a dcgm-exporter counters file: which fields and labels it asks for, and what is wrong."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from qgpu_exporter.metrics.dcgm import LABELS, ChosenField
from qgpu_exporter.metrics.dcgm_fields import FIELDS


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be used; `line` counts from 1."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collectors:
    """What a counters file asks for, in its order."""

    fields: tuple[ChosenField, ...] = ()
    labels: tuple[str, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    unserved: tuple[str, ...] = ()
    """Names that are well written and that NVML cannot serve; each once."""


def parse_collectors(text: str) -> Collectors:
    """The meaning of a counters file (``FIELD, type, help``, one a line).

    A byte order mark, CRLF, blanks around cells, comments (#), blank lines and quoted help are
    taken as dcgm-exporter takes them, or more kindly.  A bad row costs only itself.
    """
    fields: dict[str, ChosenField] = {}
    labels: list[str] = []
    bad_rows: list[BadRow] = []
    unserved: dict[str, None] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip(" \t\r,") or line.lstrip().startswith("#"):
            continue
        try:
            name, kind, help_text = _cells(line)
            if name in fields or name in labels:
                raise ValueError(f"{name} is there twice")
            if kind == "label":
                if name in LABELS:
                    labels.append(name)
                else:
                    unserved[name] = None
            elif name not in FIELDS:
                unserved[name] = None
            elif kind == "gauge":
                fields[name] = ChosenField(name, "gauge", help_text)
            elif kind == "counter":
                fields[name] = ChosenField(name, "counter", help_text)
            else:
                raise ValueError(f"type {kind!r} is none of gauge, counter, label")
        except ValueError as error:
            bad_rows.append(BadRow(number, str(error)))
    return Collectors(tuple(fields.values()), tuple(labels), tuple(bad_rows), tuple(unserved))


def _cells(line: str) -> tuple[str, str, str]:
    """The three cells of a row, without blanks around them; ValueError for anything else."""
    try:
        cells = next(csv.reader([line.strip()], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if len(cells) != 3:
        raise ValueError(
            f"{len(cells)} columns instead of 3 (a comma in the help needs quotes around it)"
        )
    name, kind, help_text = (cell.strip() for cell in cells)
    if not name or not help_text:
        raise ValueError("an empty column")
    return name, kind.lower(), help_text
