"""Kubernetes quantities in all their spellings."""

from __future__ import annotations

from fractions import Fraction

import pytest

from qgpu_exporter.allocation.quantity import parse, whole


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25", Fraction(25)),
        ("2.5e1", Fraction(25)),
        ("25E0", Fraction(25)),
        ("25000m", Fraction(25)),
        ("0.025k", Fraction(25)),
        ("+25", Fraction(25)),
        ("25.", Fraction(25)),
        (".5", Fraction(1, 2)),
        ("1E", Fraction(10**18)),
        ("1E3", Fraction(1000)),
        ("129e6", Fraction(129_000_000)),
        ("16Gi", Fraction(16 * 1024**3)),
        ("1.5Ki", Fraction(1536)),
        ("7Ei", Fraction(7 * 1024**6)),
        ("3n", Fraction(3, 10**9)),
        ("-1", Fraction(-1)),
    ],
)
def test_a_quantity_is_read_exactly(text: str, value: Fraction) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 ",
        "1GiB",
        "1e",
        "1K",
        "1ki",
        "--1",
        "1e999",
        "1e31",
        "٢",
        "1" * 65,
        "NaN",
        "0x10",
    ],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a quantity|out of range"):
        parse(text)


def test_a_count_is_a_whole_number() -> None:
    assert whole("2500e-2") == 25
    for text in ("1.5", "1m", "-1"):
        with pytest.raises(ValueError, match="not a whole number"):
            whole(text)
