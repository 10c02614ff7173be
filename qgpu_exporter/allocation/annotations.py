"""Values that schedulers write into annotations: lists of card numbers, and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from qgpu_exporter.allocation.cards import Device
from qgpu_exporter.allocation.scheme import Finding, PodView

_NUMBERS = re.compile(r"\s*[0-9]{1,4}\s*(?:,\s*[0-9]{1,4}\s*)*")
_SHOWN = 80
"""Characters of a wrong annotation that a problem quotes."""


def numbers(text: str) -> tuple[int, ...] | None:
    """The distinct numbers of a list such as ``0,1``, sorted; None where it is no such list."""
    if not _NUMBERS.fullmatch(text):
        return None
    return tuple(sorted({int(number) for number in text.split(",")}))


def card_numbers(
    view: PodView, container: str, text: str, find: Callable[[int], Device | None]
) -> Iterator[Device | Finding]:
    """The cards that a list of numbers names by `find`; problems for what it cannot name."""
    listed = numbers(text)
    if listed is None:
        detail = f"not a list of cards: {text[:_SHOWN]!r}"
        yield view.problem("bad_annotation", container, detail)
        return
    for number in listed:
        device = find(number)
        if device is None:
            yield view.problem("unknown_card", container, f"there is no card {number} here")
        else:
            yield device


def json_value(text: str) -> object:
    """The value of a JSON text; ValueError for any other text, however it is broken."""
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def entries(value: object) -> dict[str, object]:
    """The members of a JSON object; ValueError for any other value."""
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object: {str(value)[:_SHOWN]!r}")
    return value


def items(value: object) -> list[object]:
    """The elements of a JSON list; ValueError for any other value."""
    if not isinstance(value, list):
        raise ValueError(f"not a JSON list: {str(value)[:_SHOWN]!r}")
    return value
