"""The made-up API server is held to what real ones (1.20, 1.36) were seen to answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from qgpu_exporter.demo.apianswers import Answer
from qgpu_exporter.demo.apiserver import ApiServer
from qgpu_exporter.demo.apistore import MAX_HISTORY
from tests.integration.kubernetes_following import HANG_SECONDS, NODE, pod, serving, until

PODS = "/api/v1/pods"
OF_NODE = {"fieldSelector": f"spec.nodeName={NODE}"}


@asynccontextmanager
async def asking(server: ApiServer) -> AsyncIterator[aiohttp.ClientSession]:
    guard = aiohttp.ClientTimeout(total=HANG_SECONDS)
    async with aiohttp.ClientSession(server.url, timeout=guard) as session:
        yield session


async def ask(
    session: aiohttp.ClientSession, path: str, query: dict[str, str] | None = None
) -> tuple[int, Any]:
    async with session.get(path, params=query) as answer:
        return answer.status, json.loads(await answer.read())


async def watch(session: aiohttp.ClientSession, version: object, **more: str) -> list[Any]:
    """All events of a watch of this node's pods, until the server ends it."""
    query = {"watch": "1", "resourceVersion": str(version), "timeoutSeconds": "0.2", **OF_NODE}
    async with session.get(PODS, params=query | more) as answer:
        assert answer.status == 200
        assert answer.content_type == "application/json"
        return [json.loads(line) for line in (await answer.read()).splitlines()]


async def test_a_list_has_kind_version_and_items_without_kinds() -> None:
    async with serving() as server, asking(server) as session:
        server.put("pods", pod("a"))
        server.put("pods", pod("b", node="other"))
        status, answer = await ask(session, PODS, OF_NODE)
        assert status == 200
        assert answer["kind"] == "PodList"
        assert answer["apiVersion"] == "v1"
        assert answer["metadata"] == {"resourceVersion": "102"}
        assert [one["metadata"]["name"] for one in answer["items"]] == ["a"]
        assert "kind" not in answer["items"][0]
        assert answer["items"][0]["metadata"]["resourceVersion"] == "101"


async def test_pages_hold_the_state_of_the_first_and_version_0_knows_none() -> None:
    async with serving() as server, asking(server) as session:
        for name in "abcde":
            server.put("pods", pod(name))
        _, first = await ask(session, PODS, {"limit": "2"})
        assert first["metadata"]["remainingItemCount"] == 3
        server.delete("pods", "demo/d")
        token = first["metadata"]["continue"]
        _, second = await ask(session, PODS, {"limit": "2", "continue": token})
        names = [one["metadata"]["name"] for one in first["items"] + second["items"]]
        assert names == ["a", "b", "c", "d"]
        assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        _, selected = await ask(session, PODS, {"limit": "2", **OF_NODE})
        assert "remainingItemCount" not in selected["metadata"]
        _, cached = await ask(session, PODS, {"limit": "2", "resourceVersion": "0"})
        assert len(cached["items"]) == 4
        server.compact()
        status, expired = await ask(session, PODS, {"limit": "2", "continue": token})
        assert (status, expired["reason"]) == (410, "Expired")


async def test_a_watch_tells_what_came_after_its_version_and_ends_cleanly() -> None:
    async with serving() as server, asking(server) as session:
        server.put("pods", pod("a"))
        server.put("pods", pod("b", node="other"))
        server.patch("pods", "demo/a", {"status": {"phase": "Succeeded"}})
        server.delete("pods", "demo/a")
        events = await watch(session, 101)
        assert [(one["type"], one["object"]["metadata"]["resourceVersion"]) for one in events] == [
            ("MODIFIED", "103"),
            ("DELETED", "104"),
        ]
        assert events[0]["object"]["kind"] == "Pod"
        assert events[1]["object"]["status"]["phase"] == "Succeeded"


async def test_leaving_and_entering_a_selection_is_a_deletion_and_an_addition() -> None:
    async with serving() as server, asking(server) as session:
        server.put("pods", pod("a", node=None))
        server.patch("pods", "demo/a", {"spec": {"nodeName": NODE}})
        server.patch("pods", "demo/a", {"spec": {"nodeName": "other"}})
        events = await watch(session, 101)
        assert [one["type"] for one in events] == ["ADDED", "DELETED"]
        assert events[1]["object"]["spec"]["nodeName"] == NODE


async def test_a_watch_without_a_version_begins_with_all() -> None:
    async with serving() as server, asking(server) as session:
        server.put("pods", pod("a"))
        server.put("pods", pod("b"))
        assert [one["type"] for one in await watch(session, 0)] == ["ADDED", "ADDED"]


async def test_an_old_version_expires_by_an_event_inside_a_good_answer() -> None:
    async with serving() as server, asking(server) as session:
        server.put("pods", pod("a"))
        server.compact()
        server.put("pods", pod("b"))
        assert await watch(session, 100) == [
            {
                "type": "ERROR",
                "object": {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "metadata": {},
                    "status": "Failure",
                    "message": "too old resource version: 100 (102)",
                    "reason": "Expired",
                    "code": 410,
                },
            }
        ]
        assert [one["type"] for one in await watch(session, 101)] == ["ADDED"]


async def test_history_is_bounded() -> None:
    async with serving() as server, asking(server) as session:
        for _ in range(MAX_HISTORY + 1):
            server.put("pods", pod("a"))
        assert (await watch(session, 100))[0]["type"] == "ERROR"
        assert len(await watch(session, 101)) == MAX_HISTORY


async def test_a_future_version_is_silence_for_a_watch_and_504_for_a_list() -> None:
    async with serving(bookmark_seconds=0.01) as server, asking(server) as session:
        assert await watch(session, 999_999, allowWatchBookmarks="true") == []
        status, answer = await ask(session, PODS, {"resourceVersion": "999999"})
        assert status == 504
        assert answer["reason"] == "Timeout"
        assert answer["message"] == "Timeout: Too large resource version: 999999, current: 100"
        assert answer["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


async def test_bookmarks_are_told_to_those_who_ask() -> None:
    async with serving(bookmark_seconds=0.05) as server, asking(server) as session:
        server.put("nodes", {"metadata": {"name": "n"}})
        events = await watch(session, 100, allowWatchBookmarks="true")
        assert events[0] == {
            "type": "BOOKMARK",
            "object": {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": "101"},
                "spec": {"containers": None},
                "status": {},
            },
        }
        assert await watch(session, 100) == []


async def test_refusals_are_status_objects() -> None:
    async with serving(tokens={"right"}) as server, asking(server) as session:
        status, answer = await ask(session, PODS)
        assert (status, answer["reason"], answer["code"]) == (401, "Unauthorized", 401)
        session.headers["Authorization"] = "Bearer right"
        server.allowed.discard("nodes")
        status, answer = await ask(session, "/api/v1/nodes")
        assert (status, answer["reason"]) == (403, "Forbidden")
        assert answer["message"] == (
            'nodes is forbidden: User "system:serviceaccount:monitoring:gpu-exporter" cannot list '
            'resource "nodes" in API group "" at the cluster scope'
        )
        status, answer = await ask(session, "/api/v1/namespaces/demo/pods/nosuch")
        assert (status, answer["message"]) == (404, 'pods "nosuch" not found')
        status, answer = await ask(session, PODS, {"fieldSelector": "spec.odd=1"})
        assert (status, answer["reason"]) == (400, "BadRequest")


async def test_an_unknown_group_is_a_plain_404_and_a_known_one_names_its_versions() -> None:
    async with serving(dra_versions=("v1", "v1beta1")) as server, asking(server) as session:
        _, group = await ask(session, "/apis/resource.k8s.io")
        assert [one["version"] for one in group["versions"]] == ["v1", "v1beta1"]
        server.dra_versions = ()
        async with session.get("/apis/resource.k8s.io") as answer:
            assert (answer.status, answer.content_type) == (404, "text/plain")


async def test_each_version_of_a_slice_has_its_own_form() -> None:
    device = {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}}
    async with serving() as server, asking(server) as session:
        server.put("resourceslices", {"metadata": {"name": "s"}, "spec": {"devices": [device]}})
        forms = {}
        for version in ("v1", "v1beta2", "v1beta1"):
            path = f"/apis/resource.k8s.io/{version}/resourceslices"
            _, answer = await ask(session, path)
            assert answer["apiVersion"] == f"resource.k8s.io/{version}"
            forms[version] = answer["items"][0]["spec"]["devices"]
        assert forms["v1"] == forms["v1beta2"] == [device]
        assert forms["v1beta1"] == [
            {"name": "gpu-0", "basic": {"attributes": {"type": {"string": "gpu"}}}}
        ]


async def test_a_large_list_is_compressed_for_those_who_take_it() -> None:
    async with serving() as server, asking(server) as session:
        server.put("pods", pod("small"))
        async with session.get(PODS, headers={"Accept-Encoding": "gzip"}) as answer:
            assert "Content-Encoding" not in answer.headers
        server.put("pods", pod("large", annotations={"example.com/blob": "x" * 200_000}))
        async with session.get(PODS, headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            assert len((await answer.json())["items"]) == 2
        async with session.get(PODS, headers={"Accept-Encoding": "identity"}) as answer:
            assert "Content-Encoding" not in answer.headers


async def test_while_it_shuts_down_new_connections_are_refused_and_watches_are_silent() -> None:
    async with serving() as server, asking(server) as session:
        query = {"watch": "1", "resourceVersion": "100", **OF_NODE}
        async with session.get(PODS, params=query) as answer:
            await until(lambda: server.open_watches == 1)

            async def meanwhile() -> None:
                server.put("pods", pod("a"))
                with pytest.raises(aiohttp.ClientConnectorError):
                    await ask(session, PODS)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await answer.content.readany()

            await server.restart(while_down=meanwhile)
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        status, listed = await ask(session, PODS)
        assert (status, len(listed["items"])) == (200, 1)


async def test_prepared_answers_are_given_once_and_only_where_they_match() -> None:
    async with serving() as server, asking(server) as session:
        server.fail(Answer.refusal(500, "InternalError", "odd"), verb="list", resource="nodes")
        assert (await ask(session, PODS))[0] == 200
        assert (await ask(session, "/api/v1/nodes"))[0] == 500
        assert (await ask(session, "/api/v1/nodes"))[0] == 200
        server.fail(Answer.page(502), times=9)
        server.mend()
        assert (await ask(session, PODS))[0] == 200
