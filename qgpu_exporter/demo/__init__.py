"""A simulated node: its cards, kubelet and API server are made up, everything else is real."""

from __future__ import annotations

from qgpu_exporter.demo.node import SimulatedNode

__all__ = ["SimulatedNode"]
