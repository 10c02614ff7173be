"""TLS, basic auth, headers and rate limit over real connections, and their change while running."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import bcrypt
import pytest
from cryptography import x509

from qgpu_exporter.config import ConfigError
from qgpu_exporter.web import connections
from qgpu_exporter.web.server import Server, WebSettings, serving
from tests import worlds
from tests.certificates import Authority
from tests.web_views import LOCAL, full_view

SECRET = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
OTHER = bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode()


class Site:
    """A folder with a web configuration file, and an authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.file = folder / "web.yml"
        self.renew()

    def renew(self) -> None:
        """A new certificate for the server, in a file that replaces the old one."""
        fresh = self.folder / "new.pem"
        fresh.write_bytes(self.authority.issue("server", server=True))
        fresh.replace(self.folder / "server.pem")

    def write(self, text: str) -> None:
        """Replace the configuration file."""
        fresh = self.folder / "new.yml"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.file)

    def client_context(self, client: bytes | None = None) -> ssl.SSLContext:
        """A client that trusts the authority and shows a certificate."""
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        if client is not None:
            file = self.folder / "client.pem"
            file.write_bytes(client)
            context.load_cert_chain(file)
        return context


TLS = "tls_server_config: {cert_file: server.pem, key_file: server.pem}\n"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@asynccontextmanager
async def served(
    site: Site, text: str, clock: Callable[[], float] | None = None, *, probes: bool = False
) -> AsyncIterator[Server]:
    """A server with this web configuration file."""
    site.write(text)
    settings = WebSettings(
        listen_addresses=LOCAL,
        probe_addresses=LOCAL if probes else (),
        config_file=str(site.file),
    )
    clocks = {} if clock is None else {"clock": clock}
    async with serving(full_view(), settings, wall_clock=lambda: worlds.NOW, **clocks) as server:
        yield server


async def status(
    server: Server,
    path: str = "/metrics",
    context: ssl.SSLContext | None = None,
    user: str | None = None,
) -> int:
    """The status of one request on a connection of its own."""
    headers = {}
    if user is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    async with aiohttp.ClientSession() as client:
        url = server.urls[0].rstrip("/") + path
        async with client.get(url, ssl=context or True, headers=headers) as answer:
            await answer.read()
            return answer.status


async def got(url: str) -> tuple[aiohttp.ClientResponse, bytes]:
    """The answer to one request, and its body."""
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        return answer, await answer.read()


async def refused(server: Server, context: ssl.SSLContext | None) -> bool:
    """Whether a connection comes to nothing."""
    try:
        await status(server, context=context)
    except aiohttp.ClientError:
        return True
    return False


async def serial(server: Server, context: ssl.SSLContext) -> int:
    """The serial number of the certificate that the server shows now."""
    host, port = server.addresses[0]
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


# --------------------------------------------------------------------------- TLS


async def test_tls_alone(site: Site) -> None:
    async with served(site, TLS) as server:
        assert server.urls[0].startswith("https://")
        assert await status(server, context=site.client_context()) == 200
        host, port = server.addresses[0]
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await client.get(f"http://{host}:{port}/metrics")


async def test_tls_from_text_in_the_file(site: Site) -> None:
    pem = (site.folder / "server.pem").read_text()
    indented = "\n".join(f"    {line}" for line in pem.splitlines())
    text = f"tls_server_config:\n  cert: |\n{indented}\n  key: |\n{indented}\n"
    async with served(site, text) as server:
        assert await status(server, context=site.client_context()) == 200


async def test_a_renewed_certificate_is_shown_to_the_next_connection(site: Site) -> None:
    async with served(site, TLS) as server:
        context = site.client_context()
        before = await serial(server, context)
        assert await serial(server, context) == before
        site.renew()
        after = await serial(server, context)
        assert after != before
        assert await status(server, context=context) == 200


async def test_a_certificate_that_is_half_written_leaves_the_old_one(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(site, TLS) as server:
        context = site.client_context()
        before = await serial(server, context)
        whole = (site.folder / "server.pem").read_bytes()
        (site.folder / "server.pem").write_bytes(whole[:100])
        for _ in range(3):
            assert await serial(server, context) == before
        told = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
        fault = f"{site.file}:1: tls_server_config: no certificate or no key"
        assert told == [f"the web configuration before stays in force: {fault}"]
        (site.folder / "server.pem").write_bytes(whole)
        assert await serial(server, context) == before


async def test_only_versions_that_are_allowed(site: Site) -> None:
    text = TLS.replace("}", ", min_version: TLS13}")
    async with served(site, text) as server:
        old = site.client_context()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await refused(server, old)
        assert await status(server, context=site.client_context()) == 200


async def test_only_ciphers_that_are_allowed(site: Site) -> None:
    suite = "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
    text = TLS.replace("}", f", max_version: TLS12, cipher_suites: [{suite}]}}")
    async with served(site, text) as server:
        other = site.client_context()
        other.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        assert await refused(server, other)
        assert await status(server, context=site.client_context()) == 200


CLIENTS = TLS.replace("}", ", client_ca_file: ca.pem, client_auth_type: {}{}}}").replace(
    "{cert", "{{cert"
)


@pytest.mark.parametrize(
    ("kind", "without", "strange", "known"),
    [
        ("RequireAndVerifyClientCert", False, False, True),
        ("RequireAnyClientCert", False, False, True),
        ("VerifyClientCertIfGiven", True, False, True),
        ("RequestClientCert", True, True, True),
    ],
)
async def test_client_certificates(
    site: Site, kind: str, without: bool, strange: bool, known: bool
) -> None:
    (site.folder / "ca.pem").write_bytes(site.authority.pem)
    async with served(site, CLIENTS.format(kind, "")) as server:
        assert await refused(server, site.client_context()) is not without
        stranger = site.client_context(Authority("others").issue("prometheus"))
        assert await refused(server, stranger) is not strange
        client = site.client_context(site.authority.issue("prometheus"))
        assert await refused(server, client) is not known


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        (x509.DNSName("prometheus.monitoring.svc"), True),
        (x509.DNSName("a.prometheus.monitoring.svc"), False),
        (x509.RFC822Name("prometheus@example.com"), True),
        (x509.IPAddress(ipaddress.ip_address("2001:db8::1")), True),
        (x509.IPAddress(ipaddress.ip_address("10.0.0.2")), False),
        (x509.UniformResourceIdentifier("spiffe://cluster/ns/monitoring/sa/prometheus"), True),
    ],
)
async def test_only_clients_with_an_allowed_name(
    site: Site, name: x509.GeneralName, allowed: bool
) -> None:
    (site.folder / "ca.pem").write_bytes(site.authority.pem)
    names = (
        ", client_allowed_sans: [prometheus.monitoring.svc, prometheus@example.com, "
        '"2001:db8::1", "spiffe://cluster/ns/monitoring/sa/prometheus"]'
    )
    text = CLIENTS.format("RequireAndVerifyClientCert", names)
    async with served(site, text) as server:
        client = site.client_context(site.authority.issue("prometheus", names=[name]))
        assert await refused(server, client) is not allowed
        nameless = site.client_context(site.authority.issue("prometheus"))
        assert await refused(server, nameless)


async def test_handshakes_that_do_not_end_do_not_keep_others_out(site: Site) -> None:
    async with served(site, TLS) as server:
        opened = [
            await asyncio.open_connection(*server.addresses[0])
            for _ in range(connections.MAX_CONNECTIONS + 20)
        ]
        assert await status(server, context=site.client_context()) == 200
        for _, writer in opened:
            writer.close()


async def test_probes_on_their_own_address_need_no_certificate(site: Site) -> None:
    (site.folder / "ca.pem").write_bytes(site.authority.pem)
    text = CLIENTS.format("RequireAndVerifyClientCert", "")
    async with served(site, text, probes=True) as server:
        host, port = server.probe_addresses[0]
        answer, _ = await got(f"http://{host}:{port}/-/healthy")
        assert answer.status == 200


# --------------------------------------------------------------------------- who may ask

AUTH = f"basic_auth_users:\n  prometheus: {SECRET}\n"


async def test_everything_but_the_probes_is_behind_basic_auth(site: Site) -> None:
    async with served(site, AUTH) as server:
        for path in ("/", "/metrics", "/caches", "/api/v1/node", "/static/page.js", "/nowhere"):
            assert (path, await status(server, path)) == (path, 401)
        for path in ("/-/healthy", "/-/ready"):
            assert (path, await status(server, path)) == (path, 200)
        for path in ("/-/healthy/", "//-/healthy", "/-/healthy%2f..%2f..%2fmetrics"):
            assert (path, await status(server, path)) == (path, 401)
        assert await status(server, user="prometheus:secret") == 200
        assert await status(server, "/nowhere", user="prometheus:secret") == 404
        assert await status(server, user="prometheus:wrong") == 401
        assert await status(server, user="nobody:secret") == 401
        assert await status(server, user="prometheus") == 401


async def test_a_refusal_names_the_scheme_and_nothing_else(site: Site) -> None:
    async with served(site, AUTH) as server:
        answer, body = await got(server.urls[0])
        assert answer.headers["WWW-Authenticate"].startswith("Basic realm=")
        assert body == b"unauthorized\n"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_an_edit_holds_at_the_next_request(site: Site) -> None:
    async with served(site, AUTH) as server:
        assert await status(server, user="prometheus:secret") == 200
        site.write(f"basic_auth_users:\n  prometheus: {OTHER}\n")
        assert await status(server, user="prometheus:secret") == 401
        assert await status(server, user="prometheus:other") == 200
        site.write("")
        assert await status(server) == 200


@pytest.mark.parametrize("broken", ["basic_auth_users: [", "basic_auth: {}", "\udcff", TLS])
async def test_a_broken_edit_keeps_the_old_settings_and_is_told_once(
    site: Site, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(site, AUTH) as server:
        site.file.write_bytes(broken.encode("utf-8", "surrogateescape"))
        for _ in range(3):
            assert await status(server) == 401
            assert await status(server, user="prometheus:secret") == 200
        told = [one for one in caplog.records if one.levelno >= logging.ERROR]
        assert len(told) == 1
        assert told[0].getMessage().startswith("the web configuration before stays in force: ")


async def test_a_file_that_is_removed_or_a_fifo_changes_nothing(site: Site) -> None:
    async with served(site, AUTH) as server:
        site.file.unlink()
        assert await status(server) == 401
        os.mkfifo(site.file)
        assert await status(server) == 401
        assert await status(server, user="prometheus:secret") == 200
        site.file.unlink()
        site.write("")
        assert await status(server) == 200


async def test_the_rate_limit_comes_before_the_password(site: Site) -> None:
    now = 100.0
    text = AUTH + "rate_limit: {interval: 10s, burst: 2}\n"
    async with served(site, text, lambda: now) as server:
        assert [await status(server) for _ in range(3)] == [401, 401, 429]
        assert await status(server, user="prometheus:secret") == 429
        assert await status(server, "/-/healthy") == 200
        now = 110.0
        assert await status(server, user="prometheus:secret") == 200
        assert await status(server, user="prometheus:secret") == 429


async def test_headers_of_the_file_replace_ours(site: Site) -> None:
    text = (
        "http_server_config:\n  headers:\n    X-Frame-Options: sameorigin\n"
        "    Strict-Transport-Security: max-age=31536000\n"
    )
    async with served(site, text) as server:
        answer, _ = await got(server.urls[0])
        assert answer.headers["X-Frame-Options"] == "sameorigin"
        assert answer.headers["Strict-Transport-Security"] == "max-age=31536000"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_many_wrong_passwords_do_not_hold_up_who_knows_theirs(site: Site) -> None:
    slow = bcrypt.hashpw(b"secret", bcrypt.gensalt(11)).decode()
    async with served(site, f"basic_auth_users:\n  prometheus: {slow}\n") as server:
        assert await status(server, user="prometheus:secret") == 200
        guesses = [
            asyncio.create_task(status(server, user=f"prometheus:{number}")) for number in range(70)
        ]
        await asyncio.sleep(0)
        assert await status(server, user="prometheus:secret") == 200
        for guess in guesses:
            guess.cancel()
        await asyncio.wait(guesses)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nope: 1", r"--web\.config\.file: .*web\.yml:1: unknown key nope"),
        (TLS.replace("server.pem", "gone.pem"), r"gone\.pem: cannot be read: No such file"),
        (
            "tls_server_config: {cert_file: /dev/zero, key_file: /dev/zero}",
            "is not a regular file",
        ),
        (
            TLS.replace("}", ", client_auth_type: RequireAnyClientCert}"),
            "no certificate is taken unverified",
        ),
    ],
)
async def test_a_broken_file_at_the_start_is_an_error(site: Site, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        async with served(site, text):
            pass
