"""Objects as the API server writes them, as far as every kind has them: decoded, then cut down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

WireT = TypeVar("WireT")

KEPT_PREFIXES = (
    "ALIYUN_COM_",
    "elasticgpu.com/",
    "elasticgpu.io/",
    "gpushare.alibabacloud.com/",
    "hami.io/",
    "kubernetes.io/config.",
    "nano-gpu/",
    "scheduler.framework.gpushare",
    "scheduling.koordinator.sh/",
    "tencent.com/",
    "tke.cloud.tencent.com/",
    "volcano.sh/",
)
"""Annotations that some allocation scheme, or the join with cgroups, reads.  All others are let go
of at once: one alone may have hundreds of kilobytes."""

MAX_DEPTH = 100
"""Nothing that is read here is nested deeper."""
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
"""A JSON text's strings (a last one may lack its end), and its brackets outside of them."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What decoding raises for an object that is not what its kind promises."""


class Metadata(msgspec.Struct):
    """`metadata` of an object; null stands for absent wherever a server may write it."""

    name: str
    uid: str = ""
    namespace: str | None = None
    resource_version: str | None = msgspec.field(default=None, name="resourceVersion")
    deletion_timestamp: str | None = msgspec.field(default=None, name="deletionTimestamp")
    annotations: dict[str, str | None] | None = None
    labels: dict[str, str | None] | None = None


class Identity(msgspec.Struct):
    """An object of any kind, as far as its name goes."""

    metadata: Metadata


class ListMetadata(msgspec.Struct):
    """`metadata` of a list: where to watch from, and how to ask for the next page."""

    resource_version: str = msgspec.field(default="", name="resourceVersion")
    next_page: str | None = msgspec.field(default=None, name="continue")


class ObjectList(msgspec.Struct):
    """A page of a list; every item stays raw, so that one bad item costs only itself."""

    kind: str
    metadata: ListMetadata
    items: list[msgspec.Raw] | None = None
    message: str | None = None
    """Of a Status that stands in the list's place, as does `code`."""
    code: int | None = None


class Status(msgspec.Struct):
    """The server's own word on why it refuses; every field may be missing."""

    kind: str | None = None
    message: str | None = None
    reason: str | None = None
    code: int | None = None


class Event(msgspec.Struct):
    """A line of a watch: `type` and `object`; a bare Status in its place has `kind` and `code`."""

    type: str | None = None
    object: msgspec.Raw = msgspec.Raw()
    kind: str | None = None
    message: str | None = None
    code: int | None = None


class Progress(msgspec.Struct):
    """The part of an event's object that moves the watch on."""

    metadata: ListMetadata


def decode(raw: bytes | Mapping[str, Any], kind: type[WireT]) -> WireT:
    """Decode JSON text, or a value that was JSON; raises one of `UNREADABLE`."""
    if isinstance(raw, Mapping):
        return msgspec.convert(dict(raw), kind)
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError:
        # The API server takes up to 10 000 levels from whoever writes a pod; that must not hide
        # the pods of all others.
        return msgspec.json.decode(_shallow(raw), type=kind)


def _shallow(raw: bytes) -> bytes:
    """A JSON text with null for all that is nested deeper than `MAX_DEPTH`."""
    kept: list[bytes] = []
    depth = kept_until = 0
    for match in _STRUCTURE.finditer(raw):
        mark = match[0]
        if mark in b"[{":
            depth += 1
            if depth == MAX_DEPTH:
                kept += (raw[kept_until : match.start()], b"null")
                kept_until = len(raw)
        elif mark in b"]}":
            if depth == MAX_DEPTH:
                kept_until = match.end()
            depth -= 1
    return b"".join((*kept, raw[kept_until:]))


def key_of(raw: bytes) -> str:
    """What an object is known by within its kind: ``namespace/name``; raises `UNREADABLE`."""
    metadata = decode(raw, Identity).metadata
    return f"{metadata.namespace or ''}/{metadata.name}"


def annotations_of(metadata: Metadata) -> dict[str, str]:
    """The annotations that anything here reads."""
    given = metadata.annotations or {}
    return {
        key: value
        for key, value in sorted(given.items())
        if value is not None and key.startswith(KEPT_PREFIXES)
    }


def extended_resources(*amounts: Mapping[str, str | int | float | None] | None) -> dict[str, str]:
    """The extended resources of some resource lists as text; an earlier list overrules a later.

    Extended is what has a domain that is not kubernetes.io's, the API server's own rule.
    """
    return {
        name: str(amount)
        for given in reversed(amounts)
        for name, amount in sorted((given or {}).items())
        if amount is not None and "/" in name and "kubernetes.io/" not in name
    }
