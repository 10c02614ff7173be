"""Keeping a web configuration current: what is noticed, what is kept, what is told."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from qgpu_exporter.web.tls import notes, san_refusal
from qgpu_exporter.web.web_config import Tls, parse
from qgpu_exporter.web.web_config_file import WebConfigFile, check_web_config, web_config_notes
from tests.certificates import Authority

HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"


def test_no_file_is_plain_http_for_everybody() -> None:
    file = WebConfigFile(None)
    assert (file.current().users, file.context(), file.refusal({})) == ({}, None, None)


def test_an_edit_in_the_same_tick_of_the_clock_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users: {{a: {HASH}}}")
    stamp = path.stat().st_mtime_ns
    file = WebConfigFile(str(path), wall_clock=lambda: stamp / 1e9 + 1.0)
    assert list(file.current().users) == ["a"]
    with path.open("r+") as opened:
        opened.write(f"basic_auth_users: {{b: {HASH}}}")
    os.utime(path, ns=(stamp, stamp))
    assert list(file.current().users) == ["b"]


def test_an_edit_that_keeps_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users: {{a: {HASH}}}")
    stamp = path.stat().st_mtime_ns
    file = WebConfigFile(str(path), wall_clock=lambda: stamp / 1e9 + 10.0)
    assert list(file.current().users) == ["a"]
    with path.open("r+") as opened:
        opened.write(f"basic_auth_users: {{b: {HASH}}}")
    os.utime(path, ns=(stamp, stamp))
    assert list(file.current().users) == ["b"]


def test_a_file_that_has_settled_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users: {{a: {HASH}}}")
    stamp = path.stat().st_mtime_ns
    file = WebConfigFile(str(path), wall_clock=lambda: stamp / 1e9 + 10.0)
    before = file.current()
    assert file.current() is before


def test_a_file_that_a_broken_edit_names_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pem = Authority().issue("server", server=True)
    path, first, second = (tmp_path / name for name in ("web.yml", "first.pem", "second.pem"))
    first.write_bytes(pem)
    path.write_text("tls_server_config: {cert_file: first.pem, key_file: first.pem}")
    file = WebConfigFile(str(path), wall_clock=lambda: 4e9)
    before = file.context()
    path.write_text("tls_server_config: {cert_file: second.pem, key_file: second.pem}")
    os.utime(path, (1, 1))
    assert file.context() is before
    assert file.context() is before
    second.write_bytes(pem)
    assert file.context() is not before
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    fault = f"{second}: cannot be read: No such file or directory"
    assert told == [f"the web configuration before stays in force: {fault}"]


def test_links_as_a_mounted_secret_has_them(tmp_path: Path) -> None:
    """Kubernetes replaces a link to a directory; the file's own name never changes."""
    for name, user in (("one", "a"), ("two", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "web.yml").write_text(f"basic_auth_users: {{{user}: {HASH}}}")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "web.yml").symlink_to("..data/web.yml")
    file = WebConfigFile(str(tmp_path / "web.yml"), wall_clock=lambda: 4e9)
    assert list(file.current().users) == ["a"]
    (tmp_path / "fresh").symlink_to("two")
    (tmp_path / "fresh").replace(tmp_path / "..data")
    assert list(file.current().users) == ["b"]


def test_what_cannot_be_honoured_is_noted() -> None:
    config = parse(
        "tls_server_config: {cert: a, key: b, min_version: TLS10, client_ca: c, "
        "client_auth_type: RequireAnyClientCert, curve_preferences: [X25519, CurveP256]}\n"
        "http_server_config: {http2: true}\n",
        "web.yml",
    )
    assert web_config_notes(config) == [
        "min_version: TLS 1.0 and 1.1 are not offered; TLS 1.2 is the least",
        "curve_preferences: several are not enforced, one alone is",
        "client_auth_type: RequireAnyClientCert also verifies the certificate with client_ca",
        "http2: HTTP/2 is not offered, HTTP/1.1 is",
    ]
    assert notes(Tls(client_auth_type="RequestClientCert")) == [
        "client_auth_type: RequestClientCert asks for no certificate here"
    ]


@pytest.mark.parametrize(
    ("certificate", "is_refused"),
    [
        ({"subjectAltName": (("DNS", "a.example"), ("DNS", "b.example"))}, False),
        ({"subjectAltName": (("IP Address", "2001:DB8:0:0:0:0:0:1"),)}, False),
        ({"subjectAltName": (("DNS", "A.example"),)}, True),
        ({"subjectAltName": (("Registered ID", "b.example"),)}, True),
        ({"subjectAltName": (("DirName", (("x", "y"),)),)}, True),
        ({"subject": ((("commonName", "b.example"),),)}, True),
        (None, False),
    ],
)
def test_names_of_certificates(certificate: object, is_refused: bool) -> None:
    refusal = san_refusal(("b.example", "2001:db8::1"), certificate)
    assert (refusal is not None) is is_refused


def test_the_check_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "web.yml"
    assert check_web_config(str(path)) == [f"{path}: cannot be read: No such file or directory"]
    path.write_text("{}")
    assert check_web_config(str(path)) == []
    path.write_bytes(b"a" * (1 << 20) + b"a")
    assert check_web_config(str(path)) == [f"{path}: is larger than 1048576 bytes"]
    assert check_web_config(str(tmp_path)) == [f"{tmp_path}: is not a regular file"]
    path.write_bytes(b"\xff\xfe")
    assert check_web_config(str(path)) == [f"{path}: is not UTF-8 text"]


def test_an_encrypted_key_asks_nobody(tmp_path: Path) -> None:
    pem = Authority().issue("server", server=True)
    (tmp_path / "cert.pem").write_bytes(pem)
    (tmp_path / "key.pem").write_bytes(
        b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    path = tmp_path / "web.yml"
    path.write_text("tls_server_config: {cert_file: cert.pem, key_file: key.pem}")
    assert check_web_config(str(path)) == [
        f"{path}:1: tls_server_config: the key is encrypted, and nobody is there to be asked"
    ]
