"""The page of a run that is made up, of any size: to look at, to measure, and to take the pictures in docs.

python tools/made_up_page.py serve [--peers 300]          show it at 127.0.0.1 until Ctrl+C
python tools/made_up_page.py measure [--peers 300]        bytes a minute for each viewer; CPU with and without any
python tools/made_up_page.py screenshots docs/images      light, dark, on a phone, and with an empty stage
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
from made_up_run import STEPS_DONE, MadeUpPage, made_up_page

from coordinator.dashboard.server import showing
from swarm_peer.runtime.host.processes import spare_imports

CHROMIUM = "/usr/bin/chromium"
# As on the machines that test this: without a sandbox of its own, and silent.
CHROMIUM_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


def serve(num_peers: int) -> None:
    """Show the page, which changes every three seconds, until Ctrl+C."""

    async def show() -> None:
        made = made_up_page(num_peers, steps=600)
        async with showing(made.page, ("127.0.0.1", 8470), print):
            while True:
                await anyio.sleep(3)
                made.advance()

    anyio.run(show)


def measure(num_peers: int, seconds: float = 60.0, viewers: int = 50) -> None:
    """Print what a minute of the page costs, in bytes for each viewer and in CPU, with viewers and without."""
    spare_imports()  # as the coordinator does
    anyio.run(_measure, num_peers, seconds, viewers)


async def _measure(num_peers: int, seconds: float, viewers: int) -> None:
    made = made_up_page(num_peers, steps=600)
    links: list[str] = []
    async with showing(made.page, ("127.0.0.1", 0), links.append):
        url = links[0].split()[-1]
        before = _cpu_s()
        await anyio.sleep(seconds / 3)
        print(f"without viewers: {(_cpu_s() - before) / (seconds / 3):.2%} of a core", flush=True)
        late_s: list[float] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_announce, made)
            tasks.start_soon(_feel, late_s)
            before = _cpu_s()
            command = [sys.executable, __file__, "view", url, str(viewers), str(seconds)]
            with _turns(made) as turns_s:
                num_bytes = int((await anyio.run_process(command, stderr=None)).stdout)
            cpu = (_cpu_s() - before) / seconds
            tasks.cancel_scope.cancel()
    print(f"{num_peers} peers that all announce themselves anew every 7.5 s, {viewers} viewers:")
    print(f"  {num_bytes / seconds * 60 / 1000:.0f} kB a minute for each viewer, the whole state included")
    longest = ", ".join(f"{turn_s * 1000:.1f}" for turn_s in sorted(turns_s)[:-6:-1])
    print(f"  {cpu:.1%} of a core; the event loop's longest turns: {longest} ms of CPU")
    print(f"  it woke up {max(late_s) * 1000:.0f} ms late at most, which includes what else this machine does")
    print(f"  whole state: {len(json.dumps(made.page.state())) / 1000:.0f} kB")


def view(url: str, viewers: int, seconds: float) -> None:
    """Look at the page so many times at once, and print the most bytes that one of these views has got."""
    received: list[int] = []

    async def look() -> None:
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits()) as client, anyio.create_task_group() as tasks:
            await client.get(url)
            for _ in range(viewers):
                tasks.start_soon(_view, client, url, received)
            await anyio.sleep(seconds)
            tasks.cancel_scope.cancel()

    anyio.run(look)
    print(max(received))


@contextmanager
def _turns(made: MadeUpPage) -> Iterator[list[float]]:
    """The CPU seconds of each turn of the event loop while the context is open, but for what makes up the run.

    Nothing else runs during a turn. Unlike lateness, this does not depend on what else the machine does.
    """
    turns_s: list[float] = []
    loop: Any = asyncio.get_running_loop()
    turn = loop._run_once

    def measured() -> None:
        begun_s = time.thread_time() - made.advance_s
        turn()
        turns_s.append(time.thread_time() - made.advance_s - begun_s)

    loop._run_once = measured
    try:
        yield turns_s
    finally:
        loop._run_once = turn


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _announce(made: MadeUpPage) -> None:
    while True:
        await anyio.sleep(7.5)
        begun_s = time.thread_time()
        made.advance()
        made.advance_s += time.thread_time() - begun_s


async def _feel(late_s: list[float]) -> None:
    while True:
        before = time.monotonic()
        await anyio.sleep(0.01)
        late_s.append(time.monotonic() - before - 0.01)


async def _view(client: httpx.AsyncClient, url: str, received: list[int]) -> None:
    at = len(received)
    received.append(0)
    async with client.stream("GET", url.split("?")[0] + "events") as answer:
        async for chunk in answer.aiter_raw():
            received[at] += len(chunk)


def screenshots(folder: Path) -> None:
    """Take the pictures, by a Chromium that is installed already."""
    folder.mkdir(parents=True, exist_ok=True)
    anyio.run(_screenshots, folder)


async def _screenshots(folder: Path) -> None:
    made = made_up_page(24, steps=STEPS_DONE)
    links: list[str] = []
    async with showing(made.page, ("127.0.0.1", 0), links.append):
        url = links[0].split()[-1]

        async def shoot(name: str, width: int, height: int, scheme: str, place: str) -> None:
            command = [sys.executable, __file__, "shoot", url, str(folder / f"{name}.png")]
            await anyio.run_process([*command, str(width), str(height), scheme, place], stdout=None, stderr=None)

        await shoot("page-light", 1180, 1112, "light", "run")
        await shoot("page-dark", 1180, 900, "dark", "peers")
        await shoot("page-phone", 390, 844, "light", "stages")
        made.lose_stage(2)
        await shoot("page-empty-stage", 1180, 640, "light", "stages")


def shoot(url: str, path: str, width: int, height: int, scheme: str, place: str) -> None:
    """Take one picture, from the section on that the place names."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with ExitStack() as opened:
        playwright = opened.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_OPTIONS))
        opened.callback(browser.close)
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=cast(Any, scheme))
        page.goto(url)
        page.wait_for_selector("#peer-table tbody tr")
        page.wait_for_selector("#loss-chart canvas")
        if place != "run":
            page.evaluate("(id) => document.getElementById(id).scrollIntoView()", place)
        page.screenshot(path=path)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(path, optimize=True)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(work: Callable[..., None], *names: str) -> argparse.ArgumentParser:
        made = commands.add_parser(work.__name__, help=work.__doc__)
        made.set_defaults(work=lambda options: work(*(getattr(options, name) for name in names)))
        return made

    for each in (serve, measure):
        command(each, "peers").add_argument("--peers", type=int, default=300)
    command(screenshots, "folder").add_argument("folder", type=Path)
    of_many = command(view, "url", "viewers", "seconds")
    for name, kind in {"url": str, "viewers": int, "seconds": float}.items():
        of_many.add_argument(name, type=kind)
    of_one = command(shoot, "url", "path", "width", "height", "scheme", "place")
    for name, kind in {"url": str, "path": str, "width": int, "height": int, "scheme": str, "place": str}.items():
        of_one.add_argument(name, type=kind)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
