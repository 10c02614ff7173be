"""The web configuration file's format: what each key gives, and how each fault is named."""

from __future__ import annotations

import pytest

from qgpu_exporter.web.web_config import (
    RateLimit,
    Tls,
    WebConfig,
    WebConfigError,
    go_duration,
    parse,
)

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"

WHOLE = f"""\
tls_server_config:
  cert_file: tls.crt
  key_file: tls.key
  client_ca_file: ca.crt
  client_auth_type: RequireAndVerifyClientCert
  client_allowed_sans: [prometheus.monitoring.svc, 10.0.0.1]
  min_version: TLS13
  max_version: TLS13
  cipher_suites:
    - TLS_AES_128_GCM_SHA256
    - TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
  prefer_server_cipher_suites: false
  curve_preferences: [X25519]
http_server_config:
  http2: true
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: sameorigin
basic_auth_users:
  prometheus: {HASH}
rate_limit:
  interval: 500ms
  burst: 20
"""


def test_every_key() -> None:
    assert parse(WHOLE, "web.yml") == WebConfig(
        tls=Tls(
            cert_file="tls.crt",
            key_file="tls.key",
            client_ca_file="ca.crt",
            client_auth_type="RequireAndVerifyClientCert",
            client_allowed_sans=("prometheus.monitoring.svc", "10.0.0.1"),
            min_version="TLS13",
            max_version="TLS13",
            cipher_suites=("TLS_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
            prefer_server_cipher_suites=False,
            curve_preferences=("X25519",),
            line=2,
        ),
        http2=True,
        headers={
            "Strict-Transport-Security": "max-age=31536000",
            "X-Frame-Options": "sameorigin",
        },
        users={"prometheus": HASH},
        rate_limit=RateLimit(0.5, 20),
    )


@pytest.mark.parametrize(
    "text", ["", "{}", "# nothing\n", "tls_server_config:\n", "rate_limit: {}"]
)
def test_nothing_is_plain_http_for_everybody(text: str) -> None:
    assert parse(text, "web.yml") == WebConfig()


def test_versions_alone_do_not_switch_tls_on() -> None:
    assert parse("tls_server_config: {min_version: TLS13}", "web.yml").tls is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("users: {}", "web.yml:1: unknown key users"),
        (
            "\ntls_server_config:\n  certfile: a\n",
            "web.yml:3: unknown key tls_server_config.certfile",
        ),
        ("- a\n- b\n", "web.yml:1: the file is not a mapping"),
        ("tls_server_config: on", "web.yml:1: tls_server_config is not a mapping"),
        ("{[a]: b}", "web.yml:1: a key is not a word"),
        ("a: [", "web.yml:1: is not YAML: expected the node content, but found '<stream end>'"),
        ("a: \x01", "web.yml: is not YAML"),
        (f"{'[' * 5000}", "web.yml: is not YAML"),
        (
            "tls_server_config:\n  cert_file: a\n",
            "web.yml:2: tls_server_config: key or key_file is missing",
        ),
        (
            "tls_server_config:\n  key: a\n",
            "web.yml:2: tls_server_config: cert or cert_file is missing",
        ),
        (
            "tls_server_config: {cert: a, cert_file: a, key: a}",
            "web.yml:1: tls_server_config: gives the same thing inline and as a file",
        ),
        (
            "tls_server_config: {cert: a, key: a, client_ca: b}",
            "web.yml:1: tls_server_config: a client CA needs a client_auth_type",
        ),
        (
            "tls_server_config: {min_version: TLS13, max_version: TLS12}",
            "web.yml:1: tls_server_config: max_version is below min_version",
        ),
        (
            "tls_server_config: {min_version: SSL30}",
            "web.yml:1: tls_server_config.min_version is not one of TLS10, TLS11, TLS12, TLS13",
        ),
        (
            "tls_server_config:\n  cipher_suites:\n  - TLS_NULL\n",
            "web.yml:3: tls_server_config.cipher_suites is not known here: TLS_NULL",
        ),
        (
            "tls_server_config: {cipher_suites: TLS_AES_128_GCM_SHA256}",
            "web.yml:1: tls_server_config.cipher_suites is not a list",
        ),
        (
            "tls_server_config: {cert_file: [a]}",
            "web.yml:1: tls_server_config.cert_file is not a single value",
        ),
        (
            "tls_server_config: {prefer_server_cipher_suites: 1}",
            "web.yml:1: tls_server_config.prefer_server_cipher_suites is not true or false",
        ),
        (
            "http_server_config: {headers: {Server: x}}",
            "web.yml:1: unknown key http_server_config.headers.Server",
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: DENY}}",
            "web.yml:1: http_server_config.headers.X-Frame-Options is not one of deny, sameorigin",
        ),
        (
            'http_server_config: {headers: {X-XSS-Protection: "1\\r\\nSet-Cookie: a=b"}}',
            "web.yml:1: http_server_config.headers.X-XSS-Protection has a control character",
        ),
        ("basic_auth_users: {a: secret}", "web.yml:1: basic_auth_users.a is not a bcrypt hash"),
        (
            f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n",
            "web.yml:3: basic_auth_users.a stands twice",
        ),
        (
            f"basic_auth_users: {{a: {HASH.replace('$10$', '$99$')}}}",
            "web.yml:1: basic_auth_users.a is not a bcrypt hash",
        ),
        (
            'basic_auth_users: {"a\\nts=1 msg=forged": b}',
            "web.yml:1: basic_auth_users.a?ts=1 msg=forged is not a bcrypt hash",
        ),
        (
            "rate_limit: {interval: soon}",
            "web.yml:1: rate_limit.interval is not a duration such as 1s or 500ms",
        ),
        ("rate_limit: {interval: -1s}", "web.yml:1: rate_limit.interval is negative"),
        ("rate_limit: {burst: -1}", "web.yml:1: rate_limit.burst is not a whole number"),
    ],
)
def test_a_fault_is_one_line_with_file_line_and_key(text: str, error: str) -> None:
    with pytest.raises(WebConfigError) as raised:
        parse(text, "web.yml")
    assert str(raised.value) == error


def test_a_file_of_nested_aliases_costs_nothing() -> None:
    levels = [
        f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, 40)
    ]
    bomb = "\n".join(["l0: &l0 [x]", *levels])
    with pytest.raises(WebConfigError, match="unknown key l0"):
        parse(bomb, "web.yml")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("100us", 0.0001),
        ("0", 0.0),
        ("-2s", -2.0),
    ],
)
def test_durations_as_go_writes_them(text: str, seconds: float) -> None:
    assert go_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1", "1d", "s", "1s ", "1 s", "١s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        go_duration(text)


def test_an_interval_of_a_bare_number_is_nanoseconds() -> None:
    assert parse("rate_limit: {interval: 1000000000}", "web.yml").rate_limit == RateLimit(1.0, 1)
