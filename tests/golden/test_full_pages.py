"""Every family over a node that gives everything: each dialect's page as written down, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qgpu_exporter.exposition import OPENMETRICS, TEXT, Dropped, Format, render
from qgpu_exporter.metrics.dcgm import DCGM
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.metrics.tke import TKE
from tests.worlds import full_snapshot, full_status

FOLDER = Path(__file__).parent / "full_pages"
Table = tuple[Family[Any, Any], ...]
PAGES: dict[str, tuple[Table, object, Format]] = {
    "native.prom": (NATIVE, full_snapshot(), TEXT),
    "native.openmetrics": (NATIVE, full_snapshot(), OPENMETRICS),
    "dcgm.prom": (DCGM, full_snapshot(), TEXT),
    "dcgm.openmetrics": (DCGM, full_snapshot(), OPENMETRICS),
    "tke.prom": (TKE, full_snapshot(), TEXT),
    "service.prom": (SERVICE, full_status(), TEXT),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_as_written(name: str, *, update_golden: bool) -> None:
    families, source, fmt = PAGES[name]
    dropped = Dropped()
    page = render(families, source, fmt, dropped=dropped)
    assert dropped.counts == {}
    path = FOLDER / name
    if update_golden:
        path.write_bytes(page)
    assert page == path.read_bytes()


@pytest.mark.parametrize("name", ["native.prom", "service.prom", "tke.prom"])
def test_every_family_has_a_series(name: str) -> None:
    families, source, fmt = PAGES[name]
    page = render(families, source, fmt).decode()
    shown = {line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    assert sorted(shown) == sorted(family.name for family in families)


def test_every_folder_file_is_a_page() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)
