"""Calls into NVML for one card: counted, with errors told apart and refusals remembered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from qgpu_exporter.model import DownReason

_log = logging.getLogger("qgpu_exporter.reader")

T = TypeVar("T")

PROBE_ROUNDS = 120
"""Rounds after which a refused call is tried again: ten minutes at the default interval."""

UNINITIALIZED = "uninitialized"
MISMATCH = "mismatch"
"""Reasons of `CardDown` that concern the whole library; the session acts on them."""

_DOWN: dict[int, DownReason] = {
    pynvml.NVML_ERROR_UNINITIALIZED: UNINITIALIZED,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: MISMATCH,
    pynvml.NVML_ERROR_GPU_IS_LOST: "lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "reset_required",
}
_LASTING = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
    }
)
"""Answers that will be the same in the next round."""
_ORDINARY = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
"""Answers that a healthy card gives, so no line in the log."""
OF_MIG = " of MIG"
"""Ends the names of calls about a MIG device.  Such a device may go at any time, so that a call
with its handle is an invalid argument now, and none with the next device's."""
GARBAGE = -1
"""Code of a refusal whose answer could not be decoded."""


class CardDown(Exception):
    """No reading of this card is possible: `reason` as in `model.DownReason`, or one of the two
    above."""

    def __init__(self, reason: DownReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Refusal(Exception):
    """One call failed; `code` is NVML's, or `GARBAGE`."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def symbol(name: str) -> Any:
    """A function of the loaded library, to be called with ctypes values; returns NVML's code.

    Some lists are fetched without pynvml's wrappers: those ask twice, once for the length.
    """
    if pynvml.nvmlLib is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
    try:
        return getattr(pynvml.nvmlLib, name)
    except AttributeError:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND) from None


def check(code: int) -> None:
    """Raise NVML's error for a code other than success."""
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)


class Calls:
    """The calls of one card; used by one thread.

    `total` counts them since the start.  `answered` and `unknown` count this round's outcomes:
    when the device nodes were taken from the process, every call about the hardware says UNKNOWN,
    while what the library remembers is still answered.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._round = 0
        self._ask_again: dict[str, int] = {}
        self._logged: set[tuple[str, int]] = set()
        self.total = 0
        self.answered = 0
        self.unknown = 0

    def begin_round(self) -> None:
        """Start counting anew, and let refusals that are old enough be tried again."""
        self._round += 1
        self.answered = 0
        self.unknown = 0

    def forget_refusals(self) -> None:
        """The handle is new: it may be another card, or the card in another mode."""
        self._ask_again.clear()

    def refused(self, name: str) -> bool:
        """Whether the call was refused for good and is not due to be tried again."""
        return self._ask_again.get(name, 0) > self._round

    def refuse(self, name: str) -> None:
        """Do not make the call for `PROBE_ROUNDS` rounds."""
        self._ask_again[name] = self._round + PROBE_ROUNDS

    def call(self, name: str, function: Callable[..., T], *arguments: object) -> T:
        """Make the call: its answer, or `Refusal`, or `CardDown` where the code says so."""
        self.total += 1
        try:
            answer = function(*arguments)
        except pynvml.NVMLError as error:
            code = int(error.value)
            if code in _DOWN:
                raise CardDown(_DOWN[code], f"{name}: {error}") from None
            if code == pynvml.NVML_ERROR_UNKNOWN:
                self.unknown += 1
            raise Refusal(code, f"{name}: {error}") from None
        except pynvml.NVMLLibraryMismatchError:
            # An unversioned wrapper on a driver that is older than its newest symbol.
            raise Refusal(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, f"{name}: no such symbol") from None
        except (UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
            raise Refusal(GARBAGE, f"{name}: answer not understood: {error}") from None
        self.answered += 1
        return answer

    def ask(self, name: str, function: Callable[..., T], *arguments: object) -> T | None:
        """As `call`, with None for a refusal; one that lasts is not asked again for a while.

        `name` stands for the call and the arguments that its support depends on.
        """
        if self.refused(name):
            return None
        try:
            return self.call(name, function, *arguments)
        except Refusal as refusal:
            gone = name.endswith(OF_MIG) and refusal.code == pynvml.NVML_ERROR_INVALID_ARGUMENT
            if refusal.code in _LASTING and not gone:
                self.refuse(name)
            self.log_once(name, refusal)
            return None

    def log_once(self, name: str, refusal: Refusal) -> None:
        """One line for the life of the process for each call and unusual error."""
        key = (name, refusal.code)
        if refusal.code not in _ORDINARY and key not in self._logged:
            self._logged.add(key)
            _log.warning("%s: %s", self._label, refusal)
