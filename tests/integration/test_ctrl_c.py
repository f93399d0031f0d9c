"""Ctrl+C in a terminal: it goes to all processes that were started there, libp2p's daemons included."""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import yaml
from programs import COORDINATOR, PEER, Processes, children_of, is_running, wait_for
from swarm import tiny_manifest


def ctrl_c(pid: int) -> None:
    """As a terminal does it. Each program of these tests begins a process group of its own."""
    os.killpg(pid, signal.SIGINT)


def num_backward(log: str) -> float:
    """How many backward passes a peer has done, by the metrics that it serves."""
    port = log.partition("metrics_served host=127.0.0.1 port=")[2].split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return float(answer.read().decode().partition("\nswarm_backward_duration_seconds_count ")[2].split()[0])


def test_ctrl_c_lets_a_peer_hand_over_its_work_and_a_coordinator_go_in_peace(
    tmp_path: Path, processes: Processes
) -> None:
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    manifest = tiny_manifest(training={"steps": 100_000, "validation_every": 0, "global_batch_size": 4096})
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    options = ("--output", str(output), "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--no-rebalance")
    coordinator = processes.start("coordinator", *COORDINATOR, "serve", str(config), *options)
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line")
    invite = next(word for word in processes.log("coordinator").split() if word.startswith("swarm-invite-"))
    peers = {
        name: processes.start(name, *PEER, "--initial-peers", invite, "--stage", name[0], "--metrics-port", "0")
        for name in ("0.0", "1.0", "1.1")
    }
    for name in peers:
        wait_for(lambda name=name: "serving stage" in processes.log(name), f"the service of {name}")
    wait_for(lambda: (output / "peers").exists(), "the coordinator's sight of peers")

    # In the middle of a long round, when it has a gradient to hand over.
    wait_for(lambda: num_backward(processes.log("1.1")), "its first microbatch")
    leaving = peers["1.1"]
    daemons = children_of(leaving.pid)
    assert [os.getpgid(daemon) == leaving.pid for daemon in daemons] == [False], "Ctrl+C would end it in a few seconds"
    ctrl_c(leaving.pid)
    assert leaving.wait(60) == 0
    assert "work_handed_over" in processes.log("1.1"), processes.log("1.1")
    wait_for(lambda: not any(map(is_running, daemons)), "the end of its daemon", 20)

    family = children_of(coordinator.pid)
    ctrl_c(coordinator.pid)
    assert coordinator.wait(60) == 0
    wait_for(lambda: not any(map(is_running, family)), "the end of the coordinator's daemon", 20)
    for name in ("1.1", "coordinator"):
        assert not [
            word for word in ("Traceback", "never retrieved", "addresses_unknown") if word in processes.log(name)
        ]
