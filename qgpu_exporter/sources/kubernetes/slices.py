"""The devices of this node that dynamic resource allocation hands out, from its ResourceSlices."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from qgpu_exporter.model import SliceDevice, SourceHealth
from qgpu_exporter.sources import HealthRecord, SourceError
from qgpu_exporter.sources.kubernetes.client import Connection, Refused
from qgpu_exporter.sources.kubernetes.objects import UNREADABLE, decode
from qgpu_exporter.sources.kubernetes.watch import Reflection, Timing

log = logging.getLogger(__name__)

DRIVER = "gpu.nvidia.com"
VERSIONS = ("v1", "v1beta2", "v1beta1")
"""The versions that are understood, best first."""
RECHECK_SECONDS = 600.0
"""How often a cluster without this API, or without the right to read it, is asked again."""

_GROUP = "/apis/resource.k8s.io"

# gpu-<minor>-mig-<profile>-<profile id>-<placement start>; before, the profile's name was missing
# and the size came last: gpu-<minor>-mig-<profile id>-<placement start>-<size>.
_MIG_NAME = re.compile(r"gpu-[0-9]+-mig-(?:[0-9]+-([0-9]+)-[0-9]+|.*[^0-9-].*-[0-9]+-([0-9]+))")
_MEMORY_SLICE = re.compile(r"memorySlice([0-9]+)")


class _Attribute(msgspec.Struct):
    string: str | None = None


class _Basic(msgspec.Struct):
    attributes: dict[str, _Attribute] | None = None
    capacity: dict[str, Any] | None = None
    """Its names tell which memory slices a MIG device takes."""


class _Device(_Basic):
    name: str = ""
    basic: _Basic | None = None
    """v1beta1 keeps attributes and capacity in here."""


class _Pool(msgspec.Struct):
    name: str = ""
    generation: int = 0


class _Spec(msgspec.Struct):
    driver: str = ""
    pool: _Pool = msgspec.field(default_factory=_Pool)
    devices: list[_Device] | None = None


class ResourceSlice(msgspec.Struct):
    """One ResourceSlice of any known version."""

    spec: _Spec = msgspec.field(default_factory=_Spec)


def decode_slices(raws: Iterable[bytes | Mapping[str, Any]]) -> tuple[SliceDevice, ...]:
    """The devices of some ResourceSlices, given as JSON or as the value of that JSON, sorted.

    Of a pool only the newest generation counts.  Raises one of `objects.UNREADABLE`.
    """
    return _devices([decode(raw, ResourceSlice) for raw in raws])


def _devices(slices: Iterable[ResourceSlice]) -> tuple[SliceDevice, ...]:
    specs = [one.spec for one in slices]
    newest: dict[tuple[str, str], int] = {}
    for spec in specs:
        pool = (spec.driver, spec.pool.name)
        newest[pool] = max(newest.get(pool, spec.pool.generation), spec.pool.generation)
    found = {
        (spec.driver, spec.pool.name, device.name): _device(spec, device)
        for spec in specs
        if spec.pool.generation == newest[spec.driver, spec.pool.name]
        for device in spec.devices or ()
    }
    return tuple(found[key] for key in sorted(found))


def _device(spec: _Spec, device: _Device) -> SliceDevice:
    told = device.basic or device
    # A name without a domain is in the driver's own.
    attributes = {
        name.removeprefix(f"{spec.driver}/"): attribute.string
        for name, attribute in (told.attributes or {}).items()
    }
    capacity = [name.removeprefix(f"{spec.driver}/") for name in told.capacity or ()]
    kind = attributes.get("type")
    return SliceDevice(
        driver=spec.driver,
        pool=spec.pool.name,
        device=device.name,
        kind=kind,
        uuid=attributes.get("uuid"),
        parent_uuid=attributes.get("parentUUID"),
        profile=attributes.get("profile"),
        placement_start=_placement(device.name, capacity) if kind == "mig" else None,
    )


def _placement(name: str, capacity: Iterable[str]) -> int | None:
    """The first memory slice that a MIG device takes: of its capacity, else of its name."""
    taken = [int(match[1]) for match in map(_MEMORY_SLICE.fullmatch, capacity) if match]
    if taken:
        return min(taken)
    match = _MIG_NAME.fullmatch(name)
    return int(match[1] or match[2]) if match else None


class ResourceSlices:
    """The ResourceSlices of one node; off where the cluster has none or we may not read them.

    `wall_clock` gives Unix time in seconds.
    """

    def __init__(
        self,
        connection: Connection,
        node: str,
        *,
        wall_clock: Callable[[], float],
        timing: Timing | None = None,
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        self._connection = connection
        self._selection = {"fieldSelector": f"spec.nodeName={node},spec.driver={DRIVER}"}
        self._wall_clock = wall_clock
        self._timing = timing
        self._recheck_seconds = recheck_seconds
        self._health = HealthRecord("resourceslices", wall_clock)
        self._off = ""
        self.latest: tuple[SliceDevice, ...] | None = None
        """The devices; None before the first list and while off."""

    @property
    def health(self) -> SourceHealth | None:
        """How the source does; None while it is off."""
        return None if self._off else self._health.health

    async def run(self, changed: Callable[[], None]) -> None:
        """Keep `latest` current until cancelled; calls `changed` when it differs."""
        while True:
            reflection = Reflection(
                self._connection,
                self._find,
                self._selection,
                lambda raw: decode(raw, ResourceSlice),
                self._health,
                wall_clock=self._wall_clock,
                timing=self._timing,
            )

            def publish(differs: bool, reflection: Reflection[ResourceSlice] = reflection) -> None:
                self._off = ""
                self.latest = _devices(reflection.objects.values())
                if differs:
                    changed()

            try:
                await reflection.run(publish)
            except SourceError as error:
                self._switch_off(str(error))
                changed()
            await asyncio.sleep(self._recheck_seconds)

    def _switch_off(self, why: str) -> None:
        if why != self._off:
            log.info("ResourceSlices are not read: %s", why)
        self._off = why
        self.latest = None
        self._health = HealthRecord("resourceslices", self._wall_clock)

    async def _find(self) -> str:
        """The path of the best version that the server has and lets us read; else off."""
        why = "the cluster has no API for dynamic resource allocation"
        try:
            offered = _versions(await self._connection.get(_GROUP, {}))
        except Refused as error:
            if error.status == 404:
                raise SourceError("off", why) from error
            raise
        for version in VERSIONS:
            if version not in offered:
                continue
            path = f"{_GROUP}/{version}/resourceslices"
            try:
                await self._connection.get(path, {**self._selection, "limit": "1"})
            except Refused as error:
                if error.status == 403:
                    raise SourceError("off", str(error)) from error
                if error.status != 404:
                    raise
                # A version can be served without this resource.
            else:
                return path
        raise SourceError("off", why)


class _Version(msgspec.Struct):
    version: str = ""


class _Group(msgspec.Struct):
    versions: list[_Version] | None = None


def _versions(body: bytes) -> frozenset[str]:
    try:
        group = decode(body, _Group)
    except UNREADABLE as error:
        raise SourceError("not_json", f"{_GROUP} answers something that is no API group") from error
    return frozenset(one.version for one in group.versions or ())
