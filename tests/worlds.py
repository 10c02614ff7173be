"""A node where every source has given everything, for tests that need a full snapshot."""

from __future__ import annotations

from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    BusyTotal,
    Card,
    CardAllocated,
    CardIdentity,
    CardReading,
    CardRemainder,
    CardTotals,
    ClaimDevice,
    Clocks,
    Container,
    ContainerUsage,
    CounterTotal,
    Ecc,
    HostUsage,
    Memory,
    MigSlice,
    Node,
    NvLink,
    Pcie,
    Pod,
    PodList,
    Power,
    Problem,
    Profiling,
    RawCounter,
    ReaderHealth,
    RemappedRows,
    RetiredPages,
    SampleBuffer,
    Snapshot,
    SourceHealth,
    StackFact,
    Status,
    Temperatures,
    UsageResult,
    Utilization,
    XidTotal,
)

NODE = "node-1"
GIB = 1 << 30
NOW = 1_800_000_000.0


def card_uuid(index: int) -> str:
    """The UUID of the card at this index."""
    return f"GPU-5ee0d1a0-0000-4000-8000-{index:012d}"


def mig_uuid(number: int) -> str:
    """The UUID of a MIG slice."""
    return f"MIG-c0ffee00-0000-5000-8000-{number:012d}"


def identity(index: int) -> CardIdentity:
    """A card of which everything is known."""
    return CardIdentity(
        index,
        card_uuid(index),
        minor=index,
        pci_bus_id=f"00000000:{0x10 + index:02X}:00.0",
        model="NVIDIA H100 80GB HBM3",
        serial=f"165002300{index}",
        vbios_version="96.00.74.00.01",
        brand="nvidia",
        architecture="hopper",
        numa_node=index % 2,
    )


def profiling(scale: float = 1.0) -> Profiling:
    """A window with every ratio and rate, each another number."""
    return Profiling(
        window_seconds=5.0,
        graphics_engine_ratio=0.81 * scale,
        sm_active_ratio=0.72 * scale,
        sm_occupancy_ratio=0.43 * scale,
        integer_ratio=0.24 * scale,
        tensor_ratio=0.55 * scale,
        tensor_double_ratio=0.01 * scale,
        tensor_half_ratio=0.52 * scale,
        tensor_integer_ratio=0.02 * scale,
        dram_active_ratio=0.36 * scale,
        fp64_ratio=0.03 * scale,
        fp32_ratio=0.17 * scale,
        fp16_ratio=0.08 * scale,
        pcie_transmitted_bytes_per_second=1048576.0,
        pcie_received_bytes_per_second=2097152.0,
        nvlink_transmitted_bytes_per_second=3145728.0,
        nvlink_received_bytes_per_second=4194304.0,
        nvdec_ratios={"0": 0.11, "1": 0.12},
        nvjpg_ratios={"0": 0.13},
        ofa_ratios={"0": 0.14},
    )


def _links() -> tuple[NvLink, ...]:
    errors = {"crc_flit": 1, "crc_data": 2, "replay": 3, "recovery": 4, "ecc": 5}
    return tuple(
        NvLink(
            link,
            active=True,
            speed_bytes_per_second=26_562_000_000,
            transmitted_bytes=RawCounter(1000 + link),
            received_bytes=RawCounter(2000 + link),
            errors=errors,
        )
        for link in (0, 1)
    )


SAMPLED = ("gpu", "memory", "encoder", "decoder")


def reading(index: int, **changes: object) -> CardReading:
    """A card that gives every reading, without MIG."""
    filled: dict[str, object] = {
        "memory": Memory(80 * GIB, 30 * GIB, 49 * GIB, 1 * GIB),
        "bar1": Memory(128 * GIB, 2 * GIB, 126 * GIB),
        "utilization": Utilization(0.5, 0.25, 0.1, 0.2, 0.3, 0.4),
        "samples": tuple(SampleBuffer(kind, ()) for kind in SAMPLED),
        "clocks": Clocks(
            1_980_000_000,
            1_980_000_000,
            2_619_000_000,
            1_545_000_000,
            1_980_000_000,
            1_980_000_000,
            2_619_000_000,
            1_545_000_000,
        ),
        "temperatures": Temperatures(45.0, 52.0, 92.0, 89.0, 83.0, 95.0, 87.0),
        "power": Power(312.5, 310.0, 315.25, 700.0, 700.0, 123456.789),
        "pcie": Pcie(5, 5, 16, 16, 3, 4, RawCounter(10_000, 32), RawCounter(20_000, 32)),
        "nvlinks": _links(),
        "ecc": Ecc(True, True, 1, 2, 3, 4),
        "retired_pages": RetiredPages(5, 6, False),
        "remapped_rows": RemappedRows(7, 8, True, False),
        "clock_event_reasons": {"gpu_idle": False, "sw_power_cap": True},
        "clock_event_seconds": {
            "board_limit": 1.5,
            "low_utilization": 2.5,
            "power": 3.5,
            "reliability": 4.5,
            "sw_power_cap": 3.5,
            "sync_boost": 5.5,
            "thermal": 6.5,
        },
        "performance_state": 0,
        "fan_ratio": 0.3,
        "compute_mode": "default",
        "persistence_mode": True,
        "recovery_action": "none",
        "fabric_state": "completed",
        "fabric_status": 0,
        "fabric_health_mask": 5,
        "vgpu_licensed": True,
        "virtualization_mode": "none",
        "mig_enabled": False,
        "mig_pending": False,
        "profiling": profiling(),
        "processes": (),
    }
    return CardReading(identity(index), **{**filled, **changes})  # type: ignore[arg-type]  # a test's table


def mig_reading(index: int) -> CardReading:
    """A card in MIG mode: an instance alone, one of two compute instances, one without any."""
    slices = (
        MigSlice(
            1,
            0,
            mig_uuid(1),
            "3g.40gb",
            compute_slices=3,
            memory_slices=4,
            multiprocessors=60,
            placement_start=4,
            memory=Memory(40 * GIB, 5 * GIB, 34 * GIB, 1 * GIB),
            profiling=profiling(0.5),
        ),
        *(
            MigSlice(
                2,
                number,
                mig_uuid(20 + number),
                "1c.2g.20gb",
                compute_slices=1,
                memory_slices=2,
                multiprocessors=16,
                placement_start=0,
                memory=Memory(20 * GIB, 3 * GIB, 17 * GIB),
                profiling=profiling(0.25),
            )
            for number in (0, 1)
        ),
        MigSlice(9, None, None, None),
    )
    return reading(
        index,
        utilization=Utilization(),
        samples=(),
        mig_enabled=True,
        mig_pending=True,
        mig_compute_slices=7,
        mig_slices=slices,
    )


def totals() -> CardTotals:
    """Totals of everything that a card may count."""
    busy = BusyTotal(100.5, 200.25, 1, 166_666)
    links = ("pcie", "nvlink_0", "nvlink_1")
    names = [f"{link}_{way}_bytes" for link in links for way in ("transmitted", "received")]
    return CardTotals(
        counters={name: CounterTotal(5_000_000_000, RawCounter(1)) for name in names},
        busy=dict.fromkeys(SAMPLED, busy),
        xids={79: XidTotal(0), 94: XidTotal(2, NOW - 60)},
        mig_xids={(94, "1"): XidTotal(1, NOW - 60)},
        last_xid=94,
        pci_bus_id="00000000:10:00.0",
    )


def _allocations() -> tuple[Allocation, ...]:
    qgpu = "tke.cloud.tencent.com/qgpu-core"
    claim = ClaimDevice("team", "claim-x", "gpu.nvidia.com", "node-1", "gpu-2", "share-1")
    return (
        Allocation(
            "team", "half", "main", 0, card_uuid(0), "qgpu", qgpu, card_uuid(0),
            "uid-half", None, 50.0, 20 * GIB,
        ),
        Allocation(
            "team", "offline", "main", 0, card_uuid(0), "qgpu", qgpu, card_uuid(0),
            "uid-offline", None, None, 8 * GIB, 90.0,
        ),
        Allocation(
            "team", "mig", "main", 1, mig_uuid(1), "mig", "nvidia.com/mig-3g.40gb", mig_uuid(1),
            "uid-mig", "1", 300 / 7, 40 * GIB, exclusive=True,
        ),
        Allocation(
            "team", "whole", "main", 2, card_uuid(2), "dra", "gpu.nvidia.com", card_uuid(2),
            "uid-whole", None, 100.0, 80 * GIB, exclusive=True, claim=claim,
        ),
    )  # fmt: skip


def allocation_result() -> AllocationResult:
    """Holders of each kind, a contradiction, a problem and a pod that waits."""
    return AllocationResult(
        _allocations(),
        (Problem("unknown_card", "team", "lost", "main", None, "card 9"),),
        {(0, "card"): 1},
        (("team", "waiting"),),
    )


def usage_result() -> UsageResult:
    """Containers with every number, a host's process, and the rest of each card."""
    return UsageResult(
        (
            ContainerUsage(0, "team", "half", "main", 40.0, 10 * GIB, 1.0, 2.0, 3, 12.5),
            ContainerUsage(0, "team", "offline", "main", 10.0, 2 * GIB, 0.0, 0.0, 1, 1.5),
            ContainerUsage(0, "team", "thief", "main", 5.0, 1 * GIB, 0.0, 0.0, 1, 0.5, False),
            ContainerUsage(1, "team", "mig", "main", 15.0, 5 * GIB, processes=1),
            ContainerUsage(2, "team", "whole", "main", 50.0, 30 * GIB, 0.0, 0.0, 2, 100.0),
        ),
        (HostUsage(0, "systemd", "demo.service", 3.0, 1 * GIB, 1),),
        (CardRemainder(0, 5.0, 17 * GIB, 1), CardRemainder(2, 0.0, 0)),
    )


def pods() -> PodList:
    """The pods of the allocations; one has labels whose names meet."""
    names = ("half", "mig", "offline", "thief", "waiting", "whole")
    labels = {"app.kubernetes.io/name": "half", "tier": "a", "team-x": "1", "team.x": "2"}
    return PodList(
        NOW,
        tuple(
            Pod(
                "team",
                name,
                f"uid-{name}",
                "Running",
                labels=labels if name == "half" else {},
                containers=(Container("main", state="running"),),
            )
            for name in names
        ),
    )


def full_snapshot() -> Snapshot:
    """Four cards: shared, MIG, whole, lost; every field of the snapshot is filled."""
    cards = (
        Card(identity(0), reading(0), None, 80 * GIB, None, totals()),
        Card(identity(1), mig_reading(1), None, 80 * GIB, 7, CardTotals()),
        Card(identity(2), reading(2), None, 80 * GIB, None, totals()),
        Card(identity(3), None, "lost", 80 * GIB, None, CardTotals(xids={79: XidTotal(1, NOW)})),
    )
    node = Node(
        NODE,
        labels={"nvidia.com/mig.config.state": "success"},
        allocatable={"nvidia.com/gpu": "2", "tke.cloud.tencent.com/qgpu-core": "100"},
    )
    return Snapshot(
        NODE,
        NOW,
        "570.133.20",
        "12.570.133.20",
        "12.8",
        cards,
        devices_up=True,
        allocation=allocation_result(),
        usage=usage_result(),
        pods=pods(),
        node_object=node,
        stack=(StackFact("driver-ready", "present", NOW - 3600), StackFact("driver", "570.133.20")),
        allocated={
            0: CardAllocated(50.0, 28 * GIB, 2),
            1: CardAllocated(300 / 7, 40 * GIB, 1),
            2: CardAllocated(100.0, 80 * GIB, 1),
            3: CardAllocated(None, None, 0),
        },
        xid_classes={79: "reboot", 94: "restart_app"},
        pod_labels_exported=True,
    )


def full_status() -> Status:
    """The service with every part of its status filled."""
    return Status(
        "1.2.3",
        "abcdef0",
        "3.11.2",
        NOW - 3600,
        (
            SourceHealth("nvml", True, NOW, 0.012, {"timeout": 2}, ""),
            SourceHealth("podresources", False, NOW - 60, 0.002, {"unavailable": 3}, "down"),
            SourceHealth("kubernetes"),
        ),
        ReaderHealth(4242, {"crash": 1}, 0),
        NOW,
        snapshot_stale=False,
        join_duration_seconds=0.003,
        scrapes={"ok": 10, "rejected": 1},
        nvml_calls=200,
        index_changes=1,
        dropped_series={"failed": 1},
    )
