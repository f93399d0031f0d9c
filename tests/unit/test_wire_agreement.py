"""Messages of the protocol come back as they were sent, and nothing else comes through."""

import contextlib
import dataclasses
import itertools
import types
import typing
from random import Random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.epochs import COORDINATORS, Certified, Epoch, Place
from swarm_peer.protocol.log import Close, Committed, Contribution, Cut, Done, Entry, Have, Name, Part, Pass, Receipt
from swarm_peer.protocol.messages import Alive, Commit, Fetch, Message, News, Said, Wanted
from swarm_peer.protocol.statements import EpochId, Join, KeySigned, Seat, Signed, Silent
from swarm_peer.wire import agreement as wire
from swarm_peer.wire.agreement import CLASSES, MAX_MESSAGE_BYTES, SIGNATURE_BYTES, Statements
from swarm_peer.wire.identity import Identity

RUN, ALICE, BOB = Identity.generate(), Identity.generate(), Identity.generate()
KEY, A, B = (Statements(RUN.peer_id, identity) for identity in (RUN, ALICE, BOB))
SEAT, OTHER = (Seat(identity.peer_id, 7, "a ticket") for identity in (ALICE, BOB))
ID = EpochId(1, SEAT, 3)


def committed():
    base = ("head of 0", "head of 1")
    receipt = B.sign(Receipt(OTHER, ID, SEAT, 4, 8, base))
    done = A.sign(Done(SEAT, ID, 4, 0, 8, base, (receipt,)))
    contribution = Contribution(Name(SEAT, 4), 8, (WindowRange(0, 2, 0, 8, True),), base)
    cut = Cut(
        stage=0,
        round=4,
        epoch=ID,
        attempt=1,
        parent="head",
        root="",
        base=base,
        averages=True,
        parts=(Part(SEAT, (contribution,)),),
    )
    agreement = (A.sign(Have(SEAT, ID, cut.hash, "digest")), B.sign(Pass(OTHER, ID, cut.hash)))
    return Committed(Entry(cut, "digest"), agreement, Close(4, (done,)))


def news():
    epoch = Epoch(ID, (Place(COORDINATORS, SEAT), Place(0, OTHER)), begun=(0,))
    return News((Certified(epoch, (KEY.sign(KeySigned(epoch.hash)),)),))


BODIES = [
    Alive(),
    Fetch(),
    Commit(committed()),
    news(),
    Wanted(A.sign(Join(SEAT, ID, COORDINATORS, False))),
    Wanted(A.sign(Silent(SEAT, ID, frozenset({SEAT, OTHER})))),
    Said(1, B.sign(Pass(OTHER, ID, "cut"))),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_message_comes_back(body):
    message = Message(SEAT, ID, body)
    found = B.decode(Message, A.encode(message))
    assert found == message
    if not isinstance(body, Wanted):  # a wish may hold a set, which has no order, and no hash is made of one
        assert repr(found) == repr(message), "hashes are made of it"


class Unchecked(Statements):
    """Believes every signature."""

    def check(self, signed):
        pass


EVERYTHING = Unchecked(RUN.peer_id, ALICE)
PLAIN = {int: (-1, 0, 1 << 62), str: ("", "text", "ä" * 100), bool: (True, False), bytes: (bytes(SIGNATURE_BYTES),)}


def made(hint, random):
    """Some value of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return random.choice(PLAIN[hint])
    if hint is type(None):
        return None
    if origin in (types.UnionType, typing.Union):
        return made(random.choice(arguments), random)
    if origin is Signed:
        return Signed(made(arguments[0], random), bytes(SIGNATURE_BYTES))
    if origin is frozenset or (origin is tuple and arguments[-1] is Ellipsis):
        return origin(made(arguments[0], random) for _ in range(random.choice((0, 1, 2))))
    if origin is tuple:
        return tuple(made(each, random) for each in arguments)
    return hint(**{name: made(each, random) for name, each in typing.get_type_hints(hint).items()})


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not Signed], ids=lambda cls: cls.__name__)
def test_each_class_comes_back(cls):
    for seed in range(20):
        value = made(cls, Random(seed))
        assert EVERYTHING.decode(cls, EVERYTHING.encode(value)) == value


def changed(body, **fields):
    return Signed(dataclasses.replace(body.body, **fields), body.signature)


@pytest.mark.parametrize(
    "wish",
    [
        changed(BODIES[4].wish, stage=1),
        changed(BODIES[4].wish, author=OTHER),
        Signed(BODIES[4].wish.body, bytes(SIGNATURE_BYTES)),
        Statements("another run", ALICE).sign(BODIES[4].wish.body),
        B.sign(BODIES[4].wish.body),
    ],
)
def test_nobody_signs_for_another(wish):
    with pytest.raises(InvalidMessage, match=r"the signature of a Join of .* does not match"):
        B.decode(Message, A.encode(Message(SEAT, ID, Wanted(wish))))


def test_only_the_run_key_signs_for_the_run():
    epoch = Epoch(ID)
    forged = Certified(epoch, (A.sign(KeySigned(epoch.hash)),))
    with pytest.raises(InvalidMessage, match="the signature of a KeySigned"):
        B.decode(Message, A.encode(Message(SEAT, ID, News((forged,)))))


def test_a_message_has_only_so_many_statements_and_no_signature_is_checked_before(monkeypatch):
    monkeypatch.setattr(wire, "MAX_SIGNED", 1)
    monkeypatch.setattr(wire, "verify", None)
    with pytest.raises(InvalidMessage, match="more than 1 signed statements"):
        B.decode(Message, A.encode(Message(SEAT, ID, Commit(committed()))))


def plain(body):
    return msgpack.unpackb(A.encode(Message(SEAT, ID, body)))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "no msgpack"),
        (b"\xc1", "no msgpack"),
        (msgpack.packb(None), "none of Message: None"),
        (msgpack.packb([]), r"none of Message: \(\)"),
        (msgpack.packb([999]), r"none of Message: \(999,\)"),
        (msgpack.packb([True]), r"none of Message: \(True,\)"),
        (msgpack.packb([0, 1]), "Message has 3 fields, not 1"),
        (msgpack.packb([*plain(Alive())[:3], [1, "p", 1, "t"]]), "Message.body: none of Alive"),
        (msgpack.packb([0, [1, "p", 1.5, "t"], *plain(Alive())[2:]]), "Message.sender: Seat.life: no number"),
        (msgpack.packb([0, [1, "p", True, "t"], *plain(Alive())[2:]]), "Message.sender: Seat.life: no number"),
        (msgpack.packb([0, [1, "p", -2, "t"], *plain(Alive())[2:]]), "Message.sender: Seat.life: no number"),
        (msgpack.packb([0, [1, "p" * 129, 1, "t"], *plain(Alive())[2:]]), "Message.sender: Seat.peer: no text"),
        (msgpack.packb([0, [1, b"p", 1, "t"], *plain(Alive())[2:]]), "Message.sender: Seat.peer: no text"),
        (bytes(MAX_MESSAGE_BYTES + 1), "bytes; at most"),
    ],
    ids=itertools.count(),
)
def test_what_is_no_message_is_refused(data, error):
    with pytest.raises(InvalidMessage, match=error):
        B.decode(Message, data)


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_or_read(data):
    with contextlib.suppress(InvalidMessage):
        B.decode(Message, data)


def test_a_set_holds_nothing_twice():
    silent = Silent(SEAT, ID, frozenset({SEAT, OTHER}))
    data = msgpack.unpackb(A.encode(silent))
    data[3] = [data[3][0], data[3][0]]
    with pytest.raises(InvalidMessage, match=r"Silent.seats: one twice in a set"):
        B.decode(Silent, msgpack.packb(data))
