"""The shape of a scheme: what it is given (a pod, the node), and what it may find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from qgpu_exporter.allocation.cards import Cards, Device
from qgpu_exporter.allocation.claims import ClaimUse
from qgpu_exporter.allocation.inputs import MemoryUnit
from qgpu_exporter.model import (
    ClaimDevice,
    Container,
    Node,
    Pod,
    Problem,
    SliceDevice,
)

NO_ANNOTATIONS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class PodView:
    """A live pod as a scheme sees it: only the resources that are this scheme's to explain."""

    namespace: str
    name: str
    containers: tuple[Container, ...]
    """All of the pod in spec order (init containers first), so that positions count."""
    holding: frozenset[str]
    """Names of the containers that can hold something now."""
    pod: Pod | None = None
    """None where only the kubelet speaks of the pod."""
    devices: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """The kubelet's ids: container -> resource -> ids."""
    claims: Mapping[str, tuple[ClaimDevice, ...]] = field(default_factory=dict)
    """The kubelet's claims, by container."""

    @property
    def annotations(self) -> Mapping[str, str]:
        """The pod's annotations; none where only the kubelet speaks of it."""
        return self.pod.annotations if self.pod is not None else NO_ANNOTATIONS

    @property
    def resources(self) -> frozenset[str]:
        """The names of all resources that the pod asks for or is listed with."""
        asked = {name for one in self.containers for name in one.resources}
        return frozenset(asked.union(*self.devices.values()))

    def holders(self) -> Iterator[Container]:
        """The containers that can hold something now, in spec order."""
        return (one for one in self.containers if one.name in self.holding)

    def askers(self) -> tuple[Container, ...]:
        """The holders that ask for any of this view's resources."""
        return tuple(one for one in self.holders() if one.resources)

    def problem(
        self, kind: str, container: str = "", detail: str = "", gpu: int | None = None
    ) -> Problem:
        """A problem of this pod."""
        return Problem(kind, self.namespace, self.name, container, gpu, detail)

    def divide(self, mine: frozenset[str]) -> tuple[PodView, PodView]:
        """The view with the resources `mine` alone, and the view with all others."""

        def keep(wanted: bool) -> PodView:
            return replace(
                self,
                containers=tuple(
                    replace(
                        one,
                        resources={n: v for n, v in one.resources.items() if (n in mine) is wanted},
                    )
                    for one in self.containers
                ),
                devices={
                    container: {n: ids for n, ids in held.items() if (n in mine) is wanted}
                    for container, held in self.devices.items()
                },
            )

        return keep(True), keep(False)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a scheme may know of the node beside the pod."""

    cards: Cards
    node: Node | None = None
    node_name: str | None = None
    slices: Mapping[tuple[str, str, str], SliceDevice] | None = None
    """By (driver, pool, device)."""
    claim_use: ClaimUse = field(default_factory=ClaimUse)
    gpushare_memory_unit: MemoryUnit = "auto"
    volcano_memory_factor: int = 1


@dataclass(frozen=True, slots=True)
class Hold:
    """One container holds this much of one device; None = the scheme guarantees no such share."""

    container: str
    device: Device
    resource: str
    core_percent: float | None = None
    memory_bytes: int | None = None
    greedy_core_percent: float | None = None
    exclusive: bool = False
    claim: ClaimDevice | None = None


@dataclass(frozen=True, slots=True)
class Unassigned:
    """A container asks for a share, and no card is written down for it yet."""

    container: str


Finding = Hold | Problem | Unassigned


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way of handing out GPUs.

    `find` is pure and is given one pod.  A scheme whose `proof` is an annotation is given the
    resources that it owns, and nobody else is; on a pod that carries one of `annotations`, or asks
    for one of `resources`, it owns the `borrowed` ones too.  A scheme whose proof is the kubelet is
    given what no annotation explains.  A name that ends in ``*`` is a prefix.
    """

    name: str
    find: Callable[[PodView, Surroundings], Iterable[Finding]]
    proof: Literal["annotation", "kubelet"]
    resources: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()

    def owned(self, view: PodView, resources: Iterable[str]) -> frozenset[str]:
        """Which of the pod's `resources` this scheme explains."""
        mine = frozenset(name for name in resources if matches(name, self.resources))
        if self.borrowed and (mine or any(matches(k, self.annotations) for k in view.annotations)):
            mine |= {name for name in resources if matches(name, self.borrowed)}
        return mine


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of the patterns, of which those ending in ``*`` are prefixes."""
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )
