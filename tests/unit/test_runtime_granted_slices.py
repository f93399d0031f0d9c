"""A seat of stage 0 reads what it was granted, each sample once, and lets go of what is through."""

from __future__ import annotations

import logging
from random import Random
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
import torch
from contexts import FixedRandom, make_context, unparsed
from made_up_slices import FakeReader

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SliceId, WindowRange
from swarm_peer.policy.view import SwarmView
from swarm_peer.protocol.epochs import BEGINNING, Epoch, Restart
from swarm_peer.protocol.grants import Grant, Grants
from swarm_peer.protocol.log import Log, Most
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import Counted, Timing
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import RoundContext
from swarm_peer.runtime.data import launcher as launchers
from swarm_peer.runtime.data.granted_slices import GrantedSlices
from swarm_peer.runtime.data.launcher import BatchLauncher
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.stage.microbatch_capacity import Capacity

ME = Seat("me", 1, "")
REIGN = EpochId(1, ME, 0)
LENGTHS = (5, 0, 3)


class Desk:
    """A seat of stage 0 whose leader grants what it asks for, and commits rounds when told to."""

    def __init__(self, *lengths):
        self.reader = FakeReader(*(lengths or LENGTHS))
        context = make_context(unparsed("0" * 32), random=FixedRandom(1))
        self.pool = SamplePool(context=context, reader=self.reader)
        self.context = RoundContext(
            num_stages=1, batch=4, unit=1, most=Most(8, 8), lag=0, averages=lambda n: True, is_rooted=lambda n: False,
            fills=lambda c: True, believed=lambda counts: {d.author: d.samples for d in counts},
            epoch_of=lambda e: None, sign=lambda body: Signed(body, b""), timing=Timing(),
        )  # fmt: skip
        self.member = Member(me=ME, stage=0, restart=BEGINNING, context=self.context)
        self.member.reign = REIGN
        self.member.reached(self.member.log.head, Ledger(len(self.reader.lengths)))
        self.grants = Grants(REIGN, batch=4, unit=1, patience_s=60.0)
        self.slices = GrantedSlices(pool=self.pool, member=lambda: self.member, num_readers=lambda: 1)
        self.taken = []

    @property
    def present(self):
        return self.member.working

    def ask(self):
        """Say what is read and wanted, and take what is granted."""
        self.slices.follow()
        self.say()
        self.slices.follow()

    def say(self):
        """Say what is read, and be granted more; the slices have yet to follow."""
        [counted] = [each for each in self.member.sayings(_Epoch()) if isinstance(each, Counted)]
        done = counted.done.body
        self.grants.note_done(ME, done.round, done.samples, done.samples, 0.0)
        self.member.take_grant(self.grants.grant(ME, counted.wants, self.member.ledger, 0.0))

    async def draw(self, count=1):
        self.ask()
        with anyio.fail_after(5):
            samples = await self.slices.draw(count)
        self.taken += [sample.id for sample in samples]
        return [sample.id for sample in samples]

    def end_round(self):
        """The round's entry holds all that this seat has brought."""
        own = self.member.work.own(self.present.number)
        self.member.ledger.add(own.samples if own is not None else ())
        restart = Restart(self.member.log.next_round + 1, 0)
        log = Log(0, self.member.log.restart)
        log._first_round = restart.first_round
        self.member.log = log
        self.member.state = log.head
        self.member.work.open.clear()
        self.slices.follow()


class _Epoch:
    id = REIGN


def test_each_sample_of_a_pass_is_read_once_and_the_pass_ends():
    async def run():
        desk, random = Desk(), Random(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            while desk.member.ledger.current_pass == 0:
                ids = await desk.draw(random.choice((1, 2)))
                assert desk.slices.counted(desk.present, ids, base=("head",), weight=len(ids))
                if random.random() < 0.4:
                    desk.slices.tell_ends(desk.present)
                    desk.end_round()
            tasks.cancel_scope.cancel()
        first_pass = [each for each in desk.taken if each.pass_number == 0]
        assert len(first_pass) == len(set(first_pass)) == sum(LENGTHS)

    anyio.run(run)


def test_what_was_lost_is_read_again():
    async def run():
        desk = Desk(4)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            ids = await desk.draw(4)
            assert desk.slices.counted(desk.present, ids[:2], base=("head",), weight=2)
            desk.end_round()
            assert desk.slices.counted(desk.present, ids[2:], base=("head",), weight=2)
            desk.member.work.void(desk.present.number)
            desk.slices.tell_ends(desk.present)
            desk.end_round()
            assert desk.member.reads.slices == (), "it is read to its end"
            assert not desk.member.ledger.is_finished(SliceId(0, 0))
            assert sorted(await desk.draw(2)) == sorted(ids[2:])
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_samples_that_fail_for_good_count_as_read():
    async def run():
        desk = Desk(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            desk.slices.give_up(desk.present, await desk.draw(2))
            desk.slices.tell_ends(desk.present)
            assert desk.member.work.own(desk.present.number).weight == 0
            desk.end_round()
            assert desk.member.ledger.current_pass == 1
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_a_slice_that_another_seat_reads_is_put_away():
    desk = Desk(4, 4)
    desk.ask()
    granted = desk.member.granted
    assert desk.member.reads.slices == granted.slices
    desk.member.take_grant(Grant(REIGN, granted.number + 1, granted.slices[1:], 0, 4))
    desk.slices.follow()
    assert desk.member.reads.slices == granted.slices[1:]


def test_who_has_lost_its_place_reads_nothing_of_before():
    """Its slices were granted to others. What it had drawn of them is void."""

    async def run():
        desk = Desk(4, 4)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            drawn = await desk.draw(2)
            readings = desk.slices.readings_of(drawn)
            assert desk.slices.may_launch(drawn, readings)
            before, desk.member = desk.member, Member(me=ME, stage=0, restart=BEGINNING, context=desk.context)
            desk.member.reign = REIGN
            desk.member.reached(desk.member.log.head, before.ledger)
            assert not desk.slices.may_launch(drawn, readings)
            desk.slices.follow()
            assert desk.member.reads.slices == ()
            desk.grants = Grants(REIGN, batch=4, unit=1, patience_s=60.0)
            again = await desk.draw(4)
            assert set(drawn) <= set(again), "the same slice was granted again"
            assert not desk.slices.may_launch(drawn, readings), "or they would be trained on twice"
            assert desk.slices.may_launch(drawn, desk.slices.readings_of(drawn))
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_a_slice_whose_work_is_lost_is_granted_again_in_the_same_round():
    """Else a seat that has read all slices that it may hold could not fill the round, which would never end."""

    async def run():
        desk = Desk(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            first = await desk.draw(2)
            assert desk.slices.counted(desk.present, first, base=("head",), weight=2)
            desk.slices.tell_ends(desk.present)
            desk.ask()
            assert SliceId(0, 0) in desk.member.reads.slices, "the round is open: its entry will hold them"
            desk.member.work.void(desk.present.number)
            desk.slices.follow()
            assert SliceId(0, 0) not in desk.member.reads.slices
            again = [sample for _ in range(4) for sample in await desk.draw(2)]
            assert set(first) <= set(again)
            tasks.cancel_scope.cancel()

    anyio.run(run)


@pytest.mark.parametrize("length", [1, 2])
def test_however_short_slices_are_a_seat_can_read_a_batch_of_them_in_one_round(length):
    async def run():
        desk = Desk(*[length] * 200)
        desk.grants.batch = 150
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            for _ in range(150):
                ids = await desk.draw(1)
                assert desk.slices.counted(desk.present, ids, base=("head",), weight=1)
                desk.slices.tell_ends(desk.present)
            tasks.cancel_scope.cancel()
        assert len(set(desk.taken)) == 150

    anyio.run(run)


def test_a_grant_that_the_reader_has_yet_to_follow_is_not_put_away():
    desk = Desk(4, 4)
    desk.slices.follow()
    desk.say()
    first = desk.member.granted.slices
    assert first
    wanted = desk.member.reads.wanted
    for _ in range(2 * wanted):
        desk.say()
        assert set(first) <= set(desk.member.granted.slices)
    desk.slices.follow()
    assert len(desk.member.reads.slices) == wanted


def test_a_slice_is_kept_until_all_that_was_read_of_it_is_drawn():
    async def run():
        desk = Desk(4)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            ids = await desk.draw(1)
            assert desk.slices.counted(desk.present, ids, base=("head",), weight=1)
            desk.end_round()
            assert desk.member.reads.slices == (SliceId(0, 0),), "three of its samples wait"
            assert not desk.slices.has_ends
            ids += await desk.draw(3)
            assert len(set(ids)) == 4
            assert desk.slices.counted(desk.present, ids[1:], base=("head",), weight=3)
            desk.slices.tell_ends(desk.present)
            desk.end_round()
            assert desk.member.ledger.current_pass == 1
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_the_end_of_a_slice_waits_for_what_is_in_flight():
    async def run():
        desk = Desk(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            ids = await desk.draw(2)
            desk.slices.tell_ends(desk.present)
            assert desk.member.work.own(desk.present.number) is None
            assert desk.slices.counted(desk.present, ids[:1], base=("head",), weight=1)
            assert desk.member.work.own(desk.present.number).samples == (WindowRange(*ids[0], ids[0].window + 1),)
            assert desk.slices.counted(desk.present, ids[1:], base=("head",), weight=1)
            desk.slices.tell_ends(desk.present)
            assert desk.member.work.own(desk.present.number).samples == (WindowRange(0, 0, 0, 2, True),)
            tasks.cancel_scope.cancel()

    anyio.run(run)


def test_when_the_run_goes_back_all_is_put_away():
    desk = Desk(4, 4)
    desk.ask()
    before = desk.slices.restart
    desk.member.begin_anew(Restart(9, 0))
    desk.slices.follow()
    assert desk.slices.restart == before, "it has no ledger yet"
    desk.member.reign = REIGN
    desk.member.reached(desk.member.log.head, Ledger(2))
    desk.slices.follow()
    assert desk.slices.restart == Restart(9, 0)
    assert desk.member.reads.slices == ()


@pytest.mark.parametrize("closes", [True, False])
def test_what_comes_too_late_does_not_count(closes):
    async def run():
        desk = Desk(4)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.pool.run)
            ids, present = await desk.draw(2), desk.present
            present.is_drained = closes
            assert desk.slices.counted(present, ids, base=("head",), weight=2) is not closes
            tasks.cancel_scope.cancel()

    anyio.run(run)


def launcher_of(desk, view=None):
    current = SimpleNamespace(number=desk.present.number)
    core = SimpleNamespace(
        capacity=Capacity(2), admission=SimpleNamespace(is_open=True), rounds=SimpleNamespace(current=current)
    )
    return BatchLauncher(
        context=make_context(unparsed("0" * 32, global_batch_size=4)),
        core=core,
        slices=desk.slices,
        member=lambda: desk.member,
        view=lambda: view,
        validation=np.zeros((0, 7), np.int32),
        agreement=SimpleNamespace(core=SimpleNamespace(epoch=Epoch(REIGN)), look=lambda: None),
    )


@pytest.mark.parametrize(("is_over", "level"), [(False, logging.WARNING), (True, logging.INFO)])
async def test_once_the_run_is_over_failed_microbatches_are_no_warning(is_over, level, caplog, monkeypatch):
    """Later stages may go first."""
    monkeypatch.setattr(launchers, "RELAUNCH_PAUSE_S", 0.0)
    caplog.set_level(logging.INFO)
    desk = Desk(4)
    launcher = launcher_of(desk, SwarmView(2))
    launcher._context.metrics.run_is_over = is_over
    batch = launchers._Batch(tokens_BS=torch.zeros((0, 7), dtype=torch.int32), samples=(), restart=None, drawn_from={})
    await launcher._launch_again(batch, "no peer serves the stage", is_finite=True)
    assert [(record.levelno, record.message.split()[0]) for record in caplog.records] == [(level, "microbatch_failed")]


@pytest.mark.parametrize("has_another", ["counted it", "been granted its slice", "neither"])
async def test_a_sample_that_another_seat_may_have_read_is_not_launched(has_another):
    """It would cost the whole contribution that names it."""
    desk = Desk(4)
    launcher = launcher_of(desk)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.pool.run)
        desk.ask()
        await launcher._draw()
        tasks.cancel_scope.cancel()
    [batch] = launcher._waiting
    batch.place, desk.present.computed.claimed = (desk.present.number, 0), launcher._size  # it has failed once
    if has_another == "counted it":
        desk.member.ledger.add([WindowRange(0, 0, 0, 1)])
    elif has_another == "been granted its slice":
        desk.member.take_grant(Grant(REIGN, desk.member.granted.number + 1, (), 0, 4))
        desk.slices.follow()
    if has_another == "neither":
        assert launcher._take_waiting() is batch
        return
    assert launcher._take_waiting() is None
    assert launcher._waiting == []
    assert desk.present.computed.claimed == 0, "another batch may take its place"
    assert not any(reading.in_flight for reading in desk.slices._held.values()), "the slice can come to its end"


async def test_what_was_drawn_before_the_run_went_back_takes_no_place():
    """The core goes back first, and the slices follow. A place that such a batch took would be nobody's."""
    desk = Desk(4, 4)
    launcher = launcher_of(desk)
    core = launcher._core
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.pool.run)
        desk.ask()
        await launcher._draw()
        tasks.cancel_scope.cancel()
    restart = Restart(desk.member.log.next_round, 0, epoch=REIGN)
    assert desk.slices.restart != restart
    desk.member.begin_anew(restart)
    desk.member.reign = REIGN
    desk.member.reached(desk.member.log.head, Ledger(2))
    core.rounds.current.number = desk.present.number
    assert launcher._take_waiting() is None
    assert desk.present.computed.claimed == 0
