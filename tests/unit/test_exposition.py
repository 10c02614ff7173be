"""The renderer: prometheus_client's bytes, content negotiation, the filter, and bad rows."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as _parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from qgpu_exporter.exposition import (
    EOF,
    OPENMETRICS,
    TEXT,
    Dropped,
    Exposition,
    Format,
    ProcessFamilies,
    negotiate,
    render,
)
from qgpu_exporter.metrics.dcgm import DCGM
from qgpu_exporter.metrics.family import Family, FamilyType, Scope
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.model import Snapshot, Status
from tests.worlds import full_snapshot, full_status

# The library's function has no types.
parse_openmetrics: Callable[[str], Iterator[Metric]] = _parse_openmetrics

Rows = list[tuple[tuple[str, ...], Any]]


ONE_ROW: Rows = [(("x",), 1)]


def scope(*names: str) -> Scope[Rows, Any]:
    """The rows are the source itself."""
    return Scope("rows", names, iter)


def family(
    name: str = "demo_value",
    of: Scope[Rows, Any] | None = None,
    kind: FamilyType = "gauge",
    text: str = "Help.",
) -> Family[Rows, Any]:
    return Family(name, kind, text, of or scope("a"), lambda row: row)


# --------------------------------------------------------------------------- bytes


@dataclass(eq=False)
class OneScrape(Collector):
    """The same families as prometheus_client would be given them."""

    families: tuple[Family[Any, Any], ...]
    source: object

    def collect(self) -> Iterator[Metric]:
        for one in self.families:
            metric = self.metric(one)
            if metric.samples:
                yield metric

    def metric(self, one: Family[Any, Any]) -> Metric:
        if one.type == "info":
            metric: Metric = InfoMetricFamily(one.base_name, one.help)
        elif one.type == "counter":
            metric = CounterMetricFamily(one.name, one.help, unit=one.unit)
        else:
            metric = GaugeMetricFamily(one.name, one.help, unit=one.unit)
        for values, row in one.scope.rows(self.source):
            labels = dict(zip(one.scope.labels, values, strict=True))
            if one.scope.more_labels is not None:
                labels |= dict(one.scope.more_labels(row))
            value = one.value(row)
            if value is not None:
                metric.add_sample(one.name, labels, value)
        return metric


@pytest.mark.parametrize(
    ("families", "source"),
    [(NATIVE, full_snapshot()), (SERVICE, full_status())],
    ids=["native", "service"],
)
def test_bytes_are_those_of_prometheus_client(
    families: tuple[Family[Any, Any], ...], source: object
) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(OneScrape(families, source))
    assert render(families, source, TEXT) == generate_latest(registry)
    assert render(families, source, OPENMETRICS) + EOF == generate_openmetrics(registry)  # type: ignore[no-untyped-call]  # the library's function has no types


def test_names_of_other_dialects_stay_and_are_unknown_to_openmetrics() -> None:
    counter = family("DEMO_ERRORS", kind="counter")
    rows: Rows = [(("x",), 3)]
    assert render([counter], rows, TEXT) == (
        b'# HELP DEMO_ERRORS Help.\n# TYPE DEMO_ERRORS counter\nDEMO_ERRORS{a="x"} 3.0\n'
    )
    assert render([counter], rows, OPENMETRICS) == (
        b'# HELP DEMO_ERRORS Help.\n# TYPE DEMO_ERRORS unknown\nDEMO_ERRORS{a="x"} 3.0\n'
    )


def test_counter_and_info_lose_their_suffix_in_openmetrics_heads() -> None:
    counter = family("demo_seconds_total", kind="counter")
    info = family("demo_info", kind="info")
    page = render([counter, info], ONE_ROW, OPENMETRICS).decode()
    assert page == (
        "# HELP demo_seconds Help.\n# TYPE demo_seconds counter\n# UNIT demo_seconds seconds\n"
        'demo_seconds_total{a="x"} 1.0\n'
        '# HELP demo Help.\n# TYPE demo info\ndemo_info{a="x"} 1.0\n'
    )


def test_labels_and_help_are_escaped() -> None:
    rows: Rows = [(('back\\slash "quote"\nline é \udc80',), 1)]
    one = family(text='A \\ and " and\nmore.')
    assert render([one], rows, TEXT).decode() == (
        '# HELP demo_value A \\\\ and " and\\nmore.\n# TYPE demo_value gauge\n'
        'demo_value{a="back\\\\slash \\"quote\\"\\nline é ?"} 1.0\n'
    )
    assert b'# HELP demo_value A \\\\ and \\" and\\nmore.\n' in render([one], rows, OPENMETRICS)
    for parse, fmt, end in ((parse_text, TEXT, b""), (parse_openmetrics, OPENMETRICS, EOF)):
        page = (render([one], rows, fmt) + end).decode()
        (read,) = parse(page)
        assert read.samples[0].labels == {"a": 'back\\slash "quote"\nline é ?'}


def test_without_labels_there_are_no_braces() -> None:
    rows: Rows = [((), 2)]
    assert b"\ndemo_value 2.0\n" in render([family(of=scope())], rows)


def test_dots_double_the_underscores_of_every_name() -> None:
    fmt = Format(version="1.0.0", escaping="dots")
    rows: Rows = [(("e_f",), 1)]
    page = render([family("demo_a_b", scope("c_d"))], rows, fmt)
    assert page == (
        b'# HELP demo__a__b Help.\n# TYPE demo__a__b gauge\ndemo__a__b{c__d="e_f"} 1.0\n'
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0.0"),
        (22528, "22528.0"),
        (55491669881, "5.5491669881e+10"),
        ((1 << 53) - 1, "9.007199254740991e+15"),
        (-1.5, "-1.5"),
        (0.1, "0.1"),
        (True, "1.0"),
        (1e22, "1e+22"),
    ],
)
def test_numbers_are_printed_as_prometheus_client_does(value: float, shown: str) -> None:
    rows: Rows = [(("x",), value)]
    page = render([family()], rows)
    assert page.decode().splitlines()[-1] == f'demo_value{{a="x"}} {shown}'


# --------------------------------------------------------------------------- bad rows


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_left_out(value: float) -> None:
    dropped = Dropped()
    rows: Rows = [(("x",), value), (("y",), 1)]
    page = render([family()], rows, dropped=dropped)
    assert page.splitlines()[2:] == [b'demo_value{a="y"} 1.0']
    assert dropped.counts == {"not_a_number": 1}


@pytest.mark.parametrize("value", ["text", object(), 10**400])
def test_a_row_that_fails_costs_itself_and_one_log_line(
    value: object, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = Dropped()
    caplog.set_level(logging.ERROR)
    rows: Rows = [(("x",), value), (("y",), 1)]
    for _ in range(2):
        page = render([family(), family("demo_other")], rows, dropped=dropped)
        assert page.count(b'{a="y"} 1.0') == 2
        assert b'a="x"' not in page
    assert dropped.counts == {"failed": 4}
    assert len(caplog.records) == 2
    assert caplog.messages[0].startswith("demo_value: series left out (failed): ")


def test_a_scope_that_fails_costs_its_own_families() -> None:
    def broken(_: Rows) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield ("x",), 1
        raise RuntimeError("no more")

    dropped = Dropped()
    families = [family("demo_broken", Scope("broken", ("a",), broken)), family()]
    page = render(families, ONE_ROW, dropped=dropped)
    assert page.splitlines()[2:] == [b'demo_value{a="x"} 1.0']
    assert dropped.counts == {"failed": 1}


def test_rows_with_a_wrong_number_of_labels_cost_their_own_families() -> None:
    dropped = Dropped()
    rows: Rows = [(("x", "y"), 1)]
    assert render([family()], rows, dropped=dropped) == b""
    assert dropped.counts == {"failed": 1}


def test_of_equal_label_sets_the_first_is_kept() -> None:
    dropped = Dropped()
    rows: Rows = [(("x",), 1), (("x",), 2)]
    page = render([family()], rows, dropped=dropped)
    assert page.splitlines()[2:] == [b'demo_value{a="x"} 1.0']
    assert dropped.counts == {"duplicate": 1}


def test_a_family_without_series_is_not_there() -> None:
    rows: Rows = [(("x",), None)]
    assert render([family()], rows) == b""


# --------------------------------------------------------------------------- negotiation

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
WITH_ESCAPING = f"{OPENMETRICS_TYPE}; escaping=underscores"
DOTS = "text/plain; version=1.0.0; charset=utf-8; escaping=dots"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, TEXT_TYPE),
        ("", TEXT_TYPE),
        ("*/*", TEXT_TYPE),
        ("text/*", TEXT_TYPE),
        ("text/plain", TEXT_TYPE),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", TEXT_TYPE),
        (PROMETHEUS_2, WITH_ESCAPING),
        (PROMETHEUS_3, f"{OPENMETRICS_TYPE}; escaping=allow-utf-8"),
        ("application/openmetrics-text", OPENMETRICS_TYPE),
        ("Application/OpenMetrics-Text; Version=1.0.0", WITH_ESCAPING),
        ('application/openmetrics-text; version="1.0.0"', WITH_ESCAPING),
        ("application/openmetrics-text;version=1.0.0;escaping=odd", WITH_ESCAPING),
        ("text/plain;version=1.0.0;escaping=dots", DOTS),
        # Weights: the highest wins, 0 excludes, the first of equal ones wins.
        ("application/openmetrics-text;q=0.4,text/plain;q=0.5", TEXT_TYPE),
        ("text/plain;q=0.4,application/openmetrics-text;q=0.5", OPENMETRICS_TYPE),
        ("application/openmetrics-text;q=0,text/plain;q=0.1", TEXT_TYPE),
        ("application/openmetrics-text;q=0", TEXT_TYPE),
        ("text/plain;q=0,application/openmetrics-text;q=0.001", OPENMETRICS_TYPE),
        ("text/plain,application/openmetrics-text", TEXT_TYPE),
        ("application/openmetrics-text,text/plain", OPENMETRICS_TYPE),
        # What we cannot serve.
        ("application/openmetrics-text;version=0.0.1", TEXT_TYPE),
        ("application/openmetrics-text;version=3.0.0", TEXT_TYPE),
        ("text/plain;version=abc", TEXT_TYPE),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily", TEXT_TYPE),
        # Malformed headers.
        ("application/openmetrics-text;q=abc", TEXT_TYPE),
        ("application/openmetrics-text;q=2", TEXT_TYPE),
        ("application/openmetrics-text;q=", TEXT_TYPE),
        ("application/openmetrics-text;q=nan", TEXT_TYPE),
        ("application/openmetrics-text,;;;", TEXT_TYPE),
        ("openmetrics", TEXT_TYPE),
        ('application/openmetrics-text;version="1.0.0', TEXT_TYPE),
        ("\x00\xff", TEXT_TYPE),
    ],
)  # fmt: skip
def test_the_header_gets_its_format(accept: str | None, content_type: str) -> None:
    assert negotiate(accept).content_type == content_type


# --------------------------------------------------------------------------- the page


def names_of(page: bytes) -> set[str]:
    return {line.split(" ")[2] for line in page.decode().splitlines() if line.startswith("# TYPE")}


def test_a_page_is_cards_then_service_then_processes() -> None:
    exposition = Exposition((*NATIVE, *DCGM), SERVICE, ProcessFamilies())
    page = exposition.page(full_snapshot(), full_status()).decode()
    order = ["node_gpu_up{", "DCGM_FI_DEV_GPU_TEMP{", "qgpu_exporter_source_up{", "process_cpu"]
    places = [page.index(f"\n{name}") for name in order]
    assert places == sorted(places)
    assert "# EOF" not in page
    assert list(parse_text(page))


def test_an_openmetrics_page_ends_with_its_mark() -> None:
    exposition = Exposition((*NATIVE, *DCGM), SERVICE, ProcessFamilies())
    page = exposition.page(full_snapshot(), full_status(), OPENMETRICS).decode()
    assert page.endswith("\n# EOF\n")
    assert page.count("# EOF") == 1
    assert list(parse_openmetrics(page))


def test_without_a_snapshot_only_the_service_speaks() -> None:
    exposition = Exposition((*NATIVE, *DCGM), SERVICE)
    names = names_of(exposition.page(None, full_status()))
    assert "qgpu_exporter_source_up" in names
    assert all(name.startswith("qgpu_exporter_") for name in names)


@pytest.mark.parametrize("fmt", [TEXT, OPENMETRICS])
def test_the_filter_knows_sample_names_and_family_names(fmt: Format) -> None:
    exposition = Exposition(NATIVE, SERVICE, ProcessFamilies())
    asked = [
        "node_gpu_up",
        "node_gpu_energy_joules",
        "qgpu_exporter_build_info",
        "process_cpu_seconds",
    ]
    page = exposition.page(full_snapshot(), full_status(), fmt, asked).decode()
    samples = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line[0] != "#"}
    assert samples == {
        "node_gpu_up",
        "node_gpu_energy_joules_total",
        "qgpu_exporter_build_info",
        "process_cpu_seconds_total",
    }
    assert exposition.page(full_snapshot(), full_status(), fmt, ["no_such"]) == (
        EOF if fmt.openmetrics else b""
    )


def test_render_filters_too() -> None:
    page = render([family(), family("demo_other")], ONE_ROW, names={"demo_other"})
    assert names_of(page) == {"demo_other"}


def test_the_device_part_is_rendered_once_for_a_snapshot_and_format() -> None:
    seen: list[Snapshot] = []

    def rows(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int]]:
        seen.append(snapshot)
        yield (), 1

    counted: Family[Snapshot, Any] = Family(
        "demo", "gauge", "Help.", Scope("demo", (), rows), lambda row: row
    )
    exposition = Exposition([counted], SERVICE)
    first, second = full_snapshot(), full_snapshot()
    for snapshot in (first, first, second):
        exposition.page(snapshot, full_status(), TEXT)
        exposition.page(snapshot, full_status(), OPENMETRICS)
        exposition.page(snapshot, full_status(), TEXT, ["demo"])
    assert [id(one) for one in seen] == [id(first)] * 2 + [id(second)] * 2


def test_the_reader_has_process_families_of_its_own() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            families = ProcessFamilies().blocks(TEXT, child.pid)
            page = b"".join(block.text for block in families).decode()
        finally:
            child.kill()
    read = {one.name: one.samples[0] for one in parse_text(page)}
    assert read["qgpu_exporter_reader_process_open_fds"].value >= 1
    assert read["process_open_fds"].value >= 3
    assert read["qgpu_exporter_reader_process_cpu_seconds"].name == (
        "qgpu_exporter_reader_process_cpu_seconds_total"
    )


def test_a_reader_that_is_gone_has_no_process_families() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait(10)
    for pid in (child.pid, None):
        blocks = ProcessFamilies().blocks(TEXT, pid)
        assert not any(name.startswith("qgpu") for block in blocks for name in block.names)
        assert len(blocks) == 6


def test_drops_are_counted_in_the_status_page() -> None:
    status = Status("1", "r", "3.11", 0.0, dropped_series={"duplicate": 2})
    page = render(SERVICE, status).decode()
    assert 'qgpu_exporter_dropped_series_total{reason="duplicate"} 2.0\n' in page
