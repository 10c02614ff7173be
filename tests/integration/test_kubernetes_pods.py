"""Pods over real HTTP: whatever goes wrong with a list or a watch ends in the server's truth."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from qgpu_exporter.demo.apianswers import Answer
from qgpu_exporter.sources.kubernetes.watch import Timing
from tests.integration.kubernetes_following import (
    FAST,
    NODE,
    connected,
    following,
    names,
    pod,
    pods_source,
    running,
    serving,
    until,
    until_names,
    until_up,
)


async def test_lists_then_follows_what_comes_changes_and_goes(tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("b"))
        server.put("pods", pod("elsewhere", node="other-node"))
        server.put("pods", pod("unbound", node=None))
        async with following(server, tmp_path) as source:
            await until_names(source, "b")
            server.put("pods", pod("a"))
            await until_names(source, "a", "b")
            server.patch("pods", "demo/a", {"status": {"phase": "Succeeded"}})
            await until(
                lambda: source.latest is not None and source.latest.pods[0].phase != "Running"
            )
            server.delete("pods", "demo/b")
            await until_names(source, "a")
            assert source.health.up is True
            assert source.health.failures == {}
        lists = [one for one in server.requests if one.verb == "list"]
        watches = [one for one in server.requests if one.verb == "watch"]
        assert [one.query for one in lists] == [
            {"fieldSelector": f"spec.nodeName={NODE}", "resourceVersion": "0"}
        ]
        assert len(watches) == 1
        assert watches[0].query["resourceVersion"] == "103"
        assert watches[0].query["allowWatchBookmarks"] == "true"
        assert 290 <= int(watches[0].query["timeoutSeconds"]) <= 590
        assert watches[0].user_agent.startswith("qgpu-exporter/")


async def test_an_event_that_changes_nothing_kept_is_no_change(tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        async with connected(server, tmp_path) as connection:
            source = pods_source(connection)
            async with running(source) as changes:
                await until_names(source, "a")
                await until(lambda: server.open_watches == 1)
                assert changes.count == 1
                server.patch("pods", "demo/a", {"status": {"message": "nothing of note"}})
                server.put("pods", pod("b"))
                await until_names(source, "a", "b")
                assert changes.count <= 2


async def test_the_time_of_the_list_follows_events_and_bookmarks(tmp_path: Path) -> None:
    now = 1000.0
    async with (
        serving(bookmark_seconds=0.02) as server,
        following(server, tmp_path, wall_clock=lambda: now) as source,
    ):
        await until(lambda: source.latest is not None)
        now = 2000.0
        await until(lambda: source.latest is not None and source.latest.timestamp_seconds == 2000.0)


async def test_a_uid_keeps_the_time_it_was_first_seen_over_relists(tmp_path: Path) -> None:
    now = 10.0
    async with serving() as server:
        server.put("pods", pod("a", uid="one"))
        async with following(server, tmp_path, clock=lambda: now) as source:
            await until_names(source, "a")
            now = 20.0
            server.compact()
            server.fail(Answer.error_event(410, "Expired", "too old"), verb="watch")
            server.reset_watches()
            server.put("pods", pod("b", uid="two"))
            await until_names(source, "a", "b")
            assert source.latest is not None
            assert [one.first_seen_at_seconds for one in source.latest.pods] == [10.0, 20.0]
            now = 30.0
            server.delete("pods", "demo/a")
            server.put("pods", pod("a", uid="three"))
            await until(
                lambda: (
                    source.latest is not None
                    and [one.uid for one in source.latest.pods] == ["three", "two"]
                )
            )
            assert source.latest.pods[0].first_seen_at_seconds == 30.0


GONE = {
    "as a status": Answer.refusal(410, "Expired", "too old resource version: 1 (2)"),
    "as an event": Answer.error_event(410, "Expired", "too old resource version: 1 (2)"),
    "as a status in a good answer": Answer(
        200, Answer.refusal(410, "Expired", "too old resource version: 1 (2)").body
    ),
}


@pytest.mark.parametrize("form", GONE)
async def test_an_expired_version_is_listed_anew_without_one(form: str, tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("gone"))
        server.put("pods", pod("stays"))
        async with following(server, tmp_path) as source:
            await until_names(source, "gone", "stays")
            server.fail(GONE[form], verb="watch")
            server.silence_watches()
            server.delete("pods", "demo/gone")
            server.reset_watches()
            await until_names(source, "stays")
            await until(lambda: server.open_watches == 1)
            await until_up(source)
        lists = [one.query for one in server.requests if one.verb == "list"]
        assert "resourceVersion" not in lists[-1]
        assert lists[-1]["limit"] == "250"


async def test_a_delete_missed_while_disconnected_is_a_delete(tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        server.put("pods", pod("b"))
        async with following(server, tmp_path) as source:
            await until_names(source, "a", "b")

            async def meanwhile() -> None:
                server.delete("pods", "demo/a")
                server.compact()

            await until(lambda: server.open_watches == 1)
            await server.restart(while_down=meanwhile)
            await until_names(source, "b")


async def test_a_restart_keeps_the_last_pods_and_shows_in_the_health(tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        async with following(server, tmp_path) as source:
            await until_names(source, "a")
            await until(lambda: server.open_watches == 1)
            port_free = asyncio.Event()

            async def meanwhile() -> None:
                server.reset_watches()
                await until(lambda: source.health.up is False)
                assert names(source.latest) == ["a"]
                port_free.set()

            await server.restart(while_down=meanwhile)
            assert port_free.is_set()
            server.put("pods", pod("b"))
            await until_names(source, "a", "b")
            await until_up(source)
            assert source.health.detail == ""
            assert set(source.health.failures) <= {"disconnected", "unreachable"}


async def test_a_watch_that_ends_cleanly_goes_on_where_it_was(tmp_path: Path) -> None:
    async with serving(bookmark_seconds=0.01) as server:
        server.put("pods", pod("a"))
        async with following(server, tmp_path) as source:
            await until(lambda: server.open_watches == 1)
            for number in range(3):
                await asyncio.sleep(0.05)
                server.end_watches()
                server.put("pods", pod(f"b{number}"))
                await until(lambda: server.open_watches == 1)
            await until_names(source, "a", "b0", "b1", "b2")
            assert source.health.failures == {}
        assert sum(one.verb == "list" for one in server.requests) == 1


SHORT_WATCHES = {
    "empty": Answer(),
    "always the same": Answer(
        200, json.dumps({"type": "ADDED", "object": pod("a")}).encode() + b"\n"
    ),
}


@pytest.mark.parametrize("what", SHORT_WATCHES)
async def test_watches_that_end_at_once_are_not_hammered(what: str, tmp_path: Path) -> None:
    slow = Timing(backoff_seconds=3600.0, max_backoff_seconds=3600.0)
    async with serving() as server:
        server.fail(SHORT_WATCHES[what], verb="watch", times=1000)
        async with following(server, tmp_path, timing=slow):
            await until(lambda: any(one.verb == "watch" for one in server.requests))
            await asyncio.sleep(0.2)
            assert len(server.requests) <= 4


async def test_a_large_annotation_is_read_and_let_go(tmp_path: Path) -> None:
    async with serving() as server, following(server, tmp_path) as source:
        await until(lambda: server.open_watches == 1)
        blob = {"example.com/blob": "x" * 900 * 1024, "hami.io/vgpu-node": NODE}
        server.put("pods", pod("fat", annotations=blob))
        server.put("pods", pod("next"))
        await until_names(source, "fat", "next")
        assert source.latest is not None
        assert source.latest.pods[0].annotations == {"hami.io/vgpu-node": NODE}
        assert source.health.up is True
        assert source.health.failures == {}


async def test_a_line_beyond_the_limit_fails_the_watch_and_is_listed(tmp_path: Path) -> None:
    async with serving() as server, following(server, tmp_path) as source:
        await until(lambda: server.open_watches == 1)
        server.put("pods", pod("fat", annotations={"example.com/blob": "x" * 5 * 2**20}))
        server.put("pods", pod("next"))
        await until_names(source, "fat", "next")
        await until_up(source)
        assert source.health.failures == {"too_long": 1}


BAD_WATCHES = {
    "a proxy's page as 502": (Answer.page(502), "server_error"),
    "a proxy's page as 200": (Answer.page(200), "not_json"),
    "broken JSON": (Answer(200, b'{"type":"ADDED","obj\n'), "not_json"),
    "a text": (Answer(200, b'"hello"\n'), "not_json"),
    "an unknown event": (Answer(200, b'{"type":"RENAMED","object":{}}\n'), "not_json"),
    "no more watches": (Answer.refusal(500, "InternalError", "etcd is away"), "server_error"),
    "too many requests": (
        Answer.refusal(429, "TooManyRequests", "later", **{"Retry-After": "0.01"}),
        "rate_limited",
    ),
    "a reset before the answer": (Answer(0, then="reset"), "disconnected"),
    "a reset after it": (Answer(200, then="reset"), "disconnected"),
    "an odd pause": (
        Answer.refusal(429, "TooManyRequests", "later", **{"Retry-After": "soon"}),
        "rate_limited",
    ),
    "an unreadable error event": (Answer(200, b'{"type":"ERROR","object":7}\n'), "refused"),
    "an error event": (Answer.error_event(500, "InternalError", "odd"), "server_error"),
}

LIST_REASONS = {"an error event": "not_json", "an unreadable error event": "not_json"}
"""Where a list fails in another way than a watch."""


@pytest.mark.parametrize("what", BAD_WATCHES)
async def test_a_bad_watch_is_a_failure_and_survived(what: str, tmp_path: Path) -> None:
    answer, reason = BAD_WATCHES[what]
    async with serving() as server:
        server.put("pods", pod("a"))
        async with following(server, tmp_path) as source:
            await until(lambda: server.open_watches == 1)
            # The HTTP client itself repeats a request once whose connection was reset.
            server.fail(answer, verb="watch", times=6)
            server.reset_watches()
            await until(lambda: source.health.failures.get(reason, 0) >= 3)
            server.put("pods", pod("b"))
            await until_names(source, "a", "b")
            await until_up(source)


@pytest.mark.parametrize("what", BAD_WATCHES)
async def test_a_bad_list_is_a_failure_and_survived(what: str, tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        answer, reason = BAD_WATCHES[what]
        # The HTTP client itself repeats a request once whose connection was reset.
        server.fail(answer, verb="list", times=4)
        async with following(server, tmp_path) as source:
            await until_names(source, "a")
            await until_up(source)
            assert set(source.health.failures) == {LIST_REASONS.get(what, reason)}


async def test_a_silent_watch_is_given_up_and_listed_anew(tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        quick = Timing(0.01, 0.05, 0.1, (290, 590), 0.02)
        async with following(server, tmp_path, timing=quick) as source:
            await until(lambda: server.open_watches == 1)
            server.silence_watches()
            server.delete("pods", "demo/a")
            await until_names(source)
            assert source.health.failures["silent"] >= 1


async def test_a_server_set_back_to_an_older_version_is_believed(tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        server.store.version = 5000
        quick = Timing(0.01, 0.05, 0.1, (290, 590), 0.02)
        async with following(server, tmp_path, timing=quick) as source:
            await until_names(source, "a")
            await until(lambda: server.open_watches == 1)

            async def meanwhile() -> None:
                server.delete("pods", "demo/a")
                server.put("pods", pod("restored"))
                server.compact()
                server.store.version = server.store.compacted = 200

            await server.restart(while_down=meanwhile)
            await until_names(source, "restored")


async def test_without_the_right_to_list_it_is_down_until_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        server.allowed.discard("pods")
        async with following(server, tmp_path) as source:
            await until(lambda: source.health.failures.get("forbidden", 0) >= 5)
            assert source.latest is None
            assert source.health.up is False
            assert "pods is forbidden" in source.health.detail
            assert "ClusterRole" in source.health.detail
            server.allowed.add("pods")
            await until_names(source, "a")
            await until_up(source)
    said = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 1


async def test_one_unreadable_pod_costs_only_itself_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        server.put("pods", {**pod("bad"), "spec": {"nodeName": NODE, "containers": 7}})
        server.put("pods", pod("good"))
        async with following(server, tmp_path) as source:
            await until_names(source, "good")
            await until(lambda: server.open_watches == 1)
            server.patch("pods", "demo/good", {"status": {"phase": ["odd"]}})
            server.patch("pods", "demo/bad", {"metadata": {"labels": {"x": "y"}}})
            server.put("pods", pod("later"))
            await until_names(source, "later")
            assert source.health.up is True
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 2
    assert "demo/bad" in said[0]
    assert "demo/good" in said[1]


async def test_a_pod_that_is_nested_beyond_measure_costs_nothing(tmp_path: Path) -> None:
    # The API server takes JSON that is 10 000 levels deep.
    deep = b'{"f:a":' * 9_000 + b"{}" + b"}" * 9_000
    event = json.dumps({"type": "ADDED", "object": pod("deep")}).encode()
    event = event.replace(b'"metadata": {', b'"metadata": {"managedFields":' + deep + b",")
    async with serving() as server:
        server.put("pods", pod("a"))
        async with following(server, tmp_path) as source:
            await until(lambda: server.open_watches == 1)
            await server.write(event + b"\n")
            await until_names(source, "a", "deep")
            assert source.health.failures == {}


async def test_an_event_about_nothing_costs_only_itself(tmp_path: Path) -> None:
    async with serving() as server, following(server, tmp_path) as source:
        await until(lambda: server.open_watches == 1)
        await server.write(b'{"type":"ADDED","object":{"metadata":{}}}\n')
        await server.write(b'{"type":"BOOKMARK","object":{"metadata":7}}\n\n')
        server.put("pods", pod("a"))
        await until_names(source, "a")
        assert source.health.failures == {}


async def test_a_list_without_a_version_comes_in_pages(tmp_path: Path) -> None:
    async with serving() as server:
        for number in range(600):
            server.put("pods", pod(f"p{number:03}"))
        async with following(server, tmp_path) as source:
            await until(lambda: source.latest is not None and len(source.latest.pods) == 600)
            await until(lambda: server.open_watches == 1)
            server.fail(GONE["as an event"], verb="watch")
            server.reset_watches()
            server.delete("pods", "demo/p300")
            await until(lambda: source.latest is not None and len(source.latest.pods) == 599)
        pages = [one.query for one in server.requests if one.verb == "list"][1:]
        assert [page["limit"] for page in pages] == ["250", "250", "250"]
        assert ["continue" in page for page in pages] == [False, True, True]
        assert all("resourceVersion" not in page for page in pages)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (Answer.refusal(410, "Expired", "too old").body, "expired"),
        (Answer.refusal(500, "InternalError", "odd").body, "server_error"),
        (b'{"kind":"Pod","metadata":{"resourceVersion":"7"}}', "not_json"),
        (b'{"kind":"PodList","metadata":{},"items":[]}', "not_json"),
        (b'{"metadata":{"resourceVersion":"7"},"items":[]}', "not_json"),
    ],
)
async def test_a_good_answer_that_is_no_list_wipes_nothing(
    body: bytes, reason: str, tmp_path: Path
) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        async with following(server, tmp_path) as source:
            await until(lambda: server.open_watches == 1)
            shown: set[str] = set()
            server.fail(Answer(200, body), verb="list", times=3)
            server.fail(GONE["as an event"], verb="watch")
            server.reset_watches()

            def failed() -> bool:
                shown.add(str(names(source.latest)))
                return source.health.failures.get(reason, 0) >= 3

            await until(failed)
            await until_up(source)
            assert shown == {"['a']"}


async def test_pages_that_expire_are_begun_anew(tmp_path: Path) -> None:
    async with serving() as server:
        for number in range(300):
            server.put("pods", pod(f"p{number:03}"))
        async with following(server, tmp_path) as source:
            await until(lambda: server.open_watches == 1)
            server.fail(GONE["as an event"], verb="watch")
            server.fail(GONE["as a status"], verb="list")
            server.reset_watches()
            server.delete("pods", "demo/p000")
            await until(lambda: source.latest is not None and len(source.latest.pods) == 299)
            await until_up(source)


async def test_a_fault_in_the_reaction_costs_no_more_than_the_source(tmp_path: Path) -> None:
    async with serving() as server:
        server.put("pods", pod("a"))
        async with connected(server, tmp_path) as connection:
            source = pods_source(connection, timing=FAST)
            calls = 0

            def changed() -> None:
                nonlocal calls
                calls += 1
                if calls == 1:
                    raise ZeroDivisionError("odd")

            task = asyncio.create_task(source.run(changed))
            await until_up(source)
            assert source.health.failures == {"internal_error": 1}
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
