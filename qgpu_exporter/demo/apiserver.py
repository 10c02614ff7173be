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

from qgpu_exporter.demo.apianswers import Answer, status_body
from qgpu_exporter.demo.apistore import KINDS, BadSelector, Object, Selection, Store, selection

Verb = Literal["get", "list", "watch", "discovery"]
DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")

_GZIP_BYTES = 128 * 1024
"""Answers above this are compressed where the client takes it, as the real server does."""
_LONG_SECONDS = 24 * 3600.0
_WATCH_SECONDS = 1800.0
_USER = "system:serviceaccount:monitoring:gpu-exporter"
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


class _Watch:
    """One open watch: what a test may do to it from outside."""

    def __init__(self, resource: str, response: web.StreamResponse, request: web.Request) -> None:
        self.resource = resource
        self.response = response
        self.request = request
        self.silent = False
        self.ended = False


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
        self._watches: set[_Watch] = set()
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
            _break(watch.request)

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
            return await _give(request, fault)
        if not self._knows(request):
            return await _give(request, Answer.refusal(401, "Unauthorized", "Unauthorized"))
        if verb == "discovery" and self.dra_versions:
            return web.json_response(_group(self.dra_versions))
        if verb == "discovery" or not resource:
            return await _give(request, Answer(404, b"404 page not found\n", "text/plain"))
        if resource not in self.allowed:
            return await _give(request, _forbidden(verb, resource))
        if verb == "get":
            return await self._get(request, resource, key)
        try:
            selected = selection(resource, request.query)
        except BadSelector as error:
            return await _give(request, Answer.refusal(400, "BadRequest", str(error)))
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
            return await _give(request, Answer.refusal(404, "NotFound", message))
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
                return await _give(request, Answer.refusal(410, "Expired", _CONTINUE_TOO_OLD))
            version, items = page
        else:
            asked = query.get("resourceVersion", "")
            if int(asked or 0) > self.store.version:
                await asyncio.sleep(self.too_large_seconds)
                return await _give(request, _too_large(asked, self.store.version))
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
            "items": [_shown(one, api_version) for one in items],
        }
        response = web.Response(body=_json(answer), content_type="application/json")
        if response.content_length and response.content_length > _GZIP_BYTES:
            response.enable_compression()
        return response

    def _keep_page(self, version: int, rest: list[Object]) -> str:
        start = f"{rest[0]['metadata'].get('namespace', '')}/{rest[0]['metadata']['name']}"
        told = {"v": "meta.k8s.io/v1", "rv": version, "start": start}
        token = base64.urlsafe_b64encode(_json(told)).decode().rstrip("=")
        self._pages[token] = (version, rest)
        return token

    # ------------------------------------------------------------------ watch

    async def _watch(
        self, request: web.Request, resource: str, selected: Selection, api_version: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        watch = _Watch(resource, response, request)
        changes = self.store.subscribe()
        self._watches.add(watch)
        try:
            await self._tell(watch, changes, selected, api_version)
        except ConnectionError:
            # The client went away, or a test broke the connection.
            pass
        finally:
            self._watches.discard(watch)
            self.store.unsubscribe(changes)
        return response

    async def _tell(
        self, watch: _Watch, changes: asyncio.Event, selected: Selection, api_version: str
    ) -> None:
        """Write events until the watch's time is over or it is ended from outside."""
        query, loop = watch.request.query, asyncio.get_running_loop()
        version = int(query.get("resourceVersion") or 0)
        kind = KINDS[watch.resource].name

        async def write(what: str, shown: Object) -> None:
            told = {"kind": kind, "apiVersion": api_version, **_shown(shown, api_version)}
            await watch.response.write(_json({"type": what, "object": told}) + b"\n")

        if not version:
            version = self.store.version
            for one in self.store.select(watch.resource, selected):
                await write("ADDED", one)
        end = loop.time() + float(query.get("timeoutSeconds") or _WATCH_SECONDS)
        bookmarks = query.get("allowWatchBookmarks") in ("1", "true")
        bookmark_at = loop.time() + self.bookmark_seconds
        while not watch.ended:
            changes.clear()
            if not watch.silent:
                if version < self.store.compacted:
                    message = f"too old resource version: {version} ({self.store.version})"
                    answer = Answer.error_event(410, "Expired", message)
                    await watch.response.write(answer.body)
                    return
                # A version that is not there yet: the real server says nothing at all until then.
                for change in self.store.since(version):
                    version = change.version
                    event = change.event(selected) if change.resource == watch.resource else None
                    if event is not None and not watch.silent:
                        await write(*event)
                if bookmarks and loop.time() >= bookmark_at and version <= self.store.version:
                    bookmark_at = loop.time() + self.bookmark_seconds
                    await write("BOOKMARK", _bookmark(kind, version))
                if loop.time() >= end:
                    return
            pause = _LONG_SECONDS if watch.silent else min(end, bookmark_at) - loop.time()
            try:
                async with asyncio.timeout(max(pause, 0.001)):
                    await changes.wait()
            except TimeoutError:
                pass


_CONTINUE_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You can start "
    "a new list without the continue parameter."
)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _bookmark(kind: str, version: int) -> Object:
    bookmark: Object = {"metadata": {"resourceVersion": str(version)}}
    if kind == "Pod":
        bookmark |= {"spec": {"containers": None}, "status": {}}
    return bookmark


def _shown(stored: Object, api_version: str) -> Object:
    """An object in the form of a version: v1beta1 keeps a device's insides in ``basic``."""
    if api_version != "resource.k8s.io/v1beta1" or "spec" not in stored:
        return stored
    devices = [
        {"name": device["name"], "basic": {k: v for k, v in device.items() if k != "name"}}
        for device in stored["spec"].get("devices") or ()
    ]
    return {**stored, "spec": {**stored["spec"], "devices": devices}}


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


def _forbidden(verb: str, resource: str) -> Answer:
    group = KINDS[resource].api_version.rpartition("/")[0]
    message = (
        f'{resource} is forbidden: User "{_USER}" cannot {verb} resource "{resource}" '
        f'in API group "{group}" at the cluster scope'
    )
    return Answer.refusal(403, "Forbidden", message)


def _too_large(asked: str, current: int) -> Answer:
    body = status_body(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {asked}, current: {current}",
        details={
            "causes": [
                {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            ],
            "retryAfterSeconds": 1,
        },
    )
    return Answer(504, body, headers={"Retry-After": "1"})


async def _give(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Give a prepared answer; status 0 says nothing, not even that."""
    headers = {"Content-Type": answer.content_type, **answer.headers}
    if answer.then == "end":
        return web.Response(status=answer.status, body=answer.body, headers=headers)
    response = web.StreamResponse(status=answer.status or 200, headers=headers)
    if answer.status:
        await response.prepare(request)
        await response.write(answer.body)
    if answer.then == "silence":
        await asyncio.sleep(_LONG_SECONDS)
    _break(request)
    return response


def _break(request: web.Request) -> None:
    if isinstance(request.transport, asyncio.Transport):
        request.transport.abort()
