"""docs/metrics.md is what the tables say, and names every family once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from qgpu_exporter import config, reference
from qgpu_exporter.metrics.dcgm import DCGM
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.metrics.tke import TKE

ALL: tuple[Family[Any, Any], ...] = (*NATIVE, *SERVICE, *DCGM, *TKE)
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_made_from_the_tables() -> None:
    assert PAGE.read_text() == reference.markdown(), "run `make docs`"


def test_the_configuration_is_made_from_the_settings() -> None:
    page = PAGE.with_name("configuration.md").read_text()
    assert page == reference.configuration(), "run `make docs`"
    flags = re.findall(r"^\| `--([a-z.-]+)` \|", page, re.MULTILINE)
    assert flags == [option.flag for _, option in config.options()]


def test_every_family_stands_in_the_page_once() -> None:
    rows = re.findall(r"^\| `([A-Za-z_]+[A-Za-z0-9_]*)` \|", PAGE.read_text(), re.MULTILINE)
    assert Counter(rows) == Counter(family.name for family in ALL)


def test_the_module_prints_a_page() -> None:
    command = [sys.executable, "-m", "qgpu_exporter.reference", "configuration"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout == reference.configuration()


def test_units_are_told_where_names_have_none() -> None:
    units = {
        family.name: reference.unit(family)
        for _, _, families in reference.SECTIONS
        for family in families
    }
    assert units["node_gpu_core_request"] == "%"
    assert units["node_gpu_memory_request_bytes"] == "bytes"
    assert units["node_gpu_nvlink_speed_bytes_per_second"] == "bytes/s"
    assert units["node_gpu_up"] == ""
    assert units["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] == "mJ"
    assert units["DCGM_FI_DEV_FB_USED"] == "MiB"
    assert units["gpu_mem_allocated"] == "GiB"
    assert units["pod_mem_request"] == "MiB"
