"""Coordinators of one run and what they say in the DHT."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.coordination import Coordination
from swarm_peer.policy.leadership import Term
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import (
    MAX_ASSIGNMENTS,
    Assignment,
    CoordinationRecord,
    Record,
    coordination_key,
    seal,
    unseal,
)

LEASE_S = 8.0


def identity(letter: bytes) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(letter * 32))


RUN_KEY = identity(b"r")
RUN = RUN_KEY.peer_id
ORDER = Assignment(peer="p", announced=3, from_stage=0, to_stage=1, reason="stage 1 is slow")


class Nodes:
    """A DHT in memory: the last record of each author, as sealed."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.now_s = 100.0

    def coordination(self, letter: bytes, waits: bool = False) -> Coordination:
        return Coordination(Node(self, identity(letter)), RUN_KEY, LEASE_S, waits, lambda: self.now_s)  # type: ignore[arg-type]

    def said_by(self, letter: bytes) -> CoordinationRecord:
        author = identity(letter).peer_id
        return unseal(CoordinationRecord, self.stored[author], RUN, author)

    async def pass_s(self, seconds: float, *awake: Coordination) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for coordination in awake:
                await coordination._look()


class Node:
    def __init__(self, nodes: Nodes, me: Identity):
        self._nodes = nodes
        self.identity = me

    async def store(self, key: str, record: Record, run: str, lifetime_s: float) -> bool:
        assert (key, run) == (coordination_key(RUN), RUN)
        self._nodes.stored[self.identity.peer_id] = seal(record, run, self.identity)
        return True

    async def fetch_coordination(self, run_id: str) -> dict[Term, CoordinationRecord]:
        records = [unseal(CoordinationRecord, data, run_id, author) for author, data in self._nodes.stored.items()]
        return {record.term(run_id, author): record for author, record in zip(self._nodes.stored, records, strict=True)}


async def test_what_is_ordered_is_said_at_once_and_goes_on_with_every_beat() -> None:
    nodes = Nodes()
    first = nodes.coordination(b"a")
    await nodes.pass_s(4, first)
    assert first.acts
    await first.order([ORDER], "stage 1 is slow")
    said = nodes.said_by(b"a")
    assert (said.assignments, said.reason) == ((ORDER,), "stage 1 is slow")
    await nodes.pass_s(10, first)
    assert nodes.said_by(b"a").beat > said.beat
    assert nodes.said_by(b"a").assignments == (ORDER,)
    assert first.newest == (Term(1, identity(b"a").peer_id), nodes.said_by(b"a"))
    await first.order([], "in balance")
    assert not nodes.said_by(b"a").assignments


async def test_a_standby_takes_the_orders_over_that_are_under_way() -> None:
    nodes = Nodes()
    first, standby = nodes.coordination(b"a"), nodes.coordination(b"b", waits=True)
    await nodes.pass_s(4, first, standby)
    await first.order([ORDER], "stage 1 is slow")
    await nodes.pass_s(20, first, standby)
    assert not standby.acts
    assert standby.newest is not None
    assert standby.newest[1].assignments == (ORDER,)
    await nodes.pass_s(2 * LEASE_S, standby)
    assert standby.acts
    assert standby.inherited == (ORDER,)
    assert not nodes.said_by(b"b").assignments, "they are no orders of its own"


async def test_what_one_says_whose_term_is_over_is_not_published() -> None:
    nodes = Nodes()
    first, standby = nodes.coordination(b"a"), nodes.coordination(b"b", waits=True)
    await nodes.pass_s(4, first, standby)
    assert first.acts
    await nodes.pass_s(20, standby)
    assert not first.acts, "it was halted, and has not looked again"
    await nodes.pass_s(1, first)
    assert not first.acts
    before = nodes.said_by(b"a")
    await first.order([ORDER], "stage 1 is slow")
    assert nodes.said_by(b"a") == before
    # The one that acts now is not disturbed.
    assert standby.acts


async def test_too_many_orders_are_cut_to_the_latest() -> None:
    nodes = Nodes()
    first = nodes.coordination(b"a")
    await nodes.pass_s(4, first)
    orders = [ORDER.model_copy(update={"peer": f"p{number}"}) for number in range(MAX_ASSIGNMENTS + 5)]
    await first.order(orders, "r" * 1000)
    assert nodes.said_by(b"a").assignments == tuple(orders[5:])
