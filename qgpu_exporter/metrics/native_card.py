"""Native families of the cards: identity, state and every reading of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qgpu_exporter.metrics.family import Family, FamilyType, Scope, itself, present
from qgpu_exporter.metrics.scopes import ANSWERING, CARDS, NODE, READINGS
from qgpu_exporter.model import (
    BusyTotal,
    Card,
    CardReading,
    CardTotals,
    Memory,
    NvLink,
    Snapshot,
    XidTotal,
)

CardFamily = Family[Snapshot, Any]

CORE_PERCENT = 100
"""A whole card, in the unit of all core families."""


# --------------------------------------------------------------------------- rows


def _identity_labels(card: Card) -> Iterator[tuple[str, str]]:
    """What is known of the card; a label that is not known is left out."""
    identity = card.identity
    for name, value in (
        ("uuid", identity.uuid or None),
        ("minor_number", identity.minor),
        ("pci_bus_id", identity.pci_bus_id),
        ("model", identity.model),
        ("brand", identity.brand),
        ("architecture", identity.architecture),
        ("serial", identity.serial),
        ("vbios_version", identity.vbios_version),
        ("numa_node", identity.numa_node),
    ):
        if value is not None:
            yield name, str(value)


def _down(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], Card]]:
    for labels, card in CARDS.rows(snapshot):
        if card.reading is None and card.down_reason is not None:
            yield (*labels, card.down_reason), card


def _driver_labels(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    for name, value in (
        ("driver_version", snapshot.driver_version),
        ("nvml_version", snapshot.nvml_version),
        ("cuda_version", snapshot.cuda_version),
    ):
        if value is not None:
            yield name, value


def _links(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], tuple[NvLink, CardTotals]]]:
    for labels, card in ANSWERING.rows(snapshot):
        for link in card.reading.nvlinks if card.reading else ():
            yield (*labels, str(link.link)), (link, card.totals)


def _link_errors(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int]]:
    for labels, (link, _) in _links(snapshot):
        for kind, count in sorted(link.errors.items()):
            yield (*labels, kind), count


def _clock_events(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], bool]]:
    for labels, reading in READINGS.rows(snapshot):
        for reason, active in sorted((reading.clock_event_reasons or {}).items()):
            yield (*labels, reason), active


def _clock_event_seconds(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], float]]:
    for labels, reading in READINGS.rows(snapshot):
        for reason, seconds in sorted(reading.clock_event_seconds.items()):
            # The power policy's violation time is the power cap's under its older name.
            if reason != "power":
                yield (*labels, reason), seconds


def _state(
    name: str, label: str, state: Callable[[CardReading], str | None]
) -> Scope[Snapshot, str]:
    """Cards by a named state: one row with the present one."""

    def rows(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], str]]:
        for labels, reading in READINGS.rows(snapshot):
            value = state(reading)
            if value is not None:
                yield (*labels, value), value

    return Scope(name, ("node", "gpu", label), rows)


def _by_cause(
    name: str, **counts: Callable[[CardReading], int | None]
) -> Scope[Snapshot, int | None]:
    def rows(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int | None]]:
        for labels, reading in READINGS.rows(snapshot):
            for cause, count in counts.items():
                yield (*labels, cause), count(reading)

    return Scope(name, ("node", "gpu", "cause"), rows)


def _busy_totals(card: Card) -> Mapping[str, BusyTotal]:
    """By kind, the totals of the sample buffers that the card still offers.

    With MIG it offers none: a total that stands still would say that it is idle.
    """
    offered = {buffer.kind for buffer in card.reading.samples} if card.reading else set()
    return {kind: busy for kind, busy in card.totals.busy.items() if kind in offered}


def _covered(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], float]]:
    for labels, card in ANSWERING.rows(snapshot):
        for kind, busy in sorted(_busy_totals(card).items()):
            yield (*labels, kind), busy.covered_seconds


def _xids(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], XidTotal]]:
    # A lost card keeps its XIDs: they are counts of events, and tell why it is lost.
    for labels, card in CARDS.rows(snapshot):
        for xid, total in sorted(card.totals.xids.items()):
            yield (*labels, str(xid)), total


def _mig_xids(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], XidTotal]]:
    for labels, card in CARDS.rows(snapshot):
        for (xid, mig), total in sorted(card.totals.mig_xids.items()):
            yield (*labels, mig, str(xid)), total


def _xid_classes(snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], int]]:
    codes: set[int] = set()
    for card in snapshot.cards or ():
        codes.update(card.totals.xids, (xid for xid, _ in card.totals.mig_xids))
    for xid in sorted(codes):
        yield (snapshot.node, str(xid), snapshot.xid_classes.get(xid, "unknown")), xid


_DOWN = Scope("cards that are down", ("node", "gpu", "reason"), _down)
_IDENTITIES = Scope(
    "known cards, with what names them",
    ("node", "gpu"),
    CARDS.rows,
    _identity_labels,
    (
        "uuid",
        "minor_number",
        "pci_bus_id",
        "model",
        "brand",
        "architecture",
        "serial",
        "vbios_version",
        "numa_node",
    ),
)
_DRIVER = Scope(
    "the driver",
    ("node",),
    NODE.rows,
    _driver_labels,
    ("driver_version", "nvml_version", "cuda_version"),
)
_LINKS = Scope("NVLink ports", ("node", "gpu", "link"), _links)
_LINK_ERRORS = Scope("NVLink errors", ("node", "gpu", "link", "kind"), _link_errors)
_CLOCK_EVENTS = Scope("clock events", ("node", "gpu", "reason"), _clock_events)
_CLOCK_EVENT_SECONDS = Scope("clock event times", ("node", "gpu", "reason"), _clock_event_seconds)
_COVERED = Scope("sample buffers", ("node", "gpu", "kind"), _covered)
_XIDS = Scope("XIDs of cards", ("node", "gpu", "xid"), _xids)
_MIG_XIDS = Scope("XIDs of GPU instances", ("node", "gpu", "mig", "xid"), _mig_xids)
_XID_CLASSES = Scope("XIDs that any card counts", ("node", "xid", "action"), _xid_classes)


# --------------------------------------------------------------------------- values


def _up(card: Card) -> int | None:
    """None where nothing is known about the card: the driver as a whole did not answer."""
    if card.reading is not None:
        return 1
    return 0 if card.down_reason is not None else None


def _answering_count(snapshot: Snapshot) -> int | None:
    if snapshot.cards is None or not snapshot.devices_up:
        return None
    return sum(card.reading is not None for card in snapshot.cards)


def _counter(card: Card, name: str, *, offered: object) -> int | None:
    """A running total, as long as the card still offers the counter."""
    total = card.totals.counters.get(name)
    return total.total if total is not None and offered is not None else None


def _pcie_bytes(name: str) -> Callable[[Card], int | None]:
    def value(card: Card) -> int | None:
        pcie = card.reading.pcie if card.reading else None
        return _counter(card, f"pcie_{name}", offered=getattr(pcie, name, None))

    return value


def _link_bytes(name: str) -> Callable[[tuple[NvLink, CardTotals]], int | None]:
    def value(row: tuple[NvLink, CardTotals]) -> int | None:
        link, totals = row
        total = totals.counters.get(f"nvlink_{link.link}_{name}")
        return total.total if total is not None and getattr(link, name) is not None else None

    return value


def _busy(kind: str) -> Callable[[Card], float | None]:
    def value(card: Card) -> float | None:
        busy = _busy_totals(card).get(kind)
        return busy.busy_seconds if busy is not None else None

    return value


def _part(
    memory: Callable[[CardReading], Memory | None], part: str
) -> Callable[[CardReading], int | None]:
    def value(reading: CardReading) -> int | None:
        found = memory(reading)
        amount = getattr(found, part) if found is not None else None
        return amount if isinstance(amount, int) else None

    return value


def _whole(_: object) -> int:
    return CORE_PERCENT


def _of_reading(
    name: str,
    help: str,  # noqa: A002 -- the format's own word for it
    value: Callable[[CardReading], float | None],
    origin: str,
    since: str = "",
    type: FamilyType = "gauge",  # noqa: A002 -- as above
) -> CardFamily:
    return Family(f"node_gpu_{name}", type, help, READINGS, value, origin, since)


# --------------------------------------------------------------------------- tables

IDENTITY: tuple[CardFamily, ...] = (
    Family(
        "node_gpu_cards",
        "gauge",
        "Cards that are known, answering or not.",
        NODE,
        lambda snapshot: None if snapshot.cards is None else len(snapshot.cards),
        "nvmlDeviceGetCount_v2",
    ),
    Family(
        "node_gpu_cards_answering",
        "gauge",
        "Cards that answered in the last round.",
        NODE,
        _answering_count,
        "this exporter",
    ),
    Family(
        "node_gpu_driver_info",
        "info",
        "Versions of the driver, of NVML and of the newest CUDA that the driver serves.",
        _DRIVER,
        lambda snapshot: 1 if snapshot.driver_version is not None else None,
        "nvmlSystemGetDriverVersion, nvmlSystemGetNVMLVersion, nvmlSystemGetCudaDriverVersion_v2",
    ),
    Family(
        "node_gpu_info",
        "info",
        "What names a card: gpu is the NVML index, minor_number the N of /dev/nvidiaN.",
        _IDENTITIES,
        present,
        "nvmlDeviceGetUUID, nvmlDeviceGetMinorNumber, nvmlDeviceGetPciInfo_v3, nvmlDeviceGetName",
    ),
    Family(
        "node_gpu_up",
        "gauge",
        "1 if the card answered in the last round, 0 if it alone did not; absent while the driver "
        "as a whole gives no reading.",
        CARDS,
        _up,
        "this exporter",
    ),
    Family(
        "node_gpu_down_info",
        "info",
        "Why a known card gives no readings.",
        _DOWN,
        present,
        "the failing NVML call",
    ),
    Family(
        "node_gpu_core_capacity",
        "gauge",
        "Computing power of the card in percent of a card: always 100.",
        CARDS,
        _whole,
        "constant",
    ),
    Family(
        "node_gpu_memory_capacity_bytes",
        "gauge",
        "Memory of the card in bytes, the driver's reserve included; kept while it is down.",
        CARDS,
        lambda card: card.memory_total_bytes,
        "nvmlDeviceGetMemoryInfo_v2 (v1 on old drivers), total",
    ),
)

MEMORY: tuple[CardFamily, ...] = (
    _of_reading(
        "memory_used_bytes",
        "Memory in use in bytes, without the driver's reserve where that is known.",
        _part(lambda reading: reading.memory, "used_bytes"),
        "nvmlDeviceGetMemoryInfo_v2 (v1 on old drivers), used",
    ),
    _of_reading(
        "memory_free_bytes",
        "Free memory in bytes.",
        _part(lambda reading: reading.memory, "free_bytes"),
        "nvmlDeviceGetMemoryInfo_v2 (v1 on old drivers), free",
    ),
    _of_reading(
        "memory_reserved_bytes",
        "Memory that the driver reserves for itself in bytes; absent with drivers before 510.",
        _part(lambda reading: reading.memory, "reserved_bytes"),
        "nvmlDeviceGetMemoryInfo_v2, reserved",
    ),
    _of_reading(
        "bar1_capacity_bytes",
        "Size of the BAR1 window in bytes.",
        _part(lambda reading: reading.bar1, "total_bytes"),
        "nvmlDeviceGetBAR1MemoryInfo",
    ),
    _of_reading(
        "bar1_used_bytes",
        "BAR1 window in use in bytes.",
        _part(lambda reading: reading.bar1, "used_bytes"),
        "nvmlDeviceGetBAR1MemoryInfo",
    ),
)

UTILIZATION: tuple[CardFamily, ...] = (
    _of_reading(
        "utilization_ratio",
        "Part of the driver's last sample (1/6 to 1 s) in which a kernel ran, 0 to 1; "
        "see node_gpu_busy_seconds_total for the mean over any time.",
        lambda reading: reading.utilization.gpu_ratio,
        "nvmlDeviceGetUtilizationRates, gpu; not with MIG",
    ),
    _of_reading(
        "memory_controller_utilization_ratio",
        "Part of the driver's last sample in which memory was read or written, 0 to 1.",
        lambda reading: reading.utilization.memory_ratio,
        "nvmlDeviceGetUtilizationRates, memory; not with MIG",
    ),
    _of_reading(
        "encoder_utilization_ratio",
        "Utilisation of the video encoders, 0 to 1.",
        lambda reading: reading.utilization.encoder_ratio,
        "nvmlDeviceGetEncoderUtilization; not with MIG",
    ),
    _of_reading(
        "decoder_utilization_ratio",
        "Utilisation of the video decoders, 0 to 1.",
        lambda reading: reading.utilization.decoder_ratio,
        "nvmlDeviceGetDecoderUtilization; not with MIG",
    ),
    _of_reading(
        "jpeg_utilization_ratio",
        "Utilisation of the JPEG decoders, 0 to 1.",
        lambda reading: reading.utilization.jpeg_ratio,
        "nvmlDeviceGetJpgUtilization; not with MIG",
        "Turing",
    ),
    _of_reading(
        "ofa_utilization_ratio",
        "Utilisation of the optical flow accelerators, 0 to 1.",
        lambda reading: reading.utilization.ofa_ratio,
        "nvmlDeviceGetOfaUtilization; not with MIG",
        "Turing",
    ),
    *(
        Family(
            f"node_gpu_{prefix}busy_seconds_total",
            "counter",
            f"Seconds in which {what}, integrated from the driver's samples without gaps: "
            "its rate is the true mean utilisation.",
            ANSWERING,
            _busy(kind),
            f"nvmlDeviceGetSamples, {sampling}; not with MIG",
        )
        for prefix, kind, what, sampling in (
            ("", "gpu", "a kernel ran", "NVML_GPU_UTILIZATION_SAMPLES"),
            ("memory_", "memory", "memory was read or written", "NVML_MEMORY_UTILIZATION_SAMPLES"),
            ("encoder_", "encoder", "the video encoders worked", "NVML_ENC_UTILIZATION_SAMPLES"),
            ("decoder_", "decoder", "the video decoders worked", "NVML_DEC_UTILIZATION_SAMPLES"),
        )
    ),
    Family(
        "node_gpu_samples_covered_seconds_total",
        "counter",
        "Seconds that the driver's samples of this kind spoke of; less than the time that passed "
        "where samples were lost.",
        _COVERED,
        itself,
        "nvmlDeviceGetSamples",
    ),
)


def _clocks() -> Iterator[CardFamily]:
    for name, what, domain in (
        ("graphics", "graphics", "NVML_CLOCK_GRAPHICS"),
        ("sm", "streaming multiprocessors'", "NVML_CLOCK_SM"),
        ("memory", "memory", "NVML_CLOCK_MEM"),
        ("video", "video engines'", "NVML_CLOCK_VIDEO"),
    ):
        for prefix, when, call in (
            ("", "Present", "nvmlDeviceGetClockInfo"),
            ("max_", "Highest possible", "nvmlDeviceGetMaxClockInfo"),
        ):
            yield _of_reading(
                f"{name}_clock_{prefix}hertz",
                f"{when} {what} clock rate in hertz.",
                _attribute("clocks", f"{prefix}{name}_hertz"),
                f"{call}, {domain}",
            )


def _attribute(part: str, name: str) -> Callable[[CardReading], float | None]:
    def value(reading: CardReading) -> float | None:
        found = getattr(getattr(reading, part), name)
        return found if isinstance(found, int | float) else None

    return value


CLOCKS: tuple[CardFamily, ...] = tuple(_clocks())

TEMPERATURES: tuple[CardFamily, ...] = (
    _of_reading(
        "temperature_celsius",
        "Temperature of the GPU in degrees Celsius.",
        lambda reading: reading.temperatures.gpu_celsius,
        "nvmlDeviceGetTemperatureV (nvmlDeviceGetTemperature on old drivers)",
    ),
    _of_reading(
        "memory_temperature_celsius",
        "Temperature of the memory in degrees Celsius; boards with HBM.",
        lambda reading: reading.temperatures.memory_celsius,
        "NVML_FI_DEV_MEMORY_TEMP",
    ),
    *(
        _of_reading(
            f"{name}_limit_celsius",
            f"{text} in degrees Celsius.",
            _attribute("temperatures", attribute),
            f"nvmlDeviceGetTemperatureThreshold, {threshold}",
        )
        for name, text, attribute, threshold in (
            (
                "temperature_shutdown",
                "GPU temperature at which the card turns itself off",
                "shutdown_limit_celsius",
                "NVML_TEMPERATURE_THRESHOLD_SHUTDOWN",
            ),
            (
                "temperature_slowdown",
                "GPU temperature at which the card slows down",
                "slowdown_limit_celsius",
                "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN",
            ),
            (
                "temperature_target",
                "GPU temperature that the card holds by fan and clocks",
                "target_limit_celsius",
                "NVML_TEMPERATURE_THRESHOLD_ACOUSTIC_CURR",
            ),
            (
                "temperature_max_operating",
                "Highest GPU temperature in normal work",
                "max_operating_limit_celsius",
                "NVML_TEMPERATURE_THRESHOLD_GPU_MAX",
            ),
            (
                "memory_temperature",
                "Highest memory temperature in normal work",
                "memory_limit_celsius",
                "NVML_TEMPERATURE_THRESHOLD_MEM_MAX",
            ),
        )
    ),
)

POWER: tuple[CardFamily, ...] = (
    _of_reading(
        "power_watts",
        "Power draw in watts, as the card's generation reports it (momentary or averaged).",
        lambda reading: reading.power.draw_watts,
        "nvmlDeviceGetPowerUsage",
    ),
    _of_reading(
        "power_average_watts",
        "Power draw averaged over one second in watts.",
        lambda reading: reading.power.average_watts,
        "NVML_FI_DEV_POWER_AVERAGE",
        "Ampere",
    ),
    _of_reading(
        "power_instant_watts",
        "Momentary power draw in watts.",
        lambda reading: reading.power.instant_watts,
        "NVML_FI_DEV_POWER_INSTANT",
        "Ampere",
    ),
    _of_reading(
        "power_limit_watts",
        "Power limit in force in watts.",
        lambda reading: reading.power.enforced_limit_watts,
        "nvmlDeviceGetEnforcedPowerLimit",
    ),
    _of_reading(
        "power_default_limit_watts",
        "Power limit that the board comes with in watts.",
        lambda reading: reading.power.default_limit_watts,
        "nvmlDeviceGetPowerManagementDefaultLimit",
    ),
    _of_reading(
        "energy_joules_total",
        "Energy that the card took since the driver was loaded in joules; its rate is watts.",
        lambda reading: reading.power.energy_joules,
        "nvmlDeviceGetTotalEnergyConsumption",
        "Volta",
        "counter",
    ),
)

LINKS: tuple[CardFamily, ...] = (
    _of_reading(
        "pcie_generation",
        "Present generation of the PCIe link; falls while the card is idle.",
        lambda reading: reading.pcie.generation,
        "nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    _of_reading(
        "pcie_max_generation",
        "Highest generation of the PCIe link that card and slot allow.",
        lambda reading: reading.pcie.max_generation,
        "nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    _of_reading(
        "pcie_width",
        "Present number of PCIe lanes.",
        lambda reading: reading.pcie.width,
        "nvmlDeviceGetCurrPcieLinkWidth",
    ),
    _of_reading(
        "pcie_max_width",
        "Highest number of PCIe lanes that card and slot allow.",
        lambda reading: reading.pcie.max_width,
        "nvmlDeviceGetMaxPcieLinkWidth",
    ),
    _of_reading(
        "pcie_replays_total",
        "PCIe packets that were sent again.",
        lambda reading: reading.pcie.replays,
        "nvmlDeviceGetPcieReplayCounter",
        type="counter",
    ),
    _of_reading(
        "pcie_correctable_errors_total",
        "Correctable errors of the PCIe link.",
        lambda reading: reading.pcie.correctable_errors,
        "NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS",
        type="counter",
    ),
    Family(
        "node_gpu_pcie_transmitted_bytes_total",
        "counter",
        "Bytes that the card sent over PCIe, wraps of the driver's counter undone.",
        ANSWERING,
        _pcie_bytes("transmitted_bytes"),
        "NVML_FI_DEV_PCIE_COUNT_TX_BYTES",
    ),
    Family(
        "node_gpu_pcie_received_bytes_total",
        "counter",
        "Bytes that the card received over PCIe, wraps of the driver's counter undone.",
        ANSWERING,
        _pcie_bytes("received_bytes"),
        "NVML_FI_DEV_PCIE_COUNT_RX_BYTES",
    ),
    Family(
        "node_gpu_nvlink_active",
        "gauge",
        "1 if the NVLink port is active.",
        _LINKS,
        lambda row: row[0].active,
        "NVML_FI_DEV_NVLINK_GET_STATE",
    ),
    Family(
        "node_gpu_nvlink_speed_bytes_per_second",
        "gauge",
        "Speed of the NVLink port in bytes a second.",
        _LINKS,
        lambda row: row[0].speed_bytes_per_second,
        "NVML_FI_DEV_NVLINK_GET_SPEED",
    ),
    Family(
        "node_gpu_nvlink_transmitted_bytes_total",
        "counter",
        "Bytes of data that the card sent over the NVLink port.",
        _LINKS,
        _link_bytes("transmitted_bytes"),
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX (NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES on NVLink 5)",
    ),
    Family(
        "node_gpu_nvlink_received_bytes_total",
        "counter",
        "Bytes of data that the card received over the NVLink port.",
        _LINKS,
        _link_bytes("received_bytes"),
        "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX (NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES on NVLink 5)",
    ),
    Family(
        "node_gpu_nvlink_errors_total",
        "counter",
        "Errors of the NVLink port by kind.",
        _LINK_ERRORS,
        itself,
        "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0 and its kin",
    ),
    Family(
        "node_gpu_fabric_state",
        "gauge",
        "1 with the present state of joining the NVLink fabric.",
        _state("fabric states", "state", lambda reading: reading.fabric_state),
        present,
        "nvmlDeviceGetGpuFabricInfoV, state",
        "Hopper",
    ),
    _of_reading(
        "fabric_status",
        "Result of joining the NVLink fabric as an NVML return code; 0 is success.",
        lambda reading: reading.fabric_status,
        "nvmlDeviceGetGpuFabricInfoV, status",
        "Hopper",
    ),
    _of_reading(
        "fabric_health_mask",
        "Bits that tell how healthy the NVLink fabric is, as the driver gives them.",
        lambda reading: reading.fabric_health_mask,
        "nvmlDeviceGetGpuFabricInfoV, healthMask",
        "Hopper",
    ),
)

ERRORS: tuple[CardFamily, ...] = (
    _of_reading(
        "ecc_enabled",
        "1 if ECC is on.",
        lambda reading: reading.ecc.enabled,
        "nvmlDeviceGetEccMode, current",
    ),
    _of_reading(
        "ecc_enabled_pending",
        "1 if ECC is on after the next restart.",
        lambda reading: reading.ecc.pending,
        "nvmlDeviceGetEccMode, pending",
    ),
    *(
        _of_reading(
            f"ecc_{kind}_{span}_errors_total",
            f"Memory errors that ECC {could} correct, {since}.",
            _attribute("ecc", f"{kind}_{span}"),
            f"NVML_FI_DEV_ECC_{field}_TOTAL",
            type="counter",
        )
        for kind, span, could, since, field in (
            ("corrected", "volatile", "could", "since the driver was loaded", "SBE_VOL"),
            ("uncorrected", "volatile", "could not", "since the driver was loaded", "DBE_VOL"),
            ("corrected", "aggregate", "could", "in the board's life", "SBE_AGG"),
            ("uncorrected", "aggregate", "could not", "in the board's life", "DBE_AGG"),
        )
    ),
    Family(
        "node_gpu_retired_pages",
        "gauge",
        "Memory pages that were retired, by the kind of error.",
        _by_cause(
            "retired pages",
            double_bit=lambda reading: reading.retired_pages.double_bit,
            single_bit=lambda reading: reading.retired_pages.single_bit,
        ),
        itself,
        "NVML_FI_DEV_RETIRED_SBE, NVML_FI_DEV_RETIRED_DBE",
        "before Ampere",
    ),
    _of_reading(
        "retired_pages_pending",
        "1 if pages wait for a reset to be retired.",
        lambda reading: reading.retired_pages.pending,
        "NVML_FI_DEV_RETIRED_PENDING",
        "before Ampere",
    ),
    Family(
        "node_gpu_remapped_rows",
        "gauge",
        "Memory rows that were remapped, by the kind of error.",
        _by_cause(
            "remapped rows",
            correctable=lambda reading: reading.remapped_rows.correctable,
            uncorrectable=lambda reading: reading.remapped_rows.uncorrectable,
        ),
        itself,
        "NVML_FI_DEV_REMAPPED_COR, NVML_FI_DEV_REMAPPED_UNC",
        "Ampere",
    ),
    _of_reading(
        "remapped_rows_pending",
        "1 if rows wait for a reset to be remapped.",
        lambda reading: reading.remapped_rows.pending,
        "NVML_FI_DEV_REMAPPED_PENDING",
        "Ampere",
    ),
    _of_reading(
        "remapped_rows_failure",
        "1 if a row could not be remapped: the board is to be replaced.",
        lambda reading: reading.remapped_rows.failure,
        "NVML_FI_DEV_REMAPPED_FAILURE",
        "Ampere",
    ),
    Family(
        "node_gpu_recovery_action",
        "gauge",
        "1 with what the driver asks to be done about the card; action is none on a healthy one.",
        _state("recovery actions", "action", lambda reading: reading.recovery_action),
        present,
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        "Ampere, new drivers",
    ),
    Family(
        "node_gpu_xid_errors_total",
        "counter",
        "XID errors by code since the exporter started; those that alerts name start at 0.",
        _XIDS,
        lambda total: total.count,
        "nvmlEventSetWait_v2, kernel log",
    ),
    Family(
        "node_gpu_xid_last_timestamp_seconds",
        "gauge",
        "Unix time of the last XID error of this code in seconds.",
        _XIDS,
        lambda total: total.last_timestamp_seconds,
        "nvmlEventSetWait_v2, kernel log",
    ),
    Family(
        "node_gpu_mig_xid_errors_total",
        "counter",
        "XID errors by code of those that name a MIG instance; the card's family has them too.",
        _MIG_XIDS,
        lambda total: total.count,
        "nvmlEventSetWait_v2",
        "Ampere",
    ),
    Family(
        "node_gpu_xid_info",
        "info",
        "What a code asks for: the class of each XID that any card of the node counts.",
        _XID_CLASSES,
        present,
        "this exporter's table of XID classes",
    ),
)

STATE: tuple[CardFamily, ...] = (
    Family(
        "node_gpu_clock_event_active",
        "gauge",
        "1 while this reason holds the clocks down (throttling).",
        _CLOCK_EVENTS,
        itself,
        "nvmlDeviceGetCurrentClocksEventReasons",
    ),
    Family(
        "node_gpu_clock_event_seconds_total",
        "counter",
        "Seconds in which this reason held the clocks down since the driver was loaded.",
        _CLOCK_EVENT_SECONDS,
        itself,
        "NVML_FI_DEV_PERF_POLICY_*, NVML_FI_DEV_CLOCKS_EVENT_REASON_*",
    ),
    _of_reading(
        "performance_state",
        "Performance state: 0 is the fastest, 15 the slowest.",
        lambda reading: reading.performance_state,
        "nvmlDeviceGetPerformanceState",
    ),
    _of_reading(
        "fan_speed_ratio",
        "Speed that the fan is set to, of its maximum, 0 to 1; boards with a fan of their own.",
        lambda reading: reading.fan_ratio,
        "nvmlDeviceGetFanSpeed",
    ),
    Family(
        "node_gpu_compute_mode",
        "gauge",
        "1 with the present compute mode.",
        _state("compute modes", "mode", lambda reading: reading.compute_mode),
        present,
        "nvmlDeviceGetComputeMode",
    ),
    _of_reading(
        "persistence_mode",
        "1 if persistence mode is on; only with --devices.persistence-mode.",
        lambda reading: reading.persistence_mode,
        "nvmlDeviceGetPersistenceMode",
    ),
    Family(
        "node_gpu_virtualization_mode",
        "gauge",
        "1 with the present virtualisation mode.",
        _state("virtualisation modes", "mode", lambda reading: reading.virtualization_mode),
        present,
        "nvmlDeviceGetVirtualizationMode",
    ),
    _of_reading(
        "vgpu_licensed",
        "1 if the vGPU guest has its licence; absent where none is needed.",
        lambda reading: reading.vgpu_licensed,
        "nvmlDeviceGetGridLicensableFeatures_v4",
    ),
)

CARD: tuple[CardFamily, ...] = (
    *IDENTITY,
    *MEMORY,
    *UTILIZATION,
    *CLOCKS,
    *TEMPERATURES,
    *POWER,
    *LINKS,
    *ERRORS,
    *STATE,
)
