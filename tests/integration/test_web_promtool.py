"""Our verdict on web configuration files beside promtool's, which is exporter-toolkit's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from qgpu_exporter.web.web_config_file import check_web_config
from tests.certificates import Authority

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"
PAIR = "cert_file: cert.pem, key_file: key.pem"

# Left out: keys that promtool 2.42 does not know (inline texts, client_allowed_sans, rate_limit),
# and the differences that docs/web-configuration.md lists.
FILES = {
    "empty": "",
    "empty mapping": "{}",
    "unknown section": "tls: {}",
    "unknown key": "tls_server_config: {certificate: a}",
    "no mapping": "tls_server_config: [a]",
    "no yaml": "a: [",
    "key twice": f"basic_auth_users:\n  a: {HASH}\n  a: {HASH}\n",
    "tls": f"tls_server_config: {{{PAIR}}}",
    "tls of null": "tls_server_config:",
    "no key": "tls_server_config: {cert_file: cert.pem}",
    "no certificate": "tls_server_config: {key_file: key.pem}",
    "file that is not there": "tls_server_config: {cert_file: no.pem, key_file: key.pem}",
    "key for certificate": "tls_server_config: {cert_file: key.pem, key_file: cert.pem}",
    "key of another": "tls_server_config: {cert_file: cert.pem, key_file: other.pem}",
    "versions alone": "tls_server_config: {min_version: TLS13}",
    "version of null": "tls_server_config: {min_version: }",
    "no version": "tls_server_config: {min_version: TLS1.3}",
    "versions": f"tls_server_config: {{{PAIR}, min_version: TLS12, max_version: TLS13}}",
    "suites": (
        f"tls_server_config: {{{PAIR}, cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, "
        "TLS_AES_128_GCM_SHA256]}"
    ),
    "no suite": "tls_server_config: {cipher_suites: [ECDHE-RSA-AES128-GCM-SHA256]}",
    "curves": f"tls_server_config: {{{PAIR}, curve_preferences: [CurveP256, X25519]}}",
    "no curve": "tls_server_config: {curve_preferences: [P-256]}",
    "preference": f"tls_server_config: {{{PAIR}, prefer_server_cipher_suites: false}}",
    "no preference": "tls_server_config: {prefer_server_cipher_suites: 1}",
    "authority without type": f"tls_server_config: {{{PAIR}, client_ca_file: cert.pem}}",
    "authority that is not there": (
        f"tls_server_config: {{{PAIR}, client_ca_file: no.pem, "
        "client_auth_type: RequireAndVerifyClientCert}"
    ),
    "type": (
        f"tls_server_config: {{{PAIR}, client_ca_file: cert.pem, "
        "client_auth_type: RequireAndVerifyClientCert}"
    ),
    "type if given": (
        f"tls_server_config: {{{PAIR}, client_ca_file: cert.pem, "
        "client_auth_type: VerifyClientCertIfGiven}"
    ),
    "type that asks": f"tls_server_config: {{{PAIR}, client_auth_type: RequestClientCert}}",
    "no type": f"tls_server_config: {{{PAIR}, client_auth_type: Always}}",
    "type alone": "tls_server_config: {client_auth_type: NoClientCert}",
    "http2": "http_server_config: {http2: false}",
    "http2 in words": "http_server_config: {http2: yes}",
    "no http2": "http_server_config: {http2: maybe}",
    "headers": (
        "http_server_config: {headers: {X-Frame-Options: deny, X-Content-Type-Options: nosniff, "
        "X-XSS-Protection: '1', Strict-Transport-Security: max-age=1, "
        "Content-Security-Policy: default-src 'self'}}"
    ),
    "header in other case": "http_server_config: {headers: {x-frame-options: deny}}",
    "value in other case": "http_server_config: {headers: {X-Frame-Options: DENY}}",
    "value of nothing": "http_server_config: {headers: {X-Frame-Options: ''}}",
    "other header": "http_server_config: {headers: {Server: a}}",
    "user": f"basic_auth_users: {{a: {HASH}}}",
    "user of null": "basic_auth_users: {a: }",
    "password": "basic_auth_users: {a: secret}",
    "md5": "basic_auth_users: {a: $apr1$abcdefgh$0123456789012345678901}",
}


@pytest.mark.parametrize("name", FILES)
async def test_our_verdict_is_promtools(
    name: str, tmp_path: Path, tool: Callable[[str], str]
) -> None:
    certificate, key = _pair(Authority().issue("server", server=True))
    (tmp_path / "cert.pem").write_bytes(certificate)
    (tmp_path / "key.pem").write_bytes(key)
    (tmp_path / "other.pem").write_bytes(_pair(Authority().issue("other", server=True))[1])
    file = tmp_path / "web.yml"
    file.write_text(FILES[name])
    process = await asyncio.create_subprocess_exec(
        tool("promtool"),
        "check",
        "web-config",
        str(file),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    faults = check_web_config(str(file))
    assert (process.returncode == 0) is (faults == []), (output, faults)
    assert all("\n" not in fault for fault in faults)


def _pair(pem: bytes) -> tuple[bytes, bytes]:
    """(certificate, key) of a PEM text that holds both."""
    certificate, mark, key = pem.partition(b"-----BEGIN PRIVATE KEY-----")
    return certificate, mark + key
