"""Folds each reading into the seconds of a whole card that every container has used; pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from qgpu_exporter.model import (
    Allocation,
    CardReading,
    CardTotals,
    CgroupNames,
    PodList,
    Reading,
    Snapshot,
    Totals,
)
from qgpu_exporter.usage.owners import Owner, Owners
from qgpu_exporter.usage.samples import busy_seconds
from qgpu_exporter.usage.slices import Key, is_mig, slice_uses

Seconds = dict[tuple[int, str, str, str, str], float]
"""By (gpu, namespace, pod, container, pod UID)."""


def fold_core_seconds(
    totals: Totals,
    reading: Reading,
    names: Mapping[int, CgroupNames] | None,
    pods: PodList | None,
    snapshot: Snapshot | None = None,
) -> Totals:
    """The totals with the core seconds of one more reading; call it once a reading.

    `snapshot` is the last one: its allocations say who holds a MIG slice.  Pods that are no
    longer alive are dropped, so the table is never larger than living containers times cards;
    while the pods are not known it neither grows nor shrinks.
    """
    owners = Owners(pods)
    seconds: Seconds = defaultdict(float)
    for key, total in totals.container_core_seconds.items():
        if not owners.known or key[-1] in owners.pod_uids:
            seconds[key] = total
    allocations = snapshot.allocation.allocations if snapshot and snapshot.allocation else ()
    cards = dict(totals.cards)
    for card in reading.cards:
        kept = cards.get(card.identity.uuid) or CardTotals()
        if is_mig(card):
            rows = [row for row in allocations if row.gpu == card.identity.index]
            _add_slices(seconds, card, rows, names, owners)
        elif card.process_window is not None:
            until_us = card.process_window.until_us
            if names is not None:
                busy = busy_seconds(card.process_window, kept.process_window_until_us)
                _add_processes(seconds, card.identity.index, busy, names, owners)
            cards[card.identity.uuid] = replace(kept, process_window_until_us=until_us)
    return replace(totals, cards=cards, container_core_seconds=dict(seconds))


def _add_processes(
    seconds: Seconds,
    gpu: int,
    busy_by_pid: Mapping[int, float],
    names: Mapping[int, CgroupNames],
    owners: Owners,
) -> None:
    for pid, busy in busy_by_pid.items():
        found = owners.find(names[pid]) if pid in names else None
        if isinstance(found, Owner):
            seconds[(gpu, *found.key, found.pod_uid)] += busy


def _add_slices(
    seconds: Seconds,
    card: CardReading,
    rows: Iterable[Allocation],
    names: Mapping[int, CgroupNames] | None,
    owners: Owners,
) -> None:
    users: dict[int, set[Key | None]] = defaultdict(set)
    for process in card.processes or ():
        if names is not None and process.gpu_instance is not None:
            found = owners.find(names[process.pid]) if process.pid in names else None
            user = found.key if isinstance(found, Owner) else None
            users[process.gpu_instance].add(user)
    for (namespace, pod, container), uses in slice_uses(card, rows, users).items():
        uid = owners.pod_uid(namespace, pod)
        for use in uses:
            if uid is not None and use is not None and use.core_ratio is not None:
                key = card.identity.index, namespace, pod, container, uid
                seconds[key] += use.core_ratio * use.window_seconds
