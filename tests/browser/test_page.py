"""The page in a real browser: Debian's chromium, by playwright."""

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import yaml
from made_up_page import CHROMIUM, CHROMIUM_OPTIONS, made_up_page
from programs import COORDINATOR, Processes, children_of, wait_for
from swarm import tiny_manifest

from coordinator.dashboard.server import showing
from swarm_peer.policy.view import SwarmView

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium"),
]
HOSTILE = "<img src=x onerror=alert(1)><b>x</b>"


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
        with anyio.fail_after(60):
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


def cmdline_of(pid: int) -> bytes:
    return (Path("/proc") / str(pid) / "cmdline").read_bytes()


def link_in(said: str) -> str | None:
    found = re.search(r"http://127\S+token=\S+", said)
    return found and found[0]


async def test_a_real_run_is_shown_and_a_death_in_it(tmp_path: Path, processes: Processes) -> None:
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(tiny_manifest(training={"steps": 100_000}).model_dump(mode="json")))
    options = ("--peers", "1,2", "--output", str(output), "--dashboard", "0")
    local = processes.start("local", *COORDINATOR, "local", str(config), *options)
    wait_for(lambda: link_in(processes.log("local")), "the link")
    async with visit(link_in(processes.log("local"))) as here:
        await here.wait("document.querySelectorAll('#peer-table tbody tr .good').length === 3")
        await here.wait("document.querySelectorAll('#loss-chart canvas').length === 1")
        await here.wait("document.getElementById('figures').textContent.includes('Loss')")
        assert "token" not in here.page.url
        assert "0 of 100" not in await here.text("#progress-text")

        (victim,) = (pid for pid in children_of(local.pid) if b"\0--name\x001.0\0" in cmdline_of(pid))
        os.kill(victim, signal.SIGKILL)
        await here.wait("document.querySelector('#peer-table tr.gone')?.textContent.includes('✕ gone')")
        assert "1.0 " in await here.text("#peer-table tr.gone")
        await here.wait("document.getElementById('events').textContent.includes('1.0-2')")
        assert re.search(r"1\.0 \(…\w+\) of stage 1 has fallen silent", await here.text("#events"))

        await here.page.fill("#search", "1.1")
        await here.wait("document.querySelectorAll('#peer-table tbody tr').length === 1")
        await here.page.fill("#search", "")
        await here.page.focus("#peer-table thead button")
        await here.page.keyboard.press("Enter")
        await here.wait("document.querySelector('#peer-table th').ariaSort === 'ascending'")

        await here.page.set_viewport_size({"width": 390, "height": 800})
        assert await here.overflow() <= 0
        assert here.errors == []
        assert here.hosts == {"http://127.0.0.1"}

        options = ("dashboard", str(output), "--dashboard", "0")
        processes.start("observer", *COORDINATOR, *options)
        wait_for(lambda: link_in(processes.log("observer")), "the observer's link")
        async with visit(link_in(processes.log("observer"))) as there:
            await there.wait("document.querySelectorAll('#peer-table tbody tr .good').length >= 2")
            assert "fallen silent" in await there.text("#events"), "the folder tells of what was before"
            assert there.errors == []
    local.send_signal(signal.SIGINT)
    assert local.wait(60) == 130
    assert "Traceback" not in processes.log("local")


@pytest.mark.parametrize("width", [390, 900, 1200])
async def test_hostile_words_are_shown_as_words(width: int) -> None:
    made = made_up_page(num_peers=40)
    peers = [
        replace(peer, name=HOSTILE[:32], note=HOSTILE + "\u202e" * 40 + "W" * 300, device=HOSTILE)
        for peer in made.watch.view.peers
    ]
    made.watch.view = SwarmView(made.watch.view.num_stages, tuple(peers))
    links: list[str] = []
    async with showing(made.page, ("127.0.0.1", 0), links.append), visit(link_in(links[0]), width) as here:
        await here.wait("document.querySelectorAll('#peer-table tbody tr').length >= 40")
        assert HOSTILE in await here.text("#peer-table")
        assert await here.page.evaluate("document.querySelectorAll('main img, main b').length") == 0
        assert await here.overflow() <= 0
        assert here.errors == []


async def test_a_page_that_has_lost_its_server_says_so_and_comes_back(tmp_path: Path) -> None:
    made = made_up_page(num_peers=4)
    links: list[str] = []
    async with visit("about:blank") as here:
        async with showing(made.page, ("127.0.0.1", 0), links.append, folder=tmp_path):
            url = link_in(links[0])
            await here.page.goto(url)
            await here.wait("document.querySelectorAll('#peer-table tbody tr').length === 4")
        await here.wait("!document.getElementById('banner').hidden")
        assert "tries again by itself" in await here.text("#banner")
        port = int(re.search(r":(\d+)/", url)[1])
        async with showing(made.page, ("127.0.0.1", port), links.append, folder=tmp_path):
            assert links[1] == links[0]
            await here.wait("document.getElementById('banner').hidden")
