"""Who may ask: rate limit, then headers, then basic auth, in front of every endpoint but probes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import bcrypt
from aiohttp import web
from cachetools import LRUCache

from qgpu_exporter.web.responses import SECURITY_HEADERS, text
from qgpu_exporter.web.web_config import RateLimit, WebConfig

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_WAITING = 64
"""Passwords that may wait to be checked; a guesser gets 503 and known users are not held up."""
MAX_REMEMBERED = 128
BCRYPT_BYTES = 72
"""bcrypt looks at no more of a password."""
NOBODY = "." * 53
"""Salt and digest, all zero bits, that no password has: checked for users who do not exist."""


class TokenBucket:
    """At most `burst` at once and one more each `interval_seconds`; `clock` is monotonic."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._tokens = float(limit.burst)
        self._filled_at = clock()

    def take(self) -> bool:
        """Whether one more may pass now."""
        now = self._clock()
        gained = (now - self._filled_at) / self._limit.interval_seconds
        self._tokens = min(float(self._limit.burst), self._tokens + gained)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class TooManyPasswords(Exception):
    """More passwords wait to be checked than may."""


class Passwords:
    """Checks a user's password with bcrypt: one at a time, off the loop, and remembers the answer.

    What is remembered is a keyed digest of user, hash and password, never the password.  An
    unknown user costs as much as a known one with a wrong password.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="bcrypt")
        self._key = secrets.token_bytes(32)
        # Apart, so that guesses do not push out those who know their password.
        self._right: LRUCache[bytes, bool] = LRUCache(MAX_REMEMBERED)
        self._wrong: LRUCache[bytes, bool] = LRUCache(MAX_REMEMBERED)
        self._waiting = 0

    async def are_right(self, users: Mapping[str, str], user: str, password: bytes) -> bool:
        """Whether `password` is the one of `user`; raises `TooManyPasswords`."""
        known = users.get(user)
        hashed = known if known is not None else _nobody(users)
        digest = self._digest(user, hashed, password)
        if digest in self._right:
            return True
        if digest in self._wrong:
            return False
        if self._waiting >= MAX_WAITING:
            raise TooManyPasswords
        self._waiting += 1
        try:
            matches = await asyncio.get_running_loop().run_in_executor(
                self._executor, _matches, password, hashed
            )
        finally:
            self._waiting -= 1
        right = matches and known is not None
        (self._right if right else self._wrong)[digest] = right
        return right

    def close(self) -> None:
        """Check nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _digest(self, user: str, hashed: str, password: bytes) -> bytes:
        parts = (user.encode("utf-8", "surrogateescape"), hashed.encode(), password)
        digest = hashlib.blake2b(key=self._key)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()


def _nobody(users: Mapping[str, str]) -> str:
    """A hash that nothing matches, of the highest cost in use."""
    cost = max((hashed.split("$")[2] for hashed in users.values()), default="10")
    return f"$2b${cost}${NOBODY}"


def _matches(password: bytes, hashed: str) -> bool:
    try:
        return bcrypt.checkpw(password[:BCRYPT_BYTES], hashed.encode())
    except ValueError:
        return False


def credentials(header: str | None) -> tuple[str, bytes] | None:
    """(user, password) of an Authorization header with scheme Basic, or None."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(encoded.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    user, colon, password = decoded.partition(b":")
    if not colon:
        return None
    return user.decode("utf-8", "surrogateescape"), password


class Access:
    """The gate of the main server; `current` gives the web configuration that holds now."""

    def __init__(
        self,
        current: Callable[[], WebConfig],
        is_probe: Callable[[web.Request], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._current = current
        self._is_probe = is_probe
        self._clock = clock
        self._passwords = Passwords()
        self._limit: RateLimit | None = None
        self._bucket: TokenBucket | None = None

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer, or the refusal."""
        if self._is_probe(request):
            return await handler(request)
        config = self._current()
        if not self._may_pass(config.rate_limit):
            return text(429, "too many requests", {"Retry-After": "1"})
        if config.users:
            refusal = await self._refusal(config.users, request)
            if refusal is not None:
                return refusal
        return await handler(request)

    def headers(self) -> Mapping[str, str]:
        """What every answer carries: ours, then those of the configuration."""
        return {**SECURITY_HEADERS, **self._current().headers}

    def close(self) -> None:
        """End the thread that checks passwords."""
        self._passwords.close()

    def _may_pass(self, limit: RateLimit | None) -> bool:
        if limit != self._limit:
            self._limit = limit
            self._bucket = TokenBucket(limit, self._clock) if limit is not None else None
        return self._bucket is None or self._bucket.take()

    async def _refusal(
        self, users: Mapping[str, str], request: web.Request
    ) -> web.StreamResponse | None:
        given = credentials(request.headers.get("Authorization"))
        try:
            if given is not None and await self._passwords.are_right(users, *given):
                return None
        except TooManyPasswords:
            return text(503, "too many passwords to check", {"Retry-After": "1"})
        challenge = {"WWW-Authenticate": 'Basic realm="qgpu-exporter", charset="UTF-8"'}
        return text(401, "unauthorized", challenge)
