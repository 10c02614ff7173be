"""The exporter about itself: what a source that is off, new or failing shows."""

from __future__ import annotations

from qgpu_exporter.exposition import render
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.model import SourceHealth, Status


def lines(status: Status) -> list[str]:
    page = render(SERVICE, status).decode().splitlines()
    return [line for line in page if not line.startswith("#")]


def test_a_service_that_has_just_started_says_little() -> None:
    assert lines(Status("1.0", "abc", "3.11.2", 1_800_000_000.0)) == [
        'qgpu_exporter_build_info{python_version="3.11.2",revision="abc",version="1.0"} 1.0',
        "qgpu_exporter_start_timestamp_seconds 1.8e+09",
        "qgpu_exporter_snapshot_stale 0.0",
        "qgpu_exporter_join_failures_total 0.0",
        "qgpu_exporter_index_changes_total 0.0",
    ]


def test_a_source_without_an_outcome_is_neither_up_nor_down() -> None:
    sources = (
        SourceHealth("kubernetes"),
        SourceHealth("nvml", up=False, failures={"timeout": 1}, released=True),
        SourceHealth("podresources", up=True, last_success_timestamp_seconds=5.0),
    )
    shown = lines(Status("1.0", "abc", "3.11.2", 0.0, sources))
    assert [line for line in shown if "source" in line] == [
        'qgpu_exporter_source_up{source="nvml"} 0.0',
        'qgpu_exporter_source_up{source="podresources"} 1.0',
        'qgpu_exporter_source_last_success_timestamp_seconds{source="podresources"} 5.0',
        'qgpu_exporter_source_failures_total{reason="timeout",source="nvml"} 1.0',
        'qgpu_exporter_source_released{source="nvml"} 1.0',
    ]
