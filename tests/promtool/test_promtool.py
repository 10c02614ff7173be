"""What promtool says of a full page: nothing of our own names, a known list of the dialects'."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qgpu_exporter.exposition import Exposition, ProcessFamilies, render
from qgpu_exporter.metrics.dcgm import DCGM
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.metrics.tke import TKE
from qgpu_exporter.model import Snapshot
from tests.worlds import full_snapshot, full_status

FOLDER = Path(__file__).parent


def findings(promtool: str, page: bytes) -> list[str]:
    """The lines of `promtool check metrics`; an error in the page itself is one of them."""
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, check=False, timeout=60
    )
    return sorted(set((checked.stdout + checked.stderr).decode().splitlines()))


def test_our_own_names_are_clean(tool: Callable[[str], str]) -> None:
    exposition = Exposition(NATIVE, SERVICE, ProcessFamilies())
    page = exposition.page(full_snapshot(), full_status())
    assert findings(tool("promtool"), page) == []


@pytest.mark.parametrize(("name", "families"), [("dcgm", DCGM), ("tke", TKE)])
def test_names_of_others_have_the_findings_that_are_known(
    tool: Callable[[str], str],
    name: str,
    families: tuple[Family[Snapshot, Any], ...],
    *,
    update_golden: bool,
) -> None:
    found = "".join(
        f"{line}\n" for line in findings(tool("promtool"), render(families, full_snapshot()))
    )
    path = FOLDER / f"{name}.txt"
    if update_golden:
        path.write_text(found)
    assert found == path.read_text()
