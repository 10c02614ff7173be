"""Health of the exporter: its sources, its reader process, its scrapes and its own use."""

from __future__ import annotations

from dashboards.panels import NODE, NOTHING, Column, Page, Query, top

# The exporter's own families have a node label only where the scrape gives its targets one: they
# are chosen by what else their target says.
_CHOSEN = (
    " and on (cluster, job, instance) (count by (cluster, job, instance)"
    f" (node_gpu_cards{{{NODE}}}) or count by (cluster, job, instance)"
    f" (qgpu_exporter_build_info{{{NODE}}}))"
)
_WHO = "{{cluster}} {{node}} {{instance}}"
_BY = "by (cluster, job, instance, node%s)"


def _own(metric: str, more: str = "", selector: str = "") -> str:
    chosen = f'cluster=~"$cluster"{selector}'
    return f"max {_BY % more} ({metric}{{{chosen}}}){_CHOSEN}"


def _increase(metric: str, more: str) -> str:
    chosen = 'cluster=~"$cluster"'
    return f"sum {_BY % more} (increase({metric}{{{chosen}}}[1h])){_CHOSEN}"


def _per_minute(metric: str, more: str) -> str:
    chosen = 'cluster=~"$cluster"'
    return f"(sum {_BY % more} (rate({metric}{{{chosen}}}[$__rate_interval])){_CHOSEN}) * 60"


def build() -> Page:
    """The dashboard of the exporters themselves."""
    page = Page(
        "qgpu-exporter",
        "Whether the exporters work, and what they cost; graphs have the ten worst.",
        hidden=frozenset({"gpu", "namespace", "pod"}),
    )
    _now(page)
    _sources(page)
    _work(page)
    return page


def _now(page: Page) -> None:
    page.row("Now")
    remembered = "count by (cluster, job, instance) (last_over_time(qgpu_exporter_build_info[1d]))"
    living = "0 * count(qgpu_exporter_build_info)"
    page.number(
        "Exporters",
        "That answer.",
        "none",
        'count(qgpu_exporter_build_info{cluster=~"$cluster"})',
        width=6,
    )
    page.number(
        "Exporters that do not answer",
        "Known targets that cannot be scraped.",
        "none",
        f'count((max {_BY % ""} (up{{cluster=~"$cluster"}}) == 0)'
        f" and on (cluster, job, instance) {remembered}) or {living}",
        width=6,
        alarm=True,
    )
    page.number(
        "Sources that fail",
        "Over all exporters; a node without GPUs counts with its missing driver.",
        "none",
        f"count({_own('qgpu_exporter_source_up', ', source')} == 0) or {living}",
        width=6,
        alarm=True,
    )
    page.number(
        "Stale snapshots",
        "Exporters that answer with nothing new.",
        "none",
        f"sum({_own('qgpu_exporter_snapshot_stale')})",
        width=6,
        alarm=True,
    )


def _sources(page: Page) -> None:
    page.row("Sources")
    answered = _own("qgpu_exporter_source_last_success_timestamp_seconds", ", source")
    page.states(
        "Sources",
        "Whether the source's last question was answered, of the ten that failed most in the "
        "chosen time; a source that is off is not here.",
        Query(
            top(_own("qgpu_exporter_source_up", ", source"), lowest=True),
            f"{_WHO} {{{{source}}}}",
        ),
        {"0": ("fails", "red"), "1": ("answers", "green")},
        width=12,
    )
    page.graph(
        "Age of the last good answer",
        "By source.",
        "s",
        Query(top(f"time() - ({answered})"), f"{_WHO} {{{{source}}}}"),
        goes_to=None,
    )
    page.graph(
        "Failures",
        "Per minute, by source and reason.",
        "none",
        Query(
            top(_per_minute("qgpu_exporter_source_failures_total", ", source, reason")),
            f"{_WHO} {{{{source}}}} {{{{reason}}}}",
        ),
        goes_to=None,
        empty=f"{NOTHING}, or nothing has failed yet",
    )
    page.graph(
        "Time that answers take",
        "Of the source's last question.",
        "s",
        Query(
            top(_own("qgpu_exporter_source_read_duration_seconds", ", source")),
            f"{_WHO} {{{{source}}}}",
        ),
        goes_to=None,
    )


def _work(page: Page) -> None:
    page.row("Reader, snapshot and scrapes")
    page.graph(
        "Readers replaced in an hour",
        "By reason.",
        "none",
        Query(
            top(_increase("qgpu_exporter_reader_restarts_total", ", reason")),
            f"{_WHO} {{{{reason}}}}",
        ),
        width=8,
        goes_to=None,
        empty=f"{NOTHING}, or none was replaced",
    )
    page.graph(
        "Readers left behind",
        "That hang in the driver and cannot be ended; at two no other is started.",
        "none",
        Query(top(_own("qgpu_exporter_reader_left_behind")), _WHO),
        width=8,
        goes_to=None,
    )
    page.graph(
        "Age of the snapshot",
        "Since the present snapshot was joined.",
        "s",
        Query(top(f"time() - ({_own('qgpu_exporter_snapshot_timestamp_seconds')})"), _WHO),
        width=8,
        goes_to=None,
    )
    page.graph(
        "Time to join a snapshot",
        "Of the present one.",
        "s",
        Query(top(_own("qgpu_exporter_join_duration_seconds")), _WHO),
        width=8,
        goes_to=None,
    )
    page.graph(
        "NVML calls in a round",
        "Of the last round over all cards.",
        "none",
        Query(top(_own("qgpu_exporter_nvml_calls")), _WHO),
        width=8,
        goes_to=None,
    )
    page.graph(
        "Scrapes and lost series",
        "Per minute, by outcome and reason.",
        "none",
        Query(
            top(_per_minute("qgpu_exporter_scrapes_total", ", outcome")),
            f"{_WHO} {{{{outcome}}}}",
        ),
        Query(
            top(_per_minute("qgpu_exporter_dropped_series_total", ", reason")),
            f"{_WHO} lost: {{{{reason}}}}",
        ),
        width=8,
        goes_to=None,
    )
    page.row("What it costs")
    page.graph(
        "Scrape duration",
        "As Prometheus measures it.",
        "s",
        Query(top(_own("scrape_duration_seconds")), _WHO),
        width=8,
        goes_to=None,
    )
    page.graph(
        "Samples of a scrape",
        "As Prometheus counts them.",
        "none",
        Query(top(_own("scrape_samples_scraped")), _WHO),
        width=8,
        goes_to=None,
    )
    page.graph(
        "Memory of the service",
        "Resident, without the reader process.",
        "bytes",
        Query(top(_own("process_resident_memory_bytes")), _WHO),
        width=8,
        goes_to=None,
    )
    page.table(
        "Versions",
        "Of the exporter and its Python.",
        [
            Column("cluster", "cluster"),
            Column("node", "node"),
            Column("instance", "instance"),
            Column("version", "version"),
            Column("revision", "revision"),
            Column("python_version", "Python"),
        ],
        f"max by (cluster, node, instance, version, revision, python_version)"
        f" (qgpu_exporter_build_info{{{NODE}}})",
        width=12,
        goes_to=("qgpu-node", ("node",)),
    )
    page.table(
        "Problems with allocations",
        "Present ones, by kind; /caches of the exporter names the pods.",
        [
            Column("node", "node"),
            Column("instance", "instance"),
            Column("kind", "kind"),
            Column("Value", "problems"),
        ],
        _own("node_gpu_allocation_problems", ", kind"),
        width=12,
        empty="None; or nothing scraped",
        goes_to=None,
    )
