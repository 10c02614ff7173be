"""Wiring: builds the parts from the settings, starts and stops them in order."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from qgpu_exporter import __version__, config, xids
from qgpu_exporter.exposition import Exposition, ProcessFamilies
from qgpu_exporter.metrics import dcgm, dcgm_collectors, native, service, tke
from qgpu_exporter.metrics.family import Family
from qgpu_exporter.model import Snapshot, Status
from qgpu_exporter.poller import Poller, PollerSettings, Sources
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

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0
"""How long the poller's tasks may take to end."""


class App:
    """One exporter: its sources, its poller and what it says of itself.

    It is the web layer's view; `running` runs it.
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
    try:
        text = config.read_text(path)
    except config.ConfigError as error:
        raise config.ConfigError(f"--dcgm.collectors: {error}") from None
    wanted = dcgm_collectors.parse_collectors(text)
    for row in wanted.bad_rows:
        raise config.ConfigError(f"--dcgm.collectors: {path}:{row.line}: {row.reason}")
    if wanted.unserved:
        log.warning("--dcgm.collectors: NVML cannot serve %s", ", ".join(wanted.unserved))
    return dcgm.dcgm_families(wanted.fields, wanted.labels, settings.dcgm_hostname_label)


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
