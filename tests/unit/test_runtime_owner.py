"""An owner's word, the clock and the day's bytes become pauses; other shells see the peer, and speak with it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from contexts import make_context, unparsed

from swarm_peer.commands import pause as commands
from swarm_peer.errors import UserError
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.owner import Hours, OwnerPolicy, Pause, Reason
from swarm_peer.runtime import owner as owners
from swarm_peer.runtime.host import running_peers as files
from swarm_peer.runtime.host.identities import KeptFile
from swarm_peer.runtime.host.running_peers import RunningPeer, chosen, running_peers, shown, tell
from swarm_peer.runtime.owner import DailyCount, Owner, PeerCondition

OPTIONS = PeerOptions(initial_peers=("x",), name="anna")
SERVING = PeerCondition(stage=1, state="serving", note="", is_at_rest=False, left_alone="", leaving_bytes=0)
NOON = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
DAY_S = 24 * 3600


@dataclass
class WallClock:
    """Time that a test sets; both clocks go alike."""

    now_s: float = NOON

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s


@dataclass
class House:
    """An owner, its peer as far as it is told, and the machine."""

    folder: Path
    policy: OwnerPolicy = field(default_factory=OwnerPolicy)
    clock: WallClock = field(default_factory=WallClock)
    sent_bytes: int = 0
    told: list[Pause | None] = field(default_factory=list)
    condition: PeerCondition = SERVING
    files: Any = None

    def __post_init__(self) -> None:
        self.context = make_context(unparsed("m"), options=OPTIONS, clock=self.clock)
        self.count = DailyCount(KeptFile(self.folder / "sent"))
        self.owner = Owner(
            context=self.context,
            policy=self.policy,
            count=self.count,
            sent_bytes=lambda: self.sent_bytes,
            files=self.files,
        )

    async def look(self, after_s: float = 1.0, sent_bytes: int = 0) -> Pause | None:
        self.clock.now_s += after_s
        self.sent_bytes += sent_bytes
        await self.owner._look(self.condition, self.told.append)
        return self.told[-1] if self.told else None

    def paused_by(self) -> set[str]:
        samples = [each for metric in self.context.metrics.registry.collect() for each in metric.samples]
        return {each.labels["reason"] for each in samples if each.name == "swarm_paused" and each.value}


async def test_a_peer_is_told_once_of_each_change(tmp_path: Path) -> None:
    house = House(tmp_path, policy=OwnerPolicy(hours=Hours.parse("22-7")))
    assert (await house.look()).reason is Reason.HOURS
    assert house.paused_by() == {"hours"}
    await house.look()
    assert len(house.told) == 1
    assert await house.look(11 * 3600) is None
    assert house.told == [Pause(Reason.HOURS, "paused until 22:00 (hours)"), None]
    assert house.paused_by() == set()


async def test_the_bytes_of_a_day_outlive_the_process(tmp_path: Path) -> None:
    limit = 100e6

    def new_process(clock: WallClock) -> House:
        count = DailyCount(KeptFile(tmp_path / "sent"))
        policy = OwnerPolicy(max_sent_bytes_per_day=limit, spent_day=count.spent_day)
        return House(tmp_path, policy=policy, clock=clock)

    first = new_process(WallClock())
    assert await first.look(sent_bytes=40_000_000) is None
    assert await first.look(600, 10_000_000) is None
    second = new_process(first.clock)
    assert second.count.sent_bytes == 50_000_000
    assert await second.look(600, 20_000_000) is None
    spent = await second.look(600, 15_000_000)
    assert spent is not None
    assert spent.reason is Reason.DAILY_LIMIT
    second.condition = replace(SERVING, state="paused", is_at_rest=True)
    await second.look(owners.KEEP_S)
    third = new_process(second.clock)
    assert (await third.look()).reason is Reason.DAILY_LIMIT, "before it has sent a byte"
    assert await third.look(DAY_S) is None
    assert third.count.sent_bytes == 0


async def test_it_leaves_early_enough_for_what_it_still_has_to_hand_over(tmp_path: Path) -> None:
    house = House(tmp_path, policy=OwnerPolicy(max_sent_bytes_per_day=100e6))
    house.condition = replace(SERVING, leaving_bytes=20_000_000)
    assert await house.look(60, 38_000_000) is None, "as much again as it has just sent, and what it hands over"
    assert await house.look(60, 15_000_000) is None
    assert await house.look(1, 5_000_000) is not None


async def test_bytes_before_midnight_are_of_the_day_before(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.look(sent_bytes=7)
    await house.look(12 * 3600, 5)
    assert house.count.sent_bytes == 5


@pytest.mark.parametrize("content", [b"", b"no json", b"[]", b'{"sent_bytes": "x"}', b'{"day": 3}'])
def test_a_damaged_count_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sent").write_bytes(content)
    assert DailyCount(KeptFile(tmp_path / "sent")).sent_bytes == 0


async def test_sights_are_watched_and_a_peer_that_ends_leaves_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "LOOK_S", 0.001)
    monkeypatch.setattr(owners, "LOOK_AT_USE_S", 0.001)
    house = House(tmp_path)

    class Sight:
        def look(self) -> str:
            house.clock.now_s += 10
            return "the GPU is in use"

    house.owner._sights = [Sight()]
    told = anyio.Event()

    def obey(pause: Pause | None) -> None:
        house.told.append(pause)
        told.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(house.owner.run, lambda: house.condition, obey)
        with anyio.fail_after(10):
            await told.wait()
        house.sent_bytes = 11
        tasks.cancel_scope.cancel()
    assert house.told == [Pause(Reason.BUSY, "paused: the GPU is in use")]
    assert json.loads((tmp_path / "sent").read_bytes())["sent_bytes"] == 11


# --- what other shells see


HOLD = """
import sys
from pathlib import Path
from swarm_peer.runtime.host.running_peers import RunningPeer, shown
folder, peer, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with shown(folder, peer) as files:
    rest = dict(name=name, run="demo", stage=0, left_alone="nobody is left" if name == "carl" else "")
    files.show(RunningPeer(peer_id=peer, state="serving", note="", is_at_rest=False, **rest))
    print("there", flush=True)
    for line in sys.stdin:
        paused = files.is_told_to_pause()
        note = "paused by its owner" if paused else ""
        state = "paused" if paused else "serving"
        files.show(RunningPeer(peer_id=peer, state=state, note=note, is_at_rest=paused, **rest))
        print(state, flush=True)
"""


class OtherPeer:
    """A peer in a process of its own, which looks when it is told to."""

    def __init__(self, folder: Path, peer_id: str, name: str):
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), peer_id, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "there\n"

    def look(self) -> str:
        self._process.stdin.write("look\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str, str], OtherPeer]:
    started = []

    def start_one(peer_id: str, name: str = "") -> OtherPeer:
        started.append(OtherPeer(tmp_path / "peers", peer_id, name))
        return started[-1]

    yield start_one
    for peer in started:
        peer.kill()


def test_peers_are_found_while_they_run_and_nobody_else_may_write(tmp_path: Path, start: Any) -> None:
    folder = tmp_path / "peers"
    assert running_peers(folder) == []
    anna, bert = start("12D3aaaaaaaa", "anna"), start("12D3bbbbbbbb")
    assert [(peer.name, peer.peer_id) for peer in running_peers(folder)] == [
        ("", "12D3bbbbbbbb"),
        ("anna", "12D3aaaaaaaa"),
    ]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    anna.kill()
    assert [peer.peer_id for peer in running_peers(folder)] == ["12D3bbbbbbbb"]
    [about] = running_peers(folder)
    tell(folder, about, is_paused=True)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.glob("*bbb.[jp]*"))
    assert bert.look() == "paused"
    bert.kill()
    assert start("12D3bbbbbbbb").look() == "paused", "what its owner said outlives the process"
    tell(folder, about, is_paused=False)
    tell(folder, about, is_paused=False)
    assert start("12D3cccccccc").look() == "serving"


def test_a_file_of_another_version_is_passed_over(tmp_path: Path, start: Any) -> None:
    start("12D3aaaaaaaa")
    (tmp_path / "peers" / "12D3aaaaaaaa.json").write_text('{"peer_id": "x", "of_the_future": 1}')
    assert running_peers(tmp_path / "peers") == []


def test_two_with_one_identity_are_told_apart(tmp_path: Path, start: Any, caplog: pytest.LogCaptureFixture) -> None:
    start("12D3aaaaaaaa")
    with shown(tmp_path / "peers", "12D3aaaaaaaa") as second:
        assert second is None
    assert "another process runs with the same identity" in caplog.text


def test_where_nothing_can_be_written_a_peer_runs_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with shown(tmp_path / "file" / "peers", "12D3aaaaaaaa") as made:
        assert made is None
    assert "cannot_be_paused" in caplog.text


def of(peer_id: str, name: str) -> RunningPeer:
    return RunningPeer(peer_id=peer_id, name=name, run="demo", stage=0, state="serving", note="", is_at_rest=False)


def test_peers_are_named_by_name_or_by_the_end_of_their_id() -> None:
    anna, other, bert = of("12D3aaaaXYZW", "anna"), of("12D3bbbbbbbb", "anna"), of("12D3cccccccc", "bert")
    peers = [anna, other, bert]
    assert chosen(peers, ()) == peers
    assert chosen(peers, ("anna",)) == [anna, other]
    assert chosen(peers, ("XYZW", "bert")) == [anna, bert]
    with pytest.raises(UserError, match="no peer YZW is running here; there are anna"):
        chosen(peers, ("YZW",))
    with pytest.raises(UserError, match="no peer of this user is running"):
        chosen([], ("anna",))


def test_the_commands_wait_and_say_what_has_become_of_each_peer(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "running_folder", lambda: tmp_path / "peers")
    anna, bert = start("12D3aaaaaaaa", "anna"), start("12D3bbbbbbbb", "bert")
    # The peers look as the command waits.
    monkeypatch.setattr(commands.time, "sleep", lambda _: [peer.look() for peer in (anna, bert)])
    commands.pause("anna")
    assert capsys.readouterr().out == (
        "anna (…aaaaaaaa) of run demo: paused by its owner; the device's memory is free\n"
    )
    commands.resume()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "anna (…aaaaaaaa) of run demo takes part again",
        "bert (…bbbbbbbb) of run demo takes part again",
    ]
    monkeypatch.setattr(commands.time, "sleep", lambda _: anna.kill())
    commands.pause("anna")
    assert capsys.readouterr().out == "anna (…aaaaaaaa) of run demo has ended\n"
    monkeypatch.setattr(commands, "HANDOVER_S", 0.0)
    commands.pause("bert")
    assert capsys.readouterr().out == "bert (…bbbbbbbb) of run demo: still hands over its work\n"


def test_who_pauses_the_only_peer_of_a_stage_is_told_what_comes_of_it(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "running_folder", lambda: tmp_path / "peers")
    carl = start("12D3cccccccc", "carl")
    monkeypatch.setattr(commands.time, "sleep", lambda _: carl.look())
    commands.pause("carl")
    assert capsys.readouterr().out == (
        "carl (…cccccccc) of run demo: paused by its owner; the device's memory is free; nobody is left\n"
    )
