"""Keeps a web configuration current: reads its file, and what that names, when any changes."""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qgpu_exporter.web import tls
from qgpu_exporter.web.web_config import WebConfig, WebConfigError, parse

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
SETTLED_SECONDS = 2.0
"""A file changed this lately may change again under the same time stamp: it is read each time."""

Stamp = tuple[tuple[int, int, int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration that can be used."""

    config: WebConfig
    context: ssl.SSLContext | None = None


def read_web_config(path: str) -> WebConfig:
    """What stands in the file at `path`; raises `WebConfigError` where it cannot be used."""
    return _load(Path(path), {}).config


def check_web_config(path: str) -> list[str]:
    """What is wrong with the file at `path`, one line each; empty: it can be used."""
    try:
        read_web_config(path)
    except WebConfigError as error:
        return [str(error)]
    return []


def web_config_notes(config: WebConfig) -> list[str]:
    """One line for each key that is understood and not honoured to the letter."""
    found = tls.notes(config.tls) if config.tls is not None else []
    if config.http2:
        found.append("http2: HTTP/2 is not offered, HTTP/1.1 is")
    return found


class WebConfigFile:
    """The configuration that holds now.

    `path` None is no file: plain HTTP for everybody.  The constructor raises `WebConfigError`;
    later a broken edit leaves the last good configuration in force, and is logged once.  Whether
    TLS is on is decided at the start: an edit cannot switch it.
    """

    def __init__(self, path: str | None, wall_clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path) if path else None
        self._wall_clock = wall_clock
        self._loaded = Loaded(WebConfig())
        self._stamp: Stamp = ()
        self._settled = False
        self._seen: dict[Path, bytes] = {}
        if self._path is not None:
            seen: dict[Path, bytes] = {}
            self._loaded = _load(self._path, seen)
            self._remember(seen)
            self._note()

    def current(self) -> WebConfig:
        """The configuration for a request that begins now."""
        self._refresh()
        return self._loaded.config

    def context(self) -> ssl.SSLContext | None:
        """The TLS context for a connection that begins now."""
        self._refresh()
        return self._loaded.context

    def refusal(self, certificate: object) -> str | None:
        """Why a client with this certificate is refused; None: it is not."""
        section = self._loaded.config.tls
        return tls.san_refusal(section.client_allowed_sans, certificate) if section else None

    # ------------------------------------------------------------------ changes

    def _refresh(self) -> None:
        if self._path is None:
            return
        if self._settled and _stamp(self._seen) == self._stamp:
            return
        before, seen = self._seen, dict[Path, bytes]()
        try:
            loaded = _load(self._path, seen)
            if (loaded.context is None) != (self._loaded.context is None):
                raise WebConfigError(f"{self._path}: only a restart switches TLS on or off")
        except WebConfigError as error:
            # The same broken bytes are told once, however often they are looked at.
            if seen != before:
                log.error("the web configuration before stays in force: %s", error)
        else:
            if seen != before:
                self._loaded = loaded
                log.info("the web configuration was read anew: %s", self._path)
                self._note()
        self._remember(seen)

    def _remember(self, seen: dict[Path, bytes]) -> None:
        """Keep what was seen, and whether it may still change under the same time stamp."""
        self._seen = seen
        self._stamp = _stamp(seen)
        newest = max((max(one[3:]) for one in self._stamp if one is not None), default=0)
        self._settled = self._wall_clock() - newest / 1e9 > SETTLED_SECONDS

    def _note(self) -> None:
        for line in web_config_notes(self._loaded.config):
            log.info("%s: %s", self._path, line)


def _load(path: Path, seen: dict[Path, bytes]) -> Loaded:
    """Read and check everything; raises `WebConfigError`.

    `seen` takes the bytes of each file that counts, also where the whole fails; of a file that
    cannot be read, why.
    """

    def read(file: Path) -> bytes:
        try:
            seen[file] = _read(file)
        except WebConfigError as error:
            seen[file] = str(error).encode("utf-8", "replace")
            raise
        return seen[file]

    text = read(path)
    try:
        config = parse(text.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise WebConfigError(f"{path}: is not UTF-8 text") from None
    if config.tls is None:
        return Loaded(config)
    return Loaded(config, tls.context(config.tls, str(path), lambda name: read(path.parent / name)))


def _stamp(files: dict[Path, bytes]) -> Stamp:
    """What changes when a file does: device, inode, size and both times of change of each.

    The inode's own time also tells of a rename and of a content whose time was set back.
    """
    return tuple(_stamp_of(file) for file in files)


def _stamp_of(file: Path) -> tuple[int, int, int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(file: Path) -> bytes:
    """The bytes of a regular file of bounded size; a FIFO or a device does not make us wait."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise WebConfigError(f"{file}: is not a regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as opened:
                data = opened.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise WebConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise WebConfigError(f"{file}: is larger than {MAX_BYTES} bytes")
    return data
