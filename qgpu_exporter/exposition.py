"""Turns tables and a value into bytes of the Prometheus text format or of OpenMetrics.

Own code instead of `prometheus_client.generate_latest`, whose bytes it reproduces: rows and label
texts are made once for all families of a scope, which is many times faster on a full node.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.utils import floatToGoString

from qgpu_exporter.metrics.family import Family, Scope
from qgpu_exporter.model import Snapshot, Status

log = logging.getLogger(__name__)

S = TypeVar("S")
R = TypeVar("R")

_go: Callable[[float], str] = floatToGoString
"""A number as Go and prometheus_client print it."""

EOF = b"# EOF\n"
"""The last line of an OpenMetrics page."""

# --------------------------------------------------------------------------- formats


@dataclass(frozen=True, slots=True)
class Format:
    """A text format that a page can have; equal formats have equal bytes."""

    openmetrics: bool = False
    version: str = "0.0.4"
    escaping: str | None = None
    """``underscores``, ``allow-utf-8``, ``values`` (all alike here, since every name is plain) or
    ``dots``, which doubles underscores; None: not negotiated."""

    @property
    def content_type(self) -> str:
        """The header's value; Prometheus 3 refuses a page without an exact one."""
        kind = "application/openmetrics-text" if self.openmetrics else "text/plain"
        escaping = f"; escaping={self.escaping}" if self.escaping else ""
        return f"{kind}; version={self.version}; charset=utf-8{escaping}"


TEXT = Format()
OPENMETRICS = Format(openmetrics=True, version="1.0.0")

_ESCAPINGS = ("allow-utf-8", "underscores", "dots", "values")
_QUALITY = re.compile(r"(?:0(?:\.\d*)?|1(?:\.0*)?)\Z", re.ASCII)
_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_ENTRY = re.compile(
    rf"\s*(?P<range>{_WORD}/{_WORD})\s*"
    rf'(?P<parameters>(?:;\s*(?:{_WORD}\s*=\s*(?:{_WORD}|"[^"\\]*")\s*)?)*)\Z'
)
_PARAMETER = re.compile(rf'({_WORD})\s*=\s*(?:({_WORD})|"([^"\\]*)")')


def negotiate(accept: str | None) -> Format:
    """The format that an Accept header asks for.

    The highest weight that we can serve wins, the first of equal ones, as in Prometheus's own
    servers; weight 0 excludes.  No header, a header that cannot be parsed and one that names only
    formats we lack get text 0.0.4, as Prometheus's content negotiation asks.
    """
    best, best_quality = TEXT, 0.0
    for entry in (accept or "").split(","):
        if not entry.strip():
            continue
        match = _ENTRY.match(entry)
        if match is None:
            return TEXT
        parameters = {
            name.lower(): plain or quoted
            for name, plain, quoted in _PARAMETER.findall(match["parameters"])
        }
        weight = parameters.get("q", "1")
        if not _QUALITY.match(weight):
            return TEXT
        found = _format(match["range"].lower(), parameters)
        if found is not None and float(weight) > best_quality:
            best, best_quality = found, float(weight)
    return best


def _format(media_range: str, parameters: Mapping[str, str]) -> Format | None:
    """The format that one entry names, or None where we cannot serve it."""
    version = parameters.get("version", "")
    escaping = parameters.get("escaping", "underscores").lower()
    if escaping not in _ESCAPINGS:
        escaping = "underscores"
    if media_range == "application/openmetrics-text":
        if version == "1.0.0":
            return Format(openmetrics=True, version="1.0.0", escaping=escaping)
        return OPENMETRICS if not version else None
    if media_range == "text/plain":
        if version == "1.0.0":
            return Format(version="1.0.0", escaping=escaping)
        return TEXT if version in {"", "0.0.4"} else None
    return TEXT if media_range in {"*/*", "text/*"} else None


# --------------------------------------------------------------------------- what goes wrong


class Dropped:
    """Counts series and families that could not be rendered; each is logged once."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """By reason: ``failed`` (a row function raised), ``not_a_number``,
        ``negative_counter``, ``duplicate``."""
        self._logged: set[tuple[str, str]] = set()

    def note(self, reason: str, name: str, detail: object) -> None:
        """One drop of `reason` in the family or scope `name`."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if (reason, name) not in self._logged:
            self._logged.add((reason, name))
            log.error("%s: series left out (%s): %s", name, reason, detail)


# --------------------------------------------------------------------------- rendering


@dataclass(frozen=True, slots=True)
class Block:
    """One family as text, and the names by which a `name[]` filter may ask for it."""

    names: frozenset[str]
    text: bytes


def render(
    families: Iterable[Family[S, Any]],
    source: S,
    fmt: Format = TEXT,
    names: Collection[str] | None = None,
    dropped: Dropped | None = None,
) -> bytes:
    """The families of `source` that have series, in table order, without the final ``# EOF``.

    With `names` only families whose sample name or family name is among them.
    """
    if names is not None:
        families = [family for family in families if not _names(family).isdisjoint(names)]
    return b"".join(block.text for block in blocks(families, source, fmt, dropped))


def blocks(
    families: Iterable[Family[S, Any]],
    source: S,
    fmt: Format = TEXT,
    dropped: Dropped | None = None,
) -> tuple[Block, ...]:
    """Each family that has series, in table order."""
    rows = _Rows(source, fmt, dropped if dropped is not None else Dropped())
    rendered = ((family, rows.samples(family)) for family in families)
    return tuple(
        Block(_names(family), _text(_head(family, fmt) + "".join(lines)))
        for family, lines in rendered
        if lines
    )


def _names(family: Family[Any, Any]) -> frozenset[str]:
    return frozenset((family.name, family.base_name))


def _text(text: str) -> bytes:
    """UTF-8; half a surrogate pair, which no text format can carry, becomes a question mark."""
    return text.encode("utf-8", "replace")


class _Rows(Generic[S]):
    """The rows of each scope over one value, with their labels as text, made once."""

    def __init__(self, source: S, fmt: Format, dropped: Dropped) -> None:
        self._source = source
        self._fmt = fmt
        self._dropped = dropped
        self._kept: dict[Scope[S, Any], list[tuple[str, Any]]] = {}

    def samples(self, family: Family[S, R]) -> list[str]:
        """The sample lines of a family; a row that fails costs only itself."""
        lines = []
        name = _name(family.name, self._fmt)
        for labels, row in self._of(family.scope):
            try:
                value = family.value(row)
                number = None if value is None else float(value)
            except Exception as error:  # noqa: BLE001 -- one row must not cost the page
                self._dropped.note("failed", family.name, repr(error))
                continue
            if number is None:
                continue
            if not math.isfinite(number):
                self._dropped.note("not_a_number", family.name, number)
                continue
            if number < 0 and family.type == "counter":
                self._dropped.note("negative_counter", family.name, number)
                continue
            lines.append(f"{name}{labels} {_go(number)}\n")
        return lines

    def _of(self, scope: Scope[S, R]) -> list[tuple[str, R]]:
        if scope not in self._kept:
            try:
                self._kept[scope] = self._read(scope)
            except Exception as error:  # noqa: BLE001 -- one scope must not cost the page
                self._dropped.note("failed", f"rows of {scope.name}", repr(error))
                self._kept[scope] = []
        return self._kept[scope]

    def _read(self, scope: Scope[S, R]) -> list[tuple[str, R]]:
        rows: dict[str, R] = {}
        for values, row in scope.rows(self._source):
            pairs = list(zip(scope.labels, values, strict=True))
            if scope.more_labels is not None:
                pairs += scope.more_labels(row)
            labels = _labels(pairs, self._fmt)
            if labels in rows:
                self._dropped.note("duplicate", f"rows of {scope.name}", labels)
            else:
                rows[labels] = row
        return list(rows.items())


def _labels(pairs: Iterable[tuple[str, str]], fmt: Format) -> str:
    """``{a="1",b="2"}`` sorted by name, as prometheus_client sorts; empty without labels."""
    parts = [f'{_name(name, fmt)}="{_escape(value)}"' for name, value in sorted(pairs)]
    return f"{{{','.join(parts)}}}" if parts else ""


def _escape(value: str) -> str:
    if not value.isascii():
        value = value.encode("utf-8", "replace").decode()
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _name(name: str, fmt: Format) -> str:
    return name.replace("_", "__") if fmt.escaping == "dots" else name


def _head(family: Family[Any, Any], fmt: Format) -> str:
    """HELP and TYPE (and UNIT) lines."""
    if not fmt.openmetrics:
        shown = "gauge" if family.type == "info" else family.type
        return _head_lines(_name(family.name, fmt), shown, family.help, openmetrics=False)
    # OpenMetrics asks a counter's sample to end in `_total`; a name of another dialect does not.
    if family.type == "counter" and family.base_name == family.name:
        return _head_lines(_name(family.name, fmt), "unknown", family.help, openmetrics=True)
    name = _name(family.base_name, fmt)
    return _head_lines(name, family.type, family.help, openmetrics=True, unit=family.unit)


def _head_lines(name: str, kind: str, text: str, *, openmetrics: bool, unit: str = "") -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        text = text.replace('"', r"\"")
    unit_line = f"# UNIT {name} {unit}\n" if unit and openmetrics else ""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{unit_line}"


# --------------------------------------------------------------------------- the page


class ProcessFamilies:
    """``process_*`` of the service and ``qgpu_exporter_reader_process_*`` of its reader."""

    def __init__(self) -> None:
        self._own = ProcessCollector(registry=None)
        self._reader_pid: int | None = None
        # Our child is in our own PID namespace, so this is /proc and not --path.procfs.
        self._reader = ProcessCollector(
            namespace="qgpu_exporter_reader",
            pid=lambda: self._reader_pid or "none",
            registry=None,
        )

    def blocks(self, fmt: Format, reader_pid: int | None = None) -> tuple[Block, ...]:
        """Read now; a process that is gone has no families.

        The pid is given, since pages are made in a thread, in which nobody else's state may be
        looked at while it changes.
        """
        self._reader_pid = reader_pid
        collectors = [self._own]
        if reader_pid is not None:
            collectors.append(self._reader)
        found: list[Metric] = []
        for collector in collectors:
            try:
                found += collector.collect()
            except Exception:
                # The process ended while it was read: it has no families then.
                log.debug("a process could not be read", exc_info=True)
        return tuple(_process_block(metric, fmt) for metric in found)


def _process_block(metric: Metric, fmt: Format) -> Block:
    sample = metric.samples[0]
    base = metric.name if fmt.openmetrics else sample.name
    head = _head_lines(
        _name(base, fmt), metric.type, metric.documentation, openmetrics=fmt.openmetrics
    )
    line = f"{_name(sample.name, fmt)} {_go(sample.value)}\n"
    return Block(frozenset((metric.name, sample.name)), _text(head + line))


class Exposition:
    """The page: device families of the snapshot, families of the service, processes.

    The device part is kept for the present snapshot, once a format.  No locks: the web layer
    renders one page at a time.
    """

    def __init__(
        self,
        device: Sequence[Family[Snapshot, Any]],
        service: Sequence[Family[Status, Any]],
        processes: ProcessFamilies | None = None,
    ) -> None:
        self.dropped = Dropped()
        self._device = device
        self._service = service
        self._processes = processes
        self._kept_of: Snapshot | None = None
        self._kept: dict[Format, tuple[Block, ...]] = {}

    def device_blocks(self, snapshot: Snapshot, fmt: Format = TEXT) -> tuple[Block, ...]:
        """The device part; rendered at the first call for this snapshot and format."""
        if self._kept_of is not snapshot:
            self._kept_of, self._kept = snapshot, {}
        kept = self._kept
        if fmt not in kept:
            kept[fmt] = blocks(self._device, snapshot, fmt, self.dropped)
        return kept[fmt]

    def page(
        self,
        snapshot: Snapshot | None,
        status: Status,
        fmt: Format = TEXT,
        names: Collection[str] | None = None,
    ) -> bytes:
        """A whole page; without a snapshot only what the service says of itself.

        `names` are those of a ``name[]`` filter: sample names or family names; None: all.
        """
        parts = self.device_blocks(snapshot, fmt) if snapshot is not None else ()
        parts += blocks(self._service, status, fmt, self.dropped)
        if self._processes is not None:
            parts += self._processes.blocks(fmt, status.reader.pid if status.reader else None)
        chosen = (part for part in parts if names is None or not part.names.isdisjoint(names))
        return b"".join(part.text for part in chosen) + (EOF if fmt.openmetrics else b"")
