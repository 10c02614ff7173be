"""The whole service on a card shared by real processes in real cgroups: who uses how much of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.services import Page, Service, cluster, running
from tests.integration.test_processes_in_cgroups import Cgroups, kubepods
from tests.nvml_stub import Stub, card, presets
from tests.usage_worlds import container_id, uid

MIB = 1 << 20


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def cgroups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cgroups]:
    made = Cgroups(request.param, tmp_path / "proc")
    try:
        yield made
    finally:
        made.close()


def known(number: int) -> dict[str, str]:
    """What names pod `number` and its one container."""
    return {"uid": uid(number), "container_id": container_id(number)}


def use(stub: Stub, *uses: tuple[int, int, int]) -> None:
    """(pid, MiB, percent of the SMs) of each process on card 0; each round has a new sample."""
    stub.set(
        card(
            {
                "nvmlDeviceGetComputeRunningProcesses": ",".join(
                    f"{pid}:{mib * MIB}" for pid, mib, _ in uses
                ),
                "nvmlDeviceGetProcessUtilization": ",".join(
                    f"{pid}:0:{percent}:0:0:0" for pid, _, percent in uses
                ),
            }
        )
    )


async def until_used(service: Service, wanted: dict[str, int]) -> Page:
    """The first page on which these pods use so many MiB."""
    in_bytes = {name: mib * MIB for name, mib in wanted.items()}
    return await service.until(
        lambda page: page.by("pod", "node_gpu_memory_usage_bytes") == in_bytes
    )


async def test_processes_count_for_their_containers(tmp_path: Path, cgroups: Cgroups) -> None:
    stub = Stub(
        tmp_path,
        [
            presets.t4()
            | {
                "nvmlDeviceGetGraphicsRunningProcesses": "",
                "nvmlDeviceGetMemoryInfo": presets.memory_mib(15360, 388, 1000, 13972),
                "nvmlDeviceGetUtilizationRates": "70,5",
            }
        ],
    )
    first = cgroups.start(kubepods(1, 1))
    second = cgroups.start(kubepods(2, 2))
    beside = cgroups.start(kubepods(2, 2) + "/worker")
    host = cgroups.start("system.slice/train.service")
    use(stub, (first, 100, 10), (second, 200, 20), (beside, 50, 5), (host, 25, 2))
    async with (
        cluster(tmp_path, cgroups.procfs) as node,
        running(*node.flags(), "--interval=200ms", environment=stub.environment()) as service,
    ):
        await service.ready()
        node.share("p1", 0, core=50, memory=4, **known(1))
        node.share("p2", 0, core=25, memory=4, **known(2))
        node.share("idle", 0, core=25, memory=4, **known(3))
        await until_used(service, {"p1": 100, "p2": 250, "idle": 0})
        page = await service.until(
            lambda page: page.by("pod", "node_gpu_core_usage") == {"p1": 10, "p2": 25, "idle": 0}
        )
        assert page.by("pod", "node_gpu_core_request") == {"p1": 50, "p2": 25, "idle": 25}
        assert page.by("pod", "node_gpu_container_processes") == {"p1": 1, "p2": 2, "idle": 0}
        (used,) = page.rows("node_gpu_memory_usage_bytes", pod="p1")
        (given,) = page.rows("node_gpu_memory_request_bytes", pod="p1")
        assert used.labels == given.labels
        assert page.value("node_gpu_memory_usage_unattributed_bytes", gpu="0") == 650 * MIB
        assert page.value("node_gpu_core_usage_unattributed", gpu="0") == 35
        assert page.value("node_gpu_usage_without_allocation", gpu="0") == 0
        owner = {"owner_kind": "systemd", "owner": "train.service"}
        assert page.value("node_gpu_host_process_memory_usage_bytes", **owner) == 25 * MIB

        # A pod that has gone has no series at the next scrape, whatever the driver still tells.
        node.delete("p1")
        page = await service.until(lambda page: not page.rows("node_gpu_core_request", pod="p1"))
        assert not [one for one in page.samples if one.labels.get("pod") == "p1"]
        assert page.value("DCGM_FI_DEV_GPU_TEMP", gpu="0") == 40
        use(stub, (second, 200, 20))
        await until_used(service, {"p2": 200, "idle": 0})

        # The same name again is another pod: the old process is not its own.
        node.share("p1", 0, core=50, memory=4, **known(4))
        use(stub, (first, 100, 10), (second, 200, 20))
        page = await until_used(service, {"p1": 0, "p2": 200, "idle": 0})
        assert page.value("node_gpu_memory_usage_unattributed_bytes", gpu="0") == 800 * MIB


async def test_a_card_without_process_readings_claims_nothing(tmp_path: Path) -> None:
    lists = ("Compute", "Graphics", "MPSCompute")
    refused = {f"nvmlDeviceGet{one}RunningProcesses": "!3" for one in lists}
    stub = Stub(tmp_path, [presets.t4() | refused | {"nvmlDeviceGetProcessUtilization": "!3"}])
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), "--interval=200ms", environment=stub.environment()) as service,
    ):
        await service.ready()
        node.whole("holder", [presets.uuid(0)])
        page = await service.until(
            lambda page: (
                page.value("node_gpu_core_request", pod="holder") == 100
                and page.value("node_gpu_utilization_ratio", gpu="0") == 0
            )
        )
        for name in ("node_gpu_core_usage", "node_gpu_memory_usage_bytes"):
            assert page.rows(name) == []
        assert page.rows("node_gpu_memory_usage_unattributed_bytes") == []
