"""How log lines look: one line a record, logfmt or JSON; no text in them can break a line."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Literal, TextIO

MAX_VALUE_LENGTH = 2000


def setup(level: str, style: Literal["logfmt", "json"], stream: TextIO | None = None) -> None:
    """Send the records of `level` and above to `stream` (default standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Formatter(style))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Foreign libraries tell at INFO what they do for each request.
    wanted = logging.getLevelName(level.upper())
    for name in ("aiohttp", "asyncio", "grpc", "urllib3"):
        logging.getLogger(name).setLevel(max(logging.WARNING, wanted))
    # It warns of a kubeconfig at each attempt; the source says the same once.
    logging.getLogger("kubernetes_asyncio").setLevel(max(logging.ERROR, wanted))


class Formatter(logging.Formatter):
    """`ts=… level=… caller=… msg=…`, as Prometheus components print it, or the same as JSON."""

    def __init__(self, style: Literal["logfmt", "json"]) -> None:
        super().__init__()
        self._form = style

    def format(self, record: logging.LogRecord) -> str:
        """One line without a line break."""
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "caller": f"{record.name.removeprefix('qgpu_exporter.')}:{record.lineno}",
            "msg": _cut(record.getMessage()),
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = _cut("".join(traceback.format_exception(record.exc_info[1])))
        if self._form == "json":
            return json.dumps(fields, ensure_ascii=True)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _cut(text: str) -> str:
    if len(text) <= MAX_VALUE_LENGTH:
        return text
    return f"{text[:MAX_VALUE_LENGTH]}… ({len(text)} characters)"


def _quoted(value: str) -> str:
    """The value bare where it is a plain word, else as a JSON string: no break, no escape code."""
    if value and all(character.isalnum() or character in "-_.:/+" for character in value):
        return value if value.isascii() else json.dumps(value)
    return json.dumps(value, ensure_ascii=True)
