"""Settings: parsed and validated once, from flag, environment, file and default, in this order."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import yaml

T = TypeVar("T")

ENVIRONMENT_PREFIX = "QGPU_EXPORTER_"
MAX_FILE_BYTES = 1 << 20
MAX_FILE_KEYS = 1000
"""Far above what there are settings: aliases could make billions of a small file."""
MAX_DURATION_SECONDS = 100 * 31_536_000.0
MAX_SHOWN = 100
"""Characters of a wrong value that its error repeats."""


class ConfigError(Exception):
    """A setting is wrong; the text is one line that names the flag, variable, or file and line."""


@dataclass(frozen=True, slots=True)
class Option(Generic[T]):
    """One setting: its flag (also its key in the file), its parser and its help."""

    flag: str
    group: str
    help: str
    parse: Callable[[str], T]
    metavar: str
    default_text: str
    repeatable: bool = False
    is_switch: bool = False

    @property
    def environment(self) -> str:
        """Name of the environment variable."""
        return ENVIRONMENT_PREFIX + re.sub(r"[.-]", "_", self.flag).upper()


_DURATION = re.compile(
    r"(?:(?P<y>\d+)y)?(?:(?P<w>\d+)w)?(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?"
    r"(?:(?P<s>\d+)s)?(?:(?P<ms>\d+)ms)?",
    re.ASCII,
)
_UNIT_SECONDS = {
    "y": 31_536_000.0,
    "w": 604_800.0,
    "d": 86_400.0,
    "h": 3_600.0,
    "m": 60.0,
    "s": 1.0,
    "ms": 0.001,
}
_SIZE = re.compile(r"(\d{1,18})(|B|KiB|MiB|GiB|kB|MB|GB)", re.ASCII)
_SIZE_FACTORS = {
    "": 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def duration(text: str) -> float:
    """Seconds of a duration as Prometheus writes it (`5s`, `1m30s`, `500ms`); `0` is allowed."""
    if text == "0":
        return 0.0
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ValueError("not a duration such as 5s, 1m30s or 500ms")
    seconds = sum(
        float(number) * _UNIT_SECONDS[unit] for unit, number in match.groupdict().items() if number
    )
    if seconds > MAX_DURATION_SECONDS:
        raise ValueError("is longer than 100y")
    return seconds


def positive_duration(text: str) -> float:
    """Seconds of a duration that is more than zero."""
    seconds = duration(text)
    if seconds <= 0:
        raise ValueError("must be more than 0")
    return seconds


def max_age(text: str) -> float:
    """Seconds of a duration of at least one second: what is kept is asked for no more often."""
    seconds = duration(text)
    if seconds < 1:
        raise ValueError("must be 1s or more")
    return seconds


def optional_duration(text: str) -> float | None:
    """Seconds, or None where the text is empty, `0` or `off`."""
    if text in ("", "0", "off"):
        return None
    return positive_duration(text)


def size(text: str) -> int:
    """Bytes of a size such as `256MiB`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("not a size such as 256MiB")
    number = int(match[1]) * _SIZE_FACTORS[match[2]]
    if number <= 0:
        raise ValueError("must be more than 0")
    return number


def switch(text: str) -> bool:
    """True or false."""
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise ValueError("not true or false")


def listen_address(text: str) -> tuple[str | None, int]:
    """(host or None for all interfaces, port) of `:5678`, `127.0.0.1:5678`, `[::1]:5678`."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError("not an address such as :5678, 127.0.0.1:5678 or [::1]:5678")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address stands in brackets: [::1]:5678")
    return host or None, int(port)


def telemetry_path(text: str) -> str:
    """A path that begins with `/` and is none of the exporter's other endpoints."""
    segments = text.split("/")
    if not re.fullmatch(r"/[A-Za-z0-9._~/-]+", text) or {"", ".", ".."} & set(segments[1:]):
        raise ValueError("not a path such as /metrics")
    if text in ("/-/healthy", "/-/ready", "/caches", "/api/v1/node") or text.startswith("/static/"):
        raise ValueError("is the path of another endpoint")
    return text


def positive_int(text: str) -> int:
    """A whole number above zero."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError("not a whole number above 0")
    return int(text)


def label_value(text: str) -> str:
    """A value for a label: not blank, no control characters."""
    if not text.strip() or any(ord(character) < 32 for character in text):
        raise ValueError("is blank or has control characters")
    return text


def regex(text: str) -> re.Pattern[str] | None:
    """A regular expression that is matched whole, or None where the text is empty."""
    if not text:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None


def one_of(*words: str) -> Callable[[str], Any]:
    """A parser that takes one of the words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"not one of {', '.join(words)}")
        return text

    return parse


def dialects(text: str) -> tuple[str, ...]:
    """Distinct dialects in the order native, dcgm, tke, from a comma list."""
    known = ("native", "dcgm", "tke")
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ValueError(f"has {word!r}, which is not one of {', '.join(known)}")
    return tuple(word for word in known if word in words)


def text(value: str) -> str:
    """Any text."""
    return value


def option(
    flag: str,
    group: str,
    parse: Callable[[str], Any],
    default: str | Sequence[str],
    help_text: str,
    metavar: str = "VALUE",
) -> Any:
    """A dataclass field whose default is the parsed `default`; a sequence makes it repeatable."""
    repeatable = not isinstance(default, str)
    value = tuple(parse(item) for item in default) if repeatable else parse(str(default))
    shown = ", ".join(default) if repeatable else str(default)
    return field(
        default=value,
        metadata={
            "option": Option(
                flag, group, help_text, parse, metavar, shown, repeatable, parse is switch
            )
        },
    )


WEB, NODE, DEVICES, KUBELET, KUBERNETES, METRICS, PATHS, LOG = (
    "Web",
    "Node",
    "Devices",
    "Kubelet",
    "Kubernetes",
    "Metrics",
    "Paths",
    "Log",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, valid; durations in seconds, sizes in bytes."""

    web_listen_address: tuple[tuple[str | None, int], ...] = option(
        "web.listen-address",
        WEB,
        listen_address,
        [":5678"],
        "Address to serve on; may be given several times.",
        "ADDRESS",
    )
    web_telemetry_path: str = option(
        "web.telemetry-path", WEB, telemetry_path, "/metrics", "Path of the metrics.", "PATH"
    )
    web_max_requests: int = option(
        "web.max-requests",
        WEB,
        positive_int,
        "40",
        "Scrapes answered at the same time; one more gets 503 with Retry-After.",
        "N",
    )
    web_config_file: str = option(
        "web.config.file",
        WEB,
        text,
        "",
        "TLS, basic auth, headers and rate limit, in exporter-toolkit's format; "
        "read again when it changes.",
        "FILE",
    )
    web_probe_address: tuple[tuple[str | None, int], ...] = option(
        "web.probe-address",
        WEB,
        listen_address,
        [],
        "Serve /-/healthy and /-/ready alone here, in plain HTTP, for kubelets that cannot "
        "present a client certificate.",
        "ADDRESS",
    )
    node_name: str = option(
        "node-name",
        NODE,
        lambda value: label_value(value) if value else "",
        "",
        "Value of the label node; else $NODE_NAME, else the host name.",
        "NAME",
    )
    interval: float = option(
        "interval", NODE, positive_duration, "5s", "How often the cards are read.", "DURATION"
    )
    devices_backend: Literal["nvml", "simulated"] = option(
        "devices.backend",
        DEVICES,
        one_of("nvml", "simulated"),
        "nvml",
        "Where readings come from: the driver, or made-up cards.",
        "nvml|simulated",
    )
    devices_timeout: float = option(
        "devices.timeout",
        DEVICES,
        positive_duration,
        "3s",
        "How long a card may take to answer before it counts as down for the round.",
        "DURATION",
    )
    devices_max_memory: int = option(
        "devices.max-memory",
        DEVICES,
        size,
        "256MiB",
        "Resident memory above which the reader process is replaced.",
        "SIZE",
    )
    devices_exit_after: float | None = option(
        "devices.exit-after",
        DEVICES,
        optional_duration,
        "off",
        "Exit with 1 after the driver's library and kernel module have not matched, or every "
        "card has answered UNKNOWN, for this long: only a new container gets the new driver.",
        "DURATION",
    )
    devices_persistence_mode: bool = option(
        "devices.persistence-mode",
        DEVICES,
        switch,
        "false",
        "Ask the cards' persistence mode; some drivers leak memory at each such call.",
    )
    devices_gpm: bool = option(
        "devices.gpm",
        DEVICES,
        switch,
        "true",
        "Profiling readings through GPM (Hopper and later); off where DCGM profiles the same "
        "cards, since both use the same hardware counters.",
    )
    devices_kmsg: bool = option(
        "devices.kmsg",
        DEVICES,
        switch,
        "false",
        "Also find XIDs in the kernel log (needs /dev/kmsg and the right to read it).",
    )
    devices_xid_classes: str = option(
        "devices.xid-classes",
        DEVICES,
        text,
        "",
        "File that replaces the table of XID classes.",
        "FILE",
    )
    devices_simulation: str = option(
        "devices.simulation",
        DEVICES,
        text,
        "",
        "Scenario file of the simulated backend.",
        "FILE",
    )
    kubelet_socket: str = option(
        "kubelet.socket",
        KUBELET,
        text,
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "The kubelet's pod-resources socket; empty = off.",
        "PATH",
    )
    kubelet_max_age: float = option(
        "kubelet.max-age",
        KUBELET,
        max_age,
        "60s",
        "How long allocations outlive a failing kubelet.",
        "DURATION",
    )
    kubernetes_pods: Literal["auto", "apiserver", "off"] = option(
        "kubernetes.pods",
        KUBERNETES,
        one_of("auto", "apiserver", "off"),
        "auto",
        "Where pods come from; auto = the API server where credentials exist.",
        "auto|apiserver|off",
    )
    kubernetes_kubeconfig: str = option(
        "kubernetes.kubeconfig",
        KUBERNETES,
        text,
        "",
        "Kubeconfig file (the node's own works); else the pod's service account.",
        "FILE",
    )
    kubernetes_dra: Literal["auto", "off"] = option(
        "kubernetes.dra",
        KUBERNETES,
        one_of("auto", "off"),
        "auto",
        "Resolve DRA claims through this node's ResourceSlices, where the cluster has them.",
        "auto|off",
    )
    kubernetes_gpu_objects: bool = option(
        "kubernetes.gpu-objects",
        KUBERNETES,
        switch,
        "false",
        "Cross-check qGPU's gpus.elasticgpu.io objects with the driver.",
    )
    kubernetes_pod_labels: re.Pattern[str] | None = option(
        "kubernetes.pod-labels",
        KUBERNETES,
        regex,
        "",
        "Export the pod labels whose names match, in node_gpu_pod_labels.",
        "REGEX",
    )
    kubernetes_release_labels: tuple[str, ...] = option(
        "kubernetes.release-labels",
        KUBERNETES,
        text,
        ["nvidia.com/gpu.deploy.client"],
        "Node labels whose value paused-* makes the exporter let go of the driver.",
        "LABEL",
    )
    allocation_gpushare_memory_unit: Literal["auto", "GiB", "MiB"] = option(
        "allocation.gpushare-memory-unit",
        KUBERNETES,
        one_of("auto", "GiB", "MiB"),
        "auto",
        "Unit of aliyun.com/gpu-mem; auto = inferred from the node's capacity.",
        "auto|GiB|MiB",
    )
    allocation_volcano_memory_factor: int = option(
        "allocation.volcano-memory-factor",
        KUBERNETES,
        positive_int,
        "1",
        "MiB per unit of volcano.sh/vgpu-memory and gpu-memory (HAMi's annotation is in MiB).",
        "N",
    )
    metrics_dialects: tuple[str, ...] = option(
        "metrics.dialects",
        METRICS,
        dialects,
        "native,dcgm",
        "Families to export: native, dcgm (dcgm-exporter's names), tke (TKE's names).",
        "LIST",
    )
    dcgm_collectors: str = option(
        "dcgm.collectors",
        METRICS,
        text,
        "",
        "dcgm-exporter counters file that chooses the fields of the dcgm dialect.",
        "FILE",
    )
    dcgm_hostname_label: Literal["Hostname", "hostname"] = option(
        "dcgm.hostname-label",
        METRICS,
        one_of("Hostname", "hostname"),
        "Hostname",
        "Name of the host label in the dcgm dialect (dcgm-exporter 4.8.3 renamed it).",
        "Hostname|hostname",
    )
    tke_request_unit: Literal["percent", "cards"] = option(
        "tke.request-unit",
        METRICS,
        one_of("percent", "cards"),
        "percent",
        "Unit of container_request_gpu_utilization in the tke dialect.",
        "percent|cards",
    )
    path_procfs: str = option(
        "path.procfs", PATHS, text, "/proc", "Where the host's /proc is mounted.", "PATH"
    )
    path_sysfs: str = option(
        "path.sysfs", PATHS, text, "/sys", "Where the host's /sys is mounted.", "PATH"
    )
    path_kmsg: str = option("path.kmsg", PATHS, text, "/dev/kmsg", "The kernel log.", "PATH")
    path_validations: str = option(
        "path.validations",
        PATHS,
        text,
        "/run/nvidia/validations",
        "The GPU Operator's validation files; empty = off.",
        "PATH",
    )
    path_cdi: tuple[str, ...] = option(
        "path.cdi",
        PATHS,
        text,
        ["/var/run/cdi", "/etc/cdi"],
        "Directories of CDI specifications.",
        "PATH",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "log.level",
        LOG,
        one_of("debug", "info", "warning", "error"),
        "info",
        "Least severity that is logged.",
        "debug|info|warning|error",
    )
    log_format: Literal["logfmt", "json"] = option(
        "log.format", LOG, one_of("logfmt", "json"), "logfmt", "Format of log lines.", "logfmt|json"
    )


def options() -> tuple[tuple[str, Option[Any]], ...]:
    """(field name, option) of every setting, in the order of the help."""
    return tuple((item.name, _option(item)) for item in fields(Settings))


def _option(item: Field[Any]) -> Option[Any]:
    found: Option[Any] = item.metadata["option"]
    return found


def load(
    flags: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    config_file: str | None = None,
) -> Settings:
    """Settings from what was given; raises `ConfigError` at the first wrong one.

    `flags`: flag name -> values in order.  `config_file`: path, or None; the variable
    QGPU_EXPORTER_CONFIG_FILE serves where the flag is not given.
    """
    path = config_file or environment.get(ENVIRONMENT_PREFIX + "CONFIG_FILE") or None
    from_file = _read_file(path) if path else {}
    known = {found.flag: found for _, found in options()}
    for key, (where, _) in from_file.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}")
    values: dict[str, Any] = {}
    for name, found in options():
        given = _given(found, flags, environment, from_file)
        if given is not None:
            values[name] = _parse(found, *given)
    settings = Settings(**values)
    _check_together(settings)
    return settings


def _given(
    found: Option[Any],
    flags: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    from_file: Mapping[str, tuple[str, tuple[str, ...]]],
) -> tuple[str, tuple[str, ...]] | None:
    """(where, texts) of the strongest place that gives the option."""
    if found.flag in flags:
        return f"--{found.flag}", tuple(flags[found.flag])
    variable = environment.get(found.environment, "")
    if variable:
        texts = tuple(variable.split(",")) if found.repeatable else (variable,)
        return found.environment, texts
    return from_file.get(found.flag)


def _parse(found: Option[Any], where: str, texts: tuple[str, ...]) -> Any:
    parsed = []
    for value in texts:
        try:
            parsed.append(found.parse(value))
        except ValueError as error:
            shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}…"
            raise ConfigError(f"{where}: {shown!r} {_phrase(error)}") from None
    if found.repeatable:
        return tuple(parsed)
    if len(parsed) != 1:
        raise ConfigError(f"{where}: takes one value, not {len(parsed)}")
    return parsed[0]


def _phrase(error: ValueError) -> str:
    phrase = str(error)
    return phrase if phrase.startswith(("must", "is ", "an ", "has ")) else f"is {phrase}"


def _check_together(settings: Settings) -> None:
    """Refuse values that are right alone and impossible together."""
    if not settings.metrics_dialects:
        raise ConfigError("--metrics.dialects: names no dialect")
    ports = [address for address in settings.web_listen_address if address[1]]
    if len(set(ports)) != len(ports):
        raise ConfigError("--web.listen-address: the same address twice")
    if set(settings.web_probe_address) & set(ports):
        raise ConfigError("--web.probe-address: is also a --web.listen-address")


def read_text(path: str) -> str:
    """The text of a file that the user named, without a byte order mark; raises `ConfigError`."""
    try:
        with Path(path).open("rb") as file:
            # Bounded also for what has no end, like a device.
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None


def _read_file(path: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """key -> (file and line, texts) of a YAML mapping; nested keys are joined with dots."""
    try:
        root = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: is not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"{path}: is not YAML") from None
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    if root is not None:
        _flatten(path, root, "", found, 0)
    return found


def _flatten(
    path: str,
    node: yaml.Node,
    prefix: str,
    found: dict[str, tuple[str, tuple[str, ...]]],
    depth: int,
) -> None:
    where = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode) or depth > 3:
        raise ConfigError(f"{where}: is not a mapping of settings")
    for key_node, value_node in node.value:
        line = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode) or not key_node.value.isprintable():
            raise ConfigError(f"{line}: a key is not a word")
        key = prefix + str(key_node.value)
        if isinstance(value_node, yaml.MappingNode):
            _flatten(path, value_node, key + ".", found, depth + 1)
            continue
        if key in found:
            raise ConfigError(f"{line}: {key!r} stands twice")
        if len(found) >= MAX_FILE_KEYS:
            raise ConfigError(f"{path}: has more than {MAX_FILE_KEYS} keys")
        found[key] = (f"{line}: {key}", _texts(line, key, value_node))


def _texts(where: str, key: str, node: yaml.Node) -> tuple[str, ...]:
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    texts = []
    for item in items:
        if not isinstance(item, yaml.ScalarNode):
            raise ConfigError(f"{where}: {key} is not a single value or a list of them")
        texts.append("" if item.tag == "tag:yaml.org,2002:null" else str(item.value))
    return tuple(texts)


def resolve_node_name(
    settings: Settings,
    environment: Mapping[str, str] = os.environ,
    hostname: Callable[[], str] = socket.gethostname,
) -> tuple[str, bool]:
    """(node name, whether it is only the host name): the setting, else NODE_NAME, else the host."""
    given = settings.node_name or environment.get("NODE_NAME", "")
    if given:
        return given, False
    return hostname(), True
