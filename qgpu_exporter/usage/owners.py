"""Joins the names in a process's cgroup with the pods of this node: whose process it is."""

from __future__ import annotations

from dataclasses import dataclass

from qgpu_exporter.allocation.lifecycle import is_alive
from qgpu_exporter.cgroups import SHORT_ID
from qgpu_exporter.model import CgroupNames, Pod, PodList


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A container of a living pod."""

    namespace: str
    pod: str
    container: str
    pod_uid: str

    @property
    def key(self) -> tuple[str, str, str]:
        """(namespace, pod, container): what labels a series."""
        return self.namespace, self.pod, self.container


class Owners:
    """The living pods of a node by what cgroups call them; `pods` None: no pod is known."""

    def __init__(self, pods: PodList | None) -> None:
        self.known = pods is not None
        self.pod_uids: set[str] = set()
        """UIDs of the living pods."""
        self._by_name: dict[tuple[str, str], Pod] = {}
        self._by_uid: dict[str, Pod] = {}
        self._by_container: dict[str, Owner] = {}
        living = [pod for pod in pods.pods if is_alive(pod)] if pods is not None else []
        # Two pods of one name cannot be alive in one API server; of two in a list the newer is.
        for pod in sorted(living, key=lambda pod: (pod.first_seen_at_seconds, pod.uid)):
            self._by_name[pod.namespace, pod.name] = pod
        for pod in self._by_name.values():
            self._add(pod)

    def _add(self, pod: Pod) -> None:
        self.pod_uids.add(pod.uid)
        self._by_uid[pod.uid] = pod
        if pod.config_hash:
            self._by_uid[pod.config_hash] = pod
        for container in pod.containers:
            if container.container_id:
                owner = Owner(pod.namespace, pod.name, container.name, pod.uid)
                self._by_container[container.container_id] = owner

    def pod_uid(self, namespace: str, pod: str) -> str | None:
        """UID of the living pod of that name."""
        found = self._by_name.get((namespace, pod))
        return found.uid if found else None

    def find(self, names: CgroupNames) -> Owner | Pod | None:
        """The container that a process belongs to, or only its pod, or None.

        The outermost known pod decides: what a container creates below its own cgroup, by
        nesting or on purpose, cannot make its processes another pod's.
        """
        for uid in names.pod_uids:
            pod = self._by_uid.get(uid)
            if pod is not None:
                ids = [container_id for below, container_id in names.containers if below == uid]
                return self._container_of(pod, ids) or pod
        for _, container_id in names.containers:
            owner = self._by_container.get(container_id)
            if owner is not None:
                return owner
        return None

    def _container_of(self, pod: Pod, container_ids: list[str]) -> Owner | None:
        for container_id in container_ids:
            owner = self._by_container.get(container_id)
            if owner is not None and owner.pod_uid == pod.uid:
                return owner
        # A container runs for seconds before the API tells its id.  With one container that can
        # be it, it is that one; with several, guessing would mix them.
        candidates = [
            container
            for container in pod.containers
            if not (container.kind in {"init", "ephemeral"} and container.state == "terminated")
        ]
        if len(candidates) != 1:
            return None
        return Owner(pod.namespace, pod.name, candidates[0].name, pod.uid)


def outside_owner(names: CgroupNames | None) -> tuple[str, str]:
    """(kind, name) under which a process of no known container is shown."""
    if names is None:
        return "unknown", ""
    if names.pod_uids:
        return "kubernetes", names.pod_uids[0]
    if names.owner_kind is not None:
        return names.owner_kind, names.owner or ""
    if names.containers:
        return "kubernetes", names.containers[0][1][:SHORT_ID]
    return "unknown", ""
