"""What the node's GPU software says of itself, in files that may be anything."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from qgpu_exporter.model import StackFact
from qgpu_exporter.sources.stack import Stack

NOW = 1_754_000_000.0
MTIME = 1_753_990_000.0
LOADED = "550.54.15"
PROC = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (a@b)
GCC version:  gcc version 12.2.0
"""
SPECIFICATION = """---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, enable-cuda-compat, --host-driver-version=550.54.15]
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.104.05
    hostPath: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.104.05
"""


class Node:
    """A node's directories, and the source that reads them."""

    def __init__(self, root: Path) -> None:
        self.validations = root / "validations"
        self.cdi = root / "cdi"
        self.etc_cdi = root / "etc-cdi"
        self.procfs = root / "proc"
        self.sysfs = root / "sys"
        self.stack = Stack(
            validations=str(self.validations),
            cdi=(str(self.cdi), str(self.etc_cdi)),
            procfs=str(self.procfs),
            sysfs=str(self.sysfs),
            wall_clock=lambda: NOW,
        )

    def write(self, path: Path, text: str | bytes = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        os.utime(path, (MTIME, MTIME))

    def load(self, version: str = LOADED) -> None:
        self.write(self.sysfs / "module/nvidia/version", f"{version}\n")

    async def facts(self) -> dict[str, str]:
        return {fact.subject: fact.value for fact in await self.stack.ask()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_node_without_gpu_software_has_no_such_source(node: Node) -> None:
    assert not node.stack.present()
    assert await node.facts() == {}
    assert node.stack.health.up is True


@pytest.mark.parametrize(
    "place", ["validations", "cdi", "etc-cdi", "proc/driver/nvidia", "sys/module/nvidia"]
)
async def test_any_of_the_places_makes_it_a_source(node: Node, tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    assert node.stack.present()


async def test_loaded_driver(node: Node) -> None:
    node.load()
    node.write(node.procfs / "driver/nvidia/version", PROC)
    assert await node.stack.ask() == (
        StackFact("driver/module", LOADED),
        StackFact("driver/proc", LOADED),
    )
    assert node.stack.latest == (
        StackFact("driver/module", LOADED),
        StackFact("driver/proc", LOADED),
    )


async def test_closed_kernel_module_and_a_file_that_says_nothing(node: Node) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC\n"
    node.write(node.procfs / "driver/nvidia/version", text)
    node.write(node.sysfs / "module/nvidia/version", "who knows\n")
    assert await node.facts() == {"driver/module": "error", "driver/proc": "535.104.05"}


async def test_validations_are_told_with_their_time(node: Node) -> None:
    node.write(node.validations / "driver-ready", "IS_HOST_DRIVER=true\n")
    node.write(node.validations / "toolkit-ready")
    node.write(node.validations / ".driver-ctr-ready")
    node.write(node.validations / "workload-type", "container\n")
    node.write(node.validations / "something-else")
    assert await node.stack.ask() == (
        StackFact("validation/.driver-ctr-ready", "present", MTIME),
        StackFact("validation/cuda-ready", "missing"),
        StackFact("validation/driver-ready", "present", MTIME),
        StackFact("validation/plugin-ready", "missing"),
        StackFact("validation/toolkit-ready", "present", MTIME),
        StackFact("workload_type", "container", MTIME),
    )


async def test_unusual_files_cost_only_their_own_fact(node: Node, tmp_path: Path) -> None:
    node.write(tmp_path / "secret", "container")
    node.write(node.validations / "cuda-ready")
    (node.validations / "driver-ready").symlink_to(tmp_path / "secret")
    os.mkfifo(node.validations / "toolkit-ready")
    (node.validations / "plugin-ready").mkdir()
    (node.validations / "workload-type").symlink_to(tmp_path / "secret")
    assert await node.facts() == {
        "validation/cuda-ready": "present",
        "validation/driver-ready": "error",
        "validation/plugin-ready": "error",
        "validation/toolkit-ready": "error",
        "workload_type": "error",
    }
    assert node.stack.health.up is True


@pytest.mark.parametrize("text", ["x" * 5000, "two words", "<b>", ""])
async def test_workload_type_that_is_no_word(node: Node, text: str) -> None:
    node.write(node.validations / "workload-type", text)
    assert (await node.facts())["workload_type"] == "error"


# --------------------------------------------------------------------------- CDI


async def test_specification_for_the_loaded_driver(node: Node) -> None:
    node.load()
    node.write(node.cdi / "nvidia.yaml", SPECIFICATION)
    assert await node.stack.ask() == (
        StackFact("cdi/nvidia.yaml", LOADED, MTIME),
        StackFact("cdi_driver", "match"),
        StackFact("driver/module", LOADED),
    )


async def test_specification_for_another_driver(node: Node) -> None:
    node.load("570.86.15")
    node.write(node.cdi / "nvidia.yaml", SPECIFICATION)
    assert (await node.facts())["cdi_driver"] == "mismatch"
    node.load(LOADED)
    assert (await node.facts())["cdi_driver"] == "match"


async def test_one_stale_specification_is_enough(node: Node) -> None:
    node.load()
    node.write(node.cdi / "nvidia.yaml", SPECIFICATION)
    mounts = {"mounts": [{"hostPath": "/lib/libcuda.so.535.104.05"}]}
    text = json.dumps({"cdiVersion": "0.5.0", "containerEdits": mounts}, indent="\t")
    node.write(node.etc_cdi / "k8s.device-plugin.nvidia.com-gpu.json", text)
    assert await node.facts() == {
        "cdi/k8s.device-plugin.nvidia.com-gpu.json": "535.104.05",
        "cdi/nvidia.yaml": LOADED,
        "cdi_driver": "mismatch",
        "driver/module": LOADED,
    }


async def test_specification_without_a_version_is_no_mismatch(node: Node) -> None:
    node.load()
    node.write(node.cdi / "nvidia.yaml", "kind: nvidia.com/gpu\n")
    assert await node.facts() == {"cdi/nvidia.yaml": "none", "driver/module": LOADED}


async def test_without_a_loaded_driver_nothing_is_compared(node: Node) -> None:
    node.write(node.cdi / "nvidia.yaml", SPECIFICATION)
    assert await node.facts() == {"cdi/nvidia.yaml": LOADED}


async def test_other_files_of_the_directory_are_left_alone(node: Node) -> None:
    for name in (
        "k8s.gpu.nvidia.com-claim_5a000000-0000-4000-8000-000000000000.yaml",
        "vendor.com-net.yaml",
        "nvidia.yaml.tmp",
        "nvidia\nname.yaml",
        "nvidia-\N{SNOWMAN}.yaml",
    ):
        node.write(node.cdi / name, SPECIFICATION)
    assert await node.facts() == {}


async def test_first_directory_wins_for_a_name(node: Node) -> None:
    node.write(node.cdi / "nvidia.yaml", "kind: nvidia.com/gpu\n")
    node.write(node.etc_cdi / "nvidia.yaml", SPECIFICATION)
    assert await node.facts() == {"cdi/nvidia.yaml": "none"}


BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("nvidia.yaml", BOMB, "has an alias"),
        ("nvidia.yaml", "a: [", "cannot be parsed"),
        ("nvidia.yaml", b"\xff\xfe\x00", "not UTF-8"),
        ("nvidia.yaml", "# x\n" * 300_000, "longer than 1048576 bytes"),
        ("nvidia.json", "[" * 100_000, "cannot be parsed"),
        ("nvidia.json", "{", "cannot be parsed"),
        (
            "nvidia.yaml",
            "[/lib/libcuda.so.535.104.05, /lib/libcuda.so.550.54.15]",
            "names several driver versions: 535.104.05, 550.54.15",
        ),
    ],
)
async def test_specification_that_cannot_be_used_is_told_once(
    node: Node, caplog: pytest.LogCaptureFixture, name: str, text: str | bytes, complaint: str
) -> None:
    node.load()
    node.write(node.cdi / name, text)
    node.write(node.cdi / "management.nvidia.com-gpu.yaml", SPECIFICATION)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        assert await node.facts() == {
            f"cdi/{name}": "error",
            "cdi/management.nvidia.com-gpu.yaml": LOADED,
            "cdi_driver": "match",
            "driver/module": LOADED,
        }
    assert caplog.messages == [f"stack: {node.cdi / name}: {complaint}"]


async def test_deeply_nested_yaml_harms_nothing(node: Node) -> None:
    node.write(node.cdi / "nvidia.yaml", "[" * 500_000)
    node.write(node.validations / "cuda-ready")
    facts = await node.facts()
    assert facts["cdi/nvidia.yaml"] == "error"
    assert facts["validation/cuda-ready"] == "present"


async def test_link_and_pipe_are_not_followed(node: Node, tmp_path: Path) -> None:
    node.write(tmp_path / "elsewhere", SPECIFICATION)
    node.cdi.mkdir()
    (node.cdi / "nvidia.yaml").symlink_to(tmp_path / "elsewhere")
    (node.cdi / "nvidia-loop.yaml").symlink_to(node.cdi / "nvidia-loop.yaml")
    os.mkfifo(node.cdi / "nvidia-pipe.yaml")
    (node.cdi / "nvidia-folder.yaml").mkdir()
    assert set((await node.facts()).values()) == {"error"}


async def test_number_of_specifications_is_bounded(node: Node) -> None:
    for number in range(100):
        node.write(node.cdi / f"nvidia-{number:03}.yaml", "a: b\n")
    assert len(await node.facts()) == 32


async def test_changed_specification_is_read_again(node: Node) -> None:
    node.write(node.cdi / "nvidia.yaml", SPECIFICATION)
    assert await node.facts() == {"cdi/nvidia.yaml": LOADED}
    node.write(node.cdi / "nvidia.yaml", SPECIFICATION.replace(LOADED, "570.86.150"))
    assert await node.facts() == {"cdi/nvidia.yaml": "570.86.150"}
    (node.cdi / "nvidia.yaml").unlink()
    assert await node.facts() == {}


async def test_validations_can_be_switched_off(node: Node) -> None:
    node.write(node.validations / "cuda-ready")
    stack = Stack(
        validations="",
        cdi=(),
        procfs=str(node.procfs),
        sysfs=str(node.sysfs),
        wall_clock=lambda: NOW,
    )
    assert not stack.present()
    assert await stack.ask() == ()


async def test_directory_that_is_a_file_has_no_specifications(node: Node) -> None:
    node.write(node.cdi, "a file")
    assert await node.facts() == {}
    assert node.stack.health.up is True
