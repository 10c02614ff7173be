"""A headless Chromium on the status page of a view, with everything that it complained of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from playwright.async_api import Browser, Page, Request, async_playwright

from qgpu_exporter.web.server import Server, WebSettings, serving
from tests import worlds
from tests.web_views import LOCAL, SetView

GUARD_SECONDS = 10.0
"""Only against a hang: what is waited for must come, however slow the machine."""

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Visit:
    """A page that is open, and what happened on it."""

    page: Page
    server: Server
    complaints: list[str] = field(default_factory=list)
    """Console messages of level error or warning, and errors that nobody caught."""
    foreign: list[str] = field(default_factory=list)
    """Requests to anywhere but the exporter."""

    async def text(self, selector: str) -> str:
        """The visible text of the first element."""
        return await self.page.locator(selector).first.inner_text()

    async def texts(self, selector: str) -> list[str]:
        """The visible texts of all elements."""
        return await self.page.locator(selector).all_inner_texts()

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true.

        Asked from outside: the page's own policy forbids Playwright to evaluate text inside.
        """
        async with asyncio.timeout(GUARD_SECONDS):
            while not await self.page.evaluate(expression):
                await self.page.wait_for_timeout(50)


@asynccontextmanager
async def chromium(tool: Callable[[str], str]) -> AsyncIterator[Browser]:
    """A browser with an empty profile, which each visit has a context of its own in."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=tool("chromium"), args=list(FLAGS), headless=True
        )
        yield browser
        await browser.close()


@asynccontextmanager
async def visit(
    browser: Browser,
    view: SetView,
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 900,
    javascript: bool = True,
) -> AsyncIterator[Visit]:
    """The status page of `view`."""
    settings = WebSettings(listen_addresses=LOCAL)
    async with serving(view, settings, wall_clock=lambda: worlds.NOW) as server:
        context = await browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": height},
            java_script_enabled=javascript,
        )
        context.set_default_timeout(1000 * GUARD_SECONDS)
        page = await context.new_page()
        made = Visit(page, server)
        _watch(made)
        await page.goto(server.urls[0])
        if javascript and view.snapshot is not None:
            await page.wait_for_selector(".card")
        yield made
        await context.close()


def _watch(made: Visit) -> None:
    origin = made.server.urls[0]

    def requested(request: Request) -> None:
        if not request.url.startswith(origin):
            made.foreign.append(request.url)

    made.page.on("request", requested)
    made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
    made.page.on(
        "console",
        lambda message: (
            made.complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
