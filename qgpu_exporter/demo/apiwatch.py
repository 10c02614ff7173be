"""One watch of the made-up API server: events as they happen, bookmarks, and what can go wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from qgpu_exporter.demo.apianswers import LONG_SECONDS, Answer
from qgpu_exporter.demo.apistore import KINDS, Object, Selection, Store

_WATCH_SECONDS = 1800.0
"""How long a watch lasts that does not say."""


class Watch:
    """An open watch; `silent` and `ended` are for those who make it fail."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        store: Store,
        resource: str,
        selected: Selection,
        api_version: str,
    ) -> None:
        self.request = request
        self.response = response
        self.silent = False
        """It stays open without another word."""
        self.ended = False
        """It ends at the next change or waking."""
        self._store = store
        self._resource = resource
        self._selected = selected
        self._api_version = api_version
        self._version = int(request.query.get("resourceVersion") or 0)

    async def tell(self, bookmark_seconds: float) -> None:
        """Write events until the asked time is over or `ended` is set."""
        query, loop = self.request.query, asyncio.get_running_loop()
        end = loop.time() + float(query.get("timeoutSeconds") or _WATCH_SECONDS)
        bookmarks = query.get("allowWatchBookmarks") in ("1", "true")
        bookmark_at = loop.time() + bookmark_seconds
        changes = self._store.subscribe()
        try:
            if not self._version:
                await self._tell_all()
            while not self.ended:
                changes.clear()
                if not self.silent:
                    if self._version < self._store.compacted:
                        await self._expire()
                        return
                    await self._tell_changes()
                    if loop.time() >= bookmark_at:
                        bookmark_at = loop.time() + bookmark_seconds
                        # Of a version that is not there yet, the real server says nothing at all.
                        if bookmarks and self._version <= self._store.version:
                            await self._write("BOOKMARK", _bookmark(self._resource, self._version))
                    if loop.time() >= end:
                        return
                wake_at = loop.time() + LONG_SECONDS if self.silent else min(end, bookmark_at)
                try:
                    async with asyncio.timeout_at(wake_at):
                        await changes.wait()
                except TimeoutError:
                    pass
        finally:
            self._store.unsubscribe(changes)

    async def _tell_all(self) -> None:
        self._version = self._store.version
        for one in self._store.select(self._resource, self._selected):
            await self._write("ADDED", one)

    async def _tell_changes(self) -> None:
        for change in self._store.since(self._version):
            self._version = change.version
            if change.resource != self._resource or self.silent:
                continue
            event = change.event(self._selected)
            if event is not None:
                await self._write(*event)

    async def _expire(self) -> None:
        message = f"too old resource version: {self._version} ({self._store.version})"
        await self.response.write(Answer.error_event(410, "Expired", message).body)

    async def _write(self, what: str, one: Object) -> None:
        kind = KINDS[self._resource].name
        told = {"kind": kind, "apiVersion": self._api_version, **shown(one, self._api_version)}
        await self.response.write(to_json({"type": what, "object": told}) + b"\n")


def to_json(value: Any) -> bytes:
    """JSON as a server writes it: without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def shown(stored: Object, api_version: str) -> Object:
    """An object in the form of a version: v1beta1 keeps a device's insides in ``basic``."""
    if api_version != "resource.k8s.io/v1beta1" or "spec" not in stored:
        return stored
    devices = [
        {"name": device["name"], "basic": {k: v for k, v in device.items() if k != "name"}}
        for device in stored["spec"].get("devices") or ()
    ]
    return {**stored, "spec": {**stored["spec"], "devices": devices}}


def _bookmark(resource: str, version: int) -> Object:
    bookmark: Object = {"metadata": {"resourceVersion": str(version)}}
    if resource == "pods":
        bookmark |= {"spec": {"containers": None}, "status": {}}
    return bookmark
