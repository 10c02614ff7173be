"""The MIG devices of one card: found anew each round, since their handles die with them.

A GPU instance without a compute instance is no MIG device: NVML shows it only to callers with the
right to configure MIG, which a reader does not ask for, so it is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from qgpu_exporter.model import MigSlice, Profiling
from qgpu_exporter.reader import plausible, readings
from qgpu_exporter.reader.calls import OF_MIG, Calls, Refusal
from qgpu_exporter.reader.readings import Handle

_PROFILE = re.compile(r"MIG\s+(\S+)\s*$")
_MOST_DEVICES = 64


@dataclass(frozen=True, slots=True)
class MigMode:
    """Whether the card is in MIG mode, and will be after its next reset."""

    enabled: bool | None = None
    pending: bool | None = None


@dataclass(frozen=True, slots=True)
class MigDevice:
    """One MIG device with its handle, which is good for this round."""

    handle: Handle
    slice: MigSlice
    compute_instance: int


def mode(calls: Calls, handle: Handle) -> MigMode:
    """The card's MIG mode; a card without MIG has none."""
    found = calls.ask("nvmlDeviceGetMigMode", pynvml.nvmlDeviceGetMigMode, handle)
    if found is None:
        return MigMode()
    return MigMode(plausible.flag(found[0]), plausible.flag(found[1]))


class MigReader:
    """Lists the MIG devices of one card.

    Nothing is kept of a device: one that is made anew may have the UUID of the one before it, and
    another profile.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def most_devices(self, handle: Handle) -> int:
        """How many MIG devices the card can hold: the number of its compute slices."""
        found = self._calls.ask(
            "nvmlDeviceGetMaxMigDeviceCount", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle
        )
        return plausible.at_most(_MOST_DEVICES, found) or 0

    def read(self, handle: Handle, most: int) -> list[MigDevice]:
        """The devices that are there, in the order of their instances.

        Gaps between indices are normal, and a device may go between two calls: it is then left
        out.
        """
        found: dict[tuple[int, int], MigDevice] = {}
        for index in range(most):
            try:
                device = self._call(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
                read = self._device(handle, device)
            except Refusal as refusal:
                if refusal.code not in (
                    pynvml.NVML_ERROR_NOT_FOUND,
                    pynvml.NVML_ERROR_INVALID_ARGUMENT,
                ):
                    self._calls.log_once("MIG device", refusal)
                continue
            if read is not None:
                found[read.slice.gpu_instance, read.compute_instance] = read
        return [found[place] for place in sorted(found)]

    def _device(self, card: Handle, device: Handle) -> MigDevice | None:
        uuid = plausible.text(self._call(pynvml.nvmlDeviceGetUUID, device))
        gpu_instance = plausible.instance(self._call(pynvml.nvmlDeviceGetGpuInstanceId, device))
        compute_instance = plausible.instance(
            self._call(pynvml.nvmlDeviceGetComputeInstanceId, device)
        )
        if uuid is None or gpu_instance is None or compute_instance is None:
            return None
        attributes = self._try(pynvml.nvmlDeviceGetAttributes_v2, device)
        name = _PROFILE.search(self._try(pynvml.nvmlDeviceGetName, device) or "")
        start, size = self._placement(card, gpu_instance)
        part = MigSlice(
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
            uuid=uuid,
            profile=None if name is None else name[1],
            compute_slices=None
            if attributes is None
            else plausible.at_most(_MOST_DEVICES, attributes.computeInstanceSliceCount),
            memory_slices=size,
            multiprocessors=None
            if attributes is None
            else plausible.at_most(4096, attributes.multiprocessorCount),
            placement_start=start,
            memory=readings.memory(self._calls, device, OF_MIG),
        )
        return MigDevice(device, part, compute_instance)

    def _placement(self, card: Handle, gpu_instance: int) -> tuple[int | None, int | None]:
        """First memory slice and number of memory slices.

        NVML tells them only to callers that may configure MIG; most may not, and that is no line
        in the log.
        """
        name = "nvmlDeviceGetGpuInstanceById"
        if self._calls.refused(name):
            return None, None
        try:
            instance = self._calls.call(
                name, pynvml.nvmlDeviceGetGpuInstanceById, card, gpu_instance
            )
            found = self._calls.call(
                "nvmlGpuInstanceGetInfo", pynvml.nvmlGpuInstanceGetInfo, instance
            )
        except Refusal:
            self._calls.refuse(name)
            return None, None
        placement = found.placement
        return (
            plausible.at_most(_MOST_DEVICES, placement.start),
            plausible.at_most(_MOST_DEVICES, placement.size),
        )

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Not remembered when refused: the device may have gone, the next one will answer."""
        return self._calls.call(f"{function.__name__}{OF_MIG}", function, *arguments)

    def _try(self, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return self._call(function, *arguments)
        except Refusal as refusal:
            self._calls.log_once(f"{function.__name__}{OF_MIG}", refusal)
            return None


def with_profiling(devices: list[MigDevice], ratios: dict[int, Profiling]) -> tuple[MigSlice, ...]:
    """The slices, each with the profiling of its GPU instance."""
    return tuple(
        replace(device.slice, profiling=ratios.get(device.slice.gpu_instance)) for device in devices
    )
