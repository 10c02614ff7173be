"""A real HTTP server that answers as a Kubernetes API server does, for a made-up cluster.

Beside the ordinary answers it gives every bad one that was seen of real servers and of proxies
before them: see `apianswers.Answer`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from qgpu_exporter.demo.apianswers import (
    CONTINUE_TOO_OLD,
    Answer,
    break_off,
    forbidden,
    give,
    too_large,
)
from qgpu_exporter.demo.apistore import KINDS, BadSelector, Object, Selection, Store, selection
from qgpu_exporter.demo.apiwatch import Watch, shown, to_json

Verb = Literal["get", "list", "watch", "discovery"]
DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")

_GZIP_BYTES = 128 * 1024
"""Answers above this are compressed where the client takes it, as the real server does."""
_PATHS = re.compile(
    r"/api/(?P<core>v1)/(?:namespaces/(?P<namespace>[^/]+)/)?(?P<plural>pods|nodes)(?:/(?P<name>[^/]+))?"
    r"|/apis/resource\.k8s\.io/(?P<dra>[^/]+)/resourceslices"
    r"|/apis/elasticgpu\.io/v1alpha1/(?P<gpus>gpus)"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came."""

    verb: Verb
    resource: str
    path: str
    query: Mapping[str, str]
    authorization: str
    user_agent: str


@dataclass(slots=True)
class _Fault:
    verb: Verb | None
    resource: str | None
    answer: Answer
    times: int


class ApiServer:
    """An API server on loopback; all methods are for its event loop's thread.

    `tokens`: who may come in (None: everybody; a client certificate that the TLS context trusts
    also does).  `allowed`: the resources that may be read; all others are refused with 403.
    `dra_versions`: the served versions of resource.k8s.io (none: the group is unknown).
    `bookmark_seconds`, `too_large_seconds`: how often bookmarks come, and how long a list waits
    for a version that is not there yet.
    """

    def __init__(
        self,
        *,
        tokens: set[str] | None = None,
        dra_versions: tuple[str, ...] = DRA_VERSIONS,
        bookmark_seconds: float = 60.0,
        too_large_seconds: float = 3.0,
    ) -> None:
        self.store = Store()
        self.tokens = tokens
        self.allowed = set(KINDS)
        self.dra_versions = dra_versions
        self.bookmark_seconds = bookmark_seconds
        self.too_large_seconds = too_large_seconds
        self.requests: deque[Request] = deque(maxlen=10_000)
        self.url = ""
        self._faults: list[_Fault] = []
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._watches: set[Watch] = set()
        self._runner: web.AppRunner | None = None
        self._tls: ssl.SSLContext | None = None

    # ------------------------------------------------------------------ life

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> str:
        """Listen on 127.0.0.1 (port 0: any free one); returns the URL."""
        application = web.Application(client_max_size=1024)
        application.router.add_get("/{path:.*}", self._answer)
        self._tls = tls
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        bound = self._runner.addresses[0][1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{bound}"
        return self.url

    async def stop(self) -> None:
        """Stop listening and break what is open."""
        self.reset_watches()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def restart(
        self, down_seconds: float = 0.0, while_down: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """End as a real server does and come back on the same port.

        New connections are refused at once and open watches fall silent; after `down_seconds`, and
        after `while_down`, they break, and the server listens again.
        """
        if self._runner is None:
            raise RuntimeError("the server does not run")
        port = self._runner.addresses[0][1]
        for site in list(self._runner.sites):
            await site.stop()
        self.silence_watches()
        await asyncio.sleep(down_seconds)
        if while_down is not None:
            await while_down()
        await self.stop()
        await self.start(port, self._tls)

    def write_kubeconfig(
        self, path: Path, *, token: str | None = None, ca_file: Path | None = None
    ) -> Path:
        """Write a kubeconfig with which clients find this server; returns its path."""
        cluster: Object = {"server": self.url}
        if ca_file is not None:
            cluster["certificate-authority"] = str(ca_file)
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "made-up", "cluster": cluster}],
            "users": [{"name": "exporter", "user": {"token": token} if token else {}}],
            "contexts": [
                {"name": "made-up", "context": {"cluster": "made-up", "user": "exporter"}}
            ],
            "current-context": "made-up",
        }
        # JSON is YAML.
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    # ------------------------------------------------------------------ the cluster

    def put(self, resource: str, given: Mapping[str, Any]) -> Object:
        """Create or replace an object of ``pods``, ``nodes``, ``resourceslices`` or ``gpus``."""
        return self.store.put(resource, given)

    def patch(self, resource: str, key: str, changes: Mapping[str, Any]) -> Object:
        """Change an object (by ``namespace/name`` or ``/name``) with a JSON merge patch."""
        return self.store.patch(resource, key, changes)

    def delete(self, resource: str, key: str) -> None:
        """Delete an object (by ``namespace/name`` or ``/name``)."""
        self.store.delete(resource, key)

    def compact(self) -> None:
        """Forget the history, and with it the next pages of lists that were begun."""
        self.store.compact()
        self._pages.clear()

    # ------------------------------------------------------------------ faults

    def fail(
        self,
        answer: Answer,
        *,
        verb: Verb | None = None,
        resource: str | None = None,
        times: int = 1,
    ) -> None:
        """Give a prepared answer to the next matching requests."""
        self._faults.append(_Fault(verb, resource, answer, times))

    def mend(self) -> None:
        """Take back all prepared answers."""
        self._faults.clear()

    @property
    def open_watches(self) -> int:
        """Watches that are open and have not been silenced."""
        return sum(not watch.silent for watch in self._watches)

    def silence_watches(self) -> None:
        """Let open watches stay open without another word, as behind a dead network."""
        for watch in self._watches:
            watch.silent = True

    def reset_watches(self) -> None:
        """Break the connections of open watches."""
        for watch in list(self._watches):
            watch.ended = True
            break_off(watch.request)

    def end_watches(self) -> None:
        """End open watches cleanly, as their timeoutSeconds does."""
        for watch in self._watches:
            watch.ended = True
        self.store.wake()

    async def write(self, raw: bytes) -> None:
        """Write raw bytes into all open watches."""
        for watch in list(self._watches):
            await watch.response.write(raw)

    # ------------------------------------------------------------------ answering

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        verb, resource, key, api_version = self._understand(request)
        self.requests.append(
            Request(
                verb,
                resource,
                request.path,
                dict(request.query),
                request.headers.get("Authorization", ""),
                request.headers.get("User-Agent", ""),
            )
        )
        fault = self._due_fault(verb, resource)
        if fault is not None:
            return await give(request, fault)
        if not self._knows(request):
            return await give(request, Answer.refusal(401, "Unauthorized", "Unauthorized"))
        if verb == "discovery" and self.dra_versions:
            return web.json_response(_group(self.dra_versions))
        if verb == "discovery" or not resource:
            return await give(request, Answer(404, b"404 page not found\n", "text/plain"))
        if resource not in self.allowed:
            group = KINDS[resource].api_version.rpartition("/")[0]
            return await give(request, forbidden(verb, resource, group))
        if verb == "get":
            return await self._get(request, resource, key)
        try:
            selected = selection(resource, request.query)
        except BadSelector as error:
            return await give(request, Answer.refusal(400, "BadRequest", str(error)))
        if verb == "watch":
            return await self._watch(request, resource, selected, api_version)
        return await self._list(request, resource, selected, api_version)

    def _understand(self, request: web.Request) -> tuple[Verb, str, str, str]:
        """Verb, resource ("" for an unknown path), key and API version of a request."""
        if request.path == "/apis/resource.k8s.io":
            return "discovery", "", "", ""
        match = _PATHS.fullmatch(request.path)
        if match is None or (match["dra"] and match["dra"] not in self.dra_versions):
            return "list", "", "", ""
        resource = match["plural"] or match["gpus"] or "resourceslices"
        version = f"resource.k8s.io/{match['dra']}" if match["dra"] else KINDS[resource].api_version
        if match["name"]:
            return "get", resource, f"{match['namespace'] or ''}/{match['name']}", version
        watch = request.query.get("watch", "") in ("1", "true")
        return ("watch" if watch else "list"), resource, "", version

    def _due_fault(self, verb: Verb, resource: str) -> Answer | None:
        for fault in self._faults:
            if fault.verb in (None, verb) and fault.resource in (None, resource):
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                return fault.answer
        return None

    def _knows(self, request: web.Request) -> bool:
        if self.tokens is None:
            return True
        connection = request.transport
        if connection is not None and connection.get_extra_info("peercert"):
            return True
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return scheme == "Bearer" and token in self.tokens

    async def _get(self, request: web.Request, resource: str, key: str) -> web.StreamResponse:
        found = self.store.get(resource, key)
        if found is None:
            name = key.partition("/")[2]
            message = f'{resource} "{name}" not found'
            return await give(request, Answer.refusal(404, "NotFound", message))
        kind = KINDS[resource]
        return web.json_response({"kind": kind.name, "apiVersion": kind.api_version, **found})

    # ------------------------------------------------------------------ list

    async def _list(
        self, request: web.Request, resource: str, selected: Selection, api_version: str
    ) -> web.StreamResponse:
        """One page, or all: a list of version 0 comes from the cache, which knows no pages."""
        query = request.query
        limit = int(query.get("limit") or 0)
        if query.get("continue"):
            page = self._pages.get(query["continue"])
            if page is None:
                return await give(request, CONTINUE_TOO_OLD)
            version, items = page
        else:
            asked = query.get("resourceVersion", "")
            if int(asked or 0) > self.store.version:
                await asyncio.sleep(self.too_large_seconds)
                return await give(request, too_large(asked, self.store.version))
            version, items = self.store.version, self.store.select(resource, selected)
            limit = 0 if asked == "0" else limit
        metadata: Object = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            items, rest = items[:limit], items[limit:]
            metadata["continue"] = self._keep_page(version, rest)
            if "fieldSelector" not in query and "labelSelector" not in query:
                metadata["remainingItemCount"] = len(rest)
        answer = {
            "kind": f"{KINDS[resource].name}List",
            "apiVersion": api_version,
            "metadata": metadata,
            "items": [shown(one, api_version) for one in items],
        }
        response = web.Response(body=to_json(answer), content_type="application/json")
        if response.content_length and response.content_length > _GZIP_BYTES:
            response.enable_compression()
        return response

    def _keep_page(self, version: int, rest: list[Object]) -> str:
        start = f"{rest[0]['metadata'].get('namespace', '')}/{rest[0]['metadata']['name']}"
        told = {"v": "meta.k8s.io/v1", "rv": version, "start": start}
        token = base64.urlsafe_b64encode(to_json(told)).decode().rstrip("=")
        self._pages[token] = (version, rest)
        return token

    # ------------------------------------------------------------------ watch

    async def _watch(
        self, request: web.Request, resource: str, selected: Selection, api_version: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        watch = Watch(request, response, self.store, resource, selected, api_version)
        self._watches.add(watch)
        try:
            await watch.tell(self.bookmark_seconds)
        except ConnectionError:
            # The client went away, or a test broke the connection.
            pass
        finally:
            self._watches.discard(watch)
        return response


def _group(versions: tuple[str, ...]) -> Object:
    offered = [
        {"groupVersion": f"resource.k8s.io/{version}", "version": version} for version in versions
    ]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": "resource.k8s.io",
        "versions": offered,
        "preferredVersion": offered[0],
    }
