"""Peers that come with nothing but an address, and that come late."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml
from programs import COORDINATOR, PEER, Processes, children_of, cmdline_of, is_running, wait_for
from swarm import tiny_manifest

from coordinator.report.figures import FIGURES
from coordinator.report.page import write_report
from coordinator.report.run_folder import read_run
from swarm_peer.wire.identity import Identity


def test_peers_join_from_an_address_and_late_and_one_is_killed(tmp_path: Path, processes: Processes) -> None:
    """`serve`, two `--stage auto` peers, a third that joins the run under way, `status`, a kill, the end."""
    manifest = tiny_manifest(
        # Long enough that the coordinator notices a death before the end.
        training={"steps": 18, "global_batch_size": 64, "validation_every": 6},
        limits={"announcement_s": 6.0, "hop_timeout_s": 20},
    )
    config, address_file = tmp_path / "run.yaml", tmp_path / "address"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    output = tmp_path / "out"
    # Whoever joins stage 1 stays there: the swarm would do more with two peers in stage 0 now and then.
    serving = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--address-file", str(address_file), "--metrics-port", "0",
               "--no-rebalance")  # fmt: skip
    coordinator = processes.start("coordinator", *COORDINATOR, "serve", str(config), "--output", str(output), *serving)
    peers = [processes.start_slow_peer(f"peer-{i}", 0.02, "--initial-peers", f"@{address_file}") for i in range(2)]
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, "the third optimizer step")
    stages = {processes.log(f"peer-{i}").partition("stage_decided stage=")[2][:1] for i in range(2)}
    assert stages == {"0", "1"}, "two peers that choose at the same time take both stages"

    late = processes.start("late", *PEER, "--stage", "1", "--initial-peers", f"@{address_file}")
    wait_for(lambda: "serving stage=1" in processes.log("late"), "the late peer's serving")
    text = processes.log("late")
    assert "downloaded kind=state" in text, "who comes late takes the state of a stage-mate"
    address = address_file.read_text().split()[0]
    assert processes.run("status", *COORDINATOR, "status", "--initial-peers", address, "--json") == 0
    status = json.loads(processes.log("status").splitlines()[-1])
    assert status["optimizer_step"] >= 3
    assert [len(stage["peers"]) for stage in status["stages"]] == [1, 2]

    family = children_of(late.pid)
    assert family, "a peer has processes of its own"
    os.kill(late.pid, signal.SIGKILL)
    late.wait()
    wait_for(lambda: not any(map(is_running, family)), "the end of a killed peer's processes", 10)

    assert coordinator.wait(400) == 0, processes.log("coordinator")[-2000:]
    assert [peer.wait(30) for peer in peers] == [0, 0], "peers go when the run has ended"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["optimizer_step"] for line in lines] == list(range(1, 19))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert "validation_loss" in lines[-1]
    assert (output / "model" / "model.safetensors").exists()
    # Its folder has all that a report tells.
    run = read_run(output)
    run_id = Identity.load_or_create(output / "identity").peer_id
    assert (run.about["run_id"], run.about["manifest_hash"]) == (run_id, manifest.hash)
    assert run.events[0].kind == "started"
    assert {event.kind for event in run.events} >= {"joined", "died", "ended"}
    assert run.num_unread == 0
    assert write_report(output).read_text().count('src="data:image/png;base64,') == len(FIGURES)


def test_a_missing_stage_a_wrong_run_another_manifest_and_an_early_end(tmp_path: Path, processes: Processes) -> None:
    config, address_file = tmp_path / "run.yaml", tmp_path / "address"
    config.write_text(yaml.safe_dump(tiny_manifest().model_dump(mode="json")))
    options = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--address-file", str(address_file))
    coordinator = processes.start(
        "coordinator", *COORDINATOR, "serve", str(config), "--output", str(tmp_path / "out"), *options
    )
    peer = (*PEER, "--initial-peers", f"@{address_file}")
    assert processes.run("stage", *peer, "--stage", "2") == 2
    assert "--stage 2: the run has stages 0 to 1" in processes.log("stage").splitlines()[-1]
    assert processes.run("run", *peer, "--run-id", "12D3KooWnone") == 2
    assert "12D3KooWnone" in processes.log("run").splitlines()[-1]
    member = processes.start("member", *peer)
    wait_for(lambda: "serving stage=" in processes.log("member"), "the peer's serving")
    known = tmp_path / "out" / "peers"
    wait_for(known.exists, "the coordinator's knowledge of its peer")
    events = tmp_path / "out" / "events.jsonl"
    wait_for(lambda: events.exists() and '"joined"' in events.read_text(), "the coordinator's sight of its peer")
    back = (*COORDINATOR, "serve", str(config), "--output", str(tmp_path / "out"))
    assert processes.run("twice", *back, *options[:2]) == 2
    assert "another program trains into" in processes.log("twice").splitlines()[-1]
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(20) == 0
    assert "The run's peers wait for a peer of stage " in processes.log("coordinator")

    # The run lives on in the DHT of its peers: its coordinator finds it there, and may not have another manifest.
    address = processes.log("member").partition("addresses=")[2].split()[0]
    assert address in known.read_text().split()
    assert processes.run("changed", *back, *options[:2], "--set", "seed=7") == 2, processes.log("changed")[-2000:]
    assert "is under way with other settings (seed is " in processes.log("changed").splitlines()[-1]

    coordinator = processes.start("back", *back, *options[:2])
    wait_for(lambda: "Peers join with" in processes.log("back"), "the coordinator's return")
    end = (*COORDINATOR, "end", "--initial-peers", address, "--identity-path")
    assert processes.run("stranger", *end, str(tmp_path / "none")) == 2
    assert "only the run's key" in processes.log("stranger")
    assert processes.run("end", *end, str(tmp_path / "out" / "identity")) == 0, processes.log("end")
    assert (member.wait(30), coordinator.wait(30)) == (0, 0)
    assert "run_ended reason=its operator has ended it" in processes.log("member")
    assert "The run has ended: its operator has ended it." in processes.log("back")


def test_ctrl_c_leaves_no_process(tmp_path: Path, processes: Processes) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tiny_manifest(training={"steps": 100_000}).model_dump(mode="json")))
    output = tmp_path / "out"
    local = processes.start("local", *COORDINATOR, "local", str(config), "--peers", "1,1", "--output", str(output))
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "the second optimizer step")
    family = children_of(local.pid)
    # With Python 3.14, each process that imports hivemind has a helper of multiprocessing besides.
    programs = [pid for pid in family if b"resource_tracker" not in cmdline_of(pid)]
    assert len(programs) == 5, "two peers, and their and the coordinator's daemons"
    local.send_signal(signal.SIGINT)
    assert local.wait(40) == 130
    assert "Traceback" not in processes.log("local")
    wait_for(lambda: not any(map(is_running, family)), "the end of all processes", 10)


@pytest.mark.slow
def test_a_run_on_one_machine_outlives_a_peer(tmp_path: Path, processes: Processes) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tiny_manifest(training={"steps": 60}).model_dump(mode="json")))
    output = tmp_path / "runs" / "tiny"
    local = processes.start("local", *COORDINATOR, "local", str(config), "--peers", "1,2", "--output", str(output))
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, "the second optimizer step")
    stage_1 = [pid for pid in children_of(local.pid) if b"\0--stage\0" + b"1\0" in cmdline_of(pid)]
    assert len(stage_1) == 2
    os.kill(stage_1[0], signal.SIGKILL)
    assert local.wait(200) == 0, processes.log("local")
    assert " of stage 1 was killed by SIGKILL; peer 1." in processes.log("local")
    assert "60 optimizer steps done" in processes.log("local")
    assert len(list((output / "logs").iterdir())) == 4, "one more than there were peers"
    assert processes.log("local").splitlines()[-1] == f"Report: {output / 'report.html'}"
    report = (output / "report.html").read_text()
    assert "Run test" in report
    assert "made its steps and saved its model" in report
