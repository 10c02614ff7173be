"""Makes the TLS context of a web configuration; says what Python cannot do as Go does."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from qgpu_exporter.web.web_config import CIPHERS, CURVES, Tls, WebConfigError

# TLS 1.0 and 1.1 are broken (RFC 8996) and OpenSSL does not offer them any more by default.
_OLD = ("TLS10", "TLS11")

Read = Callable[[str], bytes]
"""The bytes of a file that the configuration names; raises `WebConfigError`."""


def context(tls: Tls, name: str, read: Read) -> ssl.SSLContext:
    """The server's context; `name` is the configuration's file, for errors."""
    where = f"{name}:{tls.line}: tls_server_config"
    if not (tls.cert or tls.cert_file):
        raise WebConfigError(f"{where}: cert or cert_file is missing")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(["http/1.1"])
    _set_versions(made, tls, where)
    if not tls.prefer_server_cipher_suites:
        made.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if len(tls.curve_preferences) == 1:
        made.set_ecdh_curve(CURVES[tls.curve_preferences[0]])
    _load_pair(
        made, _given(tls.cert, tls.cert_file, read), _given(tls.key, tls.key_file, read), where
    )
    _ask_clients(made, tls, where, read)
    return made


def notes(tls: Tls) -> list[str]:
    """One line for each key that is understood and cannot be honoured to the letter."""
    found = []
    if tls.min_version in _OLD:
        found.append("min_version: TLS 1.0 and 1.1 are not offered; TLS 1.2 is the least")
    if len(tls.curve_preferences) > 1:
        found.append("curve_preferences: several are not enforced, one alone is")
    if tls.client_auth_type == "RequestClientCert":
        found.append("client_auth_type: RequestClientCert asks for no certificate here")
    if tls.client_auth_type in ("RequireAnyClientCert", "RequireClientCert"):
        found.append(
            f"client_auth_type: {tls.client_auth_type} also verifies the certificate with client_ca"
        )
    return found


def san_refusal(allowed: tuple[str, ...], certificate: object) -> str | None:
    """Why a verified client certificate has none of the allowed names; None: it has one.

    `certificate` is what `SSLSocket.getpeercert` gives; names are compared whole.
    """
    if not allowed or not certificate:
        # Without a certificate the handshake has decided already whether one is needed.
        return None
    names = [name for kind, name in _alternative_names(certificate) if kind in _SAN_KINDS]
    wanted = {_canonical(name) for name in allowed}
    if any(_canonical(name) in wanted for name in names):
        return None
    return "a client was refused: its certificate has none of client_allowed_sans"


_SAN_KINDS = ("DNS", "email", "IP Address", "URI")


def _alternative_names(certificate: object) -> Iterator[tuple[str, str]]:
    if isinstance(certificate, dict):
        for entry in certificate.get("subjectAltName", ()):
            if len(entry) == 2 and isinstance(entry[1], str):
                yield entry[0], entry[1]


def _canonical(name: str) -> str:
    """An address in one spelling (OpenSSL writes IPv6 in full), anything else as it is."""
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name


def _set_versions(made: ssl.SSLContext, tls: Tls, where: str) -> None:
    if tls.max_version in _OLD:
        raise WebConfigError(f"{where}: max_version {tls.max_version} is not offered any more")
    versions = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
    made.minimum_version = versions.get(tls.min_version, ssl.TLSVersion.TLSv1_2)
    made.maximum_version = versions[tls.max_version]
    if not tls.cipher_suites:
        return
    older = [CIPHERS[suite] for suite in tls.cipher_suites if CIPHERS[suite]]
    if older:
        made.set_ciphers(":".join(older))
    elif tls.max_version == "TLS12":
        raise WebConfigError(f"{where}: cipher_suites has none of TLS 1.2")
    else:
        made.minimum_version = ssl.TLSVersion.TLSv1_3


def _given(inline: str, path: str, read: Read) -> bytes:
    return inline.encode() if inline else read(path)


def _load_pair(made: ssl.SSLContext, cert: bytes, key: bytes, where: str) -> None:
    """Load certificate and key from memory: what was read together belongs together."""
    if b"ENCRYPTED" in key:
        raise WebConfigError(f"{where}: the key is encrypted, and nobody is there to be asked")
    with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
        try:
            made.load_cert_chain(cert_path, key_path, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
            raise WebConfigError(
                f"{where}: "
                + ("the key is not the certificate's" if mismatch else "no certificate or no key")
            ) from None


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal.
    raise ValueError("the key is encrypted")


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A path to `data` that is on no disk: `load_cert_chain` takes nothing else."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _ask_clients(made: ssl.SSLContext, tls: Tls, where: str, read: Read) -> None:
    """Set which certificates clients must show."""
    kind = tls.client_auth_type
    if kind in ("", "NoClientCert", "RequestClientCert"):
        return
    has_ca = bool(tls.client_ca or tls.client_ca_file)
    if kind in ("RequireAnyClientCert", "RequireClientCert") and not has_ca:
        raise WebConfigError(
            f"{where}: {kind} needs a client_ca here: no certificate is taken unverified"
        )
    if has_ca:
        authorities = _given(tls.client_ca, tls.client_ca_file, read)
        try:
            made.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise WebConfigError(f"{where}: the client CA holds no certificate in PEM") from None
    else:
        made.load_default_certs(ssl.Purpose.CLIENT_AUTH)
    optional = kind == "VerifyClientCertIfGiven"
    made.verify_mode = ssl.CERT_OPTIONAL if optional else ssl.CERT_REQUIRED
