"""What the driver's numbers and texts may be: everything else is dropped here, never clamped.

A value that cannot be true says that there is no reading.  Drivers and tools mark missing values
with the largest numbers of their type (NVML) or with numbers just below them (DCGM's blanks).
"""

from __future__ import annotations

import math

from qgpu_exporter.model import Memory

_BLANK_64 = 0x7FFF_FFFF_FFFF_FFF0
"""DCGM's int64 blanks begin here, NVML's "not available" is above; no true counter gets near."""
_BLANKS_32 = frozenset({2147483632, 2147483633, 2147483634, 2147483635, 0xFFFF_FFFE, 0xFFFF_FFFF})
"""Single numbers, since a 32-bit counter passes through the whole range before it wraps."""
_HOTTEST_CELSIUS = 200.0
"""DCGM drops above it too; 255 is a sensor that does not exist, silicon ends at about 125."""
_COLDEST_CELSIUS = -50.0
"""Below what any board is specified to run at."""
_MOST_WATTS = 20_000.0
"""Boards take up to some 1.4 kW; this leaves room for a whole module."""
_MOST_MEGAHERTZ = 20_000
_MOST_MEMORY_BYTES = 1 << 50
_MOST_LINKS_BYTES_PER_SECOND = 1e14
_LARGEST_INSTANCE = 1024
_NO_TEXT = frozenset({"", "N/A", "[N/A]", "<<<NULL>>>", "0", "Unknown Error"})


def ratio(percent: float | None) -> float | None:
    """0 to 1 from 0 to 100."""
    if percent is None or not 0 <= percent <= 100:
        return None
    return percent / 100


def celsius(value: float | None) -> float | None:
    """A temperature of a board."""
    if value is None or not _COLDEST_CELSIUS <= value <= _HOTTEST_CELSIUS:
        return None
    return float(value)


def watts(milliwatts: float | None) -> float | None:
    """Watts from milliwatts."""
    if milliwatts is None or not 0 <= milliwatts <= _MOST_WATTS * 1000:
        return None
    return milliwatts / 1000


def hertz(megahertz: int | None) -> int | None:
    """Hertz from megahertz."""
    if megahertz is None or not 0 <= megahertz <= _MOST_MEGAHERTZ:
        return None
    return megahertz * 1_000_000


def count(value: float | None) -> int | None:
    """A cumulative or plain number of 32 or 64 bits."""
    if value is None or not math.isfinite(value) or not 0 <= value < _BLANK_64:
        return None
    whole = int(value)
    return None if whole in _BLANKS_32 else whole


def at_most(limit: int, value: float | None) -> int | None:
    """A small number, such as a PCIe generation."""
    whole = count(value)
    return whole if whole is not None and whole <= limit else None


def flag(value: float | None) -> bool | None:
    """A number that can only be 0 or 1."""
    return bool(value) if value in (0, 1) else None


def seconds_of_nanoseconds(value: float | None) -> float | None:
    """Cumulative seconds from nanoseconds."""
    whole = count(value)
    return None if whole is None else whole / 1e9


def bytes_per_second(mebibytes: float | None) -> float | None:
    """A transfer rate from MiB/s."""
    if mebibytes is None:
        return None
    rate = mebibytes * (1 << 20)
    return rate if 0 <= rate <= _MOST_LINKS_BYTES_PER_SECOND else None


def memory(total: int, used: int, free: int | None, reserved: int | None = None) -> Memory | None:
    """Bytes that can be parts of one memory, or None."""
    parts = [part for part in (used, free, reserved) if part is not None]
    if not 0 < total <= _MOST_MEMORY_BYTES or any(not 0 <= part <= total for part in parts):
        return None
    return Memory(total, used, free, reserved)


def text(value: object) -> str | None:
    """A name of printable characters, or None where it names nothing."""
    if not isinstance(value, str):
        return None
    stripped = value.strip()
    return stripped if stripped not in _NO_TEXT and stripped.isprintable() else None


def process_bytes(value: int) -> int | None:
    """Memory of one process; NVML says 2^64-1 where it does not know."""
    return value if 0 <= value <= _MOST_MEMORY_BYTES else None


def instance(number: int | None) -> int | None:
    """A GPU or compute instance; NVML says 2^32-1 for the whole card."""
    return number if number is not None and 0 <= number <= _LARGEST_INSTANCE else None
