"""List, watch, list again: keeps a copy of one selection of API objects true, whatever happens.

The client library's own watch neither lists again after an expired version nor waits between
attempts, so the loop is ours.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from qgpu_exporter.sources import HealthRecord, SourceError
from qgpu_exporter.sources.kubernetes.client import Connection, Refused, refusal
from qgpu_exporter.sources.kubernetes.objects import (
    UNREADABLE,
    Event,
    ObjectList,
    Progress,
    decode,
    key_of,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE_SIZE = 250
"""Objects a page of a list: more than a node has pods, so that one page is the rule."""

_GONE = 410
_TOO_LARGE_VERSION = 504

_random = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the loop waits for what; all in seconds."""

    backoff_seconds: float = 0.8
    max_backoff_seconds: float = 30.0
    """The pause after the n-th failure in a row is random, up to ``backoff * 2**n``, up to this."""
    silence_seconds: float = 90.0
    """A watch that says nothing for so long is dead: bookmarks come about once a minute."""
    watch_seconds: tuple[int, int] = (290, 590)
    """How long the server is asked to keep a watch open: random between these."""
    settle_seconds: float = 1.0
    """After a failure, an open watch counts as a success once it has lasted so long."""


class _ListAgain(Exception):
    """The watch cannot go on from its version; nothing is wrong unless it happens in a row."""

    def __init__(self, reason: str, detail: str, *, forget: bool) -> None:
        super().__init__(detail)
        self.reason = reason
        self.forget = forget
        """The server no longer knows the version, so it must not be asked for again."""


_RESUMABLE = frozenset(
    {"unreachable", "disconnected", "timeout", "server_error", "rate_limited", "unauthorized"}
)
"""Failures after which the version is still good: what was missed, the next watch tells."""


class Reflection(Generic[T]):
    """A copy of the objects that one path and selection list, kept by list and watch.

    `path` is the collection's path, or finds it out; `decode_object` turns an object's JSON to
    what is kept (None: not ours) and may raise `objects.UNREADABLE`, which costs only that object.
    `complete`, asked after each answer, says what an answer lacks that is otherwise in order.
    """

    def __init__(
        self,
        connection: Connection,
        path: str | Callable[[], Awaitable[str]],
        selection: Mapping[str, str],
        decode_object: Callable[[bytes], T | None],
        health: HealthRecord,
        *,
        wall_clock: Callable[[], float],
        timing: Timing | None = None,
        complete: Callable[[], SourceError | None] | None = None,
    ) -> None:
        self.objects: dict[str, T] = {}
        """By ``namespace/name``."""
        self.timestamp_seconds = 0.0
        """Unix time of the last list, event or bookmark."""
        self._connection = connection
        self._find_path = path
        self._path = path if isinstance(path, str) else ""
        self._selection = dict(selection)
        self._decode = decode_object
        self._health = health
        self._wall_clock = wall_clock
        self._timing = timing or Timing()
        self._complete = complete
        self._version = "0"
        self._must_list = True
        self._in_a_row = 0
        self._list_seconds: float | None = None
        self._complained: set[str] = set()

    async def run(self, publish: Callable[[bool], None]) -> None:
        """Keep `objects` true until cancelled.

        `publish` is called after each list and each batch of events or bookmarks; its argument
        says whether an object came, changed or went.  A `SourceError` with reason ``off`` ends it.
        """
        while True:
            try:
                if self._must_list:
                    await self._list(publish)
                await self._watch(publish)
            except _ListAgain as error:
                # Ordinary after a pause of ours or the server's; in a row it is a failure.
                if self._in_a_row:
                    self._health.failed(SourceError(error.reason, str(error)))
                self._must_list = True
                self._version = "" if error.forget else self._version
                await self._pause(None)
            except SourceError as error:
                if error.reason == "off":
                    raise
                self._health.failed(error)
                self._note_refusal(error)
                await self._pause(error)
            except Exception as error:  # a fault of ours must cost this source only
                if repr(error) not in self._complained:
                    self._complained.add(repr(error))
                    log.exception("fault while following %s", self._path)
                self._health.failed(SourceError("internal_error", repr(error)))
                self._must_list = True
                await self._pause(None)

    def _succeed(self) -> None:
        lacking = self._complete() if self._complete is not None else None
        if lacking is not None:
            self._health.failed(lacking)
        else:
            self._health.succeeded(self._list_seconds)

    def _note_refusal(self, error: SourceError) -> None:
        self._must_list = self._must_list or error.reason not in _RESUMABLE
        if isinstance(error, Refused) and error.status in (_GONE, _TOO_LARGE_VERSION):
            # A list refuses a version that the server has not reached, as after its restoration.
            self._must_list, self._version = True, ""

    async def _pause(self, error: SourceError | None) -> None:
        timing = self._timing
        ceiling = min(timing.max_backoff_seconds, timing.backoff_seconds * 2.0**self._in_a_row)
        self._in_a_row = min(self._in_a_row + 1, 30)
        pause = _random.uniform(0.0, ceiling)
        if isinstance(error, Refused) and error.retry_after_seconds is not None:
            pause = max(pause, min(error.retry_after_seconds, timing.max_backoff_seconds))
        await asyncio.sleep(pause)

    # ------------------------------------------------------------------ list

    async def _list(self, publish: Callable[[bool], None]) -> None:
        """Replace everything by what the server lists now.

        A list with a version is answered from the server's cache and is never older than what is
        known here; "0" is any state of the cache.  Pages exist without a version only: with one,
        a page limit would ask for exactly that past state.
        """
        if not isinstance(self._find_path, str):
            self._path = await self._find_path()
        started = asyncio.get_running_loop().time()
        query = dict(self._selection)
        if self._version:
            query["resourceVersion"] = self._version
        else:
            query["limit"] = str(PAGE_SIZE)
        found: dict[str, T] = {}
        while True:
            page = _read_page(await self._connection.get(self._path, query))
            found.update(self._decoded(page.items or ()))
            version = page.metadata.resource_version
            if not page.metadata.next_page:
                break
            query = {
                **self._selection,
                "limit": str(PAGE_SIZE),
                "continue": page.metadata.next_page,
            }
        differs = found != self.objects or self.timestamp_seconds == 0.0
        self.objects, self._version, self._must_list = found, version, False
        self.timestamp_seconds = self._wall_clock()
        self._list_seconds = asyncio.get_running_loop().time() - started
        publish(differs)
        if not self._in_a_row:
            self._succeed()

    def _decoded(self, items: Iterable[msgspec.Raw]) -> dict[str, T]:
        found: dict[str, T] = {}
        for item in items:
            raw = bytes(item)
            try:
                key, decoded = key_of(raw), self._decode(raw)
            except UNREADABLE as error:
                self._complain(raw, error)
                continue
            if decoded is not None:
                found[key] = decoded
        return found

    def _complain(self, raw: bytes, error: Exception) -> None:
        try:
            name = key_of(raw)
        except UNREADABLE:
            name = "without a name"
        if name not in self._complained and len(self._complained) < 1000:
            self._complained.add(name)
            log.warning("%s: object %s is unreadable and left out: %s", self._path, name, error)

    # ------------------------------------------------------------------ watch

    async def _watch(self, publish: Callable[[bool], None]) -> None:
        """Follow the events from the known version on; returns at the watch's ordinary end."""
        timing = self._timing
        query = {
            **self._selection,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_random.randint(*timing.watch_seconds)),
        }
        told_anything = False
        started = asyncio.get_running_loop().time()
        async with self._connection.stream(self._path, query, timing.silence_seconds) as batches:
            settled = asyncio.get_running_loop().call_later(timing.settle_seconds, self._succeed)
            try:
                async for lines in batches:
                    settled.cancel()
                    self._take(lines, publish)
                    told_anything = True
            finally:
                settled.cancel()
        if not told_anything:
            raise _ListAgain("empty_watch", "the API server ends watches at once", forget=False)
        if asyncio.get_running_loop().time() - started < timing.settle_seconds:
            # Whoever ends each watch after an event must not be asked as fast as he ends them.
            await self._pause(None)

    def _take(self, lines: Iterable[bytes], publish: Callable[[bool], None]) -> None:
        """Apply a batch of events; what came before a bad line is kept and published."""
        differs = False
        taken = 0
        try:
            for line in lines:
                differs = self._apply(line) or differs
                taken += 1
        finally:
            if taken:
                self._in_a_row = 0
                self.timestamp_seconds = self._wall_clock()
                publish(differs)
                self._succeed()

    def _apply(self, line: bytes) -> bool:
        """Apply one event; returns whether the copy differs now."""
        try:
            event = decode(line, Event)
        except UNREADABLE as error:
            raise SourceError("not_json", "the watch answers something that is no event") from error
        if event.kind == "Status" or event.type == "ERROR":
            _raise_status(event)
        raw = bytes(event.object)
        if event.type == "BOOKMARK":
            self._advance(raw)
            return False
        if event.type not in ("ADDED", "MODIFIED", "DELETED"):
            raise SourceError("not_json", "the watch answers something that is no event")
        try:
            key = key_of(raw)
        except UNREADABLE as error:
            self._complain(raw, error)
            return False
        before = self.objects.pop(key, None)
        after = self._decode_or_drop(raw) if event.type != "DELETED" else None
        if after is not None:
            self.objects[key] = after
        self._advance(raw)
        return before != after

    def _decode_or_drop(self, raw: bytes) -> T | None:
        """The object, or None where its new state is unreadable: the old one no longer holds."""
        try:
            return self._decode(raw)
        except UNREADABLE as error:
            self._complain(raw, error)
            return None

    def _advance(self, raw: bytes) -> None:
        try:
            version = decode(raw, Progress).metadata.resource_version
        except UNREADABLE:
            return
        self._version = version or self._version


def _read_page(body: bytes) -> ObjectList:
    """A page of a list.

    A Status has metadata too, so that it would pass for a list of nothing.
    """
    try:
        page = decode(body, ObjectList)
    except UNREADABLE as error:
        raise SourceError("not_json", "the API server answers a list that is none") from error
    if page.kind == "Status":
        raise refusal(page.code or 0, page.message or "", None)
    if not page.kind.endswith("List") or not page.metadata.resource_version:
        raise SourceError("not_json", "the API server answers a list that is none")
    return page


def _raise_status(event: Event) -> None:
    """Raise what a Status in place of an event means."""
    code, message = event.code, event.message
    if event.type == "ERROR":
        try:
            told = decode(bytes(event.object), Event)
        except UNREADABLE:
            told = Event()
        code, message = told.code, told.message
    if code == _GONE:
        raise _ListAgain(
            "expired", "the server does not know the watch's version any more", forget=True
        )
    raise refusal(code or 0, message or "", None)
