"""The state of the simulated node: pods come, run and go in its API, kubelet, cards and /proc.

The order of what is seen where, and the pauses between, are those of a real kubelet 1.36.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from qgpu_exporter.demo.apiserver import ApiServer
from qgpu_exporter.demo.cards import FakeCards
from qgpu_exporter.demo.kubelet import FakeKubelet, ListedContainer
from qgpu_exporter.demo.objects import (
    ContainerRun,
    PodRun,
    gpu_objects,
    node_object,
    pod_object,
    resource_slice,
)
from qgpu_exporter.demo.procfs import FakeProcfs, container_cgroup
from qgpu_exporter.demo.workloads import HOST_PROCESSES, Workload, always_there, inventory

LISTED_AFTER_SECONDS = 0.2
"""From the API's word of a pod to the kubelet's list of its devices."""
INIT_SECONDS = 3.0
RUNNING_AFTER_SECONDS = 1.0
"""From the kubelet's list to Running: the sandbox, the image."""
ENDED_AFTER_SECONDS = 0.3
"""From the end of a deleted pod's containers to the API's word of it."""
DELETED_AFTER_SECONDS = 0.2

_FIRST_PID = 4000


class NoSuchPod(Exception):
    """There is no pod of this name, or no more."""


class Refused(Exception):
    """The node cannot take this pod; the text says why."""


class World:
    """The node's four faces, and the pods behind them; files go to `directory`.

    `sleep` lets time pass between the steps of a pod.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 1,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        socket = directory / "pod-resources" / "kubelet.sock"
        socket.parent.mkdir()
        self.kubelet = FakeKubelet(str(socket), seed=seed)
        self.api = ApiServer()
        self.cards = FakeCards(directory / "simulation.json")
        self.processes = FakeProcfs(directory / "proc")
        self.sleep = sleep
        self._random = random.Random(seed)
        self._pods: dict[str, PodRun] = {}
        self._last_pid = _FIRST_PID

    def populate(self) -> None:
        """The node, its devices, and the pods that are always there, already running."""
        for resource, devices in inventory().items():
            self.kubelet.register(resource, devices)
        self.api.put("nodes", node_object())
        self.api.put("resourceslices", resource_slice())
        for gpu in gpu_objects():
            self.api.put("gpus", gpu)
        for comm, cgroup, work in HOST_PROCESSES:
            pid = self._new_pid()
            self.processes.add(pid, comm, cgroup)
            self.cards.start_process(pid, work)
        for workload in always_there():
            pod = self._bind(workload)
            self._admit(pod)
            self._end_init(pod)
            self._run(pod)

    # ------------------------------------------------------------------ pods

    def exists(self, key: str) -> bool:
        """Whether the API shows a pod as `namespace/name`."""
        return key in self._pods

    def workload(self, key: str) -> Workload:
        """What a pod wants; raises `NoSuchPod`."""
        return self._find(key).workload

    async def create(self, workload: Workload) -> None:
        """Let a pod come up; raises `Refused` where the node has no room for it."""
        pod = self._bind(workload)
        await self._pass(pod, LISTED_AFTER_SECONDS)
        self._admit(pod)
        if self._begin_init(pod):
            await self._pass(pod, INIT_SECONDS)
            self._end_init(pod)
        await self._pass(pod, RUNNING_AFTER_SECONDS)
        self._run(pod)

    def finish(self, key: str, exit_code: int = 0) -> None:
        """All containers of a pod end by themselves; the pod stays in the API."""
        pod = self._find(key)
        self._end_all(pod, exit_code)
        self.kubelet.finish(pod.workload.namespace, pod.workload.name)
        self._show(pod)

    async def delete(self, key: str, grace_seconds: float = 1.0) -> None:
        """Delete a pod; where it runs it takes `grace_seconds` to end."""
        pod = self._find(key)
        if pod.terminating:
            raise Refused(f"pod {key} is being deleted already")
        pod.terminating = True
        work = pod.workload
        if pod.phase in ("Pending", "Running"):
            self._show(pod)
            await self.sleep(grace_seconds)
            self._end_all(pod, 143)
            self.kubelet.forget(work.namespace, work.name)
            await self.sleep(ENDED_AFTER_SECONDS)
            self._show(pod)
            await self.sleep(DELETED_AFTER_SECONDS)
        self.kubelet.forget(work.namespace, work.name)
        del self._pods[key]
        self.api.delete("pods", key)

    async def crash(self, key: str, back_off_seconds: float) -> None:
        """The containers of a pod die, wait, and are started again under other ids."""
        pod = self._find(key)
        runs = [run for run in pod.containers if run.spec.kind == "app"]
        for run in runs:
            self._end(run, 1)
        self._show(pod)
        await self._pass(pod, ENDED_AFTER_SECONDS)
        for run in runs:
            run.state, run.reason = "waiting", "CrashLoopBackOff"
        self._show(pod)
        await self._pass(pod, back_off_seconds)
        for run in runs:
            run.restarts += 1
        self._run(pod)

    # ------------------------------------------------------------------ steps of a pod's life

    async def _pass(self, pod: PodRun, seconds: float) -> None:
        """Let time pass; raises `NoSuchPod` where the pod is deleted meanwhile."""
        await self.sleep(seconds)
        if self._pods.get(pod.key) is not pod or pod.terminating:
            raise NoSuchPod(f"pod {pod.key} was deleted meanwhile")

    def _bind(self, workload: Workload) -> PodRun:
        """The API shows the pod on this node, pending; its devices are chosen."""
        key = f"{workload.namespace}/{workload.name}"
        if key in self._pods:
            raise Refused(f"there is a pod {key} already")
        devices = self._choose(workload)
        runs = [ContainerRun(container) for container in workload.containers]
        pod = PodRun(workload, self._new_uuid(), runs, devices)
        self._pods[key] = pod
        self._show(pod)
        return pod

    def _admit(self, pod: PodRun) -> None:
        """The kubelet lists the pod's devices before anything of it runs.

        A plain init container is not listed: its device is the main container's later.
        """
        listed = [
            ListedContainer(run.spec.name, pod.devices.get(run.spec.name, {}), run.spec.claims)
            for run in pod.containers
            if run.spec.kind != "init"
        ]
        self.kubelet.admit(pod.workload.namespace, pod.workload.name, listed)

    def _begin_init(self, pod: PodRun) -> bool:
        """Start init containers and sidecars; says whether there are plain init containers."""
        early = [run for run in pod.containers if run.spec.kind in ("init", "sidecar")]
        for run in early:
            self._begin(pod, run)
        if early:
            self._show(pod)
        return any(run.spec.kind == "init" for run in early)

    def _end_init(self, pod: PodRun) -> None:
        for run in pod.containers:
            if run.spec.kind == "init":
                self._end(run, 0)
        self._show(pod)

    def _run(self, pod: PodRun) -> None:
        """Start what does not run yet."""
        for run in pod.containers:
            if run.state == "waiting":
                self._begin(pod, run)
        pod.phase = "Running"
        self._show(pod)

    def _begin(self, pod: PodRun, run: ContainerRun) -> None:
        run.state = "running"
        run.container_id = f"{self._random.getrandbits(256):064x}"
        if run.spec.work:
            pid = self._new_pid()
            self.processes.add(pid, run.spec.name, container_cgroup(pod.uid, run.container_id))
            for work in run.spec.work:
                self.cards.start_process(pid, work)
            run.pids.append(pid)

    def _end(self, run: ContainerRun, exit_code: int) -> None:
        self.cards.end_processes(set(run.pids))
        for pid in run.pids:
            self.processes.remove(pid)
        run.pids.clear()
        run.state, run.exit_code = "terminated", exit_code

    def _end_all(self, pod: PodRun, exit_code: int) -> None:
        for run in pod.containers:
            if run.state != "terminated":
                self._end(run, exit_code)
        pod.phase = "Failed" if exit_code else "Succeeded"

    def _show(self, pod: PodRun) -> None:
        self.api.put("pods", pod_object(pod))

    # ------------------------------------------------------------------ devices and names

    def _choose(self, workload: Workload) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Container -> resource -> device ids; raises `Refused` where they are taken."""
        taken = self._taken()
        chosen: dict[str, dict[str, tuple[str, ...]]] = {}
        for container in workload.containers:
            given = dict(container.devices)
            for resource, ids in given.items():
                if busy := sorted(taken.get(resource, set()).intersection(ids)):
                    raise Refused(f"{resource} {', '.join(busy)} is taken")
            for resource, count in container.units.items():
                held = taken.setdefault(resource, set())
                free = [device for device in inventory()[resource] if device not in held]
                if len(free) < count:
                    raise Refused(f"{resource}: {count} asked for, {len(free)} free")
                given[resource] = tuple(self._random.sample(free, count))
                held.update(given[resource])
            chosen[container.name] = given
        return chosen

    def _taken(self) -> dict[str, set[str]]:
        """Resource -> device ids that pods hold which have not ended."""
        taken: dict[str, set[str]] = {}
        for pod in self._pods.values():
            if pod.phase in ("Pending", "Running"):
                for devices in pod.devices.values():
                    for resource, ids in devices.items():
                        taken.setdefault(resource, set()).update(ids)
        return taken

    def _find(self, key: str) -> PodRun:
        pod = self._pods.get(key)
        if pod is None:
            raise NoSuchPod(f"there is no pod {key}")
        return pod

    def _new_pid(self) -> int:
        self._last_pid += self._random.randrange(1, 40)
        return self._last_pid

    def _new_uuid(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))
