"""The real command started against real far ends, scraped over HTTP; always ended with its node."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from qgpu_exporter.demo.apiserver import ApiServer
from qgpu_exporter.demo.kubelet import FakeKubelet, ListedContainer
from qgpu_exporter.demo.procfs import FakeProcfs
from qgpu_exporter.demo.workloads import GPU, QGPU_CARD, QGPU_CORE, QGPU_MEMORY

NODE = "gpu-node-a"
GUARD_SECONDS = 60.0
"""Only against a hang: no verdict is how long something took."""
GIB = 1 << 30
PAUSE_SECONDS = 0.15
AS_INSTALLED = str(Path(__file__).with_name("as_installed"))
_UNSET = (
    "GRPC_VERBOSITY",
    "KUBECONFIG",
    "KUBERNETES_SERVICE_HOST",
    "LD_LIBRARY_PATH",
    "NODE_NAME",
)
"""A test says itself what of these there is."""


class Page:
    """One scrape: its samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: list[Sample] = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def rows(self, name: str, **labels: str) -> list[Sample]:
        """The samples of this name that have these labels and maybe others."""
        wanted = labels.items()
        return [one for one in self.samples if one.name == name and wanted <= one.labels.items()]

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample's value, None where there is none."""
        rows = self.rows(name, **labels)
        assert len(rows) <= 1, rows
        return rows[0].value if rows else None

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Values of a family by one of its labels."""
        return {one.labels[label]: one.value for one in self.rows(name, **labels)}

    def up(self, source: str) -> float | None:
        """Whether a source is up, as the page says."""
        return self.value("qgpu_exporter_source_up", source=source)


class Service:
    """A running `qgpu-exporter` and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self._session = session
        self.url = ""
        self.lines: list[str] = []
        self.listening = asyncio.Event()

    async def follow(self) -> None:
        """Keep its log until it ends."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"serves node \S+ on (http://[\d.:]+)/", line):
                self.url = found[1]
                self.listening.set()
        self.listening.set()

    def complaints(self) -> list[str]:
        """Its log lines at warning or above, without their time.

        Timeouts are left out: a machine that stops for seconds is no fault of the service.
        """
        return [
            line.partition(" ")[2]
            for line in self.lines
            if " level=info " not in line and " failed (timeout): " not in line
        ]

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of one answer."""
        async with (
            asyncio.timeout(GUARD_SECONDS),
            self._session.get(f"{self.url}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def page(self) -> Page:
        """One scrape, which is answered with 200 whatever the state of the node."""
        status, text = await self.get("/metrics")
        assert status == 200, "\n".join((text, *self.lines))
        return Page(text)

    async def until(self, wanted: Callable[[Page], bool]) -> Page:
        """The first page that is as wanted."""
        text = ""
        try:
            async with asyncio.timeout(GUARD_SECONDS):
                while not wanted(page := await self.page()):
                    text = page.text
                    await asyncio.sleep(PAUSE_SECONDS)
                return page
        except TimeoutError:
            print(*self.lines, text, sep="\n", file=sys.stderr)
            raise

    async def ready(self) -> None:
        """Wait for the first answer or failure of every source."""
        async with asyncio.timeout(GUARD_SECONDS):
            while (await self.get("/-/ready"))[0] != 200:  # noqa: ASYNC110 - as a kubelet asks
                await asyncio.sleep(PAUSE_SECONDS)

    def children(self) -> list[int]:
        """Pids of its children that have not been reaped, zombies too."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    async def reader(self, other_than: int = 0) -> int:
        """The pid of its reader, waited for."""
        async with asyncio.timeout(GUARD_SECONDS):
            while not (found := [pid for pid in self.children() if pid != other_than]):  # noqa: ASYNC110 - the kernel tells nobody
                await asyncio.sleep(0.02)
        (pid,) = found
        return pid

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        async with asyncio.timeout(GUARD_SECONDS):
            return await self.process.wait()


def alive(pid: int) -> bool:
    """Whether there is such a process, zombies too."""
    return Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def running(
    *words: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Service]:
    """The command, from when it listens on a port of its own on loopback.

    At the end a signal must end it in order, with its reader, and without an unexpected error.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "qgpu_exporter", *words, "--web.listen-address=127.0.0.1:0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**inherited, "PYTHONPATH": AS_INSTALLED, **(environment or {})},
    )
    session = aiohttp.ClientSession()
    service = Service(process, session)
    following = asyncio.create_task(service.follow())
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await service.listening.wait()
        assert service.url, "\n".join(service.lines)
        yield service
        if process.returncode is None:
            left = service.children()
            process.terminate()
            assert await service.ended() == 0
            assert not [pid for pid in left if alive(pid)]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await session.close()
        await following
    assert not [line for line in service.lines if "Traceback" in line]
    # No library writes lines of a form of its own.
    assert not [line for line in service.lines if not line.startswith("ts=")]


# ------------------------------------------------------------------ the far ends


def pod(
    name: str,
    annotations: Mapping[str, str],
    limits: Mapping[str, str],
    *,
    uid: str = "",
    container_id: str = "",
) -> dict[str, Any]:
    """A running pod of namespace `demo` with the container `c`."""
    status: dict[str, Any] = {"name": "c", "state": {"running": {}}}
    if container_id:
        status["containerID"] = f"containerd://{container_id}"
    return {
        "metadata": {
            "namespace": "demo",
            "name": name,
            "uid": uid or f"{name}-uid",
            "annotations": dict(annotations),
        },
        "spec": {
            "nodeName": NODE,
            "containers": [{"name": "c", "resources": {"limits": dict(limits)}}],
        },
        "status": {"phase": "Running", "containerStatuses": [status]},
    }


@dataclass
class Cluster:
    """The kubelet and the API server of the node, made up; cards are not its business."""

    kubelet: FakeKubelet
    api: ApiServer
    kubeconfig: Path
    procfs: str

    def flags(self) -> list[str]:
        """What points the command here."""
        return [
            f"--node-name={NODE}",
            f"--kubelet.socket={self.kubelet.socket}",
            "--kubernetes.pods=apiserver",
            f"--kubernetes.kubeconfig={self.kubeconfig}",
            f"--path.procfs={self.procfs}",
            "--path.validations=",
            "--path.cdi=",
        ]

    def label(self, labels: Mapping[str, str | None]) -> None:
        """Change the node's labels; None takes one away."""
        self.api.patch("nodes", f"/{NODE}", {"metadata": {"labels": dict(labels)}})

    def share(self, name: str, gpu: int, *, core: int, memory: int, **known: str) -> None:
        """A pod with a qGPU share: percent of a card, and GiB."""
        limits = {QGPU_CORE: str(core), QGPU_MEMORY: str(memory)}
        self.api.put("pods", pod(name, {f"{QGPU_CARD}c": str(gpu)}, limits, **known))
        units = {
            QGPU_CORE: [f"{name}-{number}" for number in range(core)],
            QGPU_MEMORY: [f"{name}-{number}" for number in range(memory)],
        }
        self.kubelet.admit("demo", name, [ListedContainer("c", units)])

    def whole(self, name: str, devices: Sequence[str], resource: str = GPU, **known: str) -> None:
        """A pod with cards or slices, by their UUIDs."""
        self.api.put("pods", pod(name, {}, {resource: str(len(devices))}, **known))
        self.kubelet.admit("demo", name, [ListedContainer("c", {resource: tuple(devices)})])

    def delete(self, name: str) -> None:
        """The pod is gone, at the kubelet and in the API."""
        self.kubelet.forget("demo", name)
        self.api.delete("pods", f"demo/{name}")


@asynccontextmanager
async def cluster(folder: Path, procfs: str = "") -> AsyncIterator[Cluster]:
    """A kubelet and an API server that know of no pod yet; files go below `folder`.

    `procfs` shows the node's processes; where it is empty, a made-up one shows none of interest.
    """
    sockets = folder / "kubelet"  # short: a socket's path has at most 107 bytes
    sockets.mkdir()
    made = Cluster(
        FakeKubelet(str(sockets / "kubelet.sock")),
        ApiServer(),
        folder / "kubeconfig",
        procfs or str(FakeProcfs(folder / "proc").path),
    )
    amounts = {QGPU_CORE: "200", QGPU_MEMORY: "30"}
    labels = {"tke.cloud.tencent.com/qgpu.memory-unit": "1G"}
    made.api.put(
        "nodes",
        {
            "metadata": {"name": NODE, "labels": labels},
            "spec": {},
            "status": {"capacity": amounts, "allocatable": amounts},
        },
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.kubelet.stop)
        await made.kubelet.start()
        stack.push_async_callback(made.api.stop)
        await made.api.start()
        made.api.write_kubeconfig(made.kubeconfig)
        yield made
