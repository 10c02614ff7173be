"""Kubernetes quantities, exactly: the text of a resource becomes a fraction, never a float."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?:([KMGTPE]i)|([numkMGTPE]|)|[eE]([+-]?[0-9]{1,3}))"
)
_BINARY: dict[str, int] = {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)
}
_DECIMAL = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_MAX_LENGTH = 64
_MAX_EXPONENT = 30
"""Far above any card; keeps a hostile exponent from building a huge number."""


def parse(text: str) -> Fraction:
    """The value of a quantity (``25``, ``2.5e1``, ``25k``, ``25000m``, ``16Gi``).

    Raises ValueError for anything that the Kubernetes grammar does not allow.
    """
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise ValueError(f"not a quantity: {text[:_MAX_LENGTH]!r}")
    number, binary, decimal, exponent = match.groups()
    value = Fraction(number)
    if binary is not None:
        return value * _BINARY[binary]
    power = int(exponent) if exponent is not None else _DECIMAL[decimal]
    if abs(power) > _MAX_EXPONENT:
        raise ValueError(f"exponent out of range: {text!r}")
    return value * Fraction(f"1e{power}")


def whole(text: str) -> int:
    """The value of a quantity that counts things; ValueError unless it is whole and not negative.

    Extended resources are whole numbers to Kubernetes, however they are spelt.
    """
    value = parse(text)
    if value < 0 or value.denominator != 1:
        raise ValueError(f"not a whole number: {text!r}")
    return value.numerator


def amount(resources: Mapping[str, str], *names: str) -> int:
    """The count of the first of these resources that is there; 0 where none is.

    Raises ValueError, with the resource's name, where it is no whole number.
    """
    for name in names:
        if name in resources:
            try:
                return whole(resources[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    return 0
