"""Settings: where they come from, and what each wrong one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qgpu_exporter import config


def refusal(
    flags: dict[str, list[str]] | None = None,
    environment: dict[str, str] | None = None,
    path: Path | None = None,
) -> str:
    with pytest.raises(config.ConfigError) as caught:
        config.load(flags or {}, environment or {}, str(path) if path else None)
    text = str(caught.value)
    assert "\n" not in text
    return text


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "qgpu.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_reference() -> None:
    settings = config.load({}, {})
    assert settings.web_listen_address == ((None, 5678),)
    assert settings.web_telemetry_path == "/metrics"
    assert settings.web_max_requests == 40
    assert settings.interval == 5.0
    assert settings.devices_timeout == 3.0
    assert settings.devices_max_memory == 256 * 1024 * 1024
    assert settings.devices_exit_after is None
    assert settings.kubelet_max_age == 60.0
    assert settings.metrics_dialects == ("native", "dcgm")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = written(tmp_path, "interval: 7s\nweb:\n  max-requests: 3\nlog.level: debug\n")
    environment = {"QGPU_EXPORTER_INTERVAL": "8s", "QGPU_EXPORTER_WEB_MAX_REQUESTS": "4"}
    settings = config.load({"interval": ["9s"]}, environment, str(path))
    assert (settings.interval, settings.web_max_requests, settings.log_level) == (9.0, 4, "debug")


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    path = written(tmp_path, "interval: 7s\n")
    environment = {"QGPU_EXPORTER_INTERVAL": "", "QGPU_EXPORTER_CONFIG_FILE": str(path)}
    assert config.load({}, environment).interval == 7.0


def test_variables_of_a_service_of_this_name_are_not_ours() -> None:
    """The kubelet sets these where a Service is called qgpu-exporter."""
    environment = {
        "QGPU_EXPORTER_PORT": "tcp://10.0.0.1:5678",
        "QGPU_EXPORTER_SERVICE_HOST": "10.0.0.1",
    }
    assert config.load({}, environment) == config.load({}, {})


def test_lists_repeat_as_flags_and_stand_in_lists_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "path:\n  cdi: [/a, /b]\n")
    flags = {"web.listen-address": ["127.0.0.1:1", "[::1]:2"]}
    settings = config.load(flags, {}, str(path))
    assert settings.web_listen_address == (("127.0.0.1", 1), ("::1", 2))
    assert settings.path_cdi == ("/a", "/b")
    assert config.load({}, {"QGPU_EXPORTER_PATH_CDI": "/c,/d"}).path_cdi == ("/c", "/d")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5s", 5.0), ("1m30s", 90.0), ("500ms", 0.5), ("1h", 3600.0), ("1d2h", 93600.0), ("0", 0.0)],
)
def test_durations_are_written_as_prometheus_writes_them(text: str, seconds: float) -> None:
    assert config.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "-5s", "1s1m", "1.5s", "5S", "٣s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        config.duration(text)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("interval", "0", "--interval: '0' must be more than 0"),
        (
            "interval",
            "soon",
            "--interval: 'soon' is not a duration such as 5s, 1m30s or 500ms",
        ),
        ("interval", "200y", "--interval: '200y' is longer than 100y"),
        ("interval", "9" * 400 + "y", f"--interval: '{'9' * 100}…' is longer than 100y"),
        (
            "devices.max-memory",
            "9" * 5000 + "MiB",
            f"--devices.max-memory: '{'9' * 100}…' is not a size such as 256MiB",
        ),
        (
            "web.max-requests",
            "9" * 5000,
            f"--web.max-requests: '{'9' * 100}…' is not a whole number above 0",
        ),
        *(
            (
                "web.telemetry-path",
                path,
                f"--web.telemetry-path: '{path}' is not a path such as /metrics",
            )
            for path in ("/..", "/a/../b", "/./a", "/metrics/", "//metrics", "/")
        ),
        ("web.max-requests", "0", "--web.max-requests: '0' is not a whole number above 0"),
        (
            "web.listen-address",
            ":70000",
            (
                "--web.listen-address: ':70000' is not an address such as :5678, 127.0.0.1:5678 or "
                "[::1]:5678"
            ),
        ),
        (
            "web.listen-address",
            "::1:5678",
            "--web.listen-address: '::1:5678' an IPv6 address stands in brackets: [::1]:5678",
        ),
        (
            "web.telemetry-path",
            "metrics",
            "--web.telemetry-path: 'metrics' is not a path such as /metrics",
        ),
        (
            "web.telemetry-path",
            "/-/ready",
            "--web.telemetry-path: '/-/ready' is the path of another endpoint",
        ),
        (
            "devices.max-memory",
            "lots",
            "--devices.max-memory: 'lots' is not a size such as 256MiB",
        ),
        (
            "devices.backend",
            "amd",
            "--devices.backend: 'amd' is not one of nvml, simulated",
        ),
        (
            "kubernetes.pod-labels",
            "(",
            (
                "--kubernetes.pod-labels: '(' is not a regular expression: "
                "missing ), unterminated subpattern at position 0"
            ),
        ),
        (
            "metrics.dialects",
            "native,prom",
            "--metrics.dialects: 'native,prom' has 'prom', which is not one of native, dcgm, tke",
        ),
        ("devices.gpm", "maybe", "--devices.gpm: 'maybe' is not true or false"),
        (
            "node-name",
            "a\nb",
            "--node-name: 'a\\nb' is blank or has control characters",
        ),
    ],
)
def test_a_wrong_value_names_the_flag(flag: str, value: str, said: str) -> None:
    assert refusal({flag: [value]}) == said


def test_a_wrong_variable_is_named() -> None:
    environment = {"QGPU_EXPORTER_LOG_FORMAT": "xml"}
    said = refusal(environment=environment)
    assert said == "QGPU_EXPORTER_LOG_FORMAT: 'xml' is not one of logfmt, json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("interval: 5s\nintervall: 5s\n", ":2: intervall: unknown key 'intervall'"),
        ("web:\n  port: 1\n", ":2: web.port: unknown key 'web.port'"),
        ("interval: soon\n", ":1: interval: 'soon' is not a duration such as 5s, 1m30s or 500ms"),
        ("- interval\n", ":1: is not a mapping of settings"),
        ("interval: [\n", ":2: is not YAML: expected the node content, but found '<stream end>'"),
        ("interval: 1s\ninterval: 2s\n", ":2: 'interval' stands twice"),
        ("interval: [1s, 2s]\n", ":1: interval: takes one value, not 2"),
        ("path:\n  cdi: [[a]]\n", ":2: path.cdi is not a single value or a list of them"),
        ("? [a]\n: 1\n", ":1: a key is not a word"),
    ],
)
def test_a_wrong_file_names_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    assert refusal(path=path) == f"{path}{said}"


def test_a_missing_a_binary_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert refusal(path=missing) == f"{missing}: cannot be read: No such file or directory"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert refusal(path=binary) == f"{binary}: is not UTF-8 text"
    huge = tmp_path / "huge.yaml"
    huge.write_bytes(b"#" * (config.MAX_FILE_BYTES + 1))
    assert refusal(path=huge) == f"{huge}: is larger than 1048576 bytes"


def test_aliases_cannot_blow_the_file_up(tmp_path: Path) -> None:
    levels = "\n".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))
    path = written(tmp_path, f"a0: &a0 [x]\n{levels}\n")
    assert "is not a single value" in refusal(path=path)
    keys = ", ".join(f"k{n}: x" for n in range(300))
    level = ", ".join(f"k{n}: *inner" for n in range(300))
    path = written(tmp_path, f"inner: &inner {{{keys}}}\nouter: {{{level}}}\n")
    assert refusal(path=path) == f"{path}: has more than 1000 keys"


def test_impossible_together() -> None:
    said = refusal({"web.listen-address": [":1", ":1"]})
    assert said == "--web.listen-address: the same address twice"
    said = refusal({"web.listen-address": [":1"], "web.probe-address": [":1"]})
    assert said == "--web.probe-address: is also a --web.listen-address"


def test_the_node_name_comes_from_setting_then_downward_api_then_host() -> None:
    def host() -> str:
        return "host-a"

    named = config.load({"node-name": ["node-a"]}, {})
    plain = config.load({}, {})
    assert config.resolve_node_name(named, {"NODE_NAME": "x"}, host) == ("node-a", False)
    assert config.resolve_node_name(plain, {"NODE_NAME": "node-b"}, host) == ("node-b", False)
    assert config.resolve_node_name(plain, {"NODE_NAME": ""}, host) == ("host-a", True)


def test_every_option_has_a_flag_of_its_own_and_help() -> None:
    found = [option for _, option in config.options()]
    assert len({option.flag for option in found}) == len(found)
    assert all(re.fullmatch(r"[a-z][a-z.-]*[a-z]", option.flag) for option in found)
    assert all(option.help.endswith(".") for option in found)
