"""Answers as bytes: which encoding a client takes, and writing at the pace of the client."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping

from aiohttp import web

GZIP_LEVEL = 4
"""A tenth larger than level 9 on a metrics page, at a quarter of the time."""
MIN_GZIP_BYTES = 512
"""Below this a gzip header costs more than it saves."""

SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "deny",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""On every answer; a web configuration file may replace those that it may name."""

_QUALITY = re.compile(r"(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\Z", re.ASCII)


def takes_gzip(accept_encoding: str | None) -> bool:
    """Whether an Accept-Encoding header prefers gzip to no encoding (RFC 9110, 12.5.3).

    A header that cannot be read gets the plain bytes, which every client understands.
    """
    weights: dict[str, float] = {}
    for entry in (accept_encoding or "").lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if not name:
            continue
        weight = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                if not _QUALITY.match(value.strip()):
                    return False
                weight = float(value)
        weights["gzip" if name == "x-gzip" else name] = weight
    gzip_weight = weights.get("gzip", weights.get("*", 0.0))
    return gzip_weight > 0 and gzip_weight >= weights.get("identity", 0.0)


def compressed(body: bytes) -> bytes:
    """`body` as gzip; the same body always gives the same bytes."""
    return gzip.compress(body, GZIP_LEVEL, mtime=0)


def text(status: int, line: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """A short plain-text answer; `line` is ours, never the client's."""
    return web.Response(status=status, text=line + "\n", content_type="text/plain", headers=headers)


async def send(
    request: web.Request, body: bytes, content_type: str, *, gzipped: bool, cache: str = "no-store"
) -> web.StreamResponse:
    """Write 200 and `body`, waiting for a slow client instead of buffering without bound."""
    response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": cache})
    response.headers["Vary"] = "Accept, Accept-Encoding"
    if gzipped:
        response.headers["Content-Encoding"] = "gzip"
    response.content_length = len(body)
    try:
        await response.prepare(request)
        if request.method != "HEAD":
            await response.write(body)
        await response.write_eof()
    except ConnectionError:
        # The client went away; there is nobody to tell.
        response.force_close()
    return response
