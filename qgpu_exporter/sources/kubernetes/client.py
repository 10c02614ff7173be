"""The way to the API server: where it is, who we are there, TLS, and single requests to it.

Credentials are those of the pod's service account or of a kubeconfig, read by kubernetes-asyncio,
which also carries the requests.  Tokens, certificates and CAs may be replaced under our feet: when
one of their files has changed, or the server no longer knows us, all are read anew.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

from qgpu_exporter import __version__
from qgpu_exporter.sources import SourceError
from qgpu_exporter.sources.kubernetes.objects import UNREADABLE, Status, decode

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where every cluster mounts a pod's token and the cluster's CA."""

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
"""A whole list must have come within this."""
MAX_ANSWER_BYTES = 256 * 2**20
"""A larger list is not read: 250 objects of the largest size that etcd stores are below it."""
MAX_LINE_BYTES = 4 * 2**20
"""A longer line of a watch is not read: etcd's own limit is 1.5 MiB an object."""

_UNAUTHORIZED = 401
_REASONS = {401: "unauthorized", 403: "forbidden", 404: "not_found", 410: "expired"}


class Refused(SourceError):
    """An answer with another status than 200: `status` is it, `retry_after_seconds` may be."""

    def __init__(
        self, reason: str, detail: str, status: int, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(reason, detail)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


def refusal(status: int, message: str, retry_after: str | None) -> Refused:
    """The error for a status code and the server's own words."""
    if status == 429:
        reason = "rate_limited"
    elif status >= 500:
        reason = "server_error"
    else:
        reason = _REASONS.get(status, "refused")
    said = message or "no reason given"
    if status == _UNAUTHORIZED:
        said = "the API server does not accept the credentials (401): renew the token or kubeconfig"
    elif status == 403:
        said = f"{said}: grant list and watch in the exporter's ClusterRole"
    else:
        said = f"the API server answers {status}: {said}"
    try:
        seconds = float(retry_after) if retry_after else None
    except ValueError:
        seconds = None
    return Refused(reason, said, status, seconds)


def present(
    kubeconfig: str, environment: Mapping[str, str], service_account: Path = SERVICE_ACCOUNT
) -> bool:
    """Whether there are credentials: a kubeconfig is named, or this is a pod with a token."""
    if kubeconfig:
        return True
    return (
        bool(environment.get("KUBERNETES_SERVICE_HOST")) and (service_account / "token").is_file()
    )


class Connection:
    """Requests to one API server, shared by all sources that ask it.

    `kubeconfig` names a file; empty: the pod's service account, whose server `environment` names.
    Nothing is read and no library loaded before the first request.
    """

    def __init__(
        self,
        kubeconfig: str = "",
        *,
        environment: Mapping[str, str] | None = None,
        service_account: Path = SERVICE_ACCOUNT,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._environment = dict(os.environ if environment is None else environment)
        self._service_account = service_account
        self._session: _Session | None = None
        self._opening = asyncio.Lock()

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """The JSON body at `path`; raises `Refused` for a refusal, else `SourceError`."""
        limits = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS)
        async with self._answer(path, query, limits) as answer:
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise SourceError("too_long", f"the answer for {path} is too long to be read")
            return bytes(body)

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str], silence_seconds: float
    ) -> AsyncIterator[AsyncIterator[list[bytes]]]:
        """The lines of a watch as they come, in batches of one or more.

        Ends where the server ends it cleanly.  Raises as `get` does; a stream that says nothing
        for `silence_seconds` raises with reason ``silent``, a line above `MAX_LINE_BYTES` with
        ``too_long``.
        """
        limits = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        async with self._answer(path, query, limits) as answer:
            yield _lines(answer.content, path)

    async def close(self) -> None:
        """Close all connections; the next request opens new ones."""
        await self._forget(self._session)

    @asynccontextmanager
    async def _answer(
        self, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request's answer of status 200 and JSON; the library's errors become ours."""
        try:
            session = await self._open()
            async with session:
                answer = await session.request(path, query, limits)
                if answer.status != _UNAUTHORIZED:
                    async with answer:
                        await _check(answer)
                        yield answer
                    return
                answer.release()
            # The token may have been replaced in a way that no file's date shows.
            await self._forget(session)
            session = await self._open()
            async with session, await session.request(path, query, limits) as answer:
                await _check(answer)
                yield answer
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            await self._forget(self._session)
            raise SourceError("tls", f"no trusted connection to the API server: {error}") from error
        except TimeoutError as error:
            if limits.total is None:
                raise SourceError("silent", "the watch said nothing for too long") from error
            raise SourceError("timeout", "the API server did not answer in time") from error
        except aiohttp.ClientConnectorError as error:
            # The library's own text speaks of its settings, not of the fault alone.
            fault = error.os_error.strerror or error.os_error
            raise SourceError(
                "unreachable", f"the API server {error.host}:{error.port} is not reachable: {fault}"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise SourceError("disconnected", "the API server broke the connection") from error

    async def _forget(self, session: _Session | None) -> None:
        if session is None:
            return
        if self._session is session:
            self._session = None
        await session.retire()

    async def _open(self) -> _Session:
        """The present session, or a new one where a file behind it has changed."""
        async with self._opening:
            if self._session is not None and self._session.is_current():
                return self._session
            await self._forget(self._session)
            # Loading the library takes a third of a second, in which the loop must go on.
            client, config = await asyncio.to_thread(_library)
            configuration = client.Configuration()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    files = await self._configure(config, configuration)
                    session = _Session(client.ApiClient(configuration), files)
            except Exception as error:  # a kubeconfig can be wrong in any way
                raise SourceError("credentials", self._explain(error)) from error
            self._session = session
            return session

    async def _configure(self, config: Any, configuration: Any) -> list[str]:
        """Fill in server and credentials; returns the files that they were read from."""
        # Clusters made by older tools have CAs without the extensions that Python 3.13 demands.
        configuration.disable_strict_ssl_verification = True
        if self._kubeconfig:
            # The library takes a file that is not there, or not for us, for an empty one.
            with open(self._kubeconfig, "rb"):  # noqa: ASYNC230 - opened and closed, not read
                pass
            await config.load_kube_config(
                config_file=self._kubeconfig,
                client_configuration=configuration,
                persist_config=False,
            )
            files = [self._kubeconfig]
        else:
            token = str(self._service_account / "token")
            # Nothing is read anew by the library: `is_current` sees every change, at once.
            config.load_incluster_config(
                client_configuration=configuration,
                try_refresh_token=False,
                token_filename=token,
                cert_filename=str(self._service_account / "ca.crt"),
                environ=self._environment,
            )
            files = [token]
        for kind, key in configuration.api_key.items():
            # A line break at the token file's end would break the header.
            configuration.api_key[kind] = key.strip()
        named = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        return files + [name for name in named if name]

    def _explain(self, error: Exception) -> str:
        where = self._kubeconfig or "the pod's service account"
        # Other errors' texts may quote the file, and with it a secret.
        known = isinstance(error, OSError) or type(error).__name__ == "ConfigException"
        what = (str(error) if known else "") or f"not understood ({type(error).__name__})"
        return f"the credentials of {where} cannot be used: {what}"


class _Session:
    """One API client with the state of the files behind it; closes when the last user is gone."""

    def __init__(self, api: Any, files: list[str]) -> None:
        self._api = api
        self._files = files
        self._state = _state_of(files)
        self._users = 0
        self._retired = False
        api.user_agent = f"qgpu-exporter/{__version__}"

    def is_current(self) -> bool:
        """Whether no file has changed since."""
        return _state_of(self._files) == self._state

    async def request(
        self, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Send one GET; the status is not checked, and nothing of the body is read."""
        answer = await self._api.call_api(
            path,
            "GET",
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=limits,
        )
        # The client would keep the last answer alive.
        self._api.last_response = None
        if not isinstance(answer, aiohttp.ClientResponse):
            raise TypeError(f"the client library answers {type(answer).__name__}")
        return answer

    async def retire(self) -> None:
        """No new users; close now, or when the last one has ended."""
        self._retired = True
        if not self._users:
            await self._api.close()

    async def __aenter__(self) -> Self:
        self._users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._users -= 1
        if self._retired and not self._users:
            await self._api.close()


def _library() -> tuple[Any, Any]:
    """The client library: 40 MiB that only those need who ask an API server."""
    from kubernetes_asyncio import client, config

    return client, config


def _state_of(files: list[str]) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes when a file is replaced, also by the swap of a projected volume's link."""
    states: list[tuple[int, int, int] | None] = []
    for name in files:
        try:
            status = os.stat(name)
        except OSError:
            states.append(None)
        else:
            states.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(states)


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raise what is wrong with an answer, unless it is 200 and JSON."""
    if answer.status != 200:
        said = await answer.content.read(64 * 1024)
        try:
            message = decode(said, Status).message or ""
        except UNREADABLE:
            # A proxy's page: its words are of no use here.
            message = ""
        raise refusal(answer.status, message, answer.headers.get("Retry-After"))
    if "json" not in answer.content_type:
        raise SourceError(
            "not_json", f"{answer.url.host} answers {answer.content_type}: is it an API server?"
        )


async def _lines(content: aiohttp.StreamReader, path: str) -> AsyncIterator[list[bytes]]:
    """The lines that each chunk of a stream completes; a last one without its end is dropped."""
    pending: list[bytes] = []
    pending_bytes = 0
    async for chunk in content.iter_any():
        *complete, rest = chunk.split(b"\n")
        if complete:
            complete[0] = b"".join((*pending, complete[0]))
            pending, pending_bytes = [], 0
        pending.append(rest)
        pending_bytes += len(rest)
        if pending_bytes > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in complete):
            raise SourceError("too_long", f"an event of {path} is too long to be read")
        lines = [line for line in complete if line.strip()]
        if lines:
            yield lines
