"""Runs on machines that have IPv6 alone, IPv4 alone or both, and a name that leads to both.

The networks are namespaces of this kernel, with addresses that libp2p takes for public ones. Nothing leaves them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from networks import CAN_MAKE_NETWORKS, PREFIX, Internet, Machines, internet, peer_options
from programs import Processes, wait_for
from swarm import tiny_manifest
from test_routers import counts_within

from swarm_peer.wire.passes import Invite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAN_MAKE_NETWORKS, reason="needs root, ip and iptables, to make networks"),
]

BOTH, SIX, OTHER = MACHINES = ("both", "six", "other")
NAME = "coordinator.example.org"
# Files of its own that a namespace sees in /etc.
OWN_FILES = Path("/etc/netns")
# By machine; the first one is the coordinator's.
IP6 = {BOTH: "2a00:db8::1", SIX: "2a00:db8::2", OTHER: "2a00:db8::3"}


@pytest.fixture
def network() -> Iterator[Internet]:
    """Three machines, which know a name of the first one's two addresses."""
    with internet() as network:
        for machine in MACHINES:
            network.add_public(machine)
            assert network.give_ip6(machine, alone=machine == SIX) == IP6[machine]
        try:
            for machine in MACHINES:
                folder = OWN_FILES / f"{PREFIX}{machine}"
                folder.mkdir(parents=True)
                lines = (f"{address} {NAME}" for address in (network.ips[BOTH], IP6[BOTH]))
                (folder / "hosts").write_text("\n".join(("127.0.0.1 localhost", *lines, "")))
            yield network
        finally:
            for machine in MACHINES:
                shutil.rmtree(OWN_FILES / f"{PREFIX}{machine}", ignore_errors=True)


def serve(machines: Machines, processes: Processes, folder: Path, machine: str, **sections: object) -> Path:
    """Start a coordinator; returns the run's folder once its line is printed."""
    limits = {"training": {"steps": 100_000, "validation_every": 0}, "limits": {"announcement_s": 6.0}}
    config, output = folder / "run.yaml", folder / "out"
    config.write_text(yaml.safe_dump(tiny_manifest(**limits, **sections).model_dump(mode="json")))
    options = ("serve", str(config), "--output", str(output), "--no-dashboard")
    machines.start(machine, "coordinator", "coordinator.cli", *options)
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line", 60)
    return output


def join(machines: Machines, machine: str, stage: int, initial_peer: str) -> None:
    machines.start(machine, f"peer-{stage}", "swarm_peer.cli", *peer_options(initial_peer, stage))


def invite_in(processes: Processes) -> str:
    return next(word for word in processes.log("coordinator").split() if word.startswith("swarm-invite-"))


def test_a_machine_with_ip6_alone_trains_with_others(tmp_path: Path, processes: Processes, network: Internet) -> None:
    machines = Machines(tmp_path, processes)
    output = serve(machines, processes, tmp_path, BOTH)
    addresses = [address.rpartition("/p2p/")[0] for address in Invite.parse(invite_in(processes)).addresses]
    assert {f"/ip4/{network.ips[BOTH]}/tcp/31337", f"/ip6/{IP6[BOTH]}/tcp/31337"} == set(addresses), "at one port"
    assert "public address" not in processes.log("coordinator")
    join(machines, SIX, 0, invite_in(processes))
    join(machines, OTHER, 1, invite_in(processes))
    counts_within(output, 120)
    assert f"addresses=/ip6/{IP6[SIX]}/tcp/31338" in processes.log("peer-0")
    assert "/ip4/" not in re.search(r"peer_started .*", processes.log("peer-0"))[0]
    found = re.search(r"peer_started .* addresses=(.*)", processes.log("peer-1"))[1]
    assert {f"/ip4/{network.ips[OTHER]}/tcp/31338", f"/ip6/{IP6[OTHER]}/tcp/31338"} == {
        address.rpartition("/p2p/")[0] for address in found.split()
    }
    # It is reached there, by word of the others.
    doctor = machines.start(SIX, "doctor", "swarm_peer.cli", "doctor", invite_in(processes), "--device", "cpu")
    assert doctor.wait(120) == 0
    assert re.search(r"^ok +port +TCP 31339 is reached from outside$", processes.log("doctor"), re.MULTILINE)
    assert f"none that translates addresses, as {IP6[SIX]}" in processes.log("doctor")
    status = machines.start(SIX, "status", "coordinator.cli", "status", "--initial-peers", invite_in(processes))
    assert status.wait(60) == 0


def test_a_name_of_both_families_leads_to_a_run(tmp_path: Path, processes: Processes, network: Internet) -> None:
    machines = Machines(tmp_path, processes)
    output = serve(machines, processes, tmp_path, BOTH, admission="open")
    (run_id,) = re.findall(r"Run test \((\w+)\)", processes.log("coordinator"))
    # The machine with IPv6 alone cannot use the first address of the name.
    join(machines, SIX, 0, f"{NAME}:31337/{run_id}")
    join(machines, OTHER, 1, f"{NAME}:31337/{run_id}")
    counts_within(output, 120)


def test_a_name_of_both_families_is_announced(tmp_path: Path, processes: Processes, network: Internet) -> None:
    machines = Machines(tmp_path, processes)
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    manifest = tiny_manifest(training={"steps": 100_000, "validation_every": 0}, limits={"announcement_s": 6.0})
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    options = ("--output", str(output), "--no-dashboard", "--announce-maddrs", NAME)
    machines.start(BOTH, "coordinator", "coordinator.cli", "serve", str(config), *options)
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line", 60)
    assert [address.rpartition("/p2p/")[0] for address in Invite.parse(invite_in(processes)).addresses] == [
        f"/dns/{NAME}/tcp/31337"
    ]
    join(machines, SIX, 0, invite_in(processes))
    join(machines, OTHER, 1, invite_in(processes))
    counts_within(output, 120)
