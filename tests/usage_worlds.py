"""Builders of small made-up nodes: cards with processes, pods and cgroups for the usage's tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qgpu_exporter.cgroups import parse
from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardIdentity,
    CardReading,
    CardRemainder,
    CgroupNames,
    Container,
    ContainerUsage,
    Memory,
    MigSlice,
    Pod,
    PodList,
    Process,
    ProcessSample,
    ProcessWindow,
    Profiling,
    Reading,
    Totals,
    UsageResult,
    Utilization,
)
from qgpu_exporter.usage import UsageInputs, attribute

MIB = 1024**2
START_US = 1_700_000_000_000_000
"""Beginning of every window unless said otherwise."""
ROUND_US = 5_000_000


def uid(number: int) -> str:
    """UID of made-up pod `number`."""
    return f"{number:08x}-aaaa-4bbb-8ccc-{number:012x}"


def container_id(number: int) -> str:
    """Id of made-up container `number`."""
    return f"{number:064x}"


def cgroup(pod: str, container: int) -> CgroupNames:
    """The names of a process in a container of the pod with this UID."""
    return parse(
        "0::/kubepods.slice/kubepods-burstable.slice/"
        f"kubepods-burstable-pod{pod.replace('-', '_')}.slice/"
        f"cri-containerd-{container_id(container)}.scope\n"
    )


def pod(
    name: str,
    number: int,
    containers: Sequence[Container] = (),
    *,
    phase: str = "Running",
    terminating: bool = False,
    config_hash: str | None = None,
) -> Pod:
    """A pod of namespace `demo`, by default with container `c` whose id has the pod's number."""
    default = Container("c", state="running", container_id=container_id(number))
    return Pod(
        "demo",
        name,
        uid(number),
        phase,
        containers=tuple(containers) or (default,),
        terminating=terminating,
        config_hash=config_hash,
    )


def pods(*listed: Pod) -> PodList:
    """The API's list."""
    return PodList(0.0, listed)


@dataclass(frozen=True)
class Use:
    """One process on a card: memory in MiB, `sm` in percent; None: not told."""

    pid: int
    mib: int | None = 0
    sm: float | None = None
    """None: the driver has no new sample of it."""
    gi: int | None = None
    kinds: tuple[str, ...] = ("compute",)


def card(
    index: int = 0,
    uses: Iterable[Use] | None = (),
    *,
    used_mib: int | None = 4000,
    gpu: float | None = None,
    slices: Sequence[MigSlice] = (),
    since_us: int = START_US,
    window: bool = True,
) -> Card:
    """A card with processes; `uses` None: the driver gives no process readings.

    `gpu` is the card's utilisation in percent; `window` False: no process utilisation.
    """
    until = since_us + ROUND_US
    given = tuple(uses) if uses is not None else ()
    samples = tuple(
        ProcessSample(use.pid, until - 1000, use.sm / 100, 0.0, 0.0, 0.0)
        for use in given
        if use.sm is not None
    )
    memory = Memory(46068 * MIB, used_mib * MIB) if used_mib is not None else None
    reading = CardReading(
        CardIdentity(index, f"GPU-{index:08x}-0000-4000-8000-{index:012x}", index),
        memory=memory,
        utilization=Utilization(gpu_ratio=None if gpu is None else gpu / 100),
        processes=None
        if uses is None
        else tuple(
            Process(
                use.pid,
                None if use.mib is None else use.mib * MIB,
                use.gi,
                None if use.gi is None else 0,
                use.kinds,
            )
            for use in given
        ),
        process_window=ProcessWindow(since_us, until, samples)
        if uses is not None and window
        else None,
        mig_enabled=bool(slices) or None,
        mig_compute_slices=7 if slices else None,
        mig_slices=tuple(slices),
    )
    return Card(reading.identity, reading)


def mig_slice(
    gi: int,
    profile: str,
    used_mib: int,
    *,
    ci: int = 0,
    engine: float | None = None,
    sm: float | None = None,
) -> MigSlice:
    """A slice; `engine` and `sm` are its profiling ratios, both None: no profiling."""
    profiling = None
    if engine is not None or sm is not None:
        profiling = Profiling(5.0, graphics_engine_ratio=engine, sm_active_ratio=sm)
    return MigSlice(
        gi,
        ci,
        f"MIG-{gi:08x}-0000-5000-8000-{ci:012x}",
        profile,
        compute_slices=int(profile[0]),
        memory=Memory(9984 * MIB, used_mib * MIB),
        profiling=profiling,
    )


def held(
    name: str,
    gpu: int = 0,
    *,
    container: str = "c",
    mig: str | None = None,
    exclusive: bool = False,
) -> Allocation:
    """A container's hold on a card or slice."""
    return Allocation(
        "demo",
        name,
        container,
        gpu,
        f"GPU-{gpu:08x}-0000-4000-8000-{gpu:012x}",
        "nvidia",
        "nvidia.com/gpu",
        "",
        mig=mig,
        exclusive=exclusive,
    )


def use_of(
    cards: Iterable[Card],
    names: Mapping[int, CgroupNames] | None,
    listed: PodList | None,
    allocations: Iterable[Allocation] | None = (),
    totals: Totals | None = None,
) -> UsageResult:
    """What `attribute` says of it; `allocations` None: no source of allocations."""
    result = None if allocations is None else AllocationResult(tuple(allocations))
    return attribute(UsageInputs(tuple(cards), result, listed, names, totals or Totals()))


def core(result: UsageResult) -> dict[tuple[int, str, str], float | None]:
    """Percent of the card by (gpu, pod, container)."""
    return {(row.gpu, row.pod, row.container): row.core_percent for row in result.containers}


def memory_mib(result: UsageResult) -> dict[tuple[int, str, str], float | None]:
    """MiB by (gpu, pod, container)."""
    return {
        (row.gpu, row.pod, row.container): None
        if row.memory_bytes is None
        else row.memory_bytes / MIB
        for row in result.containers
    }


def row(result: UsageResult, name: str, container: str = "c", gpu: int = 0) -> ContainerUsage:
    """The one row of a container on a card."""
    (found,) = (
        one
        for one in result.containers
        if (one.gpu, one.pod, one.container) == (gpu, name, container)
    )
    return found


def remainder(result: UsageResult, gpu: int = 0) -> CardRemainder:
    """The one remainder of a card."""
    (found,) = (one for one in result.remainders if one.gpu == gpu)
    return found


def reading(*cards: Card) -> Reading:
    """The round in which these cards were read."""
    return Reading(START_US / 1e6, cards=tuple(one.reading for one in cards if one.reading))


def with_window(one: Card, since_us: int, until_us: int, *samples: ProcessSample) -> Card:
    """The card with these process samples instead."""
    assert one.reading is not None
    changed = replace(one.reading, process_window=ProcessWindow(since_us, until_us, samples))
    return replace(one, reading=changed)
