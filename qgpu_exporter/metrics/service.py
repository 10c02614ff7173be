"""The families of the exporter about itself: `qgpu_exporter_*`, over the service's `Status`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qgpu_exporter.metrics.family import Family, FamilyType, Scope, itself
from qgpu_exporter.model import ReaderHealth, SourceHealth, Status

ServiceFamily = Family[Status, Any]

Rows = Iterator[tuple[tuple[str, ...], float]]


def _service(status: Status) -> Iterator[tuple[tuple[str, ...], Status]]:
    yield (), status


def _build(status: Status) -> Iterator[tuple[tuple[str, ...], int]]:
    yield (status.version, status.revision, status.python_version), 1


def _sources(status: Status) -> Iterator[tuple[tuple[str, ...], SourceHealth]]:
    for source in status.sources:
        yield (source.source,), source


def _failures(status: Status) -> Rows:
    for source in status.sources:
        for reason, count in sorted(source.failures.items()):
            yield (source.source, reason), count


def _reader(status: Status) -> Iterator[tuple[tuple[str, ...], ReaderHealth]]:
    if status.reader is not None:
        yield (), status.reader


def _restarts(status: Status) -> Rows:
    for reason, count in sorted(status.reader.restarts.items() if status.reader else ()):
        yield (reason,), count


def _counts(counts: Callable[[Status], Mapping[str, int]]) -> Callable[[Status], Rows]:
    def rows(status: Status) -> Rows:
        for name, count in sorted(counts(status).items()):
            yield (name,), count

    return rows


_SERVICE = Scope("the service", (), _service)
_BUILD = Scope("the build", ("version", "revision", "python_version"), _build)
_SOURCES = Scope("sources that are on", ("source",), _sources)
_FAILURES = Scope("failures of sources", ("source", "reason"), _failures)
_READER = Scope("the reader process", (), _reader)
_RESTARTS = Scope("restarts of the reader", ("reason",), _restarts)
_SCRAPES = Scope("scrapes by outcome", ("outcome",), _counts(lambda status: status.scrapes))
_DROPPED = Scope("lost series", ("reason",), _counts(lambda status: status.dropped_series))


def _family(
    name: str,
    type: FamilyType,  # noqa: A002 -- the format's own word for it
    help: str,  # noqa: A002 -- as above
    scope: Scope[Status, Any],
    value: Callable[[Any], float | None] = itself,
) -> ServiceFamily:
    return Family(f"qgpu_exporter_{name}", type, help, scope, value, "this exporter")


SERVICE: tuple[ServiceFamily, ...] = (
    _family("build_info", "info", "Version of the exporter and of its Python.", _BUILD),
    _family(
        "start_timestamp_seconds",
        "gauge",
        "Unix time at which the service started, in seconds.",
        _SERVICE,
        lambda status: status.started_timestamp_seconds,
    ),
    _family(
        "source_up",
        "gauge",
        "1 if the source's last question was answered, 0 if not; a source that is off has none.",
        _SOURCES,
        lambda source: source.up,
    ),
    _family(
        "source_last_success_timestamp_seconds",
        "gauge",
        "Unix time of the source's last good answer, in seconds.",
        _SOURCES,
        lambda source: source.last_success_timestamp_seconds,
    ),
    _family(
        "source_read_duration_seconds",
        "gauge",
        "How long the source's last answer took, in seconds.",
        _SOURCES,
        lambda source: source.read_duration_seconds,
    ),
    _family("source_failures_total", "counter", "Failures of the source, by reason.", _FAILURES),
    _family(
        "source_released",
        "gauge",
        "1 while the source was let go of on purpose (the driver or MIG is being changed).",
        _SOURCES,
        lambda source: source.released if source.source == "nvml" else None,
    ),
    _family(
        "snapshot_timestamp_seconds",
        "gauge",
        "Unix time at which the present snapshot was joined, in seconds.",
        _SERVICE,
        lambda status: status.snapshot_timestamp_seconds,
    ),
    _family(
        "snapshot_stale",
        "gauge",
        "1 if the snapshot is too old to be served: there are no series of the node then.",
        _SERVICE,
        lambda status: status.snapshot_stale,
    ),
    _family(
        "join_duration_seconds",
        "gauge",
        "How long joining the present snapshot took, in seconds.",
        _SERVICE,
        lambda status: status.join_duration_seconds,
    ),
    _family(
        "join_failures_total",
        "counter",
        "Joins that a fault of the exporter ended; the snapshot before stays until it is stale.",
        _SERVICE,
        lambda status: status.join_failures,
    ),
    _family(
        "reader_restarts_total",
        "counter",
        "Times that the reader process was replaced, by reason.",
        _RESTARTS,
    ),
    _family(
        "reader_left_behind",
        "gauge",
        "Reader processes that could not be ended; at two no other is started.",
        _READER,
        lambda reader: reader.left_behind,
    ),
    _family(
        "nvml_calls",
        "gauge",
        "NVML calls of the last round.",
        _SERVICE,
        lambda status: status.nvml_calls,
    ),
    _family(
        "index_changes_total",
        "counter",
        "Times that a card was found under another index.",
        _SERVICE,
        lambda status: status.index_changes,
    ),
    _family(
        "dropped_series_total",
        "counter",
        "Series that could not be rendered, by reason; the log names each family once.",
        _DROPPED,
    ),
    _family("scrapes_total", "counter", "Scrapes, by outcome.", _SCRAPES),
)
