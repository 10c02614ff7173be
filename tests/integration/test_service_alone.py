"""The whole service where parts of a node are missing: nothing complains that need not be there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from qgpu_exporter.demo.procfs import FakeProcfs
from tests.integration.services import GUARD_SECONDS, cluster, running
from tests.integration.test_processes_in_cgroups import shows_the_host
from tests.nvml_stub import Stub, presets

FAST = "--interval=200ms"
INSIDE = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}


def procfs(folder: Path) -> str:
    """The host's processes; where this is a container without them, a made-up copy."""
    return "/proc" if shows_the_host() else str(FakeProcfs(folder / "proc").path)


async def test_a_host_without_kubernetes(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4(0), presets.l40s(1)])
    flags = [
        FAST,
        f"--kubelet.socket={tmp_path}/kubelet/pod-resources/kubelet.sock",
        f"--path.procfs={procfs(tmp_path)}",
        f"--path.validations={tmp_path}/validations",
        f"--path.cdi={tmp_path}/cdi",
    ]
    async with running(*flags, environment=stub.environment()) as service:
        await service.ready()
        page = await service.until(lambda page: page.by("gpu", "node_gpu_up") == {"0": 1, "1": 1})
        assert page.by("source", "qgpu_exporter_source_up") == {"nvml": 1, "processes": 1}
        assert page.by("gpu", "node_gpu_memory_capacity_bytes") == {
            "0": 15360 << 20,
            "1": 46068 << 20,
        }
        assert page.by("gpu", "DCGM_FI_DEV_GPU_TEMP") == {"0": 40, "1": 54}
        assert page.rows("node_gpu_core_request") == []
        assert service.complaints() == []


async def test_a_host_without_a_driver_says_so_once(tmp_path: Path) -> None:
    flags = [FAST, "--kubelet.socket=", f"--path.procfs={procfs(tmp_path)}", "--path.validations="]
    # That would be for a driver that was there: a node without GPUs is not left by it.
    flags.append("--devices.exit-after=200ms")
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    async with running(*flags, "--path.cdi=", environment=environment) as service:
        await service.ready()
        failures = "qgpu_exporter_source_failures_total"
        page = await service.until(lambda page: (page.value(failures, source="nvml") or 0) > 3)
        assert page.up("nvml") == 0
        assert not [one for one in page.samples if "gpu" in one.labels]
        (complaint,) = service.complaints()
        assert "source nvml failed (library_not_found)" in complaint


async def test_a_host_without_a_driver_keeps_its_last_file(tmp_path: Path) -> None:
    output = tmp_path / "gpu.prom"
    flags = ["--kubelet.socket=", f"--path.procfs={procfs(tmp_path)}", "--path.validations="]
    stub = Stub(tmp_path, [presets.t4()])
    for environment, code in (
        (stub.environment(), 0),
        (stub.environment() | {"LD_LIBRARY_PATH": str(tmp_path)}, 1),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "qgpu_exporter", "once", f"--output={output}", *flags),
            "--path.cdi=",
            env={**os.environ, **environment},
        )
        async with asyncio.timeout(GUARD_SECONDS):
            assert await process.wait() == code
        # The service's own series would take the place of the cards'.
        assert 'node_gpu_up{gpu="0"' in output.read_text()


@pytest.mark.parametrize("inside", [False, True], ids=["host", "cluster"])
@pytest.mark.parametrize("named", [False, True], ids=["guessed", "named"])
async def test_only_in_a_cluster_a_guessed_name_is_worth_a_word(
    tmp_path: Path, *, inside: bool, named: bool
) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    environment = stub.environment() | {"HOSTNAME": "qgpu-exporter-cwbcm"}
    environment |= INSIDE if inside else {}
    environment |= {"NODE_NAME": "gpu-node-b"} if named else {}
    flags = [FAST, "--kubelet.socket=", "--kubernetes.pods=off", "--path.validations="]
    async with running(*flags, "--path.cdi=", environment=environment) as service:
        warned = [line for line in service.complaints() if "NODE_NAME is not set" in line]
        assert len(warned) == (inside and not named)
        if named:
            page = await service.until(lambda page: page.by("gpu", "node_gpu_up") == {"0": 1})
            assert page.value("DCGM_FI_DEV_GPU_TEMP", Hostname="gpu-node-b", gpu="0") == 40
            assert {one.labels["node"] for one in page.samples if "node" in one.labels} == {
                "gpu-node-b"
            }


@pytest.mark.parametrize("broken", ["stopped", "unimplemented", "empty_directory"])
async def test_without_a_kubelet_annotations_and_cards_are_told(
    tmp_path: Path, broken: str
) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    async with cluster(tmp_path) as node:
        if broken == "unimplemented":
            node.kubelet.fault = "unimplemented"
        else:
            await node.kubelet.stop()
        if broken == "empty_directory":
            os.unlink(node.kubelet.socket)
        async with running(*node.flags(), FAST, environment=stub.environment()) as service:
            await service.ready()
            node.share("p1", 0, core=50, memory=4)
            page = await service.until(
                lambda page: (
                    page.value("node_gpu_core_request", pod="p1") == 50
                    and page.by("gpu", "DCGM_FI_DEV_GPU_TEMP") == {"0": 40}
                )
            )
            assert page.up("podresources") == 0
            assert page.up("kubernetes") == 1
            assert len(service.complaints()) == 1
            node.kubelet.fault = None
            if broken != "unimplemented":
                await node.kubelet.start()
            await service.until(lambda page: page.up("podresources") == 1)


async def test_a_kubelet_that_ends_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        node.whole("holder", [presets.uuid(0)])
        await service.until(lambda page: page.value("node_gpu_core_request") == 100)
        node.kubelet.fault = "hang"
        asked = node.kubelet.questions
        # A new pod makes the service ask at once.
        node.whole("waiting", [])
        await service.until(lambda _: node.kubelet.questions > asked)
        await node.kubelet.stop()
        page = await service.until(lambda page: page.up("podresources") == 0)
        assert page.value("node_gpu_core_request", gpu="0", pod="holder") == 100
        assert len(service.complaints()) == 1
        node.kubelet.fault = None
        # At first it knows of no pod.
        await node.kubelet.restart(empty_seconds=0.5)
        page = await service.until(lambda page: page.up("podresources") == 1)
        assert page.value("node_gpu_core_request", gpu="0", pod="holder") == 100


async def test_all_sources_fail_and_the_service_answers(tmp_path: Path) -> None:
    async with cluster(tmp_path) as node:
        await node.kubelet.stop()
        node.api.allowed.clear()
        flags = [*node.flags(), FAST]
        flags[flags.index(f"--path.procfs={node.procfs}")] = f"--path.procfs={tmp_path}/none"
        environment = {"LD_LIBRARY_PATH": str(tmp_path)}
        async with running(*flags, environment=environment) as service:
            await service.ready()
            page = await service.page()
            # Who may not read ResourceSlices has no use for them: that source is off.
            enabled = ("nvml", "podresources", "kubernetes", "node", "processes")
            up = page.by("source", "qgpu_exporter_source_up")
            assert up == dict.fromkeys(enabled, 0)
            assert not [one for one in page.samples if one.name.startswith("node_gpu_")]
            assert (await service.get("/-/healthy"))[0] == 200
            status, text = await service.get("/caches")
            assert (status, json.loads(text)["cards"]) == (200, None)
