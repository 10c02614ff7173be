"""One card in its own thread: first contact, one reading a round, and why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pynvml

from qgpu_exporter.model import CardIdentity, CardReading, Pcie, SeenSamples, Temperatures
from qgpu_exporter.reader import fields, mig, plausible, readings
from qgpu_exporter.reader.calls import PROBE_ROUNDS, Calls, CardDown, Refusal
from qgpu_exporter.reader.events import XidEvents
from qgpu_exporter.reader.fields import FieldReader
from qgpu_exporter.reader.gpm import CARD, GpmReader
from qgpu_exporter.reader.mig import MigMode, MigReader
from qgpu_exporter.reader.processes import ProcessLister, ProcessSampler
from qgpu_exporter.reader.readings import Handle
from qgpu_exporter.reader.samples import SampleReader

_UUID = re.compile(r"[0-9A-Za-z-]{8,96}")
_MOST_LINKS = 64

_REFUSED = {
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_UNKNOWN: "unknown_error",
    pynvml.NVML_ERROR_NOT_FOUND: "missing",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "missing",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "missing",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
}
"""Why a card is down whose first calls fail; every other code is an ``error``."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of every card."""

    gpm: bool = True
    persistence_mode: bool = False


@dataclass(frozen=True, slots=True)
class _Lasting:
    """What changes so rarely that it is asked once for each handle, and then every few minutes."""

    highest_clocks: tuple[int | None, ...]
    temperature_limits: Temperatures
    default_power_limit: float | None
    pcie: Pcie
    virtualization_mode: str | None
    vgpu_licensed: bool | None


class Card:
    """The card under one NVML index; used by one thread, but for `uuid` and `calls.total`.

    `clock` is monotonic and `wall_clock` Unix time, in seconds.
    """

    def __init__(
        self,
        index: int,
        options: Options,
        events: XidEvents,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        label = f"card {index}"
        self.index = index
        self.uuid: str | None = None
        """As last read: it names the card also while that is down."""
        self.calls = Calls(label)
        self._options = options
        self._events = events
        self._fields = FieldReader(self.calls)
        self._mig = MigReader(self.calls)
        self._gpm = GpmReader(self.calls, label, clock)
        self._lister = ProcessLister(self.calls)
        self._sampler = ProcessSampler(self.calls, wall_clock)
        self._samples = SampleReader(self.calls, wall_clock)
        self._handle: Handle | None = None
        self._generation = 0
        self._registered = -1
        self._identity: CardIdentity | None = None
        self._lasting: _Lasting | None = None
        self._lasting_until = 0
        self._round = 0
        self._links = 0
        self._mig_enabled: bool | None = None
        self._most_devices = 0

    def read(self, seen: Mapping[str, SeenSamples], generation: int) -> CardReading:
        """One reading, or `CardDown`.

        `seen` is by UUID.  A new `generation` says that the library was initialised again since.
        """
        self._round += 1
        self.calls.begin_round()
        try:
            if generation != self._generation:
                self._generation = generation
                self._let_go(initialised_again=True)
            return self._read(seen)
        except CardDown:
            self._handle = None
            raise
        except Refusal as refusal:
            self._handle = None
            raise CardDown(_REFUSED.get(refusal.code, "error"), str(refusal)) from None

    # ------------------------------------------------------------------ which card

    def _let_go(self, *, initialised_again: bool) -> None:
        """Forget all that was true of the handle before."""
        self._handle = None
        self._registered = -1
        self._identity = None
        self._lasting = None
        self._mig_enabled = None
        self.calls.forget_refusals()
        self._fields.forget_refusals()
        self._gpm.forget(initialised_again=initialised_again)

    def _contact(self) -> tuple[Handle, CardIdentity]:
        """The handle and who is behind it: each round, since a card may have been replaced."""
        handle = self._handle
        if handle is None:
            # By index and never by UUID: NVML would wake other cards to find out theirs.
            handle = self.calls.call(
                "nvmlDeviceGetHandleByIndex", pynvml.nvmlDeviceGetHandleByIndex, self.index
            )
        uuid = plausible.text(
            self.calls.call("nvmlDeviceGetUUID", pynvml.nvmlDeviceGetUUID, handle)
        )
        if uuid is None or not _UUID.fullmatch(uuid):
            raise CardDown("error", "nvmlDeviceGetUUID: the card has no UUID")
        if uuid != self.uuid or self._handle is None:
            self._let_go(initialised_again=False)
            self.uuid = uuid
        self._handle = handle
        if self._identity is None:
            self._identity = readings.identity(self.calls, handle, self.index, uuid)
            links = fields.value(self._fields.read(handle, 0), pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
            self._links = plausible.at_most(_MOST_LINKS, links) or 0
        return handle, self._identity

    def _lasting_facts(self, handle: Handle) -> _Lasting:
        if self._lasting is None or self._round >= self._lasting_until:
            self._lasting_until = self._round + PROBE_ROUNDS
            mode = readings.virtualization_mode(self.calls, handle)
            self._lasting = _Lasting(
                highest_clocks=readings.max_clocks(self.calls, handle),
                temperature_limits=readings.temperature_limits(self.calls, handle),
                default_power_limit=readings.default_power_limit(self.calls, handle),
                pcie=readings.max_pcie(self.calls, handle),
                virtualization_mode=mode,
                # Only a vGPU guest needs a licence; elsewhere the answer means nothing.
                vgpu_licensed=readings.vgpu_licensed(self.calls, handle)
                if mode == "vgpu"
                else None,
            )
        return self._lasting

    # ------------------------------------------------------------------ one round

    def _read(self, seen: Mapping[str, SeenSamples]) -> CardReading:
        handle, identity = self._contact()
        if self._registered != self._events.generation:
            self._registered = self._events.register(
                self.calls, handle, identity.uuid, identity.pci_bus_id
            )
        mode = self._mig_mode(handle)
        lasting = self._lasting_facts(handle)
        reading = self._hardware(handle, CardReading(identity), lasting, mode)
        return self._use(handle, reading, mode, seen.get(identity.uuid))

    def _mig_mode(self, handle: Handle) -> MigMode:
        mode = mig.mode(self.calls, handle)
        if mode.enabled != self._mig_enabled:
            if self._mig_enabled is not None:
                # What a card offers is not the same in and out of MIG mode.
                self.calls.forget_refusals()
                self._fields.forget_refusals()
            self._mig_enabled = mode.enabled
            self._most_devices = self._mig.most_devices(handle) if mode.enabled else 0
        return mode

    def _hardware(
        self, handle: Handle, reading: CardReading, lasting: _Lasting, mode: MigMode
    ) -> CardReading:
        """The readings of the board itself."""
        calls = self.calls
        before = calls.unknown
        values = self._fields.read(handle, self._links)
        memory = readings.memory(calls, handle)
        temperature = readings.gpu_temperature(calls, handle)
        if not values and memory is None and temperature is None and calls.unknown > before:
            # The library still knows the card, but cannot reach it.
            raise CardDown("unknown_error", "the card answers every reading with UNKNOWN")
        fabric_state, fabric_status, fabric_health = readings.fabric(calls, handle)
        return replace(
            reading,
            memory=memory,
            bar1=readings.bar1(calls, handle),
            utilization=readings.utilization(calls, handle),
            clocks=readings.clocks(calls, handle, lasting.highest_clocks),
            temperatures=replace(
                lasting.temperature_limits,
                gpu_celsius=temperature,
                memory_celsius=plausible.celsius(
                    fields.value(values, pynvml.NVML_FI_DEV_MEMORY_TEMP)
                ),
            ),
            power=readings.power(calls, handle, values, lasting.default_power_limit),
            pcie=readings.pcie(calls, handle, values, lasting.pcie),
            nvlinks=fields.nvlinks(values, self._links),
            ecc=fields.ecc(values),
            retired_pages=fields.retired_pages(values),
            remapped_rows=fields.remapped_rows(values),
            clock_event_reasons=readings.clock_event_reasons(calls, handle),
            clock_event_seconds=fields.clock_event_seconds(values),
            performance_state=readings.performance_state(calls, handle),
            fan_ratio=readings.fan_ratio(calls, handle),
            compute_mode=readings.compute_mode(calls, handle),
            persistence_mode=readings.persistence_mode(calls, handle)
            if self._options.persistence_mode
            else None,
            recovery_action=readings.recovery_action(values),
            fabric_state=fabric_state,
            fabric_status=fabric_status,
            fabric_health_mask=fabric_health,
            vgpu_licensed=lasting.vgpu_licensed,
            virtualization_mode=lasting.virtualization_mode,
            mig_enabled=mode.enabled,
            mig_pending=mode.pending,
        )

    def _use(
        self,
        handle: Handle,
        reading: CardReading,
        mode: MigMode,
        seen: SeenSamples | None,
    ) -> CardReading:
        """Who uses the card and its slices, and how much."""
        devices = self._mig.read(handle, self._most_devices) if mode.enabled else []
        owners: dict[int | None, str] = {CARD: "card"}
        for device in devices:
            # An instance that is made again under its number has other devices or another profile.
            part = device.slice
            owners.setdefault(part.gpu_instance, f"{part.uuid} {part.profile}")
        profiling = self._gpm.read(handle, owners) if self._options.gpm else {}
        ratios = {key: part for key, part in profiling.items() if key is not None}
        return replace(
            reading,
            mig_compute_slices=self._most_devices or None,
            mig_slices=mig.with_profiling(devices, ratios),
            profiling=profiling.get(CARD),
            samples=self._samples.read(handle, seen),
            processes=self._lister.read(
                handle,
                [
                    (device.handle, device.slice.gpu_instance, device.compute_instance)
                    for device in devices
                ],
            ),
            process_window=self._sampler.read(handle, seen, reading.utilization.gpu_ratio),
        )
