"""The commands: serve, once, check and demo, each over one wired exporter."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO, get_args

from qgpu_exporter import __version__, config
from qgpu_exporter.app import App, families
from qgpu_exporter.exposition import Exposition
from qgpu_exporter.metrics import service
from qgpu_exporter.model import Snapshot, SourceHealth, SourceName
from qgpu_exporter.poller import DriverUnusable
from qgpu_exporter.web import server
from qgpu_exporter.web.web_config import WebConfigError
from qgpu_exporter.web.web_config_file import read_web_config, web_config_notes

log = logging.getLogger(__name__)

RELEASE_SECONDS = 60.0
"""How long SIGUSR1 lets go of the driver."""
FIRST_ANSWERS_GRACE_SECONDS = 35.0
"""How long `once` and `check` wait for the sources beyond `--devices.timeout`."""


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
