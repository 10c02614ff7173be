"""Reads one round's process samples: what each process used, and for how long that is known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qgpu_exporter.model import CardReading, ProcessSample, ProcessWindow
from qgpu_exporter.totals import LONGEST_SPACING_US, MICROSECONDS


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The means of one process over its new samples; None: no sample has a usable value."""

    sm_ratio: float | None = 0.0
    encoder_ratio: float | None = 0.0
    decoder_ratio: float | None = 0.0


IDLE = ProcessUse()
"""A process without a new sample has used nothing since."""


def new_samples(window: ProcessWindow) -> Mapping[int, list[ProcessSample]]:
    """The window's samples by pid, oldest first; the driver may repeat old ones: left out."""
    found: dict[int, dict[int, ProcessSample]] = defaultdict(dict)
    for sample in window.samples:
        if sample.timestamp_us > window.since_us:
            found[sample.pid].setdefault(sample.timestamp_us, sample)
    return {pid: [by_time[us] for us in sorted(by_time)] for pid, by_time in found.items()}


def process_uses(window: ProcessWindow) -> Mapping[int, ProcessUse]:
    """What each process with a new sample used; ratios 0 to 1 of the card."""
    return {
        pid: ProcessUse(
            _mean(sample.sm_ratio for sample in samples),
            _mean(sample.encoder_ratio for sample in samples),
            _mean(sample.decoder_ratio for sample in samples),
        )
        for pid, samples in new_samples(window).items()
    }


def busy_seconds(window: ProcessWindow, last_until_us: int) -> Mapping[int, float]:
    """Seconds of the whole card that each process kept busy.

    A sample speaks of the time since the one before it.  After an idle stretch that would be the
    whole stretch, so it counts for at most one round, which begins at `last_until_us` (0: the
    first round), and one spacing of the driver's.
    """
    begin_us = last_until_us if 0 < last_until_us < window.until_us else window.since_us
    round_us = max(0, window.until_us - begin_us)
    longest_us = round_us + LONGEST_SPACING_US if begin_us > 0 else 0
    seconds: dict[int, float] = {}
    for pid, samples in new_samples(window).items():
        before_us = window.since_us
        total = 0.0
        for sample in samples:
            covered_us = min(sample.timestamp_us - before_us, longest_us)
            before_us = sample.timestamp_us
            total += (_valid(sample.sm_ratio) or 0.0) * covered_us / MICROSECONDS
        seconds[pid] = total
    return seconds


def card_core_ratio(reading: CardReading) -> float | None:
    """How busy the card was over the time that the process samples speak of, 0 to 1."""
    since_us = reading.process_window.since_us if reading.process_window else 0
    for buffer in reading.samples:
        if buffer.kind == "gpu":
            mean = _mean(one.ratio for one in buffer.samples if one.timestamp_us > since_us)
            if mean is not None:
                return mean
    ratio = _valid(reading.utilization.gpu_ratio)
    if ratio is None and reading.profiling is not None:
        # In MIG mode the driver has no utilisation of the card.
        ratio = _valid(reading.profiling.graphics_engine_ratio)
    return ratio


def _valid(ratio: float | None) -> float | None:
    """A ratio as it is, or None where it cannot be one: dropped, never clamped."""
    return ratio if ratio is not None and 0 <= ratio <= 1 else None


def _mean(ratios: Iterable[float | None]) -> float | None:
    valid = [ratio for given in ratios if (ratio := _valid(given)) is not None]
    return sum(valid) / len(valid) if valid else None
