"""Prometheus exporter for NVIDIA GPUs that are shared by pods; holds only the version."""

__version__ = "0.1.0"
