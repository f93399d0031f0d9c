"""Coordinators of one run and what they say in the DHT."""

from __future__ import annotations

from contextlib import suppress

import anyio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.run import coordination as module
from coordinator.run.coordination import Coordination
from swarm_peer.errors import CallError
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
        self.unix = 0.0
        self.lease_s = LEASE_S
        self.answers = True
        self.cut_off: dict[str, dict[str, bytes]] = {}  # what nodes keep that no other one answers

    def coordination(self, letter: bytes, waits: bool = False) -> Coordination:
        node = Node(self, identity(letter))
        return Coordination(
            node,  # type: ignore[arg-type]
            RUN_KEY,
            lease_s=self.lease_s,
            waits=waits,
            clock=self,
        )

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.unix

    def said_by(self, letter: bytes) -> CoordinationRecord:
        author = identity(letter).peer_id
        return unseal(CoordinationRecord, self.stored[author], RUN, author)

    async def pass_s(self, seconds: float, *awake: Coordination) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for coordination in awake:
                with suppress(CallError):
                    await coordination._look()


class Node:
    def __init__(self, nodes: Nodes, me: Identity):
        self._nodes = nodes
        self.identity = me
        self.num_answers = 0

    @property
    def _stored(self) -> dict[str, bytes]:
        return self._nodes.cut_off.get(self.identity.peer_id, self._nodes.stored)

    async def store(self, key: str, record: Record, run: str, lifetime_s: float) -> bool:
        assert (key, run) == (coordination_key(RUN), RUN)
        self._stored[self.identity.peer_id] = seal(record, run, self.identity)
        return True

    async def fetch_coordination(self, run_id: str) -> dict[Term, CoordinationRecord]:
        if not self._nodes.answers:
            raise CallError("no answer")
        self.num_answers += self.identity.peer_id not in self._nodes.cut_off
        records = [unseal(CoordinationRecord, data, run_id, author) for author, data in self._stored.items()]
        return {record.term(run_id, author): record for author, record in zip(self._stored, records, strict=True)}


async def test_what_is_ordered_is_said_at_once_and_goes_on_with_every_beat() -> None:
    nodes = Nodes()
    first = nodes.coordination(b"a")
    await nodes.pass_s(4, first)
    assert first.acts
    await first.assign([ORDER], "stage 1 is slow")
    said = nodes.said_by(b"a")
    assert (said.assignments, said.reason) == ((ORDER,), "stage 1 is slow")
    await nodes.pass_s(10, first)
    assert nodes.said_by(b"a").beat > said.beat
    assert nodes.said_by(b"a").assignments == (ORDER,)
    assert first.newest == (Term(1, identity(b"a").peer_id), nodes.said_by(b"a"))
    await first.assign([], "in balance")
    assert not nodes.said_by(b"a").assignments


async def test_a_standby_takes_the_orders_over_that_are_under_way() -> None:
    nodes = Nodes()
    first, standby = nodes.coordination(b"a"), nodes.coordination(b"b", waits=True)
    await nodes.pass_s(4, first, standby)
    await first.assign([ORDER], "stage 1 is slow")
    await nodes.pass_s(20, first, standby)
    assert not standby.acts
    assert standby.newest is not None
    assert standby.newest[1].assignments == (ORDER,)
    await nodes.pass_s(2 * LEASE_S, standby)
    assert standby.acts
    assert standby.inherited == (ORDER,)
    assert not nodes.said_by(b"b").assignments, "they are no orders of its own"


async def test_a_standby_that_is_cut_off_does_not_take_over() -> None:
    """Its node finds the last beat that it has heard, over and over."""
    nodes = Nodes()
    first, standby = nodes.coordination(b"a"), nodes.coordination(b"b", waits=True)
    await nodes.pass_s(2 * LEASE_S, first, standby)
    nodes.cut_off[identity(b"b").peer_id] = dict(nodes.stored)
    await nodes.pass_s(3 * LEASE_S, first, standby)
    nodes.cut_off.clear()
    await nodes.pass_s(2 * LEASE_S, first, standby)
    assert first.acts
    assert not standby.acts
    assert first.term == Term(1, identity(b"a").peer_id)
    await nodes.pass_s(2 * LEASE_S, standby)
    assert standby.acts, "the other one is gone"


async def test_a_runs_first_coordinator_waits_for_nobody_though_its_first_look_fails() -> None:
    nodes = Nodes()
    first = nodes.coordination(b"a")
    nodes.answers = False
    await nodes.pass_s(1, first)
    nodes.answers = True
    await nodes.pass_s(4, first)
    assert first.acts


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
    await first.assign([ORDER], "stage 1 is slow")
    assert nodes.said_by(b"a") == before
    # The one that acts now is not disturbed.
    assert standby.acts


class Over(Exception):
    pass


def in_virtual_time(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, until_s: float) -> None:
    async def sleep(seconds: float) -> None:
        await anyio.lowlevel.checkpoint()
        nodes.now_s += seconds
        if nodes.now_s >= until_s:
            raise Over

    monkeypatch.setattr(module.anyio, "sleep", sleep)


async def test_a_look_without_an_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator starts again, and does not hear at once of the term of its life before."""
    nodes = Nodes()
    await nodes.pass_s(20, nodes.coordination(b"a"))
    before = nodes.stored.copy()
    again = nodes.coordination(b"a")
    nodes.answers = False
    in_virtual_time(nodes, monkeypatch, nodes.now_s + 60)
    with pytest.raises(Over):
        await again.run()
    assert (again.acts, again.term, nodes.stored) == (False, None, before)
    nodes.answers = True
    await nodes.pass_s(2 * LEASE_S, again)
    assert again.acts
    assert again.term == Term(2, identity(b"a").peer_id)


async def test_terms_grow_where_the_last_one_is_not_heard_of() -> None:
    nodes = Nodes()
    for unix_s in (1_700_000_000, 1_700_000_100):
        nodes.unix = unix_s + 0.5
        nodes.stored.clear()
        coordination = nodes.coordination(b"a")
        await nodes.pass_s(4, coordination)
        assert coordination.acts
        assert coordination.term == Term(unix_s, identity(b"a").peer_id)


@pytest.mark.parametrize("lease_s", [2.0, 3.0, 4.0, 30.0])
async def test_who_acts_does_so_between_its_looks_too(lease_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes()
    nodes.lease_s = lease_s
    coordination = nodes.coordination(b"a")
    acted = []

    async def sleep(seconds: float) -> None:
        await anyio.lowlevel.checkpoint()
        nodes.now_s += seconds + 0.04  # for the next look's requests
        acted.append(coordination.acts)
        if nodes.now_s > 100.0 + 4 * lease_s:
            raise Over

    monkeypatch.setattr(module.anyio, "sleep", sleep)
    with pytest.raises(Over):
        await coordination.run()
    assert all(acted[acted.index(True) :])
    assert acted.index(True) < len(acted) / 4


async def test_too_many_orders_are_cut_to_the_latest() -> None:
    nodes = Nodes()
    first = nodes.coordination(b"a")
    await nodes.pass_s(4, first)
    orders = [ORDER.model_copy(update={"peer": f"p{number}"}) for number in range(MAX_ASSIGNMENTS + 5)]
    await first.assign(orders, "r" * 1000)
    assert nodes.said_by(b"a").assignments == tuple(orders[5:])
