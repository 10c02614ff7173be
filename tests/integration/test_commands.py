"""The commands as a user runs them: their output, their exit codes, and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qgpu_exporter import __version__
from qgpu_exporter.demo import SimulatedNode

GUARD_SECONDS = 60.0


def arguments(node: SimulatedNode) -> list[str]:
    """Flags that point an exporter at a simulated node."""
    return [
        f"--node-name={node.name}",
        "--devices.backend=simulated",
        f"--devices.simulation={node.simulation}",
        f"--kubelet.socket={node.socket}",
        "--kubernetes.pods=apiserver",
        f"--kubernetes.kubeconfig={node.kubeconfig}",
        f"--path.procfs={node.procfs}",
        "--path.validations=",
        "--path.cdi=",
    ]


async def started(
    *words: str, environment: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "qgpu_exporter",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )


async def run(
    *words: str, environment: dict[str, str] | None = None
) -> tuple[int | None, str, str]:
    """(exit code, standard output, standard error) of one command."""
    process = await started(*words, environment=environment)
    async with asyncio.timeout(GUARD_SECONDS):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def serving(*words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A serving exporter and the URL that it says it listens on."""
    process = await started(*words, "--web.listen-address=127.0.0.1:0")
    try:
        assert process.stderr is not None
        async with asyncio.timeout(GUARD_SECONDS):
            while True:
                line = (await process.stderr.readline()).decode()
                assert line, "it ended without listening"
                if found := re.search(r"serves node \S+ on (http://[\d.:]+)/", line):
                    yield process, found[1]
                    break
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def children_of(process: asyncio.subprocess.Process) -> list[int]:
    """The pids of a process's children."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def alive(pid: int) -> bool:
    """Whether there is such a process, zombies too."""
    return Path(f"/proc/{pid}").exists()


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    """Wait for /-/ready."""
    while (await session.get(f"{url}/-/ready")).status != 200:  # noqa: ASYNC110 - a real service
        await asyncio.sleep(0.05)


async def test_version() -> None:
    code, out, _ = await run("--version")
    assert code == 0
    assert out.startswith(f"qgpu-exporter {__version__} (Python 3.")


async def test_help_is_grouped_by_topic_and_names_every_flag_with_its_default() -> None:
    code, out, _ = await run("--help")
    assert code == 0
    for topic in ("Web:", "Node:", "Devices:", "Kubelet:", "Kubernetes:", "Metrics:", "Log:"):
        assert f"\n{topic}\n" in out
    assert "--web.listen-address ADDRESS" in out
    assert "(default: :5678)" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--interval=soon"],
            "qgpu-exporter: error: --interval: 'soon' is not a duration such as 5s, 1m30s or 500ms",
        ),
        (["--no-such-flag"], "qgpu-exporter: error: unrecognized arguments: --no-such-flag"),
        (["--web.listen"], "qgpu-exporter: error: unrecognized arguments: --web.listen"),
        (
            ["explode"],
            (
                "qgpu-exporter: error: argument command: invalid choice: 'explode' "
                "(choose from 'serve', 'once', 'check', 'demo')"
            ),
        ),
        (
            ["--output=x", "check"],
            "qgpu-exporter: error: --output goes with the command once",
        ),
        (
            ["--dcgm.collectors=/nonexistent.csv"],
            (
                "qgpu-exporter: error: --dcgm.collectors: /nonexistent.csv: cannot be read: "
                "No such file or directory"
            ),
        ),
        (
            ["--web.listen-address=192.0.2.1:1"],
            (
                "qgpu-exporter: error: --web.listen-address: cannot listen: "
                "192.0.2.1:1: Cannot assign requested address"
            ),
        ),
    ],
)
async def test_a_wrong_call_says_one_line_and_ends_with_2(words: list[str], said: str) -> None:
    code, out, err = await run(*words)
    assert (code, out, err) == (2, "", said + "\n")


async def test_a_bad_row_of_a_counters_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_text("# mine\nDCGM_FI_DEV_GPU_TEMP, gauge, Temperature.\nDCGM_FI_DEV_SM_CLOCK\n")
    code, _, err = await run(f"--dcgm.collectors={path}")
    assert code == 2
    assert err.startswith(f"qgpu-exporter: error: --dcgm.collectors: {path}:3: ")
    assert err.count("\n") == 1


async def test_once_prints_one_scrape_that_parses() -> None:
    async with SimulatedNode(schedule=False) as node:
        code, out, _ = await run("once", *arguments(node))
    assert code == 0
    names = {family.name for family in text_string_to_metric_families(out)}
    assert {"node_gpu_core_request", "DCGM_FI_DEV_GPU_TEMP", "qgpu_exporter_build_info"} <= names
    assert not any(name.startswith("process_") for name in names)


async def test_once_replaces_a_file_whole_and_leaves_it_alone_on_failure(tmp_path: Path) -> None:
    output = tmp_path / "qgpu.prom"
    output.write_text("before\n")
    nothing = ["--devices.backend=nvml", "--kubelet.socket=", "--kubernetes.pods=off"]
    # A library path without a driver's library, whatever this machine has.
    nothing += [f"--path.procfs={tmp_path}/none", "--path.validations=", "--path.cdi="]
    code, out, err = await run("once", f"--output={output}", *nothing)
    assert (code, out) == (1, "")
    assert "no scrape: source nvml" in err
    assert output.read_text() == "before\n"
    async with SimulatedNode(schedule=False) as node:
        code, out, _ = await run("once", f"--output={output}", *arguments(node))
    assert (code, out) == (0, "")
    assert "node_gpu_up{" in output.read_text()
    assert output.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["qgpu.prom"]


async def test_once_says_in_one_line_that_it_cannot_write(tmp_path: Path) -> None:
    async with SimulatedNode(schedule=False) as node:
        for output, why in (
            (tmp_path / "none" / "qgpu.prom", "No such file or directory"),
            (tmp_path, "Is a directory"),
        ):
            code, out, err = await run("once", f"--output={output}", *arguments(node))
            assert (code, out) == (1, "")
            lines = [line for line in err.splitlines() if "level=error" in line]
            assert len(lines) == 1, err
            assert lines[0].endswith(f'msg="no scrape: {output} cannot be written: {why}"')
            assert "Traceback" not in err


async def test_check_says_a_line_for_each_source(tmp_path: Path) -> None:
    web = tmp_path / "web.yml"
    web.write_text("http_server_config: {http2: true}\n")
    async with SimulatedNode(schedule=False) as node:
        code, out, _ = await run(
            "check",
            "--metrics.dialects=native",
            f"--web.config.file={web}",
            *arguments(node),
        )
        assert out.splitlines() == [
            "web.config.file: ok",
            "note: http2: HTTP/2 is not offered, HTTP/1.1 is",
            "nvml: ok: 8 cards, driver 580.95.05",
            "podresources: ok",
            "kubernetes: ok: 12 pods",
            "node: ok",
            "resourceslices: ok",
            "elasticgpu: off",
            "processes: ok",
            "kmsg: off",
            "stack: off",
        ]
        assert code == 0


async def test_check_names_what_is_wrong_and_ends_with_1(tmp_path: Path) -> None:
    socket = tmp_path / "kubelet.sock"
    web = tmp_path / "web.yaml"
    web.write_text("tls_server_config:\n  certificate: x\n")
    async with SimulatedNode(schedule=False) as node:
        flags = [*arguments(node), f"--kubelet.socket={socket}", f"--web.config.file={web}"]
        code, out, _ = await run("check", *(flag for flag in flags if flag != arguments(node)[3]))
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith(f"web.config.file: FAIL: {web}:2: ")
    assert any(line.startswith("podresources: FAIL: ") for line in lines)
    assert "nvml: ok: 8 cards, driver 580.95.05" in lines
    assert lines[-1].startswith("note: the dcgm dialect is on")


async def test_check_names_a_kubeconfig_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "kubeconfig"
    nothing = ["--kubelet.socket=", "--path.validations=", "--path.cdi=", "--kubernetes.dra=off"]
    code, out, _ = await run("check", *nothing, f"--kubernetes.kubeconfig={missing}")
    assert code == 1
    assert (
        f"kubernetes: FAIL: the credentials of {missing} cannot be used: "
        f"[Errno 2] No such file or directory: '{missing}'"
    ) in out.splitlines()


async def test_a_signal_ends_service_and_reader_in_order() -> None:
    async with SimulatedNode(schedule=False) as node:
        async with serving(*arguments(node)) as (process, url):
            async with aiohttp.ClientSession() as session:
                async with asyncio.timeout(GUARD_SECONDS):
                    await ready(session, url)
                async with session.get(f"{url}/caches") as answer:
                    document = json.loads(await answer.text())
                    assert [card["gpu"] for card in document["cards"]] == list(range(8))
            readers = children_of(process)
            assert len(readers) == 1
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(GUARD_SECONDS):
                assert await process.wait() == 0
        assert not alive(readers[0])


async def test_the_reader_ends_when_the_service_is_killed() -> None:
    async with (
        SimulatedNode(schedule=False) as node,
        serving(*arguments(node)) as (process, url),
        asyncio.timeout(GUARD_SECONDS),
    ):
        async with aiohttp.ClientSession() as session:
            await ready(session, url)
        (reader,) = children_of(process)
        process.kill()
        await process.wait()
        while alive(reader):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["flag", "variable"])
async def test_demo_serves_and_tells_what_to_look_at(way: str) -> None:
    if way == "flag":
        process = await started("demo", "--web.listen-address=127.0.0.1:0")
    else:
        address = {"QGPU_EXPORTER_WEB_LISTEN_ADDRESS": "127.0.0.1:0"}
        process = await started("demo", environment=address)
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(GUARD_SECONDS):
        assert (await process.stdout.readline()).startswith(b"A simulated node")
        while b"serves node demo-node" not in (line := await process.stderr.readline()):
            assert line
        assert b":5678/" not in line
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0


async def test_a_long_missing_driver_match_ends_with_1() -> None:
    async with SimulatedNode(schedule=False) as node:
        flags = [*arguments(node), "--devices.exit-after=1s", "--interval=100ms"]
        node.world.cards.fail_driver("mismatch")
        code, _, err = await run("serve", *flags, "--web.listen-address=127.0.0.1:0")
    assert code == 1
    assert (
        "exits so that the container is made anew: the driver answers mismatch (simulated)" in err
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_it_loads_ends_it_without_a_traceback(number: signal.Signals) -> None:
    process = await started("check", "--help")
    async with asyncio.timeout(GUARD_SECONDS):
        while alive(process.pid) and not caught(process.pid, signal.SIGTERM):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.001)
        if process.returncode is None:
            process.send_signal(signal.SIGUSR1)
            process.send_signal(number)
        _, err = await process.communicate()
    # Either it ended by the signal, or it was quicker and had printed its help.
    assert process.returncode in (0, 1)
    assert err == b""


def caught(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigCgt:\t")[2].partition("\n")[0], 16)
    return bool(mask >> (number - 1) & 1)
