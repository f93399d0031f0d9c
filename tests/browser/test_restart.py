"""The page of a run whose coordinator is killed and started again, and a page that lives without one.

At last a stage loses its only peer, and has another one.
"""

import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import yaml
from forks import ForkedProcess
from programs import COORDINATOR, PEER, Processes, children_of, is_running, wait_for
from swarm import tiny_manifest
from visits import Visit, link_in, needs_chromium, visit

from coordinator.watch.journal import read_events

pytestmark = [pytest.mark.slow, needs_chromium]

STEP = "Number(document.title.split('/')[0])"


async def has_made_steps(here: Visit, more: int) -> None:
    before = await here.page.evaluate(STEP)
    await here.wait(f"{STEP} >= {before + more}")


async def test_the_coordinator_is_killed_and_started_again_and_a_stage_is_emptied(
    tmp_path: Path, processes: Processes
) -> None:
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(tiny_manifest(training={"steps": 100_000}).model_dump(mode="json")))
    serve = (*COORDINATOR, "serve", str(config), "--output", str(output), "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    first = processes.start("first", *serve, "--dashboard", "0")
    wait_for(lambda: link_in(processes.log("first")) and "swarm-invite-" in processes.log("first"), "the link")
    link, invite = link_in(processes.log("first")), re.search(r"swarm-invite-\S+", processes.log("first"))[0]

    def volunteer(name: str, stage: int, invite: str = invite) -> ForkedProcess:
        options = ("--stage", str(stage), "--name", name, "--initial-peers", invite)
        return processes.start(name, *PEER, *options)

    volunteers = [volunteer("vol-0", 0), volunteer("vol-1", 1)]

    async with visit(link) as here:
        await here.wait("document.querySelectorAll('#peer-table tbody tr .good').length === 2")
        await here.wait(f"{STEP} >= 2")
        await here.wait(f"document.getElementById('join-line').textContent.length > {len(invite) + 60}")
        assert (await here.text("#join-line")).split()[-1] == (output / "invite").read_text().strip(), "with peers"
        wait_for(lambda: (output / "peers").exists(), "the addresses of peers in the folder")

        family = children_of(first.pid)
        first.kill()
        await here.wait("!document.getElementById('banner').hidden")
        assert "the run itself may well go on" in await here.text("#banner")
        wait_for(lambda: not any(map(is_running, family)), "the end of the coordinator's processes", 20)

        # By the invite and the address of a peer, as anybody on any machine has it.
        address = re.search(r"peer_started peer=\S+ addresses=([^\s,]+)", processes.log("vol-1"))[1]
        options = ("--initial-peers", invite, address, "--dashboard", "0")
        observer = processes.start("observer", *COORDINATOR, "dashboard", *options)
        wait_for(lambda: link_in(processes.log("observer")), "the observer's link")
        async with visit(link_in(processes.log("observer"))) as there:
            await there.wait("document.querySelectorAll('#peer-table tbody tr .good').length === 2")
            await there.wait("document.getElementById('decision').textContent.includes('No coordinator is seen')")
            await there.wait("document.getElementById('events').textContent.includes('has fallen silent')")
            await has_made_steps(there, 2)
            assert not await there.page.is_visible("#join"), "an observer does not know whom it may invite"
            assert not await here.page.is_hidden("#banner"), "nobody answers at the old link yet"

            port = re.search(r":(\d+)/", link)[1]
            processes.start("second", *serve, "--dashboard", port)
            await here.wait("document.getElementById('banner').hidden")
            assert link_in(processes.log("second")) == link
            await has_made_steps(here, 2)
            await here.wait("document.getElementById('events').textContent.includes('begins to write')")
            await there.wait("document.getElementById('decision').textContent.includes('last decision')")
            assert there.errors == []

        # What was before is still there, once; and nobody who was there all along has come or gone.
        told = read_events(output)
        kinds = Counter(event["kind"] for event in told if event["kind"] not in ("coordinator", "checkpoint"))
        assert kinds == {"started": 1, "joined": 2}
        coordinators = [event["text"] for event in told if event["kind"] == "coordinator"]
        assert "directs the run from now on" in coordinators[0]
        assert coordinators[1] == "A coordinator begins to write this journal again."
        assert len(coordinators) <= 3, "a term is told once"
        assert (await here.text("#events")).count("+ joined") == 2

        volunteers[1].kill()
        await here.wait("document.querySelector('#stage-table tr.empty')?.textContent.includes('no peer serves it')")
        assert "Waiting: stage 1 has no serving peer" in await here.text("#run-state")
        assert "waits for stage 1" in await here.text("#stage-table tbody tr:first-child")
        await here.wait("document.getElementById('events').textContent.includes('has lost its last serving peer')")
        # By the line that the page has now: the coordinator listens elsewhere.
        volunteer("vol-2", 1, (await here.text("#join-line")).split()[-1])
        await here.wait("!document.querySelector('#stage-table tr.empty')")
        await here.wait("document.getElementById('events').textContent.includes('Stage 1 is served again')")
        await has_made_steps(here, 2)
        assert all("ERR_" in error for error in here.errors), "but for those of connecting in vain"
    observer.send_signal(signal.SIGINT)
    assert observer.wait(30) == 0
    assert "Traceback" not in processes.log("observer") + processes.log("second")
