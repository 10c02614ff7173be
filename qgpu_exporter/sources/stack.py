"""What the node's GPU software says of itself in files: validations, CDI specifications, driver."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from qgpu_exporter.model import SourceHealth, StackFact
from qgpu_exporter.sources import HealthRecord, SourceError

log = logging.getLogger(__name__)

VALIDATIONS = ("driver-ready", "toolkit-ready", "cuda-ready", "plugin-ready")
"""The GPU Operator's validator writes them in this order and removes them when it ends; a file
may outlive what it tells of, so it is told with its time and never taken for the truth."""
OPTIONAL_VALIDATIONS = (
    "nvidia-fs-ready",
    "gdrcopy-ready",
    "nvidia-peermem-ready",
    "mofed-ready",
    "vfio-pci-ready",
    "vgpu-manager-ready",
    "host-vgpu-manager-ready",
    "vgpu-devices-ready",
    "cc-manager-ready",
    ".driver-ctr-ready",
)
"""Told only where they are: a node needs few of them."""
WORKLOAD_TYPE = "workload-type"

PRESENT, MISSING, ERROR, NO_VERSION = "present", "missing", "error", "none"
MATCH, MISMATCH = "match", "mismatch"

MAX_VERSION_BYTES = 4096
MAX_SPECIFICATION_BYTES = 1 << 20
MAX_SPECIFICATIONS = 32
MAX_ENTRIES = 4096
_SPECIFICATION = re.compile(r"(?=.*nvidia)[A-Za-z0-9._-]{1,120}\.(?:yaml|json)")
_CLAIM = re.compile(r"claim_")
"""One file for each claim in use, made and removed with it: too many and too short-lived."""
_VERSION = r"\d{2,5}\.\d{1,4}(?:\.\d{1,4})?"
_MODULE = re.compile(rf"({_VERSION})\s*")
_PROC = re.compile(rf"NVRM version:.*?Kernel Module.*?\s({_VERSION})\s")
_IN_SPECIFICATION = tuple(
    re.compile(rf"{prefix}({_VERSION})(?![\w.])")
    for prefix in ("--host-driver-version=", r"/libnvidia-ml\.so\.", r"/libcuda\.so\.")
)
"""The hook that enables CUDA's forward compatibility, else the names of mounted libraries."""
_WORD = re.compile(r"[a-z0-9-]{1,40}")
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _BadFileError(Exception):
    """A file that is there and cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class _File:
    text: bytes
    timestamp_seconds: float


class Stack:
    """Reads the files when asked; `latest` has the facts of the last time.

    Facts, by subject: ``driver/module`` and ``driver/proc`` (version of the loaded kernel module),
    ``validation/<file>`` (``present``, ``missing`` or ``error``), ``workload_type``,
    ``cdi/<file>`` (the driver version that the specification was made for, ``none`` or ``error``)
    and ``cdi_driver`` (``match`` or ``mismatch`` of all these with the loaded module).  Claims'
    specifications are left out.  An empty `validations` is off; `wall_clock` is Unix time.
    """

    def __init__(
        self,
        *,
        validations: str,
        cdi: tuple[str, ...],
        procfs: str,
        sysfs: str,
        wall_clock: Callable[[], float],
    ) -> None:
        self.latest: tuple[StackFact, ...] = ()
        self._validations = Path(validations) if validations else None
        self._cdi = tuple(Path(path) for path in cdi if path)
        self._proc_version = Path(procfs, "driver/nvidia/version")
        self._module_version = Path(sysfs, "module/nvidia/version")
        self._record = HealthRecord("stack", wall_clock)
        self._versions: dict[tuple[str, int, int, int], str] = {}
        self._complaints: frozenset[str] = frozenset()

    @property
    def health(self) -> SourceHealth:
        """The state of the source ``stack``."""
        return self._record.health

    def present(self) -> bool:
        """Whether this node has any of the places; the source is off where it has none."""
        parents = (self._proc_version.parent, self._module_version.parent)
        places = (*parents, *self._cdi, *([self._validations] if self._validations else []))
        return any(os.path.isdir(place) for place in places)

    async def ask(self) -> tuple[StackFact, ...]:
        """Read all files, in a thread, and return the facts by subject.

        A file that cannot be used costs its own fact alone; a directory that cannot be listed
        costs its facts and shows in `health`.
        """
        reading = _Reading(dict(self._versions))
        facts = await asyncio.to_thread(self._read, reading)
        self._versions = reading.versions_used
        for complaint in sorted(reading.complaints - self._complaints):
            log.warning("stack: %s", complaint)
        self._complaints = frozenset(reading.complaints)
        if reading.failure is None:
            self._record.succeeded()
        else:
            self._record.failed(reading.failure)
        self.latest = tuple(sorted(facts, key=lambda fact: fact.subject))
        return self.latest

    # ------------------------------------------------------------------ in the thread

    def _read(self, reading: _Reading) -> list[StackFact]:
        facts = [
            *_version_fact(reading, "driver/module", self._module_version, _MODULE),
            *_version_fact(reading, "driver/proc", self._proc_version, _PROC),
        ]
        loaded = {fact.value for fact in facts if fact.value != ERROR}
        if self._validations is not None and self._validations.is_dir():
            facts += _validation_facts(reading, self._validations)
        specifications = list(_specification_facts(reading, self._cdi))
        made_for = {fact.value for fact in specifications} - {ERROR, NO_VERSION}
        if loaded and made_for:
            value = MATCH if made_for <= loaded else MISMATCH
            specifications.append(StackFact("cdi_driver", value))
        return facts + specifications


class _Reading:
    """What one round of reading gathers beside its facts."""

    def __init__(self, versions: dict[tuple[str, int, int, int], str]) -> None:
        self.versions = versions
        """Of specifications, by path and the file's identity: parsing is dear, changes are rare."""
        self.versions_used: dict[tuple[str, int, int, int], str] = {}
        self.complaints: set[str] = set()
        self.failure: SourceError | None = None

    def complain(self, path: Path, reason: object) -> None:
        self.complaints.add(f"{path}: {reason}")

    def fail(self, path: Path, error: OSError) -> None:
        reason = "no_permission" if isinstance(error, PermissionError) else "error"
        self.failure = SourceError(reason, f"cannot list {path}: {error.strerror or error}")


def _version_fact(
    reading: _Reading, subject: str, path: Path, pattern: re.Pattern[str]
) -> Iterator[StackFact]:
    """No fact where the module is not loaded."""
    try:
        file = _read_file(path, MAX_VERSION_BYTES)
        match = pattern.match(file.text.decode(errors="replace"))
        if match is None:
            raise _BadFileError("no version in it")
    except FileNotFoundError:
        return
    except (OSError, _BadFileError) as error:
        reading.complain(path, error)
        yield StackFact(subject, ERROR)
    else:
        yield StackFact(subject, match[1])


def _validation_facts(reading: _Reading, directory: Path) -> Iterator[StackFact]:
    for name in (*VALIDATIONS, *OPTIONAL_VALIDATIONS):
        path = directory / name
        value, timestamp_seconds = MISSING, None
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise _BadFileError("not a regular file")
            value, timestamp_seconds = PRESENT, status.st_mtime
        except FileNotFoundError:
            if name in OPTIONAL_VALIDATIONS:
                continue
        except (OSError, _BadFileError) as error:
            reading.complain(path, error)
            value = ERROR
        yield StackFact(f"validation/{name}", value, timestamp_seconds)
    path = directory / WORKLOAD_TYPE
    try:
        file = _read_file(path, MAX_VERSION_BYTES)
        word = file.text.decode(errors="replace").strip()
        if not _WORD.fullmatch(word):
            raise _BadFileError("not a word")
    except FileNotFoundError:
        return
    except (OSError, _BadFileError) as error:
        reading.complain(path, error)
        yield StackFact("workload_type", ERROR)
    else:
        yield StackFact("workload_type", word, file.timestamp_seconds)


# --------------------------------------------------------------------------- CDI


def _specification_facts(reading: _Reading, directories: tuple[Path, ...]) -> Iterator[StackFact]:
    """One a specification of NVIDIA's; of two with one name, the first directory's."""
    seen: set[str] = set()
    for directory in directories:
        for name in _specifications(reading, directory):
            if name in seen or len(seen) >= MAX_SPECIFICATIONS:
                continue
            seen.add(name)
            path = directory / name
            try:
                value, timestamp_seconds = _specification_version(reading, path)
            except FileNotFoundError:  # removed since it was listed
                continue
            except (OSError, _BadFileError) as error:
                reading.complain(path, error)
                yield StackFact(f"cdi/{name}", ERROR)
            else:
                yield StackFact(f"cdi/{name}", value, timestamp_seconds)


def _specifications(reading: _Reading, directory: Path) -> list[str]:
    names = []
    try:
        with os.scandir(directory) as entries:
            for count, entry in enumerate(entries):
                if count >= MAX_ENTRIES:
                    reading.complain(directory, f"has more than {MAX_ENTRIES} entries")
                    break
                if _SPECIFICATION.fullmatch(entry.name) and not _CLAIM.search(entry.name):
                    names.append(entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reading.fail(directory, error)
    return sorted(names)


def _specification_version(reading: _Reading, path: Path) -> tuple[str, float]:
    status = path.lstat()
    key = (str(path), status.st_ino, status.st_mtime_ns, status.st_size)
    value = reading.versions.get(key)
    if value is None:
        file = _read_file(path, MAX_SPECIFICATION_BYTES)
        value = _driver_version(file.text, is_json=path.suffix == ".json")
    reading.versions_used[key] = value
    return value, status.st_mtime


def _driver_version(raw: bytes, *, is_json: bool) -> str:
    """The driver version that a CDI specification was made for, or ``none``.

    Raises `_BadFileError` for what is no specification.
    """
    try:
        text = raw.decode()
        strings = list(_json_strings(text) if is_json else _yaml_strings(text))
    except UnicodeDecodeError:
        raise _BadFileError("not UTF-8") from None
    except (yaml.YAMLError, json.JSONDecodeError, RecursionError):
        raise _BadFileError("cannot be parsed") from None
    for pattern in _IN_SPECIFICATION:
        versions = {match[1] for string in strings if (match := pattern.search(string))}
        if len(versions) > 1:
            raise _BadFileError(f"names several driver versions: {', '.join(sorted(versions)[:4])}")
        if versions:
            return versions.pop()
    return NO_VERSION


def _yaml_strings(text: str) -> Iterator[str]:
    """All scalars, from the parser's events: nothing is built, and an alias is refused."""
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise _BadFileError("has an alias")
        if isinstance(event, yaml.ScalarEvent):
            yield event.value


def _json_strings(text: str) -> Iterator[str]:
    waiting: list[object] = [json.loads(text)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


# --------------------------------------------------------------------------- files


def _read_file(path: Path, limit: int) -> _File:
    """A regular file of at most `limit` bytes; raises `_BadFileError` for anything else.

    These directories are written by other programs: a link may lead anywhere, a FIFO would block,
    and opening a device may do something.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise _BadFileError("not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _BadFileError("not a regular file")
        text = file.read(limit + 1)
    if len(text) > limit:
        raise _BadFileError(f"longer than {limit} bytes")
    return _File(text, status.st_mtime)
