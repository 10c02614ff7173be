"""The poller: what it shows, and that it shows it because of an event and not because of time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

import pytest

from qgpu_exporter.demo.workloads import qgpu_pod
from qgpu_exporter.model import CgroupNames, Node
from qgpu_exporter.poller import DriverUnusable, PollerSettings
from qgpu_exporter.release import release_reason
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.node import NodeObject
from qgpu_exporter.sources.processes import Processes
from tests.integration.exporters import HOUR, Exporter, exporting, until

HOURLY = PollerSettings("", interval_seconds=HOUR, timeout_seconds=3.0)
QUICK = PollerSettings("", interval_seconds=0.1, timeout_seconds=3.0)


def source(exporter: Exporter, name: str) -> str:
    """The value of one source's up."""
    found = [
        line.rpartition(" ")[2]
        for line in exporter.lines("qgpu_exporter_source_up")
        if f'source="{name}"' in line
    ]
    return found[0] if found else "absent"


async def another_round(exporter: Exporter) -> None:
    devices = exporter.poller.sources.devices
    before = devices.latest
    await until(lambda: devices.latest is not before)


async def test_a_deleted_pod_is_gone_with_the_api_s_word_although_cards_are_read_hourly() -> None:
    async with exporting(HOURLY) as exporter:
        assert "chat-a" in exporter.pods("node_gpu_core_request")
        await exporter.node.world.delete("chat/chat-a", grace_seconds=0.0)
        await until(lambda: "chat-a" not in exporter.pods("node_gpu_core_request"))
        for name in (
            "node_gpu_allocation_info",
            "node_gpu_memory_request_bytes",
            "node_gpu_core_usage",
            "node_gpu_memory_usage_bytes",
            "node_gpu_core_usage_seconds_total",
            "node_gpu_container_processes",
        ):
            assert "chat-a" not in exporter.pods(name)


async def test_a_new_pod_is_there_with_the_kubelet_s_word_although_a_card_hangs() -> None:
    async with exporting(QUICK) as exporter:
        exporter.node.world.cards.hang(5, 3600.0)
        await until(lambda: 'reason="timeout"' in "".join(exporter.lines("node_gpu_down_info")))
        whole = exporter.node.world.workload("platform/reserved-idle")
        await exporter.node.world.delete("platform/reserved-idle", grace_seconds=0.0)
        await until(lambda: "reserved-idle" not in exporter.pods("node_gpu_allocation_info"))
        await exporter.node.world.create(whole)
        await until(lambda: "reserved-idle" in exporter.pods("node_gpu_allocation_info"))
        up = exporter.lines("node_gpu_up")
        assert [line.rpartition(" ")[2] for line in up] == ["1.0"] * 5 + ["0.0"] + ["1.0"] * 2


async def test_a_finished_pod_holds_nothing_while_the_api_still_lists_it() -> None:
    async with exporting(HOURLY) as exporter:
        exporter.node.world.finish("chat/chat-b")
        await until(lambda: "chat-b" not in exporter.pods("node_gpu_core_request"))
        assert exporter.node.world.exists("chat/chat-b")


async def test_a_new_annotated_pod_needs_neither_kubelet_nor_a_reading() -> None:
    async with exporting(HOURLY, kubelet=False) as exporter:
        assert exporter.lines("node_gpu_core_request") != []
        await exporter.node.world.delete("chat/chat-a", grace_seconds=0.0)
        await exporter.node.world.create(qgpu_pod("demo", "fresh", (0,), core=10, memory=4))
        await until(lambda: "fresh" in exporter.pods("node_gpu_core_request"))


async def test_allocations_outlive_a_kubelet_that_fails_for_max_age_and_no_longer() -> None:
    async with exporting(HOURLY, max_age_seconds=4.0) as exporter:
        assert "reserved-idle" in exporter.pods("node_gpu_allocation_info")
        await exporter.node.world.kubelet.stop()
        await until(lambda: source(exporter, "podresources") == "0.0")
        await until(lambda: "reserved-idle" not in exporter.pods("node_gpu_allocation_info"))
        # What an annotation proves needs no kubelet.
        assert "chat-a" in exporter.pods("node_gpu_core_request")
        await exporter.node.world.kubelet.start()
        await until(lambda: "reserved-idle" in exporter.pods("node_gpu_allocation_info"))


async def test_pods_outlive_an_api_server_that_is_away() -> None:
    async with exporting(HOURLY) as exporter:
        await exporter.node.world.api.stop()
        await until(lambda: source(exporter, "kubernetes") == "0.0")
        assert "chat-a" in exporter.pods("node_gpu_core_request")
        assert source(exporter, "nvml") == "1.0"


async def test_without_a_first_pod_list_the_kubelet_s_proofs_are_shown_after_a_time() -> None:
    now = [1000.0]
    async with exporting(HOURLY, refused=["pods"], clock=lambda: now[0]) as exporter:
        assert source(exporter, "kubernetes") == "0.0"
        assert exporter.lines("node_gpu_allocation_info") == []
        now[0] += 31.0
        exporter.poller.changed()
        await until(lambda: "reserved-idle" in exporter.pods("node_gpu_allocation_info"))
        # What an annotation proves takes the pods, and so do sums over all pods.
        assert "chat-a" not in exporter.pods("node_gpu_allocation_info")
        assert exporter.lines("node_gpu_containers") == []
        exporter.node.world.api.allowed.add("pods")
        await until(lambda: "chat-a" in exporter.pods("node_gpu_allocation_info"))


async def test_without_the_api_what_the_kubelet_lists_is_shown_and_annotations_are_not() -> None:
    async with exporting(HOURLY, api=False) as exporter:
        shown = exporter.pods("node_gpu_allocation_info")
        assert "reserved-idle" in shown
        assert "chat-a" not in shown
        assert source(exporter, "kubernetes") == "absent"
        await exporter.node.world.delete("platform/reserved-idle", grace_seconds=0.0)
        await until(lambda: "reserved-idle" not in exporter.pods("node_gpu_allocation_info"))


async def test_a_card_that_goes_down_and_comes_back_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told() -> list[str]:
        return [text for text in caplog.messages if text.startswith("card ")]

    with caplog.at_level(logging.INFO):
        async with exporting(QUICK) as exporter:
            exporter.node.world.cards.lose(2)
            await until(lambda: 'reason="lost"' in "".join(exporter.lines("node_gpu_down_info")))
            # Two further rounds find it lost again.
            await another_round(exporter)
            await another_round(exporter)
            exporter.node.world.cards.recover()
            await until(lambda: exporter.lines("node_gpu_down_info") == [])
    assert told() == ["card 2 is down (lost): simulated", "card 2 answers again"]


async def test_a_driver_that_fails_takes_the_readings_and_nothing_else() -> None:
    async with exporting(QUICK) as exporter:
        assert len(exporter.lines("node_gpu_temperature_celsius")) == 8
        exporter.node.world.cards.fail_driver("driver_not_loaded")
        await until(lambda: source(exporter, "nvml") == "0.0")
        await until(lambda: exporter.lines("node_gpu_temperature_celsius") == [])
        assert "chat-a" in exporter.pods("node_gpu_core_request")
        exporter.node.world.cards.recover()
        await until(lambda: len(exporter.lines("node_gpu_temperature_celsius")) == 8)
        assert source(exporter, "nvml") == "1.0"


class CountedProcesses(Processes):
    """Notes when it is asked, which is once a round."""

    def __init__(self, procfs: str) -> None:
        super().__init__(procfs=procfs, clock=time.monotonic, wall_clock=time.time)
        self.asked_at: list[float] = []

    async def ask(self, pids: Iterable[int]) -> Mapping[int, CgroupNames] | None:
        self.asked_at.append(time.monotonic())
        return await super().ask(pids)


async def test_a_driver_that_fails_for_long_is_not_read_twice_a_round() -> None:
    async with exporting(QUICK) as exporter:
        exporter.node.world.cards.fail_driver("mismatch")
        await until(lambda: source(exporter, "nvml") == "0.0")
        counted = CountedProcesses(exporter.node.procfs)
        exporter.poller.sources.processes = counted
        await until(lambda: len(counted.asked_at) >= 20)
        rounds = 1 + (counted.asked_at[-1] - counted.asked_at[0]) / QUICK.interval_seconds
        retries = exporter.poller.sources.devices.reader_health.restarts["mismatch"]
        assert len(counted.asked_at) <= rounds + retries


async def test_a_reading_that_is_too_old_is_dropped() -> None:
    now = [1000.0]
    async with exporting(HOURLY, clock=lambda: now[0]) as exporter:
        assert len(exporter.lines("node_gpu_temperature_celsius")) == 8
        now[0] += HOUR + 4.0
        exporter.poller.changed()
        await until(lambda: exporter.lines("node_gpu_temperature_celsius") == [])
        assert "chat-a" in exporter.pods("node_gpu_core_request")


async def test_a_snapshot_that_is_too_old_is_not_served() -> None:
    now = [1000.0]
    async with exporting(HOURLY, clock=lambda: now[0]) as exporter:
        now[0] += 3 * HOUR + 1.0
        assert exporter.lines("node_gpu_up") == []
        assert source(exporter, "nvml") == "1.0"


async def test_the_reader_is_let_go_while_a_label_asks_for_it_and_comes_back() -> None:
    async with exporting(QUICK) as exporter:
        devices = exporter.poller.sources.devices
        api = exporter.node.world.api
        assert devices.reader_health.pid is not None
        labels = {"metadata": {"labels": {"nvidia.com/mig.config.state": "pending"}}}
        api.patch("nodes", f"/{exporter.node.name}", labels)
        await until(lambda: devices.health.released and devices.reader_health.pid is None)
        await until(lambda: exporter.lines("node_gpu_temperature_celsius") == [])
        assert exporter.lines("node_gpu_mig_config_state") == [
            'node_gpu_mig_config_state{node="demo-node",state="pending"} 1.0'
        ]
        labels = {"metadata": {"labels": {"nvidia.com/mig.config.state": "success"}}}
        api.patch("nodes", f"/{exporter.node.name}", labels)
        await until(lambda: len(exporter.lines("node_gpu_temperature_celsius")) == 8)
        assert devices.reader_health.restarts == {"released": 1}


async def test_a_release_by_hand_ends_by_itself() -> None:
    now = [1000.0]
    async with exporting(QUICK, clock=lambda: now[0]) as exporter:
        devices = exporter.poller.sources.devices
        await exporter.poller.release(60.0, "by hand")
        assert devices.health.released
        assert devices.health.detail == "by hand"
        now[0] += 61.0
        await until(lambda: devices.reader_health.pid is not None)


async def test_a_driver_that_stays_unusable_ends_the_poller() -> None:
    impatient = PollerSettings(
        "", interval_seconds=0.1, timeout_seconds=3.0, exit_after_seconds=0.5
    )
    async with exporting(impatient) as exporter:
        exporter.node.world.cards.fail_driver("mismatch")
        await until(exporter.running.done)
        error = exporter.running.exception()
    assert isinstance(error, ExceptionGroup)
    assert [str(one) for one in error.exceptions] == ["the driver answers mismatch (simulated)"]
    assert isinstance(error.exceptions[0], DriverUnusable)


async def test_a_release_by_hand_shortens_no_release_by_a_label() -> None:
    now = [1000.0]
    async with exporting(QUICK, clock=lambda: now[0]) as exporter:
        devices = exporter.poller.sources.devices
        labels = {"metadata": {"labels": {"nvidia.com/mig.config.state": "pending"}}}
        exporter.node.world.api.patch("nodes", f"/{exporter.node.name}", labels)
        await until(lambda: devices.health.released)
        await exporter.poller.release(60.0, "by hand")
        now[0] += 61.0
        assert devices.released
        assert devices.health.detail == "node label nvidia.com/mig.config.state is pending"


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({}, None),
        ({"nvidia.com/mig.config.state": "success"}, None),
        (
            {"nvidia.com/mig.config.state": "rebooting"},
            "node label nvidia.com/mig.config.state is rebooting",
        ),
        ({"nvidia.com/gpu.deploy.client": "true"}, None),
        (
            {"nvidia.com/gpu.deploy.client": "paused-for-mig-change"},
            "node label nvidia.com/gpu.deploy.client is paused-for-mig-change",
        ),
        ({"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"}, None),
        ({"nvidia.com/gpu-driver-upgrade-state": "wait-for-jobs-required"}, None),
        (
            {"nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"},
            "node label nvidia.com/gpu-driver-upgrade-state is pod-restart-required",
        ),
    ],
)
def test_which_labels_ask_for_the_driver(labels: dict[str, str], reason: str | None) -> None:
    node = Node("n", labels=labels)
    assert release_reason(node, ("nvidia.com/gpu.deploy.client",)) == reason


class TornNode(NodeObject):
    """A source with a fault of ours: what it holds cannot be looked at."""

    @property
    def latest(self) -> Node | None:
        raise LookupError("torn")

    @latest.setter
    def latest(self, value: Node | None) -> None:
        """Nothing is kept."""


async def test_a_fault_in_joining_is_counted_and_the_page_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with exporting(HOURLY) as exporter:
        whole = exporter.poller.sources.node
        connection = Connection(exporter.node.kubeconfig, environment={})
        exporter.poller.sources.node = TornNode(connection, "demo-node", wall_clock=time.time)
        exporter.poller.changed()
        await until(lambda: exporter.poller.join_failures > 0)
        count = exporter.poller.join_failures
        exporter.poller.changed()
        await until(lambda: exporter.poller.join_failures > count)
        assert "chat-a" in exporter.pods("node_gpu_core_request")
        told = [one for one in caplog.records if one.message.startswith("joining failed")]
        assert len(told) == 1
        exporter.poller.sources.node = whole
        await exporter.node.world.delete("chat/chat-a", grace_seconds=0.0)
        await until(lambda: "chat-a" not in exporter.pods("node_gpu_core_request"))


async def test_a_release_that_ends_does_not_wait_for_a_long_interval() -> None:
    async with exporting(HOURLY) as exporter:
        api, devices = exporter.node.world.api, exporter.poller.sources.devices
        for state in ("pending", "success"):
            labels = {"metadata": {"labels": {"nvidia.com/mig.config.state": state}}}
            api.patch("nodes", f"/{exporter.node.name}", labels)
            await until(lambda state=state: devices.released == (state == "pending"))  # type: ignore[misc] # a default binds the state, which mypy cannot infer
        await until(lambda: len(exporter.lines("node_gpu_temperature_celsius")) == 8)
        await exporter.poller.release(0.2, "by hand")
        assert exporter.lines("node_gpu_up") != []
        await until(lambda: devices.reader_health.restarts == {"released": 2})
        await until(lambda: len(exporter.lines("node_gpu_temperature_celsius")) == 8)
