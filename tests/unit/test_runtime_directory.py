import asyncio
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import anyio
import anyio.lowlevel
import pytest
from contexts import MovedClock
from test_wire_records import ANNOUNCEMENT

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError
from swarm_peer.policy.view import PeerState, PeerView, TimeShares
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network import directory as directory_module
from swarm_peer.runtime.network.directory import LOOKS_AT_ONCE, Directory
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import stage_key

MANIFEST = RunManifest.model_validate(
    {
        "name": "test",
        "model": {"config": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3}},
        "stages": {"count": 2},
        "data": {"sequence_length": 12},
        "training": {"steps": 10, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.01},
    }
)


class Announcements:
    """What is in the DHT: of each peer its last announcement."""

    def __init__(self):
        self.serials = {"a": 1, "b": 1}
        self.addresses = ()  # of this node
        self.announced = ()
        self.left = set()  # of stage 1
        self.elsewhere = {}  # by stage and peer
        self.stored = []
        self.identity = Identity.generate()

    async def fetch(self, key, kind, subject):
        stage = int(key[-1])
        elsewhere = {peer: record for (at, peer), record in self.elsewhere.items() if at == stage}
        if stage != 1:
            return elsewhere
        return elsewhere | {
            peer: ANNOUNCEMENT.model_copy(
                update={
                    "serial": serial,
                    "addresses": self.announced,
                    "state": "left" if peer in self.left else "serving",
                }
            )
            for peer, serial in self.serials.items()
        }

    async def store(self, key, record, subject, lifetime_s):
        self.stored.append((key, record))


@pytest.fixture
def dht():
    return Announcements()


@pytest.fixture
async def directory(dht):
    directory = Directory(
        manifest=MANIFEST, dht=dht, clock=SystemClock(), metrics=PeerMetrics(), changed=Condition(), device="cpu"
    )
    await directory.refresh([0, 1])
    return directory


def seen(directory):
    return [peer.peer_id for peer in directory.view.peers]


async def test_who_cannot_be_reached_is_out_of_the_view_until_it_announces_itself_again(directory, dht):
    assert seen(directory) == ["a", "b"]
    directory.drop("a")
    assert seen(directory) == ["b"]
    await directory.refresh([0, 1])
    assert seen(directory) == ["b"]
    dht.serials["a"] = 2
    await directory.refresh([0, 1])
    assert seen(directory) == ["a", "b"]


async def test_stages_are_looked_up_side_by_side(directory, dht, monkeypatch):
    fetch, looking, together = dht.fetch, [], asyncio.Event()

    async def slowly(key, kind, subject):
        looking.append(key)
        if len(looking) == LOOKS_AT_ONCE:
            together.set()
        await together.wait()
        return await fetch("0", kind, subject)

    monkeypatch.setattr(dht, "fetch", slowly)
    await directory.refresh(range(3 * LOOKS_AT_ONCE))
    assert len(looking) == 3 * LOOKS_AT_ONCE


async def test_where_the_dht_does_not_answer_the_rest_of_the_view_stays(directory, dht, monkeypatch):
    async def silent(key, kind, subject):
        raise CallError("no answer")

    monkeypatch.setattr(dht, "fetch", silent)
    with pytest.raises(CallError, match="no answer"):
        await directory.refresh([0, 1])
    assert seen(directory) == ["a", "b"]


async def test_who_has_said_goodbye_is_not_waited_for(directory, dht):
    directory.drop("a", serial=5)
    assert seen(directory) == ["b"]
    dht.serials["a"] = 5  # its last words, which come late
    await directory.refresh([0, 1])
    assert seen(directory) == ["b"]


async def test_a_goodbye_of_a_former_life_does_not_drop_a_newer_one(directory, dht):
    dht.serials["a"] = 9
    await directory.refresh([0, 1])
    directory.drop("a", serial=5)
    assert seen(directory) == ["a", "b"]
    directory.drop("a", serial=9)
    assert seen(directory) == ["b"]


async def test_a_newer_life_is_seen_after_the_goodbye_of_the_former_one(directory, dht):
    directory.drop("a", serial=5)
    dht.serials["a"] = 6
    await directory.refresh([0, 1])
    assert seen(directory) == ["a", "b"]


async def test_who_was_revoked_is_gone_at_once(directory, dht):
    dht.passes = SimpleNamespace(is_revoked=lambda peer_id: peer_id == "a")
    dht.p2p = SimpleNamespace(tell_revocations=AsyncMock())
    await directory.drop_revoked()
    assert seen(directory) == ["b"]
    dht.p2p.tell_revocations.assert_awaited_once_with("a")
    await directory.refresh([0, 1])
    assert seen(directory) == ["b"], "its last announcement is still about"


async def test_who_has_left_its_stage_is_gone_at_once(directory, dht):
    dht.left, dht.serials["a"] = {"a"}, 2
    await directory.refresh([1])
    assert (seen(directory), directory.view.left) == (["b"], {"a"})
    assert [directory.has_left(peer) for peer in ("a", "b", "nobody")] == [True, False, False]
    assert directory.view.serving(1) == directory.view.in_stage(1) == directory.view.peers
    directory.drop("a")
    assert "a" not in [peer.peer_id for peer in directory.overdue()]


async def test_who_has_left_one_stage_for_another_is_seen_there(directory, dht):
    dht.left, dht.serials["a"] = {"a"}, 2
    dht.elsewhere[0, "a"] = ANNOUNCEMENT.model_copy(update={"serial": 3, "stage": 0, "state": "joining"})
    for stages in ([0, 1], [1, 0], [1]):
        await directory.refresh(stages)
        [a, _] = directory.view.peers
        assert (a.peer_id, a.stage, a.state, directory.view.left) == ("a", 0, PeerState.JOINING, frozenset())
        assert not directory.has_left("a")
    dht.left, dht.serials["a"] = set(), 4
    await directory.refresh([0, 1])
    assert directory.view.peer("a").stage == 1, "it has come back"


async def test_who_a_caller_is_stays_known_for_longer_than_it_is_in_the_view(dht):
    clock = MovedClock(now=100.0)
    directory = Directory(manifest=MANIFEST, dht=dht, clock=clock, metrics=PeerMetrics(), changed=Condition())
    assert not directory.takes_part("a")
    await directory.refresh([1])
    directory.drop("a")  # this peer cannot dial it, but is called by it
    clock.now += 1.5 * MANIFEST.limits.announcement_s
    await directory.refresh([0])
    assert seen(directory) == []
    assert directory.serves("a", 1)
    assert not directory.serves("a", 0)
    assert directory.takes_part("a")
    clock.now += MANIFEST.limits.announcement_s
    await directory.refresh([0])
    assert not directory.serves("a", 1)
    assert not directory.takes_part("a")


@pytest.mark.parametrize(
    ("state", "serves", "takes_part"),
    [
        ("joining", False, True),
        ("serving", True, True),
        ("draining", True, True),
        ("left", False, False),
        ("paused", False, True),
    ],
)
async def test_who_may_send_microbatches_has_announced_that_it_serves(directory, dht, state, serves, takes_part):
    dht.elsewhere[0, "c"] = ANNOUNCEMENT.model_copy(update={"serial": 3, "stage": 0, "state": state})
    await directory.refresh([0, 1])
    assert (directory.serves("c", 0), directory.takes_part("c")) == (serves, takes_part)


def standing_at(round_number, state="serving", serial=3):
    return ANNOUNCEMENT.model_copy(
        update={
            "serial": serial,
            "stage": 0,
            "state": state,
            "round_number": round_number,
            "optimizer_step": round_number,
        }
    )


async def test_that_a_peer_has_left_is_forgotten_like_any_announcement(dht):
    clock = MovedClock(now=100.0)
    directory = Directory(manifest=MANIFEST, dht=dht, clock=clock, metrics=PeerMetrics(), changed=Condition())
    dht.left = {"a"}
    await directory.refresh([0, 1])
    assert directory.view.left == {"a"}
    dht.serials = {}
    clock.now += MANIFEST.limits.announcement_s + 1
    await directory.refresh([0, 1])
    assert directory.view.left == frozenset()


async def test_strangers_cannot_be_dropped(directory):
    directory.drop("nobody")
    assert seen(directory) == ["a", "b"]


async def test_addresses_are_those_that_peers_in_view_tell_of_themselves(dht):
    here, there = (Identity.generate().peer_id for _ in range(2))
    dht.serials = {here: 1, there: 1}
    dht.announced = (f"/ip4/1.2.3.4/tcp/5/p2p/{here}", "/ip4/1.2.3.4", f"/unix/x/p2p/{here}", "")
    directory = Directory(
        manifest=MANIFEST, dht=dht, clock=SystemClock(), metrics=PeerMetrics(), changed=Condition(), device="cpu"
    )
    assert directory.addresses() == []
    await directory.refresh([0, 1])
    assert directory.addresses() == [f"/ip4/1.2.3.4/tcp/5/p2p/{here}"], "the other one tells of a stranger"
    directory.drop(here)
    assert directory.addresses() == []


@pytest.mark.parametrize(("own", "number"), [("/ip4/192.168.1.5/tcp/7", 0), ("/ip4/127.0.0.1/tcp/7", 1)])
async def test_nobody_is_sought_on_this_machine_unless_the_whole_swarm_is_there(dht, own, number):
    here = Identity.generate().peer_id
    dht.serials, dht.addresses = {here: 1}, (f"{own}/p2p/me",)
    dht.announced = (f"/ip4/127.0.0.1/tcp/22/p2p/{here}", f"/ip4/0.0.0.0/tcp/22/p2p/{here}")
    directory = Directory(manifest=MANIFEST, dht=dht, clock=MovedClock(), metrics=PeerMetrics(), changed=Condition())
    await directory.refresh([1])
    assert directory.addresses() == list(dht.announced[:number])


# --- this peer's own announcements ------------------------------------------------------------------------------------


def own_directory(dht, clock):
    """The directory of a peer that serves stage 1 in the life with number 5, until `me` has another state."""
    me = PeerView(peer_id=dht.identity.peer_id, stage=1, state=PeerState.SERVING, incarnation=5)
    directory = Directory(
        manifest=MANIFEST,
        dht=dht,
        clock=clock,
        metrics=PeerMetrics(),
        changed=Condition(),
        describe_self=lambda: directory.me,
    )
    directory.me = me
    return directory


async def leave(directory):
    directory.me = replace(directory.me, state=PeerState.LEFT)
    await directory.announce()


async def test_a_peer_announces_all_that_others_know_of_it(dht):
    clock = MovedClock(now=2.0)
    directory = own_directory(dht, clock)
    shares = TimeShares(60, 25, 5)
    told = {
        "state": "serving",
        "moving_to": 0,
        "is_reachable": True,
        "name": "mine",
        "relays": ("other",),
        "neighbours": (("a", "", 3, 4),),
        "unreached": ("b",),
    }
    told |= {"upload_bytes_per_s": 1e6, "download_bytes_per_s": 2e6, "device_samples_per_s": 9.0}
    said = ANNOUNCEMENT.model_copy(update=told).view(dht.identity.peer_id, 1.0)
    assert [field.name for field in fields(said) if getattr(said, field.name) == field.default] == ["work_per_s"]
    directory.me = replace(said, time_shares=shares)
    await directory.announce()
    [(_, announced)] = dht.stored
    heard = announced.view(dht.identity.peer_id, clock.now)
    assert heard == replace(directory.me, announced=directory.serial, device="", version=heard.version)


async def test_a_peer_announces_which_life_it_is_in(dht):
    directory = own_directory(dht, MovedClock(now=2.0))
    await directory.announce()
    [(key, announcement)] = dht.stored
    assert (key, announcement.incarnation) == (stage_key(MANIFEST.hash, 1), 5)
    assert directory.view.peer(dht.identity.peer_id).incarnation == 5


async def test_a_peer_is_announced_and_others_are_looked_for_meanwhile(dht, monkeypatch):
    clock = MovedClock(now=2.0)
    directory = own_directory(dht, clock)
    monkeypatch.setattr(directory_module, "ANNOUNCEMENTS_PER_LIFETIME", 1e6)
    monkeypatch.setattr(directory_module, "FAST_POLL_S", 0.0)
    monkeypatch.setattr(directory_module, "SLOW_POLL_S", 0.0)
    with anyio.fail_after(5):
        async with directory.kept_fresh([1]):
            while len(dht.stored) < 3 or set(seen(directory)) != {"a", "b", dht.identity.peer_id}:
                await anyio.lowlevel.checkpoint()
    num_stored = len(dht.stored)
    await anyio.sleep(0.01)
    assert len(dht.stored) == num_stored


async def test_serial_numbers_grow_whatever_the_clock_says(dht):
    clock = MovedClock(now=2.0)
    directory = own_directory(dht, clock)
    directory.serial = 1999
    for now in (2.0, 2.0, 1.0, 3.0):
        clock.now = now
        await directory.announce()
    assert [announcement.serial for _, announcement in dht.stored] == [2000, 2001, 2002, 3000]


async def test_a_peer_that_leaves_says_so_under_its_stage_and_announces_nothing_more(dht):
    directory = own_directory(dht, MovedClock(now=2.0))
    await directory.announce()
    await leave(directory)
    await directory.announce()
    [(key, before), (left_key, tombstone)] = dht.stored
    assert left_key == key == stage_key(MANIFEST.hash, 1)
    assert (before.state, tombstone.state, tombstone.stage) == ("serving", "left", 1)
    assert tombstone.serial == directory.serial == before.serial + 1
    assert tombstone.incarnation == 5
    assert directory.view.peers == (), "it does not see itself there any more"
    directory.me = replace(directory.me, stage=0, state=PeerState.JOINING)
    await directory.announce()
    assert dht.stored[-1][0] == stage_key(MANIFEST.hash, 0), "it has moved"


async def test_no_announcement_follows_while_a_peer_says_that_it_has_left(dht):
    directory = own_directory(dht, MovedClock(now=2.0))
    store = dht.store

    async def announce_meanwhile(*record):
        await store(*record)
        await directory.announce()

    dht.store = announce_meanwhile
    await leave(directory)
    assert [announcement.state for _, announcement in dht.stored] == ["left"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"moved_from": 2}, "stage 1, moved from 2, moving to -1; the run has stages 0 to 1"),
        ({"moved_from": 255}, "moved from 255"),
        ({"moving_to": 2}, "moving to 2; the run has stages 0 to 1"),
        ({"moving_to": 1}, "a move from stage 1 to 1"),
        ({"stage": 0}, "stage 0 under the key of stage 1"),
        ({"stage": 2}, "stage 2, moved from -1"),
        ({"stage": -1}, "serving, and no stage"),
    ],
)
async def test_what_cannot_be_of_this_run_is_logged_and_left_out(directory, dht, caplog, change, reason):
    dht.serials = {"a": 2}
    dht.elsewhere = {(1, "liar"): ANNOUNCEMENT.model_copy(update={"state": "serving", "moved_from": -1} | change)}
    view = await directory.refresh([1])
    assert [peer.peer_id for peer in view.peers] == ["a", "b"]
    assert view.peer("a").announced == 2, "the others are heard"
    assert "invalid_record peer=liar" in caplog.text
    assert reason in caplog.text
    assert directory._metrics.invalid_messages.labels("record")._value.get() == 1


async def test_stages_that_were_looked_up_a_short_time_ago_are_not_looked_up_again(dht):
    asked = []
    fetch = dht.fetch

    async def counted(key, kind, subject):
        asked.append(int(key[-1]))
        return await fetch(key, kind, subject)

    dht.fetch = counted
    clock = MovedClock(now=100.0)
    directory = Directory(manifest=MANIFEST, dht=dht, clock=clock, metrics=PeerMetrics(), changed=Condition())
    await directory.refresh([1])
    clock.now = 104.0
    assert len((await directory.refresh_surely([0, 1], max_age_s=5.0)).peers) == 2
    assert asked == [1, 0]
    clock.now = 105.0
    await directory.refresh_surely([0, 1], max_age_s=5.0)
    assert asked == [1, 0, 1]
    await directory.refresh_surely([0, 1])
    assert asked == [1, 0, 1, 0, 1]
