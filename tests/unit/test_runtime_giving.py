"""A seat that leaves gives what it has computed to stage-mates."""

from __future__ import annotations

import anyio
import pytest
import torch
from agreeing import HASH, quickly, swarm, until
from driving import Hall

from swarm_peer.errors import Busy, InvalidMessage, NotServing
from swarm_peer.protocol.log import Contribution, HandedOver, Name
from swarm_peer.protocol.statements import Signed
from swarm_peer.runtime.step import driver as driver_module
from swarm_peer.runtime.step import giving
from swarm_peer.wire.codecs import bytes_of
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import GiveCall


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quickly(monkeypatch)
    monkeypatch.setattr(driver_module, "RETRY_PAUSE_S", 0.02)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(giving, "CHUNK_BYTES", 8)


def given_by(rig, *, weight=2, values=(1.0, 2.0, 3.0), digest=None, name=None):
    """A contribution of a rig, with its statement and its chunks."""
    member, part = rig.driver.member, rig.peer.agreement
    data = bytes_of(torch.tensor(values))
    contribution = Contribution(name or Name(member.me, member.log.next_round + 1), weight, (), ())
    body = HandedOver(member.me, part.core.epoch.id, contribution, digest or giving._digest(data))
    statement = memoryview(part.statements.encode(part.statements.sign(body)))
    return contribution, statement, data


async def two_mates(some, hall):
    """Rigs of two seats of stage 1, in a run that begins no further round."""
    first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
    await until(first, lambda peer: peer.core.membership.stages != frozenset())
    more = some.add(Identity.generate(), 1)
    await until([more], lambda peer: peer.core.membership.stages != frozenset())
    await until([first[1]], lambda peer: len(peer.core.epoch.roster(1)) == 2)
    hall.is_paused = True
    peers = *first, more  # of which one may be a round behind the others
    logs = [hall.rig(peer).driver.member.log for peer in peers]
    await until(peers, lambda _: len({log.next_round for log in logs}) == 1)
    return hall.rig(first[1]), hall.rig(more)


def call_of(offset, data):
    return GiveCall(manifest=HASH, stage=1, offset=offset, num_bytes=len(data))


def test_a_contribution_comes_in_chunks_in_any_order_and_again(small_chunks):
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller = giver.peer.identity.peer_id
            contribution, statement, data = given_by(giver)
            for offset in (8, 8, 0, 0, 8):
                await taker.giving.handle(caller, call_of(offset, data), (statement, data[offset : offset + 8]))
            assert taker.driver.member.work.guests == {contribution.name: contribution}
            means, weight = taker.driver.gradients.get(contribution.name)
            assert (means[0].tolist(), weight) == ([1.0, 2.0, 3.0], 2)

    anyio.run(run)


def test_of_two_contributions_of_a_name_the_first_stays():
    """What the driver holds has to be what the core has signed for."""

    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller = giver.peer.identity.peer_id
            contribution, *first = given_by(giver)
            await taker.giving.handle(caller, call_of(0, first[1]), first)
            for changed in ({"weight": 3}, {"values": (4.0, 5.0, 6.0)}):
                _, *second = given_by(giver, **changed)
                with pytest.raises(InvalidMessage, match="another contribution of round"):
                    await taker.giving.handle(caller, call_of(0, second[1]), second)
            await taker.giving.handle(caller, call_of(0, first[1]), first)
            assert taker.driver.member.work.guests == {contribution.name: contribution}
            assert taker.driver.gradients.get(contribution.name)[0][0].tolist() == [1.0, 2.0, 3.0]

    anyio.run(run)


def test_no_contribution_is_taken_of_a_round_whose_entry_holds_none(monkeypatch):
    """Else one giver filled the places of all others."""

    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            work, number = taker.driver.member.work, taker.driver.member.log.next_round + 1
            monkeypatch.setattr(work, "decided_in", lambda each: max(each, number + 1))
            _, *given = given_by(giver)
            with pytest.raises(InvalidMessage, match="whose entry holds none"):
                await taker.giving.handle(giver.peer.identity.peer_id, call_of(0, given[1]), given)

    anyio.run(run)


def test_a_contribution_that_comes_before_its_taker_has_begun_is_held():
    """The core has its place, and names it, while the device has yet to end the work of the place before."""

    async def run():
        hall, is_idle = Hall(), anyio.Event()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            contribution, statement, data = given_by(giver)
            before = Name(giver.driver.member.me, contribution.name.round + 1)
            taker.driver.gradients.put(before, [torch.zeros(3)], 1)
            taker.driver.gradients.put(contribution.name, [torch.zeros(3)], 1)
            taker.giving._signed[contribution.name] = taker.peer.agreement.statements.decode(
                Signed[HandedOver], bytes(statement)
            )
            discard, taker.shop.discard = taker.shop.discard, is_idle.wait
            taker.driver._served = None
            taker.peer.changed.notify()
            await taker.giving.handle(giver.peer.identity.peer_id, call_of(0, data), (statement, data))
            taker.shop.discard = discard
            is_idle.set()
            await until([taker.peer], lambda _: taker.driver._served is taker.driver.member)
            assert taker.driver.gradients.names == {contribution.name} == taker.driver.member.work.guests.keys()
            assert taker.driver.gradients.get(contribution.name)[0][0].tolist() == [1.0, 2.0, 3.0]

    anyio.run(run)


def test_a_contribution_whose_round_ends_meanwhile_is_given_all_the_same():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            contribution, _, _ = given_by(giver)
            giver.driver.gradients.put(contribution.name, [torch.tensor([1.0, 2.0, 3.0])], 2)

            def mates():
                yield "somebody who is gone"
                giver.driver.gradients.drop(contribution.name)
                yield taker.peer.identity.peer_id

            assert not await giver.giving.give([contribution], mates(), enough=1)
            assert contribution.name in taker.driver.gradients.names

    anyio.run(run)


def test_a_contribution_whose_round_is_over_does_not_keep_others_from_being_given():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            due, _, _ = given_by(giver)
            over, _, _ = given_by(giver, name=Name(giver.driver.member.me, -1))
            for each in (over, due):
                giver.driver.gradients.put(each.name, [torch.tensor([1.0, 2.0, 3.0])], 2)
            assert await giver.giving.give([over, due], [taker.peer.identity.peer_id], enough=1) == [over]
            assert due.name in taker.driver.gradients.names

    anyio.run(run)


def test_what_its_author_has_not_given_is_refused():
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller, member = giver.peer.identity.peer_id, giver.driver.member

            async def give(given, error, match, by=caller, offset=0, cut=None):
                _, statement, data = given
                with pytest.raises(error, match=match):
                    await taker.giving.handle(by, call_of(offset, data), (statement, data[:cut]))

            await give(given_by(giver), NotServing, "from stage-mate to stage-mate", by="a stranger")
            await give(given_by(giver, digest="d" * 32), InvalidMessage, "has not signed")
            await give(given_by(giver, values=(float("nan"), 0.0, 0.0)), InvalidMessage, "not finite")
            await give(given_by(giver, values=(0.0, -3e38, 0.0)), InvalidMessage, "too large")
            await give(given_by(giver, values=(0.0, 0.0)), InvalidMessage, "a contribution of 8 bytes")
            await give(given_by(giver), InvalidMessage, "are no chunk", cut=4)
            await give(given_by(giver), InvalidMessage, "are no chunk", offset=4)
            await give(given_by(giver, weight=-1), InvalidMessage, "not its author's")
            others = Name(taker.driver.member.me, member.log.next_round + 1)
            await give(given_by(giver, name=others), InvalidMessage, "not its author's")
            await give(given_by(giver, name=Name(member.me, -1)), NotServing, "is over here")
            assert taker.driver.member.work.guests == {}

    anyio.run(run)


def test_a_seat_holds_only_so_many_contributions_of_others(small_chunks, monkeypatch):
    monkeypatch.setattr(giving, "MAX_GUESTS", 1)

    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller, me = giver.peer.identity.peer_id, giver.driver.member.me
            next_round = taker.driver.member.log.next_round
            _, statement, data = given_by(giver, name=Name(me, next_round))
            for offset in (0, 8):
                await taker.giving.handle(caller, call_of(offset, data), (statement, data[offset : offset + 8]))
            _, statement, data = given_by(giver, name=Name(me, next_round + 1))
            with pytest.raises(Busy, match="contributions of others"):
                await taker.giving.handle(caller, call_of(0, data), (statement, data[:8]))
            _, statement, data = given_by(giver, name=Name(me, next_round + 9))
            with pytest.raises(NotServing, match="far from beginning"):
                await taker.giving.handle(caller, call_of(0, data), (statement, data[:8]))

    anyio.run(run)


def test_a_giver_has_one_place_for_what_arrives(small_chunks):
    """With first chunks alone it would keep those of others away."""

    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            caller, me = giver.peer.identity.peer_id, giver.driver.member.me
            next_round = taker.driver.member.log.next_round
            given = [given_by(giver, name=Name(me, next_round + later)) for later in (0, 1)]
            for _, statement, data in given:
                await taker.giving.handle(caller, call_of(0, data), (statement, data[:8]))
            assert len(taker.giving._arriving) == 1
            last, statement, data = given[-1]
            await taker.giving.handle(caller, call_of(8, data), (statement, data[8:]))
            assert taker.driver.member.work.guests == {last.name: last}

    anyio.run(run)


@pytest.mark.parametrize("what", ["giver", "round"])
def test_half_of_a_contribution_is_dropped_when_its_giver_or_its_round_is_gone(small_chunks, what):
    async def run():
        hall = Hall()
        async with swarm(hall.work) as some:
            giver, taker = await two_mates(some, hall)
            number = taker.driver.member.log.next_round
            _, statement, data = given_by(giver, name=Name(giver.driver.member.me, number))
            await taker.giving.handle(giver.peer.identity.peer_id, call_of(0, data), (statement, data[:8]))
            assert len(taker.giving._arriving) == 1
            if what == "giver":
                giver.peer.core.membership.desired = frozenset()
                giver.peer.agreement.look()
            else:
                hall.is_paused = False
            await until([taker.peer], lambda _: not taker.giving._arriving)

    anyio.run(run)
