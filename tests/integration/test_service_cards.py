"""The whole service over a real library: what becomes of its page when cards go wrong or change."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.integration.services import GIB, Page, Service, cluster, running
from tests.nvml_stub import Stub, card, presets

LOST, UNKNOWN = 15, 999
FAST = ["--interval=200ms"]


def up(page: Page) -> dict[str, float]:
    """Which cards answer, by index."""
    return page.by("gpu", "node_gpu_up")


def temperatures(page: Page) -> dict[str, float]:
    """The driver's reading of each card that gives one, under dcgm-exporter's name."""
    return page.by("UUID", "DCGM_FI_DEV_GPU_TEMP")


async def warm(service: Service, *celsius: int) -> Page:
    """The first page with these temperatures, card by card."""
    wanted = [float(one) for one in celsius]
    return await service.until(
        lambda page: [one.value for one in page.rows("node_gpu_temperature_celsius")] == wanted
    )


async def test_one_bad_card_costs_only_itself(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4(index) for index in range(4)])
    async with (
        cluster(tmp_path) as node,
        running(
            *node.flags(), *FAST, "--devices.timeout=2s", environment=stub.environment()
        ) as service,
    ):
        node.share("p1", 1, core=50, memory=4)
        await service.until(
            lambda page: (
                len(temperatures(page)) == 4
                and page.value("node_gpu_core_request", gpu="1", pod="p1") == 50
            )
        )

        stub.set({"1.error.*": LOST, "0.nvmlDeviceGetTemperatureV": 41})
        page = await warm(service, 41, 40, 40)
        assert up(page) == {"0": 1, "1": 0, "2": 1, "3": 1}
        assert page.value("node_gpu_down_info", gpu="1", reason="lost") == 1
        assert temperatures(page) == {
            presets.uuid(0): 41,
            presets.uuid(2): 40,
            presets.uuid(3): 40,
        }
        assert page.rows("DCGM_FI_DEV_GPU_UTIL", gpu="1") == []
        # Who it is, what it has and who holds it is still true.
        assert page.value("node_gpu_info", gpu="1", uuid=presets.uuid(1)) == 1
        assert page.value("node_gpu_memory_capacity_bytes", gpu="1") == 15 * GIB
        assert page.value("node_gpu_core_request", gpu="1", pod="p1") == 50
        assert page.value("node_gpu_allocation_info", gpu="1", pod="p1") == 1
        assert page.up("nvml") == 1

        stub.set({"2.hang.*": 1000, "0.nvmlDeviceGetTemperatureV": 42})
        page = await warm(service, 42, 40)
        assert up(page) == {"0": 1, "1": 0, "2": 0, "3": 1}
        assert page.value("node_gpu_down_info", gpu="2", reason="timeout") == 1
        assert page.value("qgpu_exporter_reader_left_behind") == 0
        assert page.rows("qgpu_exporter_reader_restarts_total") == []
        assert (await service.get("/-/healthy"))[0] == 200

        stub.set({"1.error.*": None, "2.hang.*": None})
        page = await warm(service, 42, 40, 40, 40)
        assert page.rows("node_gpu_down_info") == []


async def test_every_call_unknown_and_then_the_library_must_be_initialised(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        node.share("p1", 0, core=50, memory=4)
        await service.until(
            lambda page: (
                up(page) == {"0": 1}
                and page.value("node_gpu_core_request", gpu="0", pod="p1") == 50
            )
        )
        stub.set({"error.*": UNKNOWN})
        # The page follows the source's health within one join.
        page = await service.until(lambda page: page.up("nvml") == 0 and not up(page))
        assert not [one for one in page.samples if one.name.startswith("DCGM_FI_DEV_")]
        assert page.value("node_gpu_core_request", gpu="0", pod="p1") == 50
        assert page.value("node_gpu_memory_request_bytes", gpu="0", pod="p1") == 4 * GIB
        assert (await service.get("/-/healthy"))[0] == 200
        assert (await service.get("/-/ready"))[0] == 200

        stub.set({"error.*": None, "forget": 1})
        page = await service.until(lambda page: page.up("nvml") == 1 and up(page) == {"0": 1})
        assert temperatures(page) == {presets.uuid(0): 40}

        # The same reader forgets that it was initialised: no round is lost by it.
        restarts = page.by("reason", "qgpu_exporter_reader_restarts_total")
        stub.set({"forget": 2, "0.nvmlDeviceGetTemperatureV": 45})
        page = await warm(service, 45)
        assert page.by("reason", "qgpu_exporter_reader_restarts_total") == restarts
        assert page.value("node_gpu_core_request", gpu="0", pod="p1") == 50


async def test_xids_count_once_and_outlive_the_reader(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    began = time.time()
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        # The event set does not know what happened before the card was registered with it.
        page = await service.until(
            lambda page: page.value("node_gpu_xid_errors_total", xid="79") == 0
        )
        assert page.value("DCGM_FI_DEV_XID_ERRORS") == 0
        assert page.rows("node_gpu_xid_last_timestamp_seconds") == []
        stub.set({"event.1": "0:31", "event.2": "0:31"})
        page = await service.until(
            lambda page: page.value("node_gpu_xid_errors_total", xid="31") == 2
        )
        first = page.value("node_gpu_xid_last_timestamp_seconds", gpu="0", xid="31")
        assert first is not None
        assert began <= first <= time.time()

        old = await service.reader()
        os.kill(old, signal.SIGKILL)
        new = await service.reader(other_than=old)
        page = await service.until(
            lambda page: (
                page.by("reason", "qgpu_exporter_reader_restarts_total") == {"crash": 1}
                and page.up("nvml") == 1
            )
        )
        assert service.children() == [new]
        assert page.value("node_gpu_xid_errors_total", xid="31") == 2
        assert page.value("node_gpu_xid_last_timestamp_seconds", xid="31") == first

        stub.set({"event.3": "0:94"})
        page = await service.until(
            lambda page: page.value("node_gpu_xid_errors_total", xid="94") == 1
        )
        assert page.value("node_gpu_xid_errors_total", gpu="0", xid="31") == 2
        assert page.value("DCGM_FI_DEV_XID_ERRORS", UUID=presets.uuid(0)) == 94


async def test_the_kernel_log_tells_more_and_nothing_twice(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4()])
    log = tmp_path / "kmsg"
    record = "4,{0},{1},-;NVRM: Xid (PCI:0000:01:00): {2}, pid=704, name=train\n"
    uptime_us = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    log.write_text(record.format(1, uptime_us - 2_000_000, 48))
    flags = ["--devices.kmsg", f"--path.kmsg={log}"]
    name = "node_gpu_xid_errors_total"
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, *flags, environment=stub.environment()) as service,
    ):
        await service.ready()
        # What stood there before the service started is history: a time and no count.
        page = await service.until(
            lambda page: bool(page.rows("node_gpu_xid_last_timestamp_seconds", xid="48"))
        )
        assert page.value(name, gpu="0", xid="48") == 0
        assert page.up("kmsg") == 1

        # One incident, told by the driver and by the kernel.
        stub.set({"event.1": "0:79"})
        with log.open("a") as more:
            more.write(record.format(2, uptime_us, 79))
        await service.until(lambda page: page.value(name, gpu="0", xid="79") == 1)
        # One that only the kernel tells; when it is there, both words of the other have come.
        stub.set({"event.2": "0:94"})
        with log.open("a") as more:
            more.write(record.format(3, uptime_us, 63))
        page = await service.until(
            lambda page: page.value(name, xid="63") == 1 and page.value(name, xid="94") == 1
        )
        assert page.value(name, gpu="0", xid="79") == 1


async def test_mig_is_switched_off_and_on_while_running(tmp_path: Path) -> None:
    # GPM is refused here: then nothing says how busy a slice is, and nobody claims it.
    without_gpm = presets.h100_mig() | {"nvmlGpmQueryDeviceSupport": 0}
    stub = Stub(tmp_path, [without_gpm])
    instance, profile = presets.mig_uuid(0, 1), "nvidia.com/mig-2g.20gb"
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        node.whole("sliced", [instance], profile)
        page = await service.until(
            lambda page: page.value("node_gpu_core_request", pod="sliced") is not None
        )
        assert page.by("mig", "node_gpu_mig_memory_used_bytes") == {
            "2": 26 << 20,
            "3": 17 << 20,
            "9": 9 << 20,
            "10": 9 << 20,
        }
        assert page.value("node_gpu_allocation_info", uuid=instance, pod="sliced") == 1
        assert page.value("DCGM_FI_DEV_GPU_TEMP", UUID=presets.uuid(0)) == 42
        assert page.value("DCGM_FI_DEV_POWER_USAGE", UUID=presets.uuid(0)) == 71.27
        for name in ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_MEM_COPY_UTIL"):
            assert page.rows(name) == []
        assert page.rows("node_gpu_core_usage") == []
        assert page.rows("node_gpu_utilization_ratio") == []

        node.delete("sliced")
        stub.set(
            card(
                {
                    "nvmlDeviceGetMigMode": "0,0",
                    "nvmlDeviceGetUtilizationRates": "12,3",
                    **{f"mig.{place}.nvmlDeviceGetUUID": None for place in range(4)},
                }
            )
        )
        page = await service.until(
            lambda page: (
                page.value("DCGM_FI_DEV_GPU_UTIL", gpu="0") == 12
                and not page.rows("node_gpu_core_request")
            )
        )
        assert page.value("node_gpu_mig_enabled", gpu="0") == 0
        assert not [one for one in page.samples if "mig" in one.labels]
        assert "sliced" not in page.text

        again = presets.mig_device(
            0,
            0,
            instances=(7, 0),
            name="NVIDIA H100 80GB HBM3 MIG 7g.80gb",
            slices=(7, 7),
            multiprocessors=132,
            memory=(81152, 60),
        )
        stub.set(card({"nvmlDeviceGetMigMode": "1,1", "nvmlDeviceGetUtilizationRates": None}))
        stub.set(card(again))
        page = await service.until(lambda page: bool(page.rows("node_gpu_mig_memory_used_bytes")))
        assert page.by("mig", "node_gpu_mig_memory_used_bytes") == {"7": 60 << 20}
        assert page.rows("DCGM_FI_DEV_GPU_UTIL") == []
        assert page.by("reason", "qgpu_exporter_reader_restarts_total") == {}


async def test_a_card_is_unplugged_and_another_put_in_its_place(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4(0), presets.t4(1)])
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        node.whole("holder", [presets.uuid(1)])
        await service.until(lambda page: page.value("node_gpu_core_request") == 100)
        stub.set({"count": 1})
        page = await service.until(lambda page: up(page) == {"0": 1, "1": 0})
        assert page.value("node_gpu_down_info", gpu="1", reason="missing") == 1
        assert page.value("node_gpu_cards") == 2
        assert page.value("node_gpu_cards_answering") == 1
        assert page.value("node_gpu_core_request", gpu="1", pod="holder") == 100

        replaced = presets.l40s(1) | {"nvmlDeviceGetUUID": presets.uuid(7)}
        stub.set(dict.fromkeys(card(presets.t4(1), 1)))
        stub.set(card(replaced, 1) | {"count": 2})
        page = await service.until(lambda page: up(page) == {"0": 1, "1": 1})
        (info,) = page.rows("node_gpu_info", gpu="1")
        assert (info.labels["uuid"], info.labels["model"]) == (presets.uuid(7), "NVIDIA L40S")
        assert temperatures(page) == {presets.uuid(0): 40, presets.uuid(7): 54}
        assert page.value("node_gpu_memory_capacity_bytes", gpu="1") == 46068 << 20
        # The pod was given the card that is gone, and that card only.
        assert page.rows("node_gpu_core_request") == []
        assert presets.uuid(1) not in page.text


async def test_the_cards_are_numbered_anew(tmp_path: Path) -> None:
    stub = Stub(tmp_path, [presets.t4(0), presets.t4(1)])
    async with (
        cluster(tmp_path) as node,
        running(*node.flags(), *FAST, environment=stub.environment()) as service,
    ):
        await service.ready()
        node.whole("by-uuid", [presets.uuid(1)])
        node.share("by-index", 1, core=50, memory=4)
        page = await service.until(lambda page: len(page.rows("node_gpu_core_request")) == 2)
        assert page.value("qgpu_exporter_index_changes_total") == 0

        # The first card is gone, and the second has its number.
        stub.set(card(presets.t4(1), 0) | {"count": 1})
        page = await service.until(lambda page: up(page) == {"0": 1})
        assert page.value("node_gpu_info", gpu="0", uuid=presets.uuid(1)) == 1
        assert page.value("qgpu_exporter_index_changes_total") == 1
        (request,) = page.rows("node_gpu_core_request")
        assert (request.labels["pod"], request.labels["gpu"]) == ("by-uuid", "0")
        assert presets.uuid(0) not in page.text
        assert page.value("node_gpu_allocation_problems", kind="unknown_card") == 1
        changed = [line for line in service.complaints() if "has index 0 now and had 1" in line]
        assert len(changed) == 1
