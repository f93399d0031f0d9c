"""A peer is killed, and whoever looks at the page sees it within two lifetimes of an announcement."""

import re
import signal
import time
from pathlib import Path

import pytest
import yaml
from programs import COORDINATOR, PEER, Processes, children_of, is_running, wait_for
from swarm import tiny_manifest
from visits import link_in, needs_chromium, visit

pytestmark = [pytest.mark.slow, needs_chromium]

# A coordinator calls peers that are overdue. The page of `dashboard` waits until the last announcement has expired, and
# has seen it up to three seconds late.
PAGES = [("serve", 10.0), ("dashboard", 30.0)]


@pytest.mark.parametrize(("shown_by", "lifetime_s"), PAGES)
async def test_a_killed_peer_is_shown_as_gone_within_two_lifetimes(
    tmp_path: Path, processes: Processes, shown_by: str, lifetime_s: float
) -> None:
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    manifest = tiny_manifest(training={"steps": 100_000}, limits={"announcement_s": lifetime_s})
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    serve = (*COORDINATOR, "serve", str(config), "--output", str(output), "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    processes.start("serve", *serve, "--dashboard", "0")
    wait_for(lambda: link_in(processes.log("serve")) and "swarm-invite-" in processes.log("serve"), "the link")
    invite = re.search(r"swarm-invite-\S+", processes.log("serve"))[0]

    def volunteer(name: str, stage: int):
        return processes.start(name, *PEER, "--stage", str(stage), "--name", name, "--initial-peers", invite)

    volunteer("stays-0", 0)
    volunteer("stays-1", 1)
    victim = volunteer("victim", 1)
    wait_for(lambda: "serving stage=1" in processes.log("victim"), "the service of the peer to kill")
    if shown_by == "dashboard":
        processes.start(shown_by, *COORDINATOR, "dashboard", str(output), "--dashboard", "0")
        wait_for(lambda: link_in(processes.log(shown_by)), "the observer's link")
    async with visit(link_in(processes.log(shown_by))) as here:
        await here.wait("document.querySelectorAll('#peer-table tbody tr .good').length === 3")
        family = children_of(victim.pid)
        victim.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        await here.wait("document.querySelector('#peer-table tr.gone')?.textContent.includes('victim')")
        took_s = time.monotonic() - killed_s
        print(f"{shown_by}: lifetime {lifetime_s:.0f} s, shown as gone after {took_s:.1f} s")
        assert took_s < 2 * lifetime_s
        assert "✕ gone" in await here.text("#peer-table tr.gone")
        assert await here.page.evaluate("document.querySelectorAll('#peer-table tbody tr .good').length") == 2
        assert not any(map(is_running, family)), "nothing of the peer answers in its place"
        assert here.errors == []
