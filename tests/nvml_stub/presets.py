"""Cards as real ones answer: what each generation offers and refuses, with made-up identities."""

from __future__ import annotations

import pynvml

MIB = 1 << 20
Card = dict[str, object]

UNSIGNED, LONG = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG


def uuid(index: int) -> str:
    """The UUID of a made-up card."""
    return f"GPU-c0de0000-0000-4000-8000-{index:012d}"


def mig_uuid(index: int, place: int) -> str:
    """The UUID of a made-up MIG device."""
    return f"MIG-c0de0000-0000-5000-8000-{index:06d}{place:06d}"


def memory_mib(total: int, reserved: int, used: int, free: int) -> str:
    """Frame buffer as the second version of the call counts it."""
    return ",".join(str(part * MIB) for part in (total, reserved, used, free))


def field(number: int, kind: int = UNSIGNED) -> str:
    """A field value of a type."""
    return f"{kind}:{number}"


def _every_card(index: int) -> Card:
    return {
        "nvmlDeviceGetUUID": uuid(index),
        "nvmlDeviceGetSerial": f"165000000000{index}",
        "nvmlDeviceGetMinorNumber": index,
        "nvmlDeviceGetPciInfo": f"00000000:{index + 1:02X}:00.0",
        "nvmlDeviceGetBrand": pynvml.NVML_BRAND_NVIDIA,
        "nvmlDeviceGetVirtualizationMode": 0,
        "nvmlDeviceGetMemoryAffinity": 1,
        "nvmlDeviceGetPerformanceState": 0,
        "nvmlDeviceGetComputeMode": 0,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
        "nvmlDeviceGetCurrentClocksEventReasons": 1,
        "nvmlDeviceGetPersistenceMode": 0,
        "nvmlDeviceGetComputeRunningProcesses": "",
        "nvmlDeviceGetGraphicsRunningProcesses": "",
        "nvmlDeviceGetMPSComputeRunningProcesses": "",
        "field.1": field(1),
        "field.2": field(1),
        **{f"field.{number}": field(0, LONG) for number in (3, 4, 5, 6)},
        "field.94": field(0),
        "field.83": field(90_000_000, LONG),
        **{f"field.{number}": field(0, LONG) for number in (74, 75, 76, 77, 78, 79)},
    }


def _engines(percents: str = "0,0") -> Card:
    return {
        "nvmlDeviceGetUtilizationRates": percents,
        "nvmlDeviceGetEncoderUtilization": "0,167000",
        "nvmlDeviceGetDecoderUtilization": "0,167000",
        "nvmlDeviceGetProcessUtilization": "",
        **{f"nvmlDeviceGetSamples.{kind}": "" for kind in (1, 2, 3, 4)},
    }


def _clocks(now: tuple[int, int, int], most: tuple[int, int, int]) -> Card:
    names = {"nvmlDeviceGetClockInfo": now, "nvmlDeviceGetMaxClockInfo": most}
    return {
        f"{name}.{kind}": (graphics, graphics, memory, video)[kind]
        for name, (graphics, memory, video) in names.items()
        for kind in range(4)
    }


def _temperature(celsius: int, limits: dict[int, int]) -> Card:
    return {
        "nvmlDeviceGetTemperatureV": celsius,
        "nvmlDeviceGetTemperature.0": celsius,
        **{f"nvmlDeviceGetTemperatureThreshold.{kind}": limit for kind, limit in limits.items()},
    }


def _power(milliwatts: int, limit: int) -> Card:
    return {
        "nvmlDeviceGetPowerUsage": milliwatts,
        "nvmlDeviceGetEnforcedPowerLimit": limit,
        "nvmlDeviceGetPowerManagementDefaultLimit": limit,
    }


def _pcie(now: int, most: int) -> Card:
    return {
        "nvmlDeviceGetCurrPcieLinkGeneration": now,
        "nvmlDeviceGetMaxPcieLinkGeneration": most,
    }


def _remapped_rows() -> Card:
    return {f"field.{number}": field(0) for number in (142, 143, 144, 145)}


def _newer_fields(average: int, instant: int) -> Card:
    return {
        "field.185": field(average),
        "field.186": field(instant),
        "field.230": field(0),
        "field.173": field(0),
        "field.197": field(5_000_000_000, LONG),
        "field.198": field(7_000_000_000, LONG),
        **{f"field.{number}": field(0, LONG) for number in (269, 270, 271)},
    }


def t4(index: int = 0) -> Card:
    """Turing: no memory temperature, no remapped rows, no MIG, no fan; pages can be retired."""
    return {
        **_every_card(index),
        **_engines(),
        **_clocks((585, 5000, 810), (1590, 5001, 1470)),
        **_temperature(40, {0: 96, 1: 93, 3: 85}),
        **_power(26_780, 70_000),
        **_pcie(3, 3),
        "nvmlDeviceGetName": "Tesla T4",
        "nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_TURING,
        "nvmlDeviceGetVirtualizationMode": 1,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMemoryInfo": memory_mib(15360, 388, 1032, 13940),
        "nvmlDeviceGetBAR1MemoryInfo": f"{256 * MIB},{5 * MIB},{251 * MIB}",
        "nvmlDeviceGetGraphicsRunningProcesses": f"675:{22 * MIB}",
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        **{f"field.{number}": field(0, LONG) for number in (29, 30)},
        "field.31": field(0),
    }


def l40s(index: int = 0) -> Card:
    """Ada under load: limits only as a distance, no memory temperature, no fabric, no GPM."""
    return {
        **_every_card(index),
        **_engines("9,2"),
        **_clocks((2520, 9001, 1965), (2520, 9001, 1965)),
        **_temperature(54, {}),
        **_power(110_240, 350_000),
        **_pcie(4, 4),
        **_remapped_rows(),
        **_newer_fields(110_240, 110_010),
        "nvmlDeviceGetName": "NVIDIA L40S",
        "nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_ADA,
        "nvmlDeviceGetVirtualizationMode": 1,
        "nvmlDeviceGetMemoryInfo": memory_mib(46068, 609, 1235, 44224),
        "nvmlDeviceGetBAR1MemoryInfo": f"{65536 * MIB},{1235 * MIB},{64301 * MIB}",
        "nvmlDeviceGetEncoderUtilization": "59,167000",
        "nvmlDeviceGetJpgUtilization": "0,167000",
        "nvmlDeviceGetOfaUtilization": "0,167000",
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlDeviceGetComputeRunningProcesses": f"20037:{538 * MIB},20038:{681 * MIB}",
        "nvmlGpmQueryDeviceSupport": 0,
        "field.74": field(204_642_816_000, LONG),
    }


def _hopper(index: int) -> Card:
    return {
        **_every_card(index),
        **_pcie(5, 5),
        "nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_HOPPER,
        "nvmlDeviceGetGpuFabricInfoV": "3,0,0",
        "nvmlGpmQueryDeviceSupport": 1,
        "field.91": field(18),
        **{
            key: value
            for link in range(18)
            for key, value in {
                f"field.165.{link}": field(1),
                f"field.164.{link}": field(26_562),
                f"field.138.{link}": field(1000 + link, LONG),
                f"field.139.{link}": field(2000 + link, LONG),
                **{f"field.{number}.{link}": field(0, LONG) for number in (161, 162, 163)},
            }.items()
        },
    }


def _gpm(prefix: str, sm_percent: float) -> Card:
    return {
        f"{prefix}1": sm_percent,
        f"{prefix}2": sm_percent,
        f"{prefix}3": 12.5,
        f"{prefix}5": 25.0,
        f"{prefix}10": 40.0,
        f"{prefix}20": 2.0,
        f"{prefix}21": 4.0,
        f"{prefix}30": 0.0,
    }


def h200(index: int = 0) -> Card:
    """Hopper under load, without MIG."""
    return {
        **_hopper(index),
        **_engines("100,7"),
        **_clocks((1980, 3201, 1545), (1980, 3201, 1545)),
        **_temperature(52, {}),
        **_power(627_320, 700_000),
        **_remapped_rows(),
        **_newer_fields(627_320, 625_240),
        **_gpm("gpm.", 99.0),
        "gpm.60": 16.0,
        "gpm.61": 8.0,
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetMigMode": "0,0",
        "nvmlDeviceGetMemoryInfo": memory_mib(143771, 614, 32362, 110795),
        "nvmlDeviceGetBAR1MemoryInfo": f"{262144 * MIB},{32363 * MIB},{229781 * MIB}",
        "nvmlDeviceGetJpgUtilization": "0,167000",
        "nvmlDeviceGetOfaUtilization": "0,167000",
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlDeviceGetComputeRunningProcesses": (
            f"10291:{2566 * MIB},10293:{1542 * MIB},10309:{28234 * MIB}"
        ),
        "field.82": field(41),
    }


def mig_device(
    index: int,
    place: int,
    *,
    instances: tuple[int, int],
    name: str,
    slices: tuple[int, int],
    multiprocessors: int,
    memory: tuple[int, int],
) -> Card:
    """One MIG device; `slices` of the GPU and the compute instance, `memory` total, used in MiB."""
    total, used = memory
    prefix = f"mig.{place}."
    return {
        f"{prefix}nvmlDeviceGetUUID": mig_uuid(index, place),
        f"{prefix}nvmlDeviceGetName": name,
        f"{prefix}nvmlDeviceGetGpuInstanceId": instances[0],
        f"{prefix}nvmlDeviceGetComputeInstanceId": instances[1],
        f"{prefix}nvmlDeviceGetAttributes_v2": (
            f"{multiprocessors},1,1,0,1,0,{slices[0]},{slices[1]},{total}"
        ),
        f"{prefix}nvmlDeviceGetMemoryInfo": memory_mib(total, 0, used, total - used),
        f"{prefix}nvmlDeviceGetComputeRunningProcesses": "",
        f"{prefix}nvmlDeviceGetMPSComputeRunningProcesses": "",
    }


def h100_mig(index: int = 0) -> Card:
    """Hopper in MIG mode with four instances: no utilisation, no remapped rows, GPM by instance."""
    name = "NVIDIA H100 80GB HBM3"
    made: Card = {
        **_hopper(index),
        **_clocks((345, 2619, 765), (1980, 2619, 1545)),
        **_temperature(42, {}),
        **_power(71_270, 700_000),
        **_newer_fields(71_270, 72_630),
        **_gpm("gpm.", 3.0),
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetVirtualizationMode": 1,
        "nvmlDeviceGetMigMode": "1,1",
        "nvmlDeviceGetMaxMigDeviceCount": 7,
        "nvmlDeviceGetMemoryInfo": memory_mib(81559, 478, 59, 81022),
        "nvmlDeviceGetBAR1MemoryInfo": f"{131072 * MIB},{81081 * MIB},{49991 * MIB}",
        "field.82": field(48),
        "field.94": field(9),
    }
    shapes = (
        (2, "3g.40gb", 3, 60, (40448, 26)),
        (3, "2g.20gb", 2, 32, (20096, 17)),
        (9, "1g.10gb", 1, 16, (9984, 9)),
        (10, "1g.10gb", 1, 16, (9984, 9)),
    )
    for place, (instance, profile, slices, multiprocessors, memory) in enumerate(shapes):
        made |= mig_device(
            index,
            place,
            instances=(instance, 0),
            name=f"{name} MIG {profile}",
            slices=(slices, slices),
            multiprocessors=multiprocessors,
            memory=memory,
        )
        made |= _gpm(f"gpm.{instance}.", 10.0 * slices)
    return made


def a100_mig(index: int = 0) -> Card:
    """Ampere in MIG mode with four instances 1g.20gb: absolute limits, no GPM, no fabric."""
    name = "NVIDIA A100-SXM4-80GB"
    made: Card = {
        **_every_card(index),
        **_clocks((1275, 1593, 1275), (1410, 1593, 1290)),
        **_temperature(27, {0: 92, 1: 89, 2: 95, 3: 85}),
        **_power(67_030, 500_000),
        **_pcie(4, 4),
        "nvmlDeviceGetName": name,
        "nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_AMPERE,
        "nvmlDeviceGetMigMode": "1,1",
        "nvmlDeviceGetMaxMigDeviceCount": 7,
        "nvmlDeviceGetMemoryInfo": memory_mib(81920, 870, 50, 81000),
        "nvmlDeviceGetBAR1MemoryInfo": f"{131072 * MIB},{MIB},{131071 * MIB}",
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlGpmQueryDeviceSupport": 0,
        "field.82": field(44),
    }
    for place, instance in enumerate((3, 4, 5, 6)):
        made |= mig_device(
            index,
            place,
            instances=(instance, 0),
            name=f"{name} MIG 1g.20gb",
            slices=(1, 1),
            multiprocessors=14,
            memory=(19968, 12),
        )
    return made
