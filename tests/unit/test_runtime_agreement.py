"""Peers agree by calls: who is in the run, and which rounds have been made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from contexts import make_context, unparsed
from memory_transport import MemoryNetwork, MemoryTransport

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.epochs import COORDINATORS, Certified, Epoch, Place
from swarm_peer.protocol.log import Log
from swarm_peer.protocol.messages import Alive, Fetch, Message, News, Timing
from swarm_peer.protocol.statements import EpochId, KeySigned, Seat
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.network import agreement
from swarm_peer.runtime.network.agreement import NO_EPOCH, Agreement, Ticket, find_epochs
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import AgreeCall

HASH = "m" * 32
RUN = Identity.generate()
BATCH = 8


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Nobody waits for long."""
    waits = {"propose_s": 0.01, "retry_s": 0.1, "resend_s": 0.05, "alive_s": 0.1, "status_s": 0.1, "silent_s": 0.5}
    monkeypatch.setattr(agreement, "TIMING", Timing(**waits, probe_s=0.3, ready_s=0.3))
    monkeypatch.setattr(agreement, "TICK_S", 0.02)


@dataclass(eq=False)
class Member:
    """One peer's agreement, and whoever does what it asks for."""

    identity: Identity
    agreement: Agreement
    transport: MemoryTransport
    changed: Condition
    scope: anyio.CancelScope | None = None

    @property
    def core(self):
        return self.agreement.core

    def stage(self, stage):
        return self.core.members[stage]

    def log(self, stage):
        return self.stage(stage).log

    async def compute(self, others):
        """Do what the core asks for, with microbatches that take no time."""
        while True:
            self._prepare(others)
            for stage, member in self.core.members.items():
                if member.is_behind:
                    member.reached(member.log.head, Ledger(4) if stage == 0 else None)
                if (draining := member.draining) is not None:
                    member.drained(draining.number)
                if member.rooting is not None:
                    member.rooted(member.state, f"root of {member.state}")
                if (cut := member.averaging) is not None:
                    member.averaged(cut, f"update of {cut.hash}")
                if stage == 0:
                    self._launch(member, others)
            self.agreement.look()
            await anyio.sleep(0.01)

    def _prepare(self, others):
        """Take over the state of a stage-mate before joining it."""
        for stage in self.core.membership.desired - self.core.membership.stages - {COORDINATORS}:
            mates = (each.core.members.get(stage) for each in others)
            mate = next((mate for mate in mates if mate is not None and not mate.is_behind and mate.reign), None)
            if mate is not None:
                log = Log(stage, mate.log.restart, mate.log.committed)
                ledger = mate.ledger.copy() if mate.ledger is not None else None
                self.core.prepare(stage, log, mate.state, others[0].core.membership.chain, ledger)

    def _launch(self, first, others):
        second = next((each for each in others if 1 in each.core.members), None)
        working = first.working
        first.wants_samples, first.wants_slices = BATCH, 1
        if working is None or second is None or not first.may_launch(BATCH) or first.ledger is None:
            return
        mate, number = second.stage(1), working.number
        if mate.working is None or mate.working.number != number:
            return
        slice_id = first.granted.slices[0]
        left = first.ledger.uncounted(slice_id).next_window
        samples = [WindowRange(*slice_id, left, left + BATCH)]
        base = first.base(number), mate.base(number)
        assert mate.work.computed(number, base, weight=BATCH, caller=first.me, num_samples=BATCH)
        receipt = mate.receipt_for(first.me, number, second.core.epoch)
        first.launched(BATCH)
        assert first.work.computed(number, base, weight=BATCH, samples=samples, receipt=receipt)
        first.reads = tuple({*first.reads, slice_id})


def certified_first(coordinator: Identity) -> Certified:
    seat = Seat(coordinator.peer_id, 1, "")
    epoch = Epoch(EpochId(1, seat, 0), (Place(COORDINATORS, seat),))
    return Certified(epoch, (Statements(RUN.peer_id, RUN).sign(KeySigned(epoch.hash)),))


class Swarm:
    """A coordinator with the run key, and members of two stages."""

    def __init__(self, network, tasks):
        self.network = network
        self.tasks = tasks
        self.members: list[Member] = []
        self.coordinator = self.add(Identity.generate(), COORDINATORS, has_key=True)

    def add(self, identity, *stages, has_key=False, life=1, ticket=agreement.OPEN, first=None):
        context = make_context(unparsed(HASH, global_batch_size=BATCH), identity=identity, run_id=RUN.peer_id)
        transport = self.network.transport(identity.peer_id)
        first = first or [certified_first(self.members[0].identity if self.members else identity)]
        part = Agreement(
            context=context,
            transport=transport,
            life=life,
            first=first,
            ticket=ticket,
            acquaintances=lambda: [each.identity.peer_id for each in self.members],
            sign_as_key=Statements(RUN.peer_id, RUN).sign if has_key else None,
        )
        part.core.membership.desired = frozenset(stages)
        member = Member(identity, part, transport, context.changed)
        self.members.append(member)
        self.tasks.start_soon(self._run, member)
        return member

    async def _run(self, member):
        async def handle(caller, op, body, tensors):
            return await member.agreement.handle(caller, AgreeCall(manifest=HASH), tensors)

        await member.transport.serve(handle)
        async with anyio.create_task_group() as tasks:
            member.scope = tasks.cancel_scope
            tasks.start_soon(member.agreement.run)
            tasks.start_soon(member.compute, self.members)


@asynccontextmanager
async def swarm() -> AsyncIterator[Swarm]:
    async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
        yield Swarm(network, tasks)
        tasks.cancel_scope.cancel()


async def until(members, condition):
    with anyio.fail_after(20):
        for member in members:
            await member.changed.wait_for(lambda member=member: condition(member))


def two_stages(some):
    return [some.add(Identity.generate(), 0), some.add(Identity.generate(), 1), some.add(Identity.generate(), 1)]


def test_members_join_and_make_rounds():
    async def run():
        async with swarm() as some:
            members = two_stages(some)
            await until(members, lambda each: len(each.core.epoch.places) == 4)
            before = members[0].log(0).next_round
            await until(members, lambda each: all(m.log.next_round > before + 3 for m in each.core.members.values()))
            heads = [each.log(1).head_before(before + 2) for each in members[1:]]
            assert heads[0] == heads[1] is not None
            assert members[0].stage(0).ledger.to_tuple()[2][0][3] >= before * BATCH

    anyio.run(run)


def test_a_member_that_is_gone_is_put_out_and_the_others_go_on():
    async def run():
        async with swarm() as some:
            members = two_stages(some)
            await until(members, lambda each: any(m.log.next_round >= 1 for m in each.core.members.values()))
            left = members[2].identity.peer_id
            some.network.kill(left)
            members[2].scope.cancel()
            await until(members[:1], lambda each: left not in {seat.peer for seat in each.core.epoch.seats})
            before = members[0].log(0).next_round
            await until(members[:1], lambda each: each.log(0).next_round >= before + 2)

    anyio.run(run)


def test_a_newcomer_finds_the_newest_epoch_and_believes_no_other():
    async def run():
        async with swarm() as some:
            members = two_stages(some)
            await until(members, lambda each: len(each.core.epoch.places) == 4)
            stranger = Identity.generate()
            statements = Statements(RUN.peer_id, stranger)
            transport = some.network.transport(stranger.peer_id)
            peers = [each.identity.peer_id for each in some.members]
            found = await find_epochs(transport, statements, HASH, [*peers, "nobody"], 5.0)
            assert found[0].is_of_key
            assert found[-1].epoch == members[0].core.epoch
            assert await find_epochs(transport, statements, HASH, ["nobody"], 5.0) == []

    anyio.run(run)


def test_epochs_that_the_key_has_not_signed_are_not_believed():
    epoch = certified_first(Identity.generate()).epoch
    assert agreement._sound([Certified(epoch, ())]) == []


def test_nobody_speaks_for_another():
    async def run():
        async with swarm() as some:
            member = two_stages(some)[0]
            forged = Message(some.coordinator.core.membership.me, NO_EPOCH, Alive())
            data = memoryview(some.coordinator.agreement.statements.encode(forged))
            with pytest.raises(InvalidMessage, match="a message of"):
                await member.agreement.handle("somebody else", AgreeCall(manifest=HASH), [data])

    anyio.run(run)


def test_a_call_is_answered_at_once():
    async def run():
        async with swarm() as some:
            member = two_stages(some)[0]
            asker = Identity.generate()
            asks = Message(Seat(asker.peer_id, 0, ""), NO_EPOCH, Fetch())
            data = memoryview(Statements(RUN.peer_id, asker).encode(asks))
            reply = await member.agreement.handle(asker.peer_id, AgreeCall(manifest=HASH), [data])
            body = member.agreement.statements.decode(Message, bytes(reply.tensors[0])).body
            assert isinstance(body, News)

    anyio.run(run)


def test_a_seat_without_the_ticket_that_it_names_gets_no_place():
    async def run():
        async with swarm() as some:
            some.coordinator.core.membership._has_ticket = lambda seat: seat.ticket == ""
            honest = some.add(Identity.generate(), 0)
            liar = some.add(Identity.generate(), 0, ticket=Ticket("stolen", lambda seat: True))
            await until([honest], lambda each: each.core.membership.stages == {0})
            await until([liar], lambda each: len(each.core.epoch.places) >= 2)
            assert liar.core.membership.stages == set()

    anyio.run(run)


def test_what_was_not_sent_is_replaced_by_what_is_newer():
    async def run():
        async with MemoryNetwork() as network:
            identity = Identity.generate()
            part = Agreement(
                context=make_context(unparsed(HASH), identity=identity, run_id=RUN.peer_id),
                transport=network.transport(identity.peer_id),
                life=1,
                first=[certified_first(identity)],
            )
            me = part.core.membership.me
            for number in range(3 * agreement.MAX_QUEUED):
                part._send([("somebody", Message(me, NO_EPOCH._replace(number=number), Alive()))])
            assert [each.epoch.number for each in part._queued["somebody"].values()] == [3 * agreement.MAX_QUEUED - 1]

    anyio.run(run)
