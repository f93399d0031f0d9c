"""Owners have their machines back for a while: no sample is lost, nothing is held, and peers come back soon."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import pytest
from swarm import LLAMA, LiveSwarm, forked_peer, run_swarm, without_data_dir
from test_comings_and_goings import check_equals_one_process, manifest_of
from tiny_adapters import write_base

from coordinator.run.local_peers import Launch, Process
from coordinator.run.shared_base import with_base
from swarm_peer.commands.pause import pause, resume
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.host.identities import KeptFile, state_folder
from swarm_peer.runtime.owner import DailyCount
from swarm_peer.wire.identity import Identity

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
    assert said.count("paused by its owner; the device's memory is free") == 4
    assert len(re.findall(r"b\.1 \(….{8}\) of run test takes part again", said)) == 2


def with_options(records: Path, fault: str) -> Launch:
    """How peers are started whose owners give them options, behind their fault."""
    fault, *more = fault.split(" ")
    launch = forked_peer(records, fault)

    def start(options: Sequence[str], log_file: Path, threads: int) -> Process:
        return launch([*options, *more], log_file, threads)

    return start


def test_a_peer_with_few_bytes_a_day_leaves_in_time_and_comes_back_at_midnight(tmp_path: Path) -> None:
    manifest = manifest_of(100, stages={"count": 2, "peers_to_start": 2})
    megabytes, midnight_s = 3, 45
    options = f"--max-upload-gb-per-day {megabytes / 1000}"
    kept: list[DailyCount] = []

    def count() -> DailyCount:
        peer_id = Identity.load_or_create(tmp_path / "identities" / "thrifty").peer_id
        return DailyCount(KeptFile(state_folder() / f"sent-{peer_id}"))

    async def script(swarm: LiveSwarm) -> None:
        swarm.start(1, "thrifty", f"midnight:1:{midnight_s} {options}")
        await swarm.until(lambda: "serving stage=1" in swarm.log("thrifty"), "it serves")
        await swarm.until(lambda: "paused stage=1 reason=paused until 00:00" in swarm.log("thrifty"), "it has left")
        await swarm.until(lambda: count().spent_day == count().day != "", "its count is kept")
        kept.append(count())
        # Another process of the same peer, on the same day: it does not serve at all.
        swarm.kill("thrifty")
        shutil.copy(tmp_path / "identities" / "thrifty", tmp_path / "identities" / "again")
        swarm.start(1, "again", f"midnight:1:20 {options}")
        await swarm.until(lambda: "paused stage=1" in swarm.log("again"), "it is paused from the beginning")
        assert "serving stage=" not in swarm.log("again")
        await swarm.until(lambda: "serving stage=1" in swarm.log("again"), "it is back after midnight")

    run = run_swarm(manifest, [2, 2], tmp_path, script=script, launch=with_options)
    check_equals_one_process(run, manifest)
    assert "samples_lost" not in run.logs()
    [count_of_day] = kept
    print(f"sent {count_of_day.sent_bytes} bytes of {megabytes} MB")
    assert 0.4 * megabytes * 1e6 < count_of_day.sent_bytes < megabytes * 1e6


def test_a_run_waits_for_the_last_peer_of_a_stage_while_its_owner_has_it(tmp_path: Path) -> None:
    """It goes on from a snapshot then; nothing counts twice."""
    manifest = manifest_of(20, recovery={"snapshot_every": 5})

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(7)
        await anyio.to_thread.run_sync(pause, "1.0")
        await swarm.until(lambda: swarm.service.watch.view.empty_stages() == [1], "the stage is seen to be empty")
        await anyio.to_thread.run_sync(resume, "1.0")
        await swarm.until(lambda: swarm.log("1.0").count("serving stage=1") == 2, "it is back")

    run = run_swarm(manifest, [1, 1], tmp_path, script=script)
    check_equals_one_process(run, manifest)
    assert "leaves_alone stage=1" in run.logs()
    assert "run_rewound" in run.logs()


def test_a_peer_that_comes_back_does_not_download_its_base_again(tmp_path: Path) -> None:
    written = write_base(LLAMA, tmp_path / "base")
    manifest = manifest_of(
        30,
        model={"config": LLAMA, "pretrained": str(written), "adapter": {"rank": 4, "alpha": 8}, "base": "nf4"},
        data={"foreign_tokenizer": True},
        stages={"count": 2, "peers_to_start": 2},
    )
    resolved, base = with_base(ResolvedManifest.of(manifest), None)

    async def script(swarm: LiveSwarm) -> None:
        await swarm.reached(4)
        downloads = swarm.log("1.0").count("base_downloaded")
        assert downloads > 0
        await anyio.to_thread.run_sync(pause, "1.0")
        await swarm.reached(swarm.optimizer_step + 3)
        began_s = time.monotonic()
        await anyio.to_thread.run_sync(resume, "1.0")
        await swarm.until(lambda: swarm.log("1.0").count("serving stage=1") == 2, "it is back")
        assert time.monotonic() - began_s < BACK_S
        assert swarm.log("1.0").count("base_downloaded") == downloads

    (folder := tmp_path / "run").mkdir()
    run = run_swarm(resolved.manifest, [2, 2], folder, script=script, launch=without_data_dir, base=base)
    check_equals_one_process(run, resolved.manifest)
    assert "samples_lost" not in run.logs()
