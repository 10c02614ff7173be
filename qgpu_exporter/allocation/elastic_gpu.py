"""elastic-gpu and its forerunner nano-gpu: the open kin of qGPU, with memory in MiB."""

from __future__ import annotations

from collections.abc import Iterable

from qgpu_exporter.allocation.indexed import IndexedShares, Names
from qgpu_exporter.allocation.memory_unit import MIB
from qgpu_exporter.allocation.scheme import Finding, PodView, Scheme, Surroundings

_ELASTIC = Names(
    core=("elasticgpu.io/gpu-core", "elasticgpu.com/gpu-core"),
    memory=("elasticgpu.io/gpu-memory", "elasticgpu.com/gpu-memory"),
)
_NANO = Names(core=("nano-gpu/gpu-percent",))


def find_elastic(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card."""
    return IndexedShares(view, node, _ELASTIC, lambda: MIB).find()


def find_nano(view: PodView, node: Surroundings) -> Iterable[Finding]:
    """One row a container and card; nano-gpu shares percent of a card and no memory."""
    return IndexedShares(view, node, _NANO, lambda: None).find()


ELASTIC_GPU = Scheme(
    "elastic_gpu", find_elastic, proof="annotation", resources=_ELASTIC.core + _ELASTIC.memory
)
NANO_GPU = Scheme("nano_gpu", find_nano, proof="annotation", resources=_NANO.core)
