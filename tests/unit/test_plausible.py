"""What the driver's numbers and texts may be."""

from __future__ import annotations

import math

import pytest

from qgpu_exporter.model import Memory
from qgpu_exporter.reader import plausible

BLANKS_64 = [2**63 - 16, 2**63 - 15, 2**63 - 14, 2**63 - 13, 2**63 - 1, 2**64 - 2, 2**64 - 1]
BLANKS_32 = [2147483632, 2147483633, 2147483634, 2147483635, 2**32 - 2, 2**32 - 1]


@pytest.mark.parametrize(
    ("percent", "ratio"),
    [
        (0, 0.0),
        (37, 0.37),
        (100, 1.0),
        (100.0001, None),
        (101, None),
        (-1, None),
        (math.nan, None),
        (math.inf, None),
        (140737488355328.0, None),
        (None, None),
    ],
)
def test_ratio(percent: float | None, ratio: float | None) -> None:
    assert plausible.ratio(percent) == ratio


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (40, 40.0),
        (0, 0.0),
        (-50, -50.0),
        (-51, None),
        (200, 200.0),
        (201, None),
        (255, None),
        (math.nan, None),
        (None, None),
    ],
)
def test_celsius(value: float | None, expected: float | None) -> None:
    assert plausible.celsius(value) == expected


@pytest.mark.parametrize("blank", [*BLANKS_64, *BLANKS_32, -1, math.nan, math.inf, None])
def test_a_blank_is_no_count(blank: float | None) -> None:
    assert plausible.count(blank) is None


@pytest.mark.parametrize("number", [0, 1, 2**31, 2**31 + 1, 2**32, 2**63 - 17])
def test_every_other_number_is_a_count(number: int) -> None:
    assert plausible.count(number) == number


def test_units() -> None:
    assert plausible.watts(26_780) == 26.78
    assert plausible.watts(2**32 - 1) is None
    assert plausible.hertz(1980) == 1_980_000_000
    assert plausible.hertz(2**32 - 1) is None
    assert plausible.seconds_of_nanoseconds(1_500_000_000) == 1.5
    assert plausible.seconds_of_nanoseconds(2**64 - 1) is None
    assert plausible.bytes_per_second(2.0) == 2_097_152.0
    assert plausible.bytes_per_second(math.nan) is None
    assert plausible.bytes_per_second(-1.0) is None
    assert plausible.process_bytes(2**64 - 1) is None


@pytest.mark.parametrize(("value", "expected"), [(0, False), (1, True), (2, None), (None, None)])
def test_flag(value: int | None, expected: bool | None) -> None:
    assert plausible.flag(value) is expected


def test_memory_is_whole_or_absent() -> None:
    assert plausible.memory(100, 60, 30, 10) == Memory(100, 60, 30, 10)
    assert plausible.memory(100, 60, 40) == Memory(100, 60, 40)
    assert plausible.memory(0, 0, 0) is None
    assert plausible.memory(100, 101, 0) is None
    assert plausible.memory(100, 1, 2**64 - 1) is None
    assert plausible.memory(2**64 - 1, 1, 1) is None


@pytest.mark.parametrize(
    "value", ["", " ", "N/A", "[N/A]", "<<<NULL>>>", "0", "a\x00b", "a\nb", None, 5]
)
def test_what_names_nothing_is_no_text(value: object) -> None:
    assert plausible.text(value) is None


def test_text_is_stripped() -> None:
    assert plausible.text(" Tesla T4 ") == "Tesla T4"
