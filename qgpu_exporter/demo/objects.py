"""The simulated node's objects as an API server writes them: its pods, itself and its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qgpu_exporter.demo.apistore import Object
from qgpu_exporter.demo.workloads import (
    CLAIM_CARD,
    DRA_DRIVER,
    GPU,
    NODE,
    QGPU_CARDS,
    REPLICAS,
    WorkContainer,
    Workload,
    inventory,
)
from qgpu_exporter.model import ContainerState
from qgpu_exporter.reader.simulated import card_uuid, memory_total_bytes

_TIME = "2026-01-01T00:00:00Z"
"""Of all that happens: nothing here depends on it, and the same run gives the same bytes."""


@dataclass(slots=True)
class ContainerRun:
    """How one container does; `pids` are its processes on the host."""

    spec: WorkContainer
    state: ContainerState = "waiting"
    reason: str = "ContainerCreating"
    exit_code: int | None = None
    container_id: str = ""
    restarts: int = 0
    pids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PodRun:
    """How one pod does; `devices` are container -> resource -> device ids."""

    workload: Workload
    uid: str
    containers: list[ContainerRun]
    devices: Mapping[str, Mapping[str, tuple[str, ...]]]
    phase: str = "Pending"
    terminating: bool = False

    @property
    def key(self) -> str:
        """Its name in the API: `namespace/name`."""
        return f"{self.workload.namespace}/{self.workload.name}"


def pod_object(pod: PodRun) -> Object:
    """A v1 Pod."""
    work = pod.workload
    metadata: Object = {
        "namespace": work.namespace,
        "name": work.name,
        "uid": pod.uid,
        "labels": dict(work.labels),
        "annotations": dict(work.annotations),
        "creationTimestamp": _TIME,
    }
    if pod.terminating:
        metadata |= {"deletionTimestamp": _TIME, "deletionGracePeriodSeconds": 1}
    init = [run for run in pod.containers if run.spec.kind in ("init", "sidecar")]
    main = [run for run in pod.containers if run.spec.kind == "app"]
    spec: Object = {"nodeName": NODE, "containers": [_container(run) for run in main]}
    status: Object = {
        "phase": pod.phase,
        "qosClass": "BestEffort",
        "containerStatuses": [_container_status(run) for run in main],
    }
    if init:
        spec["initContainers"] = [_container(run) for run in init]
        status["initContainerStatuses"] = [_container_status(run) for run in init]
    claims = {claim.claim_name for run in pod.containers for claim in run.spec.claims}
    if claims:
        spec["resourceClaims"] = [
            {"name": name, "resourceClaimName": name} for name in sorted(claims)
        ]
    return {"metadata": metadata, "spec": spec, "status": status}


def _container(run: ContainerRun) -> Object:
    resources: Object = {}
    if run.spec.resources:
        resources = {"limits": dict(run.spec.resources), "requests": dict(run.spec.resources)}
    if run.spec.claims:
        resources["claims"] = [{"name": claim.claim_name} for claim in run.spec.claims]
    container: Object = {"name": run.spec.name, "image": "made-up", "resources": resources}
    if run.spec.kind == "sidecar":
        container["restartPolicy"] = "Always"
    return container


def _container_status(run: ContainerRun) -> Object:
    status: Object = {
        "name": run.spec.name,
        "ready": run.state == "running",
        "restartCount": run.restarts,
        "state": _state(run),
    }
    if run.container_id:
        status["containerID"] = f"containerd://{run.container_id}"
    return status


def _state(run: ContainerRun) -> Object:
    if run.state == "running":
        return {"running": {"startedAt": _TIME}}
    if run.state == "terminated":
        reason = "Completed" if run.exit_code == 0 else "Error"
        ended: Object = {"exitCode": run.exit_code, "reason": reason, "finishedAt": _TIME}
        return {"terminated": ended}
    return {"waiting": {"reason": run.reason}}


def node_object() -> Object:
    """The v1 Node, labelled as its device plugins do."""
    amounts = {resource: str(len(devices)) for resource, devices in inventory().items()}
    amounts |= {"cpu": "128", "memory": "1056000000Ki", "pods": "110"}
    labels = {
        "kubernetes.io/hostname": NODE,
        "tke.cloud.tencent.com/qgpu.memory-unit": "1G",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
        "nvidia.com/gpu.replicas": str(REPLICAS),
        "nvidia.com/mig.config.state": "success",
    }
    return {
        "metadata": {"name": NODE, "labels": labels, "annotations": {}},
        "spec": {},
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def resource_slice() -> Object:
    """The ResourceSlice of the card that is handed out by claims."""
    device: dict[str, Any] = {
        "name": f"gpu-{CLAIM_CARD}",
        "attributes": {
            "type": {"string": "gpu"},
            "uuid": {"string": card_uuid(CLAIM_CARD)},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
        },
        "capacity": {"memory": {"value": str(memory_total_bytes(CLAIM_CARD))}},
    }
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": f"{NODE}-{DRA_DRIVER}"},
        "spec": {"nodeName": NODE, "driver": DRA_DRIVER, "pool": pool, "devices": [device]},
    }


def gpu_objects() -> list[Object]:
    """The qGPU scheduler's own table of its cards."""
    return [
        {
            "metadata": {"name": f"{NODE}-{card}", "labels": {"elasticgpu.io/node": NODE}},
            "spec": {
                "index": card,
                "uuid": card_uuid(card),
                "path": f"/dev/nvidia{card}",
                "memory": str(memory_total_bytes(card)),
                "nodeName": NODE,
                "resource": GPU,
            },
        }
        for card in QGPU_CARDS
    ]
