"""The reader's rounds over NVML: ask every card's thread, and wait no longer than allowed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import pynvml

from qgpu_exporter.model import (
    CardFailure,
    CardReading,
    ReaderError,
    Reading,
    ReadingRequest,
    SeenSamples,
)
from qgpu_exporter.reader import library, plausible
from qgpu_exporter.reader.calls import MISMATCH, UNINITIALIZED, Calls, CardDown, Refusal
from qgpu_exporter.reader.cards import Card, Options
from qgpu_exporter.reader.events import XidEvents

_log = logging.getLogger("qgpu_exporter.reader")

T = TypeVar("T")

_MOST_CARDS = 256
_RETRY_ROUNDS = 12
"""While every card answers UNKNOWN: rounds between two new initialisations."""
_LOST_ROUNDS = 60
_MOST_LOST_ROUNDS = 720
"""Rounds for which a card must be lost before the library is initialised again for it, the first
time and at most: a card that was reset or plugged in again is only seen then, but all others pause
for it."""

_INIT_ERRORS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "library_not_found",
        (
            "libnvidia-ml.so.1 is not found: mount the driver's libraries into the container (with "
            "NVIDIA's runtime class), or set LD_LIBRARY_PATH"
        ),
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "driver_not_loaded",
        "the NVIDIA kernel driver is not loaded, or its device files are not in the container",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "mismatch",
        (
            "libnvidia-ml.so.1 and the kernel driver have different versions: the driver was "
            "upgraded while this ran; remake the container, or reload the driver"
        ),
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "no_permission",
        "no permission to open the device files /dev/nvidia*",
    ),
    pynvml.NVML_ERROR_UNKNOWN: (
        "unknown_error",
        (
            "NVML answers UNKNOWN: the container may have lost its device files, for instance by a "
            "daemon-reload of systemd; it has to be made anew"
        ),
    ),
}


class _LibraryDown(Exception):
    """No card can be asked."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.error = ReaderError(reason, detail)


class _Worker:
    """A thread with at most one task; a task that does not return keeps it busy."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """The task before has not returned."""
        return self._last is not None and not self._last.done()

    def start(self, task: Callable[..., T], *arguments: object) -> Future[T]:
        """Run the task; its answer comes with the future."""
        future = self._pool.submit(task, *arguments)
        self._last = future
        return future

    def retire(self) -> None:
        """End the thread when its task returns."""
        self._pool.shutdown(wait=False)


class NvmlSession:
    """The cards of this node through NVML; `read` never raises, and returns within the timeout.

    `clock` is monotonic and `wall_clock` Unix time, in seconds.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        gpm: bool = True,
        persistence_mode: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._options = Options(gpm, persistence_mode)
        self._clock = clock
        self._wall_clock = wall_clock
        self._events = XidEvents(wall_clock)
        self._calls = Calls("NVML")
        self._library = _Worker("library")
        self._cards: list[tuple[Card, _Worker]] = []
        self._retired_calls = 0
        self._counted = 0
        self._initialised = False
        self._shut_down_first = False
        self._generation = 0
        self._versions: tuple[str | None, str | None, str | None] = (None, None, None)
        self._count: int | None = None
        self._unknown_rounds = 0
        self._lost_rounds = 0
        self._lost_patience = _LOST_ROUNDS
        self._broken: set[int] = set()

    def read(self, request: ReadingRequest) -> Reading:
        """One round; a reading with `error` says why no card could be asked."""
        timestamp = self._wall_clock()
        deadline = self._clock() + self._timeout_seconds
        cards: list[CardReading] = []
        failures: list[CardFailure] = []
        error: ReaderError | None = None
        try:
            cards, failures = self._round(request, deadline)
        except _LibraryDown as down:
            error = down.error
        except Exception as unexpected:  # noqa: BLE001 - the reading says so, the next may succeed
            _log.exception("a round failed")
            error = ReaderError("error", f"{type(unexpected).__name__}: {unexpected}")
        driver, nvml, cuda = self._versions
        return Reading(
            timestamp_seconds=timestamp,
            driver_version=driver,
            nvml_version=nvml,
            cuda_version=cuda,
            cards=tuple(cards),
            failures=tuple(failures),
            events=self._events.take(),
            calls=self._calls_since(),
            error=error,
        )

    def _calls_since(self) -> int:
        total = self._calls.total + self._retired_calls
        total += sum(card.calls.total for card, _ in self._cards)
        since, self._counted = total - self._counted, total
        return since

    def _round(
        self, request: ReadingRequest, deadline: float
    ) -> tuple[list[CardReading], list[CardFailure]]:
        seen = {entry.uuid: entry for entry in request.seen}
        self._match_cards(self._prepare(deadline))
        cards, failures = self._ask(seen, deadline)
        if self._must_initialise_again(cards, failures):
            self._match_cards(self._prepare(deadline))
            cards, failures = self._ask(seen, deadline)
        reasons = {failure.reason for failure in failures}
        if MISMATCH in reasons:
            raise _library_down(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "")
        if reasons == {"unknown_error"} and not cards:
            raise _library_down(pynvml.NVML_ERROR_UNKNOWN, "")
        self._unknown_rounds = 0
        return cards, failures

    # ------------------------------------------------------------------ the library

    def _prepare(self, deadline: float) -> int:
        """Initialise the library where needed; the number of cards."""
        if self._library.busy:
            return self._count_from_before()
        future = self._library.start(self._initialise_and_count)
        # Half of the time is the cards'.
        wait([future], max(0.0, deadline - self._clock()) / (2 if self._initialised else 1))
        if not future.done():
            return self._count_from_before()
        try:
            self._count = future.result()
        except CardDown as down:
            self._initialised = False
            if down.reason == MISMATCH:
                raise _library_down(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, str(down)) from None
            raise _LibraryDown("error", str(down)) from None
        except Refusal as refusal:
            self._initialised = False
            raise _library_down(refusal.code, str(refusal)) from None
        return self._count

    def _count_from_before(self) -> int:
        if self._count is None or not self._initialised:
            raise _LibraryDown("timeout", "the driver has not answered nvmlInit yet")
        return self._count

    def _initialise_and_count(self) -> int:
        if not self._initialised:
            self._initialise()
        try:
            return self._count_cards()
        except CardDown as down:
            if down.reason != UNINITIALIZED:
                raise
        # Somebody shut the library down, or the driver was loaded anew beneath it.
        self._initialise()
        return self._count_cards()

    def _initialise(self) -> None:
        self._initialised = False
        self._events.stop()
        if self._shut_down_first:
            self._shut_down_first = False
            try:
                self._calls.call("nvmlShutdown", pynvml.nvmlShutdown)
            except (CardDown, Refusal) as refused:
                _log.debug("the library was not shut down: %s", refused)
        # A machine without cards is no fault.
        self._calls.call("nvmlInit", _initialise, pynvml.NVML_INIT_FLAG_NO_GPUS)
        self._calls.forget_refusals()
        self._versions = self._ask_versions()
        self._events.start()
        self._generation += 1
        self._initialised = True

    def _count_cards(self) -> int:
        count = self._calls.call("nvmlDeviceGetCount", pynvml.nvmlDeviceGetCount)
        return plausible.at_most(_MOST_CARDS, count) or 0

    def _ask_versions(self) -> tuple[str | None, str | None, str | None]:
        def ask(function: Callable[[], Any]) -> Any:
            return self._calls.ask(function.__name__, function)

        cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        if cuda is None:
            cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion)
        whole = plausible.at_most(1_000_000, cuda)
        return (
            plausible.text(ask(pynvml.nvmlSystemGetDriverVersion)),
            plausible.text(ask(pynvml.nvmlSystemGetNVMLVersion)),
            # 12040 is 12.4.
            None if not whole else f"{whole // 1000}.{whole % 1000 // 10}",
        )

    def _must_initialise_again(self, cards: list[CardReading], failures: list[CardFailure]) -> bool:
        """Whether only a new initialisation can help; the library then counts as not
        initialised."""
        reasons = {failure.reason for failure in failures}
        if UNINITIALIZED in reasons:
            self._initialised = False
            return True
        if reasons == {"unknown_error"} and not cards:
            due = self._unknown_rounds % _RETRY_ROUNDS == 0
            self._unknown_rounds += 1
        else:
            lost = reasons & {"lost", "reset_required", "missing"}
            self._lost_rounds = self._lost_rounds + 1 if lost else 0
            if not lost:
                self._lost_patience = _LOST_ROUNDS
            due = self._lost_rounds >= self._lost_patience
        if not due or self._library.busy or any(worker.busy for _, worker in self._cards):
            return False
        if self._lost_rounds:
            self._lost_rounds = 0
            self._lost_patience = min(2 * self._lost_patience, _MOST_LOST_ROUNDS)
        self._shut_down_first = True
        self._initialised = False
        return True

    # ------------------------------------------------------------------ the cards

    def _match_cards(self, count: int) -> None:
        while len(self._cards) < count:
            index = len(self._cards)
            card = Card(index, self._options, self._events, self._clock, self._wall_clock)
            self._cards.append((card, _Worker(f"card-{index}")))
        while len(self._cards) > count:
            card, worker = self._cards.pop()
            self._retired_calls += card.calls.total
            worker.retire()

    def _ask(
        self, seen: Mapping[str, SeenSamples], deadline: float
    ) -> tuple[list[CardReading], list[CardFailure]]:
        """Ask every card that is not still busy with an earlier round."""
        asked = [
            (card, None if worker.busy else worker.start(card.read, seen, self._generation))
            for card, worker in self._cards
        ]
        futures = [future for _, future in asked if future is not None]
        wait(futures, max(0.0, deadline - self._clock()))
        cards: list[CardReading] = []
        failures: list[CardFailure] = []
        for card, future in asked:
            outcome = self._outcome(card, future)
            if isinstance(outcome, CardReading):
                cards.append(outcome)
            else:
                failures.append(outcome)
        return cards, failures

    def _outcome(self, card: Card, future: Future[CardReading] | None) -> CardReading | CardFailure:
        if future is None or not future.done():
            since = "since an earlier round" if future is None else "in time"
            detail = f"a call to the driver has not returned {since}"
            return CardFailure(card.index, "timeout", detail, card.uuid)
        try:
            return future.result()
        except CardDown as down:
            return CardFailure(card.index, down.reason, down.detail, card.uuid)
        except Exception as unexpected:  # noqa: BLE001 - costs this card only
            if card.index not in self._broken:
                self._broken.add(card.index)
                _log.exception("card %d: reading failed", card.index)
            detail = f"{type(unexpected).__name__}: {unexpected}"
            return CardFailure(card.index, "error", detail, card.uuid)


def _initialise(flags: int) -> None:
    try:
        pynvml.nvmlInitWithFlags(flags)
    except pynvml.NVMLError as error:
        missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        if not missing or not library.load_late():
            raise
        pynvml.nvmlInitWithFlags(flags)


def _library_down(code: int, text: str) -> _LibraryDown:
    reason, detail = _INIT_ERRORS.get(code, ("error", text))
    return _LibraryDown(reason, detail)
