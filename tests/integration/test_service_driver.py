"""The whole service over a driver that is missing, late, changed, blocked or leaking."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.services import Page, alive, cluster, running
from tests.nvml_stub import Stub, presets

DRIVER_NOT_LOADED, MISMATCH, UNKNOWN = 9, 18, 999
FAST = ["--interval=200ms"]


def card_series(page: Page) -> list[str]:
    """The series of any card."""
    return [one.name for one in page.samples if "gpu" in one.labels]


def restarts(page: Page) -> dict[str, float]:
    """How often the reader was replaced, by reason."""
    return page.by("reason", "qgpu_exporter_reader_restarts_total")


def failed(page: Page, reason: str) -> bool:
    """Whether the driver is down, for this reason among others."""
    name = "qgpu_exporter_source_failures_total"
    return page.up("nvml") == 0 and page.value(name, source="nvml", reason=reason) is not None


@pytest.mark.parametrize("directory_is_there", [True, False], ids=["empty", "not_mounted"])
async def test_the_driver_comes_after_the_service(
    tmp_path: Path, *, directory_is_there: bool
) -> None:
    stub = Stub(tmp_path, [])
    stub.set({"error.nvmlInitWithFlags": DRIVER_NOT_LOADED})
    place = tmp_path / "driver" / "lib"
    if directory_is_there:
        place.mkdir(parents=True)
    environment = stub.environment() | {"LD_LIBRARY_PATH": str(place)}
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=environment) as service,
    ):
        await service.ready()
        page = await service.until(lambda page: failed(page, "library_not_found"))
        assert card_series(page) == []

        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(stub.library, place)
        page = await service.until(lambda page: failed(page, "driver_not_loaded"))
        assert card_series(page) == []

        # A driver without a card is no fault.
        stub.set({"error.nvmlInitWithFlags": None})
        page = await service.until(lambda page: page.up("nvml") == 1)
        page = await service.until(lambda page: page.value("node_gpu_cards") == 0)
        assert card_series(page) == []

        stub.set({f"0.{key}": value for key, value in presets.t4().items()} | {"count": 1})
        page = await service.until(lambda page: page.by("gpu", "node_gpu_up") == {"0": 1})
        assert page.value("DCGM_FI_DEV_GPU_TEMP", gpu="0") == 40


async def test_after_an_upgrade_a_new_reader_loads_the_new_library(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    faults = ("error.nvmlDeviceGetCount_v2", "error.nvmlInitWithFlags")
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        await service.until(lambda page: page.by("gpu", "node_gpu_up") == {"0": 1})
        old = await service.reader()
        # The kernel module is of another version now; a new process loads the library that fits.
        stub.set(dict.fromkeys(faults, MISMATCH))
        await service.until(lambda page: failed(page, "mismatch"))
        stub.set({**dict.fromkeys(faults), "nvmlSystemGetDriverVersion": "590.48.01"})
        page = await service.until(
            lambda page: page.value("node_gpu_driver_info", driver_version="590.48.01") == 1
        )
        assert page.by("gpu", "node_gpu_up") == {"0": 1}
        assert restarts(page)["mismatch"] >= 1
        assert not alive(old)
        assert await service.reader() != old


async def test_a_driver_that_crashes_ends_no_more_than_its_reader(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"crash.nvmlInitWithFlags": 1})
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        node.share("p1", 0, core=50, memory=4)
        page = await service.until(lambda page: restarts(page).get("crash", 0) >= 2)
        assert page.up("nvml") == 0
        assert page.up("kubernetes") == 1
        # The same fault again is no news.
        assert len(service.complaints()) == 1
        stub.set({"crash.nvmlInitWithFlags": None})
        page = await service.until(lambda page: page.value("node_gpu_core_request") == 50)
        assert page.by("gpu", "node_gpu_up") == {"0": 1}


@pytest.mark.parametrize(
    "fault", [{"error.nvmlInitWithFlags": MISMATCH}, {"0.error.*": UNKNOWN}], ids=str
)
async def test_a_driver_that_stays_unusable_ends_the_service(
    tmp_path: Path, fault: dict[str, object]
) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set(fault)
    flags = [*FAST, "--kubelet.socket=", "--kubernetes.pods=off", "--devices.exit-after=1s"]
    async with running(*flags, environment=stub.environment()) as service:
        assert await service.ended() == 1
    assert "exits so that the container is made anew" in service.lines[-1]


@pytest.mark.parametrize("hangs", ["hang.*", "0.hang.*"], ids=["driver", "card"])
async def test_a_signal_ends_everything_while_the_driver_hangs(tmp_path: Path, hangs: str) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({hangs: 1000})
    async with (
        cluster(tmp_path) as node,
        running(
            *node.flags(), *FAST, "--devices.timeout=1s", environment=stub.environment()
        ) as service,
    ):
        assert (await service.get("/-/healthy"))[0] == 200
        page = await service.page()
        assert page.value("qgpu_exporter_build_info") == 1
        await service.ready()
        page = await service.page()
        assert page.up("podresources") == 1
        assert page.by("gpu", "node_gpu_up") == ({} if hangs == "hang.*" else {"0": 0})
        reader = await service.reader()
        service.process.send_signal(signal.SIGTERM)
        assert await service.ended() == 0
        assert not alive(reader)


async def test_a_leaking_driver_meets_the_ceiling(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    stub.set({"leak": 32 << 20})
    ceiling = ["--devices.persistence-mode", "--devices.max-memory=200MiB"]
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, *ceiling, environment=stub.environment()) as service,
    ):
        await service.ready()
        first = await service.reader()
        page = await service.until(
            lambda page: page.by("gpu", "node_gpu_up") == {"0": 1} and restarts(page) != {}
        )
        assert set(restarts(page)) == {"memory"}
        assert page.value("node_gpu_persistence_mode", gpu="0") == 0
        assert await service.reader(other_than=first) != first
        assert not alive(first)
    assert "nvmlDeviceGetPersistenceMode 0" in stub.calls()


async def test_the_same_driver_is_not_asked_by_default(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        page = await service.until(lambda page: page.by("gpu", "node_gpu_up") == {"0": 1})
        assert page.rows("node_gpu_persistence_mode") == []
    assert "nvmlDeviceGetPersistenceMode 0" not in stub.calls()
