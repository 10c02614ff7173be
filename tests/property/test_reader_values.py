"""No value that a driver gives, however wild, becomes a reading that cannot be true."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qgpu_exporter.model import CardReading, RawCounter
from tests.nvml_stub import Stub, presets
from tests.reader_child import ReaderChild

SENTINELS = (
    "-1",
    "0",
    "1",
    "100",
    "101",
    "201",
    "255",
    "4294967295",
    "4294967294",
    "2147483632",
    "2147483647",
    "2147483648",
    "9223372036854775792",
    "9223372036854775794",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551614",
    "140737488355328",
    "nan",
    "inf",
    "-inf",
    "1e300",
    "",
    "N/A",
)
WILD = st.one_of(
    st.sampled_from(SENTINELS),
    st.integers(-(2**63), 2**64 - 1).map(str),
    st.integers(0, 300).map(str),
    st.floats(allow_nan=True, allow_infinity=True, width=64).map(repr),
)
FIELD_TYPE = st.integers(0, 8)

# What decides whether the other values are asked for at all.
KEPT = (
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlGpmQueryDeviceSupport",
)

CARDS = (presets.t4(0), presets.h200(1), presets.h100_mig(2))
# One NVLink of each card stands for the others.
LINK = re.compile(r"field\.\d+\.[1-9]\d*")
PLAIN: dict[str, str] = {
    f"{index}.{key}": str(value)
    for index, values in enumerate(CARDS)
    for key, value in values.items()
    if not key.endswith(KEPT) and not LINK.fullmatch(key)
}


@st.composite
def wild_answers(draw: st.DrawFn) -> dict[str, object]:
    """Other values for some keys, each of the number of parts that the key has."""
    answers: dict[str, object] = {}
    keys = draw(st.lists(st.sampled_from(sorted(PLAIN)), min_size=1, max_size=60, unique=True))
    for key in keys:
        if ".field." in key:
            answers[key] = f"{draw(FIELD_TYPE)}:{draw(WILD)}"
        elif "RunningProcesses" in key or "Samples" in key or "ProcessUtilization" in key:
            parts = draw(st.lists(WILD, min_size=1, max_size=6))
            answers[key] = ":".join(parts)
        else:
            answers[key] = ",".join(draw(WILD) for _ in PLAIN[key].split(","))
    return answers


def every_number(value: object, path: str) -> Iterator[tuple[str, float]]:
    """All numbers of a reading with the names of their fields."""
    if isinstance(value, RawCounter):
        yield f"{path}.counter", value.value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from every_number(getattr(value, part.name), f"{path}.{part.name}")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from every_number(part, f"{path}.{key}" if path.endswith("errors") else path)
    elif isinstance(value, tuple):
        for part in value:
            yield from every_number(part, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


RANGES = {
    "_ratio": (0.0, 1.0),
    "_ratios": (0.0, 1.0),
    ".ratio": (0.0, 1.0),
    "_celsius": (-50.0, 200.0),
    "_watts": (0.0, 20_000.0),
    "_hertz": (0, 20_000_000_000),
    "_bytes": (0, 1 << 50),
    "_joules": (0.0, 2.0**63 / 1000),
    "_seconds": (0.0, 2.0**63 / 1e9),
    "_per_second": (0.0, 1e14),
    "pid": (1, 1 << 22),
    "generation": (0, 64),
    "width": (0, 64),
    "performance_state": (0, 15),
    "_instance": (0, 1024),
    "minor": (0, 0xFFFF),
}
BLANKS = {*range(2147483632, 2147483636), 0xFFFF_FFFE, 0xFFFF_FFFF}


def assert_plausible(card: CardReading) -> None:
    for path, number in every_number(card, ""):
        assert math.isfinite(number), path
        for ending, (least, most) in RANGES.items():
            if path.endswith(ending):
                assert least <= number <= most, (path, number)
        if not path.endswith(("_us", "_ratio", "_hertz", "_bytes")):
            assert number >= 0 or path.endswith("_celsius"), (path, number)
            assert number < 2**63 - 16, (path, number)
            assert number not in BLANKS, (path, number)
    for memory in (card.memory, card.bar1, *(part.memory for part in card.mig_slices)):
        if memory is not None:
            assert memory.used_bytes <= memory.total_bytes


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(tmp_path_factory.mktemp("wild"), CARDS)


@pytest.fixture(scope="module")
def child(stub: Stub) -> Iterator[ReaderChild]:
    with ReaderChild(environment=stub.environment()) as reader:
        reader.ask()
        yield reader


def check(stub: Stub, child: ReaderChild, answers: dict[str, object]) -> None:
    stub.set(PLAIN | answers)
    for _ in range(2):
        reading = child.ask()
        assert reading.error is None
        assert [card.identity.uuid for card in reading.cards] == [
            presets.uuid(index) for index in range(len(CARDS))
        ], reading.failures
        for card in reading.cards:
            assert_plausible(card)


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("value", SENTINELS)
def test_one_value_in_every_place(stub: Stub, child: ReaderChild, kind: int, value: str) -> None:
    def whole(key: str) -> str:
        if ".field." in key:
            return f"{kind}:{value}"
        return ",".join([value] * (PLAIN[key].count(",") + 1))

    if kind == 0:
        # Else the profiling samples are too close, and those values are not asked for.
        time.sleep(0.11)
    check(stub, child, {key: whole(key) for key in PLAIN})


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(answers=wild_answers())
def test_every_reading_is_plausible(
    stub: Stub, child: ReaderChild, answers: dict[str, object]
) -> None:
    check(stub, child, answers)
