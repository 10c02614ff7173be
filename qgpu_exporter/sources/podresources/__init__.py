"""The kubelet's pod-resources API: the only part of the service that speaks gRPC."""

from __future__ import annotations

from qgpu_exporter.sources.podresources.client import PodResources, present
from qgpu_exporter.sources.podresources.decode import decode, decode_bytes, decode_json

__all__ = ["PodResources", "decode", "decode_bytes", "decode_json", "present"]
