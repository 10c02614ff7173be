"""The whole service lets go of the driver: nothing of ours holds its library or a device file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.integration.services import Page, Service, cluster, running
from tests.nvml_stub import Stub, presets

MIG_STATE = "nvidia.com/mig.config.state"
CLIENT = "nvidia.com/gpu.deploy.client"
UPGRADE = "nvidia.com/gpu-driver-upgrade-state"


def holds_driver(pid: int, library: Path) -> bool:
    """Whether a process has the driver's library mapped, or a device file open."""
    folder = Path(f"/proc/{pid}")
    if str(library) in (folder / "maps").read_text():
        return True
    opened = [os.readlink(one) for one in (folder / "fd").iterdir() if one.is_symlink()]
    return any(path.startswith("/dev/nvidia") for path in opened)


def released(page: Page) -> bool:
    """Whether the page says that the driver was let go, and shows no card any more."""
    name = "qgpu_exporter_source_released"
    return page.value(name, source="nvml") == 1 and not page.rows("node_gpu_up")


async def working(service: Service, stub: Stub) -> None:
    """Wait until the cards are read, by one process that holds the driver."""
    page = await service.until(lambda page: page.by("gpu", "node_gpu_up") == {"0": 1, "1": 1})
    assert page.value("qgpu_exporter_source_released", source="nvml") == 0
    reader = await service.reader()
    assert holds_driver(reader, stub.library)
    assert not holds_driver(service.process.pid, stub.library)


async def let_go(service: Service, stub: Stub) -> Page:
    """Wait until the driver is let go, and see that it is."""
    page = await service.until(released)
    assert service.children() == []
    assert not holds_driver(service.process.pid, stub.library)
    assert page.up("nvml") == 0
    assert (await service.get("/-/ready")) == (200, "ready\n")
    return page


async def test_by_labels_and_by_a_signal(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.h100_mig(0), presets.t4(1)])
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), "--interval=200ms", environment=stub.environment()) as service,
    ):
        await service.ready()
        node.share("p1", 1, core=50, memory=4)
        await service.until(lambda page: page.value("node_gpu_core_request", pod="p1") == 50)
        await working(service, stub)
        for name, busy, done in (
            (MIG_STATE, "pending", "success"),
            (MIG_STATE, "rebooting", "failed"),
            (CLIENT, "paused-for-mig-change", "true"),
            (UPGRADE, "pod-restart-required", "upgrade-done"),
        ):
            if name == UPGRADE:
                # Also from a driver that does not let go by itself.
                stub.set({"0.hang.*": 1000})
            node.label({name: busy})
            page = await let_go(service, stub)
            stub.set({"0.hang.*": None})
            if name == MIG_STATE:
                assert page.by("state", "node_gpu_mig_config_state")[busy] == 1
            # Who holds what is no matter of the driver.
            assert page.value("node_gpu_core_request", gpu="1", pod="p1") == 50
            node.label({name: done})
            await working(service, stub)
        restarts = (await service.page()).by("reason", "qgpu_exporter_reader_restarts_total")
        assert restarts == {"released": 4}
        assert service.complaints() == []

        service.process.send_signal(signal.SIGUSR1)
        await let_go(service, stub)
        # It stays so: rounds that are due meanwhile start no reader.
        stub.forget_calls()
        joined = (await service.page()).value("qgpu_exporter_snapshot_timestamp_seconds")
        assert joined is not None
        node.delete("p1")
        await service.until(lambda page: not page.rows("node_gpu_core_request"))
        await let_go(service, stub)
        assert stub.calls() == []
