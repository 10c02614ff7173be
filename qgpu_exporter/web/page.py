"""The status page's HTML: a shell that page.js fills, and plain tables for who has no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

MIB = 1 << 20

_SHELL = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/page.css">
<script src="static/page.js" defer></script>
</head>
<body>
<header class="top">
  <h1><span id="node">{node}</span> <span class="product">GPUs</span></h1>
  <p id="state" class="state"></p>
  <p id="announcement" class="unseen" role="status"></p>
  <div class="search" id="search-box" role="search" hidden>
    <label for="search" class="unseen">Search pods, containers, cards</label>
    <input id="search" type="search" placeholder="Search pods, cards" autocomplete="off"
      spellcheck="false" aria-keyshortcuts="/">
  </div>
  <nav aria-label="Other endpoints">
    <a href="{metrics}">Metrics</a>
    <a href="caches">Caches</a>
    <a href="api/v1/node">API</a>
  </nav>
</header>
<section id="alert" class="alert" aria-label="Trouble" hidden></section>
<noscript>{fallback}</noscript>
<main id="main" hidden>
  <section id="summary" class="summary" aria-label="Summary"></section>
  <section aria-labelledby="cards-title">
    <div class="heading">
      <h2 id="cards-title">Cards</h2>
      <ul class="legend" aria-label="How to read the bars">
        <li><span class="key key-request"></span>requested</li>
        <li><span class="key key-used"></span>used</li>
        <li><span class="key key-other"></span>unattributed</li>
        <li><span class="key key-free"></span>free</li>
      </ul>
    </div>
    <div id="cards" class="cards"></div>
    <p id="no-match" class="empty" hidden>Nothing matches the search.</p>
  </section>
  <section aria-labelledby="problems-title" id="problems-section" hidden>
    <h2 id="problems-title">Problems</h2>
    <ul id="problems" class="problems"></ul>
  </section>
  <section aria-labelledby="sources-title">
    <h2 id="sources-title">Sources</h2>
    <ul id="sources" class="sources"></ul>
  </section>
</main>
<section id="details" class="details" aria-labelledby="details-title" tabindex="-1" hidden>
  <div class="details-head">
    <h2 id="details-title"></h2>
    <button id="details-close" type="button" aria-label="Close">&#215;</button>
  </div>
  <div id="details-body"></div>
</section>
<footer>qgpu-exporter <span id="version">{version}</span></footer>
</body>
</html>
"""


def html(document: dict[str, Any], telemetry_path: str) -> str:
    """The page of a node document; every link is relative, so that it works behind a proxy."""
    node = document["node"] or ""
    return _SHELL.format(
        title=_text(f"{node} GPUs" if node else "GPUs"),
        node=_text(node or "This node"),
        metrics=_text(telemetry_path.lstrip("/")),
        version=_text(document["exporter"]["version"]),
        fallback=_fallback(document),
    )


def _fallback(document: dict[str, Any]) -> str:
    """What a reader without JavaScript gets: the same facts, as they are now."""
    cards = [
        (
            card["gpu"],
            card["model"] or "",
            _state(card),
            _memory((card["readings"] or {}).get("memory")),
        )
        for card in document["cards"] or ()
    ]
    held = [
        (
            one["gpu"] if one["mig"] is None else f"{one['gpu']} / MIG {one['mig']}",
            f"{one['namespace']}/{one['pod']}",
            one["container"],
            _number(one["core_percent"], "%"),
            _mib(one["memory_bytes"]),
        )
        for one in document["allocations"] or ()
    ]
    sources = [
        (
            one["source"],
            {True: "up", False: "down", None: "no answer yet"}[one["up"]],
            one["detail"],
        )
        for one in document["sources"]
    ]
    return (
        '<div class="plain"><p>This page updates itself where JavaScript is on.</p>'
        + _table("Cards", ("Card", "Model", "State", "Memory used / total"), cards)
        + _table("Held by", ("Card", "Pod", "Container", "Core", "Memory"), held)
        + _table("Sources", ("Source", "State", "Detail"), sources)
        + "</div>"
    )


def _state(card: dict[str, Any]) -> str:
    if card["up"]:
        return "up"
    return f"down ({card['down_reason']})" if card["down_reason"] else "no reading"


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    heads = "".join(f'<th scope="col">{_text(one)}</th>' for one in head)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<table><caption>{_text(caption)}</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    )


def _memory(memory: dict[str, Any] | None) -> str:
    if memory is None:
        return ""
    return f"{_mib(memory['used_bytes'])} / {_mib(memory['total_bytes'])}"


def _mib(count: int | None) -> str:
    return _number(None if count is None else count / MIB, " MiB")


def _number(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.0f}{unit}"


def _text(value: object) -> str:
    return escape(str(value))
