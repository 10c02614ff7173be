"""Prepared answers of an API server, and of what may stand before one: mostly bad ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def status_body(code: int, reason: str, message: str, **more: Any) -> bytes:
    """The Status object with which an API server refuses."""
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        **more,
        "code": code,
    }
    return json.dumps(status, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A prepared answer: status and body, and what comes after them."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    then: Literal["end", "silence", "reset"] = "end"
    """Whether the connection then ends cleanly, stays open without a word, or breaks."""

    @classmethod
    def refusal(cls, code: int, reason: str, message: str, **headers: str) -> Answer:
        """A refusal in the server's own words."""
        return cls(code, status_body(code, reason, message), headers=headers)

    @classmethod
    def error_event(cls, code: int, reason: str, message: str) -> Answer:
        """A watch that is answered 200 and says in its first event that it cannot be."""
        status = status_body(code, reason, message).rstrip()
        return cls(200, b'{"type":"ERROR","object":' + status + b"}\n")

    @classmethod
    def page(cls, status: int) -> Answer:
        """What a proxy answers in the server's place."""
        return cls(status, b"<html><body><h1>Bad Gateway</h1></body></html>", "text/html")
