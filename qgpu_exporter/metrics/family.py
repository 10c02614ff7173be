"""What a metric is: a scope (rows and label names) and a family (one row of a table)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

S = TypeVar("S")
R = TypeVar("R")

FamilyType = Literal["gauge", "counter", "info"]

_UNITS = ("bytes", "celsius", "hertz", "joules", "ratio", "seconds", "watts")
"""The base units that a name may end with (before ``_total``)."""


def present(_: object) -> int:
    """The value of a fact: its labels say all."""
    return 1


def itself(value: float | None) -> float | None:
    """The value of a row that is a number already."""
    return value


@dataclass(frozen=True, eq=False)
class Scope(Generic[S, R]):
    """Which rows of a source value (a `Snapshot` or a `Status`) a family has, and their labels.

    `rows` yields (label values in the order of `labels`, what the value function is given); the
    label sets of one call are distinct.  `more_labels` gives a row labels that others lack, as
    (name, value) pairs whose names are not in `labels`.
    """

    name: str
    labels: tuple[str, ...]
    rows: Callable[[S], Iterable[tuple[tuple[str, ...], R]]]
    more_labels: Callable[[R], Iterable[tuple[str, str]]] | None = None
    more_label_names: tuple[str, ...] = ()
    """What `more_labels` may give, for readers of the reference."""


@dataclass(frozen=True, eq=False)
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

    @property
    def base_name(self) -> str:
        """The name without the suffix that its type asks for: what OpenMetrics calls it."""
        suffix = {"counter": "_total", "info": "_info", "gauge": ""}[self.type]
        return self.name.removesuffix(suffix) if suffix else self.name

    @property
    def unit(self) -> str:
        """The base unit that the name ends with, or an empty text."""
        last = self.base_name.rpartition("_")[2]
        return last if self.type != "info" and last in _UNITS else ""
