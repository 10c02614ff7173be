"""What each container uses of each card, and what no container accounts for; pure."""

from __future__ import annotations

from qgpu_exporter.usage.attribution import UsageInputs, attribute
from qgpu_exporter.usage.core_seconds import fold_core_seconds

__all__ = ["UsageInputs", "attribute", "fold_core_seconds"]
