"""What the pages name is there: links, anchors, metrics, flags and values of the chart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from deploy.build import CHART, SCHEMA
from qgpu_exporter import config, reference
from tests.docs.pages import PAGES, ROOT, anchors, links, prose

FAMILIES = {family.name for _, _, families in reference.SECTIONS for family in families}
OPEN_SOURCE_ONLY = {"container_core_usage", "container_mem_usage"}
"""Of elastic-gpu-exporter, and not of TKE's add-on, whose names the dialect has."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme in ("http", "https", "mailto"):
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        is_missing = not target.exists() or not target.is_relative_to(ROOT)
        if is_missing or (parts.fragment and parts.fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_reached_from_the_index() -> None:
    seen: set[Path] = set()
    left = [ROOT / "docs" / "index.md"]
    while left:
        page = left.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        paths = (urlsplit(link) for link in links(page))
        left += [
            (page.parent / unquote(one.path)).resolve()
            for one in paths
            if not one.scheme and one.path
        ]
    assert {one for one in PAGES if one.is_relative_to(ROOT / "docs")} - seen == set()


def test_the_tables_of_migration_name_families_that_are_there() -> None:
    page = prose(ROOT / "docs" / "migrating.md")
    names = set(
        re.findall(r"`(node_gpu_[a-z0-9_]+|qgpu_exporter_[a-z_]+|DCGM_FI_[A-Z0-9_]+)", page)
    )
    assert len(names) > 60
    assert names - FAMILIES - {"DCGM_FI_PROF_"} == set()
    section = page.partition("## From elastic-gpu-exporter")[2].partition("## From nvidia")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    theirs = {one for row in rows for one in re.findall(r"`([a-z_]+)`", row)}
    assert theirs - FAMILIES == OPEN_SOURCE_ONLY


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_metrics_are_in_the_tables(page: Path) -> None:
    """Whole names only: one with a star, an ellipsis or braces stands for several."""
    text = page.read_text()
    found = set(
        re.findall(r"\b(?:node_gpu|qgpu_exporter)_[a-z0-9_]*[a-z0-9](?!\w|_?[*…<]|_\{)", text)
    )
    own = {one for one in found if not re.search(rf":{one}\b|{one}:", text)}  # recorded series
    unknown = {one for one in own - FAMILIES if not one.startswith("qgpu_exporter_reader_process")}
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_are_settings(page: Path) -> None:
    known = {option.flag for _, option in config.options()} | {"config.file"}
    found = set(re.findall(r"(?<![\w-])--([a-z]+(?:\.[a-z][a-z-]*)+)", page.read_text()))
    assert found - known == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_values_are_the_chart_s(page: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads(SCHEMA.read_text())
    unknown = []
    for path in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z-]+)+)(?:[=:][^`]*)?`", prose(page)):
        first, *rest = path.split(".")
        if first not in values or (first in ("web", "image", "kubelet") and page.name in OWN_FLAGS):
            continue
        node = schema["properties"][first]
        for part in rest:
            node = node.get("properties", {}).get(part)
            if node is None:
                unknown.append(path)
                break
    assert unknown == []


OWN_FLAGS = ("configuration.md", "web-configuration.md")
"""Pages that speak of the exporter's own keys, which look alike."""
