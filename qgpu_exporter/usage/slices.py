"""What a MIG slice's own readings say about its one holder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from qgpu_exporter.model import Allocation, CardReading, MigSlice

Key = tuple[str, str, str]
"""(namespace, pod, container)."""

_GPU_INSTANCE_PROFILE = re.compile(r"(?:^|\.)(\d+)g\.")


@dataclass(frozen=True, slots=True)
class SliceUse:
    """The use of one GPU instance, as its one holder's."""

    gpu_instance: int
    core_ratio: float | None = None
    """Of the whole card, 0 to 1; None where the card offers no profiling of instances."""
    window_seconds: float = 0.0
    memory_bytes: int | None = None


def is_mig(reading: CardReading) -> bool:
    """Whether a card is cut into slices: then process utilisation is not offered."""
    return bool(reading.mig_slices) or reading.mig_enabled is True


def slice_uses(
    reading: CardReading,
    allocations: Iterable[Allocation],
    users: Mapping[int, AbstractSet[Key | None]],
) -> Mapping[Key, tuple[SliceUse | None, ...]]:
    """What each holder uses of the GPU instances that it holds something of.

    `allocations` are of this card; `users` says by GPU instance who has a process there (None: a
    process of no known container).  An entry is None where an instance's readings are not the
    holder's alone: it is shared, cut among several containers, or used by somebody else.
    """
    rows: dict[int, list[Allocation]] = defaultdict(list)
    for row in allocations:
        instance = (row.mig or "").partition("/")[0]
        if instance.isdecimal():
            rows[int(instance)].append(row)
    uses: dict[Key, list[SliceUse | None]] = defaultdict(list)
    for gpu_instance, held in sorted(rows.items()):
        holders = {(row.namespace, row.pod, row.container) for row in held}
        alone = (
            len(holders) == 1
            and all(row.exclusive for row in held)
            and users.get(gpu_instance, frozenset()) <= holders
        )
        for holder in holders:
            uses[holder].append(_instance_use(reading, gpu_instance) if alone else None)
    return {holder: tuple(found) for holder, found in uses.items()}


def _instance_use(reading: CardReading, gpu_instance: int) -> SliceUse:
    pieces = [one for one in reading.mig_slices if one.gpu_instance == gpu_instance]
    memory = next((one.memory for one in pieces if one.memory is not None), None)
    profiling = next((one.profiling for one in pieces if one.profiling is not None), None)
    share = _share(pieces, reading.mig_compute_slices)
    use = SliceUse(gpu_instance, memory_bytes=memory.used_bytes if memory else None)
    if profiling is None or share is None:
        return use
    # The engine's busy time is what process utilisation says on a card without MIG.
    busy = profiling.graphics_engine_ratio
    if busy is None:
        busy = profiling.sm_active_ratio
    if busy is None or not 0 <= busy <= 1:
        return use
    return SliceUse(gpu_instance, busy * share, profiling.window_seconds, use.memory_bytes)


def _share(pieces: list[MigSlice], card_slices: int | None) -> float | None:
    """The GPU instance's part of the card's compute slices."""
    for piece in pieces:
        # The profile names the instance's slices also where a compute instance has fewer.
        profile = _GPU_INSTANCE_PROFILE.search(piece.profile or "")
        slices = int(profile[1]) if profile else None
        if slices is None and len(pieces) == 1:
            slices = piece.compute_slices
        if slices and card_slices:
            return min(1.0, slices / card_slices)
    return None
