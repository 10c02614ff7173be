"""The kubelet's List answer becomes containers with distinct, sorted ids, whatever its shape."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu_exporter.model import ClaimDevice, KubeletContainer
from qgpu_exporter.sources import SourceError
from qgpu_exporter.sources.podresources import decode_bytes, decode_json
from qgpu_exporter.sources.podresources.qgpu_podresources_pb2 import (
    ContainerDevices,
    ContainerResources,
    ListPodResourcesResponse,
    PodResources,
)

ROOT = Path(__file__).parents[2]
GPU_0 = "GPU-10000000-0000-4000-8000-000000000000"
GPU_1 = "GPU-20000000-0000-4000-8000-000000000001"


def test_a_resource_split_over_numa_nodes_is_merged_and_each_device_is_there_once() -> None:
    answer = {
        "podResources": [
            {
                "namespace": "lab",
                "name": "two",
                "containers": [
                    {
                        "name": "main",
                        "devices": [
                            {
                                "resourceName": "nvidia.com/gpu",
                                "deviceIds": [GPU_1],
                                "topology": {"nodes": [{"ID": "1"}]},
                            },
                            {
                                "resourceName": "nvidia.com/gpu",
                                "deviceIds": [GPU_0, ""],
                                "topology": {"nodes": [{}]},
                            },
                            {"resourceName": "nvidia.com/gpu", "deviceIds": [GPU_1]},
                        ],
                    }
                ],
            }
        ]
    }
    assert decode_json(answer) == (
        KubeletContainer("lab", "two", "main", {"nvidia.com/gpu": (GPU_0, GPU_1)}),
    )


def test_only_containers_that_hold_something_are_kept_in_stable_order() -> None:
    answer = {
        "pod_resources": [
            {"namespace": "z", "name": "none"},
            {
                "namespace": "lab",
                "name": "multi",
                "containers": [
                    {
                        "name": "b",
                        "devices": [
                            {"resource_name": "r/two", "device_ids": ["7-00"]},
                            {"resource_name": "r/one", "device_ids": ["0-01", "0-00"]},
                        ],
                    },
                    {"name": "idle", "cpu_ids": ["1", "2"]},
                    {"name": "emptied", "devices": [{"resource_name": "r/one"}]},
                ],
            },
            {
                "namespace": "lab",
                "name": "alone",
                "containers": [
                    {"name": "c", "devices": [{"resource_name": "r/one", "device_ids": ["1-00"]}]}
                ],
            },
        ]
    }
    decoded = decode_json(answer)
    assert decoded == (
        KubeletContainer("lab", "alone", "c", {"r/one": ("1-00",)}),
        KubeletContainer("lab", "multi", "b", {"r/one": ("0-00", "0-01"), "r/two": ("7-00",)}),
    )
    assert list(decoded[1].devices) == ["r/one", "r/two"]


def test_a_pod_that_is_listed_twice_under_its_name_is_one() -> None:
    def pod(*containers: ContainerResources) -> PodResources:
        return PodResources(namespace="lab", name="db-0", containers=containers)

    held = ContainerDevices(resource_name="nvidia.com/gpu", device_ids=[GPU_0])
    message = ListPodResourcesResponse(
        pod_resources=[
            pod(ContainerResources(name="main")),
            pod(ContainerResources(name="main", devices=[held])),
        ]
    )
    assert decode_bytes(message.SerializeToString()) == (
        KubeletContainer("lab", "db-0", "main", {"nvidia.com/gpu": (GPU_0,)}),
    )


def test_devices_of_claims_are_kept_once_with_all_their_cdi_names() -> None:
    first = {
        "driverName": "gpu.nvidia.com",
        "poolName": "node-1",
        "deviceName": "gpu-0",
        "cdiDevices": [{"name": "k8s.gpu.nvidia.com/claim=b"}],
    }
    again = first | {"cdiDevices": [{"name": "k8s.gpu.nvidia.com/claim=a"}]}
    share = first | {"shareId": "s-1", "cdiDevices": []}
    before_1_31 = {"cdiDevices": [{"name": "k8s.gpu.nvidia.com/claim=c"}]}
    answer = {
        "podResources": [
            {
                "namespace": "lab",
                "name": "dra",
                "containers": [
                    {
                        "name": "main",
                        "dynamicResources": [
                            {
                                "claimName": "one",
                                "claimNamespace": "lab",
                                "claimResources": [first, again, share],
                            },
                            {
                                "claimName": "old",
                                "claimNamespace": "lab",
                                "claimResources": [before_1_31, {}],
                                "unknownField": 1,
                            },
                        ],
                    },
                    {
                        "name": "nothing",
                        "dynamicResources": [{"claimName": "x", "claimNamespace": "lab"}],
                    },
                ],
            }
        ]
    }
    names = ("k8s.gpu.nvidia.com/claim=a", "k8s.gpu.nvidia.com/claim=b")
    assert decode_json(answer) == (
        KubeletContainer(
            "lab",
            "dra",
            "main",
            {},
            (
                ClaimDevice("lab", "old", "", "", "", "", ("k8s.gpu.nvidia.com/claim=c",)),
                ClaimDevice("lab", "one", "gpu.nvidia.com", "node-1", "gpu-0", "", names),
                ClaimDevice("lab", "one", "gpu.nvidia.com", "node-1", "gpu-0", "s-1", ()),
            ),
        ),
    )


def test_bytes_and_json_that_are_no_answer_are_garbage() -> None:
    calls: list[Callable[[], object]] = [
        lambda: decode_bytes(b"\xff\xfe not a message"),
        lambda: decode_bytes(b"\x0a\x02\x0a\x05"),
        lambda: decode_json({"podResources": 5}),
    ]
    for call in calls:
        with pytest.raises(SourceError) as raised:
            call()
        assert raised.value.reason == "garbage"
    assert decode_bytes(b"") == ()


_NAMES = st.sampled_from(["a", "b", "c"])
_ENTRIES = st.lists(
    st.tuples(_NAMES, _NAMES, _NAMES, _NAMES, st.lists(_NAMES, max_size=3)), max_size=12
)


@given(_ENTRIES, st.integers())
def test_order_and_spread_of_entries_change_nothing(
    entries: list[tuple[str, str, str, str, list[str]]], seed: int
) -> None:
    def decoded(order: list[tuple[str, str, str, str, list[str]]]) -> tuple[KubeletContainer, ...]:
        message = ListPodResourcesResponse()
        for namespace, pod, container, resource, ids in order:
            listed = message.pod_resources.add(namespace=namespace, name=pod)
            devices = listed.containers.add(name=container).devices
            devices.add(resource_name=resource, device_ids=ids)
        return decode_bytes(message.SerializeToString())

    shuffled = list(entries)
    Random(seed).shuffle(shuffled)
    expected: dict[tuple[str, str, str], dict[str, set[str]]] = {}
    for namespace, pod, container, resource, ids in entries:
        if ids:
            held = expected.setdefault((namespace, pod, container), {})
            held.setdefault(resource, set()).update(ids)
    assert decoded(shuffled) == decoded(entries)
    assert decoded(entries) == tuple(
        KubeletContainer(*key, {name: tuple(sorted(ids)) for name, ids in held.items()})
        for key, held in sorted(expected.items())
    )


def test_the_generated_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    folder = Path("qgpu_exporter/sources/podresources")
    proto = folder / "qgpu_podresources.proto"
    subprocess.run(
        [
            sys.executable,
            *("-m", "grpc_tools.protoc", f"-I{ROOT}"),
            *(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", str(ROOT / proto)),
        ],
        check=True,
    )
    for name in ("qgpu_podresources_pb2.py", "qgpu_podresources_pb2.pyi"):
        assert (tmp_path / folder / name).read_text() == (ROOT / folder / name).read_text()
