"""The readings of a card that NVML gives by one call each, as the groups of `model.CardReading`."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pynvml

from qgpu_exporter.model import (
    CardIdentity,
    Clocks,
    Memory,
    Pcie,
    Power,
    Temperatures,
    Utilization,
)
from qgpu_exporter.reader import fields, plausible
from qgpu_exporter.reader.calls import Calls, Refusal, check, symbol
from qgpu_exporter.reader.fields import FieldValues

Handle = Any
"""A ctypes pointer; pynvml has no type for it."""

_BUS_ID = re.compile(r"([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2}\.[0-7])")

_BRANDS = {
    pynvml.NVML_BRAND_QUADRO: "quadro",
    pynvml.NVML_BRAND_TESLA: "tesla",
    pynvml.NVML_BRAND_NVS: "nvs",
    pynvml.NVML_BRAND_GRID: "grid",
    pynvml.NVML_BRAND_GEFORCE: "geforce",
    pynvml.NVML_BRAND_TITAN: "titan",
    pynvml.NVML_BRAND_NVIDIA_VAPPS: "nvidia_vapps",
    pynvml.NVML_BRAND_NVIDIA_VPC: "nvidia_vpc",
    pynvml.NVML_BRAND_NVIDIA_VCS: "nvidia_vcs",
    pynvml.NVML_BRAND_NVIDIA_VWS: "nvidia_vws",
    pynvml.NVML_BRAND_NVIDIA_CLOUD_GAMING: "nvidia_cloud_gaming",
    pynvml.NVML_BRAND_QUADRO_RTX: "quadro_rtx",
    pynvml.NVML_BRAND_NVIDIA_RTX: "nvidia_rtx",
    pynvml.NVML_BRAND_NVIDIA: "nvidia",
    pynvml.NVML_BRAND_GEFORCE_RTX: "geforce_rtx",
    pynvml.NVML_BRAND_TITAN_RTX: "titan_rtx",
}
_ARCHITECTURES = {
    pynvml.NVML_DEVICE_ARCH_KEPLER: "kepler",
    pynvml.NVML_DEVICE_ARCH_MAXWELL: "maxwell",
    pynvml.NVML_DEVICE_ARCH_PASCAL: "pascal",
    pynvml.NVML_DEVICE_ARCH_VOLTA: "volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "ada",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "hopper",
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: "blackwell",
}
# By the names of `model.CardReading.clock_event_reasons`.
_CLOCK_EVENT_BITS = {
    "gpu_idle": 0x001,
    "applications_clocks_setting": 0x002,
    "sw_power_cap": 0x004,
    "hw_slowdown": 0x008,
    "sync_boost": 0x010,
    "sw_thermal_slowdown": 0x020,
    "hw_thermal_slowdown": 0x040,
    "hw_power_brake_slowdown": 0x080,
    "display_clock_setting": 0x100,
}
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
_VIRTUALIZATION_MODES = ("none", "passthrough", "vgpu", "host_vgpu", "host_vsga")
_RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
_FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
_NODE_MASK_WORDS = 16
_LICENSED = 1


def identity(calls: Calls, handle: Handle, index: int, uuid: str) -> CardIdentity:
    """What names the card; asked once for each handle."""
    brand = calls.ask("nvmlDeviceGetBrand", pynvml.nvmlDeviceGetBrand, handle)
    generation = calls.ask("nvmlDeviceGetArchitecture", pynvml.nvmlDeviceGetArchitecture, handle)
    minor = calls.ask("nvmlDeviceGetMinorNumber", pynvml.nvmlDeviceGetMinorNumber, handle)
    vbios = calls.ask("nvmlDeviceGetVbiosVersion", pynvml.nvmlDeviceGetVbiosVersion, handle)
    return CardIdentity(
        index=index,
        uuid=uuid,
        minor=plausible.at_most(0xFFFF, minor),
        pci_bus_id=_bus_id(calls, handle),
        model=plausible.text(calls.ask("nvmlDeviceGetName", pynvml.nvmlDeviceGetName, handle)),
        serial=plausible.text(calls.ask("nvmlDeviceGetSerial", pynvml.nvmlDeviceGetSerial, handle)),
        vbios_version=plausible.text(vbios),
        brand=_BRANDS.get(brand),
        architecture=_ARCHITECTURES.get(generation),
        numa_node=_numa_node(calls, handle),
    )


def _bus_id(calls: Calls, handle: Handle) -> str | None:
    def second_version() -> Any:
        # pynvml has no wrapper for it; the structure is the same.
        found = pynvml.nvmlPciInfo_t()
        check(symbol("nvmlDeviceGetPciInfo_v2")(handle, ctypes.byref(found)))
        return found

    found = calls.ask("nvmlDeviceGetPciInfo_v3", pynvml.nvmlDeviceGetPciInfo_v3, handle)
    if found is None:
        found = calls.ask("nvmlDeviceGetPciInfo_v2", second_version)
    try:
        # The structure decodes its texts where they are read.
        written = None if found is None else found.busId or found.busIdLegacy
    except UnicodeDecodeError:
        return None
    match = _BUS_ID.fullmatch(written or "")
    if match is None:
        return None
    domain, bus, function = match.groups()
    return f"{domain:0>8}:{bus}:{function}".upper()


def _numa_node(calls: Calls, handle: Handle) -> int | None:
    """The one CPU memory node that the card is attached to."""
    words = calls.ask(
        "nvmlDeviceGetMemoryAffinity",
        pynvml.nvmlDeviceGetMemoryAffinity,
        handle,
        _NODE_MASK_WORDS,
        pynvml.NVML_AFFINITY_SCOPE_NODE,
    )
    mask = sum(int(word) << (64 * place) for place, word in enumerate(words or ()))
    return mask.bit_length() - 1 if mask.bit_count() == 1 else None


def memory(calls: Calls, handle: Handle, name: str = "") -> Memory | None:
    """Frame buffer by the second version of the call, else by the first; also of a MIG device.

    `name` tells apart what a card and its MIG devices refuse.
    """
    key = f"nvmlDeviceGetMemoryInfo_v2{name}"
    if not calls.refused(key):
        try:
            found = calls.call(key, pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
            return plausible.memory(found.total, found.used, found.free, found.reserved)
        except Refusal as refusal:
            # Under WSL the second version says UNKNOWN for ever; a card whose first version says
            # the same is not remembered for it.
            refused = refusal
    else:
        refused = None
    first = calls.ask(f"nvmlDeviceGetMemoryInfo{name}", pynvml.nvmlDeviceGetMemoryInfo, handle)
    if first is None:
        if refused is not None:
            calls.log_once(key, refused)
        return None
    if refused is not None:
        calls.refuse(key)
    return plausible.memory(first.total, first.used, first.free)


def bar1(calls: Calls, handle: Handle) -> Memory | None:
    """The card's memory window for the CPU and its peers."""
    found = calls.ask("nvmlDeviceGetBAR1MemoryInfo", pynvml.nvmlDeviceGetBAR1MemoryInfo, handle)
    if found is None:
        return None
    return plausible.memory(found.bar1Total, found.bar1Used, found.bar1Free)


def utilization(calls: Calls, handle: Handle) -> Utilization:
    """Momentary ratios; a card in MIG mode refuses them."""
    rates = calls.ask("nvmlDeviceGetUtilizationRates", pynvml.nvmlDeviceGetUtilizationRates, handle)

    def engine(name: str) -> float | None:
        # Answers are (percent, sampling period).
        found = calls.ask(name, getattr(pynvml, name), handle)
        return None if found is None else plausible.ratio(found[0])

    return Utilization(
        gpu_ratio=None if rates is None else plausible.ratio(rates.gpu),
        memory_ratio=None if rates is None else plausible.ratio(rates.memory),
        encoder_ratio=engine("nvmlDeviceGetEncoderUtilization"),
        decoder_ratio=engine("nvmlDeviceGetDecoderUtilization"),
        jpeg_ratio=engine("nvmlDeviceGetJpgUtilization"),
        ofa_ratio=engine("nvmlDeviceGetOfaUtilization"),
    )


def max_clocks(calls: Calls, handle: Handle) -> tuple[int | None, ...]:
    """The highest graphics, SM, memory and video clocks, in hertz."""
    return _clocks(calls, handle, "nvmlDeviceGetMaxClockInfo")


def clocks(calls: Calls, handle: Handle, highest: tuple[int | None, ...]) -> Clocks:
    """Clocks now, beside the highest ones."""
    now = _clocks(calls, handle, "nvmlDeviceGetClockInfo")
    return Clocks(*now, *highest)


def _clocks(calls: Calls, handle: Handle, name: str) -> tuple[int | None, ...]:
    kinds = (
        pynvml.NVML_CLOCK_GRAPHICS,
        pynvml.NVML_CLOCK_SM,
        pynvml.NVML_CLOCK_MEM,
        pynvml.NVML_CLOCK_VIDEO,
    )
    return tuple(
        plausible.hertz(calls.ask(f"{name} {kind}", getattr(pynvml, name), handle, kind))
        for kind in kinds
    )


def temperature_limits(calls: Calls, handle: Handle) -> Temperatures:
    """The limits alone.  Where they are offered only as a distance (T.Limit), they are absent."""

    def limit(kind: int) -> float | None:
        name = "nvmlDeviceGetTemperatureThreshold"
        return plausible.celsius(calls.ask(f"{name} {kind}", getattr(pynvml, name), handle, kind))

    return Temperatures(
        shutdown_limit_celsius=limit(pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        slowdown_limit_celsius=limit(pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        target_limit_celsius=limit(pynvml.NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_CURR),
        max_operating_limit_celsius=limit(pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
        memory_limit_celsius=limit(pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
    )


def gpu_temperature(calls: Calls, handle: Handle) -> float | None:
    """The GPU's own sensor, by the newer call where there is one."""
    found = calls.ask(
        "nvmlDeviceGetTemperatureV",
        pynvml.nvmlDeviceGetTemperatureV,
        handle,
        pynvml.NVML_TEMPERATURE_GPU,
    )
    if found is None:
        found = calls.ask(
            "nvmlDeviceGetTemperature",
            pynvml.nvmlDeviceGetTemperature,
            handle,
            pynvml.NVML_TEMPERATURE_GPU,
        )
    return plausible.celsius(found)


def default_power_limit(calls: Calls, handle: Handle) -> float | None:
    """The limit that the board was delivered with, in watts."""
    name = "nvmlDeviceGetPowerManagementDefaultLimit"
    return plausible.watts(calls.ask(name, getattr(pynvml, name), handle))


def power(calls: Calls, handle: Handle, values: FieldValues, default_limit: float | None) -> Power:
    """Draw, limits and energy."""
    draw = calls.ask("nvmlDeviceGetPowerUsage", pynvml.nvmlDeviceGetPowerUsage, handle)
    enforced = calls.ask(
        "nvmlDeviceGetEnforcedPowerLimit", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle
    )
    millijoules = plausible.count(fields.value(values, pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION))

    def watts(field: int) -> float | None:
        return plausible.watts(fields.value(values, field))

    return Power(
        draw_watts=plausible.watts(draw),
        average_watts=watts(pynvml.NVML_FI_DEV_POWER_AVERAGE),
        instant_watts=watts(pynvml.NVML_FI_DEV_POWER_INSTANT),
        enforced_limit_watts=plausible.watts(enforced),
        default_limit_watts=default_limit or watts(pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT),
        energy_joules=None if millijoules is None else millijoules / 1000,
    )


def max_pcie(calls: Calls, handle: Handle) -> Pcie:
    """What the PCIe link could do."""
    return Pcie(
        max_generation=_small(calls, handle, "nvmlDeviceGetMaxPcieLinkGeneration"),
        max_width=_small(calls, handle, "nvmlDeviceGetMaxPcieLinkWidth"),
    )


def pcie(calls: Calls, handle: Handle, values: FieldValues, most: Pcie) -> Pcie:
    """The PCIe link now; bytes by fields, since the call for throughput sleeps 20 ms."""
    correctable = fields.value(values, pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS)
    return Pcie(
        generation=_small(calls, handle, "nvmlDeviceGetCurrPcieLinkGeneration"),
        max_generation=most.max_generation,
        width=_small(calls, handle, "nvmlDeviceGetCurrPcieLinkWidth"),
        max_width=most.max_width,
        replays=plausible.count(fields.value(values, pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)),
        correctable_errors=plausible.count(correctable),
        transmitted_bytes=fields.counter(values, pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES),
        received_bytes=fields.counter(values, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES),
    )


def _small(calls: Calls, handle: Handle, name: str, limit: int = 64) -> int | None:
    return plausible.at_most(limit, calls.ask(name, getattr(pynvml, name), handle))


def clock_event_reasons(calls: Calls, handle: Handle) -> dict[str, bool] | None:
    """Why the clocks are where they are; the call was renamed with driver 535."""
    mask = None
    for name in (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ):
        mask = calls.ask(name, getattr(pynvml, name), handle)
        if mask is not None:
            break
    # A mask with bits that no driver sets is no mask.
    if mask is None or mask >> 32:
        return None
    return {reason: bool(mask & bit) for reason, bit in _CLOCK_EVENT_BITS.items()}


def performance_state(calls: Calls, handle: Handle) -> int | None:
    """0 (highest) to 15; 32 is NVML's "unknown"."""
    return _small(calls, handle, "nvmlDeviceGetPerformanceState", 15)


def fan_ratio(calls: Calls, handle: Handle) -> float | None:
    """The intended speed as a part of the highest."""
    percent = calls.ask("nvmlDeviceGetFanSpeed", pynvml.nvmlDeviceGetFanSpeed, handle)
    return plausible.ratio(percent)


def _named(names: tuple[str, ...], number: float | None) -> str | None:
    place = plausible.at_most(len(names) - 1, number)
    return None if place is None else names[place]


def compute_mode(calls: Calls, handle: Handle) -> str | None:
    """Who may open contexts."""
    found = calls.ask("nvmlDeviceGetComputeMode", pynvml.nvmlDeviceGetComputeMode, handle)
    return _named(_COMPUTE_MODES, found)


def virtualization_mode(calls: Calls, handle: Handle) -> str | None:
    """How the card came to this machine."""
    name = "nvmlDeviceGetVirtualizationMode"
    return _named(_VIRTUALIZATION_MODES, calls.ask(name, getattr(pynvml, name), handle))


def recovery_action(values: FieldValues) -> str | None:
    """What the driver wants done to the card."""
    number = fields.value(values, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
    return _named(_RECOVERY_ACTIONS, number)


def persistence_mode(calls: Calls, handle: Handle) -> bool | None:
    """Asked only on request: with some drivers each call loses memory."""
    name = "nvmlDeviceGetPersistenceMode"
    return plausible.flag(calls.ask(name, getattr(pynvml, name), handle))


def fabric(calls: Calls, handle: Handle) -> tuple[str | None, int | None, int | None]:
    """State, status and health mask of the NVSwitch fabric."""

    def fetch() -> Any:
        found = pynvml.c_nvmlGpuFabricInfoV_t()
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(found))
        return found

    found = calls.ask("nvmlDeviceGetGpuFabricInfoV", fetch)
    if found is None:
        return None, None, None
    state = _named(_FABRIC_STATES, found.state & 0xFF)
    if state in (None, "not_supported"):
        return state, None, None
    return state, plausible.at_most(999, found.status), plausible.count(found.healthMask)


def vgpu_licensed(calls: Calls, handle: Handle) -> bool | None:
    """Whether a guest's vGPU has its licence."""
    found = calls.ask(
        "nvmlDeviceGetGridLicensableFeatures",
        pynvml.nvmlDeviceGetGridLicensableFeatures_v4,
        handle,
    )
    if found is None or not found.isGridLicenseSupported:
        return None
    count = min(found.licensableFeaturesCount, pynvml.NVML_GRID_LICENSE_FEATURE_MAX_COUNT)
    features = found.gridLicensableFeatures
    return any(features[place].featureState == _LICENSED for place in range(count))
