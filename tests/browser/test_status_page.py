"""The status page in a real browser: what it shows, how it changes, and that all can use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from qgpu_exporter.model import (
    Allocation,
    AllocationResult,
    Card,
    CardRemainder,
    ContainerUsage,
    Memory,
    MigSlice,
    Pod,
    PodList,
    Snapshot,
    UsageResult,
)
from tests import worlds
from tests.browser.browsers import Visit, chromium, visit
from tests.web_views import SetView, full_view

pytestmark = [pytest.mark.xdist_group("chromium"), pytest.mark.asyncio(loop_scope="module")]

Tool = Callable[[str], str]

HOSTILE = '"><img src=x onerror="document.title=1"><script>document.title=1</script>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tool: Tool) -> AsyncIterator[Browser]:
    async with chromium(tool) as running:
        yield running


async def test_the_page_shows_the_node(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        assert await seen.text("#node") == "node-1"
        assert await seen.page.title() == "node-1 GPUs"
        assert await seen.texts(".index") == ["0", "1", "2", "3"]
        assert await seen.texts(".card:nth-child(1) .name") == [
            "team/half main",
            "team/offline main greedy 90 %",
            "team/thief main without allocation",
        ]
        assert await seen.texts(".card:nth-child(1) .amounts") == [
            "40 of 50 %\n10 of 20 GiB",
            "10 % used\n2.0 of 8.0 GiB",
            "5 % used\n1.0 GiB used",
        ]
        assert await seen.text("#version") == "1.2.3 (abcdef0)"
        assert [
            await link.get_attribute("href") for link in await seen.page.locator("nav a").all()
        ] == [
            "metrics",
            "caches",
            "api/v1/node",
        ]
        assert seen.complaints == []
        assert seen.foreign == []


async def test_the_bars_are_cut_by_container(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        bars = seen.page.locator(".card:nth-child(1) .bar")
        assert [await bar.get_attribute("aria-label") for bar in await bars.all()] == [
            "Core: 60 % used, 50 % requested, 5 % unattributed, 30 % free",
            "Memory: 30 GiB used, 28 GiB requested, 17 GiB unattributed, 34 GiB free",
        ]
        memory = bars.nth(1)
        widths = await memory.locator(".segment").evaluate_all(
            "nodes => nodes.map(node => node.style.width)"
        )
        assert widths == ["25%", "10%", "1.25%", "21.25%"]
        fills = await memory.locator(".fill").evaluate_all(
            "nodes => nodes.map(node => node.style.width)"
        )
        assert fills == ["50%", "25%", "100%", "100%"]
        asked = await memory.locator(".request").evaluate_all(
            "nodes => nodes.map(node => node.hidden ? '' : node.style.width)"
        )
        assert asked == ["100%", "100%", "", ""]


async def test_a_mig_card_shows_its_slices_in_their_places(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        slots = seen.page.locator(".card:nth-child(2) .slot")
        assert await slots.all_inner_texts() == [
            "1c.2g.20gb\nfree",
            "1c.2g.20gb\nfree",
            "3g.40gb\nmig",
            "instance 9\nno compute instance",
        ]
        columns = await slots.evaluate_all("nodes => nodes.map(node => node.style.gridColumn)")
        assert columns == ["1 / span 2", "1 / span 2", "5 / span 4", "span 1"]


async def test_state_reason_and_xids_are_told(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        assert await seen.texts(".card:nth-child(1) .chip") == [
            "up",
            "row remap pending",
            "ECC uncorrected 2",
            "XID 94 ×2: restart app, 60 s ago",
            "XID 94 on MIG 1: restart app, 60 s ago",
        ]
        assert await seen.texts(".card:nth-child(4) .chip") == ["down: lost", "XID 79: reboot, now"]
        severities = await seen.page.locator(".card:nth-child(4) .chip").evaluate_all(
            "nodes => nodes.map(node => node.dataset.severity)"
        )
        assert severities == ["bad", "bad"]
        assert await seen.texts(".card:nth-child(4) .reason") == [
            "It does not answer on its bus any more: drain the node, then reset the card or reboot."
        ]
        assert await seen.page.locator(".card:nth-child(1) .reason").is_hidden()
        assert await seen.text("#state") == "live, updated now, cards down: 3, down: podresources"
        assert await seen.page.locator("#announcement").text_content() == (
            "live, cards down: 3, down: podresources."
        )
        assert await seen.texts(".source") == [
            "nvml up, now",
            "podresources down, last answer 60 s ago\ndown",
            "kubernetes no answer yet",
        ]
        assert "unknown card" in await seen.text("#problems")
        assert "team/waiting asks for a share" in await seen.text("#problems")


async def test_a_pod_that_ends_is_gone_at_the_next_poll_and_nothing_else_moves(
    browser: Browser,
) -> None:
    view = full_view()
    async with visit(browser, view) as seen:
        await seen.page.evaluate(
            "document.querySelector('.card').mark = document.querySelector('.holder').mark = 1"
        )
        view.snapshot = without_pod(worlds.full_snapshot(), "offline")
        await seen.until(
            "![...document.querySelectorAll('.pod')].some(p => p.textContent === 'offline')"
        )
        assert await seen.texts(".card:nth-child(1) .pod") == ["half", "thief"]
        assert await seen.page.evaluate(
            "[document.querySelector('.card').mark, document.querySelector('.holder').mark]"
        ) == [1, 1]
        assert seen.complaints == []


async def test_a_pod_shows_its_rows_by_keyboard_and_gives_the_focus_back(browser: Browser) -> None:
    view = full_view()
    async with visit(browser, view) as seen:
        holder = seen.page.locator(".holder").first
        await holder.focus()
        await seen.page.keyboard.press("Enter")
        assert await seen.text("#details-title") == "team/half"
        assert await holder.get_attribute("aria-expanded") == "true"
        rows = await seen.text("#details-body")
        for line in ("Card 0", "main, app, running", "40 % used, 50 % requested", "qgpu", "tier"):
            assert line in rows
        assert await seen.page.evaluate("document.activeElement.id") == "details"
        view.snapshot = without_pod(worlds.full_snapshot(), "half")
        await seen.until("document.querySelector('.gone') !== null")
        view.snapshot = worlds.full_snapshot()
        await seen.until("document.querySelector('.gone') === null")
        await seen.page.keyboard.press("Escape")
        assert await seen.page.locator("#details").is_hidden()


async def test_escape_returns_to_the_pod(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        await seen.page.locator(".holder").nth(1).press("Enter")
        await seen.page.keyboard.press("Escape")
        assert await seen.page.evaluate(
            "document.activeElement === document.querySelectorAll('.holder')[1]"
        )


async def test_a_click_on_a_bar_opens_the_pod_too(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        await seen.page.locator(".card:nth-child(2) .slot").nth(2).click()
        assert await seen.text("#details-title") == "team/mig"
        await seen.page.locator("#details-close").click()
        assert await seen.page.locator("#details").is_hidden()


async def test_the_search_leaves_what_matches(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        await seen.page.keyboard.press("/")
        await seen.page.keyboard.type("WHOLE")
        assert await seen.texts(".index") == ["2"]
        await seen.page.locator("#search").fill("card 3")
        assert await seen.texts(".index") == ["3"]
        await seen.page.locator("#search").fill("nothing like this")
        assert await seen.text("#no-match") == "Nothing matches the search."
        await seen.page.locator("#search").fill("")
        assert await seen.texts(".index") == ["0", "1", "2", "3"]


async def test_what_is_held_is_not_guessed_while_no_source_tells(browser: Browser) -> None:
    snapshot = worlds.full_snapshot()
    unknown = replace(
        snapshot,
        allocation=AllocationResult(complete=False),
        usage=replace(
            snapshot.usage,
            containers=tuple(replace(one, allocated=True) for one in snapshot.usage.containers),
        ),
        allocated={},
    )
    async with visit(browser, SetView(unknown, worlds.full_status())) as seen:
        assert await seen.text("#alert") == (
            "Who holds the cards is not fully known: podresources is down. "
            "kubernetes has not answered yet. down"
        )
        assert "without allocation" not in await seen.text("#cards")
        assert "free" not in "".join(await seen.texts(".slot"))
        assert await seen.texts(".card:nth-child(4) .nobody") == ["Who holds it is not known now."]


async def test_a_driver_that_does_not_answer_accuses_no_card(browser: Browser) -> None:
    snapshot = worlds.full_snapshot()
    assert snapshot.cards is not None
    silent = replace(
        snapshot,
        devices_up=False,
        driver_version=None,
        cards=tuple(replace(one, reading=None, down_reason=None) for one in snapshot.cards),
    )
    status = worlds.full_status()
    sources = (
        replace(status.sources[0], up=False, detail="the driver is not loaded"),
        *status.sources[1:],
    )
    async with visit(browser, SetView(silent, replace(status, sources=sources))) as seen:
        assert await seen.text("#alert") == "The cards are not read now: the driver is not loaded"
        assert await seen.texts(".card:nth-child(1) .chip:first-child") == ["no reading"]
        assert await seen.text("#state") == "cards not read"


async def test_a_stale_snapshot_is_said_and_the_last_one_stays_in_gray(browser: Browser) -> None:
    view = full_view()
    async with visit(browser, view) as seen:
        view.present_status = replace(
            worlds.full_status(),
            snapshot_stale=True,
            snapshot_timestamp_seconds=worlds.NOW - 45,
        )
        view.snapshot = None
        await seen.until("!document.getElementById('alert').hidden")
        stale = "The data is stale: it was last updated 45 s ago."
        assert await seen.text("#alert") == stale
        assert await seen.page.locator("#announcement").text_content() == f"stale. {stale}"
        assert await seen.text("#state") == "stale"
        assert await seen.texts(".index") == ["0", "1", "2", "3"]
        filters = await seen.page.evaluate(
            "getComputedStyle(document.querySelector('main')).filter"
        )
        assert filters == "grayscale(1)"
        view.snapshot, view.present_status = worlds.full_snapshot(), worlds.full_status()
        await seen.until("document.getElementById('alert').hidden")


async def test_an_exporter_that_does_not_answer_is_said(browser: Browser) -> None:
    async with visit(browser, full_view()) as seen:
        await seen.page.route("**/api/v1/node", lambda route: route.abort())
        await seen.until("!document.getElementById('alert').hidden")
        assert (await seen.text("#alert")).startswith("The exporter does not answer since ")
        assert await seen.text("#state") == "unreachable"
        await seen.page.unroute("**/api/v1/node")
        await seen.until("document.getElementById('alert').hidden")


async def test_before_the_first_snapshot_the_page_says_what_is_waited_for(browser: Browser) -> None:
    status = replace(worlds.full_status(), snapshot_timestamp_seconds=None)
    view = SetView(None, status)
    view.reason = "waiting for the first answer of: kubernetes"
    async with visit(browser, view) as seen:
        await seen.until("!document.getElementById('alert').hidden")
        assert await seen.text("#alert") == f"Not ready: {view.reason}."
        assert len(await seen.texts(".source")) == 3
        view.reason, view.snapshot = None, worlds.full_snapshot()
        await seen.until("document.querySelectorAll('.card').length === 4")
        assert seen.complaints == []


async def test_names_of_any_content_are_text(browser: Browser) -> None:
    async with visit(browser, hostile_view()) as seen:
        await seen.page.locator(".holder").first.click()
        assert await seen.text("#details-title") == f"{HOSTILE}/{HOSTILE}"
        assert await seen.page.title() != "1"
        assert await seen.page.locator("main img, main script, .details img").count() == 0
        assert seen.complaints == []
        assert seen.foreign == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(
    browser: Browser, tool: Tool, scheme: Literal["light", "dark"]
) -> None:
    async with visit(browser, full_view(), scheme=scheme) as seen:
        assert await axe(seen, tool) == []
        await seen.page.locator(".holder").first.click()
        assert await axe(seen, tool) == []


async def test_axe_finds_nothing_on_a_phone_with_an_alert(browser: Browser, tool: Tool) -> None:
    view = full_view()
    async with visit(browser, view, width=390, height=844) as seen:
        view.snapshot = replace(worlds.full_snapshot(), devices_up=False)
        await seen.until("!document.getElementById('alert').hidden")
        assert await axe(seen, tool) == []


async def test_dark_where_the_system_is_dark(browser: Browser) -> None:
    async with visit(browser, full_view(), scheme="dark") as seen:
        color = await seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert color == "rgb(18, 22, 27)"


async def test_a_full_node_is_usable_on_a_phone(browser: Browser) -> None:
    async with visit(browser, big_view(), width=390, height=844) as seen:
        assert await seen.page.locator(".card").count() == 16
        assert await seen.page.locator(".slot").count() == 16 * 7
        assert await seen.page.locator(".holder").count() == 128
        assert await seen.page.evaluate("document.documentElement.scrollWidth") == 390
        await seen.page.locator("#search").fill("trainer-77")
        assert await seen.texts(".pod") == ["a-trainer-77"]
        assert await seen.page.evaluate("document.documentElement.scrollWidth") == 390
        assert seen.complaints == []


async def test_without_javascript_the_facts_are_there(browser: Browser) -> None:
    async with visit(browser, full_view(), javascript=False) as seen:
        text = await seen.text("body")
        for part in ("NVIDIA H100 80GB HBM3", "down (lost)", "team/half", "50%", "podresources"):
            assert part in text


async def axe(seen: Visit, tool: Tool) -> list[str]:
    """What axe-core finds, as rule and place."""
    source = await asyncio.to_thread(Path(tool("axe-core")).read_text, encoding="utf-8")
    await seen.page.evaluate(source)
    found: dict[str, Any] = await seen.page.evaluate("axe.run()")
    return [
        f"{one['id']}: {json.dumps(node['target'])} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


def without_pod(snapshot: Snapshot, name: str) -> Snapshot:
    """The snapshot once a pod has ended."""
    assert snapshot.allocation is not None
    assert snapshot.pods is not None
    return replace(
        snapshot,
        allocation=replace(
            snapshot.allocation,
            allocations=tuple(one for one in snapshot.allocation.allocations if one.pod != name),
        ),
        usage=replace(
            snapshot.usage,
            containers=tuple(one for one in snapshot.usage.containers if one.pod != name),
        ),
        pods=replace(
            snapshot.pods, pods=tuple(one for one in snapshot.pods.pods if one.name != name)
        ),
    )


def hostile_view() -> SetView:
    """A node on which every name that a stranger may choose is markup."""
    snapshot = worlds.full_snapshot()
    card = snapshot.cards[0] if snapshot.cards else None
    assert card is not None
    held = Allocation(
        HOSTILE, HOSTILE, HOSTILE, 0, card.identity.uuid, HOSTILE, HOSTILE, HOSTILE, HOSTILE,
        None, 50.0, 20 * worlds.GIB,
    )  # fmt: skip
    pod = Pod(HOSTILE, HOSTILE, HOSTILE, "Running", labels={HOSTILE: HOSTILE})
    return SetView(
        replace(
            snapshot,
            node=HOSTILE,
            cards=(replace(card, identity=replace(card.identity, model=HOSTILE)),),
            allocation=AllocationResult((held,)),
            usage=UsageResult(),
            pods=PodList(worlds.NOW, (pod,)),
        ),
        replace(worlds.full_status(), version=HOSTILE),
    )


def big_view() -> SetView:
    """Sixteen cards of seven slices, and 128 pods: as much as one node has."""
    cards, held, used = [], [], []
    for gpu in range(16):
        slices = tuple(
            MigSlice(
                7 + number, 0, f"MIG-{gpu}-{number}", "1g.10gb", 1, 1,
                placement_start=number,
                memory=Memory(10 * worlds.GIB, 4 * worlds.GIB, 6 * worlds.GIB),
            )
            for number in range(7)
        )  # fmt: skip
        reading = worlds.reading(
            gpu, mig_enabled=True, mig_pending=True, mig_compute_slices=7, mig_slices=slices
        )
        cards.append(
            Card(
                worlds.identity(gpu),
                reading,
                memory_total_bytes=80 * worlds.GIB,
                mig_compute_slices=7,
            )
        )
        for number in range(8):
            name = f"a-trainer-{8 * gpu + number}"
            slot = number % 7
            held.append(
                Allocation(
                    "research-and-development", name, "main", gpu, f"MIG-{gpu}-{slot}", "mig",
                    "nvidia.com/mig-1g.10gb", f"MIG-{gpu}-{slot}", f"uid-{name}",
                    f"{7 + slot}", 100 / 7, 10 * worlds.GIB,
                )
            )  # fmt: skip
            used.append(
                ContainerUsage(gpu, "research-and-development", name, "main", 9.0, 4 * worlds.GIB)
            )
    snapshot = replace(
        worlds.full_snapshot(),
        cards=tuple(cards),
        allocation=AllocationResult(tuple(held)),
        usage=UsageResult(tuple(used), (), tuple(CardRemainder(gpu, 1.0, 0) for gpu in range(16))),
        pods=None,
        allocated={},
    )
    return SetView(snapshot, worlds.full_status())
