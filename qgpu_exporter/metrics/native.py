"""The native dialect: every family under its own name, in the order of the page."""

from __future__ import annotations

from typing import Any

from qgpu_exporter.metrics.family import Family
from qgpu_exporter.metrics.native_allocation import ALLOCATION
from qgpu_exporter.metrics.native_card import CARD
from qgpu_exporter.metrics.native_mig import MIG, PROFILING
from qgpu_exporter.metrics.native_node import NODE_FAMILIES
from qgpu_exporter.metrics.native_usage import USAGE
from qgpu_exporter.model import Snapshot

NATIVE: tuple[Family[Snapshot, Any], ...] = (
    *ALLOCATION,
    *USAGE,
    *CARD,
    *PROFILING,
    *MIG,
    *NODE_FAMILIES,
)
