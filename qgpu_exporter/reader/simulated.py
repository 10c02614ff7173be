"""Made-up cards for the demo: the interface of the NVML session, without a driver.

Eight cards: 0 to 3 are NVIDIA L20, 4 to 7 are NVIDIA H100 80GB HBM3; card 4 is in MIG mode with
the GPU instances of `SLICES`.  Momentary readings are functions of the clock, cumulative ones are
integrated over the rounds.

A scenario file (JSON, read again whenever it changes) says what happens to them::

    {"cards": {"2": {"load_ratio": 0.4}, "5": {"down": "lost"}, "6": {"hang_seconds": 30}},
     "processes": [{"gpu": 0, "pid": 4711, "memory_bytes": 1073741824, "sm_ratio": 0.25}],
     "xids": [{"number": 1, "gpu": 1, "xid": 31}],
     "error": null}

Its shape is `Scenario`.  A file that cannot be read leaves the scenario before it in force.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from qgpu_exporter.model import (
    CardFailure,
    CardIdentity,
    CardReading,
    Clocks,
    Ecc,
    Memory,
    MigSlice,
    NvLink,
    Pcie,
    Power,
    Process,
    ProcessSample,
    ProcessWindow,
    Profiling,
    RawCounter,
    ReaderError,
    Reading,
    ReadingRequest,
    RemappedRows,
    Sample,
    SampleBuffer,
    SeenSamples,
    Temperatures,
    Utilization,
    Xid,
)

_log = logging.getLogger("qgpu_exporter.reader")

CARD_COUNT = 8
MIG_CARD = 4
_MIB = 1 << 20
_SAMPLE_US = 500_000
_LONGEST_BUFFER_US = 60_000_000


@dataclass(frozen=True, slots=True)
class SimulatedSlice:
    """One GPU instance of the card in MIG mode, with one compute instance."""

    gpu_instance: int
    profile: str
    compute_slices: int
    memory_slices: int
    multiprocessors: int
    placement_start: int
    memory_mib: int


SLICES = (
    SimulatedSlice(2, "3g.40gb", 3, 4, 60, 0, 40448),
    SimulatedSlice(3, "2g.20gb", 2, 2, 32, 4, 20096),
    SimulatedSlice(9, "1g.10gb", 1, 1, 16, 6, 9984),
    SimulatedSlice(10, "1g.10gb", 1, 1, 16, 7, 9984),
)


@dataclass(frozen=True, slots=True)
class SimulatedProcess:
    """A process on a card; `pid` is of the host, ratios are of the whole card (of the slice's
    own engines where `gpu_instance` is given) and are reached at the top of a slow wave."""

    gpu: int
    pid: int
    memory_bytes: int = 0
    sm_ratio: float = 0.0
    encoder_ratio: float = 0.0
    decoder_ratio: float = 0.0
    gpu_instance: int | None = None
    kind: str = "compute"


@dataclass(frozen=True, slots=True)
class SimulatedXid:
    """An XID that is reported once; a later one of the file has a greater `number`."""

    number: int
    gpu: int
    xid: int
    gpu_instance: int | None = None


@dataclass(frozen=True, slots=True)
class SimulatedCard:
    """What differs from a healthy card; without `load_ratio` the load follows the processes."""

    load_ratio: float | None = None
    down: str | None = None
    """A reason of `model.DownReason`."""
    hang_seconds: float = 0.0
    """The card answers no call; the round reports it as ``timeout``."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The content of a scenario file."""

    cards: Mapping[int, SimulatedCard] = field(default_factory=dict)
    processes: tuple[SimulatedProcess, ...] = ()
    xids: tuple[SimulatedXid, ...] = ()
    error: ReaderError | None = None
    """With it no card answers."""


def card_uuid(index: int) -> str:
    """UUID of a simulated card."""
    return f"GPU-51d00000-0000-4000-8000-{index:012d}"


def slice_uuid(gpu_instance: int) -> str:
    """UUID of the MIG device on a GPU instance of `MIG_CARD`."""
    return f"MIG-51d00000-0000-5000-8000-{gpu_instance:012d}"


def memory_total_bytes(index: int) -> int:
    """Memory of a simulated card."""
    return _model(index).memory_mib * _MIB


@dataclass(frozen=True, slots=True)
class _CardModel:
    name: str
    architecture: str
    memory_mib: int
    reserved_mib: int
    idle_watts: float
    limit_watts: float
    max_sm_mhz: int
    memory_mhz: int
    pcie_generation: int
    nvlinks: int
    hopper: bool


_L20 = _CardModel("NVIDIA L20", "ada", 46068, 595, 34.0, 275.0, 2520, 9001, 4, 0, False)
_H100 = _CardModel(
    "NVIDIA H100 80GB HBM3", "hopper", 81559, 479, 70.0, 700.0, 1980, 2619, 5, 18, True
)


def _model(index: int) -> _CardModel:
    return _L20 if index < MIG_CARD else _H100


class SimulatedSession:
    """Answers requests as an NVML session would; `clock` gives Unix time in seconds.

    Hanging cards are reported at once, not at the end of a deadline.
    """

    def __init__(
        self,
        scenario_path: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = scenario_path
        self._clock = clock
        self._scenario = Scenario()
        self._stamp: tuple[int, int] | None = None
        self._hanging_since: dict[int, float] = {}
        self._reported_xid = 0
        self._busy_seconds = [0.0] * CARD_COUNT
        self._energy_joules = [1.0e6 * (index + 1) for index in range(CARD_COUNT)]
        self._last_seconds: float | None = None

    def read(self, request: ReadingRequest) -> Reading:
        """One round over the eight cards."""
        now = self._clock()
        self._reload()
        scenario = self._scenario
        if scenario.error is not None:
            return Reading(timestamp_seconds=now, error=scenario.error)
        self._advance(now)
        seen = {entry.uuid: entry for entry in request.seen}
        cards: list[CardReading] = []
        failures: list[CardFailure] = []
        for index in range(CARD_COUNT):
            reason = self._down_reason(index, now)
            uuid = card_uuid(index)
            if reason is not None:
                failures.append(CardFailure(index, reason, "simulated", uuid))
            else:
                cards.append(self._card(index, now, seen.get(uuid, SeenSamples(uuid))))
        return Reading(
            timestamp_seconds=now,
            driver_version="580.95.05",
            nvml_version="13.580.95.05",
            cuda_version="13.0",
            cards=tuple(cards),
            failures=tuple(failures),
            events=self._new_events(now),
        )

    def _reload(self) -> None:
        if self._path is None:
            return
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            with open(self._path, "rb") as file:
                self._scenario = msgspec.json.decode(file.read(), type=Scenario)
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("scenario file not taken: %s", error)

    def _advance(self, now: float) -> None:
        elapsed = 0.0 if self._last_seconds is None else max(0.0, now - self._last_seconds)
        self._last_seconds = now
        for index in range(CARD_COUNT):
            load = self._load(index, now)
            self._busy_seconds[index] += load * elapsed
            self._energy_joules[index] += _draw_watts(_model(index), load) * elapsed

    def _down_reason(self, index: int, now: float) -> str | None:
        card = self._scenario.cards.get(index, SimulatedCard())
        if card.hang_seconds > 0.0:
            since = self._hanging_since.setdefault(index, now)
            return "timeout" if now - since < card.hang_seconds else card.down
        self._hanging_since.pop(index, None)
        return card.down

    def _new_events(self, now: float) -> tuple[Xid, ...]:
        fresh = [xid for xid in self._scenario.xids if xid.number > self._reported_xid]
        self._reported_xid = max([self._reported_xid, *(xid.number for xid in fresh)])
        return tuple(
            Xid(now, xid.xid, card_uuid(xid.gpu), _bus_id(xid.gpu), xid.gpu_instance)
            for xid in fresh
        )

    def _processes(self, index: int) -> list[SimulatedProcess]:
        return [process for process in self._scenario.processes if process.gpu == index]

    def _load(self, index: int, seconds: float) -> float:
        """Busy part of the card at a moment, 0 to 1."""
        override = self._scenario.cards.get(index)
        if override is not None and override.load_ratio is not None:
            return min(1.0, max(0.0, override.load_ratio))
        total = 0.0
        for process in self._processes(index):
            share = next(
                (
                    part.compute_slices / 7
                    for part in SLICES
                    if part.gpu_instance == process.gpu_instance
                ),
                1.0,
            )
            total += _waved(process.sm_ratio, process.pid, seconds) * share
        return min(1.0, total)

    def _card(self, index: int, now: float, seen: SeenSamples) -> CardReading:
        model = _model(index)
        mig = index == MIG_CARD
        load = self._load(index, now)
        processes = self._processes(index)
        draw = _draw_watts(model, load)
        bytes_moved = int(self._busy_seconds[index] * 2.0e9)
        return CardReading(
            identity=_identity(index),
            memory=_memory(model.memory_mib, model.reserved_mib, processes),
            bar1=Memory(total_bytes=2 * model.memory_mib * _MIB, used_bytes=3 * _MIB),
            utilization=Utilization() if mig else _utilization(load, processes, now),
            clocks=_clocks(model, load),
            temperatures=Temperatures(
                gpu_celsius=float(round(32 + index % 3 + 42 * load)),
                memory_celsius=float(round(40 + 45 * load)) if model.hopper else None,
                shutdown_limit_celsius=95.0,
                slowdown_limit_celsius=92.0,
                target_limit_celsius=83.0,
                max_operating_limit_celsius=87.0,
                memory_limit_celsius=95.0 if model.hopper else None,
            ),
            power=Power(
                draw_watts=draw,
                average_watts=draw,
                instant_watts=round(draw * (1 + 0.03 * math.sin(now)), 3),
                enforced_limit_watts=model.limit_watts,
                default_limit_watts=model.limit_watts,
                energy_joules=round(self._energy_joules[index], 3),
            ),
            pcie=Pcie(
                generation=model.pcie_generation,
                max_generation=model.pcie_generation,
                width=16,
                max_width=16,
                replays=0,
                correctable_errors=0,
                transmitted_bytes=RawCounter(bytes_moved),
                received_bytes=RawCounter(3 * bytes_moved),
            ),
            nvlinks=_nvlinks(model, bytes_moved),
            ecc=Ecc(True, True, 0, 0, 0, 0),
            remapped_rows=RemappedRows(0, 0, False, False),
            clock_event_reasons=_clock_event_reasons(load),
            clock_event_seconds={"sw_power_cap": round(self._busy_seconds[index] * 0.01, 6)},
            performance_state=0 if load > 0 or model.hopper else 8,
            compute_mode="default",
            recovery_action="none",
            fabric_state="completed" if model.hopper else None,
            fabric_status=0 if model.hopper else None,
            virtualization_mode="none",
            mig_enabled=mig if model.hopper else None,
            mig_pending=mig if model.hopper else None,
            mig_compute_slices=7 if mig else None,
            mig_slices=self._slices(now) if mig else (),
            profiling=_profiling(load) if model.hopper else None,
            samples=() if mig else self._samples(index, now, seen),
            processes=_process_list(processes),
            process_window=None if mig else _process_window(processes, now, seen),
        )

    def _samples(self, index: int, now: float, seen: SeenSamples) -> tuple[SampleBuffer, ...]:
        end = int(now * 1e6) // _SAMPLE_US
        factors = {"gpu": 1.0, "memory": 0.45, "encoder": 0.0, "decoder": 0.0}
        buffers = []
        for kind, factor in factors.items():
            oldest = max(seen.samples_us.get(kind, 0), int(now * 1e6) - _LONGEST_BUFFER_US)
            stamps = [tick * _SAMPLE_US for tick in range(oldest // _SAMPLE_US + 1, end + 1)]
            samples = tuple(
                Sample(stamp, round(self._load(index, stamp / 1e6) * factor, 2)) for stamp in stamps
            )
            buffers.append(SampleBuffer(kind, samples))
        return tuple(buffers)

    def _slices(self, now: float) -> tuple[MigSlice, ...]:
        slices = []
        for part in SLICES:
            processes = [
                process
                for process in self._processes(MIG_CARD)
                if process.gpu_instance == part.gpu_instance
            ]
            load = min(1.0, sum(_waved(each.sm_ratio, each.pid, now) for each in processes))
            slices.append(
                MigSlice(
                    gpu_instance=part.gpu_instance,
                    compute_instance=0,
                    uuid=slice_uuid(part.gpu_instance),
                    profile=part.profile,
                    compute_slices=part.compute_slices,
                    memory_slices=part.memory_slices,
                    multiprocessors=part.multiprocessors,
                    placement_start=part.placement_start,
                    memory=_memory(part.memory_mib, 0, processes),
                    profiling=_profiling(load),
                )
            )
        return tuple(slices)


def _waved(ratio: float, pid: int, seconds: float) -> float:
    """Between 70 % and 100 % of `ratio`, once up and down a minute, apart for each pid."""
    return ratio * (0.85 + 0.15 * math.sin(2 * math.pi * seconds / 60 + pid))


def _draw_watts(model: _CardModel, load: float) -> float:
    return round(model.idle_watts + (model.limit_watts - model.idle_watts) * 0.93 * load, 3)


def _bus_id(index: int) -> str:
    return f"00000000:{0x1A + 0x10 * index:02X}:00.0"


def _identity(index: int) -> CardIdentity:
    model = _model(index)
    return CardIdentity(
        index=index,
        uuid=card_uuid(index),
        minor=index,
        pci_bus_id=_bus_id(index),
        model=model.name,
        serial=f"165000000000{index}",
        vbios_version="96.00.A5.00.01",
        brand="nvidia",
        architecture=model.architecture,
        numa_node=index // 4,
    )


def _memory(total_mib: int, reserved_mib: int, processes: list[SimulatedProcess]) -> Memory:
    usable = (total_mib - reserved_mib) * _MIB
    used = min(usable, sum(process.memory_bytes for process in processes))
    return Memory(total_mib * _MIB, used, usable - used, reserved_mib * _MIB)


def _utilization(load: float, processes: list[SimulatedProcess], now: float) -> Utilization:
    def summed(ratios: list[tuple[float, int]]) -> float:
        return round(min(1.0, sum(_waved(ratio, pid, now) for ratio, pid in ratios)), 2)

    return Utilization(
        gpu_ratio=round(load, 2),
        memory_ratio=round(load * 0.45, 2),
        encoder_ratio=summed([(process.encoder_ratio, process.pid) for process in processes]),
        decoder_ratio=summed([(process.decoder_ratio, process.pid) for process in processes]),
        jpeg_ratio=0.0,
        ofa_ratio=0.0,
    )


def _clocks(model: _CardModel, load: float) -> Clocks:
    sm = (210 if load == 0 else round(model.max_sm_mhz * (0.98 - 0.1 * load))) * 1_000_000
    return Clocks(
        graphics_hertz=sm,
        sm_hertz=sm,
        memory_hertz=model.memory_mhz * 1_000_000,
        video_hertz=sm * 9 // 10,
        max_graphics_hertz=model.max_sm_mhz * 1_000_000,
        max_sm_hertz=model.max_sm_mhz * 1_000_000,
        max_memory_hertz=model.memory_mhz * 1_000_000,
        max_video_hertz=model.max_sm_mhz * 900_000,
    )


def _nvlinks(model: _CardModel, bytes_moved: int) -> tuple[NvLink, ...]:
    errors = {"crc_flit": 0, "crc_data": 0, "replay": 0, "recovery": 0}
    return tuple(
        NvLink(
            link=link,
            active=True,
            speed_bytes_per_second=26_562_000_000,
            transmitted_bytes=RawCounter(bytes_moved * 2 // model.nvlinks),
            received_bytes=RawCounter(bytes_moved * 2 // model.nvlinks),
            errors=errors,
        )
        for link in range(model.nvlinks)
    )


def _clock_event_reasons(load: float) -> dict[str, bool]:
    return {
        "gpu_idle": load == 0.0,
        "applications_clocks_setting": False,
        "sw_power_cap": load > 0.9,
        "hw_slowdown": False,
        "sync_boost": False,
        "sw_thermal_slowdown": False,
        "hw_thermal_slowdown": False,
        "hw_power_brake_slowdown": False,
        "display_clock_setting": False,
    }


def _profiling(load: float) -> Profiling:
    return Profiling(
        window_seconds=1.0,
        graphics_engine_ratio=round(load, 4),
        sm_active_ratio=round(load * 0.9, 4),
        sm_occupancy_ratio=round(load * 0.4, 4),
        integer_ratio=round(load * 0.1, 4),
        tensor_ratio=round(load * 0.5, 4),
        tensor_double_ratio=0.0,
        tensor_half_ratio=round(load * 0.5, 4),
        tensor_integer_ratio=0.0,
        dram_active_ratio=round(load * 0.6, 4),
        fp64_ratio=0.0,
        fp32_ratio=round(load * 0.2, 4),
        fp16_ratio=round(load * 0.05, 4),
        pcie_transmitted_bytes_per_second=round(load * 2.0e9),
        pcie_received_bytes_per_second=round(load * 6.0e9),
        nvlink_transmitted_bytes_per_second=round(load * 4.0e9),
        nvlink_received_bytes_per_second=round(load * 4.0e9),
        nvdec_ratios={"0": 0.0},
        nvjpg_ratios={"0": 0.0},
        ofa_ratios={"0": 0.0},
    )


def _process_list(processes: list[SimulatedProcess]) -> tuple[Process, ...]:
    return tuple(
        Process(
            pid=process.pid,
            memory_bytes=process.memory_bytes,
            gpu_instance=process.gpu_instance,
            compute_instance=None if process.gpu_instance is None else 0,
            kinds=(process.kind,),
        )
        for process in sorted(processes, key=lambda process: process.pid)
    )


def _process_window(
    processes: list[SimulatedProcess], now: float, seen: SeenSamples
) -> ProcessWindow:
    """One sample a process, as the driver gives it: the mean since the samples before."""
    until = int(now * 1e6)
    since = seen.processes_us or until - 1_000_000
    samples = tuple(
        ProcessSample(
            pid=process.pid,
            timestamp_us=until,
            sm_ratio=round(_waved(process.sm_ratio, process.pid, now), 2),
            memory_ratio=round(_waved(process.sm_ratio, process.pid, now) * 0.45, 2),
            encoder_ratio=round(_waved(process.encoder_ratio, process.pid, now), 2),
            decoder_ratio=round(_waved(process.decoder_ratio, process.pid, now), 2),
        )
        for process in sorted(processes, key=lambda process: process.pid)
    )
    return ProcessWindow(since, until, samples)
