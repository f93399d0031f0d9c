"""The page of a run that is made up, of any size: to look at, to measure, and to take the pictures in docs.

python tools/made_up_page.py serve [--peers 300]          show it at 127.0.0.1 until Ctrl+C
python tools/made_up_page.py measure [--peers 300]        bytes a minute for each viewer; CPU with and without any
python tools/made_up_page.py screenshots docs/images      light, dark, on a phone, and with an empty stage
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import httpx

from coordinator.dashboard.history import History
from coordinator.dashboard.run_page import Facts, RunPage
from coordinator.dashboard.server import showing
from coordinator.watch.contributions import Contributions, Given
from coordinator.watch.happenings import make_event
from coordinator.watch.journal import Journal
from coordinator.watch.metrics_file import ValidationLoss, metrics_line
from coordinator.watch.run_watch import LINES_KEPT, RunWatch
from swarm_peer.config import RunManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.wire.records import Assignment, CoordinationRecord

NUM_STAGES = 4
STEPS, STEPS_DONE = 20_000, 7_421
SAMPLES, LENGTH = 256, 1024
NAMES = ("alice", "bob", "chen", "dora", "emeka", "farid", "grete", "hana", "ivan", "jun")
DEVICES = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4070", "Tesla T4", "NVIDIA A10G", "cpu")
CHROMIUM = "/usr/bin/chromium"
# As on the machines that test this: without a sandbox of its own, and silent.
CHROMIUM_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


class MadeUpPage:
    """A run of many peers that nobody runs.

    Attributes:
        watch: what would be seen of it
        page: its page
        advance_s: CPU seconds that it took to make up how the run goes on, where that is measured
    """

    def __init__(self, *, watch: RunWatch, journal: Journal, contributions: Contributions, rng: random.Random):
        self.watch = watch
        self._contributions = contributions
        self._rng = rng
        self.advance_s = 0.0
        self._speeds = {peer.peer_id: peer.samples_per_s for peer in watch.view.peers}
        self.page = RunPage(
            watch=watch,
            journal=journal,
            contributions=contributions,
            history=History(),
            clock=SystemClock(),
            facts=Facts(
                labels=lambda: {peer: f"{given.name.split('-')[0]}@example.org" for peer, given in self._known()},
                join=lambda: "swarm-peer --stage auto --initial-peers swarm-invite-lNk0MTJEM0tvb1dB...",
                begun_s=lambda: time.time() - 5.2 * 86400,
            ),
        )

    def _known(self) -> list[tuple[str, Given]]:
        return [(peer, given) for peer, given in self._contributions.given.items() if given.name.startswith("a")]

    def advance(self) -> None:
        """Have all peers announce themselves anew, and the run make one more step."""
        rng = self._rng
        step = self.watch.optimizer_step + 1
        peers = (
            replace(
                peer,
                samples_per_s=self._speeds[peer.peer_id] * rng.uniform(0.97, 1.03),
                queue=rng.randrange(9),
                optimizer_step=step,
                round_number=step,
            )
            for peer in self.watch.view.peers
        )
        self.watch.view = SwarmView(NUM_STAGES, tuple(peers))
        loss = 2.6 + 7.4 * math.exp(-step / 900) + rng.gauss(0, 0.03)
        validation = ValidationLoss(loss + 0.05, 64) if step % 250 == 0 else None
        stages = (self.watch.view.serving(stage) for stage in range(NUM_STAGES))
        seconds = SAMPLES / max(min(sum(peer.samples_per_s for peer in stage) for stage in stages), 1) / 0.86
        seconds *= 1.5 if 4000 < step < 4300 else rng.uniform(0.97, 1.03)
        self.watch.lines.append(
            metrics_line(
                optimizer_step=step,
                round_number=step - 1,
                loss=loss,
                samples=SAMPLES,
                seconds=seconds,
                sequence_length=LENGTH,
                peers=[len(self.watch.view.serving(stage)) for stage in range(NUM_STAGES)],
                validation=validation,
            )
        )
        del self.watch.lines[:-LINES_KEPT]
        self.page.look()
        self._contributions.look(self.watch, time.time())

    def lose_stage(self, stage: int) -> None:
        """Have all peers of a stage fall silent, but for one that has just come and waits."""
        lost = self.watch.view.in_stage(stage)
        waiting = replace(
            lost[0], state=PeerState.JOINING, note="downloads the snapshot of optimizer step 7400: 2.1 of 3.4 GB"
        )
        others = (peer for peer in self.watch.view.peers if peer.stage != stage)
        self.watch.view = SwarmView(NUM_STAGES, (*others, waiting))
        self.page.look()


def made_up_page(num_peers: int, steps: int = 3, seed: int = 0) -> MadeUpPage:
    """A page with so many peers, after so many steps."""
    rng = random.Random(seed)
    watch = RunWatch(_manifest(), SwarmView(NUM_STAGES, tuple(_peer(number, rng) for number in range(num_peers))))
    mover = next(peer for peer in watch.view.peers if peer.stage != 2)
    reason = "stage 2 is the least, and takes 11% more with it"
    assignment = Assignment(peer=mover.peer_id, announced=1, from_stage=mover.stage, to_stage=2, reason=reason)
    record = CoordinationRecord(
        warrant=b"",
        beat=1,
        assignments=(assignment,),
        reason="a move: the least stage will take 6.2 samples/s",
    )
    watch.observe_coordinator((Term(7, "12D3KooWCoordinatorMadeUp"), record))
    contributions = Contributions()
    now_s = time.time()
    for peer in watch.view.peers:
        hours = rng.uniform(1, 120)
        contributions.given[peer.peer_id] = Given(
            peer.name,
            peer.stage,
            now_s - 3600 * hours,
            hours * 3600 * peer.samples_per_s,
            hours * 3600,
            rng.randrange(4),
        )
    made = MadeUpPage(watch=watch, journal=_journal(watch, now_s), contributions=contributions, rng=rng)
    for _ in range(steps):
        made.advance()
    return made


def _manifest() -> RunManifest:
    return RunManifest.model_validate(
        {
            "name": "gpt2-124m",
            "model": {"config": "none"},
            "stages": {"count": NUM_STAGES},
            "data": {"sequence_length": LENGTH},
            "training": {"steps": STEPS, "global_batch_size": SAMPLES, "microbatch_size": 4},
            "optimizer": {"learning_rate": 0.1},
        }
    )


def _peer(number: int, rng: random.Random) -> PeerView:
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    is_joining = number % 29 == 7
    return PeerView(
        peer_id="12D3KooW" + "".join(rng.choices(alphabet, k=44)),
        stage=number % NUM_STAGES,
        state=PeerState.JOINING if is_joining else PeerState.DRAINING if number % 37 == 11 else PeerState.SERVING,
        samples_per_s=rng.uniform(0.3, 1.2) * (0.8 if number % NUM_STAGES == 2 else 1.0),
        queue=rng.randrange(9),
        optimizer_step=STEPS_DONE,
        movable=True,
        note="downloads its state: 1.2 of 3.4 GB" if is_joining else "",
        incarnation=int((time.time() - rng.uniform(600, 4e5)) * 1000),
        name=f"{NAMES[number % len(NAMES)]}-{number}",
        device=DEVICES[number % len(DEVICES)],
        version="0.1.0",
    )


def _journal(watch: RunWatch, now_s: float) -> Journal:
    journal = Journal()
    journal.begin(lifetime_s=30.0, now_s=now_s - 9000)
    journal.tell("started", f"Run gpt2-124m: {NUM_STAGES} stages, {STEPS} optimizer steps to make.", now_s - 8900)
    journal.look(watch, now_s - 8000)
    journal.tell("checkpoint", "The checkpoint of optimizer step 7400 is saved.", now_s - 900)
    lost, moved = watch.view.peers[1], watch.view.peers[2]
    text = f"{lost.name} (…{lost.peer_id[-8:]}) of stage {lost.stage} has fallen silent without a goodbye."
    reason = "stage 1 was the least"
    journal._add(
        [
            make_event("died", text, now_s - 600, stage=lost.stage, peer=lost.peer_id, name=lost.name),
            make_event(
                "moved",
                f"{moved.name} (…{moved.peer_id[-8:]}) moves from stage 3 to stage {moved.stage}: {reason}.",
                now_s - 300,
                stage=moved.stage,
                peer=moved.peer_id,
                name=moved.name,
            ),
        ]
    )
    return journal


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

        await shoot("page-light", 1180, 980, "light", "run")
        await shoot("page-dark", 1180, 900, "dark", "peers")
        await shoot("page-phone", 390, 844, "light", "stages")
        made.lose_stage(2)
        await shoot("page-empty-stage", 1180, 560, "light", "stages")


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
