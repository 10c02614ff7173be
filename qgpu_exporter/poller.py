"""Moves everything: one task reads the cards, one joins the latest; nothing else decides when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from qgpu_exporter import inventory, totals
from qgpu_exporter.allocation import MemoryUnit
from qgpu_exporter.allocation.lifecycle import is_alive
from qgpu_exporter.model import (
    CgroupNames,
    Problem,
    Reading,
    Snapshot,
    SourceHealth,
    Totals,
)
from qgpu_exporter.release import release_reason
from qgpu_exporter.snapshot import JoinInputs, join
from qgpu_exporter.sources.devices import Devices
from qgpu_exporter.sources.kmsg import KernelLog
from qgpu_exporter.sources.kubernetes.gpus import GpuObjects
from qgpu_exporter.sources.kubernetes.node import NodeObject
from qgpu_exporter.sources.kubernetes.pods import Pods
from qgpu_exporter.sources.kubernetes.slices import ResourceSlices
from qgpu_exporter.sources.podresources import PodResources
from qgpu_exporter.sources.processes import Processes
from qgpu_exporter.sources.stack import Stack
from qgpu_exporter.usage import fold_core_seconds

log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.1
HEARTBEAT_SECONDS = 5.0
"""How often the latest values are joined when nothing changes, so that their ages take effect."""
FIRST_HEARTBEAT_SECONDS = 0.5
"""The same until every source has had its first outcome: a failure is no change."""
FIRST_PODS_SECONDS = 30.0
"""After this long without a first pod list, rows that the kubelet alone proves are shown."""
MIN_STALE_SECONDS = 30.0
KUBELET_SECONDS = 5.0
"""How often the kubelet is asked at least where pod events tell of what is new."""
KUBELET_ALONE_SECONDS = 1.0
"""How often it is asked where nothing else tells; a List costs about a millisecond."""
KUBELET_AFTER_EVENT_SECONDS = (0.2, 0.3, 0.5, 1.0)
"""Pauses before the questions after a pod event; the last repeats while a pod waits, so that an
allocation is seen within 1 s of being listed."""
KUBELET_PATIENCE_SECONDS = 60.0
"""A pod that waits longer than this for its device is not asked for each second any more."""
STACK_SECONDS = 60.0
MAX_LOGGED_PROBLEMS = 10_000


class DriverUnusable(Exception):
    """The driver has been unusable for longer than `--devices.exit-after`."""


class _Running(Protocol):
    async def run(self, changed: Callable[[], None]) -> None: ...


@dataclass(slots=True)
class Sources:
    """The sources that are on; None: switched off."""

    devices: Devices
    podresources: PodResources | None = None
    pods: Pods | None = None
    node: NodeObject | None = None
    slices: ResourceSlices | None = None
    gpu_objects: GpuObjects | None = None
    processes: Processes | None = None
    kernel_log: KernelLog | None = None
    stack: Stack | None = None

    def health(self) -> tuple[SourceHealth, ...]:
        """The health of each source that is on, in a fixed order."""
        parts = (
            self.devices,
            self.podresources,
            self.pods,
            self.node,
            self.slices,
            self.gpu_objects,
            self.processes,
            self.kernel_log,
            self.stack,
        )
        found = (part.health for part in parts if part is not None)
        return tuple(health for health in found if health is not None)


@dataclass(frozen=True, slots=True)
class PollerSettings:
    """What the poller needs of the settings; durations in seconds."""

    node: str
    interval_seconds: float
    timeout_seconds: float
    kubelet_max_age_seconds: float = 60.0
    exit_after_seconds: float | None = None
    release_labels: tuple[str, ...] = ()
    gpushare_memory_unit: MemoryUnit = "auto"
    volcano_memory_factor: int = 1
    xid_classes: Mapping[int, str] = field(default_factory=dict)
    xid_codes: frozenset[int] = frozenset()
    pod_labels_exported: bool = False


class Poller:
    """Holds the latest of everything and the present snapshot; `run` keeps them current.

    `clock` is monotonic, `wall_clock` Unix time; both in seconds.
    """

    def __init__(
        self,
        settings: PollerSettings,
        sources: Sources,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.sources = sources
        self.join_duration_seconds: float | None = None
        self.join_failures = 0
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = clock()
        self._snapshot: Snapshot | None = None
        self._joined_at = clock()
        self._all_answered = False
        self._changed = asyncio.Event()
        self._pods_changed = asyncio.Event()
        self._kubelet_asked_with_pods = False
        self._reading: Reading | None = None
        self._read_at = clock()
        self._totals = Totals()
        self._inventory = inventory.Inventory()
        self._names: Mapping[int, CgroupNames] | None = None
        self._logged_problems: set[Problem] = set()
        self._logged_join_failure = ""
        self._read_now = asyncio.Event()
        self._label_release: str | None = None

    # ------------------------------------------------------------------ what others look at

    @property
    def snapshot(self) -> Snapshot | None:
        """The present snapshot, or None while there is none or it is too old to be served."""
        return None if self.stale else self._snapshot

    @property
    def stale(self) -> bool:
        """There is a snapshot and it is too old: the joining has stopped."""
        limit = max(3 * self._settings.interval_seconds, MIN_STALE_SECONDS)
        return self._snapshot is not None and self._clock() - self._joined_at > limit

    @property
    def snapshot_timestamp_seconds(self) -> float | None:
        """Unix time of the last snapshot, stale or not."""
        return self._snapshot.timestamp_seconds if self._snapshot else None

    @property
    def index_changes(self) -> int:
        """Times that a card was found under another index."""
        return self._inventory.index_changes

    @property
    def nvml_calls(self) -> int | None:
        """NVML calls of the last reading."""
        return self._reading.calls if self._reading else None

    def not_ready(self) -> str | None:
        """Why not, in one line; None once a snapshot holds every source's first outcome."""
        if self._all_answered:
            return None
        waiting = self._waiting()
        if waiting:
            return f"waiting for the first answer of: {', '.join(waiting)}"
        return "waiting for the first snapshot"

    def _waiting(self) -> list[str]:
        """The sources whose first outcome is to come.

        The kubelet's counts only from a question that came after the first pods: an answer says
        nothing of a pod that was not known when it was asked for.
        """
        waiting: list[str] = [one.source for one in self.sources.health() if one.up is None]
        pods = self.sources.pods
        asked = self.sources.podresources is None or self._kubelet_asked_with_pods
        if not asked and pods is not None and pods.health.up and "podresources" not in waiting:
            waiting.append("podresources")
        return waiting

    # ------------------------------------------------------------------ running

    def changed(self) -> None:
        """Ask for a join soon; called by every source on any change."""
        self._changed.set()

    def pods_changed(self) -> None:
        """A pod came, changed or went: join, and ask the kubelet again."""
        self._pods_changed.set()
        self._changed.set()

    async def run(self) -> None:
        """Run all tasks until cancelled; raises `DriverUnusable` when a new container is needed."""
        sources = self.sources
        watched: tuple[_Running | None, ...] = (
            sources.node,
            sources.slices,
            sources.gpu_objects,
            sources.kernel_log,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_forever())
            group.create_task(self._join_forever())
            if sources.podresources is not None:
                group.create_task(self._ask_kubelet_forever(sources.podresources))
            if sources.pods is not None:
                group.create_task(sources.pods.run(self.pods_changed))
            for source in watched:
                if source is not None:
                    group.create_task(source.run(self.changed))
            if sources.stack is not None:
                group.create_task(self._ask_stack_forever(sources.stack))

    async def release(self, seconds: float, reason: str) -> None:
        """Let go of the driver for a time; what the node's labels ask for holds for longer."""
        if self._label_release is None:
            await self.sources.devices.release(reason, self._clock() + seconds)
            self._read_now.set()
            self.changed()

    # ------------------------------------------------------------------ reading

    async def _read_forever(self) -> None:
        devices = self.sources.devices
        due = self._clock()
        while True:
            await self._read()
            now = self._clock()
            if now >= due:
                due = max(due + self._settings.interval_seconds, now)
            # Neither a reader that died nor a driver that may be read again waits for a long
            # interval.
            pauses = (due - now, devices.retry_after_seconds, devices.released_for_seconds)
            try:
                async with asyncio.timeout(min(pause for pause in pauses if pause is not None)):
                    await self._read_now.wait()
            except TimeoutError:
                pass
            self._read_now.clear()

    async def _read(self) -> None:
        devices = self.sources.devices
        reading = await devices.read(totals.seen(self._totals))
        if self.sources.processes is not None:
            # Without a reading too, so that this source says whether it could work.
            pids = _pids(reading) if reading is not None else ()
            self._names = await self.sources.processes.ask(pids)
        if reading is not None:
            self._take(reading)
        limit, unusable = self._settings.exit_after_seconds, devices.unusable_since_seconds
        if limit is not None and unusable is not None and self._clock() - unusable > limit:
            raise DriverUnusable(devices.health.detail)
        self.changed()

    def _take(self, reading: Reading) -> None:
        """Fold a reading into what is kept."""
        before = self._inventory.cards or {}
        self._reading, self._read_at = reading, self._clock()
        self._inventory = inventory.fold(self._inventory, reading)
        self._tell_cards(before, reading)
        self._totals = totals.fold(
            self._totals,
            reading,
            xid_codes=self._settings.xid_codes,
            known=inventory.uuids(self._inventory),
        )
        pods = self.sources.pods.latest if self.sources.pods else None
        self._totals = fold_core_seconds(self._totals, reading, self._names, pods, self._snapshot)

    def _tell_cards(self, before: Mapping[int, inventory.KnownCard], reading: Reading) -> None:
        """Log each card that moved, went down, is down for another reason, or is back, once."""
        for change in self._inventory.changes:
            log.warning(
                "card %s has index %d now and had %d: what names cards by index may mean another",
                change.uuid,
                change.now,
                change.before,
            )
        details = {failure.index: failure.detail for failure in reading.failures}
        for index, card in (self._inventory.cards or {}).items():
            known = before.get(index)
            if card.down_reason == (known.down_reason if known else None):
                continue
            if card.down_reason is None:
                log.info("card %d answers again", index)
            else:
                detail = details.get(index) or "the driver lists it no more"
                log.warning("card %d is down (%s): %s", index, card.down_reason, detail)

    # ------------------------------------------------------------------ joining

    async def _join_forever(self) -> None:
        while True:
            heartbeat = HEARTBEAT_SECONDS if self._all_answered else FIRST_HEARTBEAT_SECONDS
            try:
                async with asyncio.timeout(heartbeat):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            try:
                await self._follow_labels()
                self._join()
            except Exception as error:  # noqa: BLE001 - a fault of ours must not end the service
                self._tell_join_failure(error)
            await asyncio.sleep(COALESCE_SECONDS)

    def _tell_join_failure(self, error: Exception) -> None:
        """Count a fault of the join and log its kind once; the snapshot before grows stale."""
        self.join_failures += 1
        kind = f"{type(error).__name__}: {error}"
        if kind != self._logged_join_failure:
            self._logged_join_failure = kind
            log.error("joining failed; the page keeps the snapshot before", exc_info=error)

    def _join(self) -> None:
        sources = self.sources
        if sources.kernel_log is not None:
            news = sources.kernel_log.take()
            self._totals = totals.fold_xids(self._totals, news, self._reading)
        answered = not self._waiting()
        began = time.perf_counter()
        self._snapshot = join(self._inputs())
        self.join_duration_seconds = time.perf_counter() - began
        self._joined_at = self._clock()
        self._all_answered = self._all_answered or answered
        result = self._snapshot.allocation
        if self._all_answered:
            # Before, a source may just not have spoken yet.
            self._tell_problems(result.problems if result else ())

    def _inputs(self) -> JoinInputs:
        sources, settings = self.sources, self._settings
        reading = self._fresh_reading()
        pods = sources.pods.latest if sources.pods else None
        return JoinInputs(
            node=settings.node,
            timestamp_seconds=self._wall_clock(),
            cards=inventory.cards(self._inventory, reading, self._totals),
            reading=reading,
            totals=self._totals,
            names=self._names,
            kubelet_expected=sources.podresources is not None,
            kubelet=sources.podresources.latest if sources.podresources else None,
            pods_expected=sources.pods is not None,
            pods=pods,
            pods_overdue=pods is None and self._clock() - self._started_at > FIRST_PODS_SECONDS,
            node_object=sources.node.latest if sources.node else None,
            slices=sources.slices.latest if sources.slices else None,
            gpu_objects=sources.gpu_objects.latest if sources.gpu_objects else None,
            stack=sources.stack.latest if sources.stack else (),
            gpushare_memory_unit=settings.gpushare_memory_unit,
            volcano_memory_factor=settings.volcano_memory_factor,
            xid_classes=settings.xid_classes,
            pod_labels_exported=settings.pod_labels_exported,
        )

    def _fresh_reading(self) -> Reading | None:
        """The last reading, unless it is too old or the source has failed since."""
        limit = self._settings.interval_seconds + self._settings.timeout_seconds
        if not self.sources.devices.health.up or self._clock() - self._read_at > limit:
            return None
        return self._reading

    def _tell_problems(self, problems: Iterable[Problem]) -> None:
        """Log each new problem once; one that went and comes again is told again."""
        present = set(problems)
        for problem in sorted(
            present - self._logged_problems, key=lambda one: (one.kind, one.namespace, one.pod)
        ):
            where = "/".join(
                part for part in (problem.namespace, problem.pod, problem.container) if part
            )
            log.warning("%s: %s %s", problem.kind, where or "node", problem.detail)
        self._logged_problems = present if len(present) <= MAX_LOGGED_PROBLEMS else set()

    # ------------------------------------------------------------------ the kubelet

    async def _ask_kubelet_forever(self, kubelet: PodResources) -> None:
        """Ask at a steady pace, and quickly after pod events until no pod waits for a device."""
        steady = KUBELET_SECONDS if self.sources.pods else KUBELET_ALONE_SECONDS
        # An answer must not grow too old before the next one comes.
        steady = min(steady, self._settings.kubelet_max_age_seconds / 2)
        step, event_at = len(KUBELET_AFTER_EVENT_SECONDS), self._clock()
        while True:
            started = self._clock()
            with_pods = self.sources.pods is not None and self.sources.pods.latest is not None
            await kubelet.ask(self._pods_alive)
            self._kubelet_asked_with_pods = self._kubelet_asked_with_pods or with_pods
            # Also an equal answer is news: it may be the first that was asked for after a pod came.
            self.changed()
            waits = self._clock() - event_at < KUBELET_PATIENCE_SECONDS and self._pods_wait(kubelet)
            if step < len(KUBELET_AFTER_EVENT_SECONDS) - 1 or waits:
                pause = KUBELET_AFTER_EVENT_SECONDS[step]
                step = min(step + 1, len(KUBELET_AFTER_EVENT_SECONDS) - 1)
            else:
                # A huge answer takes its time: it is asked for less often.
                pause = max(steady, 20 * (self._clock() - started))
            try:
                async with asyncio.timeout(pause):
                    await self._pods_changed.wait()
            except TimeoutError:
                continue
            self._pods_changed.clear()
            event_at = self._clock()
            await asyncio.sleep(KUBELET_AFTER_EVENT_SECONDS[0])
            step = 1

    def _pods_alive(self) -> bool | None:
        """Whether a pod of the kubelet's last good answer is alive; None: nobody knows."""
        pods, kubelet = self.sources.pods, self.sources.podresources
        if pods is None or pods.latest is None or kubelet is None or kubelet.latest is None:
            return None
        alive = {(pod.namespace, pod.name) for pod in pods.latest.pods if is_alive(pod)}
        return any((one.namespace, one.pod) in alive for one in kubelet.latest.containers)

    def _pods_wait(self, kubelet: PodResources) -> bool:
        """Whether a live pod asks for a device that the kubelet does not list yet."""
        if self.sources.pods is None or self.sources.pods.latest is None:
            return False
        latest = kubelet.latest
        listed = {(one.namespace, one.pod) for one in latest.containers} if latest else set()
        return any(
            (pod.namespace, pod.name) not in listed
            for pod in self.sources.pods.latest.pods
            if is_alive(pod) and any(one.resources or one.claims for one in pod.containers)
        )

    # ------------------------------------------------------------------ other sources

    async def _ask_stack_forever(self, stack: Stack) -> None:
        while True:
            before = stack.latest
            await stack.ask()
            if stack.latest != before or not self._all_answered:
                self.changed()
            await asyncio.sleep(STACK_SECONDS)

    async def _follow_labels(self) -> None:
        """Let go of the driver while the node's labels ask for it, and come back afterwards."""
        node = self.sources.node.latest if self.sources.node else None
        reason = release_reason(node, self._settings.release_labels) if node else None
        devices = self.sources.devices
        if reason is not None:
            if reason != self._label_release or not devices.released:
                await devices.release(reason)
        elif self._label_release is not None and node is not None:
            devices.resume()
            self._read_now.set()
        if node is not None:
            self._label_release = reason


def _pids(reading: Reading) -> frozenset[int]:
    found: set[int] = set()
    for card in reading.cards:
        found.update(process.pid for process in card.processes or ())
        if card.process_window is not None:
            found.update(sample.pid for sample in card.process_window.samples)
    return frozenset(found)
