"""NVML's field values: all ids of a card in one call a round, and what they mean."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pynvml

from qgpu_exporter.model import Ecc, NvLink, RawCounter, RemappedRows, RetiredPages
from qgpu_exporter.reader import plausible
from qgpu_exporter.reader.calls import PROBE_ROUNDS, Calls, check, symbol

FieldKey = tuple[int, int]
"""Field id and scope; the scope is a link's number, or 0."""

# One nvmlFieldValue_t: id, scope, timestamp, latency, type, return code, value.
_ENTRY = struct.Struct("=IIqqIIQ")

_LASTING = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)

_ECC_COUNTS = (
    pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
    pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
    pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL,
    pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL,
)

# By the names of `model.CardReading.clock_event_seconds`; all count nanoseconds.  One field serves
# two names: it was the power policy's violation time before it became the power cap's.
CLOCK_EVENT_FIELDS: dict[str, int] = {
    "power": pynvml.NVML_FI_DEV_PERF_POLICY_POWER,
    "sw_power_cap": pynvml.NVML_FI_DEV_PERF_POLICY_POWER,
    "thermal": pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL,
    "sync_boost": pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST,
    "board_limit": pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT,
    "low_utilization": pynvml.NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION,
    "reliability": pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY,
    "sw_thermal_slowdown": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
    "hw_thermal_slowdown": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
    "hw_power_brake_slowdown": pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
}

CARD_FIELDS: tuple[int, ...] = (
    pynvml.NVML_FI_DEV_ECC_CURRENT,
    pynvml.NVML_FI_DEV_ECC_PENDING,
    *_ECC_COUNTS,
    pynvml.NVML_FI_DEV_RETIRED_SBE,
    pynvml.NVML_FI_DEV_RETIRED_DBE,
    pynvml.NVML_FI_DEV_RETIRED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_COR,
    pynvml.NVML_FI_DEV_REMAPPED_UNC,
    pynvml.NVML_FI_DEV_REMAPPED_PENDING,
    pynvml.NVML_FI_DEV_REMAPPED_FAILURE,
    pynvml.NVML_FI_DEV_MEMORY_TEMP,
    pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    pynvml.NVML_FI_DEV_POWER_AVERAGE,
    pynvml.NVML_FI_DEV_POWER_INSTANT,
    pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT,
    pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,
    pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS,
    pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
    pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
    pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT,
    pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
    *sorted(set(CLOCK_EVENT_FIELDS.values())),
)

_LINK_FIELDS: tuple[int, ...] = (
    pynvml.NVML_FI_DEV_NVLINK_GET_STATE,
    pynvml.NVML_FI_DEV_NVLINK_GET_SPEED,
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
)
# Older drivers count errors by an id for each link, of which there are twelve: the first six in
# one block, the others in a second one.
_OLD_LINK_ERRORS: dict[str, tuple[int, int]] = {
    "crc_flit": (
        pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0,
        pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L6,
    ),
    "crc_data": (
        pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L0,
        pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_L6,
    ),
    "replay": (
        pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L0,
        pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L6,
    ),
    "recovery": (
        pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L0,
        pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L6,
    ),
    "ecc": (
        pynvml.NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_L0,
        pynvml.NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_L6,
    ),
}
_OLD_LINKS = 12
_NEW_LINK_ERRORS: dict[str, int] = {
    "crc_flit": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    "replay": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
    "recovery": pynvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
}
_KIBIBYTE = 1024


@dataclass(frozen=True, slots=True)
class FieldNumber:
    """One answered field; `bits` is the width of its type."""

    value: float
    bits: Literal[32, 64]


FieldValues = Mapping[FieldKey, FieldNumber]


def _old_error_id(kind: str, link: int) -> int:
    first, second = _OLD_LINK_ERRORS[kind]
    return first + link if link < 6 else second + link - 6


class FieldReader:
    """Reads the field values of one card, and remembers which ids it does not offer."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._round = 0
        self._ask_again: dict[FieldKey, int] = {}
        self._template: tuple[tuple[FieldKey, ...], bytes] = ((), b"")

    def forget_refusals(self) -> None:
        """The handle is new: ask for everything again."""
        self._ask_again.clear()

    def read(self, handle: object, links: int) -> dict[FieldKey, FieldNumber]:
        """The fields of the card and of its first `links` NVLinks, as far as they are offered."""
        self._round += 1
        wanted = tuple(key for key in _keys(links) if self._ask_again.get(key, 0) <= self._round)
        if not wanted:
            return {}
        if self._template[0] != wanted:
            entries = (_ENTRY.pack(field, scope, 0, 0, 0, 0, 0) for field, scope in wanted)
            self._template = (wanted, b"".join(entries))
        # A fresh copy each time: some drivers add to what they find in the value.
        buffer = bytearray(self._template[1])
        before = self._calls.answered
        if self._calls.ask("nvmlDeviceGetFieldValues", _fetch, handle, buffer) is None:
            return {}
        answered = self._decode(buffer)
        if not answered:
            # The call succeeds even when no single field does.
            self._calls.answered = before
        return answered

    def _decode(self, buffer: bytearray) -> dict[FieldKey, FieldNumber]:
        answered: dict[FieldKey, FieldNumber] = {}
        for field, scope, _, _, kind, code, raw in _ENTRY.iter_unpack(buffer):
            if code == pynvml.NVML_SUCCESS:
                # Old drivers name a wrong type for these, but fill the whole value.
                number = FieldNumber(raw, 64) if field in _ECC_COUNTS else _number(kind, raw)
                if number is not None:
                    answered[field, scope] = number
            elif code in _LASTING:
                self._ask_again[field, scope] = self._round + PROBE_ROUNDS
            elif code == pynvml.NVML_ERROR_UNKNOWN:
                self._calls.unknown += 1
        return answered


def _keys(links: int) -> Iterable[FieldKey]:
    for field in CARD_FIELDS:
        yield field, 0
    for link in range(links):
        for field in _LINK_FIELDS:
            yield field, link
        if link < _OLD_LINKS:
            for kind in _OLD_LINK_ERRORS:
                yield _old_error_id(kind, link), 0


def _fetch(handle: object, buffer: bytearray) -> bool:
    values = (ctypes.c_char * len(buffer)).from_buffer(buffer)
    entries = ctypes.c_int(len(buffer) // _ENTRY.size)
    check(symbol("nvmlDeviceGetFieldValues")(handle, entries, values))
    return True


def _number(kind: int, raw: int) -> FieldNumber | None:
    if kind == pynvml.NVML_VALUE_TYPE_DOUBLE:
        return FieldNumber(struct.unpack("=d", struct.pack("=Q", raw))[0], 64)
    if kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return FieldNumber(raw & 0xFFFF_FFFF, 32)
    if kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT:
        return FieldNumber(raw & 0xFFFF, 32)
    if kind == pynvml.NVML_VALUE_TYPE_SIGNED_INT:
        return FieldNumber(struct.unpack("=i", struct.pack("=I", raw & 0xFFFF_FFFF))[0], 32)
    if kind == pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG:
        return FieldNumber(struct.unpack("=q", struct.pack("=Q", raw))[0], 64)
    if kind in (
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG,
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
    ):
        return FieldNumber(raw, 64)
    return None


def value(values: FieldValues, field: int, scope: int = 0) -> float | None:
    """The plain number of a field, or None."""
    number = values.get((field, scope))
    return None if number is None else number.value


def counter(values: FieldValues, field: int, scope: int = 0, factor: int = 1) -> RawCounter | None:
    """A cumulative field times `factor`, with the width at which it may wrap."""
    number = values.get((field, scope))
    whole = None if number is None else plausible.count(number.value)
    if number is None or whole is None:
        return None
    # A 32-bit count of KiB does not wrap at 2^32 bytes.
    bits: Literal[32, 64] = number.bits if factor == 1 else 64
    return RawCounter(whole * factor, bits)


def ecc(values: FieldValues) -> Ecc:
    """ECC mode and error counts."""
    counts = [plausible.count(value(values, field)) for field in _ECC_COUNTS]
    return Ecc(
        enabled=plausible.flag(value(values, pynvml.NVML_FI_DEV_ECC_CURRENT)),
        pending=plausible.flag(value(values, pynvml.NVML_FI_DEV_ECC_PENDING)),
        corrected_volatile=counts[0],
        uncorrected_volatile=counts[1],
        corrected_aggregate=counts[2],
        uncorrected_aggregate=counts[3],
    )


def retired_pages(values: FieldValues) -> RetiredPages:
    """Retired pages, before Ampere."""
    return RetiredPages(
        single_bit=plausible.count(value(values, pynvml.NVML_FI_DEV_RETIRED_SBE)),
        double_bit=plausible.count(value(values, pynvml.NVML_FI_DEV_RETIRED_DBE)),
        pending=plausible.flag(value(values, pynvml.NVML_FI_DEV_RETIRED_PENDING)),
    )


def remapped_rows(values: FieldValues) -> RemappedRows:
    """Remapped rows, Ampere and later; also with MIG, where the call of that name refuses."""
    return RemappedRows(
        correctable=plausible.count(value(values, pynvml.NVML_FI_DEV_REMAPPED_COR)),
        uncorrectable=plausible.count(value(values, pynvml.NVML_FI_DEV_REMAPPED_UNC)),
        pending=plausible.flag(value(values, pynvml.NVML_FI_DEV_REMAPPED_PENDING)),
        failure=plausible.flag(value(values, pynvml.NVML_FI_DEV_REMAPPED_FAILURE)),
    )


def clock_event_seconds(values: FieldValues) -> dict[str, float]:
    """Cumulative seconds by reason."""
    seconds = {
        reason: plausible.seconds_of_nanoseconds(value(values, field))
        for reason, field in CLOCK_EVENT_FIELDS.items()
    }
    return {reason: number for reason, number in seconds.items() if number is not None}


def nvlinks(values: FieldValues, links: int) -> tuple[NvLink, ...]:
    """The NVLink ports that answer at least one field."""
    ports = (_nvlink(values, link) for link in range(links))
    return tuple(port for port in ports if port is not None)


def _nvlink(values: FieldValues, link: int) -> NvLink | None:
    megabytes = plausible.at_most(
        1_000_000, value(values, pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)
    )
    sent = _larger(
        counter(values, pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, link),
        counter(values, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, link, _KIBIBYTE),
    )
    received = _larger(
        counter(values, pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES, link),
        counter(values, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, link, _KIBIBYTE),
    )
    port = NvLink(
        link=link,
        active=plausible.flag(value(values, pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link)),
        speed_bytes_per_second=None if megabytes is None else megabytes * 1_000_000,
        transmitted_bytes=sent,
        received_bytes=received,
        errors=_link_errors(values, link),
    )
    return None if port == NvLink(link) else port


def _larger(first: RawCounter | None, second: RawCounter | None) -> RawCounter | None:
    """The counter that counts: which one does depends on the NVLink generation, the other one is
    not offered or stays at zero."""
    if first is None or second is None:
        return first or second
    return first if first.value >= second.value else second


def _link_errors(values: FieldValues, link: int) -> dict[str, int]:
    errors: dict[str, int] = {}
    for kind in _OLD_LINK_ERRORS:
        new = _NEW_LINK_ERRORS.get(kind)
        number = None if new is None else value(values, new, link)
        if number is None and link < _OLD_LINKS:
            number = value(values, _old_error_id(kind, link))
        whole = plausible.count(number)
        if whole is not None:
            errors[kind] = whole
    return errors
