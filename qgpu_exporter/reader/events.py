"""XID events: one event set of the process, waited for by a thread of its own, kept until taken."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pynvml

from qgpu_exporter.model import Xid
from qgpu_exporter.reader import plausible
from qgpu_exporter.reader.calls import Calls
from qgpu_exporter.reader.readings import Handle

_log = logging.getLogger("qgpu_exporter.reader")

_WAIT_MILLISECONDS = 500
_PAUSE_SECONDS = 1.0
_LARGEST_XID = 0xFFFF
_MOST_KEPT = 10_000
"""A broken card can raise events without end; only the newest are kept until they are taken."""


class XidEvents:
    """Collects XIDs of all registered cards; `clock` gives Unix time in seconds.

    An event set that fails is replaced.  `generation` then changes, which tells each card to
    register again, in its own thread, so that one that hangs keeps nobody else waiting.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[Xid] = deque(maxlen=_MOST_KEPT)
        self._cards: dict[int, tuple[str, str | None]] = {}
        self._set: Any = None
        self._lock = threading.Lock()
        self._registering = 0
        self._registered = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._logged: set[int] = set()
        self.generation = 0

    def start(self) -> None:
        """Begin to wait, once the library is initialised."""
        try:
            # Here already, so that the first round finds it.
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            _log.debug("no event set yet: %s", error)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the waiting, before the library is shut down; a thread that is blocked is left."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(2 * _WAIT_MILLISECONDS / 1000)
        self._thread = None
        with self._lock:
            # The set goes with the library.
            self._set = None
            self._renew()

    def take(self) -> tuple[Xid, ...]:
        """The events since they were last taken, oldest first."""
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return tuple(taken)

    def register(self, calls: Calls, handle: Handle, uuid: str, pci_bus_id: str | None) -> int:
        """Register a card with the present set, and say of which generation that is."""
        with self._lock:
            generation, events = self.generation, self._set
            if events is None:
                return -1
            self._cards[_address(handle)] = (uuid, pci_bus_id)
            self._registering += 1
        try:
            answer = calls.ask(
                "nvmlDeviceRegisterEvents",
                _register,
                handle,
                pynvml.nvmlEventTypeXidCriticalError,
                events,
            )
        finally:
            with self._lock:
                self._registering -= 1
        if answer is not None:
            self._registered.set()
        return generation

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                if self._set is None:
                    self._set = pynvml.nvmlEventSetCreate()
                if not self._registered.wait(_WAIT_MILLISECONDS / 1000):
                    continue
                event = pynvml.nvmlEventSetWait_v2(self._set, _WAIT_MILLISECONDS)
            except pynvml.NVMLError as error:
                code = int(error.value)
                if code != pynvml.NVML_ERROR_TIMEOUT and not stop.is_set():
                    self._failed(code, str(error))
                    stop.wait(_PAUSE_SECONDS)
                continue
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                self._keep(event)

    def _failed(self, code: int, text: str) -> None:
        if code not in self._logged:
            self._logged.add(code)
            _log.warning("waiting for XID events failed, registering anew: %s", text)
        with self._lock:
            failed, self._set = self._set, None
            # A card that is just being registered still uses the set: it is then lost, not freed.
            free = self._registering == 0
            self._renew()
        if failed is not None and free:
            try:
                pynvml.nvmlEventSetFree(failed)
            except pynvml.NVMLError as error:
                _log.debug("an event set was not freed: %s", error)

    def _renew(self) -> None:
        self._registered.clear()
        self._cards = {}
        self.generation += 1

    def _keep(self, event: Any) -> None:
        xid = plausible.at_most(_LARGEST_XID, event.eventData)
        if xid is None:
            return
        uuid, pci_bus_id = self._cards.get(_address(event.device), (None, None))
        self._events.append(
            Xid(
                timestamp_seconds=self._clock(),
                xid=xid,
                uuid=uuid,
                pci_bus_id=pci_bus_id,
                gpu_instance=plausible.instance(event.gpuInstanceId),
                compute_instance=plausible.instance(event.computeInstanceId),
            )
        )


def _register(handle: Handle, types: int, events: Any) -> bool:
    pynvml.nvmlDeviceRegisterEvents(handle, types, events)
    return True


def _address(handle: Handle) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
