"""The page's own files: nothing from elsewhere, nothing that a strict policy forbids."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from qgpu_exporter.web import page
from qgpu_exporter.web.document import node_document
from qgpu_exporter.web.routes import STATIC_TYPES
from tests import worlds

STATIC = resources.files("qgpu_exporter.web") / "static"


def test_every_file_is_served() -> None:
    assert sorted(file.name for file in STATIC.iterdir()) == sorted(STATIC_TYPES)


@pytest.mark.parametrize("name", STATIC_TYPES)
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    text = (STATIC / name).read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) == []
    assert "@import" not in text


@pytest.mark.parametrize(
    "word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"]
)
def test_no_text_becomes_markup(word: str) -> None:
    assert word not in (STATIC / "page.js").read_text()


def test_the_shell_has_neither_script_nor_style_of_its_own() -> None:
    document = node_document(worlds.full_snapshot(), worlds.full_status(), worlds.NOW)
    html = page.html(document, "/metrics")
    assert re.findall(r"<script(?![^>]*src=)", html) == []
    assert "<style" not in html
    assert re.findall(r"\s(?:style|on\w+)=", html) == []
    assert re.findall(r'(?:href|src)="(/|\w+:)', html) == []
