"""The way to the API server: credentials of every kind, replaced under our feet, and bad ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from yarl import URL

from qgpu_exporter.demo.apiserver import ApiServer
from qgpu_exporter.sources import SourceError
from qgpu_exporter.sources.kubernetes.client import Connection, Refused, present
from qgpu_exporter.sources.kubernetes.pods import Pods
from tests.certificates import Authority
from tests.integration.kubernetes_following import (
    names,
    pod,
    pods_source,
    running,
    serving,
    until,
    until_names,
    until_up,
)

PODS = "/api/v1/pods"


class Cluster:
    """A server with TLS, and a pod's service account for it."""

    def __init__(self, server: ApiServer, authority: Authority, folder: Path) -> None:
        self.server = server
        self.authority = authority
        self.folder = folder
        self.account = folder / "serviceaccount"
        self.account.mkdir()

    async def start(self) -> None:
        await self.server.start(tls=self.authority.server_context(self.folder, ask_clients=True))
        (self.account / "ca.crt").write_bytes(self.authority.pem)

    def write_token(self, token: str) -> None:
        """Replace the token as the kubelet does: by another file under the same name."""
        new = self.account / "token.new"
        new.write_text(token)
        new.rename(self.account / "token")

    def environment(self) -> dict[str, str]:
        url = URL(self.server.url)
        return {
            "KUBERNETES_SERVICE_HOST": str(url.host),
            "KUBERNETES_SERVICE_PORT": str(url.port),
        }

    def connection(self) -> Connection:
        return Connection(environment=self.environment(), service_account=self.account)


@asynccontextmanager
async def cluster(folder: Path, *tokens: str) -> AsyncIterator[Cluster]:
    made = Cluster(ApiServer(tokens=set(tokens)), Authority(), folder)
    await made.start()
    try:
        yield made
    finally:
        await made.server.stop()


@asynccontextmanager
async def followed(connection: Connection) -> AsyncIterator[Pods]:
    source = pods_source(connection)
    try:
        async with running(source):
            yield source
    finally:
        await connection.close()


async def test_a_service_account_whose_token_ends_in_a_line_break(tmp_path: Path) -> None:
    async with cluster(tmp_path, "first") as made:
        made.write_token("first\n")
        made.server.put("pods", pod("a"))
        async with followed(made.connection()) as source:
            await until_names(source, "a")
        assert {one.authorization for one in made.server.requests} == {"Bearer first"}


async def test_a_rotated_token_is_picked_up_without_a_failure(tmp_path: Path) -> None:
    async with cluster(tmp_path, "first") as made:
        made.write_token("first")
        async with followed(made.connection()) as source:
            await until(lambda: made.server.open_watches == 1)
            made.server.tokens = {"second"}
            made.write_token("second")
            # A watch outlives the token with which it was opened.
            made.server.put("pods", pod("a"))
            await until_names(source, "a")
            made.server.end_watches()
            made.server.put("pods", pod("b"))
            await until_names(source, "a", "b")
            assert source.health.failures == {}


async def test_a_token_replaced_without_a_trace_is_read_again_on_401(tmp_path: Path) -> None:
    async with cluster(tmp_path, "first") as made:
        made.write_token("token-1")
        made.server.tokens = {"token-1"}
        token = made.account / "token"
        before = token.stat()
        connection = made.connection()
        await connection.get(PODS, {})
        with token.open("r+") as file:
            file.write("token-2")
        os.utime(token, ns=(before.st_atime_ns, before.st_mtime_ns))
        made.server.tokens = {"token-2"}
        await connection.get(PODS, {})
        assert [one.authorization for one in made.server.requests] == [
            "Bearer token-1",
            "Bearer token-1",
            "Bearer token-2",
        ]
        await connection.close()


async def test_refused_credentials_are_down_until_they_are_accepted(tmp_path: Path) -> None:
    async with cluster(tmp_path, "right") as made:
        made.write_token("wrong")
        made.server.put("pods", pod("a"))
        async with followed(made.connection()) as source:
            await until(lambda: source.health.failures.get("unauthorized", 0) >= 3)
            assert source.health.up is False
            assert "does not accept the credentials" in source.health.detail
            made.write_token("right")
            await until_names(source, "a")
            await until_up(source)


async def test_a_new_authority_is_picked_up(tmp_path: Path) -> None:
    async with cluster(tmp_path, "token") as made:
        made.write_token("token")
        made.server.put("pods", pod("a"))
        async with followed(made.connection()) as source:
            await until_names(source, "a")
            await until(lambda: made.server.open_watches == 1)
            port = URL(made.server.url).port
            await made.server.stop()
            made.authority = Authority("the next one")
            await made.server.start(port=port or 0, tls=made.authority.server_context(made.folder))
            await until(lambda: source.health.failures.get("tls", 0) >= 2)
            assert names(source.latest) == ["a"]
            (made.account / "ca.crt").write_bytes(made.authority.pem)
            made.server.put("pods", pod("b"))
            await until_names(source, "a", "b")
            await until_up(source)


async def test_a_nodes_own_kubeconfig_with_rotating_certificates(tmp_path: Path) -> None:
    async with cluster(tmp_path, "nobody") as made:
        current = tmp_path / "kubelet-client-current.pem"
        first, second = tmp_path / "first.pem", tmp_path / "second.pem"
        stranger = Authority("a stranger")
        first.write_bytes(stranger.issue("system:node:gpu-node-a"))
        second.write_bytes(made.authority.issue("system:node:gpu-node-a"))
        current.symlink_to(first)
        kubeconfig = tmp_path / "kubelet.conf"
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {
                            "name": "c",
                            "cluster": {
                                "server": made.server.url,
                                "certificate-authority": "serviceaccount/ca.crt",
                            },
                        }
                    ],
                    "users": [
                        {
                            "name": "u",
                            "user": {
                                "client-certificate": str(current),
                                "client-key": str(current),
                            },
                        }
                    ],
                    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "x",
                }
            )
        )
        made.server.put("pods", pod("a"))
        async with followed(Connection(str(kubeconfig))) as source:
            await until(lambda: sum(source.health.failures.values()) >= 2)
            assert source.latest is None
            current.unlink()
            current.symlink_to(second)
            await until_names(source, "a")
            await until_up(source)


async def test_a_kubeconfig_that_comes_later(tmp_path: Path) -> None:
    async with serving(tokens={"token"}) as server:
        server.put("pods", pod("a"))
        kubeconfig = tmp_path / "kubeconfig"
        async with followed(Connection(str(kubeconfig))) as source:
            await until(lambda: source.health.failures.get("credentials", 0) >= 2)
            assert str(kubeconfig) in source.health.detail
            server.write_kubeconfig(kubeconfig, token="token")
            await until_names(source, "a")
            await until_up(source)


@pytest.mark.parametrize(
    "text",
    [
        "users: [{name: u, user: {token: s3cr3t}}\n\tbad",
        "[]",
        "{}",
        '{"current-context": "x", "contexts": 7, "users": "s3cr3t"}',
    ],
)
async def test_a_broken_kubeconfig_is_named_and_its_secrets_are_not(
    text: str, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(text)
    connection = Connection(str(kubeconfig))
    with pytest.raises(SourceError) as caught:
        await connection.get(PODS, {})
    assert caught.value.reason == "credentials"
    assert str(kubeconfig) in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    await connection.close()


async def test_nobody_listens(tmp_path: Path) -> None:
    async with serving() as server:
        kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
        address = server.url.removeprefix("http://")
    connection = Connection(str(kubeconfig))
    with pytest.raises(SourceError) as caught:
        await connection.get(PODS, {})
    assert caught.value.reason == "unreachable"
    host, port = address.split(":")
    assert str(caught.value) == (
        f"the API server {address} is not reachable: Connect call failed ('{host}', {port})"
    )
    await connection.close()


async def test_a_refusal_says_status_and_words(tmp_path: Path) -> None:
    async with serving() as server:
        connection = Connection(str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        with pytest.raises(Refused) as caught:
            await connection.get(PODS, {"fieldSelector": "spec.odd=1"})
        assert caught.value.status == 400
        assert str(caught.value).endswith("field label not supported: spec.odd")
        with pytest.raises(Refused) as caught:
            await connection.get("/apis/unknown/v1/things", {})
        assert (caught.value.status, caught.value.reason) == (404, "not_found")
        await connection.close()


def test_credentials_are_present_where_a_file_or_a_token_is(tmp_path: Path) -> None:
    inside = {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert present("any/file", {}, tmp_path)
    assert not present("", inside, tmp_path)
    (tmp_path / "token").write_text("t")
    assert present("", inside, tmp_path)
    assert not present("", {}, tmp_path)
    assert not present("", {"KUBERNETES_SERVICE_HOST": ""}, tmp_path)


def test_the_client_library_is_not_loaded_until_it_is_asked() -> None:
    code = (
        "import sys\n"
        "from qgpu_exporter.sources.kubernetes import client, gpus, node, pods, slices\n"
        "client.Connection('somewhere')\n"
        "print('kubernetes_asyncio' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"
