"""Visits to the page in a real browser: Debian's chromium, by playwright."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from made_up_page import CHROMIUM, CHROMIUM_OPTIONS

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
needs_chromium = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium"
)

# For what takes a few seconds where a machine has nothing else to do.
WAIT_S = 150.0


class Visit:
    """A page in a browser, and all that went wrong in it."""

    def __init__(self, page):
        self.page = page
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.hosts.add(re.sub(r"^(\w+://[^/:]+).*", r"\1", request.url)))

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def wait(self, expression: str) -> None:
        # Not by wait_for_function, which evaluates strings in the page: its policy forbids that.
        with anyio.fail_after(WAIT_S):
            while not await self.page.evaluate(expression):  # noqa: ASYNC110 (it comes true in another process)
                await anyio.sleep(0.05)

    async def overflow(self) -> float:
        """Pixels by which the page is too wide."""
        return await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")


@asynccontextmanager
async def visit(url: str, width: int = 1200) -> AsyncIterator[Visit]:
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_OPTIONS))
        page = await browser.new_page(viewport={"width": width, "height": 800})
        visited = Visit(page)
        await page.goto(url)
        yield visited
        await browser.close()


def link_in(said: str) -> str | None:
    found = re.search(r"http://127\S+token=\S+", said)
    return found and found[0]
