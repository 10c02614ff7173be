"""Whatever a snapshot holds, its page is valid: every series once, every value a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as _parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as _parse_text

from qgpu_exporter.exposition import EOF, OPENMETRICS, TEXT, Dropped, negotiate, render
from qgpu_exporter.metrics.dcgm import dcgm_families
from qgpu_exporter.metrics.dcgm_collectors import Collectors, parse_collectors
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.native_node import label_names
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.metrics.tke import tke_families
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardReading,
    CardTotals,
    Container,
    Node,
    Pod,
    PodList,
    Snapshot,
    Status,
)
from tests.worlds import NODE, NOW, full_snapshot, full_status, identity, mig_reading, reading

# The library's functions have no types.
parse_openmetrics: Callable[[str], Iterator[Metric]] = _parse_openmetrics
parse_text: Callable[[str], Iterable[Metric]] = _parse_text

TABLES: tuple[Family[Snapshot, Any], ...] = (*NATIVE, *dcgm_families(), *tke_families("cards"))
TEXTS = st.text(max_size=8) | st.text('\\\n\r\t"{}=, #\x00\x85\u2028\ud800', max_size=8)


def check(page: bytes, parse: Callable[[str], Iterable[Metric]]) -> None:
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for metric in parse(page.decode()):
        assert metric.samples
        for sample in metric.samples:
            assert math.isfinite(sample.value)
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in seen
            seen.add(key)


def check_both(families: tuple[Family[Any, Any], ...], source: object) -> None:
    check(render(families, source, TEXT), parse_text)
    check(render(families, source, OPENMETRICS) + EOF, parse_openmetrics)


NUMBERS = st.none() | st.floats() | st.integers()


@st.composite
def odd_snapshots(draw: st.DrawFn) -> Snapshot:
    """Cards, shares, pods and usage of any values, also such as no driver gives."""
    readings = [
        replace(one, identity=replace(one.identity, uuid=draw(TEXTS), model=draw(TEXTS)))
        for one in draw(st.lists(st.from_type(CardReading), max_size=2))
    ]
    cards = [
        Card(one.identity, one, memory_total_bytes=draw(NUMBERS), totals=draw(TOTALS))  # type: ignore[arg-type]  # odd on purpose
        for one in readings
    ]
    cards += draw(st.lists(st.from_type(Card), max_size=1))
    held = [
        replace(one, gpu=draw(st.integers(0, 3)), pod=draw(TEXTS), container=draw(TEXTS))
        for one in draw(st.lists(st.from_type(Allocation), max_size=3))
    ]
    result = AllocationResult(tuple(held), complete=draw(st.booleans()))
    return Snapshot(
        draw(TEXTS),
        NOW,
        driver_version=draw(st.none() | TEXTS),
        cards=draw(st.just(tuple(cards)) | st.none()),
        devices_up=draw(st.booleans()),
        allocation=draw(st.just(result) | st.none()),
        usage=full_snapshot().usage,
        pods=draw(st.from_type(PodList)),
        pod_labels_exported=True,
        stack=full_snapshot().stack * 2,
    )


TOTALS = st.from_type(CardTotals)


@settings(max_examples=40)
@given(odd_snapshots())
@example(full_snapshot())
@example(Snapshot(NODE, NOW))
def test_any_snapshot_makes_valid_pages(snapshot: Snapshot) -> None:
    check_both(TABLES, snapshot)


@settings(max_examples=40)
@given(st.from_type(Status))
@example(full_status())
def test_any_status_makes_valid_pages(status: Status) -> None:
    check_both(SERVICE, status)


@given(st.text() | st.text('application/openmetrics-text;=,q0.19" version', max_size=80))
def test_any_accept_header_gets_a_format(accept: str) -> None:
    assert negotiate(accept).content_type.startswith(("text/plain; v", "application/openm"))


@given(st.permutations(full_snapshot().allocation.allocations))  # type: ignore[union-attr]  # it is full
def test_shares_are_sums_in_any_order(allocations: list[Allocation]) -> None:
    def page(rows: list[Allocation]) -> list[bytes]:
        snapshot = Snapshot(NODE, NOW, allocation=AllocationResult(tuple(rows)))
        return sorted(render(TABLES, snapshot).splitlines())

    assert page(allocations) == page(list(reversed(allocations)))


KEYS = st.lists(st.text("aA.-_1", min_size=1, max_size=4), unique=True, max_size=8)


@given(KEYS)
@example(["a.b", "a-b", "a_b_conflict1"])
def test_pod_labels_have_distinct_names_and_keep_their_values(keys: list[str]) -> None:
    labels = {key: f"value of {key}" for key in keys}
    named = list(label_names(labels))
    assert len({name for name, _ in named}) == len(keys)
    assert sorted(value for _, value in named) == sorted(labels.values())
    assert named == list(label_names(dict(reversed(labels.items()))))


ROWS = st.sampled_from(
    [
        "DCGM_FI_DEV_GPU_TEMP, gauge, Help",
        "DCGM_FI_DEV_POWER_USAGE, counter, Help",
        "DCGM_FI_DEV_POWER_USAGE, histogram, Help",
        "DCGM_FI_DRIVER_VERSION, label, Help",
        "DCGM_FI_DEV_NAME, label, Help",
        "DCGM_FI_DEV_ODD, gauge, Help",
        'DCGM_FI_DEV_SM_CLOCK, gauge, "Help, with a comma"',
        "# DCGM_FI_DEV_SM_CLOCK, gauge, Help",
        "",
    ]
)


@given(st.lists(ROWS | st.text(max_size=20)).map("\n".join))
@example('DCGM_FI_DEV_GPU_TEMP, gauge,\nDCGM_FI_DEV_SM_CLOCK, gauge, "Help\nA, gauge')
def test_any_counters_file_gives_families_or_says_why_not(text: str) -> None:
    chosen = parse_collectors(text)
    families = dcgm_families(chosen.fields, chosen.labels, "hostname")
    assert len({family.name for family in families}) == len(families)
    assert all(1 <= row.line <= text.count("\n") + 1 for row in chosen.bad_rows)
    check_both(families, full_snapshot())


def test_an_empty_counters_file_gives_nothing() -> None:
    assert parse_collectors("") == Collectors()


def test_two_slices_of_one_card_are_one_row_of_the_container() -> None:
    slices = tuple(
        Allocation(
            "team", "p", "c", 1, uuid, "mig", "nvidia.com/mig-1g.10gb", uuid,
            mig=mig, core_percent=12.5, memory_bytes=10,
        )
        for mig, uuid in (("7", "MIG-a"), ("8", "MIG-b"))
    )  # fmt: skip
    node = Node(NODE, allocatable={"example.com/fpga": "1", "nvidia.com/gpu": "3"})
    snapshot = Snapshot(NODE, NOW, allocation=AllocationResult(slices), node_object=node)
    lines = render(TABLES, snapshot).decode().splitlines()
    labels = '{container="c",gpu="1",namespace="team",node="node-1",pod="p"}'
    assert f"node_gpu_core_request{labels} 25.0" in lines
    assert f"node_gpu_memory_request_bytes{labels} 20.0" in lines
    assert [line for line in lines if line.startswith("node_gpu_resource_allocatable")] == [
        'node_gpu_resource_allocatable{node="node-1",resource="nvidia.com/gpu"} 3.0'
    ]


def test_cards_whose_slices_and_clocks_say_little() -> None:
    bare = CardReading(identity(0))
    odd = reading(1, compute_mode="odd", clock_event_reasons=None, mig_slices=())
    pods = PodList(NOW, (Pod("team", "p", "u", containers=(Container("c"),)),))
    cards = (
        Card(identity(0), bare),
        Card(identity(1), odd, memory_total_bytes=None),
        Card(identity(2), mig_reading(2), mig_compute_slices=None),
        Card(identity(3), None, None),
    )
    snapshot = Snapshot(NODE, NOW, cards=cards, pods=pods, devices_up=True)
    dropped = Dropped()
    render(TABLES, snapshot, dropped=dropped)
    assert dropped.counts == {}
    check_both(TABLES, snapshot)
