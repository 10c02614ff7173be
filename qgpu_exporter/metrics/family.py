"""What a metric is: a scope (rows and label names) and a family (one row of a table)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

S = TypeVar("S")
R = TypeVar("R")

FamilyType = Literal["gauge", "counter", "info"]


@dataclass(frozen=True)
class Scope(Generic[S, R]):
    """Which rows of a source value (a `Snapshot` or a `Status`) a family has, and their labels.

    `rows` yields (label values in the order of `labels`, what the value function is given); the
    label sets of one call are distinct.
    """

    name: str
    labels: tuple[str, ...]
    rows: Callable[[S], Iterable[tuple[tuple[str, ...], R]]]


@dataclass(frozen=True)
class Family(Generic[S, R]):
    """One metric family: `value` gives a number, or None for "no series".

    `name` is the sample's name: a native counter's ends in `_total`, an info's in `_info`; names
    of other dialects are printed as they are.  `origin` names the driver call or the source,
    `since` the GPU generation that first offers it.
    """

    name: str
    type: FamilyType
    help: str
    scope: Scope[S, R]
    value: Callable[[R], float | None]
    origin: str = ""
    since: str = ""
