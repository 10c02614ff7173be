"""The fields of the dcgm dialect: for each the value that NVML gives, in DCGM's unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from qgpu_exporter.model import (
    Allocation,
    Card,
    CardReading,
    Memory,
    MigSlice,
    Profiling,
    Snapshot,
)

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Entity:
    """A card, or a GPU instance of a card, as DCGM knows entities."""

    card: Card
    reading: CardReading
    snapshot: Snapshot
    slice: MigSlice | None = None
    holder: Allocation | None = None
    """The only holder; None where there is none, or several, or that is not known."""

    @property
    def memory(self) -> Memory | None:
        """Of the GPU instance, or of the card unless its instances have memory of their own."""
        if self.slice is not None:
            return self.slice.memory
        sliced = any(one.memory is not None for one in self.reading.mig_slices)
        return None if sliced else self.reading.memory

    @property
    def profiling(self) -> Profiling | None:
        """As `memory`."""
        if self.slice is not None:
            return self.slice.profiling
        sliced = any(one.profiling is not None for one in self.reading.mig_slices)
        return None if sliced else self.reading.profiling


Value = Callable[[Entity], float | None]


@dataclass(frozen=True, slots=True)
class Field:
    """A DCGM field that NVML can serve: as dcgm-exporter's own counters files declare it."""

    name: str
    type: Literal["gauge", "counter"]
    help: str
    value: Value
    origin: str = ""
    since: str = ""
    by_default: bool = True


# --------------------------------------------------------------------------- values


def _of_card(value: Callable[[CardReading], float | None]) -> Value:
    """A reading of the whole card, which its slices do not have."""
    return lambda entity: value(entity.reading) if entity.slice is None else None


def _megahertz(name: str) -> Value:
    def value(reading: CardReading) -> float | None:
        hertz: int | None = getattr(reading.clocks, name)
        return None if hertz is None else hertz / 1_000_000

    return _of_card(value)


def _percent(ratio: float | None) -> float | None:
    # Rounded, since a ratio times 100 has a tail of binary dust.
    return None if ratio is None else round(ratio * 100, 6)


def _utilization(name: str) -> Value:
    return _of_card(lambda reading: _percent(getattr(reading.utilization, name)))


def _thousandths(amount: float | None) -> float | None:
    return None if amount is None else round(amount * 1000)


def _mebibytes(part: str) -> Value:
    def value(entity: Entity) -> float | None:
        amount: int | None = getattr(entity.memory, part, None)
        return None if amount is None else amount // MIB

    return value


def _bar1(part: str) -> Value:
    def value(reading: CardReading) -> float | None:
        amount: int | None = getattr(reading.bar1, part, None)
        return None if amount is None else amount // MIB

    return _of_card(value)


def _used_part(entity: Entity) -> float | None:
    memory = entity.memory
    if memory is None:
        return None
    usable = memory.total_bytes - (memory.reserved_bytes or 0)
    return memory.used_bytes / usable if usable > 0 else None


def _nanoseconds(reason: str) -> Value:
    def value(reading: CardReading) -> float | None:
        seconds = reading.clock_event_seconds.get(reason)
        return None if seconds is None else round(seconds * 1_000_000_000)

    return _of_card(value)


def _link_errors(kind: str) -> Value:
    def value(reading: CardReading) -> float | None:
        counts = [link.errors[kind] for link in reading.nvlinks if kind in link.errors]
        return sum(counts) if counts else None

    return _of_card(value)


def _link_bandwidth(reading: CardReading) -> float | None:
    """Both ways together in MB/s."""
    profiling = reading.profiling
    if profiling is None:
        return None
    sent = profiling.nvlink_transmitted_bytes_per_second
    received = profiling.nvlink_received_bytes_per_second
    return None if sent is None or received is None else (sent + received) / 1_000_000


def _profiled(name: str) -> Value:
    def value(entity: Entity) -> float | None:
        found: float | None = getattr(entity.profiling, name, None)
        return found

    return value


def _engine(attribute: str, engine: int) -> Value:
    def value(entity: Entity) -> float | None:
        ratios: Mapping[str, float] = getattr(entity.profiling, attribute, {})
        return ratios.get(str(engine))

    return value


_CLOCK_EVENT_BITS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
"""nvmlClocksEventReason* of nvml.h."""


def _clock_events(reading: CardReading) -> float | None:
    reasons = reading.clock_event_reasons
    if reasons is None:
        return None
    return sum(bit for reason, bit in _CLOCK_EVENT_BITS.items() if reasons.get(reason))


_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
"""At their numbers in nvml.h."""


def _compute_mode(reading: CardReading) -> float | None:
    mode = reading.compute_mode
    return _COMPUTE_MODES.index(mode) if mode in _COMPUTE_MODES else None


def _last_xid(entity: Entity) -> float | None:
    return None if entity.slice is not None else entity.card.totals.last_xid or 0


# --------------------------------------------------------------------------- the fields


def _gauge(name: str, help: str, value: Value, origin: str, since: str = "") -> Field:  # noqa: A002 -- the format's own word
    return Field(f"DCGM_FI_{name}", "gauge", help, value, origin, since)


def _counter(name: str, help: str, value: Value, origin: str, since: str = "") -> Field:  # noqa: A002 -- the format's own word
    return Field(f"DCGM_FI_{name}", "counter", help, value, origin, since)


_DEVICE_FIELDS: tuple[Field, ...] = (
    *(
        _gauge(f"DEV_{name}_CLOCK", f"{text} (in MHz).", _megahertz(attribute), origin)
        for name, text, attribute, origin in (
            ("SM", "SM clock frequency", "sm_hertz", "nvmlDeviceGetClockInfo"),
            ("MEM", "Memory clock frequency", "memory_hertz", "nvmlDeviceGetClockInfo"),
            ("VIDEO", "Video clock frequency", "video_hertz", "nvmlDeviceGetClockInfo"),
            ("MAX_SM", "Highest SM clock", "max_sm_hertz", "nvmlDeviceGetMaxClockInfo"),
            ("MAX_MEM", "Highest memory clock", "max_memory_hertz", "nvmlDeviceGetMaxClockInfo"),
            ("MAX_VIDEO", "Highest video clock", "max_video_hertz", "nvmlDeviceGetMaxClockInfo"),
        )
    ),
    _gauge(
        "DEV_MEMORY_TEMP",
        "Memory temperature (in C).",
        _of_card(lambda reading: reading.temperatures.memory_celsius),
        "NVML_FI_DEV_MEMORY_TEMP",
    ),
    _gauge(
        "DEV_GPU_TEMP",
        "GPU temperature (in C).",
        _of_card(lambda reading: reading.temperatures.gpu_celsius),
        "nvmlDeviceGetTemperatureV",
    ),
    _gauge(
        "DEV_GPU_MAX_OP_TEMP",
        "Highest GPU temperature in normal work (in C).",
        _of_card(lambda reading: reading.temperatures.max_operating_limit_celsius),
        "nvmlDeviceGetTemperatureThreshold",
    ),
    _gauge(
        "DEV_MEM_MAX_OP_TEMP",
        "Highest memory temperature in normal work (in C).",
        _of_card(lambda reading: reading.temperatures.memory_limit_celsius),
        "nvmlDeviceGetTemperatureThreshold",
    ),
    _gauge(
        "DEV_SLOWDOWN_TEMP",
        "GPU temperature of slowing down (in C).",
        _of_card(lambda reading: reading.temperatures.slowdown_limit_celsius),
        "nvmlDeviceGetTemperatureThreshold",
    ),
    _gauge(
        "DEV_SHUTDOWN_TEMP",
        "GPU temperature of shutting down (in C).",
        _of_card(lambda reading: reading.temperatures.shutdown_limit_celsius),
        "nvmlDeviceGetTemperatureThreshold",
    ),
    _gauge(
        "DEV_POWER_USAGE",
        "Power draw (in W).",
        _of_card(lambda reading: reading.power.draw_watts),
        "nvmlDeviceGetPowerUsage",
    ),
    _gauge(
        "DEV_POWER_USAGE_INSTANT",
        "Momentary power draw (in W).",
        _of_card(lambda reading: reading.power.instant_watts),
        "NVML_FI_DEV_POWER_INSTANT",
        "Ampere",
    ),
    _gauge(
        "DEV_ENFORCED_POWER_LIMIT",
        "Power limit in force (in W).",
        _of_card(lambda reading: reading.power.enforced_limit_watts),
        "nvmlDeviceGetEnforcedPowerLimit",
    ),
    _gauge(
        "DEV_POWER_MGMT_LIMIT_DEF",
        "Default power limit (in W).",
        _of_card(lambda reading: reading.power.default_limit_watts),
        "nvmlDeviceGetPowerManagementDefaultLimit",
    ),
    _counter(
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since the driver was loaded (in mJ).",
        _of_card(lambda reading: _thousandths(reading.power.energy_joules)),
        "nvmlDeviceGetTotalEnergyConsumption",
        "Volta",
    ),
    _counter(
        "DEV_PCIE_REPLAY_COUNTER",
        "Total number of PCIe retries.",
        _of_card(lambda reading: reading.pcie.replays),
        "nvmlDeviceGetPcieReplayCounter",
    ),
    _gauge(
        "DEV_PCIE_LINK_GEN",
        "PCIe generation of the link.",
        _of_card(lambda reading: reading.pcie.generation),
        "nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    _gauge(
        "DEV_PCIE_LINK_WIDTH",
        "PCIe lanes of the link.",
        _of_card(lambda reading: reading.pcie.width),
        "nvmlDeviceGetCurrPcieLinkWidth",
    ),
    _gauge(
        "DEV_PCIE_MAX_LINK_GEN",
        "Highest PCIe generation of the link.",
        _of_card(lambda reading: reading.pcie.max_generation),
        "nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    _gauge(
        "DEV_PCIE_MAX_LINK_WIDTH",
        "Highest number of PCIe lanes of the link.",
        _of_card(lambda reading: reading.pcie.max_width),
        "nvmlDeviceGetMaxPcieLinkWidth",
    ),
    *(
        _gauge(f"DEV_{name}_UTIL", f"{text} (in %).", _utilization(attribute), origin)
        for name, text, attribute, origin in (
            ("GPU", "GPU utilization", "gpu_ratio", "nvmlDeviceGetUtilizationRates"),
            ("MEM_COPY", "Memory utilization", "memory_ratio", "nvmlDeviceGetUtilizationRates"),
            ("ENC", "Encoder utilization", "encoder_ratio", "nvmlDeviceGetEncoderUtilization"),
            ("DEC", "Decoder utilization", "decoder_ratio", "nvmlDeviceGetDecoderUtilization"),
        )
    ),
    _gauge(
        "DEV_XID_ERRORS",
        "Value of the last XID error encountered.",
        _last_xid,
        "nvmlEventSetWait_v2",
    ),
    *(
        _counter(
            f"DEV_{name}_VIOLATION",
            f"Throttling duration due to {why} (in ns).",
            _nanoseconds(reason),
            f"NVML_FI_DEV_PERF_POLICY_{field}",
        )
        for name, why, reason, field in (
            ("POWER", "power constraints", "sw_power_cap", "POWER"),
            ("THERMAL", "thermal constraints", "thermal", "THERMAL"),
            ("SYNC_BOOST", "sync-boost constraints", "sync_boost", "SYNC_BOOST"),
            ("BOARD_LIMIT", "board limit constraints", "board_limit", "BOARD_LIMIT"),
            ("LOW_UTIL", "low utilization", "low_utilization", "LOW_UTILIZATION"),
            ("RELIABILITY", "reliability constraints", "reliability", "RELIABILITY"),
        )
    ),
    *(
        _gauge(
            f"DEV_FB_{name}",
            f"Framebuffer memory {text} (in MiB).",
            _mebibytes(part),
            "nvmlDeviceGetMemoryInfo_v2",
        )
        for name, text, part in (
            ("TOTAL", "in total", "total_bytes"),
            ("FREE", "free", "free_bytes"),
            ("USED", "used", "used_bytes"),
            ("RESERVED", "reserved", "reserved_bytes"),
        )
    ),
    _gauge(
        "DEV_FB_USED_PERCENT",
        "Framebuffer memory used of what is not reserved (0 to 1).",
        _used_part,
        "nvmlDeviceGetMemoryInfo_v2",
    ),
    *(
        _gauge(
            f"DEV_BAR1_{name}",
            f"BAR1 memory {text} (in MiB).",
            _bar1(part),
            "nvmlDeviceGetBAR1MemoryInfo",
        )
        for name, text, part in (
            ("TOTAL", "in total", "total_bytes"),
            ("USED", "used", "used_bytes"),
            ("FREE", "free", "free_bytes"),
        )
    ),
    _gauge(
        "DEV_ECC_CURRENT",
        "1 if ECC is on.",
        _of_card(lambda reading: reading.ecc.enabled),
        "nvmlDeviceGetEccMode",
    ),
    _gauge(
        "DEV_ECC_PENDING",
        "1 if ECC is on after the next restart.",
        _of_card(lambda reading: reading.ecc.pending),
        "nvmlDeviceGetEccMode",
    ),
    _counter(
        "DEV_ECC_SBE_VOL_TOTAL",
        "Total number of single-bit volatile ECC errors.",
        _of_card(lambda reading: reading.ecc.corrected_volatile),
        "NVML_FI_DEV_ECC_SBE_VOL_TOTAL",
    ),
    _counter(
        "DEV_ECC_DBE_VOL_TOTAL",
        "Total number of double-bit volatile ECC errors.",
        _of_card(lambda reading: reading.ecc.uncorrected_volatile),
        "NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
    ),
    _counter(
        "DEV_ECC_SBE_AGG_TOTAL",
        "Total number of single-bit persistent ECC errors.",
        _of_card(lambda reading: reading.ecc.corrected_aggregate),
        "NVML_FI_DEV_ECC_SBE_AGG_TOTAL",
    ),
    _counter(
        "DEV_ECC_DBE_AGG_TOTAL",
        "Total number of double-bit persistent ECC errors.",
        _of_card(lambda reading: reading.ecc.uncorrected_aggregate),
        "NVML_FI_DEV_ECC_DBE_AGG_TOTAL",
    ),
    _counter(
        "DEV_RETIRED_SBE",
        "Total number of retired pages due to single-bit errors.",
        _of_card(lambda reading: reading.retired_pages.single_bit),
        "NVML_FI_DEV_RETIRED_SBE",
        "before Ampere",
    ),
    _counter(
        "DEV_RETIRED_DBE",
        "Total number of retired pages due to double-bit errors.",
        _of_card(lambda reading: reading.retired_pages.double_bit),
        "NVML_FI_DEV_RETIRED_DBE",
        "before Ampere",
    ),
    _counter(
        "DEV_RETIRED_PENDING",
        "Total number of pages pending retirement (1 if there are any).",
        _of_card(lambda reading: reading.retired_pages.pending),
        "NVML_FI_DEV_RETIRED_PENDING",
        "before Ampere",
    ),
    *(
        _counter(
            f"DEV_NVLINK_{name}_ERROR_COUNT_TOTAL",
            f"Total number of NVLink {text}.",
            _link_errors(kind),
            f"NVML_FI_DEV_NVLINK_{name}_ERROR_COUNT_TOTAL",
        )
        for name, text, kind in (
            ("CRC_FLIT", "flow-control CRC errors", "crc_flit"),
            ("CRC_DATA", "data CRC errors", "crc_data"),
            ("REPLAY", "retries", "replay"),
            ("RECOVERY", "recovery errors", "recovery"),
        )
    ),
    _gauge(
        "DEV_NVLINK_BANDWIDTH_TOTAL",
        "NVLink bandwidth of all links, both ways together (in MB/s).",
        _of_card(_link_bandwidth),
        "NVML GPM",
        "Hopper",
    ),
    _gauge(
        "DEV_VGPU_LICENSE_STATUS",
        "vGPU License status",
        _of_card(lambda reading: reading.vgpu_licensed),
        "nvmlDeviceGetGridLicensableFeatures_v4",
    ),
    _counter(
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors",
        _of_card(lambda reading: reading.remapped_rows.uncorrectable),
        "NVML_FI_DEV_REMAPPED_UNC",
        "Ampere",
    ),
    _counter(
        "DEV_CORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for correctable errors",
        _of_card(lambda reading: reading.remapped_rows.correctable),
        "NVML_FI_DEV_REMAPPED_COR",
        "Ampere",
    ),
    _gauge(
        "DEV_ROW_REMAP_FAILURE",
        "Whether remapping of rows has failed",
        _of_card(lambda reading: reading.remapped_rows.failure),
        "NVML_FI_DEV_REMAPPED_FAILURE",
        "Ampere",
    ),
    _gauge(
        "DEV_ROW_REMAP_PENDING",
        "Whether rows wait for a reset to be remapped",
        _of_card(lambda reading: reading.remapped_rows.pending),
        "NVML_FI_DEV_REMAPPED_PENDING",
        "Ampere",
    ),
    _gauge(
        "DEV_PSTATE",
        "Performance state (P-State), 0 is the fastest.",
        _of_card(lambda reading: reading.performance_state),
        "nvmlDeviceGetPerformanceState",
    ),
    _gauge(
        "DEV_FAN_SPEED",
        "Fan speed (in %).",
        _of_card(lambda reading: _percent(reading.fan_ratio)),
        "nvmlDeviceGetFanSpeed",
    ),
    _gauge(
        "DEV_CLOCKS_EVENT_REASONS",
        "Reasons that hold the clocks down, as NVML's bits.",
        _of_card(_clock_events),
        "nvmlDeviceGetCurrentClocksEventReasons",
    ),
    Field(
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS",
        "gauge",
        "The older name of DCGM_FI_DEV_CLOCKS_EVENT_REASONS.",
        _of_card(_clock_events),
        "nvmlDeviceGetCurrentClocksEventReasons",
        by_default=False,
    ),
    _gauge(
        "DEV_COMPUTE_MODE",
        "Compute mode: 0 default, 2 prohibited, 3 exclusive process.",
        _of_card(_compute_mode),
        "nvmlDeviceGetComputeMode",
    ),
    _gauge(
        "DEV_PERSISTENCE_MODE",
        "1 if persistence mode is on; only with --devices.persistence-mode.",
        _of_card(lambda reading: reading.persistence_mode),
        "nvmlDeviceGetPersistenceMode",
    ),
    _gauge(
        "DEV_MIG_MODE",
        "1 if the card is in MIG mode.",
        _of_card(lambda reading: reading.mig_enabled),
        "nvmlDeviceGetMigMode",
        "Ampere",
    ),
)

_PROFILING_FIELDS: tuple[Field, ...] = (
    *(
        _gauge(f"PROF_{name}", text, _profiled(attribute), "NVML GPM", "Hopper")
        for name, text, attribute in (
            (
                "GR_ENGINE_ACTIVE",
                "Ratio of time the graphics engine is active.",
                "graphics_engine_ratio",
            ),
            (
                "SM_ACTIVE",
                "The ratio of cycles an SM has at least 1 warp assigned.",
                "sm_active_ratio",
            ),
            (
                "SM_OCCUPANCY",
                "The ratio of number of warps resident on an SM.",
                "sm_occupancy_ratio",
            ),
            (
                "PIPE_TENSOR_ACTIVE",
                "Ratio of cycles the tensor pipes are active.",
                "tensor_ratio",
            ),
            (
                "DRAM_ACTIVE",
                "Ratio of cycles the device memory interface is active sending or receiving data.",
                "dram_active_ratio",
            ),
            ("PIPE_FP64_ACTIVE", "Ratio of cycles the fp64 pipes are active.", "fp64_ratio"),
            ("PIPE_FP32_ACTIVE", "Ratio of cycles the fp32 pipes are active.", "fp32_ratio"),
            ("PIPE_FP16_ACTIVE", "Ratio of cycles the fp16 pipes are active.", "fp16_ratio"),
            ("PIPE_INT_ACTIVE", "Ratio of cycles the integer pipes are active.", "integer_ratio"),
            (
                "PIPE_TENSOR_IMMA_ACTIVE",
                "Ratio of cycles the integer tensor pipes are active.",
                "tensor_integer_ratio",
            ),
            (
                "PIPE_TENSOR_HMMA_ACTIVE",
                "Ratio of cycles the fp16 tensor pipes are active.",
                "tensor_half_ratio",
            ),
            (
                "PIPE_TENSOR_DFMA_ACTIVE",
                "Ratio of cycles the fp64 tensor pipes are active.",
                "tensor_double_ratio",
            ),
            (
                "PCIE_TX_BYTES",
                "The rate of data transmitted over the PCIe bus, headers included (in B/s).",
                "pcie_transmitted_bytes_per_second",
            ),
            (
                "PCIE_RX_BYTES",
                "The rate of data received over the PCIe bus, headers included (in B/s).",
                "pcie_received_bytes_per_second",
            ),
            (
                "NVLINK_TX_BYTES",
                "The rate of data transmitted over NVLink (in B/s).",
                "nvlink_transmitted_bytes_per_second",
            ),
            (
                "NVLINK_RX_BYTES",
                "The rate of data received over NVLink (in B/s).",
                "nvlink_received_bytes_per_second",
            ),
        )
    ),
    *(
        _gauge(
            f"PROF_{name}{engine}_ACTIVE",
            f"Ratio of time that {what} {engine} is active.",
            _engine(attribute, engine),
            "NVML GPM",
            "Hopper",
        )
        for name, what, attribute, count in (
            ("NVDEC", "video decoder", "nvdec_ratios", 8),
            ("NVJPG", "JPEG decoder", "nvjpg_ratios", 8),
            ("NVOFA", "optical flow accelerator", "ofa_ratios", 2),
        )
        for engine in range(count)
    ),
)

FIELDS: Mapping[str, Field] = {field.name: field for field in (*_DEVICE_FIELDS, *_PROFILING_FIELDS)}
"""Every DCGM field that can be served, by name, in the order of the page."""
