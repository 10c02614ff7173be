"""Reads the text of a web configuration file, in exporter-toolkit's format, strictly.

The keys, their meaning and their defaults are those of prometheus/exporter-toolkit,
docs/web-configuration.md.  Nothing here opens a file that the text names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")
AUTH_TYPES = (
    "NoClientCert",
    "RequestClientCert",
    "RequireAnyClientCert",
    "RequireClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
)
CURVES: Mapping[str, str] = MappingProxyType(
    {
        "CurveP256": "prime256v1",
        "CurveP384": "secp384r1",
        "CurveP521": "secp521r1",
        "X25519": "X25519",
    }
)
"""Go's names of curves, and OpenSSL's."""
CIPHERS: Mapping[str, str] = MappingProxyType(
    {
        # Of TLS 1.3: neither Go nor Python lets them be chosen, so they stand for themselves.
        "TLS_AES_128_GCM_SHA256": "",
        "TLS_AES_256_GCM_SHA384": "",
        "TLS_CHACHA20_POLY1305_SHA256": "",
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
        "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
        "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
        "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    }
)
"""Go's names of the suites that it counts as secure, and OpenSSL's."""
HEADERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Content-Security-Policy": (),
        "Strict-Transport-Security": (),
        "X-Content-Type-Options": ("nosniff",),
        "X-Frame-Options": ("deny", "sameorigin"),
        "X-XSS-Protection": (),
    }
)
"""The headers that may be set, and the values that each may have; none named: any."""

_BCRYPT = re.compile(r"\$2[abxy]?\$(?P<cost>\d\d)\$[./A-Za-z0-9]{53}\Z", re.ASCII)
_DURATION = re.compile(
    r"[+-]?(?:0|(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+)\Z"
)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_UNIT_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_TRUE = ("true", "yes", "on", "y")
_FALSE = ("false", "no", "off", "n")


class WebConfigError(Exception):
    """The file is wrong; the text is one line that names file, line and key."""


@dataclass(frozen=True, slots=True)
class Tls:
    """``tls_server_config``; texts are empty where a key is absent."""

    cert: str = ""
    cert_file: str = ""
    key: str = ""
    key_file: str = ""
    client_ca: str = ""
    client_ca_file: str = ""
    client_auth_type: str = ""
    """Empty is ``NoClientCert``."""
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True
    curve_preferences: tuple[str, ...] = ()
    line: int = 1
    """Where the section stands."""

    @property
    def wanted(self) -> bool:
        """Whether TLS is on; versions and ciphers alone do not switch it on."""
        return any(
            (
                self.cert or self.cert_file,
                self.key or self.key_file,
                self.client_ca or self.client_ca_file,
                self.client_auth_type,
            )
        )


@dataclass(frozen=True, slots=True)
class RateLimit:
    """``rate_limit``: a token bucket."""

    interval_seconds: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebConfig:
    """A whole file; the default is that of no file."""

    tls: Tls | None = None
    http2: bool | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, str] = field(default_factory=dict)
    """User -> bcrypt hash."""
    rate_limit: RateLimit | None = None


def parse(text: str, name: str) -> WebConfig:
    """The configuration that `text` gives; `name` is the file's, for errors."""
    return _Parser(name).parse(text)


def go_duration(text: str) -> float:
    """Seconds of a duration as Go writes it (``1m30s``, ``1.5s``); raises ValueError."""
    if not _DURATION.match(text):
        raise ValueError("is not a duration such as 1s or 500ms")
    seconds = sum(
        float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text)
    )
    return -seconds if text.startswith("-") else seconds


def bcrypt_hash(text: str) -> str:
    """The hash itself; raises ValueError where it is none."""
    match = _BCRYPT.match(text)
    if match is None or not 4 <= int(match["cost"]) <= 31:
        raise ValueError("is not a bcrypt hash")
    return text


class _Parser:
    """Walks the YAML nodes, which know their lines; aliases cost nothing, as nothing is copied."""

    def __init__(self, name: str) -> None:
        self._name = name

    def parse(self, text: str) -> WebConfig:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise WebConfigError(f"{self._name}:{line}: is not YAML: {error.problem}") from None
        except (yaml.YAMLError, RecursionError):
            raise WebConfigError(f"{self._name}: is not YAML") from None
        if root is None:
            return WebConfig()
        sections = self._keys(
            root,
            "",
            ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit"),
        )
        http2, headers = self._http(sections.get("http_server_config"))
        return WebConfig(
            tls=self._tls(sections.get("tls_server_config")),
            http2=http2,
            headers=headers,
            users=self._users(sections.get("basic_auth_users")),
            rate_limit=self._rate_limit(sections.get("rate_limit")),
        )

    # ------------------------------------------------------------------ sections

    def _tls(self, node: yaml.Node | None) -> Tls | None:
        if node is None:
            return None
        texts = ("cert", "cert_file", "key", "key_file", "client_ca", "client_ca_file")
        words = ("client_auth_type", "min_version", "max_version")
        lists = ("client_allowed_sans", "cipher_suites", "curve_preferences")
        keys = self._keys(
            node, "tls_server_config.", (*texts, *words, *lists, "prefer_server_cipher_suites")
        )
        values: dict[str, Any] = {
            key: self._value(keys[key], f"tls_server_config.{key}", str)
            for key in texts
            if key in keys
        }
        allowed = {
            "client_auth_type": AUTH_TYPES,
            "min_version": VERSIONS,
            "max_version": VERSIONS,
            "cipher_suites": tuple(CIPHERS),
            "curve_preferences": tuple(CURVES),
        }
        for key in words:
            if key in keys and self._value(keys[key], f"tls_server_config.{key}", str):
                values[key] = self._value(
                    keys[key], f"tls_server_config.{key}", _one_of(allowed[key])
                )
        for key in lists:
            if key in keys:
                parse = _one_of(allowed[key]) if key in allowed else str
                values[key] = self._list(keys[key], f"tls_server_config.{key}", parse)
        if "prefer_server_cipher_suites" in keys:
            values["prefer_server_cipher_suites"] = self._value(
                keys["prefer_server_cipher_suites"],
                "tls_server_config.prefer_server_cipher_suites",
                _boolean,
            )
        tls = Tls(**values, line=node.start_mark.line + 1)
        self._check_together(tls)
        return tls if tls.wanted else None

    def _check_together(self, tls: Tls) -> None:
        """Refuse keys that contradict each other."""
        where = f"{self._name}:{tls.line}: tls_server_config"
        for one, other in (
            (tls.cert, tls.cert_file),
            (tls.key, tls.key_file),
            (tls.client_ca, tls.client_ca_file),
        ):
            if one and other:
                raise WebConfigError(f"{where}: gives the same thing inline and as a file")
        if bool(tls.cert or tls.cert_file) != bool(tls.key or tls.key_file):
            missing = "key or key_file" if tls.cert or tls.cert_file else "cert or cert_file"
            raise WebConfigError(f"{where}: {missing} is missing")
        if (tls.client_ca or tls.client_ca_file) and tls.client_auth_type in (
            "",
            "NoClientCert",
        ):
            raise WebConfigError(f"{where}: a client CA needs a client_auth_type")
        if VERSIONS.index(tls.max_version) < VERSIONS.index(tls.min_version):
            raise WebConfigError(f"{where}: max_version is below min_version")

    def _http(self, node: yaml.Node | None) -> tuple[bool | None, dict[str, str]]:
        if node is None:
            return None, {}
        keys = self._keys(node, "http_server_config.", ("http2", "headers"))
        http2 = None
        if "http2" in keys:
            http2 = self._value(keys["http2"], "http_server_config.http2", _boolean)
        headers: dict[str, str] = {}
        if "headers" in keys:
            prefix = "http_server_config.headers."
            for key, value in self._keys(keys["headers"], prefix, tuple(HEADERS)).items():
                headers[key] = self._value(value, prefix + key, _header_value(HEADERS[key]))
        return http2, {key: value for key, value in headers.items() if value}

    def _users(self, node: yaml.Node | None) -> dict[str, str]:
        if node is None:
            return {}
        return {
            user: self._value(value, f"basic_auth_users.{user}", bcrypt_hash)
            for user, value in self._keys(node, "basic_auth_users.", None).items()
        }

    def _rate_limit(self, node: yaml.Node | None) -> RateLimit | None:
        if node is None:
            return None
        keys = self._keys(node, "rate_limit.", ("interval", "burst"))
        interval, burst = 0.0, 1
        if "interval" in keys:
            interval = self._value(keys["interval"], "rate_limit.interval", _interval)
        if "burst" in keys:
            burst = self._value(keys["burst"], "rate_limit.burst", _burst)
        return RateLimit(interval, burst) if interval else None

    # ------------------------------------------------------------------ nodes

    def _keys(
        self, node: yaml.Node, prefix: str, known: tuple[str, ...] | None
    ) -> dict[str, yaml.Node]:
        """key -> node of a mapping whose keys are all in `known` (None: any); null is empty."""
        if _is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode):
            what = prefix.rstrip(".") or "the file"
            raise self._error(node, f"{what} is not a mapping")
        found: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key is not a word")
            key = str(key_node.value)
            if known is not None and key not in known:
                raise self._error(key_node, f"unknown key {prefix}{key}")
            if key in found:
                raise self._error(key_node, f"{prefix}{key} stands twice")
            found[key] = value_node
        return found

    def _value(self, node: yaml.Node, key: str, parse: Callable[[str], T]) -> T:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, f"{key} is not a single value")
        try:
            return parse("" if _is_null(node) else str(node.value))
        except ValueError as error:
            raise self._error(node, f"{key} {error}") from None

    def _list(self, node: yaml.Node, key: str, parse: Callable[[str], T]) -> tuple[T, ...]:
        if _is_null(node):
            return ()
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, f"{key} is not a list")
        return tuple(self._value(item, key, parse) for item in node.value)

    def _error(self, node: yaml.Node, phrase: str) -> WebConfigError:
        printable = "".join(c if c.isprintable() else "?" for c in phrase[:300])
        return WebConfigError(f"{self._name}:{node.start_mark.line + 1}: {printable}")


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            known = len(words) <= len(AUTH_TYPES)
            raise ValueError(
                f"is not one of {', '.join(words)}" if known else f"is not known here: {text}"
            )
        return text

    return parse


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE or not text:
        return False
    raise ValueError("is not true or false")


def _header_value(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if allowed and text not in allowed:
            raise ValueError(f"is not one of {', '.join(allowed)}")
        # A line break would begin a header of its own.
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise ValueError("has a control character")
        return text

    return parse


def _interval(text: str) -> float:
    # A bare number is Go's duration as an integer: nanoseconds.
    seconds = (
        int(text) * 1e-9 if re.fullmatch(r"-?\d+", text, re.ASCII) else go_duration(text or "0")
    )
    if seconds < 0:
        raise ValueError("is negative")
    return seconds


def _burst(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ValueError("is not a whole number")
    return int(text)
