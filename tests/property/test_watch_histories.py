"""Any history of changes and failures ends, for the pods' source, in the API server's truth."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from qgpu_exporter.demo.apianswers import Answer
from qgpu_exporter.demo.apiserver import ApiServer
from qgpu_exporter.model import Pod
from qgpu_exporter.sources.kubernetes.pods import Pods, decode_pod
from qgpu_exporter.sources.kubernetes.watch import Timing
from tests.integration.kubernetes_following import (
    NODE,
    connected,
    pod,
    pods_source,
    running,
    serving,
    until,
)

QUICK = Timing(
    backoff_seconds=0.001,
    max_backoff_seconds=0.004,
    silence_seconds=0.25,
    watch_seconds=(1, 2),
    settle_seconds=0.005,
)

NAMES = st.sampled_from("abcd")
TOO_OLD = "too old resource version: 1 (2)"
ANSWERS = {
    "410": Answer.refusal(410, "Expired", TOO_OLD),
    "410 event": Answer.error_event(410, "Expired", TOO_OLD),
    "410 in 200": Answer(200, Answer.refusal(410, "Expired", TOO_OLD).body),
    "401": Answer.refusal(401, "Unauthorized", "Unauthorized"),
    "403": Answer.refusal(403, "Forbidden", "pods is forbidden"),
    "429": Answer.refusal(429, "TooManyRequests", "later", **{"Retry-After": "0"}),
    "500": Answer.refusal(500, "InternalError", "odd"),
    "502 page": Answer.page(502),
    "200 page": Answer.page(200),
    "broken": Answer(200, b'{"type":"ADDED","object":{"meta\n'),
    "empty": Answer(),
    "reset": Answer(then="reset"),
    "reset at once": Answer(0, then="reset"),
}

STEPS = st.one_of(
    st.tuples(st.sampled_from(["create", "change", "delete", "create again"]), NAMES),
    st.tuples(st.sampled_from(["list", "watch"]), st.sampled_from(sorted(ANSWERS))),
    st.tuples(st.sampled_from(["compact", "break", "end", "silence", "restart"]), st.just("")),
)
PAUSES = st.sampled_from(["none", "a moment", "a while", "caught up"])
"""How far the source comes before the next step."""


class Player:
    """Plays a history on a server."""

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._uids = 0
        self._without_argument: dict[str, Callable[[], Awaitable[None]]] = {
            "compact": self._now(server.compact),
            "break": self._now(server.reset_watches),
            "end": self._now(server.end_watches),
            "silence": self._now(server.silence_watches),
            "restart": server.restart,
        }

    @staticmethod
    def _now(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
        async def wrapped() -> None:
            call()

        return wrapped

    async def play(self, step: str, argument: str) -> None:
        if step in self._without_argument:
            await self._without_argument[step]()
        elif step in ("list", "watch"):
            self._server.fail(ANSWERS[argument], verb="list" if step == "list" else "watch")
        else:
            self._write(step, argument)

    def _write(self, step: str, name: str) -> None:
        key = f"demo/{name}"
        there = self._server.store.get("pods", key) is not None
        if there and step in ("delete", "create again"):
            self._server.delete("pods", key)
        if step == "create again" or (step == "create" and not there):
            self._uids += 1
            self._server.put("pods", pod(name, uid=f"uid-{self._uids}"))
        if there and step == "change":
            phase = f"Phase-{self._server.store.version}"
            self._server.patch("pods", key, {"status": {"phase": phase}})


def truth(server: ApiServer) -> list[Pod]:
    """This node's pods as the server has them."""
    stored = server.store.select("pods", lambda one: one["spec"]["nodeName"] == NODE)
    return [decode_pod(one) for one in stored]


def known(source: Pods) -> list[Pod] | None:
    """The pods as the source has them, but for the time at which they were first seen."""
    if source.latest is None:
        return None
    return [replace(one, first_seen_at_seconds=0.0) for one in source.latest.pods]


class Memory:
    """Notes which pods were shown, and fails when one comes back that had gone."""

    def __init__(self, source: Pods) -> None:
        self._source = source
        self._shown: set[str] = set()
        self._gone: set[str] = set()
        self.risen: set[str] = set()

    def __call__(self) -> None:
        latest = self._source.latest
        uids = {one.uid for one in latest.pods} if latest is not None else set()
        self._gone |= self._shown - uids
        self._shown |= uids
        self.risen |= self._gone & uids


async def _pause(pause: str, source: Pods, server: ApiServer) -> None:
    if pause == "a moment":
        await asyncio.sleep(0)
    elif pause == "a while":
        await asyncio.sleep(0.005)
    elif pause == "caught up":
        await until(lambda: known(source) == truth(server) and server.open_watches > 0)


async def _history(steps: list[tuple[tuple[str, str], str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(bookmark_seconds=0.02) as server,
            connected(server, Path(folder)) as connection,
        ):
            source = pods_source(connection, timing=QUICK)
            memory = Memory(source)
            player = Player(server)
            async with running(source, memory):
                for (step, argument), pause in steps:
                    await player.play(step, argument)
                    await _pause(pause, source, server)
                server.mend()
                await until(lambda: known(source) == truth(server))
                server.put("pods", pod("last"))
                await until(lambda: known(source) == truth(server))
                await until(lambda: source.health.up is True)
            assert memory.risen == set()


@settings(max_examples=60)
@given(st.lists(st.tuples(STEPS, PAUSES), max_size=25))
def test_every_history_ends_in_the_servers_truth(
    steps: list[tuple[tuple[str, str], str]],
) -> None:
    asyncio.run(_history(steps))
