"""The qGPU GPU objects of this node: the scheduler's own table of index, minor number and UUID."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from qgpu_exporter.model import GpuObject, SourceHealth
from qgpu_exporter.sources import HealthRecord
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.objects import decode
from qgpu_exporter.sources.kubernetes.watch import Reflection, Timing

_MINOR = re.compile(r"/dev/nvidia([0-9]+)")


class _Spec(msgspec.Struct):
    index: int
    uuid: str
    path: str | None = None
    node_name: str | None = msgspec.field(default=None, name="nodeName")


class _Gpu(msgspec.Struct):
    spec: _Spec


def decode_gpu(raw: bytes | Mapping[str, Any], node: str) -> GpuObject | None:
    """A `gpus.elasticgpu.io` object from its JSON, or from the value of that JSON.

    None where it is another node's.  Raises one of `objects.UNREADABLE` for what is no such object.
    """
    spec = decode(raw, _Gpu).spec
    if spec.node_name not in (None, "", node):
        return None
    minor = _MINOR.fullmatch(spec.path or "")
    return GpuObject(
        index=spec.index,
        uuid=spec.uuid,
        minor=int(minor[1]) if minor else None,
    )


class GpuObjects:
    """The GPU objects of one node; `wall_clock` gives Unix time in seconds."""

    def __init__(
        self,
        connection: Connection,
        node: str,
        *,
        wall_clock: Callable[[], float],
        timing: Timing | None = None,
    ) -> None:
        self._health = HealthRecord("elasticgpu", wall_clock)
        self._reflection = Reflection(
            connection,
            "/apis/elasticgpu.io/v1alpha1/gpus",
            {"labelSelector": f"elasticgpu.io/node={node}"},
            lambda raw: decode_gpu(raw, node),
            self._health,
            wall_clock=wall_clock,
            timing=timing,
        )
        self.latest: tuple[GpuObject, ...] | None = None
        """The objects by index; None before the first list."""

    @property
    def health(self) -> SourceHealth:
        """How the source does."""
        return self._health.health

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep `latest` current until cancelled; calls `changed` when it differs."""

        def publish(differs: bool) -> None:
            found = self._reflection.objects.values()
            self.latest = tuple(sorted(found, key=lambda one: (one.index, one.uuid)))
            if differs:
                changed()

        await self._reflection.run(publish)
