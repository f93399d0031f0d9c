"""Peers agree by calls: who is in the run, and which rounds have been made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from agreeing import BATCH, HASH, RUN, certified_first, quickly, swarm, until
from checkpoint_worlds import manifest_of
from contexts import make_context, unparsed
from memory_transport import MemoryNetwork

from swarm_peer.errors import InvalidMessage
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.epochs import Certified, rank_of
from swarm_peer.protocol.grants import Reads
from swarm_peer.protocol.log import Close, Committed, Cut, Entry, Pass
from swarm_peer.protocol.messages import Alive, Commit, Fetch, Message, News, Probe
from swarm_peer.protocol.statements import KeySigned, Seat, Signed
from swarm_peer.runtime.network import agreement
from swarm_peer.runtime.network.agreement import MAX_MESSAGES, NO_EPOCH, Agreement, Ticket, find_epochs
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.frames import PREFIX, Frame, FrameType, parse_frame
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import AgreeCall


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quickly(monkeypatch)


async def compute(own, others):
    """Do what the core asks for, with microbatches that take no time."""
    while True:
        own.prepare(others)
        for stage, member in own.core.members.items():
            if member.is_behind:
                member.reached(member.log.head, Ledger(4) if stage == 0 else None)
            if (draining := member.draining) is not None:
                member.drained(draining.number)
            if member.rooting is not None:
                member.rooted(member.state, f"root of {member.state}")
            if (cut := member.averaging) is not None:
                member.averaged(cut, f"update of {cut.hash}")
            if stage == 0:
                launch(member, others)
        own.agreement.look()
        await anyio.sleep(0.01)


def launch(first, others):
    second = next((each for each in others if 1 in each.core.members), None)
    working = first.working
    first.wants_samples = BATCH
    first.reads = Reads(first.reads.slices, 1, first.granted)
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
    first.reads = Reads(tuple({*first.reads.slices, slice_id}), 1, first.granted)


def two_stages(some):
    return [some.add(Identity.generate(), 0), some.add(Identity.generate(), 1), some.add(Identity.generate(), 1)]


def test_members_join_and_make_rounds():
    async def run():
        async with swarm(compute) as some:
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
        async with swarm(compute) as some:
            members = two_stages(some)
            await until(members, lambda each: any(m.log.next_round >= 1 for m in each.core.members.values()))
            left = members[2].identity.peer_id
            some.kill(members[2])
            await until(members[:1], lambda each: left not in {seat.peer for seat in each.core.epoch.seats})
            before = members[0].log(0).next_round
            await until(members[:1], lambda each: each.log(0).next_round >= before + 2)

    anyio.run(run)


def test_a_newcomer_finds_the_newest_epoch_and_believes_no_other():
    async def run():
        async with swarm(compute) as some:
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


@pytest.mark.parametrize("round_timeout_s", [10.0, 300.0])
def test_a_leader_waits_for_as_long_as_an_average_may_take(round_timeout_s):
    timing = agreement.timing_of(manifest_of(averaging={"round_timeout_s": round_timeout_s}))
    assert timing.average_s > round_timeout_s
    assert timing.stuck_s > timing.average_s


def test_a_newcomer_believes_the_run_key_more_than_numbers():
    first = certified_first(Identity.generate())
    later = Certified(replace(first.epoch, id=first.epoch.id.next()), first.certificate)
    signed = Certified(later.epoch, (Signed(KeySigned(later.epoch.hash), b""),))
    far = [Certified(replace(first.epoch, id=first.epoch.id._replace(number=number)), ()) for number in range(1, 9)]
    assert rank_of([first, signed]) > rank_of([first, *far])
    assert rank_of([first, *far]) > rank_of([first])


def test_epochs_that_the_key_has_not_signed_are_not_believed():
    epoch = certified_first(Identity.generate()).epoch
    assert agreement._sound([Certified(epoch, ())]) == []


def test_nobody_speaks_for_another():
    async def run():
        async with swarm(compute) as some:
            member = two_stages(some)[0]
            forged = Message(some.coordinator.core.membership.me, NO_EPOCH, Alive())
            data = memoryview(some.coordinator.agreement.statements.encode(forged))
            with pytest.raises(InvalidMessage, match="a message of"):
                await member.agreement.handle("somebody else", AgreeCall(manifest=HASH), [data])

    anyio.run(run)


def alone(network):
    """The part of a peer that nobody else agrees with."""
    identity = Identity.generate()
    return Agreement(
        context=make_context(unparsed(HASH), identity=identity, run_id=RUN.peer_id),
        transport=network.transport(identity.peer_id),
        life=1,
        first=[certified_first(identity)],
    )


def told_by(author, count, first=0):
    """A message with as many statements, all of them signed by its sender."""
    statements, seat = Statements(RUN.peer_id, author), Seat(author.peer_id, 0, "")
    signed = tuple(statements.sign(Pass(seat, NO_EPOCH, str(first + number))) for number in range(count))
    cut = Cut(stage=0, round=0, epoch=NO_EPOCH, attempt=0, parent="", root="", base=(), averages=True, parts=())
    committed = Committed(Entry(cut, ""), signed, Close(0, ()))
    return memoryview(statements.encode(Message(seat, NO_EPOCH, Commit(committed))))


def checks(part, monkeypatch):
    """The statements whose signatures a part has checked."""
    checked, check = [], part.statements.check
    monkeypatch.setattr(part.statements, "check", lambda signed: checked.append(signed) or check(signed))
    return checked


def test_others_have_their_turn_while_the_calls_of_a_peer_are_read(monkeypatch):
    monkeypatch.setattr(agreement, "CHECKED_AT_ONCE", 5)

    async def run():
        async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
            part, author, at_once = alone(network), Identity.generate(), []
            checked = checks(part, monkeypatch)

            async def watch():
                while True:
                    before = len(checked)
                    await anyio.lowlevel.checkpoint()
                    at_once.append(len(checked) - before)

            async def call(first):
                await part.handle(author.peer_id, AgreeCall(manifest=HASH), [told_by(author, 12, first)] * 2)
                if len(checked) == 72:
                    tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            for number in range(3):
                tasks.start_soon(call, 12 * number)
        assert len(checked) == 72
        assert max(at_once) == 5, "however many calls of one peer are under way"
        assert not part._turns

    anyio.run(run)


def test_a_call_has_only_so_many_statements(monkeypatch):
    monkeypatch.setattr(agreement, "_Reading", partial(agreement._Reading, left=20))

    async def run():
        async with MemoryNetwork() as network:
            part, author = alone(network), Identity.generate()
            checked = checks(part, monkeypatch)
            with pytest.raises(InvalidMessage, match="signed statements in one call"):
                await part.handle(author.peer_id, AgreeCall(manifest=HASH), [told_by(author, 12)] * 2)
            assert len(checked) == 12

    anyio.run(run)


def test_of_a_message_of_another_no_signature_is_checked(monkeypatch):
    async def run():
        async with MemoryNetwork() as network:
            part = alone(network)
            checked = checks(part, monkeypatch)
            with pytest.raises(InvalidMessage, match="a message of"):
                await part.handle("somebody else", AgreeCall(manifest=HASH), [told_by(Identity.generate(), 2)])
            assert not checked

    anyio.run(run)


def test_a_call_is_answered_at_once():
    async def run():
        async with swarm(compute) as some:
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
        async with swarm(compute) as some:
            some.coordinator.core.membership._has_ticket = lambda seat: seat.ticket == ""
            honest = some.add(Identity.generate(), 0)
            liar = some.add(Identity.generate(), 0, ticket=Ticket("stolen", lambda seat: True))
            await until([honest], lambda each: each.core.membership.stages == {0})
            await until([liar], lambda each: len(each.core.epoch.places) >= 2)
            assert liar.core.membership.stages == set()

    anyio.run(run)


def test_nothing_is_sent_to_an_earlier_life_of_the_same_peer():
    async def run():
        async with MemoryNetwork() as network:
            part = alone(network)
            me = part.core.membership.me
            part._send([(peer, Message(me, NO_EPOCH, Alive())) for peer in (me.peer, "somebody")])
            assert part._queued.keys() == {"somebody"}

    anyio.run(run)


def test_what_was_not_sent_is_replaced_by_what_is_newer():
    async def run():
        async with MemoryNetwork() as network:
            part = alone(network)
            me = part.core.membership.me
            for number in range(3 * agreement.MAX_QUEUED):
                part._send([("somebody", Message(me, NO_EPOCH._replace(number=number), Alive()))])
            assert [each.epoch.number for each in part._queued["somebody"].values()] == [3 * agreement.MAX_QUEUED - 1]

    anyio.run(run)


def test_messages_to_one_peer_go_one_call_after_the_other():
    class Slow:
        """A transport to peers that answer when the test says so."""

        peer_id = "me"

        def __init__(self):
            self.under_way, self.num_calls = [], 0

        async def call(self, peer, call, tensors, *, timeout_s):
            self.num_calls += 1
            self.under_way.append(anyio.Event())
            await self.under_way[-1].wait()
            del self.under_way[0]
            return Reply()

    async def run():
        async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
            part, slow = alone(network), Slow()
            part._transport, me, epoch = slow, part.core.membership.me, part.core.epoch.id
            part._send([("somebody", Message(me, epoch, Alive()))])  # nobody sends it yet
            tasks.start_soon(part.run)
            await anyio.wait_all_tasks_blocked()
            for body in (Alive(), Probe(), Fetch()):
                part._send([("somebody", Message(me, epoch, body))])
                await anyio.wait_all_tasks_blocked()
            assert (slow.num_calls, len(slow.under_way)) == (1, 1)
            for num_calls in (1, 2):
                assert slow.num_calls == num_calls, "what has come meanwhile goes in one call"
                with pytest.raises(TimeoutError), anyio.fail_after(0.01):
                    await part.told()
                slow.under_way[0].set()
                await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(1):
                await part.told()
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_the_messages_of_one_call_fit_into_a_frame():
    tensors = [memoryview(b"message")] * MAX_MESSAGES
    frame = Frame(FrameType.CALL, 1, "agree", {}, tensors)
    head, payload = frame.head()[PREFIX.size :], memoryview(b"".join(tensors))
    assert list(parse_frame(head, payload).tensors) == tensors
