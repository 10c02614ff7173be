"""The values that travel from the sources to the metrics: frozen, units in the field names.

`None` always means "not offered here": the driver, the kubelet or the API does not give the value.
A zero is a measurement.  Nothing in this module computes, reads a clock or does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# --------------------------------------------------------------------------- the card


@dataclass(frozen=True, slots=True)
class CardIdentity:
    """What names a card; `index` is the NVML index, `minor` the N of /dev/nvidiaN."""

    index: int
    uuid: str
    minor: int | None = None
    pci_bus_id: str | None = None
    """Domain with eight hex digits, upper case: ``00000000:3B:00.0``."""
    model: str | None = None
    serial: str | None = None
    vbios_version: str | None = None
    brand: str | None = None
    architecture: str | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Frame buffer or BAR1; `used_bytes` excludes the driver's reserve where that is known."""

    total_bytes: int
    used_bytes: int
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    """None where only the v1 call answers: the reserve is then part of `used_bytes`."""


@dataclass(frozen=True, slots=True)
class Utilization:
    """The driver's own momentary ratios (0 to 1), each over its last sample of 1/6 to 1 s."""

    gpu_ratio: float | None = None
    memory_ratio: float | None = None
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None
    jpeg_ratio: float | None = None
    ofa_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clock rates now, and the highest that the card allows."""

    graphics_hertz: int | None = None
    sm_hertz: int | None = None
    memory_hertz: int | None = None
    video_hertz: int | None = None
    max_graphics_hertz: int | None = None
    max_sm_hertz: int | None = None
    max_memory_hertz: int | None = None
    max_video_hertz: int | None = None


@dataclass(frozen=True, slots=True)
class Temperatures:
    """Readings and the card's own limits."""

    gpu_celsius: float | None = None
    memory_celsius: float | None = None
    shutdown_limit_celsius: float | None = None
    slowdown_limit_celsius: float | None = None
    target_limit_celsius: float | None = None
    memory_limit_celsius: float | None = None
    max_operating_limit_celsius: float | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """Draw and limits; `energy_joules` counts since the driver was loaded."""

    draw_watts: float | None = None
    average_watts: float | None = None
    instant_watts: float | None = None
    enforced_limit_watts: float | None = None
    default_limit_watts: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class RawCounter:
    """A cumulative driver counter as read; `bits` is its width, where it may wrap."""

    value: int
    bits: Literal[32, 64] = 64


@dataclass(frozen=True, slots=True)
class Pcie:
    """The card's PCIe link."""

    generation: int | None = None
    max_generation: int | None = None
    width: int | None = None
    max_width: int | None = None
    replays: int | None = None
    correctable_errors: int | None = None
    transmitted_bytes: RawCounter | None = None
    received_bytes: RawCounter | None = None


@dataclass(frozen=True, slots=True)
class NvLink:
    """One NVLink port of a card."""

    link: int
    active: bool | None = None
    speed_bytes_per_second: int | None = None
    transmitted_bytes: RawCounter | None = None
    received_bytes: RawCounter | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    """Cumulative counts by kind: ``crc_flit``, ``crc_data``, ``replay``, ``recovery``, ``ecc``."""


@dataclass(frozen=True, slots=True)
class Ecc:
    """ECC mode and error counts; volatile counts since driver load, aggregate for life."""

    enabled: bool | None = None
    pending: bool | None = None
    corrected_volatile: int | None = None
    uncorrected_volatile: int | None = None
    corrected_aggregate: int | None = None
    uncorrected_aggregate: int | None = None


@dataclass(frozen=True, slots=True)
class RetiredPages:
    """Retired memory pages (before Ampere)."""

    single_bit: int | None = None
    double_bit: int | None = None
    pending: bool | None = None


@dataclass(frozen=True, slots=True)
class RemappedRows:
    """Remapped memory rows (Ampere and later)."""

    correctable: int | None = None
    uncorrectable: int | None = None
    pending: bool | None = None
    failure: bool | None = None


@dataclass(frozen=True, slots=True)
class Profiling:
    """GPM ratios (0 to 1) and rates over the last window, of a card or of a GPU instance."""

    window_seconds: float
    graphics_engine_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    integer_ratio: float | None = None
    tensor_ratio: float | None = None
    tensor_double_ratio: float | None = None
    tensor_half_ratio: float | None = None
    tensor_integer_ratio: float | None = None
    dram_active_ratio: float | None = None
    fp64_ratio: float | None = None
    fp32_ratio: float | None = None
    fp16_ratio: float | None = None
    pcie_transmitted_bytes_per_second: float | None = None
    pcie_received_bytes_per_second: float | None = None
    nvlink_transmitted_bytes_per_second: float | None = None
    nvlink_received_bytes_per_second: float | None = None
    nvdec_ratios: Mapping[str, float] = field(default_factory=dict)
    """By engine number; likewise the next two."""
    nvjpg_ratios: Mapping[str, float] = field(default_factory=dict)
    ofa_ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One entry of a driver's sample buffer: the mean since the entry before it."""

    timestamp_us: int
    ratio: float


@dataclass(frozen=True, slots=True)
class SampleBuffer:
    """The new entries of one sample buffer, oldest first.

    `kind`: ``gpu``, ``memory``, ``encoder`` or ``decoder``.
    """

    kind: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a card, once per (pid, GPU instance, compute instance); pid of the host."""

    pid: int
    memory_bytes: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    kinds: tuple[str, ...] = ()
    """Sorted, of ``compute``, ``graphics``, ``mps``."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One utilisation sample of one process; ratios 0 to 1 of the whole card."""

    pid: int
    timestamp_us: int
    sm_ratio: float | None = None
    memory_ratio: float | None = None
    encoder_ratio: float | None = None
    decoder_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessWindow:
    """The process samples that are new since the round before, and the time they speak of."""

    since_us: int
    until_us: int
    samples: tuple[ProcessSample, ...] = ()


@dataclass(frozen=True, slots=True)
class MigSlice:
    """One MIG device: a compute instance of a GPU instance, or a GPU instance without one."""

    gpu_instance: int
    compute_instance: int | None
    uuid: str | None
    profile: str | None
    """As NVML's name spells it: ``3g.40gb``, ``1c.3g.40gb``, ``1g.10gb+me``."""
    compute_slices: int | None = None
    """Compute slices of this slice (of the compute instance where it is smaller)."""
    memory_slices: int | None = None
    multiprocessors: int | None = None
    placement_start: int | None = None
    memory: Memory | None = None
    """Of the GPU instance: shared by its compute instances."""
    profiling: Profiling | None = None


@dataclass(frozen=True, slots=True)
class CardReading:
    """What one round read of one card that answered."""

    identity: CardIdentity
    memory: Memory | None = None
    bar1: Memory | None = None
    utilization: Utilization = Utilization()
    clocks: Clocks = Clocks()
    temperatures: Temperatures = Temperatures()
    power: Power = Power()
    pcie: Pcie = Pcie()
    nvlinks: tuple[NvLink, ...] = ()
    ecc: Ecc = Ecc()
    retired_pages: RetiredPages = RetiredPages()
    remapped_rows: RemappedRows = RemappedRows()
    clock_event_reasons: Mapping[str, bool] | None = None
    """By reason: ``gpu_idle``, ``applications_clocks_setting``, ``sw_power_cap``, ``hw_slowdown``,
    ``sync_boost``, ``sw_thermal_slowdown``, ``hw_thermal_slowdown``, ``hw_power_brake_slowdown``,
    ``display_clock_setting``."""
    clock_event_seconds: Mapping[str, float] = field(default_factory=dict)
    """Cumulative, by reason (the names above, and ``board_limit``, ``low_utilization``,
    ``reliability``, ``thermal``, ``power``)."""
    performance_state: int | None = None
    fan_ratio: float | None = None
    compute_mode: str | None = None
    """``default``, ``exclusive_thread``, ``prohibited``, ``exclusive_process``."""
    persistence_mode: bool | None = None
    recovery_action: str | None = None
    """``none``, ``gpu_reset``, ``node_reboot``, ``drain_p2p``, ``drain_and_reset``,
    ``recover_imex_domain``, ``bus_reset``, ``system_reboot``."""
    fabric_state: str | None = None
    """``not_supported``, ``not_started``, ``in_progress``, ``completed``."""
    fabric_status: int | None = None
    fabric_health_mask: int | None = None
    vgpu_licensed: bool | None = None
    virtualization_mode: str | None = None
    mig_enabled: bool | None = None
    mig_pending: bool | None = None
    mig_compute_slices: int | None = None
    """Compute slices of the whole card (7 on A100 and H100); None where MIG is off."""
    mig_slices: tuple[MigSlice, ...] = ()
    profiling: Profiling | None = None
    samples: tuple[SampleBuffer, ...] = ()
    processes: tuple[Process, ...] | None = None
    """None: the driver gives no process lists for this card."""
    process_window: ProcessWindow | None = None
    """None: the driver gives no process utilisation for this card."""


DownReason = str
"""Why a card gives no readings: ``timeout``, ``lost``, ``reset_required``, ``unknown_error``,
``no_permission``, ``missing`` (known from before, no longer listed), ``error``."""


@dataclass(frozen=True, slots=True)
class CardFailure:
    """A card that the round could not read; identity as far as the driver still gave it."""

    index: int
    reason: DownReason
    detail: str = ""
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Xid:
    """One XID event; `origin` is ``nvml`` or ``kmsg``."""

    timestamp_seconds: float
    xid: int
    uuid: str | None = None
    pci_bus_id: str | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    origin: str = "nvml"
    old: bool = False
    """A line that stood in the kernel log before the exporter started: last-time family only."""


@dataclass(frozen=True, slots=True)
class ReaderError:
    """Why a whole round gave nothing: `reason` is ``library_not_found``, ``driver_not_loaded``,
    ``mismatch``, ``no_permission``, ``unknown_error`` (on all cards), ``timeout`` (the driver has
    not answered the first call), ``error``."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One round of the reader, all cards in index order; with `error` set it has no cards."""

    timestamp_seconds: float
    """Unix time at which the round began."""
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: str | None = None
    cards: tuple[CardReading, ...] = ()
    failures: tuple[CardFailure, ...] = ()
    events: tuple[Xid, ...] = ()
    calls: int = 0
    """NVML calls that this round made."""
    error: ReaderError | None = None


@dataclass(frozen=True, slots=True)
class SeenSamples:
    """What the service already holds of a card's buffers: newest timestamp by kind, in us."""

    uuid: str
    samples_us: Mapping[str, int] = field(default_factory=dict)
    processes_us: int = 0


@dataclass(frozen=True, slots=True)
class ReadingRequest:
    """What the service asks the reader each round."""

    seen: tuple[SeenSamples, ...] = ()


# --------------------------------------------------------------------------- kubelet


@dataclass(frozen=True, slots=True, order=True)
class ClaimDevice:
    """One device of a DRA claim as the kubelet lists it under a container."""

    claim_namespace: str
    claim_name: str
    driver: str
    pool: str
    device: str
    share_id: str = ""
    cdi_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KubeletContainer:
    """What the kubelet lists for one container: resource -> sorted, distinct device ids."""

    namespace: str
    pod: str
    container: str
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    claims: tuple[ClaimDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class KubeletList:
    """One answer of List: containers that hold a device or a claim, in stable order."""

    asked_at_seconds: float
    """Monotonic clock when the call was sent; the same clock as `Pod.first_seen_at_seconds`."""
    timestamp_seconds: float
    """Unix time of the answer."""
    containers: tuple[KubeletContainer, ...] = ()


# --------------------------------------------------------------------------- API server

ContainerKind = Literal["app", "init", "sidecar", "ephemeral"]
ContainerState = Literal["waiting", "running", "terminated"]


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, spec and status joined by name."""

    name: str
    kind: ContainerKind = "app"
    resources: Mapping[str, str] = field(default_factory=dict)
    """Extended resources as written (limits over requests), Kubernetes quantities."""
    state: ContainerState | None = None
    container_id: str | None = None
    """64 hex digits, without the runtime's prefix."""
    claims: tuple[str, ...] = ()
    """Names of the ResourceClaims that it uses, sorted."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The fields of a pod that decide about GPUs; containers in the order init, app, ephemeral."""

    namespace: str
    name: str
    uid: str
    phase: str = "Pending"
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    containers: tuple[Container, ...] = ()
    terminating: bool = False
    config_hash: str | None = None
    """Annotation kubernetes.io/config.hash: the UID in a static pod's cgroup."""
    first_seen_at_seconds: float = 0.0
    """Monotonic clock when this UID was first seen."""


@dataclass(frozen=True, slots=True)
class PodList:
    """All pods of this node that the API lists, sorted by namespace, name, uid."""

    timestamp_seconds: float
    """Unix time of the last list, event or bookmark."""
    pods: tuple[Pod, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """This node's own object."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """One device of a ResourceSlice of this node."""

    driver: str
    pool: str
    device: str
    kind: str | None = None
    """``gpu``, ``mig`` or ``vfio``."""
    uuid: str | None = None
    parent_uuid: str | None = None
    profile: str | None = None
    placement_start: int | None = None


@dataclass(frozen=True, slots=True)
class GpuObject:
    """One `gpus.elasticgpu.io` object of this node."""

    index: int
    uuid: str
    minor: int | None = None


# --------------------------------------------------------------------------- processes


@dataclass(frozen=True, slots=True)
class CgroupNames:
    """What a process's cgroup paths say, outermost first; nothing is checked against pods."""

    containers: tuple[tuple[str | None, str], ...] = ()
    """(pod UID or config hash or None, 64-hex container id)."""
    pod_uids: tuple[str, ...] = ()
    owner_kind: str | None = None
    """Outside Kubernetes: ``docker``, ``podman``, ``containerd``, ``container`` (runtime unknown),
    ``lxc``, ``slurm``, ``user`` or ``systemd``."""
    owner: str | None = None
    """Short container id, job id, user id or unit name."""


# --------------------------------------------------------------------------- health

SourceName = Literal[
    "nvml",
    "podresources",
    "kubernetes",
    "node",
    "resourceslices",
    "elasticgpu",
    "processes",
    "kmsg",
    "stack",
]


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How a source does; a source that is switched off has none."""

    source: SourceName
    up: bool | None = None
    """None until its first outcome."""
    last_success_timestamp_seconds: float | None = None
    read_duration_seconds: float | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    """Count by reason since start."""
    detail: str = ""
    """One line for people: what is wrong and how to mend it; empty while all is well."""
    released: bool = False
    """The driver was let go on purpose (MIG or driver change)."""


@dataclass(frozen=True, slots=True)
class ReaderHealth:
    """The reader process as the service sees it."""

    pid: int | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    """By reason: ``crash``, ``silent``, ``garbage``, ``memory``, ``mismatch``, ``unknown_error``,
    ``unanswered`` (no card, or one card for long), ``released``."""
    left_behind: int = 0
    """Children that could not be killed."""


# --------------------------------------------------------------------------- allocation


@dataclass(frozen=True, slots=True)
class Allocation:
    """One container's hold on one card or slice: a row of `node_gpu_allocation_info`."""

    namespace: str
    pod: str
    container: str
    gpu: int
    """NVML index of the card."""
    uuid: str
    """Of the card, or of the slice."""
    scheme: str
    resource: str
    device: str
    """The canonical card (its UUID) or slice (its MIG UUID, or ``<card uuid>/<gi>[/<ci>]``)."""
    pod_uid: str | None = None
    mig: str | None = None
    """``<gi>`` or ``<gi>/<ci>``, None for a whole card or a share of one."""
    core_percent: float | None = None
    """Guaranteed share of the card, 100 = all of it; None where the scheme guarantees none."""
    memory_bytes: int | None = None
    greedy_core_percent: float | None = None
    kind: ContainerKind = "app"
    exclusive: bool = False
    """The container is the only possible holder: a whole card or an unshared slice."""
    claim: ClaimDevice | None = None


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """A contradiction or unreadable fact; counted by kind, logged once, shown in /caches."""

    kind: str
    """snake_case, e.g. ``unknown_card``, ``bad_annotation``, ``card_mismatch``, ``memory_unit``."""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    gpu: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AllocationResult:
    """What `allocation.allocate` returns, in stable order."""

    allocations: tuple[Allocation, ...] = ()
    problems: tuple[Problem, ...] = ()
    conflicts: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """(gpu, kind) -> containers whose kubelet row and annotation name different cards."""
    unassigned_pods: tuple[tuple[str, str], ...] = ()
    """(namespace, pod) of pods that ask for a share and have no card written down yet."""
    complete: bool = True
    """False before the first pod list: families that depend on it are absent."""


@dataclass(frozen=True, slots=True)
class CardAllocated:
    """What the schemes hand out of one card; per pod max(init, sum of app containers)."""

    core_percent: float | None = None
    """None: no holder has a guaranteed share."""
    memory_bytes: int | None = None
    containers: int = 0
    """Containers that hold the card, a share or a slice of it; replicas count once each."""


# --------------------------------------------------------------------------- usage


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """What one container uses of one card; None where the driver does not say."""

    gpu: int
    namespace: str
    pod: str
    container: str
    core_percent: float | None = None
    memory_bytes: int | None = None
    encoder_percent: float | None = None
    decoder_percent: float | None = None
    processes: int | None = None
    core_seconds: float | None = None
    """Cumulative: one second of the whole card = 1."""
    allocated: bool = True


@dataclass(frozen=True, slots=True)
class HostUsage:
    """What one owner that is no known container uses of a card: part of the unattributed rest.

    `owner_kind` is as in `CgroupNames`, or ``kubernetes`` (a pod that is not known, `owner` its
    UID or short container id) or ``unknown`` (a process that is gone or in no cgroup).
    """

    gpu: int
    owner_kind: str
    owner: str
    core_percent: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class CardRemainder:
    """What of a card's use no container accounts for."""

    gpu: int
    core_percent: float | None = None
    memory_bytes: int | None = None
    containers_without_allocation: int | None = None
    """None while the allocations or the processes are not known."""


@dataclass(frozen=True, slots=True)
class UsageResult:
    """What `usage.attribute` returns, in stable order."""

    containers: tuple[ContainerUsage, ...] = ()
    host: tuple[HostUsage, ...] = ()
    remainders: tuple[CardRemainder, ...] = ()


# --------------------------------------------------------------------------- totals


@dataclass(frozen=True, slots=True)
class CounterTotal:
    """A wrap-free running total of a driver counter."""

    total: int
    last: RawCounter


@dataclass(frozen=True, slots=True)
class BusyTotal:
    """Busy seconds integrated from a sample buffer, and the seconds that samples covered."""

    busy_seconds: float = 0.0
    covered_seconds: float = 0.0
    last_timestamp_us: int = 0
    spacing_us: int = 0
    """The buffer's own spacing as seen so far; 0 while it is not known."""


@dataclass(frozen=True, slots=True)
class XidTotal:
    """XIDs of one code on one card or GPU instance."""

    count: int
    last_timestamp_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class CardTotals:
    """What the service keeps of one card (by UUID) over rounds and reader restarts."""

    counters: Mapping[str, CounterTotal] = field(default_factory=dict)
    """By name: ``pcie_transmitted_bytes``, ``pcie_received_bytes``,
    ``nvlink_<link>_transmitted_bytes``, ``nvlink_<link>_received_bytes``."""
    busy: Mapping[str, BusyTotal] = field(default_factory=dict)
    """By sample kind."""
    xids: Mapping[int, XidTotal] = field(default_factory=dict)
    mig_xids: Mapping[tuple[int, str], XidTotal] = field(default_factory=dict)
    """By (xid, mig)."""
    last_xid: int | None = None
    processes_us: int = 0
    """Newest process sample that was taken in."""
    process_window_until_us: int = 0
    """End of the last process window that was folded into core seconds."""
    pci_bus_id: str | None = None
    """Where the card was last seen: the kernel log names cards by it."""


@dataclass(frozen=True, slots=True)
class Totals:
    """All running totals of the node, by card UUID."""

    cards: Mapping[str, CardTotals] = field(default_factory=dict)
    container_core_seconds: Mapping[tuple[int, str, str, str, str], float] = field(
        default_factory=dict
    )
    """By (gpu, namespace, pod, container, pod uid)."""
    unpaired_xids: tuple[Xid, ...] = ()
    """Counted lately, with the UUID; the other origin may still tell of the same incident."""
    unplaced_xids: tuple[Xid, ...] = ()
    """Kernel log events of cards that no reading has shown yet."""


# --------------------------------------------------------------------------- snapshot


@dataclass(frozen=True, slots=True)
class Card:
    """A known card: its identity (kept when it is lost), its state and its reading."""

    identity: CardIdentity
    reading: CardReading | None = None
    """None: down."""
    down_reason: DownReason | None = None
    memory_total_bytes: int | None = None
    """Kept from the last reading: a capacity, not a measurement."""
    mig_compute_slices: int | None = None
    totals: CardTotals = CardTotals()
    last_mig_slices: tuple[MigSlice, ...] = ()
    """As of the last answer: which slices there are and how large.  What they measured is old."""


@dataclass(frozen=True, slots=True)
class StackFact:
    """One thing that the node's GPU software says of itself, as `subject` = `value`."""

    subject: str
    value: str
    timestamp_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One joined view of the node: the only input of the device families."""

    node: str
    timestamp_seconds: float
    """Unix time at which it was joined."""
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: str | None = None
    cards: tuple[Card, ...] | None = None
    """In index order; None while NVML has never answered."""
    devices_up: bool = False
    """The last reading succeeded and is fresh."""
    allocation: AllocationResult | None = None
    """None: no source of allocations is on."""
    usage: UsageResult = UsageResult()
    pods: PodList | None = None
    node_object: Node | None = None
    stack: tuple[StackFact, ...] = ()
    allocated: Mapping[int, CardAllocated] = field(default_factory=dict)
    """By gpu index, of every known card; empty while allocations are not complete."""
    xid_classes: Mapping[int, str] = field(default_factory=dict)
    """Action class by XID code."""
    pod_labels_exported: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """The service about itself, taken at the scrape."""

    version: str
    revision: str
    python_version: str
    started_timestamp_seconds: float
    sources: tuple[SourceHealth, ...] = ()
    reader: ReaderHealth | None = None
    snapshot_timestamp_seconds: float | None = None
    snapshot_stale: bool = False
    join_duration_seconds: float | None = None
    join_failures: int = 0
    """Joins that a fault of the exporter ended."""
    scrapes: Mapping[str, int] = field(default_factory=dict)
    """By outcome: ``ok``, ``rejected``."""
    nvml_calls: int | None = None
    """NVML calls of the last round."""
    index_changes: int = 0
    """Times that a UUID was found under another index."""
    dropped_series: Mapping[str, int] = field(default_factory=dict)
    """Series that could not be rendered, by reason."""
