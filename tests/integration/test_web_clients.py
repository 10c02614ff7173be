"""curl and Prometheus against TLS with client certificates and basic auth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import bcrypt
import pytest

from qgpu_exporter.web.server import Server, WebSettings, serving
from tests import worlds
from tests.certificates import Authority
from tests.web_views import LOCAL, full_view

GUARD_SECONDS = 60.0
"""Only against a hang."""

Tool = Callable[[str], str]

SECRET = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()

CONFIG = f"""\
tls_server_config:
  cert_file: server.pem
  key_file: server.pem
  client_ca_file: ca.pem
  client_auth_type: RequireAndVerifyClientCert
basic_auth_users:
  prometheus: {SECRET}
"""


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[Server]:
    """A server that asks for a certificate and a password; the client's files lie in `folder`."""
    authority = Authority()
    (folder / "ca.pem").write_bytes(authority.pem)
    (folder / "server.pem").write_bytes(authority.issue("server", server=True))
    (folder / "client.pem").write_bytes(authority.issue("prometheus"))
    (folder / "web.yml").write_text(CONFIG)
    settings = WebSettings(listen_addresses=LOCAL, config_file=str(folder / "web.yml"))
    async with serving(full_view(), settings, wall_clock=lambda: worlds.NOW) as server:
        yield server


async def run(program: str, *arguments: str) -> tuple[int | None, str]:
    """Exit code and output of a program."""
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_curl(tool: Tool, tmp_path: Path) -> None:
    async with guarded(tmp_path) as server:
        url = f"{server.urls[0]}metrics"
        trust = ("--silent", "--show-error", "--cacert", str(tmp_path / "ca.pem"))
        known = (*trust, "--cert", str(tmp_path / "client.pem"))
        code, output = await run(tool("curl"), *known, "--user", "prometheus:secret", url)
        assert code == 0
        assert "node_gpu_core_request{" in output
        code, output = await run(tool("curl"), *known, "--user", "prometheus:no", url)
        assert (code, output) == (0, "unauthorized\n")
        code, _ = await run(tool("curl"), *trust, "--user", "prometheus:secret", url)
        assert code != 0
        code, _ = await run(tool("curl"), "--silent", url)
        assert code == 60, "curl's code for a certificate that it does not trust"
        code, output = await run(
            tool("curl"), *known, "--compressed", "--user", "prometheus:secret", url
        )
        assert "node_gpu_core_request{" in output


@pytest.mark.xdist_group("prometheus")
async def test_prometheus(tool: Tool, tmp_path: Path) -> None:
    async with guarded(tmp_path) as server, prometheus(tool, tmp_path, server) as api:
        async with asyncio.timeout(GUARD_SECONDS):
            assert await count_of(api, "node_gpu_core_request") == "3"
            assert await count_of(api, "up == 1") == "1"


async def count_of(api: str, expression: str) -> str:
    """How many series Prometheus has of an expression, once it has any."""
    query = {"query": f"count({expression})"}
    async with aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(f"{api}/api/v1/query", params=query) as answer:
                    found = json.loads(await answer.read())["data"]["result"]
            except (aiohttp.ClientError, ValueError, KeyError):
                found = []
            if found:
                return str(found[0]["value"][1])
            await asyncio.sleep(0.1)


@asynccontextmanager
async def prometheus(tool: Tool, folder: Path, server: Server) -> AsyncIterator[str]:
    """A real Prometheus that scrapes the server as its documentation says; gives its address."""
    host, port = server.addresses[0]
    config = {
        "scrape_configs": [
            {
                "job_name": "qgpu-exporter",
                "scheme": "https",
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "tls_config": {
                    "ca_file": "ca.pem",
                    "cert_file": "client.pem",
                    "key_file": "client.pem",
                },
                "basic_auth": {"username": "prometheus", "password": "secret"},
                "static_configs": [{"targets": [f"{host}:{port}"]}],
            }
        ]
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    free = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    address = "{}:{}".format(*free.sockets[0].getsockname())
    free.close()
    await free.wait_closed()
    process = await asyncio.create_subprocess_exec(
        tool("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()
