"""The kubelet's pod-resources API: the only part of the service that speaks gRPC."""

from __future__ import annotations

import os

# gRPC's core writes lines of a form of its own to standard error, one each time the kubelet ends;
# what matters of them comes as an error.  It reads this once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from qgpu_exporter.sources.podresources.client import (
    PodResources,
    present,
)
from qgpu_exporter.sources.podresources.decode import (
    decode,
    decode_bytes,
    decode_json,
)

__all__ = ["PodResources", "decode", "decode_bytes", "decode_json", "present"]
