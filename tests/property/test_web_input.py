"""Whatever a client's header or an operator's file says: an answer or one line, never a fault."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from qgpu_exporter import config
from qgpu_exporter.exposition import negotiate
from qgpu_exporter.web.access import credentials
from qgpu_exporter.web.responses import takes_gzip
from qgpu_exporter.web.web_config import WebConfigError, parse

PLAIN = {
    "text/plain; version=0.0.4; charset=utf-8",
    "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
ESCAPED = {
    f"{kind}; version=1.0.0; charset=utf-8; escaping={escaping}"
    for kind in ("text/plain", "application/openmetrics-text")
    for escaping in ("allow-utf-8", "underscores", "dots", "values")
}

_RANGES = st.sampled_from(
    [
        "text/plain",
        "text/*",
        "*/*",
        "application/openmetrics-text",
        "application/json",
        "a",
        "",
        "Text/Plain",
    ]
)
_NAMES = st.sampled_from(["q", "Q", "version", "escaping", "charset", "x", ""])
_VALUES = st.sampled_from(
    [
        "0",
        "1",
        "0.5",
        "1.0001",
        "nan",
        "-1",
        "0.0.4",
        "1.0.0",
        "3.0.0",
        '"0.0.4"',
        "dots",
        "x",
        "",
        '"',
        "é",
    ]
)
_PARAMETERS = st.lists(st.tuples(_NAMES, _VALUES).map("=".join), max_size=4)
_ENTRIES = st.tuples(_RANGES, _PARAMETERS).map(lambda one: ";".join([one[0], *one[1]]))
ACCEPT = st.lists(_ENTRIES, max_size=5).map(",".join) | st.text(max_size=80)

_CODINGS = st.sampled_from(["gzip", "x-gzip", "*", "identity", "br", "GZIP", "", "é"])
_WEIGHTED = st.tuples(_CODINGS, _PARAMETERS).map(lambda one: ";".join([one[0], *one[1]]))

_KEYS = st.sampled_from(
    [
        "tls_server_config", "http_server_config", "basic_auth_users", "rate_limit", "cert", "key",
        "min_version", "client_allowed_sans", "http2", "headers", "interval", "burst", "web",
        "listen-address", "path", "cdi", "X-Frame-Options", "<<", '"a\\nb"',
    ]
)  # fmt: skip
_SCALARS = st.sampled_from(
    ["", "~", "true", "1", "-1", "1s", "!!python/name:os.system x", "&a b", "*a", '"a\\nb"', "{}"]
)  # fmt: skip
_FLOW = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(_KEYS, inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        )
    ),
    max_leaves=12,
)
FILES = _FLOW | st.text(max_size=60) | st.text("{}[]:,-&*!|>'\"% \n\tab", max_size=60)


def refusal(take: Callable[[], object]) -> str:
    """What is said against a file; empty where it is taken."""
    try:
        take()
    except (WebConfigError, config.ConfigError) as error:
        return str(error)
    return ""


@settings(max_examples=500)
@given(ACCEPT)
@example("text/plain;q=1;version=0.0.4," * 2000)
def test_any_accept_header_gets_a_content_type_that_we_have(accept: str) -> None:
    assert negotiate(accept).content_type in PLAIN | ESCAPED


@given(st.lists(_WEIGHTED, max_size=5).map(",".join) | st.text(max_size=80))
def test_any_accept_encoding_header_is_decided(header: str) -> None:
    assert takes_gzip(header) in {True, False}
    if "gzip" not in header.lower() and "*" not in header:
        assert not takes_gzip(header)


@given(st.text(max_size=60), st.binary(max_size=60))
def test_any_authorization_header_is_decided(text: str, raw: bytes) -> None:
    for header in (text, f"Basic {text}", f"Basic {raw.decode('latin-1')}"):
        found = credentials(header)
        assert found is None or isinstance(found[1], bytes)


@settings(max_examples=300)
@given(FILES)
@example('"a\\nb": 1')
def test_any_web_configuration_is_taken_or_refused_in_one_line(text: str) -> None:
    said = refusal(lambda: parse(text, "web.yml"))
    assert said.startswith("web.yml" if said else "")
    assert len(said.splitlines()) <= 1


@settings(max_examples=300)
@given(FILES)
@example('"a\\nb": 1')
@example('"a\\nb": {interval: 1s}')
def test_any_settings_file_is_taken_or_refused_in_one_line(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        said = refusal(lambda: config.load({}, {}, str(path)))
    assert said.startswith(str(path) if said else "")
    assert len(said.splitlines()) <= 1
