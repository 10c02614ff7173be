"""Every spelling of a cgroup path, and what no pod must be read out of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qgpu_exporter.cgroups import parse
from qgpu_exporter.model import CgroupNames

UID = "5ab3c1de-0f21-4c6b-9a57-7d1e2f3a4b5c"
UNDERSCORED = UID.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"
ID = "c0ffee" * 10 + "0001"
INNER = "beef" * 16
NODE = "d0cce7" * 10 + "9999"
SLICE = f"kubepods-burstable-pod{UNDERSCORED}.slice"

PODS = {
    "systemd and containerd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/cri-containerd-{ID}.scope",
        UID,
    ),
    "guaranteed": (
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope",
        UID,
    ),
    "cri-o": (f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/crio-{ID}.scope", UID),
    "cri-o with crun": (
        f"0::/kubepods.slice/kubepods-burstable.slice/{SLICE}/crio-{ID}.scope/container",
        UID,
    ),
    "cri-dockerd": (
        f"11:cpuset:/kubepods.slice/kubepods-burstable.slice/{SLICE}/docker-{ID}.scope",
        UID,
    ),
    "cgroupfs": (f"10:memory:/kubepods/burstable/pod{UID}/{ID}", UID),
    "cgroupfs, guaranteed": (f"0::/kubepods/pod{UID}/{ID}", UID),
    "cgroupfs and cri-o": (f"0::/kubepods/pod{UID}/crio-{ID}", UID),
    "containerd without systemd below a kubelet with it": (
        f"1:name=systemd:/system.slice/containerd.service/{SLICE}:cri-containerd:{ID}",
        UID,
    ),
    "static pod": (f"0::/kubepods/burstable/pod{STATIC}/{ID}", STATIC),
    "static pod and systemd": (
        f"0::/kubepods.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope",
        STATIC,
    ),
    "inside a kind node": (
        (
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
            f"kubelet-kubepods-besteffort-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope"
        ),
        UID,
    ),
    "child cgroups of a container": (
        f"0::/kubepods.slice/kubepods-besteffort.slice/{SLICE}/cri-containerd-{ID}.scope/init",
        UID,
    ),
    "rootless": (
        (
            "0::/user.slice/user-1001.slice/user@1001.service/rootlesskit.service/kubepods/burstable/"
            f"pod{UID}/{ID}"
        ),
        UID,
    ),
    "private namespace, other pod": (
        f"0::/../../../kubepods-besteffort.slice/{SLICE}/cri-containerd-{ID}.scope",
        UID,
    ),
    "private namespace, other pod of the class": (f"0::/../../{SLICE}/crio-{ID}.scope", UID),
    "removed": (f"0::/kubepods/burstable/pod{UID}/{ID} (deleted)", UID),
}


@pytest.mark.parametrize(("line", "uid"), PODS.values(), ids=PODS.keys())
def test_container_of_a_pod(line: str, uid: str) -> None:
    assert parse(line + "\n") == CgroupNames(((uid, ID),), (uid,))


def test_lines_without_a_path_say_nothing() -> None:
    path = f"/kubepods.slice/{SLICE}/crio-{ID}.scope"
    text = f"13:freezer:{path}\n11:files:/\n1:name=systemd:{path}\n0::/\n"
    assert parse(text) == CgroupNames(((UID, ID),), (UID,))


def test_hybrid_file_whose_unified_line_names_the_runtime() -> None:
    text = f"4:memory:/kubepods/burstable/pod{UID}/{ID}\n0::/system.slice/containerd.service\n"
    assert parse(text) == CgroupNames(((UID, ID),), (UID,))


def test_sibling_in_a_private_namespace_has_a_container_and_no_pod() -> None:
    assert parse(f"0::/../cri-containerd-{ID}.scope\n") == CgroupNames(((None, ID),))


def test_pod_cgroup_itself() -> None:
    assert parse(f"0::/kubepods.slice/{SLICE}\n") == CgroupNames((), (UID,))


def test_kind_from_the_host_lists_the_node_first() -> None:
    text = (
        f"0::/system.slice/docker-{NODE}.scope/kubelet.slice/kubelet-kubepods.slice/"
        f"kubelet-kubepods-besteffort-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n"
    )
    assert parse(text) == CgroupNames(((None, NODE), (UID, ID)), (UID,))


def test_docker_in_a_pod_lists_the_pods_container_first() -> None:
    text = f"0::/kubepods/burstable/pod{UID}/{ID}/docker/{INNER}\n"
    assert parse(text) == CgroupNames(((UID, ID), (UID, INNER)), (UID,))


OWNERS = {
    "docker": (f"0::/system.slice/docker-{ID}.scope", ("docker", ID[:12]), ID),
    "docker and cgroupfs": (f"12:freezer:/docker/{ID}", ("docker", ID[:12]), ID),
    "docker build": ("0::/docker/buildkit/q7w8e9r0t1y2", ("docker", "q7w8e9r0t1y2"), None),
    "elastic container service": (
        f"1:name=systemd:/ecs/{STATIC}/{STATIC}-4015103728",
        ("docker", STATIC[:12]),
        None,
    ),
    "podman": (f"0::/machine.slice/libpod-{ID}.scope/container", ("podman", ID[:12]), ID),
    "podman under systemd": (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        ("podman", ID[:12]),
        ID,
    ),
    "podman without systemd": (f"0::/libpod_parent/libpod-{ID}", ("podman", ID[:12]), ID),
    "nerdctl": (f"0::/system.slice/nerdctl-{ID}.scope", ("containerd", ID[:12]), ID),
    "containerd": (f"0::/default/{ID}", ("containerd", ID[:12]), ID),
    "unknown runtime": (f"0::/../{ID}", ("container", ID[:12]), ID),
    "conmon is no container": (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-conmon-{ID}.scope",
        ("user", "1000"),
        None,
    ),
    "slurm, v2": (
        "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0",
        ("slurm", "4711"),
        None,
    ),
    "slurm, v1": ("4:memory:/slurm/uid_1000/job_4711/step_batch", ("slurm", "4711"), None),
    "slurm of several daemons": ("4:memory:/slurm_gpu7/uid_1/job_12/step_0", ("slurm", "12"), None),
    "unit": (
        "0::/system.slice/nvidia-persistenced.service",
        ("systemd", "nvidia-persistenced.service"),
        None,
    ),
    "part of a unit": ("0::/system.slice/train.service/worker", ("systemd", "train.service"), None),
    "scope": ("0::/init.scope", ("systemd", "init.scope"), None),
    "session": ("0::/user.slice/user-1000.slice/session-3.scope", ("user", "1000"), None),
    "desktop with a uuid": (
        f"0::/user.slice/user-1000.slice/user@1000.service/apps.slice/vte-spawn-{UID}.scope",
        ("user", "1000"),
        None,
    ),
    "lxc": ("0::/lxc/101/ns", ("lxc", "101"), None),
    "lxc payload": ("0::/lxc.payload.web/system.slice/cron.service", ("lxc", "web"), None),
}


@pytest.mark.parametrize(("line", "owner", "container"), OWNERS.values(), ids=OWNERS.keys())
def test_owner_outside_kubernetes(line: str, owner: tuple[str, str], container: str | None) -> None:
    containers = () if container is None else ((None, container),)
    assert parse(line + "\n") == CgroupNames(containers, (), *owner)


def test_container_counts_more_than_the_session_that_started_it() -> None:
    text = f"9:pids:/user.slice/user-1000.slice\n4:memory:/docker/{ID}\n"
    assert parse(text) == CgroupNames(((None, ID),), (), "docker", ID[:12])


NOTHING = [
    "",
    "\n",
    "0::/\n",
    "0::/../../..\n",
    "0::/../..\n1:cpu:/\n",
    "garbage",
    ":::",
    f"0::/kubepods/podman-{ID[:40]}\n",
    f"0::/system.slice/var-lib-pod{UID[:-1]}.mount\n",
    f"0::/kubepods/{ID}.mount\n",
    f"0::/kubepods/crio-conmon-{ID}\n",
    "\x00\ufffd\n",
]


@pytest.mark.parametrize("text", NOTHING)
def test_nothing_is_read_out_of_what_names_nothing(text: str) -> None:
    assert parse(text) == CgroupNames()


@given(st.text(alphabet="0abf1:/-_.podscrie\n (){}\\é\x00", max_size=400))
def test_no_text_breaks_the_parser(text: str) -> None:
    names = parse(text)
    assert all(len(container_id) == 64 for _, container_id in names.containers)
    assert {uid for uid, _ in names.containers if uid} <= set(names.pod_uids)
