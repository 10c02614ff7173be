"""The objects of a made-up cluster: versions, history, selections, compaction, as etcd has them."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
Selection = Callable[[Object], bool]

MAX_HISTORY = 1000
"""Changes that a watch can still be told; older ones are compacted away."""


class BadSelector(Exception):
    """A selector that this kind of object does not know; the text is the server's own."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object: its names, and the fields that a selector may ask for."""

    name: str
    api_version: str
    fields: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "pods": Kind(
        "Pod", "v1", ("metadata.name", "metadata.namespace", "spec.nodeName", "status.phase")
    ),
    "nodes": Kind("Node", "v1", ("metadata.name",)),
    "resourceslices": Kind(
        "ResourceSlice", "resource.k8s.io/v1", ("metadata.name", "spec.nodeName", "spec.driver")
    ),
    "gpus": Kind("GPU", "elasticgpu.io/v1alpha1", ("metadata.name", "metadata.namespace")),
}
"""By the plural that stands in paths."""


@dataclass(frozen=True, slots=True)
class Change:
    """One write: the object before and after it; `after` is None for a deletion."""

    version: int
    resource: str
    before: Object | None
    after: Object | None

    def event(self, selected: Selection) -> tuple[str, Object] | None:
        """What a watch of a selection is told, or None.

        An object that stops to match is deleted to this watch, in its last matching form and with
        the version of the change.
        """
        was = self.before if self.before is not None and selected(self.before) else None
        if self.after is not None and selected(self.after):
            return ("ADDED" if was is None else "MODIFIED"), self.after
        if was is None:
            return None
        last = copy.deepcopy(was)
        last["metadata"]["resourceVersion"] = str(self.version)
        return "DELETED", last


class Store:
    """All objects, and the changes since the last compaction; for one event loop's thread."""

    def __init__(self, version: int = 100) -> None:
        self.version = version
        self.compacted = version
        """The newest version of which the next change is no longer known."""
        self._objects: dict[str, dict[str, Object]] = {resource: {} for resource in KINDS}
        self._history: list[Change] = []
        self._waiting: set[asyncio.Event] = set()

    def put(self, resource: str, given: Mapping[str, Any]) -> Object:
        """Create or replace an object; returns it as stored, with uid and version."""
        stored = copy.deepcopy(dict(given))
        metadata = stored.setdefault("metadata", {})
        key = _key(metadata)
        before = self._objects[resource].get(key)
        self.version += 1
        known = before["metadata"]["uid"] if before else str(uuid.uuid4())
        metadata.setdefault("uid", known)
        metadata.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
        metadata["resourceVersion"] = str(self.version)
        self._objects[resource][key] = stored
        self._note(Change(self.version, resource, before, stored))
        return stored

    def patch(self, resource: str, key: str, changes: Mapping[str, Any]) -> Object:
        """Change an object by a JSON merge patch (RFC 7386); KeyError where there is none."""
        merged = _merged(self._objects[resource][key], changes)
        return self.put(resource, merged)

    def delete(self, resource: str, key: str) -> None:
        """Delete an object; KeyError where there is none."""
        before = self._objects[resource].pop(key)
        self.version += 1
        self._note(Change(self.version, resource, before, None))

    def compact(self) -> None:
        """Forget all changes so far: watches from an older version expire."""
        self._history.clear()
        self.compacted = self.version

    def get(self, resource: str, key: str) -> Object | None:
        """One object, by ``namespace/name`` (``/name`` for kinds without namespaces)."""
        return self._objects[resource].get(key)

    def select(self, resource: str, selected: Selection) -> list[Object]:
        """The objects of a selection, in the order of their keys."""
        objects = self._objects[resource]
        return [objects[key] for key in sorted(objects) if selected(objects[key])]

    def since(self, version: int) -> list[Change]:
        """The changes after a version, oldest first."""
        return [change for change in self._history if change.version > version]

    def subscribe(self) -> asyncio.Event:
        """An event that each change sets; end it with `unsubscribe`."""
        event = asyncio.Event()
        self._waiting.add(event)
        return event

    def unsubscribe(self, event: asyncio.Event) -> None:
        """No longer set this event."""
        self._waiting.discard(event)

    def wake(self) -> None:
        """Set all events although nothing has changed."""
        for event in self._waiting:
            event.set()

    def _note(self, change: Change) -> None:
        self._history.append(change)
        while len(self._history) > MAX_HISTORY:
            self.compacted = self._history.pop(0).version
        self.wake()


def selection(resource: str, query: Mapping[str, str]) -> Selection:
    """What `fieldSelector` and `labelSelector` of a query select; raises `BadSelector`."""
    fields = _pairs(query.get("fieldSelector", ""))
    for name, _ in fields:
        if name not in KINDS[resource].fields:
            raise BadSelector(f"field label not supported: {name}")
    labels = _pairs(query.get("labelSelector", ""))

    def selected(candidate: Object) -> bool:
        has = candidate["metadata"].get("labels") or {}
        return all(_field(candidate, name) == value for name, value in fields) and all(
            has.get(name) == value for name, value in labels
        )

    return selected


def _pairs(selector: str) -> list[tuple[str, str]]:
    pairs = []
    for term in filter(None, selector.split(",")):
        name, sign, value = term.partition("=")
        if not sign or name.endswith("!"):
            raise BadSelector(f"unable to parse requirement: {term}")
        pairs.append((name, value.removeprefix("=")))
    return pairs


def _field(candidate: Object, path: str) -> str:
    value: Any = candidate
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def _key(metadata: Mapping[str, Any]) -> str:
    return f"{metadata.get('namespace', '')}/{metadata['name']}"


def _merged(target: Any, changes: Any) -> Any:
    if not isinstance(changes, Mapping):
        return copy.deepcopy(changes)
    merged = copy.deepcopy(target) if isinstance(target, dict) else {}
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged
