"""Prepared answers of an API server, and of what may stand before one: mostly bad ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

LONG_SECONDS = 24 * 3600.0
"""For ever, as far as anybody waits."""

_USER = "system:serviceaccount:monitoring:gpu-exporter"


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


def forbidden(verb: str, resource: str, group: str) -> Answer:
    """The refusal of a reader without the right."""
    message = (
        f'{resource} is forbidden: User "{_USER}" cannot {verb} resource "{resource}" '
        f'in API group "{group}" at the cluster scope'
    )
    return Answer.refusal(403, "Forbidden", message)


def too_large(asked: str, current: int) -> Answer:
    """The refusal of a list of a version that is not there yet."""
    body = status_body(
        504,
        "Timeout",
        f"Timeout: Too large resource version: {asked}, current: {current}",
        details={
            "causes": [
                {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            ],
            "retryAfterSeconds": 1,
        },
    )
    return Answer(504, body, headers={"Retry-After": "1"})


CONTINUE_TOO_OLD = Answer.refusal(
    410,
    "Expired",
    "The provided continue parameter is too old to display a consistent list result. You can start "
    "a new list without the continue parameter.",
)


async def give(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Give a prepared answer; status 0 says nothing, not even that."""
    headers = {"Content-Type": answer.content_type, **answer.headers}
    if answer.then == "end":
        return web.Response(status=answer.status, body=answer.body, headers=headers)
    response = web.StreamResponse(status=answer.status or 200, headers=headers)
    if answer.status:
        await response.prepare(request)
        await response.write(answer.body)
    if answer.then == "silence":
        await asyncio.sleep(LONG_SECONDS)
    break_off(request)
    return response


def break_off(request: web.Request) -> None:
    """Break a request's connection."""
    if isinstance(request.transport, asyncio.Transport):
        request.transport.abort()
