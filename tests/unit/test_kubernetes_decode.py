"""Objects of the API server, decoded: what is kept, what is let go, and what null means."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from qgpu_exporter.model import Container, GpuObject, Node, Pod, SliceDevice
from qgpu_exporter.sources.kubernetes.gpus import decode_gpu
from qgpu_exporter.sources.kubernetes.node import decode_node
from qgpu_exporter.sources.kubernetes.objects import UNREADABLE
from qgpu_exporter.sources.kubernetes.pods import decode_pod
from qgpu_exporter.sources.kubernetes.slices import decode_slices

ID_A = "a" * 64
ID_B = "b" * 64

FULL_POD: dict[str, Any] = {
    "kind": "Pod",
    "apiVersion": "v1",
    "metadata": {
        "name": "trainer",
        "namespace": "research",
        "uid": "3d0f1c52-0000-4000-8000-000000000001",
        "resourceVersion": "7",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"app": "train", "team": "vision", "pod-template-hash": "x"},
        "annotations": {
            "tke.cloud.tencent.com/qgpu-pgpu-main": "1",
            "kubernetes.io/config.hash": "0123456789abcdef0123456789abcdef",
            "kubernetes.io/psp": "let go",
            "example.com/blob": "x" * 1000,
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "scheduler.framework.gpushare.allocation": "{}",
        },
        "managedFields": [{"manager": "someone"}],
    },
    "spec": {
        "nodeName": "gpu-node-a",
        "initContainers": [
            {"name": "fetch", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
            {"name": "watcher", "restartPolicy": "Always"},
        ],
        "containers": [
            {
                "name": "main",
                "resources": {
                    "limits": {
                        "cpu": "2",
                        "memory": "1Gi",
                        "hugepages-2Mi": "0",
                        "tke.cloud.tencent.com/qgpu-core": "25",
                        "attachable.kubernetes.io/volumes": "3",
                    },
                    "requests": {
                        "tke.cloud.tencent.com/qgpu-core": "20",
                        "tke.cloud.tencent.com/qgpu-memory": "4",
                    },
                },
            }
        ],
        "ephemeralContainers": [{"name": "debugger"}],
    },
    "status": {
        "phase": "Running",
        "initContainerStatuses": [
            {"name": "watcher", "state": {"running": {}}, "containerID": f"cri-o://{ID_B}"},
            {"name": "fetch", "state": {"terminated": {"exitCode": 0}}},
        ],
        "containerStatuses": [
            {
                "name": "main",
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                "containerID": f"containerd://{ID_A}",
            }
        ],
        "ephemeralContainerStatuses": [{"name": "debugger", "state": {}, "containerID": ""}],
    },
}


def test_a_pod_keeps_what_decides_about_gpus() -> None:
    kept = decode_pod(FULL_POD, keep_labels=re.compile("app|tea"), first_seen_at_seconds=3.5)
    assert kept == Pod(
        namespace="research",
        name="trainer",
        uid="3d0f1c52-0000-4000-8000-000000000001",
        phase="Running",
        annotations={
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "kubernetes.io/config.hash": "0123456789abcdef0123456789abcdef",
            "scheduler.framework.gpushare.allocation": "{}",
            "tke.cloud.tencent.com/qgpu-pgpu-main": "1",
        },
        labels={"app": "train"},
        containers=(
            Container("fetch", "init", {"nvidia.com/gpu": "1"}, "terminated"),
            Container("watcher", "sidecar", {}, "running", ID_B),
            Container(
                "main",
                "app",
                {
                    "tke.cloud.tencent.com/qgpu-core": "25",
                    "tke.cloud.tencent.com/qgpu-memory": "4",
                },
                "running",
                ID_A,
            ),
            Container("debugger", "ephemeral", {}, "waiting"),
        ),
        terminating=True,
        config_hash="0123456789abcdef0123456789abcdef",
        first_seen_at_seconds=3.5,
    )


def test_text_and_value_decode_alike_and_no_labels_are_kept_unasked() -> None:
    kept = decode_pod(json.dumps(FULL_POD).encode())
    assert kept == decode_pod(FULL_POD)
    assert kept.labels == {}


def test_null_stands_for_absent_everywhere() -> None:
    nothing = {
        "metadata": {
            "name": "pending-0",
            "namespace": "demo",
            "uid": "u",
            "annotations": None,
            "labels": None,
            "deletionTimestamp": None,
        },
        "spec": {
            "nodeName": None,
            "containers": [{"name": "c", "resources": None}],
            "initContainers": None,
            "ephemeralContainers": None,
            "resourceClaims": None,
        },
        "status": {
            "phase": None,
            "containerStatuses": None,
            "initContainerStatuses": None,
            "ephemeralContainerStatuses": None,
            "resourceClaimStatuses": None,
            "extendedResourceClaimStatus": None,
        },
    }
    expected = Pod("demo", "pending-0", "u", containers=(Container("c"),))
    assert decode_pod(nothing, keep_labels=re.compile(".*")) == expected
    bare = {"metadata": {"name": "pending-0", "namespace": "demo", "uid": "u"}}
    assert decode_pod(bare) == Pod("demo", "pending-0", "u")
    assert decode_pod({**bare, "spec": None, "status": None}) == decode_pod(bare)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (f"containerd://{ID_A}", ID_A),
        (f"docker://{ID_A}", ID_A),
        (ID_A, ID_A),
        ("", None),
        (None, None),
        ("containerd://short", None),
        (f"containerd://{ID_A.upper()}", None),
    ],
)
def test_a_container_id_is_its_64_digits(written: str | None, kept: str | None) -> None:
    pod = {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {"containers": [{"name": "c"}]},
        "status": {"containerStatuses": [{"name": "c", "containerID": written}]},
    }
    assert decode_pod(pod).containers == (Container("c", container_id=kept),)


def test_claims_are_known_by_the_names_of_their_objects() -> None:
    pod = {
        "metadata": {"name": "p", "uid": "u"},
        "spec": {
            "resourceClaims": [
                {"name": "own", "resourceClaimName": "shared-claim"},
                {"name": "made", "resourceClaimTemplateName": "template"},
                {"name": "unmade", "resourceClaimTemplateName": "template"},
            ],
            "containers": [
                {"name": "a", "resources": {"claims": [{"name": "made"}, {"name": "own"}]}},
                {"name": "b", "resources": {"claims": [{"name": "unmade"}, {"name": "none"}]}},
                {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
            ],
        },
        "status": {
            "resourceClaimStatuses": [{"name": "made", "resourceClaimName": "p-made-x7x2f"}],
            "extendedResourceClaimStatus": {
                "resourceClaimName": "p-extended-9k4lm",
                "requestMappings": [
                    {
                        "containerName": "c",
                        "resourceName": "nvidia.com/gpu",
                        "requestName": "container-2-request-0",
                    }
                ],
            },
        },
    }
    assert [one.claims for one in decode_pod(pod).containers] == [
        ("p-made-x7x2f", "shared-claim"),
        (),
        ("p-extended-9k4lm",),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        b"{",
        b"[]",
        b'{"metadata":{}}',
        b'{"metadata":{"name":"p","uid":"u"},"spec":{"containers":{}}}',
        b'{"metadata":{"name":"p","uid":"u","annotations":{"tencent.com/x":1}}}',
        b'{"metadata":{"name":"\xff\xfe","uid":"u"}}',
        {"metadata": {"name": 3}},
    ],
)
def test_what_is_no_pod_is_unreadable(wrong: bytes | dict[str, Any]) -> None:
    with pytest.raises(UNREADABLE):
        decode_pod(wrong)


@pytest.mark.parametrize("depth", [150, 1_000, 10_000])
def test_however_deep_a_part_is_that_nothing_reads_the_rest_is_read(depth: int) -> None:
    text = '"q[{\\"\\\\"'
    deep = '{"f:a":[' * depth + text + "]}" * depth
    raw = f'{{"metadata":{{"name":"p","uid":"u","managedFields":[{deep},{deep}]}},"spec":{{}}}}'
    read = decode_pod(raw.encode())
    assert (read.name, read.uid, read.phase) == ("p", "u", "Pending")


def test_deep_text_that_is_no_json_is_unreadable() -> None:
    unended = b'"' + b'\\"' * 500_000
    for wrong in (
        b"[" * 100_000,
        b"[" * 5_000 + unended,
        b"[" * 5_000 + b"]" * 6_000,
        b'{"metadata":' * 5_000 + b'"',
    ):
        with pytest.raises(UNREADABLE):
            decode_pod(wrong)


READ_BY_SCHEMES = (
    "ALIYUN_COM_GPU_MEM_IDX",
    "elasticgpu.io/container-main",
    "gpushare.alibabacloud.com/core-percentage",
    "hami.io/vgpu-devices-allocated",
    "kubernetes.io/config.hash",
    "nano-gpu/container-main",
    "scheduler.framework.gpushare.allocation",
    "scheduling.koordinator.sh/device-allocated",
    "tencent.com/predicate-gpu-idx-0",
    "tke.cloud.tencent.com/qgpu-pgpu-main",
    "volcano.sh/gpu-index",
)


@pytest.mark.parametrize("key", READ_BY_SCHEMES)
def test_annotations_that_schemes_read_are_kept(key: str) -> None:
    pod = {"metadata": {"name": "p", "uid": "u", "annotations": {key: "1", f"x.{key}": "2"}}}
    assert decode_pod(pod).annotations == {key: "1"}


def test_a_node_keeps_labels_and_extended_resources() -> None:
    node = {
        "metadata": {
            "name": "gpu-node-a",
            "labels": {"nvidia.com/gpu.count": "8", "kubernetes.io/os": "linux", "odd": None},
            "annotations": {"hami.io/node-nvidia-register": "x", "node.alpha/ttl": "0"},
        },
        "status": {
            "allocatable": {"cpu": "2", "pods": "110", "nvidia.com/gpu": "7"},
            "capacity": {"memory": "1Ki", "nvidia.com/gpu": 8},
        },
    }
    assert decode_node(node) == Node(
        "gpu-node-a",
        labels={"kubernetes.io/os": "linux", "nvidia.com/gpu.count": "8"},
        allocatable={"nvidia.com/gpu": "7"},
        capacity={"nvidia.com/gpu": "8"},
    )
    assert decode_node({"metadata": {"name": "n"}, "status": None}) == Node("n")


CARD = "GPU-c0000000-0000-4000-8000-000000000003"
SLICE = "MIG-c0000000-0000-5000-8000-000000000009"


def slice_of(
    devices: list[dict[str, Any]], *, generation: int = 1, wrapped: bool = False
) -> dict[str, Any]:
    if wrapped:
        devices = [
            {"name": one["name"], "basic": {k: v for k, v in one.items() if k != "name"}}
            for one in devices
        ]
    return {
        "metadata": {"name": "s"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "gpu-node-a",
            "pool": {"name": "gpu-node-a", "generation": generation, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


DEVICES: list[dict[str, Any]] = [
    {
        "name": "gpu-3",
        "attributes": {
            "type": {"string": "gpu"},
            "uuid": {"string": CARD},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "cudaComputeCapability": {"version": "9.0.0"},
            "minor": {"int": 3},
            "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
        },
        "capacity": {"memory": {"value": "81559Mi"}},
    },
    {
        "name": "gpu-3-mig-1g10gb-19-4",
        "attributes": {
            "gpu.nvidia.com/type": {"string": "mig"},
            "gpu.nvidia.com/uuid": {"string": SLICE},
            "gpu.nvidia.com/parentUUID": {"string": CARD},
            "gpu.nvidia.com/profile": {"string": "1g.10gb"},
        },
        "capacity": {"memory": {"value": "9984Mi"}, "multiprocessors": {"value": "16"}},
    },
    {
        "name": "gpu-3-mig-3g40gb-9-0",
        "attributes": {
            "type": {"string": "mig"},
            "parentUUID": {"string": CARD},
            "profile": {"string": "3g.40gb"},
        },
        "capacity": {"memorySlice4": {"value": "1"}, "memorySlice5": {"value": "1"}},
    },
    {"name": "gpu-vfio-0", "attributes": {"type": {"string": "vfio"}}, "capacity": None},
]


@pytest.mark.parametrize("wrapped", [False, True], ids=["v1", "v1beta1"])
def test_devices_of_a_slice(wrapped: bool) -> None:
    driver, pool = "gpu.nvidia.com", "gpu-node-a"
    assert decode_slices([slice_of(DEVICES, wrapped=wrapped)]) == (
        SliceDevice(driver, pool, "gpu-3", "gpu", CARD),
        SliceDevice(
            driver,
            pool,
            "gpu-3-mig-1g10gb-19-4",
            "mig",
            SLICE,
            CARD,
            "1g.10gb",
            placement_start=4,
        ),
        SliceDevice(
            driver,
            pool,
            "gpu-3-mig-3g40gb-9-0",
            "mig",
            None,
            CARD,
            "3g.40gb",
            # The capacity is the driver's word; the name is only a name.
            placement_start=4,
        ),
        SliceDevice(driver, pool, "gpu-vfio-0", "vfio"),
    )


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("gpu-0-mig-1g10gb-19-6", 6),
        ("gpu-12-mig-1c-3g40gb-9-4", 4),
        ("gpu-0-mig-9-2-4", 2),
        ("gpu-0-mig-odd", None),
    ],
)
def test_a_placement_in_a_name(name: str, start: int | None) -> None:
    device = {"name": name, "attributes": {"type": {"string": "mig"}}}
    assert decode_slices([slice_of([device])])[0].placement_start == start


def test_of_a_pool_only_the_newest_generation_counts() -> None:
    old = slice_of([{"name": "gpu-0"}, {"name": "gpu-1"}], generation=4)
    new = slice_of([{"name": "gpu-1"}], generation=5)
    assert [one.device for one in decode_slices([old, new])] == ["gpu-1"]
    assert decode_slices([new, old]) == decode_slices([old, new])


def test_a_gpu_object() -> None:
    gpu = {
        "metadata": {"name": "gpu-node-a-00"},
        "spec": {
            "index": 0,
            "uuid": CARD,
            "model": "Tesla T4",
            "path": "/dev/nvidia3",
            "memory": 16106127360,
            "nodeName": "gpu-node-a",
        },
    }
    assert decode_gpu(gpu, "gpu-node-a") == GpuObject(0, CARD, 3)
    assert decode_gpu(gpu, "gpu-node-b") is None
    bare = {"spec": {"index": 1, "uuid": CARD, "path": "elsewhere", "memory": "15Gi"}}
    assert decode_gpu(bare, "gpu-node-a") == GpuObject(1, CARD)
    with pytest.raises(msgspec.ValidationError):
        decode_gpu({"spec": {"uuid": CARD}}, "gpu-node-a")
