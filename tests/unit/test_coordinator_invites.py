"""The files that a run's operator manages its invites by."""

import time

import pytest

from coordinator.run.invites import MAX_MEMBERS, InviteBook, coordinator_invite
from swarm_peer.errors import UserError
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite, Revoked, open_pass

ADDRESSES = ["/ip4/1.2.3.4/tcp/31337/p2p/x"]


@pytest.fixture
def run_key(tmp_path):
    return Identity.load_or_create(tmp_path / "identity")


@pytest.fixture
def book(tmp_path):
    return InviteBook(tmp_path)


def test_the_standing_invite_stays_the_same_until_it_is_revoked(book, run_key, tmp_path):
    first = book.standing(run_key, ADDRESSES)
    elsewhere = book.standing(run_key, ["/ip4/5.6.7.8/tcp/1/p2p/x"])
    assert (elsewhere.key.peer_id, elsewhere.addresses) == (first.key.peer_id, ("/ip4/5.6.7.8/tcp/1/p2p/x",))
    assert Invite.parse((tmp_path / "invite").read_text().strip()).addresses == elsewhere.addresses
    assert (tmp_path / "invite").stat().st_mode & 0o077 == 0
    (tmp_path / "members.json").write_text("half")
    assert book.members() == {}
    book.revoke(run_key, "serve")
    assert book.standing(run_key, ADDRESSES).key.peer_id != first.key.peer_id
    assert [listed.state for listed in book.listed(run_key.peer_id, int(time.time()))] == ["revoked", "holds"]
    (tmp_path / "invite").write_text("swarm-invite-half")
    book.standing(run_key, ADDRESSES)
    assert len(book.listed(run_key.peer_id, 0)) == 3


def test_invites_are_listed_with_their_peers_and_revoked_by_label_or_peer(book, run_key):
    made = {name: book.issue(run_key, ADDRESSES, label=name, seconds=3600, at_once=2) for name in ("alice", "bob")}
    alice, bob = (Identity.generate().peer_id for _ in range(2))
    book.keep_members({made["alice"].key.peer_id: {alice}})
    book.keep_members({made["bob"].key.peer_id: {bob}})
    with pytest.raises(UserError, match="has this label already"):
        book.issue(run_key, ADDRESSES, label="alice", seconds=3600, at_once=2)
    with pytest.raises(UserError, match=r"neither the label of an invite \(known: alice, bob\) nor the id of a peer"):
        book.revoke(run_key, "carol")
    assert book.revoke(run_key, "alice") == "the invite alice and all peers that came by it"
    with pytest.raises(UserError, match="neither the label of an invite"):
        book.revoke(run_key, bob[-5:])  # too short to be meant
    assert book.revoke(run_key, bob[-8:]) == f"the peer {bob}"
    assert book.revocations(run_key.peer_id).serial == 2
    now = int(time.time())
    assert [(each.label, each.state, each.peers, each.revoked_peers) for each in book.listed(run_key.peer_id, now)] == [
        ("alice", "revoked", (alice,), ()),
        ("bob", "holds", (bob,), (bob,)),
    ]
    assert book.listed(run_key.peer_id, now + 7200)[1].state == "expired"
    book.issue(run_key, ADDRESSES, label="alice", seconds=3600, at_once=2)


def test_a_line_that_is_no_invite_is_named(book, run_key, tmp_path):
    book.issue(run_key, ADDRESSES, label="alice", seconds=3600, at_once=2)
    with (tmp_path / "invites.jsonl").open("a") as file:
        file.write('{"label": "bo\n')
    with pytest.raises(UserError, match=r"invites\.jsonl: line 2 is no invite \(.*\); remove it, and keep the others"):
        book.issued()


def test_where_an_invite_cannot_be_written_down_the_others_stay(book, run_key, tmp_path, monkeypatch):
    book.issue(run_key, ADDRESSES, label="alice", seconds=3600, at_once=2)
    known = (tmp_path / "invites.jsonl").read_text()

    def fail(_):
        raise OSError("the disk is full")

    monkeypatch.setattr("swarm_peer.files.os.fsync", fail)
    with pytest.raises(OSError, match="full"):
        book.issue(run_key, ADDRESSES, label="bob", seconds=3600, at_once=2)
    assert (tmp_path / "invites.jsonl").read_text() == known


def revoking(tmp_path, run_key, name, peers):
    """A folder of the run, whose operator has revoked these peers; and a coordinator that serves from it."""
    folder = tmp_path / name
    folder.mkdir()
    book = InviteBook(folder)
    for peer in peers:
        book.revoke(run_key, peer)
    return book, PassChecker(run_key.peer_id, clock=SystemClock())


@pytest.mark.parametrize(("here", "there"), [(1, 1), (1, 2), (2, 1), (0, 1), (1, 0)])
def test_two_folders_of_a_run_revoke_what_either_does(run_key, tmp_path, here, there):
    peers = [Identity.generate().peer_id for _ in range(here + there)]
    one = revoking(tmp_path, run_key, "one", peers[:here])
    other = revoking(tmp_path, run_key, "other", peers[here:])
    told = []
    for (book, passes), (_, others_passes) in [(one, other), (other, one)] * 4:
        told.append(passes.learn(book.merge(run_key, passes.revoked)))
        others_passes.learn(passes.revocations)
    assert not any(told[4:]), "they agree"
    for book, passes in (one, other):
        assert passes.revoked.peers == set(peers)
        assert set(book.revocations(run_key.peer_id).peers) == set(peers)
    assert one[1].revocations == other[1].revocations


def test_a_list_that_cannot_be_read_is_named_and_stops_nothing_else(book, run_key, tmp_path):
    known = book.standing(run_key, ADDRESSES)
    (tmp_path / "revocations").write_bytes(b"half")
    assert book.standing(run_key, ADDRESSES).key.peer_id == known.key.peer_id
    with pytest.raises(
        UserError, match=r"revocations is not this run's list of what was revoked \(.*\): nothing in it"
    ):
        book.merge(run_key, Revoked(0, frozenset(), frozenset()))


def test_few_of_many_members_are_written_down(book):
    book.keep_members({"ticket": [f"{number:05}" for number in range(2 * MAX_MEMBERS)]})
    book.keep_members({"ticket": ["late"]})
    assert len(book.members()["ticket"]) == MAX_MEMBERS


def test_a_coordinator_invites_itself(run_key):
    peer = Identity.generate().peer_id
    assert open_pass(coordinator_invite(run_key).pass_for(peer), run_key.peer_id).peer_id == peer


def test_peers_have_the_label_of_the_invite_that_they_came_by(book, run_key):
    ticket = book.issue(run_key, ADDRESSES, label="alice", seconds=60, at_once=8).opened_ticket()
    everybody = book.standing(run_key, ADDRESSES).opened_ticket()
    book.keep_members({ticket.key: ["a", "b"], everybody.key: ["c"], "of another run": ["d"]})
    assert book.labels() == {"a": "alice", "b": "alice"}
