"""Every golden case: the whole page as written down, valid in both formats, whatever the order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from qgpu_exporter.exposition import OPENMETRICS
from tests.golden.case import Case, expected, load, pages

CASES = sorted(path.parent for path in Path(__file__).parent.glob("*/input.yaml"))


@pytest.fixture(params=CASES, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


@pytest.fixture
def case(folder: Path) -> Case:
    return load(folder)


def series(
    parse: Callable[[str], Iterable[Metric]], page: str
) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    return [
        (
            # The library's text parser lets every counter end as its own do.
            sample.name if f"{sample.name}{{" in page else sample.name.removesuffix("_total"),
            tuple(sorted(sample.labels.items())),
            sample.value,
        )
        for family in parse(page)
        for sample in family.samples
    ]


def test_the_page_is_as_written(folder: Path, case: Case, *, update_golden: bool) -> None:
    page = expected(case)
    path = folder / "expected.prom"
    if update_golden:
        path.write_text(page)
    assert page == path.read_text()


def test_both_formats_are_valid_and_say_the_same(case: Case) -> None:
    both = zip(pages(case), pages(case, OPENMETRICS), strict=True)
    for (_, text), (_, openmetrics) in both:
        told = series(parse_text, text)
        assert len({one[:2] for one in told}) == len(told)
        assert sorted(series(parse_openmetrics, openmetrics)) == sorted(told)


def test_the_order_of_the_inputs_changes_no_byte(case: Case) -> None:
    assert list(pages(case, backwards=True)) == list(pages(case))


def test_every_case_shows_something_and_every_page_has_a_case() -> None:
    assert CASES
    folders = {path.parent for path in Path(__file__).parent.glob("*/expected.prom")}
    assert folders == set(CASES)
