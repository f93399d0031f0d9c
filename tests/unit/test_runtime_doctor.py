"""`swarm-peer doctor` as it is typed and printed, and what it makes of what it has measured in a run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

import swarm_peer.cli
from coordinator.config_files import load_manifest
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.diagnosis.finding import failure, fine, warning
from swarm_peer.policy.diagnosis.machine_findings import DeviceFacts
from swarm_peer.policy.diagnosis.run_findings import MemberWay
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime import doctor, startup
from swarm_peer.runtime.host.ports import PortTaken
from swarm_peer.runtime.network.guarded_p2p import NobodyAnswers
from swarm_peer.runtime.network.reachability import Sight, Ways, ways_to
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite

ADDRESS = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
FOUND = (fine("device", "cpu"), warning("open files", "256 at a time are few", "raise it"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `swarm-peer doctor` with what it finds; returns its exit code, what it printed, and its options."""

    def run_line(*words, findings=FOUND):
        asked = []
        monkeypatch.setattr(doctor, "examine", lambda options: asked.append(options) or findings)
        monkeypatch.setattr(sys, "argv", ["swarm-peer", "doctor", *words])
        try:
            swarm_peer.cli.run()
            code = 0
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return code, said.out, said.err, asked[0] if asked else None

    return run_line


def test_each_finding_is_a_line(run):
    code, out, _, options = run()
    lines = ["ok    device      cpu", "warn  open files  256 at a time are few: raise it"]
    assert out.splitlines() == [*lines, "This machine can take part."]
    assert (code, options.initial_peers) == (0, ())


def test_a_machine_that_cannot_take_part_ends_it_with_code_2(run):
    code, out, _, _ = run(findings=(*FOUND, failure("run", "nobody answers\nanywhere")))
    assert (code, out.splitlines()[-2:]) == (
        2,
        ["FAIL  run         nobody answers\\nanywhere", "This machine cannot take part."],
    )


def test_a_terminal_shows_colours(run, monkeypatch):
    monkeypatch.setattr("swarm_peer.commands.doctor.sys.stdout.isatty", lambda: True, raising=False)
    assert run()[1].startswith("\x1b[32mok  \x1b[0m  device")


def test_programs_read_json(run):
    code, out, err, _ = run("--json", findings=(*FOUND, failure("run", "x", "y")))
    found = json.loads(out)
    assert (code, err, found["can_take_part"]) == (2, "", False)
    assert found["findings"][-1] == {"check": "run", "level": "failure", "seen": "x", "remedy": "y"}


def test_the_line_that_joins_works_with_doctor_in_it(run):
    _, _, _, options = run("--stage", "auto", "--initial-peers", ADDRESS, "--name", "anna", "--device", "cpu")
    assert (options.initial_peers, options.device) == ((ADDRESS,), "cpu")
    assert run(ADDRESS)[3].initial_peers == (ADDRESS,)
    code, _, err, _ = run("swarm-invite-xyz")
    assert (code, "invite is damaged" in err) == (2, True)


@pytest.mark.parametrize(
    ("error", "check", "words"),
    [
        (NobodyAnswers("no initial peer answers"), "run", "nobody answers at /ip4/127.0.0.1/tcp/9: check that"),
        (PortTaken("cannot listen on 0.0.0.0:1; name another"), "port", "cannot listen on 0.0.0.0:1; name another"),
        (UserError("the invite alice has expired: ask"), "run", "the invite alice has expired: ask"),
    ],
)
def test_a_run_that_is_not_reached_is_one_line(monkeypatch, error, check, words):
    def fail(*args):
        raise error

    monkeypatch.setattr(doctor, "run_loop", fail)
    options = SimpleNamespace(threads=None, initial_peers=(ADDRESS,), device="cpu", cache_dir=None, identity_path=None)
    (finding,) = [each for each in doctor.examine(options) if each.level == "failure"]
    assert finding.check == check
    assert finding.text.startswith(words)


def test_a_peer_that_starts_says_what_is_not_right(monkeypatch, caplog):
    class Stop(Exception):
        pass

    def stop(*args):
        raise Stop

    monkeypatch.setattr(startup, "judge_machine", lambda facts: FOUND)
    monkeypatch.setattr(startup, "claimed_device", stop)
    options = SimpleNamespace(threads=None, initial_peers=(ADDRESS,), device="cpu", cache_dir=None, metrics_port=None)
    with pytest.raises(Stop):
        startup.run_peer(options)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "not_right check=open_files reason=256 at a time are few: raise it"


def test_members_are_asked_what_they_see():
    own = ["/ip4/192.168.1.5/tcp/31338", "/ip4/127.0.0.1/tcp/31338", "/ip6/2a00::5/tcp/31338"]
    seen = [*[Sight("/ip4/11.0.0.9", ())] * 2, Sight("/ip4/192.168.1.5", (31338,)), Sight("/ip6/2a00::5", ())]
    position = doctor.position_of(ways_to(own, (), seen))
    assert position.ports == [31338]
    assert position.own_hosts == ("192.168.1.5", "127.0.0.1", "2a00::5")
    assert position.seen_hosts == ["11.0.0.9", "11.0.0.9", "2a00::5"]
    assert position.is_reachable is False
    assert "11.0.0.9:31338" in position.closed
    assert doctor.position_of(Ways(())).seen_hosts == []


@pytest.fixture(scope="module")
def resolved():
    return ResolvedManifest.of(load_manifest(Path(__file__).parents[2] / "configs" / "gpt2-124m.yaml", ()))


def peer(stage, samples_per_s, state=PeerState.SERVING):
    return PeerView(peer_id=f"{stage} {samples_per_s}", stage=stage, state=state, samples_per_s=samples_per_s)


def test_what_a_machine_would_do_in_a_run_is_what_plan_expects(resolved):
    view = SwarmView(2, (peer(0, 1.0), peer(0, 3.0), peer(0, 9.0), peer(1, 5.0, PeerState.JOINING)))
    device = DeviceFacts(flops_per_s=1e13, precision="fp32")
    way = MemberWay(peer_id="x", is_direct=True, is_reached=True, up_bytes_per_s=1e5, down_bytes_per_s=2e5)
    alone = doctor.stage_fits(resolved, view, device, [])
    assert [fit.stage for fit in alone] == [0, 1]
    assert [fit.others_samples_per_s for fit in alone] == [3.0, 0.0]
    assert not any(fit.is_linked for fit in alone)
    linked = doctor.stage_fits(resolved, view, device, [way, replace(way, up_bytes_per_s=5e4)])
    assert all(fit.is_linked for fit in linked)
    assert all(slow.samples_per_s < quick.samples_per_s for slow, quick in zip(linked, alone, strict=True))
    lent = doctor.stage_fits(resolved, view, device, [replace(way, up_bytes_per_s=1e9)], (0.4, None))
    assert [fit.samples_per_s for fit in lent] == [
        fit.samples_per_s for fit in doctor.stage_fits(resolved, view, device, [replace(way, up_bytes_per_s=5e4)])
    ]
    half = doctor.stage_fits(resolved, view, replace(device, flops_per_s=5e12), [])
    assert half[0].samples_per_s == pytest.approx(alone[0].samples_per_s / 2)


def test_snapshots_take_the_disk_that_the_run_asks_for(resolved):
    largest = doctor._snapshot_bytes(resolved)
    assert 6 * 12 * 60e6 < largest < 6 * 12 * 100e6, "of half of 163 million parameters, with AdamW"
    none = resolved.manifest.model_copy(
        update={"recovery": resolved.manifest.recovery.model_copy(update={"snapshot_every": 0})}
    )
    assert doctor._snapshot_bytes(replace(resolved, manifest=none)) == 0


class Found:
    """A DHT and a directory that hold these members."""

    def __init__(self, peers, coordinators):
        self.identity = Identity.generate()
        self.view = SimpleNamespace(peers=[SimpleNamespace(peer_id=peer_id) for peer_id in peers])
        self._coordinators = coordinators

    async def refresh(self, stages):
        return self.view

    async def fetch_coordination(self, run_id):
        return [SimpleNamespace(coordinator=coordinator) for coordinator in self._coordinators]

    def addresses_of(self, peer_id):
        return [f"announced by {peer_id}"]


@pytest.mark.parametrize(
    ("peers", "coordinators", "expected"),
    [
        ([], [], {"RUN"}),
        (["a"], ["RUN"], {"a", "RUN"}),
        (["a"], ["standby"], {"a", "standby"}),
        (["a", "b", "c"], ["RUN"], {"a", "b", "c"}),
    ],
)
def test_members_to_try_are_peers_and_then_coordinators(peers, coordinators, expected):
    found = Found(peers, coordinators)
    entrance = SimpleNamespace(addresses=("/ip4/1.2.3.4/tcp/1/p2p/a",))
    members = anyio.run(doctor._find_members, found, found, entrance, "RUN", 2)
    assert set(members) == expected
    if "a" in members:
        assert members["a"] == ["announced by a", "/ip4/1.2.3.4/tcp/1/p2p/a"]


def test_an_invite_is_read_as_the_peer_reads_it(run):
    run_key = Identity.generate()
    invite = Invite.issue(run_key, [ADDRESS], label="anna", expires=2**39, at_once=2).text()
    assert run(invite)[3].initial_peers == (invite,)


def test_a_machine_whose_disk_takes_no_file_joins_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    options = SimpleNamespace(
        threads=None, initial_peers=(ADDRESS,), device="cpu", cache_dir=tmp_path / "file", identity_path=None
    )
    monkeypatch.setattr(doctor, "run_loop", lambda *_: pytest.fail("it joins"))
    (finding,) = [each for each in doctor.examine(options) if each.level == "failure"]
    assert finding.check == "disk"
