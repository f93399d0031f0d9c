"""A run by invitation, as its operator, those who were invited and those who were not see it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml
from programs import COORDINATOR, PEER, Processes, children_of, is_running, wait_for
from swarm import tiny_manifest

LIFETIME_S = 4.0


def test_who_was_invited_takes_part_until_it_is_revoked(tmp_path: Path, processes: Processes) -> None:
    manifest = tiny_manifest(
        training={"steps": 100_000, "validation_every": 0}, limits={"announcement_s": LIFETIME_S, "hop_timeout_s": 3.0}
    )
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    options = ("--output", str(output), "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--no-rebalance")
    coordinator = processes.start("coordinator", *COORDINATOR, "serve", str(config), *options)
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line")

    # The line that the coordinator prints works as it is; so does the one that its operator makes for somebody.
    printed = invite_in(processes.log("coordinator"))
    assert processes.run("invite", *COORDINATOR, "invite", str(output), "--label", "alice", "--expires", "1h") == 0
    alices = invite_in(processes.log("invite"))
    assert alices != printed
    assert processes.run("again", *COORDINATOR, "invite", str(output), "--label", "alice") == 2
    joining = ("--initial-peers", printed, "--stage")
    members = [processes.start_slow_peer(f"member-{i}", 0.02, *joining, str(i)) for i in range(2)]
    alice = processes.start("alice", *PEER, "--stage", "1", "--initial-peers", alices)
    wait_for(lambda: "serving stage=1" in processes.log("alice"), "the service of alice's peer")

    # Whoever knows an address alone is told what to ask for, and neither sees nor changes anything.
    address = (output / "coordinator").read_text().split()[0]
    assert processes.run("stranger", *PEER, "--initial-peers", address) == 2
    assert "by invitation: ask its operator for an invite" in processes.log("stranger").splitlines()[-1]
    assert processes.run("observer", *COORDINATOR, "status", "--initial-peers", address) == 2
    assert processes.run("status", *COORDINATOR, "status", str(output), "--json") == 0
    stages = json.loads(processes.log("status").splitlines()[-1])["stages"]
    assert [len(stage["peers"]) for stage in stages] == [1, 2]

    wait_for(lambda: alices_peers(output), "the coordinator's note of alice's peer", 20)
    (her_peer,) = alices_peers(output)
    assert her_peer in processes.log("alice")
    assert oct(os.stat(output / "invite").st_mode)[-3:] == "600"
    assert printed[20:] not in "".join(processes.log(f"member-{i}") for i in range(2)), "logs hold no secrets"

    assert processes.run("revoke", *COORDINATOR, "revoke", "alice", str(output)) == 0
    assert alice.wait(60) == 2
    assert "was revoked by the run's operator" in processes.log("alice").splitlines()[-1]
    assert processes.run("back", *PEER, "--initial-peers", alices) == 2
    assert "was revoked by the run's operator" in processes.log("back").splitlines()[-1]
    lines = (output / "metrics.jsonl").read_text().count("\n")
    wait_for(lambda: (output / "metrics.jsonl").read_text().count("\n") > lines + 3, "the others' next steps")
    wait_for(lambda: "has revoked it or its invite" in (output / "events.jsonl").read_text(), "that it is told")
    assert [member.poll() for member in members] == [None, None]

    assert processes.run("end", *COORDINATOR, "end", str(output)) == 0
    assert [member.wait(60) for member in members] == [0, 0]
    assert coordinator.wait(60) == 0, "it hears of the end as the peers do, and goes by itself"


def test_an_invite_opens_the_run_after_its_coordinator_is_gone(tmp_path: Path, processes: Processes) -> None:
    manifest = tiny_manifest(training={"steps": 100_000, "validation_every": 0}, limits={"announcement_s": LIFETIME_S})
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    options = ("--output", str(output), "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    coordinator = processes.start("coordinator", *COORDINATOR, "serve", str(config), *options)
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line")
    joining = ("--initial-peers", invite_in(processes.log("coordinator")), "--stage")
    members = [processes.start_slow_peer(f"member-{i}", 0.02, *joining, str(i)) for i in range(2)]
    wait_for(lambda: "one of the peers named lives" in processes.log("coordinator"), "a line that names a peer")
    printed = invite_in(processes.log("coordinator").rpartition("one of the peers named lives")[2])
    assert processes.run("before", *COORDINATOR, "invite", str(output), "--label", "alice") == 0

    family = children_of(coordinator.pid)
    coordinator.kill()
    wait_for(lambda: not any(map(is_running, family)), "the end of the coordinator's processes", 20)
    assert processes.run("after", *COORDINATOR, "invite", str(output), "--label", "bob") == 0
    for name, invite in (
        ("by-serve", printed),
        ("by-alice", invite_in(processes.log("before"))),
        ("by-bob", invite_in(processes.log("after"))),
    ):
        assert len(invite) < 700
        late = processes.start_slow_peer(name, 0.02, "--initial-peers", invite, "--stage", "1")
        wait_for(lambda name=name: "serving stage=1" in processes.log(name), f"the service of the peer {name}")
        late.terminate()
        assert late.wait(60) == 0
    assert [member.poll() for member in members] == [None, None]


def invite_in(log: str) -> str:
    return next(word for word in log.split() if word.startswith("swarm-invite-"))


def alices_peers(output: Path) -> list[str]:
    from coordinator.run.invites import InviteBook

    return [peer for peer, label in InviteBook(output).labels().items() if label == "alice"]
