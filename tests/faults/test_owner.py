"""Owners have their machines back for a while: no sample is lost, nothing is held, and peers come back soon."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import anyio.to_thread
import pytest
from swarm import LiveSwarm, run_swarm
from test_comings_and_goings import check_equals_one_process, manifest_of

from swarm_peer.commands.pause import pause, resume

# On loopback, from the owner's word to a stage that is served again.
BACK_S = 5.0
# A handover takes the end of the microbatches inside, and some calls.
AWAY_S = 10.0


def test_paused_peers_lose_nothing_hold_nothing_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    manifest = manifest_of(60, stages={"count": 2, "peers_to_start": 2})
    took: dict[str, list[float]] = {"away": [], "back": []}

    async def script(swarm: LiveSwarm) -> None:
        for name in ("a.0", "b.1"):
            swarm.start(int(name[-1]), name, "stock")
            await swarm.until(lambda name=name: "serving stage=" in swarm.log(name), f"{name} serves")
        for name in ("b.1", "a.0", "b.1"):
            await swarm.reached(swarm.optimizer_step + 3)
            before, num_served = swarm.optimizer_step, swarm.log(name).count("serving stage=")
            began_s = time.monotonic()
            await anyio.to_thread.run_sync(pause, name)
            took["away"].append(time.monotonic() - began_s)
            await swarm.until(
                lambda name=name: (
                    [
                        (peer.stage, peer.note)
                        for peer in swarm.service.watch.view.peers
                        if (peer.name, peer.state.value) == (name, "paused")
                    ]
                    == [(int(name[-1]), "paused by its owner")]
                ),
                "the coordinator sees who is paused",
            )
            await swarm.reached(before + 4)
            began_s = time.monotonic()
            await anyio.to_thread.run_sync(resume, name)
            await swarm.until(
                lambda name=name, num=num_served: swarm.log(name).count("serving stage=") > num, f"{name} is back"
            )
            took["back"].append(time.monotonic() - began_s)
        # It ends while it is paused, as others end.
        await anyio.to_thread.run_sync(pause, "a.0")
        await swarm.leave("a.0")

    run = run_swarm(manifest, [2, 2], tmp_path, script=script)
    check_equals_one_process(run, manifest)
    assert "samples_given_up" not in run.logs()
    assert "samples_lost" not in run.logs()
    assert "work_not_given" not in run.logs()
    assert run.logs().count("paused stage=") == 4
    assert [len(states) for states in run.states] == [2, 3]
    assert max(took["away"]) < AWAY_S
    assert max(took["back"]) < BACK_S
    stock = [json.loads(fired.split(" ", 1)[1]) for fired in run.fired]
    assert len(stock) == 2
    assert all(entry["trainers"] == 0 for entry in stock), "models, optimizers and gradients are gone"
    said = capsys.readouterr().out
    print({what: [round(each, 2) for each in seconds] for what, seconds in took.items()}, stock)
    assert said.count("its work is handed over, and its memory is free") == 4
    assert len(re.findall(r"b\.1 \(….{8}\) of run test takes part again", said)) == 2
