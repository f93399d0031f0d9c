"""Tickets, passes and invites, and who is let in by them."""

import base64
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from swarm_peer.errors import InvalidMessage, NotAdmitted, UserError
from swarm_peer.protocol.statements import Seat
from swarm_peer.runtime.host.identities import KeptFile
from swarm_peer.runtime.network.agreement import ticket_of
from swarm_peer.runtime.network.pass_checker import SEEN_S, PassChecker
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import (
    INVITE_PREFIX,
    MAX_INVITE_ADDRESSES,
    Invite,
    Revocations,
    Revoked,
    TicketRecord,
    open_pass,
)
from swarm_peer.wire.records import seal

RUN, OTHER_RUN = Identity.generate(), Identity.generate()
ALICE, BOB, MALLORY = (Identity.generate().peer_id for _ in range(3))
NOW = 2_000_000_000


class Clock:
    now_s = float(NOW)

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s


def invite(run: Identity = RUN, expires: int = NOW + 3600, at_once: int = 2, label: str = "friends") -> Invite:
    return Invite.issue(run, ["/ip4/1.2.3.4/tcp/31337/p2p/x"], label=label, expires=expires, at_once=at_once)


def revoking(*, key: Identity = RUN, **changes: Any) -> bytes:
    fields = {"serial": 1, "tickets": (), "peers": ()} | changes
    return seal(Revocations(**fields), RUN.peer_id, key)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checker(clock: Clock) -> PassChecker:
    return PassChecker(RUN.peer_id, clock=clock)


def test_an_invite_survives_its_text_and_lets_its_holder_in(checker: PassChecker) -> None:
    given = Invite.parse(invite().text())
    assert given.addresses == ("/ip4/1.2.3.4/tcp/31337/p2p/x",)
    known = checker.check(ALICE, given.pass_for(ALICE))
    assert known is not None
    assert (known.peer_id, known.ticket.label) == (ALICE, "friends")
    assert checker.members() == {known.ticket.key: [ALICE]}


def test_the_run_itself_needs_no_pass_and_an_open_run_asks_for_none(checker: PassChecker, clock: Clock) -> None:
    assert checker.check(RUN.peer_id, b"") is None
    assert PassChecker(None, clock=clock).check(MALLORY, b"") is None


FRIENDS = invite()
SELF_MADE = Invite(RUN.peer_id, (), invite(OTHER_RUN).ticket, Identity.generate())
TICKET = TicketRecord(key=SELF_MADE.key.peer_id, label="x", expires=NOW + 3600, at_once=9)
FORGED = Invite(RUN.peer_id, (), seal(TICKET, RUN.peer_id, SELF_MADE.key), SELF_MADE.key)


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (b"", "by invitation"),
        (b"\xc1", "none of run"),
        (b"x" * 2000, "none of run"),
        (invite(OTHER_RUN).pass_for(MALLORY), "none of run"),
        (SELF_MADE.pass_for(MALLORY), "none of run"),
        (FORGED.pass_for(MALLORY), "none of run"),
        (Invite(RUN.peer_id, (), FRIENDS.ticket, SELF_MADE.key).pass_for(MALLORY), "none of run"),  # without its key
        (FRIENDS.pass_for(ALICE), "not"),
        (invite(expires=NOW - 1).pass_for(MALLORY), "has expired"),
    ],
)
def test_strangers_are_told_why_they_are_not_let_in(checker: PassChecker, shown: bytes, why: str) -> None:
    with pytest.raises(NotAdmitted, match=why):
        checker.check(MALLORY, shown)
    assert checker.members() == {}


def test_a_peer_came_by_the_tickets_that_it_has_shown(checker: PassChecker) -> None:
    given = invite()
    ticket = given.opened_ticket().key
    assert not checker.came_by(ALICE, ticket)
    checker.check(ALICE, given.pass_for(ALICE))
    assert checker.came_by(ALICE, ticket)
    assert not checker.came_by(BOB, ticket), "it has shown nothing"
    assert not checker.came_by(ALICE, ""), "whoever was invited votes with that ticket"
    assert checker.came_by(RUN.peer_id, "")
    assert not checker.came_by(RUN.peer_id, ticket)
    revoked = Revocations(serial=1, tickets=(), peers=(ALICE,))
    checker.learn(seal(revoked, RUN.peer_id, RUN))
    assert not checker.came_by(ALICE, ticket)


def test_a_seat_names_the_ticket_of_its_peer(clock: Clock) -> None:
    given = invite()
    own = PassChecker(RUN.peer_id, clock=clock, own_pass=given.pass_for(ALICE))
    ticket = ticket_of(own, ALICE)
    assert ticket.own == given.opened_ticket().key
    assert ticket.is_of(Seat(ALICE, 1, ticket.own)), "this peer need not show itself a pass"
    assert not ticket.is_of(Seat(ALICE, 1, ""))
    assert not ticket.is_of(Seat(BOB, 1, ticket.own))
    assert ticket.is_of(Seat(RUN.peer_id, 1, ""))
    key = ticket_of(PassChecker(RUN.peer_id, clock=clock, own_pass=given.pass_for(RUN.peer_id)), RUN.peer_id)
    assert (key.own, key.is_of(Seat(RUN.peer_id, 1, ""))) == ("", True), "no other node asks it for a pass"
    everybody = ticket_of(PassChecker(None, clock=clock), ALICE)
    assert (everybody.own, everybody.is_of(Seat(BOB, 1, "")), everybody.is_of(Seat(BOB, 1, "x"))) == ("", True, False)


def test_as_many_as_the_ticket_is_for_and_others_once_they_are_gone(checker: PassChecker, clock: Clock) -> None:
    given = invite(at_once=2)
    for peer in (ALICE, BOB, ALICE):
        checker.check(peer, given.pass_for(peer))
    with pytest.raises(NotAdmitted, match="2 peers at a time"):
        checker.check(MALLORY, given.pass_for(MALLORY))
    clock.now_s += SEEN_S / 2
    checker.check(BOB, given.pass_for(BOB))
    clock.now_s += SEEN_S / 2 + 1
    checker.check(MALLORY, given.pass_for(MALLORY))
    with pytest.raises(NotAdmitted, match="2 peers at a time"):
        checker.check(ALICE, given.pass_for(ALICE))


def test_a_member_stays_though_others_come_by_its_ticket(clock: Clock) -> None:
    given = invite(at_once=1)
    mine = PassChecker(RUN.peer_id, clock=clock, own_pass=given.pass_for(ALICE))
    mine.check(BOB, given.pass_for(BOB))
    mine.check_own(ALICE)
    mine.learn(revoking(peers=(ALICE,)))
    with pytest.raises(NotAdmitted, match="revoked"):
        mine.check_own(ALICE)


def test_what_was_revoked_holds_no_more(checker: PassChecker) -> None:
    friends, others = invite(), invite(label="others")
    for given in (friends, others):
        checker.check(ALICE, given.pass_for(ALICE))
    assert checker.learn(revoking(tickets=(friends.key.peer_id,)))
    with pytest.raises(NotAdmitted, match="revoked"):
        checker.check(ALICE, friends.pass_for(ALICE))
    checker.check(ALICE, others.pass_for(ALICE))
    assert not checker.is_revoked(ALICE)
    assert checker.learn(revoking(serial=2, peers=(ALICE,)))
    assert checker.is_revoked(ALICE)
    with pytest.raises(NotAdmitted, match="revoked"):
        checker.check(ALICE, others.pass_for(ALICE))
    assert not checker.learn(revoking(serial=1)), "an older list is played back"
    assert not checker.learn(b"")


def test_who_was_revoked_stays_so_whatever_newer_lists_leave_out(checker: PassChecker) -> None:
    """Two folders of one run may have made lists without each other's."""
    friends = invite()
    assert checker.learn(revoking(serial=2, peers=(ALICE,)))
    assert not checker.learn(revoking(serial=2, peers=(BOB,)))
    assert checker.learn(revoking(serial=3, peers=(MALLORY,)))
    for peer in (ALICE, BOB, MALLORY):
        with pytest.raises(NotAdmitted, match="revoked"):
            checker.check(peer, friends.pass_for(peer))
    assert checker.revoked == Revoked(3, frozenset(), frozenset({ALICE, BOB, MALLORY}))


def test_who_came_by_a_revoked_invite_is_known_by_it(checker: PassChecker) -> None:
    friends, others = invite(), invite(label="others")
    checker.check(ALICE, friends.pass_for(ALICE))
    checker.check(BOB, others.pass_for(BOB))
    checker.learn(revoking(tickets=(friends.key.peer_id,)))
    assert [checker.is_revoked(peer) for peer in (ALICE, BOB, MALLORY)] == [True, False, False]


def test_what_was_revoked_outlives_a_restart(checker: PassChecker, clock: Clock, tmp_path: Path) -> None:
    friends = invite()
    file = tmp_path / "state" / "revoked"
    checker.keep_in(KeptFile(file))
    assert checker.learn(revoking(tickets=(friends.key.peer_id,)))
    again = PassChecker(RUN.peer_id, clock=clock)
    again.keep_in(KeptFile(file))
    with pytest.raises(NotAdmitted, match="revoked"):
        again.check(ALICE, friends.pass_for(ALICE))
    file.write_bytes(b"half")
    PassChecker(RUN.peer_id, clock=clock).keep_in(KeptFile(file))


def test_nobody_else_revokes(checker: PassChecker) -> None:
    with pytest.raises(InvalidMessage):
        checker.learn(revoking(peers=(ALICE,), key=OTHER_RUN))


def test_a_damaged_invite_is_not_repeated_to_the_screen() -> None:
    text = invite().text()
    for damaged in (text[:-20], text[:60] + "A" + text[61:], "swarm-invite-", "swarm-invite-%%%", text * 9):
        with pytest.raises(UserError, match="damaged") as caught:
            Invite.parse(damaged)
        assert damaged[20:] not in str(caught.value) or len(damaged) < 25


@pytest.mark.parametrize(
    "address",
    [
        f"/ip4/1.2.3.4/tcp/31337/p2p/{RUN.peer_id}",
        f"/ip4/1.2.3.4/tcp/65535/p2p/{ALICE}",
        f"/ip6/2600::1/tcp/0/p2p/{ALICE}",
        # As they are, since their other spelling would be another text.
        f"/ip6/2600:0::1/tcp/1/p2p/{ALICE}",
        f"/ip4/1.2.3.4/tcp/031337/p2p/{ALICE}",
        f"/ip4/1.2.3.4/tcp/-1/p2p/{ALICE}",
        f"/ip4/1.2.3.4/tcp/65536/p2p/{ALICE}",
        f"/ip6/1.2.3.4/tcp/1/p2p/{ALICE}",
        f"/dns4/example.org/tcp/31337/p2p/{ALICE}",
        "example.org:31337/QmOfAnotherKind",
        "",
    ],
    # The peer ids are others each time, and all workers must find the same names of tests.
    ids=lambda address: address.partition("/p2p/")[0],
)
def test_addresses_survive_the_text_of_an_invite(address: str) -> None:
    given = Invite.issue(RUN, [address, address], label="a", expires=NOW, at_once=1)
    assert Invite.parse(given.text()).addresses == (address, address)


def fields_of(given: Invite) -> list[Any]:
    encoded = given.text().removeprefix(INVITE_PREFIX)
    return list(msgpack.unpackb(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))))


def text_of(fields: list[Any]) -> str:
    return INVITE_PREFIX + base64.urlsafe_b64encode(msgpack.packb(fields)).decode().rstrip("=")


def test_an_invite_of_before_addresses_were_packed_still_holds() -> None:
    _, _, ticket, key = fields_of(FRIENDS)
    addresses = [f"/ip4/1.2.3.4/tcp/31337/p2p/{RUN.peer_id}", "other.example.org:1/x"]
    given = Invite.parse(text_of([RUN.peer_id, addresses, ticket, key]))
    assert (given.run_id, given.addresses, given.key.peer_id) == (RUN.peer_id, tuple(addresses), FRIENDS.key.peer_id)


@pytest.mark.parametrize(
    "address",
    [
        b"",
        7,
        [b"", b"\1\2\3", 1],
        [b"", b"\1\2\3\4", -1],
        [b"", b"\1\2\3\4", 65536],
        [b"", b"\1\2\3\4", "1"],
        [b"k" * 31, b"\1\2\3\4", 1],
        [b"k" * 3000, b"\1\2\3\4", 1],
        [b"", b"\1\2\3\4", 1, 1],
        {},
    ],
)
def test_an_invite_with_what_is_no_address_is_damaged(address: Any) -> None:
    run, _, ticket, key = fields_of(FRIENDS)
    with pytest.raises(UserError, match="damaged"):
        Invite.parse(text_of([run, [address], ticket, key]))


def test_of_many_addresses_the_first_ones_are_taken() -> None:
    many = [f"/ip4/1.2.3.4/tcp/{port}/p2p/{ALICE}" for port in range(1000)]
    given = Invite.issue(RUN, many, label="a", expires=NOW, at_once=1)
    assert Invite.parse(given.text()).addresses == tuple(many[:MAX_INVITE_ADDRESSES])
    run, _, ticket, key = fields_of(FRIENDS)
    crowded = text_of([run, [[b"", b"\1\2\3\4", port] for port in range(200)], ticket, key])
    assert len(Invite.parse(crowded).addresses) == MAX_INVITE_ADDRESSES


@pytest.mark.parametrize("label", ["", "x" * 65, "a b", "<b>", "a\n"])
def test_labels_are_names(label: str) -> None:
    with pytest.raises(ValueError, match="label"):
        invite(label=label)


def test_a_pass_is_checked_in_little_time() -> None:
    shown = [(peer, invite().pass_for(peer)) for peer in (Identity.generate().peer_id for _ in range(50))]
    begin = time.process_time()
    for peer, data in shown:
        assert open_pass(data, RUN.peer_id).peer_id == peer
    assert time.process_time() - begin < 50 * 0.01
