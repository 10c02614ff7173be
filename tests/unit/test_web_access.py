"""Rate limit, credentials and passwords, without a server."""

from __future__ import annotations

import base64

import bcrypt
import pytest

from qgpu_exporter.web.access import MAX_REMEMBERED, Passwords, TokenBucket, credentials
from qgpu_exporter.web.web_config import RateLimit


def test_a_bucket_gives_its_burst_and_then_one_an_interval() -> None:
    now = 100.0
    bucket = TokenBucket(RateLimit(2.0, 3), lambda: now)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now = 101.9
    assert bucket.take() is False
    now = 102.0
    assert [bucket.take(), bucket.take()] == [True, False]
    now = 1000.0
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


def test_a_bucket_without_a_burst_lets_nobody_pass() -> None:
    assert TokenBucket(RateLimit(1.0, 0), lambda: 0.0).take() is False


def basic(text: bytes) -> str:
    return f"Basic {base64.b64encode(text).decode()}"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (basic(b"user:secret"), ("user", b"secret")),
        (basic(b"user:se:cret").replace("Basic", "bAsIc"), ("user", b"se:cret")),
        (basic(b":"), ("", b"")),
        (basic("jürgen:pass".encode()), ("jürgen", b"pass")),
        (basic(b"\xff:x"), ("\udcff", b"x")),
        (basic(b"no colon"), None),
        ("Basic not*base64", None),
        ("Basic ", None),
        ("Basic", None),
        ("Bearer abc", None),
        ("Basic \u00e4\u00f6", None),
        ("", None),
        (None, None),
    ],
)
def test_credentials(header: str | None, expected: tuple[str, bytes] | None) -> None:
    assert credentials(header) == expected


@pytest.fixture
def users() -> dict[str, str]:
    return {"prometheus": bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()}


async def test_passwords(users: dict[str, str]) -> None:
    passwords = Passwords()
    for _ in range(2):
        assert await passwords.are_right(users, "prometheus", b"secret") is True
        assert await passwords.are_right(users, "prometheus", b"wrong") is False
        assert await passwords.are_right(users, "nobody", b"secret") is False
        assert await passwords.are_right(users, "prometheus", b"") is False
        assert await passwords.are_right(users, "prometheus", b"a\0b") is False
        assert await passwords.are_right(users, "prometheus", b"x" * 5000) is False
    passwords.close()


async def test_what_is_remembered_is_bounded_and_guesses_push_nobody_out(
    users: dict[str, str],
) -> None:
    passwords = Passwords()
    assert await passwords.are_right(users, "prometheus", b"secret")
    for guess in range(MAX_REMEMBERED + 10):
        assert not await passwords.are_right(users, "prometheus", str(guess).encode())
    assert (len(passwords._right), len(passwords._wrong)) == (1, MAX_REMEMBERED)
    assert not any(b"secret" in digest for digest in passwords._right)
    passwords.close()


async def test_a_new_hash_ends_the_old_password(users: dict[str, str]) -> None:
    passwords = Passwords()
    assert await passwords.are_right(users, "prometheus", b"secret")
    changed = {"prometheus": bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode()}
    assert not await passwords.are_right(changed, "prometheus", b"secret")
    assert await passwords.are_right(changed, "prometheus", b"other")
    passwords.close()


@pytest.mark.parametrize("prefix", ["$2a$", "$2b$", "$2y$"])
async def test_hashes_of_every_spelling(prefix: str, users: dict[str, str]) -> None:
    passwords = Passwords()
    hashed = prefix + users["prometheus"][4:]
    assert await passwords.are_right({"a": hashed}, "a", b"secret")
    passwords.close()
