"""Coordinators that are cut off, die and come back: one acts at a time, and training goes on without any."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import yaml
from programs import COORDINATOR, PEER, Processes, children_of, is_running, wait_for
from recording_peer import FIRST_STAGE
from swarm import GPT2, RECORDING_PEER, tiny_manifest

pytestmark = pytest.mark.slow

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
# A sample's time on a device of its own: what peers do must not depend on who else computes on this machine.
SAMPLE_S = 0.25


def daemon_of(pid: int) -> int:
    """The libp2p daemon through which a program is in the network."""
    [daemon] = [child for child in children_of(pid) if "p2pd" in (Path("/proc") / str(child) / "comm").read_text()]
    return daemon


def test_coordinators_that_are_cut_off_and_killed(tmp_path: Path, processes: Processes) -> None:
    """Leader and standby, two peers in stage 0 and three in stage 1; the leader is cut off as stage 0 loses a peer.

    The standby orders a move. It is killed while the peer moves, and the leader, back in the network, carries on. Then
    nobody coordinates, and at last the leader is started again elsewhere.
    """
    manifest = tiny_manifest(
        model={"config": GPT2 | {"n_layer": 8}},
        stages={"count": 2, "layers": [4, 4]},
        training={"steps": 100_000, "global_batch_size": 16, "microbatch_size": 2, "validation_every": 0},
        limits={"announcement_s": 4.0, "hop_timeout_s": 20},
    )
    config, address_file, records = tmp_path / "run.yaml", tmp_path / "address", tmp_path / "records"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    records.mkdir()
    key = tmp_path / "leader" / "identity"

    def coordinator(name: str, *options: str) -> int:
        output = ("--output", str(tmp_path / name), "--checkpoint-every", "0")
        return processes.start(name, *COORDINATOR, "serve", str(config), *output, *LOOPBACK, *options).pid

    def peer(name: str, stage: int) -> int:
        # Of its own choice, and so free to be moved.
        first = {FIRST_STAGE: str(stage)}
        program = (sys.executable, str(RECORDING_PEER), str(records), f"slow:1:{SAMPLE_S}", *PEER[3:])
        return processes.start(
            name, *program, "--stage", "auto", "--initial-peers", f"@{address_file}", environment=first
        ).pid

    def steps(name: str) -> int:
        metrics = tmp_path / name / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def finished(name: str) -> int:
        return len(re.findall("step_done", processes.log(name)))

    def terms(name: str, acts: bool) -> list[int]:
        """That it has acted in, or has heard of as another's."""
        return [int(term) for term in re.findall(rf"coordination acts={acts} term=(\d+)", processes.log(name))]

    def goes_on(name: str) -> None:
        before = finished(name)
        wait_for(lambda: finished(name) >= before + 3, f"three more steps of peer {name}")

    leader = coordinator("leader", "--address-file", str(address_file))
    wait_for(address_file.exists, "the leader's address")
    at_leader = ("--initial-peers", address_file.read_text().split()[0])
    peers = {name: peer(name, int(name[0])) for name in ("0.stays", "0.dies", "1.a", "1.b", "1.c")}
    wait_for(lambda: steps("leader") >= 1, "the first global step")
    standby = coordinator("standby", "--standby", "--identity-path", str(key), *at_leader)
    wait_for(lambda: "acts in term " in processes.log("standby"), "the standby's watch")
    wait_for(lambda: steps("leader") >= 4 and steps("standby") >= 1, "the fourth global step")
    assert "peer_assigned" not in processes.log("leader"), "a swarm in balance is left alone"

    # Cut off: it runs on, and hears and reaches nobody.
    cut_off = daemon_of(leader)
    os.kill(cut_off, signal.SIGSTOP)
    os.kill(peers["0.dies"], signal.SIGKILL)
    first = terms("leader", True)[-1]
    wait_for(lambda: terms("standby", True), "the standby's term")
    second = terms("standby", True)[-1]
    assert second > first
    wait_for(lambda: "peer_assigned" in processes.log("standby"), "the standby's assignment")
    [mover_id] = re.findall(r"peer_assigned peer=(\S+) to=0", processes.log("standby"))
    [mover] = [name for name in peers if f"peer_started peer={mover_id} " in processes.log(name)]
    wait_for(lambda: "assigned stage=0" in processes.log(mover), "the mover's departure")

    # Between its two lives nobody knows of the mover but who has ordered it.
    os.kill(standby, signal.SIGKILL)
    os.kill(cut_off, signal.SIGCONT)
    wait_for(lambda: second in terms("leader", False), "the leader's hearing of it")
    wait_for(lambda: len(set(terms("leader", True))) == 2, "the leader's second term")
    third = terms("leader", True)[-1]
    assert third > second
    wait_for(lambda: "serving stage=0" in processes.log(mover), "the mover's arrival")
    goes_on("0.stays")
    answer = processes.start("status", *COORDINATOR, "status", *at_leader, "--json")
    assert answer.wait(60) == 0
    status = json.loads(processes.log("status")[processes.log("status").index("{") :])
    assert status["coordinator"]["term"] == third
    assert status["coordinator"]["decision"], "it says what it thinks of the stages"

    # Nobody coordinates.
    family = children_of(leader)
    os.kill(leader, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, family)), "the end of the leader's processes", 10)
    goes_on("0.stays")
    at_peer = re.findall(r"peer_started peer=\S+ addresses=(\S+)", processes.log("0.stays"))[0]
    processes.start("late", *PEER, "--stage", "auto", "--initial-peers", at_peer, at_leader[1])
    wait_for(lambda: "stage_decided" in processes.log("late"), "a newcomer's choice")
    wait_for(lambda: "serving stage=" in processes.log("late"), "a newcomer's serving")
    goes_on("0.stays")

    # Elsewhere, with its key.
    coordinator("elsewhere", "--identity-path", str(key), "--initial-peers", at_peer)
    wait_for(lambda: terms("elsewhere", True), "the leader's third term")
    assert terms("elsewhere", True)[0] > third
    wait_for(lambda: steps("elsewhere") >= 3, "global steps that it hears of")

    ordered = {name: processes.log(name).count("peer_assigned") for name in ("leader", "standby", "elsewhere")}
    assert ordered == {"leader": 0, "standby": 1, "elsewhere": 0}
    assert sum(processes.log(name).count("assigned stage=") for name in peers) == 1
    assert "assignment_refused" not in "".join(processes.log(name) for name in peers)


def test_when_most_voters_are_gone_the_others_say_so_and_go_on_once_the_run_key_is_back(
    tmp_path: Path, processes: Processes
) -> None:
    """Coordinator, one peer in stage 0 and two in stage 1: all but the first peer are killed at once."""
    manifest = tiny_manifest(
        training={"steps": 100_000, "global_batch_size": 16, "microbatch_size": 2, "validation_every": 0},
        limits={"announcement_s": 6.0, "hop_timeout_s": 10},
        recovery={"snapshot_every": 4},
        stages={"count": 2, "peers_to_start": 1},
    )
    config, address_file, output = tmp_path / "run.yaml", tmp_path / "address", tmp_path / "out"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))

    def coordinator(name: str) -> int:
        program = (*COORDINATOR, "serve", str(config), "--output", str(output), "--checkpoint-every", "4")
        return processes.start(name, *program, *LOOPBACK, "--address-file", str(address_file)).pid

    def steps() -> int:
        metrics = output / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    first = coordinator("first")
    joining = ("--initial-peers", f"@{address_file}", "--stage")
    wait_for(address_file.exists, "the address")
    stays = processes.start_slow_peer("stays", SAMPLE_S, *joining, "0")
    others = [processes.start_slow_peer(name, SAMPLE_S, *joining, "1") for name in ("1.a", "1.b")]
    wait_for(lambda: steps() >= 10, "ten global steps")

    family = children_of(first)
    os.kill(first, signal.SIGKILL)
    for other in others:
        other.kill()
        other.wait()
    wait_for(lambda: not any(map(is_running, family)), "the end of the coordinator's processes", 10)
    # Two of the three who vote; of an even number of votes the coordinator gives up its own.
    gone = "waiting reason=most of those who vote are gone: "
    wait_for(lambda: gone in processes.log("stays"), "that it says so", 60)
    at_peer = re.findall(r"peer_started peer=\S+ addresses=(\S+)", processes.log("stays"))[0]
    before, invite = steps(), address_file.read_text().split()[0]
    answer = processes.start("status", *COORDINATOR, "status", "--initial-peers", invite, at_peer, "--json")
    assert answer.wait(60) == 0
    status = json.loads(processes.log("status")[processes.log("status").index("{") :])
    assert "most of those who vote are gone" in json.dumps(status)

    coordinator("again")
    processes.start_slow_peer("heir", SAMPLE_S, *joining, "1")
    wait_for(lambda: "waited voters=heard" in processes.log("stays"), "that it says so", 90)
    wait_for(lambda: steps() >= before + 3, "three more steps")
    assert stays.poll() is None
