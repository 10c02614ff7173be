"""Whose use it is: each rule of the attribution with exact values."""

from __future__ import annotations

from dataclasses import replace

from qgpu_exporter.cgroups import parse
from qgpu_exporter.model import (
    AllocationResult,
    CgroupNames,
    Container,
    HostUsage,
    ProcessSample,
    Sample,
    SampleBuffer,
    Totals,
    UsageResult,
)
from qgpu_exporter.usage import UsageInputs, attribute
from tests.usage_worlds import (
    MIB,
    ROUND_US,
    START_US,
    Use,
    card,
    cgroup,
    container_id,
    core,
    held,
    memory_mib,
    pod,
    pods,
    remainder,
    row,
    uid,
    use_of,
    with_window,
)


def names(*of: tuple[int, int]) -> dict[int, CgroupNames]:
    """pid -> names, from (pid, number of the pod and of its one container)."""
    return {pid: cgroup(uid(number), number) for pid, number in of}


def test_a_shared_card_shows_who_uses_how_much() -> None:
    result = use_of(
        [card(0, [Use(11, 1000, 30), Use(12, 500, 20)], used_mib=1700, gpu=60)],
        names((11, 1), (12, 2)),
        pods(pod("a", 1), pod("b", 2)),
        [held("a"), held("b")],
    )
    assert core(result) == {(0, "a", "c"): 30.0, (0, "b", "c"): 20.0}
    assert memory_mib(result) == {(0, "a", "c"): 1000, (0, "b", "c"): 500}
    assert row(result, "a").processes == 1
    assert row(result, "a").encoder_percent == 0.0
    rest = remainder(result)
    assert (rest.core_percent, rest.memory_bytes) == (10.0, 200 * MIB)
    assert rest.containers_without_allocation == 0


def test_containers_of_one_pod_are_not_mixed() -> None:
    two = pod(
        "two",
        1,
        [
            Container("a", state="running", container_id=container_id(101)),
            Container("b", state="running", container_id=container_id(102)),
        ],
    )
    cgroups = {
        21: cgroup(uid(1), 101),
        22: cgroup(uid(1), 102),
        23: cgroup(uid(1), 102),
    }
    cards = [card(0, [Use(21, 1000, 10), Use(22, 2000, 20), Use(23, 500, 5)], gpu=40)]
    holds = [held("two", container="a"), held("two", container="b")]
    result = use_of(cards, cgroups, pods(two), holds)
    assert core(result) == {(0, "two", "a"): 10.0, (0, "two", "b"): 25.0}
    assert memory_mib(result) == {(0, "two", "a"): 1000, (0, "two", "b"): 2500}
    assert row(result, "two", "b").processes == 2
    assert use_of(cards, cgroups, pods(two), holds) == result


def test_a_process_on_two_cards_counts_on_each_once() -> None:
    result = use_of(
        [card(0, [Use(31, 160, 12)]), card(1, [Use(31, 170, 7)])],
        names((31, 1)),
        pods(pod("ddp", 1)),
        [held("ddp", 0), held("ddp", 1)],
    )
    assert core(result) == {(0, "ddp", "c"): 12.0, (1, "ddp", "c"): 7.0}
    assert memory_mib(result) == {(0, "ddp", "c"): 160, (1, "ddp", "c"): 170}


def test_a_process_in_the_compute_and_the_graphics_list_counts_once() -> None:
    both = [Use(41, 300, kinds=("compute",)), Use(41, 300, kinds=("graphics",))]
    result = use_of([card(0, both)], names((41, 1)), pods(pod("a", 1)), [held("a")])
    assert memory_mib(result) == {(0, "a", "c"): 300}
    assert row(result, "a").processes == 1


def test_use_above_the_request_is_told_as_it_is() -> None:
    result = use_of(
        [card(0, [Use(51, 36336, 100)], used_mib=36400)],
        names((51, 1)),
        pods(pod("a", 1)),
        [replace(held("a"), memory_bytes=36000 * MIB, core_percent=50.0)],
    )
    assert row(result, "a").memory_bytes == 38101057536
    assert row(result, "a").core_percent == 100.0


def test_a_pod_on_a_card_that_it_does_not_hold_is_shown_and_counted() -> None:
    result = use_of(
        [card(0), card(1, [Use(61, 2048, 15)])],
        names((61, 1)),
        pods(pod("bare", 1), pod("b", 2)),
        [held("b", 1)],
    )
    assert core(result) == {(1, "b", "c"): 0.0, (1, "bare", "c"): 15.0}
    assert not row(result, "bare", gpu=1).allocated
    assert row(result, "b", gpu=1).allocated
    assert remainder(result, 0).containers_without_allocation == 0
    assert remainder(result, 1).containers_without_allocation == 1


def test_without_a_source_of_allocations_none_is_missing() -> None:
    result = use_of([card(0, [Use(61, 1, 1)])], names((61, 1)), pods(pod("a", 1)), None)
    assert row(result, "a").allocated
    assert remainder(result).containers_without_allocation is None
    inputs = UsageInputs(
        (card(0, [Use(61, 1, 1)]),),
        AllocationResult(complete=False),
        pods(pod("a", 1)),
        names((61, 1)),
    )
    assert remainder(attribute(inputs)).containers_without_allocation is None


# --------------------------------------------------------------------------- zero and absence


def test_a_holder_without_a_process_uses_nothing() -> None:
    result = use_of([card(0, [], used_mib=3)], {}, pods(pod("idle", 1)), [held("idle")])
    idle = row(result, "idle")
    assert (idle.core_percent, idle.memory_bytes, idle.processes) == (0.0, 0, 0)
    assert (idle.encoder_percent, idle.decoder_percent, idle.core_seconds) == (0.0, 0.0, 0.0)
    assert remainder(result).memory_bytes == 3 * MIB


def test_a_process_without_a_new_sample_has_used_nothing_since() -> None:
    listed, holds = pods(pod("a", 1)), [held("a")]
    busy = use_of([card(0, [Use(71, 640, 80)])], names((71, 1)), listed, holds)
    assert core(busy) == {(0, "a", "c"): 80.0}
    old = ProcessSample(71, START_US + ROUND_US - 1000, 0.8)
    again = with_window(card(0, [Use(71, 640)]), START_US + ROUND_US, START_US + 2 * ROUND_US, old)
    idle = use_of([again], names((71, 1)), listed, holds)
    assert core(idle) == {(0, "a", "c"): 0.0}
    assert memory_mib(idle) == {(0, "a", "c"): 640}


def test_no_process_readings_no_usage() -> None:
    result = use_of([card(0, None, gpu=90)], {}, pods(pod("a", 1)), [held("a", exclusive=True)])
    assert result == UsageResult()


def test_no_process_utilisation_costs_only_the_core() -> None:
    result = use_of(
        [card(0, [Use(81, 100)], window=False, gpu=90)],
        names((81, 1)),
        pods(pod("a", 1)),
        [held("a"), held("b")],
    )
    used = row(result, "a")
    assert (used.memory_bytes, used.processes) == (100 * MIB, 1)
    assert (used.core_percent, used.core_seconds, used.encoder_percent) == (None, None, None)
    assert row(result, "b").memory_bytes == 0
    assert remainder(result).core_percent is None
    assert remainder(result).memory_bytes == 3900 * MIB


def test_a_failing_source_of_processes_attributes_nothing() -> None:
    result = use_of([card(0, [Use(82, 900, 50)], gpu=90)], None, pods(pod("a", 1)), [held("a")])
    assert result == UsageResult()


def test_a_card_that_is_down_has_no_usage() -> None:
    down = replace(card(0, [Use(83, 900, 50)]), reading=None, down_reason="lost")
    assert use_of([down], names((83, 1)), pods(pod("a", 1)), [held("a")]) == UsageResult()


def test_an_impossible_sample_is_dropped_and_is_no_zero() -> None:
    result = use_of(
        [card(0, [Use(84, 10, 250)], gpu=70)], names((84, 1)), pods(pod("a", 1)), [held("a")]
    )
    assert row(result, "a").core_percent is None
    assert row(result, "a").memory_bytes == 10 * MIB
    assert remainder(result).core_percent == 70.0


def test_memory_of_one_process_not_told_makes_the_containers_unknown() -> None:
    result = use_of(
        [card(0, [Use(85, 10), Use(86, None)])],
        names((85, 1), (86, 1)),
        pods(pod("a", 1)),
        [held("a")],
    )
    assert row(result, "a").memory_bytes is None
    assert row(result, "a").processes == 2


def test_a_process_that_has_ended_leaves_the_others_zeroes() -> None:
    result = use_of([card(0, [Use(87, 100, 10)], used_mib=150)], {}, pods(pod("a", 1)), [held("a")])
    assert memory_mib(result) == {(0, "a", "c"): 0}
    assert result.host == (HostUsage(0, "unknown", "", 10.0, 100 * MIB, 1),)
    assert remainder(result).memory_bytes == 150 * MIB


# --------------------------------------------------------------------------- remainders


def test_processes_of_more_memory_than_the_card_leave_no_remainder() -> None:
    result = use_of(
        [card(0, [Use(91, 2100)], used_mib=2000)], names((91, 1)), pods(pod("a", 1)), [held("a")]
    )
    assert row(result, "a").memory_bytes == 2100 * MIB
    assert remainder(result).memory_bytes is None


def test_more_core_than_the_card_leaves_zero_and_scales_nothing() -> None:
    result = use_of(
        [card(0, [Use(92, 1, 70), Use(93, 1, 60)], gpu=100)],
        names((92, 1), (93, 2)),
        pods(pod("a", 1), pod("b", 2)),
    )
    assert core(result) == {(0, "a", "c"): 70.0, (0, "b", "c"): 60.0}
    assert remainder(result).core_percent == 0.0


def test_the_cards_core_is_of_the_same_window_as_the_processes() -> None:
    one = card(0, [Use(94, 1, 20)], gpu=100)
    assert one.reading is not None
    samples = (
        Sample(START_US, 1.0),
        Sample(START_US + 1_000_000, 0.25),
        Sample(START_US + 2_000_000, 0.75),
    )
    one = replace(one, reading=replace(one.reading, samples=(SampleBuffer("gpu", samples),)))
    result = use_of([one], names((94, 1)), pods(pod("a", 1)))
    assert remainder(result).core_percent == 30.0


def test_a_card_without_memory_reading_has_no_memory_remainder() -> None:
    result = use_of([card(0, [Use(95, 1, 20)], used_mib=None)], names((95, 1)), pods(pod("a", 1)))
    assert remainder(result).memory_bytes is None


# --------------------------------------------------------------------------- outside Kubernetes


def test_owners_outside_kubernetes_break_the_remainder_down() -> None:
    cgroups = {
        101: parse("0::/user.slice/user-1000.slice/session-1.scope\n"),
        102: parse(f"0::/system.slice/docker-{container_id(7)}.scope\n"),
        103: parse("0::/docker/buildkit/q7w8e9r0t1y2\n"),
        104: parse("0::/system.slice/nvidia-persistenced.service\n"),
        105: parse("0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n"),
        106: parse("0::/\n"),
        107: parse("0::/user.slice/user-1000.slice/session-2.scope\n"),
    }
    uses = [Use(pid, 50, 5) for pid in cgroups]
    result = use_of([card(0, uses, used_mib=400, gpu=50)], cgroups, pods(pod("a", 1)), [held("a")])
    assert memory_mib(result) == {(0, "a", "c"): 0}
    assert result.host == (
        HostUsage(0, "docker", container_id(7)[:12], 5.0, 50 * MIB, 1),
        HostUsage(0, "docker", "q7w8e9r0t1y2", 5.0, 50 * MIB, 1),
        HostUsage(0, "slurm", "77", 5.0, 50 * MIB, 1),
        HostUsage(0, "systemd", "nvidia-persistenced.service", 5.0, 50 * MIB, 1),
        HostUsage(0, "unknown", "", 5.0, 50 * MIB, 1),
        HostUsage(0, "user", "1000", 10.0, 100 * MIB, 2),
    )
    assert remainder(result).memory_bytes == 400 * MIB
    assert remainder(result).core_percent == 50.0


def test_without_the_api_pods_are_outside_and_idle_holders_are_not_certain() -> None:
    uses = [Use(111, 700, 9), Use(112, 5, 1)]
    cgroups = names((111, 1)) | {112: parse("0::/init.scope\n")}
    result = use_of([card(0, uses), card(1, uses[1:])], cgroups, None, [held("a"), held("a", 1)])
    assert result.host[0] == HostUsage(0, "kubernetes", uid(1), 9.0, 700 * MIB, 1)
    # On card 1 nobody but the host has a process, so the holder's zero is measured.
    assert memory_mib(result) == {(1, "a", "c"): 0}


# --------------------------------------------------------------------------- joining with pods


def test_deleted_and_finished_pods_get_no_series() -> None:
    listed = pods(
        pod("alive", 1),
        pod("done", 2, phase="Succeeded"),
        pod("evicted", 3, phase="Failed"),
        pod(
            "ended",
            4,
            [Container("c", state="terminated", container_id=container_id(4))],
            terminating=True,
        ),
    )
    uses = [Use(pid, 10, 1) for pid in (121, 122, 123, 124, 125)]
    cgroups = names((121, 1), (122, 2), (123, 3), (124, 4), (125, 5))
    result = use_of([card(0, uses)], cgroups, listed, [held("alive")])
    assert memory_mib(result) == {(0, "alive", "c"): 10}
    assert [(one.owner_kind, one.owner) for one in result.host] == [
        ("kubernetes", uid(number)) for number in (2, 3, 4, 5)
    ]
    assert remainder(result).memory_bytes == 3990 * MIB


def test_a_terminating_pod_keeps_its_series_while_it_runs() -> None:
    result = use_of(
        [card(0, [Use(126, 10, 1)])], names((126, 1)), pods(pod("a", 1, terminating=True))
    )
    assert memory_mib(result) == {(0, "a", "c"): 10}


def test_a_pod_of_the_same_name_does_not_inherit_its_forerunners_processes() -> None:
    result = use_of([card(0, [Use(127, 10, 1)])], names((127, 1)), pods(pod("web-0", 2)), [])
    assert result.containers == ()


def test_a_static_pods_process_is_found_by_the_config_hash() -> None:
    digest = "0f" * 16
    mirror = pod("static", 1, [Container("c", state="running")], config_hash=digest)
    result = use_of([card(0, [Use(131, 10)])], {131: cgroup(digest, 9)}, pods(mirror))
    assert memory_mib(result) == {(0, "static", "c"): 10}


def test_a_container_whose_id_the_api_does_not_tell_yet() -> None:
    one = pod("one", 1, [Container("c", state="waiting")])
    done = Container("setup", "init", state="terminated", container_id=container_id(20))
    after_init = pod("init", 2, [done, Container("c", state="waiting")])
    several = pod("several", 3, [Container("a"), Container("b")])
    uses = [Use(141, 10), Use(142, 20), Use(143, 30)]
    cgroups = {pid: cgroup(uid(pid - 140), 900 + pid) for pid in (141, 142, 143)}
    result = use_of(
        [card(0, uses)],
        cgroups,
        pods(one, after_init, several),
        [held("several", container="a"), held("several", container="b"), held("one")],
    )
    # Which of the two it is nobody knows, so neither's zero is certain.
    assert memory_mib(result) == {(0, "one", "c"): 10, (0, "init", "c"): 20}
    assert result.host == (HostUsage(0, "kubernetes", uid(3), 0.0, 30 * MIB, 1),)


def test_init_sidecar_and_ephemeral_containers_are_found_by_id() -> None:
    kinds = pod(
        "kinds",
        1,
        [
            Container("setup", "init", state="running", container_id=container_id(31)),
            Container("proxy", "sidecar", state="running", container_id=container_id(32)),
            Container("c", state="waiting"),
            Container("debug", "ephemeral", state="running", container_id=container_id(33)),
        ],
    )
    cgroups = {150 + n: cgroup(uid(1), 30 + n) for n in (1, 2, 3)}
    result = use_of([card(0, [Use(150 + n, n) for n in (1, 2, 3)])], cgroups, pods(kinds))
    assert memory_mib(result) == {
        (0, "kinds", "debug"): 3,
        (0, "kinds", "proxy"): 2,
        (0, "kinds", "setup"): 1,
    }


def test_relative_paths_with_and_without_the_pod() -> None:
    far = f"0::/../../../kubepods-pod{uid(1).replace('-', '_')}.slice/crio-{container_id(1)}.scope"
    near = f"0::/../cri-containerd-{container_id(2)}.scope"
    cgroups = {161: parse(far), 162: parse(near)}
    result = use_of(
        [card(0, [Use(161, 1000), Use(162, 500)])], cgroups, pods(pod("p1", 1), pod("p2", 2))
    )
    assert memory_mib(result) == {(0, "p1", "c"): 1000, (0, "p2", "c"): 500}


def test_nested_containers_belong_to_the_outermost_known_pod() -> None:
    inner_uid = uid(2).replace("-", "_")
    path = (
        f"/kubepods/burstable/pod{uid(1)}/{container_id(1)}/docker/{container_id(50)}/kubelet.slice/"
        f"kubelet-kubepods-pod{inner_uid}.slice/cri-containerd-{container_id(2)}.scope"
    )
    cgroups = {171: parse(f"0::{path}\n")}
    cards = [card(0, [Use(171, 10)])]
    outer, inner = pod("outer", 1), pod("inner", 2)
    assert memory_mib(use_of(cards, cgroups, pods(outer))) == {(0, "outer", "c"): 10}
    assert memory_mib(use_of(cards, cgroups, pods(inner))) == {(0, "inner", "c"): 10}
    # A container may make cgroups below its own that are called like another pod's.
    assert memory_mib(use_of(cards, cgroups, pods(outer, inner))) == {(0, "outer", "c"): 10}
    unknown_yet = pod("outer", 1, [Container("a"), Container("b")])
    assert use_of(cards, cgroups, pods(unknown_yet, inner)).containers == ()


def test_a_containers_cgroup_cannot_borrow_another_pods_container_id() -> None:
    path = f"/kubepods/burstable/pod{uid(1)}/{container_id(9)}/{container_id(2)}"
    unknown_yet = pod("several", 1, [Container("a"), Container("b")])
    result = use_of(
        [card(0, [Use(191, 10)])], {191: parse(f"0::{path}\n")}, pods(unknown_yet, pod("b", 2))
    )
    assert result.containers == ()


def test_the_order_of_everything_does_not_matter() -> None:
    listed = [pod("a", 1), pod("b", 2), pod("c", 3)]
    uses = [Use(181, 10, 1), Use(182, 20, 2), Use(183, 30, 3), Use(184, 40, 4)]
    cgroups = names((181, 1), (182, 2), (183, 3))
    holds = [held("a"), held("b")]
    cards = [card(0, uses), card(1, uses[:2])]
    forward = use_of(cards, cgroups, pods(*listed), holds)
    backward = use_of(
        [card(1, uses[1::-1]), card(0, uses[::-1])],
        dict(reversed(cgroups.items())),
        pods(*listed[::-1]),
        holds[::-1],
    )
    assert forward == backward


def test_core_seconds_are_those_of_this_pod() -> None:
    totals = Totals(
        container_core_seconds={
            (0, "demo", "a", "c", uid(1)): 12.5,
            (0, "demo", "a", "c", uid(9)): 99.0,
        }
    )
    listed, holds = pods(pod("a", 1)), [held("a")]
    result = use_of([card(0, [])], {}, listed, holds, totals)
    assert row(result, "a").core_seconds == 12.5
    # A counter that stands still would say that nothing was used.
    unknown = use_of([card(0, [], window=False)], {}, listed, holds, totals)
    assert row(unknown, "a").core_seconds is None
