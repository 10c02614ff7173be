"""Prints what a scrape of a full node costs, beside prometheus_client's own renderer.

`make bench`: 16 cards and 128 pods, the medians of several rounds.
"""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from qgpu_exporter.exposition import TEXT, render
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.model import (
    Card,
    CardReading,
    CgroupNames,
    Container,
    Memory,
    Pod,
    PodList,
    Process,
    ProcessSample,
    ProcessWindow,
    Reading,
)
from qgpu_exporter.snapshot import JoinInputs, join
from tests import worlds

CARDS = 16
PODS = 128
ROUNDS = 15
GIB = 1 << 30
SHARE = {
    "tke.cloud.tencent.com/qgpu-core": "10",
    "tke.cloud.tencent.com/qgpu-memory": "4",
}


def main() -> None:
    """Print the table."""
    inputs = full_node()
    snapshot = join(inputs)
    page = render(NATIVE, snapshot, TEXT)
    families = list(text_string_to_metric_families(page.decode()))
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    samples = sum(len(family.samples) for family in families)
    print(f"{CARDS} cards, {PODS} pods: {samples} samples, {len(page)} bytes")
    ours = median(lambda: render(NATIVE, snapshot, TEXT))
    library = median(lambda: generate_latest(registry))
    joining = median(lambda: join(inputs))
    packing = median(lambda: gzip.compress(page, 4))
    print(f"render           {ours * 1e3:8.2f} ms")
    print(f"prometheus_client{library * 1e3:8.2f} ms   render / it = {ours / library:.2f}")
    print(f"join             {joining * 1e3:8.2f} ms   join / render = {joining / ours:.2f}")
    print(f"gzip level 4     {packing * 1e3:8.2f} ms   gzip / render = {packing / ours:.2f}")


def full_node() -> JoinInputs:
    """A node whose cards all are shared by pods with a process each."""
    pods = PodList(0.0, tuple(_pod(number) for number in range(PODS)))
    cards = tuple(_card(index) for index in range(CARDS))
    names = {1000 + n: CgroupNames(((_uid(n), f"{n:064x}"),), (_uid(n),)) for n in range(PODS)}
    reading = Reading(0.0, cards=tuple(card.reading for card in cards if card.reading))
    return JoinInputs(
        node="bench",
        timestamp_seconds=0.0,
        cards=cards,
        reading=reading,
        names=names,
        pods_expected=True,
        pods=pods,
    )


def _uid(number: int) -> str:
    return f"{number:08x}-0000-4000-8000-000000000000"


def _pod(number: int) -> Pod:
    container = Container("main", resources=SHARE, state="running", container_id=f"{number:064x}")
    annotation = {"tke.cloud.tencent.com/qgpu-pgpu-main": str(number % CARDS)}
    return Pod(
        "bench", f"pod-{number}", _uid(number), "Running", annotation, containers=(container,)
    )


def _card(index: int) -> Card:
    mine = [1000 + number for number in range(PODS) if number % CARDS == index]
    full: CardReading = worlds.reading(index)
    reading = replace(
        full,
        memory=Memory(80 * GIB, 40 * GIB, 40 * GIB, 0),
        mig_enabled=False,
        mig_slices=(),
        processes=tuple(Process(pid, GIB) for pid in mine),
        process_window=ProcessWindow(0, 5_000_000, tuple(_sample(pid) for pid in mine)),
    )
    return Card(reading.identity, reading, memory_total_bytes=80 * GIB)


def _sample(pid: int) -> ProcessSample:
    return ProcessSample(pid, 4_000_000, 0.1, 0.1, 0.0, 0.0)


class _Fixed:
    """A collector that gives the same families again."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("bench", "")

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def median(work: Callable[[], object]) -> float:
    """Seconds of one call, the median of `ROUNDS`."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


main()
