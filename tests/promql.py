"""What a PromQL expression names, by its text: metrics, label matchers and counters' functions."""

from __future__ import annotations

import re
from typing import Any

from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE

FAMILIES: dict[str, Family[Any, Any]] = {
    **{family.name: family for family in NATIVE},
    **{family.name: family for family in SERVICE},
}
TARGET_LABELS = frozenset({"cluster", "job", "instance", "node"})
"""Labels that the scrape adds; `node` where the site gives it to the target."""
NOT_OURS = frozenset({"up", "ALERTS"})

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_CLAUSE = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\b(?:\s*\([^()]*\))?")
_BRACES = re.compile(r"\{[^{}]*\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_SELECTOR = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)\s*\{([^{}]*)\}")
_MATCHER = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*(?:=~|!~|!=|=)")
_COUNTED = re.compile(r"\b(?:rate|irate|increase)\s*\(\s*([A-Za-z_:][A-Za-z0-9_:]*)")
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    text = _STRING.sub('""', expression)
    for pattern in (_CLAUSE, _BRACES, _RANGE):
        text = pattern.sub(" ", text)
    return {
        match[0]
        for match in _NAME.finditer(text)
        if match[0].lower() not in _WORDS
        and not text[match.end() :].lstrip().startswith("(")
        and (match.start() == 0 or not text[match.start() - 1].isdigit())
    }


def matched_labels(expression: str) -> set[tuple[str, str]]:
    """(metric, label) of every label matcher."""
    text = _STRING.sub('""', expression)
    return {
        (selector[1], label)
        for selector in _SELECTOR.finditer(text)
        for label in _MATCHER.findall(selector[2])
    }


def counted(expression: str) -> set[str]:
    """The metrics inside functions that are for counters only."""
    return set(_COUNTED.findall(_STRING.sub('""', expression)))


def known_labels(metric: str) -> set[str]:
    """The labels that a series of a family may carry."""
    scope = FAMILIES[metric].scope
    return {*scope.labels, *scope.more_label_names, *TARGET_LABELS}


def complaints(expression: str, recorded: set[str]) -> list[str]:
    """What an expression names that is not there, and counters' functions over gauges."""
    found = [
        f"no metric {name}"
        for name in sorted(metric_names(expression) - FAMILIES.keys() - recorded - NOT_OURS)
    ]
    found += [
        f"{metric} has no label {label}"
        for metric, label in sorted(matched_labels(expression))
        if metric in FAMILIES and label not in known_labels(metric)
    ]
    found += [
        f"{metric} is no counter"
        for metric in sorted(counted(expression))
        if metric not in FAMILIES or FAMILIES[metric].type != "counter"
    ]
    return found
