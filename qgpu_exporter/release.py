"""When the driver must be let go, as the node's labels say; pure."""

from __future__ import annotations

from collections.abc import Iterable

from qgpu_exporter.model import Node

MIG_STATE_LABEL = "nvidia.com/mig.config.state"
MIG_STATES_RELEASING = ("pending", "rebooting")
UPGRADE_LABEL = "nvidia.com/gpu-driver-upgrade-state"
UPGRADE_STATES_RELEASING = (
    "pod-deletion-required",
    "drain-required",
    "node-maintenance-required",
    "post-maintenance-required",
    "pod-restart-required",
)
"""The states of the GPU Operator's upgrade in which the old driver is, or is about to be, unloaded;
before them jobs still run, after them the new driver is there."""


def release_reason(node: Node, release_labels: Iterable[str]) -> str | None:
    """Why the driver must be let go now, as the node's labels say; None: it need not be."""
    state = node.labels.get(MIG_STATE_LABEL, "")
    if state in MIG_STATES_RELEASING:
        return f"node label {MIG_STATE_LABEL} is {state}"
    for label in release_labels:
        value = node.labels.get(label, "")
        if value.startswith("paused-"):
            return f"node label {label} is {value}"
    state = node.labels.get(UPGRADE_LABEL, "")
    if state in UPGRADE_STATES_RELEASING:
        return f"node label {UPGRADE_LABEL} is {state}"
    return None
