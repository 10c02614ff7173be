"""Which encoding a client takes, by its Accept-Encoding header."""

from __future__ import annotations

import gzip

import pytest

from qgpu_exporter.web.responses import compressed, takes_gzip


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("GZIP", True),
        ("x-gzip", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip;q=0.0, *", False),
        ("*", True),
        ("*;q=0", False),
        ("identity", False),
        ("identity;q=0.5, gzip;q=0.4", False),
        ("identity;q=0.5, gzip;q=0.5", True),
        ("gzip;q=nan", False),
        ("gzip;q=2", False),
        ("gzip;q=", False),
        (";;;,,=", False),
        ("br, zstd", False),
        ("gzip ; q = 0.3", True),
    ],
)
def test_gzip_where_it_is_preferred(header: str | None, expected: bool) -> None:
    assert takes_gzip(header) is expected


def test_the_same_body_has_the_same_bytes() -> None:
    assert compressed(b"page" * 100) == compressed(b"page" * 100)
    assert gzip.decompress(compressed(b"page" * 100)) == b"page" * 100
