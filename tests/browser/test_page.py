"""The page in a real browser: Debian's chromium, by playwright."""

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from made_up_run import made_up_page
from programs import COORDINATOR, Processes, children_of, cmdline_of, wait_for
from swarm import tiny_manifest
from visits import Visit, link_in, needs_chromium, visit

from coordinator.dashboard.run_page import RunPage
from coordinator.dashboard.server import showing
from swarm_peer.config import RunManifest
from swarm_peer.policy.standstill import find_standstill
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import SwarmView

pytestmark = [pytest.mark.slow, needs_chromium]
HOSTILE = "<img src=x onerror=alert(1)><b>x</b>"


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
        assert not (await here.text("#progress-text")).startswith("step 0 ")
        await here.wait("/\\d+%/.test(document.querySelector('#peer-table td[data-label=Busy]').textContent)")
        await here.wait("/\\d+%/.test(document.querySelector('#stage-table td[data-label=Waits]').textContent)")
        assert await here.page.is_hidden("#to-join"), "a run on one machine has no line for others"

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


@pytest.mark.parametrize("width", [390, 1200])
async def test_a_run_of_adapters_says_what_it_trains_and_how_much_is_learnt(width: int) -> None:
    made = made_up_page(num_peers=4)
    content = made.watch.manifest.model_dump()
    content["model"] |= {"pretrained": f"someone/{'W' * 90}", "adapter": {"rank": 16}, "base": "nf4"}
    content["data"] |= {"dataset": "someone/chats", "format": "messages"}
    made.watch.manifest = RunManifest.model_validate(content)
    made.watch.observe_work(8, 2 * content["data"]["sequence_length"])
    links: list[str] = []
    async with showing(made.page, ("127.0.0.1", 0), links.append), visit(link_in(links[0]), width) as here:
        await here.wait(
            "document.getElementById('trains').textContent.startsWith('Trains adapters of rank 16 on some')"
        )
        assert (await here.text("#trains")).endswith("W, base in nf4.")
        assert "Targets of a step, about" in await here.text("#figures")
        assert await here.overflow() <= 0
        assert here.errors == []


@pytest.mark.parametrize("width", [390, 1200])
async def test_a_run_that_stands_still_says_why_in_the_words_of_a_peer(width: int) -> None:
    made = made_up_page(num_peers=4)
    sick = {"trouble": Trouble.FAILING, "trouble_since_s": 0.0, "note": HOSTILE + "W" * 300, "name": "anna"}
    peers = [replace(peer, **(sick if peer.stage == 0 else {})) for peer in made.watch.view.peers]
    made.watch.view, made.watch.seen_s = SwarmView(made.watch.view.num_stages, tuple(peers)), 300.0
    made.watch.standstill = find_standstill(made.watch.view, 300.0)
    links: list[str] = []
    async with showing(made.page, ("127.0.0.1", 0), links.append), visit(link_in(links[0]), width) as here:
        await here.wait("document.querySelector('#run-state.bad')?.textContent.startsWith('! The run stands still')")
        text = await here.text("#run-state")
        assert text.startswith("! The run stands still, for 5 min: stage 0 brings no microbatch through: anna (…")
        assert HOSTILE in text
        assert HOSTILE in await here.text("#peer-table"), "and beside the peer"
        assert await here.page.evaluate("document.querySelectorAll('main img, main b').length") == 0
        assert await here.overflow() <= 0
        assert here.errors == []


async def test_words_explain_themselves_to_pointer_and_keyboard() -> None:
    made = made_up_page(num_peers=4)
    links: list[str] = []
    async with showing(made.page, ("127.0.0.1", 0), links.append), visit(link_in(links[0])) as here:
        await here.wait("document.querySelectorAll('#peer-table tbody tr').length === 4")
        unknown = "word => !document.getElementById(`word-${word}`)"
        words = "[...document.querySelectorAll('[data-word]')].map(element => element.dataset.word)"
        assert await here.page.evaluate(f"{words}.length") > 20
        assert await here.page.evaluate(f"{words}.filter({unknown})") == []
        assert await here.page.is_hidden("#tip")
        await here.page.hover("#stage-table th:nth-child(5)")
        assert "the speeds that a stage's serving peers announce" in await here.text("#tip")
        await here.page.mouse.move(5, 5)
        assert await here.page.is_hidden("#tip")
        await here.page.focus("#peer-table th:nth-child(9) button")
        assert "another one that needed it more" in await here.text("#tip")
        assert await here.page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
        made.advance()
        await here.wait("document.getElementById('progress-text').textContent.includes('step 4 ')")
        assert not await here.page.is_hidden("#tip"), "an update takes nothing away"
        await here.page.keyboard.press("Escape")
        assert await here.page.is_hidden("#tip")
        await here.page.set_viewport_size({"width": 390, "height": 800})
        await here.page.focus("#figures [data-word=busy]")
        assert "how much of its time a device computes" in await here.text("#tip")
        assert await here.overflow() <= 0
        assert here.errors == []


@asynccontextmanager
async def shown(here: Visit, page: RunPage, folder: Path, port: int = 0) -> AsyncIterator[str]:
    """Show a page as a program does, in the browser where no page is open yet; yields the link."""
    links: list[str] = []
    async with showing(page, ("127.0.0.1", port), links.append, folder=folder):
        url = link_in(links[0])
        if not port:
            await here.page.goto(url)
            await here.wait("document.querySelectorAll('#peer-table tbody tr').length === 4")
        yield url


async def test_a_page_that_has_lost_its_server_says_so_and_comes_back(tmp_path: Path) -> None:
    made = made_up_page(num_peers=4)
    async with visit("about:blank") as here:
        async with shown(here, made.page, tmp_path) as url:
            pass
        await here.wait("!document.getElementById('banner').hidden")
        assert "tries again by itself" in await here.text("#banner")
        async with shown(here, made.page, tmp_path, port_in(url)) as again:
            assert again == url
            await here.wait("document.getElementById('banner').hidden")


async def test_a_page_whose_server_stands_still_says_so_and_comes_back(tmp_path: Path) -> None:
    """No request fails then, and none is answered."""
    made = made_up_page(num_peers=4)
    async with visit("about:blank") as here:
        async with shown(here, made.page, tmp_path) as url:
            await here.page.route("**/*", lambda route: None)
        await here.wait("!document.getElementById('banner').hidden")
        assert "does not answer" in await here.text("#banner")
        async with shown(here, made.page, tmp_path, port_in(url)):
            await here.page.unroute("**/*")
            await here.wait("document.getElementById('banner').hidden")


def port_in(url: str) -> int:
    return int(re.search(r":(\d+)/", url)[1])
