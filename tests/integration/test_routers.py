"""A run across a router that translates addresses: a public machine, a router, and a private machine behind it.

The router is one at home, or a cloud's, which translates the whole address one to one.

The networks are namespaces of this kernel, with addresses that libp2p takes for public ones. Nothing leaves them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from programs import Processes, wait_for
from swarm import tiny_manifest

from swarm_peer.wire.passes import Invite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("iptables")),
        reason="needs root, ip and iptables, to make networks",
    ),
]

PUBLIC, ROUTER, HOME = (f"swarm-test-{name}" for name in ("public", "router", "home"))
PUBLIC_IP, ROUTER_IP, ROUTER_HOME_IP, HOME_IP = "11.0.0.1", "11.0.0.2", "192.168.77.1", "192.168.77.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def iptables(*arguments: str) -> None:
    ip("netns", "exec", ROUTER, "iptables", "-t", "nat", *arguments)


@pytest.fixture
def networks() -> Iterator[None]:
    for name in (PUBLIC, ROUTER, HOME):
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    try:
        for one, its_ip, other, other_ip in ((PUBLIC, PUBLIC_IP, ROUTER, ROUTER_IP), (HOME, HOME_IP, ROUTER, "")):
            wire = f"to-{one[-4:]}"
            ip("-n", one, "link", "add", "uplink", "type", "veth", "peer", "name", wire, "netns", other)
            ip("-n", one, "address", "add", f"{its_ip}/24", "dev", "uplink")
            ip("-n", other, "address", "add", f"{other_ip or ROUTER_HOME_IP}/24", "dev", wire)
            ip("-n", one, "link", "set", "uplink", "up")
            ip("-n", other, "link", "set", wire, "up")
        ip("-n", HOME, "route", "add", "default", "via", ROUTER_HOME_IP)
        ip("netns", "exec", ROUTER, "sysctl", "-w", "net.ipv4.ip_forward=1")
        iptables("-A", "POSTROUTING", "-o", "to-blic", "-j", "MASQUERADE")
        yield
    finally:
        for name in (PUBLIC, ROUTER, HOME):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class Machines:
    """Programs on the machines of these networks; each machine has its own user's files."""

    def __init__(self, folder: Path, processes: Processes):
        self._folder = folder
        self._processes = processes

    def start(self, machine: str, name: str, module: str, *options: str):
        state = self._folder / f"state-{machine}"
        # The fork server is in no namespace: these programs are started anew.
        log = self._processes.path(name).open("w")
        process = subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, "-m", module, *options],
            stdout=log,
            stderr=log,
            env=os.environ | {"XDG_STATE_HOME": str(state)},
        )
        self._processes.running.append(process)
        return process


@pytest.fixture
def one_to_one(networks: None) -> None:
    """The router's address is the private machine's, as in a cloud. Its own network does not reach it by that."""
    iptables("-A", "PREROUTING", "-i", "to-blic", "-d", ROUTER_IP, "-j", "DNAT", "--to", HOME_IP)


def serve_at_home(machines: Machines, processes: Processes, folder: Path, *options: str) -> Path:
    """Start a coordinator on the private machine; returns the run's folder once its line is printed."""
    manifest = tiny_manifest(training={"steps": 100_000, "validation_every": 0}, limits={"announcement_s": 6.0})
    config, output = folder / "run.yaml", folder / "out"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    machines.start(
        HOME,
        "coordinator",
        "coordinator.cli",
        "serve",
        str(config),
        "--output",
        str(output),
        "--no-dashboard",
        *options,
    )
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line")
    return output


def join(machines: Machines, *initial_peers: str) -> None:
    """Start a peer of each stage on the public machine."""
    for stage in range(2):
        options = ("--stage", str(stage), "--threads", "1", "--device", "cpu")
        machines.start(PUBLIC, f"peer-{stage}", "swarm_peer.cli", "--initial-peers", *initial_peers, *options)


def joining_words(log: str) -> list[str]:
    """What each line that a coordinator has printed names as initial peers."""
    return re.findall(r"swarm-peer --stage auto --initial-peers (.*)", log)


def counts_within(output: Path, seconds: float) -> None:
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text(), "the first step, whose samples count", seconds)


def test_a_coordinator_in_a_cloud_learns_its_address_from_the_first_peer(
    tmp_path: Path, processes: Processes, one_to_one: None
) -> None:
    machines = Machines(tmp_path, processes)
    output = serve_at_home(machines, processes, tmp_path)
    wait_for(lambda: "no public address of its own" in processes.log("coordinator"), "the word that it is private", 5)
    (run_id,) = re.findall(r"Run test \((\w+)\)", processes.log("coordinator"))
    (invite,) = joining_words(processes.log("coordinator"))
    join(machines, f"{ROUTER_IP}:31337/{run_id}", invite)
    counts_within(output, 60)
    public = f"/ip4/{ROUTER_IP}/tcp/31337/"

    def invites() -> list[Invite]:
        return [Invite.parse(words) for words in joining_words(processes.log("coordinator"))]

    wait_for(lambda: invites()[-1].addresses[0].startswith(public), "the line with its public address", 60)
    wait_for(lambda: (output / "coordinator").read_text().startswith(public), "the file with it")
    # The invite is the same one; who has it already needs no new one.
    assert len({each.ticket for each in invites()}) == 1


def test_a_coordinator_in_a_cloud_is_told_its_address(tmp_path: Path, processes: Processes, one_to_one: None) -> None:
    machines = Machines(tmp_path, processes)
    output = serve_at_home(machines, processes, tmp_path, "--announce-maddrs", ROUTER_IP)
    assert "no public address" not in processes.log("coordinator")
    join(machines, *joining_words(processes.log("coordinator"))[0].split())
    counts_within(output, 60)
    assert (output / "coordinator").read_text().startswith(f"/ip4/{ROUTER_IP}/tcp/31337/")
    # This router sends nothing back that a machine sends to its own public address; its peers lead to the run.
    assert machines.start(HOME, "status", "coordinator.cli", "status", str(output), "--json").wait(60) == 0


def test_a_peer_behind_a_router_works_with_public_ones(tmp_path: Path, processes: Processes, networks: None) -> None:
    machines = Machines(tmp_path, processes)
    manifest = tiny_manifest(training={"steps": 100_000, "validation_every": 0}, limits={"announcement_s": 6.0})
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    machines.start(PUBLIC, "coordinator", "coordinator.cli", "serve", str(config), "--output", str(output))
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line")
    invite = next(word for word in processes.log("coordinator").split() if word.startswith("swarm-invite-"))
    assert (output / "coordinator").read_text().split() == [
        address for address in (output / "coordinator").read_text().split() if address.startswith(f"/ip4/{PUBLIC_IP}/")
    ], "no loopback address"
    peer = ("swarm_peer.cli", "--initial-peers", invite, "--threads", "1", "--device", "cpu")
    machines.start(PUBLIC, "public", *peer, "--stage", "0")
    home = machines.start(HOME, "home", *peer, "--stage", "1")

    # The public peer calls the one at home over the connection that the latter has made.
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, "steps", 120)
    wait_for(lambda: "not_reachable" in processes.log("home"), "the word that nobody can dial it", 60)
    (line,) = (line for line in processes.log("home").splitlines() if "not_reachable" in line)
    assert re.search(rf"closed={ROUTER_IP}:31338: .* forward TCP port 31338 ", line)
    assert "not_reachable" not in processes.log("public")

    # The router forwards the port: the peer's public address is known, and so are its steps.
    iptables("-A", "PREROUTING", "-i", "to-blic", "-p", "tcp", "--dport", "31338", "-j", "DNAT", "--to", HOME_IP)
    home.terminate()
    assert home.wait(60) == 0
    machines.start(HOME, "again", *peer, "--stage", "1")
    wait_for(lambda: f"addresses=/ip4/{ROUTER_IP}/tcp/31338" in processes.log("again"), "its public address", 60)
    wait_for(lambda: processes.log("again").count("step_done") > 3, "its steps", 60)
    lasting = output / "lasting-peers"
    wait_for(lambda: f"/ip4/{ROUTER_IP}/tcp/31338/" in lasting.read_text(), "its public address in new invites", 60)
    assert HOME_IP not in lasting.read_text()
    status = ("coordinator.cli", "status", str(output), "--json")
    assert machines.start(PUBLIC, "status", *status).wait(60) == 0
    peers = json.loads(processes.log("status").splitlines()[-1])["stages"][1]["peers"]
    assert [peer["is_reachable"] for peer in peers if peer["state"] == "serving"] == [True]
