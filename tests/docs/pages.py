"""The written pages: which there are, their headings, links and blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "alerts/*.md", "dashboards/*.md", "deploy/**/*.md")
    for path in ROOT.glob(pattern)
)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page, language and text."""

    page: Path
    language: str
    text: str

    @property
    def name(self) -> str:
        """Page and first words, for a test's name."""
        return f"{self.page.relative_to(ROOT)}: {' '.join(self.text.split()[:4])}"


def blocks(*languages: str) -> list[Block]:
    """All blocks of these languages."""
    return [
        Block(page, language, text)
        for page in PAGES
        for language, text in _FENCE.findall(page.read_text())
        if language in languages
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """Targets of a page's links and images, also of an image within a link."""
    return (match[1] for match in _LINK.finditer(prose(page)))


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`, as GitHub makes it of the headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        number = 1
        unique = slug
        while unique in found:
            unique = f"{slug}-{number}"
            number += 1
        found.add(unique)
    return found
