"""This node's own object: labels and what the node offers to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from qgpu_exporter.model import Node, SourceHealth
from qgpu_exporter.sources import HealthRecord, SourceError
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.objects import (
    Metadata,
    decode,
    extended_resources,
)
from qgpu_exporter.sources.kubernetes.watch import Reflection, Timing

_Amounts = dict[str, str | int | float | None]


class _Status(msgspec.Struct):
    allocatable: _Amounts | None = None
    capacity: _Amounts | None = None


class _Node(msgspec.Struct):
    metadata: Metadata
    status: _Status | None = None


def decode_node(raw: bytes | Mapping[str, Any]) -> Node:
    """A node from its JSON, or from the value of that JSON.

    Kept are all labels and the extended resources.
    Raises one of `objects.UNREADABLE` for what is no node.
    """
    wire = decode(raw, _Node)
    status = wire.status or _Status()
    labels = wire.metadata.labels or {}
    return Node(
        name=wire.metadata.name,
        labels={key: value for key, value in sorted(labels.items()) if value is not None},
        allocatable=extended_resources(status.allocatable),
        capacity=extended_resources(status.capacity),
    )


class NodeObject:
    """The object of the node of this name; `wall_clock` gives Unix time in seconds."""

    def __init__(
        self,
        connection: Connection,
        node: str,
        *,
        wall_clock: Callable[[], float],
        timing: Timing | None = None,
    ) -> None:
        self._node = node
        self._health = HealthRecord("node", wall_clock)
        self._reflection = Reflection(
            connection,
            "/api/v1/nodes",
            {"fieldSelector": f"metadata.name={node}"},
            decode_node,
            self._health,
            wall_clock=wall_clock,
            timing=timing,
            complete=self._check,
        )
        self.latest: Node | None = None
        """The node; None before the first list, and where the cluster has none of this name."""

    @property
    def health(self) -> SourceHealth:
        """How the source does."""
        return self._health.health

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep `latest` current until cancelled; calls `changed` when it differs."""

        def publish(differs: bool) -> None:
            self.latest = self._reflection.objects.get(f"/{self._node}")
            if differs:
                changed()

        await self._reflection.run(publish)

    def _check(self) -> SourceError | None:
        if self.latest is not None:
            return None
        return SourceError(
            "not_found", f"the cluster has no node {self._node}: is --node-name its node name?"
        )
