"""A run across a router that translates addresses: a public machine, a router, and a private machine behind it.

The router is one at home, or a cloud's, which translates the whole address one to one.

The networks are namespaces of this kernel, with addresses that libp2p takes for public ones. Nothing leaves them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from networks import CAN_MAKE_NETWORKS, Internet, Machines, internet, peer_options
from programs import Processes, wait_for
from swarm import GPT2, tiny_manifest

from swarm_peer.wire.passes import Invite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_MAKE_NETWORKS, reason="needs root, ip and iptables, to make networks"),
]

PUBLIC, HOME, ROUTER = "public", "home", "router-home"


@pytest.fixture
def network() -> Iterator[Internet]:
    with internet() as network:
        network.add_public(PUBLIC)
        network.add_home(HOME, "port_restricted")
        yield network


@pytest.fixture
def machines(tmp_path: Path, processes: Processes) -> Machines:
    return Machines(tmp_path, processes)


@pytest.fixture
def one_to_one(network: Internet) -> Internet:
    """The router's address is the private machine's, as in a cloud. Its own network does not reach it by that."""
    home = network.ips[HOME]
    network.iptables(ROUTER, "-t", "nat", "-A", "PREROUTING", "-i", "out", "-j", "DNAT", "--to", home)
    return network


# Activations of 64 KiB for each sample: where holes are used, they are nearly all that is sent.
LARGE = {"model": {"config": GPT2 | {"n_embd": 128, "n_positions": 128}}, "data": {"sequence_length": 128}}


def write_config(folder: Path, **sections: Any) -> Path:
    training = {"steps": 100_000, "validation_every": 0}
    manifest = tiny_manifest(training=training, limits={"announcement_s": 6.0}, **sections)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    return config


def serve_on(
    machine: str, machines: Machines, processes: Processes, folder: Path, *options: str, **sections: Any
) -> Path:
    """Start a coordinator on a machine; returns the run's folder once its line is printed."""
    output = folder / "out"
    serve = ("serve", str(write_config(folder, **sections)), "--output", str(output), "--no-dashboard", *options)
    machines.start(machine, "coordinator", "coordinator.cli", *serve)
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


def sent_by(network: Internet, homes: Iterable[str]) -> tuple[int, int]:
    """Bytes that the coordinator's machine and some homes have sent to the internet so far."""
    return network.sent_bytes(PUBLIC), sum(network.sent_bytes(f"router-{name}") for name in homes)


def test_a_coordinator_in_a_cloud_learns_its_address_from_the_first_peer(
    tmp_path: Path, processes: Processes, one_to_one: Internet, machines: Machines
) -> None:
    output = serve_on(HOME, machines, processes, tmp_path)
    wait_for(lambda: "no public address of its own" in processes.log("coordinator"), "the word that it is private", 5)
    (run_id,) = re.findall(r"Run test \((\w+)\)", processes.log("coordinator"))
    (invite,) = joining_words(processes.log("coordinator"))
    join(machines, f"{one_to_one.ips[ROUTER]}:31337/{run_id}", invite)
    counts_within(output, 60)
    public = f"/ip4/{one_to_one.ips[ROUTER]}/tcp/31337/"

    def invites() -> list[Invite]:
        return [Invite.parse(words) for words in joining_words(processes.log("coordinator"))]

    wait_for(lambda: invites()[-1].addresses[0].startswith(public), "the line with its public address", 60)
    wait_for(lambda: (output / "coordinator").read_text().startswith(public), "the file with it")
    # The invite is the same one; who has it already needs no new one.
    assert len({each.ticket for each in invites()}) == 1


def test_a_coordinator_in_a_cloud_is_told_its_address(
    tmp_path: Path, processes: Processes, one_to_one: Internet, machines: Machines
) -> None:
    router_ip = one_to_one.ips[ROUTER]
    output = serve_on(HOME, machines, processes, tmp_path, "--announce-maddrs", router_ip)
    assert "no public address" not in processes.log("coordinator")
    join(machines, *joining_words(processes.log("coordinator"))[0].split())
    counts_within(output, 60)
    assert (output / "coordinator").read_text().startswith(f"/ip4/{router_ip}/tcp/31337/")
    # This router sends nothing back that a machine sends to its own public address; its peers lead to the run.
    assert machines.start(HOME, "status", "coordinator.cli", "status", str(output), "--json").wait(60) == 0


def test_a_peer_behind_a_router_works_with_public_ones(
    tmp_path: Path, processes: Processes, network: Internet, machines: Machines
) -> None:
    output = serve_on(PUBLIC, machines, processes, tmp_path)
    invite = joining_words(processes.log("coordinator"))[0]
    public_ip, router_ip = network.ips[PUBLIC], network.ips[ROUTER]
    assert (output / "coordinator").read_text().split() == [
        address for address in (output / "coordinator").read_text().split() if address.startswith(f"/ip4/{public_ip}/")
    ], "no loopback address"
    machines.start(PUBLIC, "public", "swarm_peer.cli", *peer_options(invite, 0))
    home = machines.start(HOME, "home", "swarm_peer.cli", *peer_options(invite, 1))

    # The public peer calls the one at home over the connection that the latter has made.
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, "steps", 120)
    wait_for(lambda: "not_reachable" in processes.log("home"), "the word that nobody can dial it", 60)
    (line,) = (line for line in processes.log("home").splitlines() if "not_reachable" in line)
    assert re.search(rf"closed={router_ip}:31338: .* forward port 31338 ", line)
    assert "not_reachable" not in processes.log("public")

    # The router forwards the port: the peer's public address is known, and so are its steps.
    to_home = ("-j", "DNAT", "--to", network.ips[HOME])
    network.iptables(ROUTER, "-t", "nat", "-A", "PREROUTING", "-i", "out", "-p", "tcp", "--dport", "31338", *to_home)
    home.terminate()
    assert home.wait(60) == 0
    machines.start(HOME, "again", "swarm_peer.cli", *peer_options(invite, 1))
    wait_for(lambda: f"addresses=/ip4/{router_ip}/tcp/31338" in processes.log("again"), "its public address", 60)
    wait_for(lambda: processes.log("again").count("step_done") > 3, "its steps", 60)
    lasting = output / "lasting-peers"
    wait_for(lambda: f"/ip4/{router_ip}/tcp/31338/" in lasting.read_text(), "its public address in new invites", 60)
    assert network.ips[HOME] not in lasting.read_text()
    status = ("coordinator.cli", "status", str(output), "--json")
    assert machines.start(PUBLIC, "status", *status).wait(60) == 0
    peers = json.loads(processes.log("status").splitlines()[-1])["stages"][1]["peers"]
    assert [peer["is_reachable"] for peer in peers if peer["state"] == "serving"] == [True]


@pytest.mark.parametrize(
    ("kinds", "way"),
    [
        (("port_restricted", "restricted"), "direct"),
        (("symmetric", "double"), "through"),
        (("no_udp", "full"), "direct"),
        (("no_udp", "no_udp"), "direct"),
    ],
)
def test_two_at_home_train_together_with_one_public_member_beside_them(
    kinds: tuple[str, str], way: str, tmp_path: Path, processes: Processes, network: Internet, machines: Machines
) -> None:
    output = serve_on(PUBLIC, machines, processes, tmp_path)
    invite = joining_words(processes.log("coordinator"))[0]
    names = ("ann", "bob")
    for stage, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        network.add_home(name, kind)
        machines.start(name, name, "swarm_peer.cli", *peer_options(invite, stage))
    counts_within(output, 90)
    logs = lambda: "".join(map(processes.log, names))  # noqa: E731
    if way == "through":
        assert re.search("way_found .* way=through", logs())
    elif "full" not in kinds:  # such a one may be dialled with nobody's help
        # Where both dial at once, the connection is carried at first.
        wait_for(lambda: re.search("way_found .* way=direct|way_changes .* to=direct", logs()), "a direct way", 60)
        steps = (output / "metrics.jsonl").read_text().count("\n")
        wait_for(lambda: (output / "metrics.jsonl").read_text().count("\n") > steps + 10, "steps by it", 60)


def test_a_peer_without_a_way_waits_and_says_whose_port_would_help(
    tmp_path: Path, processes: Processes, network: Internet, machines: Machines
) -> None:
    """Two symmetric routers, and nobody carries anything: the public peer and the one that came first train."""
    nothing = ("--relay-mbps", "0")
    output = serve_on(PUBLIC, machines, processes, tmp_path, *nothing)
    invite = joining_words(processes.log("coordinator"))[0]
    for name in ("ann", "bob"):
        network.add_home(name, "symmetric")
    machines.start(PUBLIC, "pat", "swarm_peer.cli", *peer_options(invite, 0, "--name", "pat", *nothing))
    machines.start("ann", "ann", "swarm_peer.cli", *peer_options(invite, 1, "--name", "ann", *nothing))
    counts_within(output, 90)
    machines.start("bob", "bob", "swarm_peer.cli", *peer_options(invite, "auto", "--name", "bob", *nothing))
    words = r"waiting stage=\d reason=no way to ann; what would help most: forward port \d+ on the router of "
    wait_for(lambda: re.search(words, processes.log("bob")), "whose port would help", 90)
    # It may have had a place before it knew.
    bob = lambda: processes.log("bob")  # noqa: E731
    wait_for(lambda: bob().count("serving stage") <= bob().count("gives_way stage"), "that it has no place", 60)
    steps = (output / "metrics.jsonl").read_text().count("\n")
    wait_for(lambda: (output / "metrics.jsonl").read_text().count("\n") > steps + 20, "twenty more steps", 60)
    status = ("coordinator.cli", "status", str(output), "--json")
    assert machines.start(PUBLIC, "status", *status).wait(60) == 0
    told = [peer for stage in json.loads(processes.log("status").splitlines()[-1])["stages"] for peer in stage["peers"]]
    ids = {peer["name"]: peer["peer"] for peer in told}
    assert [(peer["state"], peer["unreached"]) for peer in told if peer["name"] == "bob"] == [("joining", [ids["ann"]])]


def test_a_router_that_forwards_ports_is_asked_to(
    tmp_path: Path, processes: Processes, network: Internet, machines: Machines
) -> None:
    """Meanwhile their connection is carried; it gives way to a direct one."""
    if not (shutil.which("miniupnpd") and shutil.which("nft")):
        pytest.skip("needs miniupnpd and nft")
    output = serve_on(PUBLIC, machines, processes, tmp_path)
    invite = joining_words(processes.log("coordinator"))[0]
    for stage, name in enumerate(("ann", "bob")):
        network.add_home(name, "symmetric")
        if name == "ann":
            network.start_upnp(name, processes, tmp_path)
        machines.start(name, name, "swarm_peer.cli", *peer_options(invite, stage))
    counts_within(output, 90)
    public = f"addresses=/ip4/{network.ips['router-ann']}/tcp/"
    wait_for(lambda: public in processes.log("ann"), "the port that its router forwards", 90)
    wait_for(lambda: "way_changes" in processes.log("bob"), "the direct way", 60)
    counted = (output / "metrics.jsonl").read_text().count("\n")
    wait_for(lambda: (output / "metrics.jsonl").read_text().count("\n") > counted + 20, "twenty more steps", 90)
    assert "lost" not in (output / "metrics.jsonl").read_text()


def test_four_homes_train_without_the_coordinator_that_they_have_met_by(
    tmp_path: Path, processes: Processes, network: Internet, machines: Machines
) -> None:
    """Two stages of two peers, each behind another router; the first sample counts soon after the last command."""
    output = serve_on(PUBLIC, machines, processes, tmp_path, **LARGE)
    invite = joining_words(processes.log("coordinator"))[0]
    homes = {"ann": "port_restricted", "bob": "restricted", "cleo": "full", "dan": "double"}
    for name, kind in homes.items():
        network.add_home(name, kind)
        machines.start(name, name, "swarm_peer.cli", *peer_options(invite, "auto", "--name", name))
    counts_within(output, 90)
    metrics = output / "metrics.jsonl"
    wait_for(lambda: metrics.read_text().count("\n") >= 20, "twenty steps", 120)
    wait_for(lambda: all("serving stage" in processes.log(name) for name in homes), "all four in the run", 60)
    before = sent_by(network, homes)
    wait_for(lambda: metrics.read_text().count("\n") >= 60, "forty more", 240)
    by_coordinator, by_homes = (now - then for now, then in zip(sent_by(network, homes), before, strict=True))
    assert by_coordinator < 0.01 * by_homes, "the holes are used"

    processes.running[0].kill()  # the coordinator, by which they have met
    steps = {name: processes.log(name).count("step_done") for name in homes}
    for name in homes:
        wait_for(lambda name=name: processes.log(name).count("step_done") > steps[name] + 20, f"{name}'s steps", 120)


def test_a_stranger_has_nothing_carried_and_nobody_dialled(
    tmp_path: Path, processes: Processes, network: Internet, machines: Machines
) -> None:
    """By libp2p's own relay, and by a member's help."""
    serve_on(PUBLIC, machines, processes, tmp_path)
    invite = joining_words(processes.log("coordinator"))[0]
    machines.start(HOME, "member", "swarm_peer.cli", *peer_options(invite, 0))
    wait_for(lambda: "serving stage" in processes.log("member"), "a member", 90)
    (member,) = re.findall("peer_started peer=([0-9A-Za-z]+)", processes.log("member"))
    network.add_public("stranger")  # so that it can tell others that they are, too
    address = Invite.parse(invite).addresses[0]
    script = machines.start("stranger", "stranger", str(Path(__file__).with_name("stranger_node.py")), address, member)
    assert script.wait(90) == 0, processes.log("stranger")
