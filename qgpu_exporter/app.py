"""Wiring: builds the parts from the settings, starts and stops them in order, for each command."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, get_args

from qgpu_exporter import __version__, config, xids
from qgpu_exporter.exposition import Exposition, ProcessFamilies
from qgpu_exporter.metrics import dcgm, dcgm_collectors, native, service, tke
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.model import Snapshot, SourceHealth, SourceName, Status
from qgpu_exporter.poller import DriverUnusable, Poller, PollerSettings, Sources
from qgpu_exporter.sources import podresources
from qgpu_exporter.sources.devices import Devices
from qgpu_exporter.sources.kmsg import KernelLog
from qgpu_exporter.sources.kubernetes import client
from qgpu_exporter.sources.kubernetes.gpus import GpuObjects
from qgpu_exporter.sources.kubernetes.node import NodeObject
from qgpu_exporter.sources.kubernetes.pods import Pods
from qgpu_exporter.sources.kubernetes.slices import ResourceSlices
from qgpu_exporter.sources.processes import Processes
from qgpu_exporter.sources.stack import Stack
from qgpu_exporter.web import server
from qgpu_exporter.web.web_config import WebConfigError
from qgpu_exporter.web.web_config_file import read_web_config, web_config_notes

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0
"""How long the poller's tasks may take to end."""
RELEASE_SECONDS = 60.0
"""How long SIGUSR1 lets go of the driver."""
FIRST_ANSWERS_GRACE_SECONDS = 35.0
"""How long `once` and `check` wait for the sources beyond `--devices.timeout`."""


class App:
    """One exporter: its sources, its poller and what it says of itself.

    It is the web layer's view; `build` makes it, `running` runs it.
    """

    def __init__(self, settings: config.Settings, environment: Mapping[str, str]) -> None:
        self.settings = settings
        self.node, name_is_guessed = config.resolve_node_name(settings, environment)
        if name_is_guessed and environment.get("KUBERNETES_SERVICE_HOST"):
            log.warning(
                "NODE_NAME is not set: series carry the host name %s, which is the pod's in most "
                "clusters; set it from spec.nodeName",
                self.node,
            )
        self.exposition = Exposition(
            families(settings),
            service.SERVICE,
            ProcessFamilies(),
        )
        self.counts = {"ok": 0, "rejected": 0}
        self._started_timestamp_seconds = time.time()
        self._connection = _connection(settings, environment)
        self.poller = Poller(
            poller_settings(settings, self.node),
            self._sources(),
            clock=time.monotonic,
            wall_clock=time.time,
        )

    # ------------------------------------------------------------------ the web layer's view

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot to serve."""
        return self.poller.snapshot

    def not_ready(self) -> str | None:
        """Why not, in one line."""
        return self.poller.not_ready()

    def status(self) -> Status:
        """The service about itself, now."""
        poller = self.poller
        return Status(
            version=__version__,
            revision=os.environ.get("QGPU_EXPORTER_REVISION", ""),
            python_version=platform.python_version(),
            started_timestamp_seconds=self._started_timestamp_seconds,
            sources=poller.sources.health(),
            reader=poller.sources.devices.reader_health,
            snapshot_timestamp_seconds=poller.snapshot_timestamp_seconds,
            snapshot_stale=poller.stale,
            join_duration_seconds=poller.join_duration_seconds,
            join_failures=poller.join_failures,
            scrapes=dict(self.counts),
            dropped_series=dict(self.exposition.dropped.counts),
            problems=poller.problems(),
            nvml_calls=poller.nvml_calls,
            index_changes=poller.index_changes,
        )

    def count_scrape(self, outcome: str) -> None:
        """Note a scrape: ``ok`` or ``rejected``."""
        self.counts[outcome] += 1

    # ------------------------------------------------------------------ running

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the poller inside; the value is its task, which ends only by an error."""
        task = asyncio.create_task(self.poller.run())
        try:
            yield task
        finally:
            task.cancel()
            # Bounded, so that the reader is ended whatever becomes of the tasks.
            await asyncio.wait([task], timeout=STOP_SECONDS)
            sources = self.poller.sources
            await sources.devices.stop()
            if sources.podresources is not None:
                await sources.podresources.close()
            if self._connection is not None:
                await self._connection.close()

    def _sources(self) -> Sources:
        settings = self.settings
        sources = Sources(
            devices=Devices(
                command=reader_command(settings),
                timeout_seconds=settings.devices_timeout,
                max_memory_bytes=settings.devices_max_memory,
                clock=time.monotonic,
                wall_clock=time.time,
            ),
            processes=Processes(
                procfs=settings.path_procfs, clock=time.monotonic, wall_clock=time.time
            ),
        )
        if podresources.present(settings.kubelet_socket):
            sources.podresources = podresources.PodResources(
                socket=settings.kubelet_socket,
                max_age_seconds=settings.kubelet_max_age,
                clock=time.monotonic,
                wall_clock=time.time,
            )
        if settings.devices_kmsg:
            sources.kernel_log = KernelLog(settings.path_kmsg, wall_clock=time.time)
        stack = Stack(
            validations=settings.path_validations,
            cdi=settings.path_cdi,
            procfs=settings.path_procfs,
            sysfs=settings.path_sysfs,
            wall_clock=time.time,
        )
        if stack.present():
            sources.stack = stack
        connection = self._connection
        if connection is not None:
            keep = settings.kubernetes_pod_labels
            sources.pods = Pods(
                connection, self.node, keep_labels=keep, clock=time.monotonic, wall_clock=time.time
            )
            sources.node = NodeObject(connection, self.node, wall_clock=time.time)
            if settings.kubernetes_dra == "auto":
                sources.slices = ResourceSlices(connection, self.node, wall_clock=time.time)
            if settings.kubernetes_gpu_objects:
                sources.gpu_objects = GpuObjects(connection, self.node, wall_clock=time.time)
        return sources


def reader_command(settings: config.Settings) -> list[str]:
    """The command line of the reader process."""
    command = [sys.executable, "-m", "qgpu_exporter.reader"]
    command += ["--backend", settings.devices_backend]
    command += ["--timeout", str(settings.devices_timeout), "--parent", str(os.getpid())]
    if settings.devices_persistence_mode:
        command.append("--persistence-mode")
    if not settings.devices_gpm:
        command.append("--no-gpm")
    if settings.devices_simulation:
        command += ["--simulation", settings.devices_simulation]
    return command


def families(settings: config.Settings) -> tuple[Family[Snapshot, Any], ...]:
    """The device families of the chosen dialects; raises `ConfigError` for a bad counters file."""
    chosen: list[Family[Snapshot, Any]] = []
    if "native" in settings.metrics_dialects:
        chosen.extend(native.NATIVE)
    if "dcgm" in settings.metrics_dialects:
        chosen.extend(_dcgm_families(settings))
    if "tke" in settings.metrics_dialects:
        chosen.extend(tke.tke_families(request_unit=settings.tke_request_unit))
    return tuple(chosen)


def _dcgm_families(settings: config.Settings) -> tuple[Family[Snapshot, Any], ...]:
    path = settings.dcgm_collectors
    if not path:
        return dcgm.dcgm_families(hostname_label=settings.dcgm_hostname_label)
    wanted = dcgm_collectors.parse_collectors(_read_text(path, "--dcgm.collectors"))
    for row in wanted.bad_rows:
        raise config.ConfigError(f"--dcgm.collectors: {path}:{row.line}: {row.reason}")
    if wanted.unserved:
        log.warning("--dcgm.collectors: NVML cannot serve %s", ", ".join(wanted.unserved))
    return dcgm.dcgm_families(wanted.fields, wanted.labels, settings.dcgm_hostname_label)


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise config.ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise config.ConfigError(f"{flag}: {path} is not UTF-8 text") from None


def _connection(
    settings: config.Settings, environment: Mapping[str, str]
) -> client.Connection | None:
    """The way to the API server, or None where pods are off or nothing says where it is."""
    where = settings.kubernetes_kubeconfig
    wanted = settings.kubernetes_pods
    if wanted == "off" or (wanted == "auto" and not client.present(where, environment)):
        return None
    return client.Connection(where, environment=environment)


def poller_settings(settings: config.Settings, node: str) -> PollerSettings:
    """What the poller needs of the settings; raises `ConfigError` for bad XID classes."""
    try:
        classes = xids.load(settings.devices_xid_classes or None)
    except xids.ClassesError as error:
        raise config.ConfigError(f"--devices.xid-classes: {error}") from None
    return PollerSettings(
        node=node,
        interval_seconds=settings.interval,
        timeout_seconds=settings.devices_timeout,
        kubelet_max_age_seconds=settings.kubelet_max_age,
        exit_after_seconds=settings.devices_exit_after,
        release_labels=settings.kubernetes_release_labels,
        gpushare_memory_unit=settings.allocation_gpushare_memory_unit,
        volcano_memory_factor=settings.allocation_volcano_memory_factor,
        xid_classes=classes,
        xid_codes=xids.alerting(classes),
        pod_labels_exported=settings.kubernetes_pod_labels is not None,
    )


# --------------------------------------------------------------------------- commands


async def serve(settings: config.Settings, environment: Mapping[str, str]) -> int:
    """Serve until SIGTERM or SIGINT; 1 where the driver needs a new container."""
    app = App(settings, environment)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    releases: set[asyncio.Task[None]] = set()

    def release() -> None:
        task = loop.create_task(app.poller.release(RELEASE_SECONDS, "SIGUSR1 was received"))
        releases.add(task)
        task.add_done_callback(releases.discard)

    loop.add_signal_handler(signal.SIGUSR1, release)
    async with (
        server.serving(app, server.WebSettings.of(settings)) as addresses,
        app.running() as polling,
    ):
        log.info("qgpu-exporter %s serves node %s on %s", __version__, app.node, addresses)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([polling, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if polling.done():
            return _ended(polling)
    log.info("ended by a signal")
    return 0


def _ended(polling: asyncio.Task[None]) -> int:
    """1, after saying why the poller ended; raises what nobody expected."""
    error = polling.exception()
    if isinstance(error, ExceptionGroup):
        unusable, others = error.split(DriverUnusable)
        if unusable is not None and others is None:
            log.error("exits so that the container is made anew: %s", unusable.exceptions[0])
            return 1
    if error is not None:
        raise error
    return 1


async def once(
    settings: config.Settings, environment: Mapping[str, str], output: str | None
) -> bool:
    """Print one scrape, or write it to `output`; False, and nothing written, if no source answered.

    The `process_*` families are left out: where node_exporter reads the file, they are its own.
    """
    app = App(settings, environment)
    async with app.running() as polling:
        await _first_answers(app, polling)
        snapshot, status = app.snapshot, app.status()
    # Processes are only ever asked about those that the driver names.
    telling = [health for health in status.sources if health.source != "processes"]
    if snapshot is None or not any(health.up for health in telling):
        for health in telling:
            log.error("no scrape: source %s: %s", health.source, health.detail or "no answer")
        return False
    text = Exposition(families(settings), service.SERVICE).page(snapshot, status)
    if output is None:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        try:
            await asyncio.to_thread(_write_atomically, Path(output), text)
        except OSError as error:
            log.error("no scrape: %s cannot be written: %s", output, error.strerror)
            return False
    return True


async def check(settings: config.Settings, environment: Mapping[str, str], stream: TextIO) -> bool:
    """Say of each source, a line each, whether it works and how to mend it; False if one fails."""
    servable = _check_web_config(settings.web_config_file, stream)
    app = App(settings, environment)
    async with app.running() as polling:
        await _first_answers(app, polling)
        snapshot, sources = app.snapshot, app.poller.sources.health()
    found = {health.source: health for health in sources}
    for name in get_args(SourceName):
        print(f"{name}: {_verdict(found.get(name), name, snapshot)}", file=stream)
    if "dcgm" in settings.metrics_dialects:
        print(
            "note: the dcgm dialect is on; where dcgm-exporter is scraped too, each sum doubles: "
            "switch one off, then the other on",
            file=stream,
        )
    return servable and all(health.up for health in sources)


def _check_web_config(path: str, stream: TextIO) -> bool:
    """Say whether the web configuration file can be used, and what in it is not honoured."""
    if not path:
        return True
    try:
        found = read_web_config(path)
    except WebConfigError as error:
        print(f"web.config.file: FAIL: {error}", file=stream)
        return False
    print("web.config.file: ok", file=stream)
    for note in web_config_notes(found):
        print(f"note: {note}", file=stream)
    return True


def _verdict(health: SourceHealth | None, name: str, snapshot: Snapshot | None) -> str:
    if health is None:
        return "off"
    if not health.up:
        return f"FAIL: {health.detail or 'no answer yet'}"
    if name == "nvml" and snapshot is not None and snapshot.cards is not None:
        down = [str(card.identity.index) for card in snapshot.cards if card.down_reason]
        lost = f", down: {', '.join(down)}" if down else ""
        return f"ok: {len(snapshot.cards)} cards, driver {snapshot.driver_version}{lost}"
    if name == "kubernetes" and snapshot is not None and snapshot.pods is not None:
        return f"ok: {len(snapshot.pods.pods)} pods"
    return "ok"


async def _first_answers(app: App, polling: asyncio.Task[None]) -> None:
    """Wait until each source has answered or failed once, at most a bounded time."""
    deadline = time.monotonic() + app.settings.devices_timeout + FIRST_ANSWERS_GRACE_SECONDS
    while app.not_ready() is not None and time.monotonic() < deadline:
        done, _ = await asyncio.wait([polling], timeout=0.05)
        if done:
            await polling


def _write_atomically(path: Path, text: bytes) -> None:
    """Put `text` in place of the file at once, readable for all as node_exporter needs it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


async def demo(
    settings: config.Settings, flags: Mapping[str, Sequence[str]], stream: TextIO
) -> int:
    """Serve a simulated node; the listen address is loopback unless one is given."""
    from qgpu_exporter.demo import SimulatedNode

    # The default is every interface, which is no address for a world that anybody may change.
    given = (
        "web.listen-address" in flags
        or settings.web_listen_address != config.Settings().web_listen_address
    )
    async with SimulatedNode() as node:
        made = replace(
            settings,
            web_listen_address=settings.web_listen_address if given else (("127.0.0.1", 5678),),
            node_name=settings.node_name or node.name,
            devices_backend="simulated",
            devices_simulation=node.simulation,
            kubelet_socket=node.socket,
            kubernetes_pods="apiserver",
            kubernetes_kubeconfig=node.kubeconfig,
            path_procfs=node.procfs,
        )
        print(node.guide(made.web_listen_address[0]), file=stream, flush=True)
        return await serve(made, {})
