"""Native families that are about neither card nor share: pods' labels and the node's software."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qgpu_exporter.metrics.family import Family, Scope, itself, present
from qgpu_exporter.model import Pod, Snapshot

NodeFamily = Family[Snapshot, Any]

_CAMEL_CASE = re.compile(r"([a-z0-9])([A-Z])")
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def label_names(labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(metric label name, value) of each pod label, named as kube-state-metrics names them.

    ``label_`` is put in front, other characters become underscores, camelCase becomes snake_case;
    of labels whose names then meet each gets ``_conflict1``, ``_conflict2`` in the labels' order.
    """
    by_name: dict[str, list[str]] = {}
    for key in sorted(labels):
        plain = _CAMEL_CASE.sub(r"\1_\2", _NOT_IN_NAMES.sub("_", key)).lower()
        by_name.setdefault(f"label_{plain}", []).append(key)
    taken = {name for name, keys in by_name.items() if len(keys) == 1}
    for name, keys in by_name.items():
        number = 0
        for key in keys:
            shown = name
            while len(keys) > 1 and (shown == name or shown in taken):
                number += 1
                shown = f"{name}_conflict{number}"
            taken.add(shown)
            yield shown, labels[key]


def _labelled_pods(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Pod]]:
    """Pods that hold or use a card: the labels of all others join with nothing here."""
    if not snapshot.pod_labels_exported or snapshot.pods is None:
        return
    shown = {(one.namespace, one.pod) for one in snapshot.usage.containers}
    if snapshot.allocation is not None:
        shown |= {(one.namespace, one.pod) for one in snapshot.allocation.allocations}
    for pod in snapshot.pods.pods:
        if (pod.namespace, pod.name) in shown and pod.labels:
            yield (snapshot.node, pod.namespace, pod.name, pod.uid), pod


def _pod_labels(pod: Pod) -> Iterator[tuple[str, str]]:
    return label_names(pod.labels)


def _stack(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], str]]:
    for subject, value in dict.fromkeys((fact.subject, fact.value) for fact in snapshot.stack):
        yield (snapshot.node, subject, value), value


def _stack_times(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], float]]:
    """The newest time of each subject: a file of one name may stand in two directories."""
    newest: dict[str, float] = {}
    for fact in snapshot.stack:
        if (time := fact.timestamp_seconds) is not None:
            newest[fact.subject] = max(time, newest.get(fact.subject, time))
    for subject, time in newest.items():
        yield (snapshot.node, subject), time


_POD_LABELS = Scope(
    "pods that hold or use a card",
    ("node", "namespace", "pod", "pod_uid"),
    _labelled_pods,
    _pod_labels,
    ("label_*",),
)
_STACK = Scope("facts of the GPU software", ("node", "subject", "value"), _stack)
_SUBJECTS = Scope("subjects of the GPU software", ("node", "subject"), _stack_times)


NODE_FAMILIES: tuple[NodeFamily, ...] = (
    Family(
        "node_gpu_pod_labels",
        "gauge",
        "Labels of a pod that holds or uses a card, named as kube-state-metrics names them; only "
        "with --kubernetes.pod-labels.",
        _POD_LABELS,
        present,
        "pod metadata",
    ),
    Family(
        "node_gpu_stack_info",
        "info",
        "What the node's GPU software says of itself: one fact a subject.",
        _STACK,
        present,
        "files of the GPU operator, CDI, /sys/module/nvidia",
    ),
    Family(
        "node_gpu_stack_timestamp_seconds",
        "gauge",
        "Unix time at which the file behind the fact was written, in seconds.",
        _SUBJECTS,
        itself,
        "file modification time",
    ),
)
