"""The endpoints over real HTTP: what each answers, in which format, and what it refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from qgpu_exporter.config import ConfigError
from qgpu_exporter.exposition import TEXT, Exposition, Format
from qgpu_exporter.metrics.native import NATIVE
from qgpu_exporter.metrics.service import SERVICE
from qgpu_exporter.model import Snapshot, Status
from qgpu_exporter.web.server import WebSettings, serving
from tests import worlds
from tests.web_views import LOCAL, HeldExposition, SetView, client_of, full_view

GUARD_SECONDS = 10.0
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def test_metrics_are_text_without_an_accept_header() -> None:
    async with (
        client_of(full_view()) as (client, _),
        client.get("/metrics", skip_auto_headers=["Accept"]) as answer,
    ):
        page = await answer.text()
        assert answer.status == 200
        assert answer.headers["Content-Type"] == TEXT_TYPE
        assert answer.headers["Vary"] == "Accept, Accept-Encoding"
    names = {family.name for family in parse_text(page)}
    assert {"node_gpu_core_request", "node_gpu_info", "qgpu_exporter_source_up"} <= names


async def test_prometheus_gets_openmetrics_gzipped() -> None:
    headers = {
        "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        "Accept-Encoding": "gzip",
        "X-Prometheus-Scrape-Timeout-Seconds": "10",
    }
    async with (
        client_of(full_view()) as (client, _),
        client.get("/metrics", headers=headers) as answer,
    ):
        body = await answer.read()
        assert answer.headers["Content-Encoding"] == "gzip"
        assert answer.headers["Content-Type"] == (
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8"
        )
    page = gzip.decompress(body).decode()
    assert page.endswith("# EOF\n")
    families = parse_openmetrics(page)  # type: ignore[no-untyped-call]  # has no annotations
    assert "node_gpu_core_request" in {family.name for family in families}


@pytest.mark.parametrize("accept", ["text/plain;version=abc", ";;;", 'a/b;q="', "text/plain;q=9"])
async def test_a_malformed_accept_header_gets_text(accept: str) -> None:
    async with (
        client_of(full_view()) as (client, _),
        client.get("/metrics", headers={"Accept": accept}) as answer,
    ):
        assert (answer.status, answer.headers["Content-Type"]) == (200, TEXT_TYPE)


async def test_the_name_filter_leaves_only_the_families_asked_for() -> None:
    async with (
        client_of(full_view()) as (client, _),
        client.get("/metrics?name[]=node_gpu_core_request&name[]=qgpu_exporter_build") as answer,
    ):
        page = await answer.text()
    assert [family.name for family in parse_text(page)] == [
        "node_gpu_core_request",
        "qgpu_exporter_build_info",
    ]


async def test_a_stale_snapshot_leaves_the_service_alone_on_the_page() -> None:
    view = full_view()
    view.snapshot = None
    async with client_of(view) as (client, _), client.get("/metrics") as answer:
        page = await answer.text()
        assert answer.status == 200
    names = [family.name for family in parse_text(page)]
    assert names
    assert all(name.startswith("qgpu_exporter_") for name in names)


async def test_scrapes_are_counted() -> None:
    view = full_view()
    async with client_of(view) as (client, _):
        await client.get("/metrics")
        await client.get("/metrics")
    assert view.counts == {"ok": 2}


async def test_one_scrape_more_than_allowed_is_refused() -> None:
    held = HeldExposition()
    view = SetView(worlds.full_snapshot(), worlds.full_status(), held)
    settings = WebSettings(listen_addresses=LOCAL, max_requests=1)
    async with client_of(view, settings) as (client, _):
        first = asyncio.create_task(client.get("/metrics"))
        await asyncio.to_thread(held.entered.wait, GUARD_SECONDS)
        async with client.get("/metrics") as second:
            assert (second.status, second.headers["Retry-After"]) == (503, "1")
        async with client.get("/-/healthy") as healthy:
            assert healthy.status == 200
        held.let.set()
        assert (await first).status == 200
    assert view.counts == {"ok": 1, "rejected": 1}


async def test_a_scrape_is_answered_within_the_scrapers_own_timeout() -> None:
    held = HeldExposition()
    view = SetView(worlds.full_snapshot(), worlds.full_status(), held)
    async with client_of(view) as (client, _):
        headers = {"X-Prometheus-Scrape-Timeout-Seconds": "0.05"}
        async with client.get("/metrics", headers=headers) as late:
            assert (late.status, late.headers["Retry-After"]) == (503, "1")
        held.let.set()
        async with client.get(
            "/metrics", headers=headers | {"X-Prometheus-Scrape-Timeout-Seconds": "nan"}
        ) as answer:
            assert answer.status == 200
    assert view.counts == {"ok": 1, "rejected": 1}


async def test_the_device_part_is_rendered_once_a_snapshot_and_format() -> None:
    read = 0

    class CountedSnapshots(Exposition):
        def device_blocks(self, snapshot: Snapshot, format: Format = TEXT) -> Any:  # noqa: A002 -- overridden
            nonlocal read
            known = format in self._kept and self._kept_of is snapshot
            read += not known
            return super().device_blocks(snapshot, format)

    view = SetView(worlds.full_snapshot(), worlds.full_status(), CountedSnapshots(NATIVE, SERVICE))
    async with client_of(view) as (client, _):
        await asyncio.gather(*(client.get("/metrics") for _ in range(5)))
        assert read == 1
        view.snapshot = worlds.full_snapshot()
        await client.get("/metrics")
        assert read == 2


async def test_probes() -> None:
    view = full_view()
    view.reason = "waiting for the first answer of: nvml"
    async with client_of(view) as (client, _):
        async with client.get("/-/healthy") as answer:
            assert (answer.status, await answer.text()) == (200, "healthy\n")
        async with client.get("/-/ready") as answer:
            assert (answer.status, await answer.text()) == (
                503,
                "waiting for the first answer of: nvml\n",
            )
        view.reason = None
        async with client.get("/-/ready") as answer:
            assert (answer.status, await answer.text()) == (200, "ready\n")


async def test_the_probe_address_serves_the_probes_alone() -> None:
    settings = WebSettings(listen_addresses=LOCAL, probe_addresses=LOCAL)
    async with client_of(full_view(), settings) as (client, server):
        host, port = server.probe_addresses[0]
        base = f"http://{host}:{port}"
        for path, status in (
            ("/-/healthy", 200),
            ("/-/ready", 200),
            ("/metrics", 404),
            ("/", 404),
            ("/caches", 404),
            ("/api/v1/node", 404),
            ("/static/page.js", 404),
        ):
            async with client.get(base + path) as answer:
                assert (path, answer.status) == (path, status)
                assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_caches_are_the_document_laid_out_for_people() -> None:
    async with client_of(full_view()) as (client, _):
        async with client.get("/api/v1/node") as answer:
            compact = await answer.text()
            assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
            assert answer.headers["Cache-Control"] == "no-store"
        async with client.get("/caches") as answer:
            laid_out = await answer.text()
    assert json.loads(compact) == json.loads(laid_out)
    assert laid_out.startswith('{\n  "version": 1,\n')
    assert json.loads(compact)["node"] == "node-1"


async def test_a_telemetry_path_of_ones_own() -> None:
    settings = WebSettings(listen_addresses=LOCAL, telemetry_path="/gpu/metrics")
    async with client_of(full_view(), settings) as (client, _):
        assert (await client.get("/gpu/metrics")).status == 200
        assert (await client.get("/metrics")).status == 404
        assert 'href="gpu/metrics"' in await (await client.get("/")).text()


async def test_static_files_are_asked_for_anew_and_sent_once() -> None:
    async with client_of(full_view()) as (client, _):
        async with client.get("/static/page.js") as answer:
            assert answer.headers["Content-Type"] == "text/javascript; charset=utf-8"
            tag = answer.headers["ETag"]
        async with client.get("/static/page.js", headers={"If-None-Match": tag}) as answer:
            assert answer.status == 304


async def test_head_has_the_headers_and_no_body() -> None:
    async with client_of(full_view()) as (client, _):
        for path in ("/metrics", "/", "/api/v1/node", "/-/healthy", "/static/page.css"):
            async with client.head(path) as answer:
                assert (answer.status, await answer.read()) == (200, b"")
                assert int(answer.headers["Content-Length"]) > 0


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_other_methods_are_refused(method: str) -> None:
    async with (
        client_of(full_view()) as (client, _),
        client.request(method, "/metrics") as answer,
    ):
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/nothing.js",
        "/static/../page.py",
        "/static/%2e%2e/page.py",
        "/static/..%2fpage.py",
        "/static//page.js",
        "/%00",
        "/metrics/",
        "//metrics",
        "/etc/passwd",
        "/<script>alert(1)</script>",
    ],
)
async def test_other_paths_are_not_found_and_not_repeated(path: str) -> None:
    async with client_of(full_view()) as (_, server):
        answer = await raw(
            server.addresses[0],
            f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode(),
        )
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 Not Found")
    assert body == b"not found\n"


async def test_every_answer_has_the_security_headers() -> None:
    async with client_of(full_view()) as (client, _):
        for path in ("/", "/metrics", "/caches", "/static/page.js", "/nowhere", "/-/healthy"):
            async with client.get(path) as answer:
                headers = answer.headers
                assert "default-src 'none'" in headers["Content-Security-Policy"]
                assert "script-src 'self'" in headers["Content-Security-Policy"]
                assert headers["X-Content-Type-Options"] == "nosniff"
                assert headers["X-Frame-Options"] == "deny"
                assert headers["Referrer-Policy"] == "no-referrer"
                assert headers["Server"] == "qgpu-exporter"


async def test_a_fault_of_ours_is_500_without_its_text_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(SetView):
        def status(self) -> Status:
            raise RuntimeError("secret")

    view = Broken(worlds.full_snapshot(), worlds.full_status())
    async with client_of(view) as (client, _):
        for _ in range(3):
            async with client.get("/caches") as answer:
                assert (answer.status, await answer.text()) == (500, "internal error\n")
    assert len([one for one in caplog.records if "a request failed" in one.message]) == 1


async def test_several_addresses_are_served_and_one_that_is_taken_is_named() -> None:
    settings = WebSettings(listen_addresses=(*LOCAL, ("::1", 0), *LOCAL))
    async with client_of(full_view(), settings) as (client, server):
        assert len(set(server.addresses)) == 3
        for url in server.urls:
            async with client.get(f"{url}-/healthy") as answer:
                assert answer.status == 200
        taken = WebSettings(listen_addresses=(server.addresses[0],))
        with pytest.raises(ConfigError, match=r"--web\.listen-address: cannot listen"):
            async with serving(full_view(), taken):
                pass


async def test_all_interfaces_are_both_families_on_one_port() -> None:
    settings = WebSettings(listen_addresses=((None, 0),))
    async with client_of(full_view(), settings) as (client, server):
        assert len(server.addresses) == 1
        port = server.addresses[0][1]
        for host in ("127.0.0.1", "[::1]"):
            async with client.get(f"http://{host}:{port}/-/healthy") as answer:
                assert answer.status == 200


async def test_the_page_without_a_script_accuses_no_card_of_a_silent_driver() -> None:
    snapshot = worlds.full_snapshot()
    assert snapshot.cards is not None
    silent = tuple(replace(one, reading=None, down_reason=None) for one in snapshot.cards)
    view = full_view()
    view.snapshot = replace(snapshot, cards=silent)
    async with client_of(view) as (client, _):
        page = await (await client.get("/")).text()
    assert page.count("<td>no reading</td>") == len(silent)
    assert "down (" not in page


async def test_a_pod_of_any_name_is_text_on_the_page() -> None:
    snapshot = worlds.full_snapshot()
    hostile = '<script>alert("1")</script>'
    assert snapshot.allocation is not None
    held = replace(snapshot.allocation.allocations[0], pod=hostile)
    view = full_view()
    view.snapshot = replace(snapshot, allocation=replace(snapshot.allocation, allocations=(held,)))
    async with client_of(view) as (client, _):
        page = await (await client.get("/")).text()
    assert hostile not in page
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;" in page


async def raw(address: tuple[str, int], data: bytes) -> bytes:
    """Everything that the server says to these bytes until it ends the connection."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(data)
        async with asyncio.timeout(GUARD_SECONDS):
            return await reader.read()
    finally:
        writer.close()
