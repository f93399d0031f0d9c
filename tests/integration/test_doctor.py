"""`swarm-peer doctor` at a real run: nothing is wrong where all is well, and each fault that is made is one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from networks import CAN_MAKE_NETWORKS, Internet, Machines, ip
from programs import COORDINATOR, Processes, wait_for
from swarm import tiny_manifest
from test_routers import HOME, PUBLIC, ROUTER, network, serve_on  # noqa: F401  # a fixture

from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite

DOCTOR = (sys.executable, "-m", "swarm_peer.cli", "doctor", "--device", "cpu", "--threads", "1")
FEIGNED = (sys.executable, str(Path(__file__).with_name("feigned_faults.py")))
ALONE = "swarm-doctor-alone"
# What makes faults of a real machine.
needs_root = pytest.mark.skipif(
    not (CAN_MAKE_NETWORKS and shutil.which("unshare")), reason="needs root, ip, iptables and unshare"
)


def findings_in(log: str) -> dict[str, Any]:
    """What a doctor has said in JSON, whatever stands in the log before."""
    found: dict[str, Any] = json.loads(log.splitlines()[-1])
    return found


def wrong(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["check"], each["level"]) for each in found["findings"] if each["level"] != "ok"]


def text_of(found: dict[str, Any], check: str) -> str:
    (finding,) = (each for each in found["findings"] if each["check"] == check)
    return f"{finding['seen']}: {finding['remedy']}"


def examine(command: Sequence[str], *options: str) -> tuple[int, dict[str, Any]]:
    """Run a doctor in a process of its own, perhaps within another program."""
    ended = subprocess.run([*command, *options, "--json"], capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, findings_in(ended.stdout)


def test_a_machine_at_a_run_is_well_but_for_what_is_made_wrong(tmp_path: Path, processes: Processes) -> None:
    # Announcements last for so long that a clock may be ten seconds off.
    manifest = tiny_manifest(training={"steps": 100_000, "validation_every": 0}, limits={"announcement_s": 30.0})
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(manifest.model_dump(mode="json")))
    options = ("--output", str(output), "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--no-rebalance")
    processes.start("coordinator", *COORDINATOR, "serve", str(config), *options)
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line")
    invite = next(word for word in processes.log("coordinator").split() if word.startswith("swarm-invite-"))
    here = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--json")

    # There is nobody yet but the coordinator, which answers, too.
    assert processes.run("alone", *DOCTOR, invite, *here) == 0
    alone = findings_in(processes.log("alone"))
    assert (wrong(alone), alone["can_take_part"]) == ([], True)
    assert "1 of 1 answer, 1 at addresses" in text_of(alone, "members")
    assert "speed" in {each["check"] for each in alone["findings"]}

    for stage in range(2):
        processes.start_slow_peer(f"peer-{stage}", 0.02, "--initial-peers", invite, "--stage", str(stage))
    wait_for(lambda: (output / "metrics.jsonl").exists(), "the first step")
    # As the line that joins, with `doctor` in it.
    line = ("--stage", "auto", "--initial-peers", invite, "--name", "anna")
    assert processes.run("well", *DOCTOR, *line, *here) == 0
    well = findings_in(processes.log("well"))
    assert wrong(well) == []
    assert "3 of 3 answer, 3 at addresses" in text_of(well, "members")
    assert "MB/s up" in text_of(well, "links") or "GB/s up" in text_of(well, "links")

    assert processes.run("late", *FEIGNED, "clock:-10", *DOCTOR[3:], invite, *here) == 0
    late = findings_in(processes.log("late"))
    assert wrong(late) == [("clock", "warning")]
    assert "10.0 s behind the clocks of" in text_of(late, "clock")
    assert processes.run("early", *FEIGNED, "clock:40", *DOCTOR[3:], invite, *here) == 2
    early = findings_in(processes.log("early"))
    assert wrong(early) == [("clock", "failure")]

    assert processes.run("driver", *FEIGNED, "driver:470.57.02", "doctor", "--json") == 0
    driver = findings_in(processes.log("driver"))
    assert wrong(driver) == [("device", "warning")]
    assert "driver 470.57.02" in text_of(driver, "device")

    log = processes.log("peer-0")
    assert "not_right" not in log
    assert "invalid_message" not in log


def test_somebody_whose_invite_is_over_is_told_so(tmp_path: Path, processes: Processes) -> None:
    config, output = tmp_path / "run.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(tiny_manifest().model_dump(mode="json")))
    options = ("--output", str(output), "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    processes.start("coordinator", *COORDINATOR, "serve", str(config), *options)
    wait_for(lambda: "Peers join with" in processes.log("coordinator"), "the coordinator's line")
    run_key, (address, *_) = Identity.load_or_create(output / "identity"), (output / "coordinator").read_text().split()
    invite = Invite.issue(run_key, [address], label="alice", expires=int(time.time()) - 60, at_once=2).text()
    assert processes.run("doctor", *DOCTOR, invite, "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--json") == 2
    found = findings_in(processes.log("doctor"))
    assert wrong(found) == [("run", "failure")]
    assert "the invite alice has expired: ask the run's operator for a new one" in text_of(found, "run")


@pytest.mark.slow
@needs_root
def test_faults_of_a_real_machine_are_one_line_each(tmp_path: Path) -> None:
    code, found = examine(("sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *DOCTOR))
    assert (code, wrong(found)) == (0, [("open files", "warning")])

    # A disk in memory, which no other process sees.
    full = tmp_path / "full"
    full.mkdir()
    for filled, level, expected in ((0, "warning", 0), (63, "warning", 0), (64, "failure", 2)):
        fill = f"mount -t tmpfs -o size=64m tmpfs {full}; head -c {filled}m /dev/zero > {full}/file"
        code, found = examine(
            ("unshare", "-m", "sh", "-c", f'{fill}; exec "$@"', "sh", *DOCTOR, "--cache-dir", str(full))
        )
        assert (code, wrong(found)) == (expected, [("disk", level)])
        assert str(full) in text_of(found, "disk")

    invite = Invite.issue(Identity.generate(), (), label="anna", expires=2**39, at_once=2)
    invite = Invite(invite.run_id, (f"/ip4/11.0.0.1/tcp/31337/p2p/{invite.run_id}",), invite.ticket, invite.key)
    subprocess.run(["ip", "netns", "delete", ALONE], check=False, capture_output=True)
    ip("netns", "add", ALONE)
    try:
        ip("-n", ALONE, "link", "set", "lo", "up")
        code, found = examine(("ip", "netns", "exec", ALONE, *DOCTOR), invite.text())
    finally:
        ip("netns", "delete", ALONE)
    assert (code, wrong(found)) == (2, [("run", "failure")])
    assert "nobody answers at /ip4/11.0.0.1/tcp/31337" in text_of(found, "run")


@pytest.mark.slow
@needs_root
def test_a_closed_port_is_one_line_with_the_way_to_open_it(
    tmp_path: Path,
    processes: Processes,
    network: Internet,  # noqa: F811
) -> None:
    machines = Machines(tmp_path, processes)
    serve_on(PUBLIC, machines, processes, tmp_path)
    invite = next(word for word in processes.log("coordinator").split() if word.startswith("swarm-invite-"))

    def look(machine: str, name: str) -> dict[str, Any]:
        assert machines.start(machine, name, *DOCTOR[2:], invite, "--json").wait(120) == 0
        return findings_in(processes.log(name))

    home = look(HOME, "home")
    assert wrong(home) == [("port", "warning")]
    assert f"closed to others at {network.ips[ROUTER]}:31338: forward port 31338 of the router" in text_of(home, "port")
    assert f"one that translates addresses, as {network.ips[ROUTER]}" in text_of(home, "router")

    assert wrong(look(PUBLIC, "open")) == []
    network.iptables(PUBLIC, "-A", "INPUT", "-p", "tcp", "--dport", "31338", "--syn", "-j", "DROP")
    closed = look(PUBLIC, "closed")
    assert wrong(closed) == [("port", "warning")]
    assert f"{network.ips[PUBLIC]}:31338: let port 31338 through the firewall" in text_of(closed, "port")
    assert "none that translates addresses" in text_of(closed, "router")
