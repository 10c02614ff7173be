"""Whose pod counts: from pods and the kubelet's list to the pods that hold something now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from qgpu_exporter.allocation.inputs import AllocationInputs
from qgpu_exporter.allocation.quantity import amount
from qgpu_exporter.allocation.scheme import PodView
from qgpu_exporter.model import (
    ClaimDevice,
    Container,
    KubeletContainer,
    KubeletList,
    Pod,
    PodList,
)

Rows = Mapping[tuple[str, str], Sequence[KubeletContainer]]
"""The kubelet's containers by (namespace, pod)."""


def live_pods(inputs: AllocationInputs) -> tuple[list[PodView], bool]:
    """The pods that hold something now, and whether these are all of them.

    With the API source on, only what the API lists counts; before its first list that is nothing,
    and when that list is overdue, what the kubelet lists.  Without the API source, the kubelet
    alone speaks.
    """
    rows = _by_pod(inputs.kubelet)
    kubelet_known = inputs.kubelet is not None or not inputs.kubelet_expected
    if inputs.pods is not None:
        asked_at = inputs.kubelet.asked_at_seconds if inputs.kubelet is not None else 0.0
        views = [
            _listed_by_api(pod, rows.get((pod.namespace, pod.name), ()), asked_at)
            for pod in _living(inputs.pods)
        ]
        return views, kubelet_known
    if not inputs.pods_expected or inputs.pods_overdue:
        views = [_listed_by_kubelet(name, rows[name]) for name in sorted(rows)]
        return views, inputs.kubelet is not None and not inputs.pods_expected
    return [], False


def _living(pods: PodList) -> Iterator[Pod]:
    """The live pods by name; of two of one name, the one that came later."""
    by_name: dict[tuple[str, str], Pod] = {}
    for pod in sorted(pods.pods, key=lambda one: (one.first_seen_at_seconds, one.uid)):
        if is_alive(pod):
            by_name[pod.namespace, pod.name] = pod
    return (by_name[name] for name in sorted(by_name))


def is_alive(pod: Pod) -> bool:
    """Whether a listed pod still holds its devices.

    A finished pod does not, however long its object stays.  A terminating one does until its
    processes have ended, since the devices are busy for so long.
    """
    if pod.phase in ("Succeeded", "Failed"):
        return False
    if not pod.terminating:
        return True
    lasting = [c for c in pod.containers if c.kind in ("app", "sidecar")]
    return not lasting or not all(c.state == "terminated" for c in pod.containers if _ran(c))


def _ran(container: Container) -> bool:
    """Whether a container's end matters: an init container that never started has none."""
    if container.kind == "ephemeral":
        return False
    return container.kind != "init" or container.state == "running"


def holds_now(container: Container) -> bool:
    """Whether a container of a live pod holds what it was given.

    App containers and sidecars do over all restarts; a plain init container does while it runs;
    an ephemeral container is never given a device.
    """
    if container.kind == "init":
        return container.state == "running"
    return container.kind != "ephemeral"


def _by_pod(kubelet: KubeletList | None) -> Rows:
    rows: dict[tuple[str, str], list[KubeletContainer]] = defaultdict(list)
    for row in kubelet.containers if kubelet is not None else ():
        rows[row.namespace, row.pod].append(row)
    return rows


def _listed_by_kubelet(name: tuple[str, str], rows: Sequence[KubeletContainer]) -> PodView:
    namespace, pod = name
    containers = tuple(Container(name) for name in sorted({row.container for row in rows}))
    return PodView(
        namespace,
        pod,
        containers,
        frozenset(container.name for container in containers),
        devices=_devices(rows),
        claims=_claims(rows),
    )


def _listed_by_api(pod: Pod, rows: Sequence[KubeletContainer], asked_at: float) -> PodView:
    # The kubelet's rows carry no UID: an answer that was asked for before this UID was first seen
    # may speak of an earlier pod of the same name.
    fresh = rows if asked_at > pod.first_seen_at_seconds else ()
    devices = _devices(fresh)
    claims = _claims(fresh)
    for container in pod.containers:
        if container.kind == "init" and container.state == "running":
            devices[container.name] = _init_devices(pod, container, devices)
            claims[container.name] = _init_claims(container, claims)
    return PodView(
        pod.namespace,
        pod.name,
        pod.containers,
        frozenset(one.name for one in pod.containers if holds_now(one)),
        pod,
        devices,
        claims,
    )


def _devices(rows: Sequence[KubeletContainer]) -> dict[str, Mapping[str, tuple[str, ...]]]:
    devices: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for row in rows:
        held = devices.get(row.container, {})
        # A sharing plugin may list a hundred thousand ids: only what is there twice is merged.
        devices[row.container] = {
            name: tuple(sorted({*held[name], *ids})) if name in held else ids
            for name, ids in {**held, **row.devices}.items()
        }
    return devices


def _claims(rows: Sequence[KubeletContainer]) -> dict[str, tuple[ClaimDevice, ...]]:
    claims: dict[str, set[ClaimDevice]] = defaultdict(set)
    for row in rows:
        claims[row.container].update(row.claims)
    return {container: tuple(sorted(held)) for container, held in claims.items()}


def _init_devices(
    pod: Pod, init: Container, devices: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> dict[str, tuple[str, ...]]:
    """The devices of a running init container, by resource, as far as they are certain.

    The kubelet never lists a plain init container: it hands its devices on to the containers that
    follow, which take them before any others, and lists them there from the start.
    """
    return {
        resource: ids
        for resource in sorted(init.resources)
        if (ids := _handed_on(pod, init, resource, devices))
    }


def _count(container: Container, resource: str) -> int:
    try:
        return amount(container.resources, resource)
    except ValueError:
        return 0


def _handed_on(
    pod: Pod, init: Container, resource: str, devices: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> tuple[str, ...]:
    held = _count(init, resource)
    inits = [one for one in pod.containers if one.kind == "init"]
    if held < max(_count(one, resource) for one in inits):
        # It holds a part of the pool that another init container has filled: which, nobody says.
        return ()
    certain: list[str] = []
    position = pod.containers.index(init)
    for successor in pod.containers[position + 1 :]:
        if successor.kind not in ("app", "sidecar"):
            continue
        ids = devices.get(successor.name, {}).get(resource, ())
        if len(ids) > held:
            break
        certain += ids
        held -= len(ids)
    return tuple(sorted(certain))


def _init_claims(
    init: Container, claims: Mapping[str, tuple[ClaimDevice, ...]]
) -> tuple[ClaimDevice, ...]:
    """The devices of a running init container's claims, as other containers are listed with them.

    A claim is the pod's, and reserved for all of its life: who may use it, has all of it.
    """
    listed = {claim for held in claims.values() for claim in held}
    return tuple(sorted(claim for claim in listed if claim.claim_name in init.claims))
