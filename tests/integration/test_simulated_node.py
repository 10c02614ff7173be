"""The simulated node: what its faces show agrees, and comes in the order that real ones keep."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from qgpu_exporter import cgroups, inventory
from qgpu_exporter.allocation import allocate
from qgpu_exporter.allocation.inputs import AllocationInputs
from qgpu_exporter.demo import SimulatedNode
from qgpu_exporter.demo.workloads import nightly, qgpu_pod
from qgpu_exporter.demo.world import NoSuchPod, Refused
from qgpu_exporter.model import (
    AllocationResult,
    KubeletList,
    PodList,
    Reading,
    ReadingRequest,
    Totals,
)
from qgpu_exporter.reader.simulated import Scenario, SimulatedSession, card_uuid
from qgpu_exporter.sources.kubernetes.client import Connection
from qgpu_exporter.sources.kubernetes.gpus import decode_gpu
from qgpu_exporter.sources.kubernetes.node import decode_node
from qgpu_exporter.sources.kubernetes.pods import decode_pod
from qgpu_exporter.sources.kubernetes.slices import decode_slices
from qgpu_exporter.sources.podresources import PodResources
from tests.kubelets import HANG_SECONDS, ManualClock, pods

GIB = 1 << 30


class Steps:
    """Stands for time: between the steps of a pod it notes what the node shows of it."""

    def __init__(self) -> None:
        self.node: SimulatedNode | None = None
        self.pod = ""
        self.seen: list[tuple[float, str, bool, int]] = []
        """(Pause, phase in the API, devices at the kubelet, processes) at each pause."""

    async def __call__(self, seconds: float) -> None:
        if self.node is not None:
            self.seen.append((seconds, *await self.look()))
        await asyncio.sleep(0)

    async def look(self) -> tuple[str, bool, int]:
        assert self.node is not None
        shown = self.node.world.api.store.get("pods", self.pod)
        phase = "gone" if shown is None else str(shown["status"]["phase"])
        if shown is not None and "deletionTimestamp" in shown["metadata"]:
            phase += ", terminating"
        listed = await kubelet_list(self.node)
        held = self.pod.partition("/")[2] in (pods(listed) or ())
        return phase, held, len(self.processes())

    def processes(self) -> set[int]:
        """Host pids of the pod's processes that use a card and are in /proc."""
        assert self.node is not None
        shown = self.node.world.api.store.get("pods", self.pod)
        statuses = shown["status"]["containerStatuses"] if shown else []
        ids = {str(item.get("containerID", "")).rpartition("/")[2] for item in statuses}
        return {pid for pid, container in container_by_pid(self.node).items() if container in ids}


def scenario(node: SimulatedNode) -> Scenario:
    return msgspec.json.decode(Path(node.simulation).read_bytes(), type=Scenario)


def container_by_pid(node: SimulatedNode) -> dict[int, str]:
    found = {}
    for process in scenario(node).processes:
        text = (Path(node.procfs) / str(process.pid) / "cgroup").read_text()
        for _, container_id in cgroups.parse(text).containers:
            found[process.pid] = container_id
    return found


async def kubelet_list(node: SimulatedNode) -> KubeletList | None:
    clock = ManualClock()
    source = PodResources(
        socket=node.socket, max_age_seconds=60.0, clock=clock, wall_clock=lambda: 2e9
    )
    try:
        return await source.ask()
    finally:
        await source.close()


@pytest.fixture
async def steps() -> Steps:
    return Steps()


@pytest.fixture
async def node(steps: Steps) -> AsyncIterator[SimulatedNode]:
    async with SimulatedNode(schedule=False, sleep=steps) as made:
        yield made


def reading(node: SimulatedNode) -> Reading:
    return SimulatedSession(node.simulation, clock=lambda: 1.8e9).read(ReadingRequest())


async def allocations(node: SimulatedNode) -> AllocationResult:
    """What the real decoders and the real allocation make of the node."""
    store = node.world.api.store
    everything = {
        kind: store.select(kind, lambda _: True)
        for kind in ("pods", "nodes", "resourceslices", "gpus")
    }
    decoded = tuple(decode_pod(pod) for pod in everything["pods"])
    read = reading(node)
    gpus = [decode_gpu(gpu, node.name) for gpu in everything["gpus"]]
    cards = inventory.cards(inventory.fold(inventory.Inventory(), read), read, Totals())
    return allocate(
        AllocationInputs(
            cards=cards or (),
            kubelet=await kubelet_list(node),
            kubelet_expected=True,
            pods=PodList(2e9, decoded),
            pods_expected=True,
            node=decode_node(everything["nodes"][0]),
            node_name=node.name,
            slices=decode_slices(everything["resourceslices"]),
            gpu_objects=tuple(gpu for gpu in gpus if gpu is not None),
        )
    )


async def test_every_pod_is_on_the_card_where_its_processes_are(node: SimulatedNode) -> None:
    result = await allocations(node)
    assert result.problems == ()
    assert result.conflicts == {}
    assert result.unassigned_pods == ()
    rows = [
        (row.gpu, row.mig, row.namespace, row.pod, row.scheme, row.core_percent)
        for row in result.allocations
    ]
    assert rows == [
        (0, None, "batch", "filler", "qgpu", None),
        (0, None, "chat", "chat-a", "qgpu", 30.0),
        (0, None, "chat", "chat-b", "qgpu", 50.0),
        (1, None, "batch", "flaky", "qgpu", 25.0),
        (2, None, "research", "notebook-0", "replicas", None),
        (2, None, "research", "notebook-1", "replicas", None),
        (3, None, "platform", "reserved-idle", "whole", 100.0),
        (4, "2", "research", "finetune", "mig", pytest.approx(300 / 7)),
        (4, "3", "research", "evaluate", "mig", pytest.approx(200 / 7)),
        (4, "9", "research", "rerank", "mig", pytest.approx(100 / 7)),
        (5, None, "research", "llm-train-0", "whole", 100.0),
        (6, None, "research", "llm-train-0", "whole", 100.0),
        (7, None, "platform", "speech", "dra", 100.0),
    ]
    held = {(row.gpu, row.pod): row.memory_bytes for row in result.allocations}
    assert held[0, "chat-a"] == 12 * GIB
    containers = {
        status["containerID"].rpartition("/")[2]: pod["metadata"]["name"]
        for pod in node.world.api.store.select("pods", lambda _: True)
        for status in pod["status"]["containerStatuses"]
    }
    by_pid = container_by_pid(node)
    used = {
        (process.gpu, containers[by_pid[process.pid]])
        for process in scenario(node).processes
        if process.pid in by_pid
    }
    assert used == {(gpu, pod) for gpu, pod in held if pod != "reserved-idle"}


async def test_one_process_belongs_to_no_pod(node: SimulatedNode) -> None:
    alone = [
        process.pid
        for process in scenario(node).processes
        if process.pid not in container_by_pid(node)
    ]
    (pid,) = alone
    folder = Path(node.procfs) / str(pid)
    names = cgroups.parse((folder / "cgroup").read_text())
    assert (names.owner_kind, names.owner) == ("systemd", "videowall.service")
    assert (folder / "comm").read_text() == "videowall\n"
    after_name = (folder / "stat").read_text().rpartition(")")[2].split()
    # Fields 3 to 52, of which the 22nd is the start time.
    assert len(after_name) == 50
    assert int(after_name[22 - 3]) > 0


async def test_readings_show_the_processes(node: SimulatedNode) -> None:
    read = reading(node)
    assert [card.identity.index for card in read.cards] == list(range(8))
    shown = {
        (card.identity.index, process.pid)
        for card in read.cards
        for process in card.processes or ()
    }
    assert shown == {(process.gpu, process.pid) for process in scenario(node).processes}


async def test_a_pods_devices_are_listed_before_it_runs(node: SimulatedNode, steps: Steps) -> None:
    steps.node, steps.pod = node, "batch/report-1"
    await node.world.create(nightly(1))
    assert steps.seen == [(0.2, "Pending", False, 0), (1.0, "Pending", True, 0)]
    assert await steps.look() == ("Running", True, 1)


async def test_an_init_containers_device_is_listed_under_the_main_one(
    node: SimulatedNode, steps: Steps
) -> None:
    pod = "research/llm-train-0"
    workload = node.world.workload(pod)
    await node.world.delete(pod)
    steps.node, steps.pod = node, pod
    await node.world.create(workload)
    assert [step[:3] for step in steps.seen] == [
        (0.2, "Pending", False),
        (3.0, "Pending", True),
        (1.0, "Pending", True),
    ]
    answer = await kubelet_list(node)
    assert answer is not None
    listed = [
        (row.container, set(row.devices["nvidia.com/gpu"]))
        for row in answer.containers
        if row.pod == "llm-train-0"
    ]
    assert listed == [("train", {card_uuid(5), card_uuid(6)})]


async def test_a_finished_pod_is_gone_from_the_kubelet_and_stays_in_the_api(
    node: SimulatedNode, steps: Steps
) -> None:
    steps.node, steps.pod = node, "chat/chat-a"
    node.world.finish("chat/chat-a")
    assert await steps.look() == ("Succeeded", False, 0)
    await node.world.delete("chat/chat-a")
    assert steps.seen == []
    assert await steps.look() == ("gone", False, 0)


async def test_a_deleted_pods_devices_are_gone_before_the_api_says_so(
    node: SimulatedNode, steps: Steps
) -> None:
    steps.node, steps.pod = node, "chat/chat-b"
    await node.world.delete("chat/chat-b", grace_seconds=6.0)
    assert steps.seen == [
        (6.0, "Running, terminating", True, 1),
        (0.3, "Running, terminating", False, 0),
        (0.2, "Failed, terminating", False, 0),
    ]
    assert await steps.look() == ("gone", False, 0)


async def test_a_crashing_pod_keeps_its_devices_and_comes_back_as_another_container(
    node: SimulatedNode, steps: Steps
) -> None:
    steps.node, steps.pod = node, "batch/flaky"

    def status() -> dict[str, Any]:
        shown = node.world.api.store.get("pods", "batch/flaky")
        assert shown is not None
        return dict(shown["status"]["containerStatuses"][0])

    before = status()
    await node.world.crash("batch/flaky", back_off_seconds=8.0)
    assert steps.seen == [(0.3, "Running", True, 0), (8.0, "Running", True, 0)]
    assert await steps.look() == ("Running", True, 1)
    after = status()
    assert after["containerID"] != before["containerID"]
    assert (before["restartCount"], after["restartCount"]) == (0, 1)


async def test_what_is_taken_or_unknown_is_refused(node: SimulatedNode) -> None:
    world = node.world
    with pytest.raises(Refused, match="already"):
        await world.create(world.workload("chat/chat-a"))
    with pytest.raises(Refused, match="qgpu-core: 190 asked for, 95 free"):
        await world.create(qgpu_pod("lab", "much", [0, 1], core=190, memory=1))
    with pytest.raises(NoSuchPod):
        await world.delete("lab/much")
    assert not world.exists("lab/much")


async def test_a_pod_that_is_deleted_while_it_comes_up_does_not_come_up() -> None:
    halted = asyncio.Event()
    waiting = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds == 1.0:
            waiting.set()
            await halted.wait()

    async with asyncio.timeout(HANG_SECONDS), SimulatedNode(schedule=False, sleep=sleep) as node:
        creating = asyncio.create_task(node.world.create(nightly(1)))
        await waiting.wait()
        await node.world.delete("batch/report-1", grace_seconds=0.0)
        halted.set()
        with pytest.raises(NoSuchPod, match="deleted meanwhile"):
            await creating
        assert not node.world.exists("batch/report-1")
        assert node.world.api.store.get("pods", "batch/report-1") is None


async def test_the_schedule_lets_pods_come_and_go() -> None:
    phases: list[str] = []
    turns = asyncio.Event()
    node: SimulatedNode | None = None

    async def sleep(_: float) -> None:
        await asyncio.sleep(0)
        shown = node.world.api.store.get("pods", "batch/report-2") if node else None
        phase = "gone" if shown is None else str(shown["status"]["phase"])
        if not phases or phases[-1] != phase:
            phases.append(phase)
        if phases == ["gone", "Pending", "Running", "Succeeded", "gone"]:
            turns.set()

    async with asyncio.timeout(HANG_SECONDS), SimulatedNode(sleep=sleep) as made:
        node = made
        await turns.wait()
        crashed = node.world.api.store.get("pods", "batch/flaky")
        assert crashed is not None
        assert crashed["status"]["containerStatuses"][0]["restartCount"] > 0


async def test_the_kubeconfig_leads_to_the_api_server(node: SimulatedNode) -> None:
    connection = Connection(node.kubeconfig)
    body = await connection.get("/api/v1/pods", {"fieldSelector": f"spec.nodeName={node.name}"})
    await connection.close()
    assert len(msgspec.json.decode(body)["items"]) == 12


async def post(node: SimulatedNode, action: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{node.control_url}/{action}") as answer,
    ):
        return answer.status, await answer.text()


async def test_pods_can_be_added_and_deleted_from_outside(node: SimulatedNode) -> None:
    assert await post(node, "add-pod?pod=mine&gpu=1&core=20&memory=6") == (200, "done\n")
    (row,) = [row for row in (await allocations(node)).allocations if row.pod == "mine"]
    assert (row.namespace, row.gpu, row.core_percent, row.memory_bytes) == (
        "demo",
        1,
        20.0,
        6 * GIB,
    )
    assert await post(node, "finish-pod?pod=mine") == (200, "done\n")
    assert await post(node, "delete-pod?pod=mine&grace=0") == (200, "done\n")
    assert not node.world.exists("demo/mine")
    assert await post(node, "delete-pod?pod=reserved-idle&namespace=platform") == (200, "done\n")
    assert await post(node, "add-pod?pod=whole&gpu=3&namespace=lab") == (200, "done\n")
    (row,) = [row for row in (await allocations(node)).allocations if row.gpu == 3]
    assert (row.namespace, row.pod, row.scheme) == ("lab", "whole", "whole")


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("delete-pod?pod=never", 404, "there is no pod demo/never"),
        ("add-pod?gpu=0", 400, "pod= is missing"),
        ("add-pod?pod=x", 400, "gpu= is missing or no number"),
        ("add-pod?pod=x&gpu=4", 400, "is one of (0, 1)"),
        ("add-pod?pod=x&gpu=0&core=-1", 400, "core= is missing or no number"),
        ("add-pod?pod=x&gpu=5", 409, "is taken"),
        ("add-pod?pod=x&gpu=0&memory=99", 409, "qgpu-memory: 99 asked for"),
        ("lose-card?gpu=8", 400, "the cards are 0 to 7"),
        ("xid?gpu=1", 400, "xid= is missing"),
        ("xid?gpu=9&xid=1", 400, "the cards are 0 to 7"),
        ("api/start", 409, "the API server runs"),
    ],
)
async def test_a_wrong_request_is_answered_in_words(
    node: SimulatedNode, action: str, status: int, words: str
) -> None:
    answered, text = await post(node, action)
    assert answered == status
    assert words in text


async def test_cards_and_driver_can_fail_from_outside(node: SimulatedNode) -> None:
    await post(node, "lose-card?gpu=3")
    await post(node, "hang-card?gpu=5&seconds=30")
    await post(node, "xid?gpu=1&xid=31")
    read = reading(node)
    assert [(failure.index, failure.reason) for failure in read.failures] == [
        (3, "lost"),
        (5, "timeout"),
    ]
    assert [(event.uuid, event.xid) for event in read.events] == [
        (card_uuid(3), 79),
        (card_uuid(1), 31),
    ]
    await post(node, "driver?reason=driver_not_loaded")
    error = reading(node).error
    assert error is not None
    assert error.reason == "driver_not_loaded"
    await post(node, "recover")
    assert len(reading(node).cards) == 8


async def test_servers_can_be_stopped_and_started_from_outside(node: SimulatedNode) -> None:
    connection = Connection(node.kubeconfig)
    assert await post(node, "api/stop") == (200, "done\n")
    assert await post(node, "kubelet/stop") == (200, "done\n")
    assert await kubelet_list(node) is None
    assert await post(node, "api/start") == (200, "done\n")
    assert await post(node, "kubelet/start") == (200, "done\n")
    await connection.get("/api/v1/pods", {})
    await connection.close()
    # As after every restart, it first knows nothing.
    assert pods(await kubelet_list(node)) == []
    node.world.kubelet.load_checkpoint()
    assert len(pods(await kubelet_list(node)) or ()) == 12
    assert await post(node, "kubelet/restart") == (200, "done\n")


def existing(paths: list[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


async def test_it_tells_what_can_be_done_and_leaves_nothing_behind() -> None:
    async with SimulatedNode(schedule=False) as node:
        paths = [node.socket, node.kubeconfig, node.procfs, node.simulation]
        assert existing(paths) == paths
        async with aiohttp.ClientSession() as session, session.get(node.control_url) as answer:
            assert "POST /lose-card" in await answer.text()
    assert existing(paths) == []


async def test_its_guide_names_every_address(node: SimulatedNode) -> None:
    guide = node.guide((None, 5678))
    assert "http://127.0.0.1:5678/metrics" in guide
    assert f"curl -X POST '{node.control_url}/lose-card?gpu=3'" in guide
    for path in (node.socket, node.kubeconfig, node.procfs, node.simulation):
        assert path in guide
    assert 'node_gpu_core_usage{pod="reserved-idle"}' in guide
    assert "http://[::1]:9/metrics" in node.guide(("::1", 9))
