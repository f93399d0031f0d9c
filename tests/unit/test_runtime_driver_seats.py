"""A driver of a real seat whose leader changes, or whose stage-mates go on without it."""

from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import anyio
import torch
from anyio.lowlevel import checkpoint_if_cancelled
from contexts import MovedClock
from driving import At, Shop
from test_attacks import FIRST, RULES, A, B, D, Stage, X, epoch_of, signs_as
from test_runtime_driver import Nobody

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.log import Close, Committed, Done, Entry, Log, Name
from swarm_peer.protocol.member import Member
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.state.states import Taken
from swarm_peer.runtime.step.driver import RoundDriver

SEATS = A, B, D, X
OTHERS = A, D, X


def stage_of_four():
    return Stage(epoch_of(1, *SEATS), A)


def close_of(stage, number, head):
    return Close(number, (signs_as(A)(Done(A, stage.epoch.id, number, 0, RULES.batch, (head,))),))


def driver_of(stage, member, *, shop=None, sources=None, average=None):
    core = SimpleNamespace(members={0: member}, epoch=stage.epoch, word_at=lambda epoch: "")
    return RoundDriver(
        agreement=SimpleNamespace(core=core, changed=Condition(), look=lambda: None),
        stage=0,
        workplace=shop or Shop(),
        averager=At(average),
        sources=sources or Nobody(),
        clock=MovedClock(),
    )


@asynccontextmanager
async def running(driver):
    """Yields a function that has the driver look, and waits until it has nothing to do."""

    async def settle():
        driver._changed.notify()
        await anyio.wait_all_tasks_blocked()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.run)
        await settle()
        yield settle
        tasks.cancel_scope.cancel()


async def test_a_seat_that_lacks_the_state_tells_no_root_while_it_knows_no_leader():
    """Its leader is gone, and so nothing says that it is behind; the round is over all the same."""
    stage = stage_of_four()
    first = stage.entry(0, FIRST, stage.epoch, OTHERS, OTHERS)
    context = replace(stage.context(B), is_rooted=lambda step: True)
    log = Log(0, BEGINNING, (first,))
    member = Member(me=B, stage=0, restart=BEGINNING, context=context, log=log)
    assert member.take_close(close_of(stage, 1, first.entry.hash))
    async with running(driver_of(stage, member)):
        assert (member.work.open[1].is_drained, member.work.open[1].root) == (True, None)


async def test_a_seat_that_has_no_time_left_to_leave_holds_what_its_device_has_just_given():
    """Its round may end before others know that it leaves: zeros would count there with the weight of its work."""

    class Busy(Shop):
        """Its thread ends what it has begun. Whoever waits for that hears only then that its time is over."""

        async def contribution(self, number):
            with anyio.CancelScope(shield=True):
                found = await super().contribution(number)
            grace.cancel()
            await checkpoint_if_cancelled()
            return found

    stage, shop, grace = stage_of_four(), Busy(), anyio.CancelScope()
    member = stage.member(B)
    member.work.open[0].is_drained = False
    shop.sums, shop.count = torch.tensor([1.0, 2.0, 3.0]), 1
    driver = driver_of(stage, member, shop=shop)
    with grace:
        await driver.leave()
        await anyio.lowlevel.checkpoint()
    assert grace.cancelled_caught
    means, weight = driver.gradients.get(member.work.own(0).name)
    assert (means[0].tolist(), weight) == ([1.0, 2.0, 3.0], 1)


async def test_a_seat_that_takes_a_state_holds_nothing_of_the_rounds_before():
    """It may be left out of rounds, and take a state, again and again."""

    class Mates(Nobody):
        """They keep no updates."""

        async def state(self):
            return Taken(member.log.head, {}, member.log.head, Ledger(100))

    stage = stage_of_four()
    member = stage.member(B)
    driver = driver_of(stage, member, sources=Mates())
    over, present, later = (Name(seat, number) for seat, number in ((B, 0), (D, 3), (A, 4)))
    async with running(driver) as settle:
        for name in (over, present, later):
            driver.gradients.put(name, [torch.zeros(3)], 1)
        for number in range(3):
            assert member.take_commit(stage.entry(number, member.log.head, stage.epoch, OTHERS, OTHERS))
        await settle()
        assert (member.state, driver._weights[1]) == (member.log.head,) * 2
        assert driver.gradients.names == {present, later}


class Delayed:
    """Seat B of four, whose updates are delayed: its round 0 is over, and it waits for the cut."""

    def __init__(self, *, average, shop=None):
        self.stage = stage_of_four()
        context = replace(self.stage.context(B), lag=1, is_rooted=lambda step: step == 1)
        self.member = Member(me=B, stage=0, restart=BEGINNING, context=context, state=FIRST, ledger=Ledger(100))
        self.member.reign = self.stage.epoch.id
        assert self.member.take_close(self.stage.close)
        self.shop = shop or Shop()
        self._compute(0)
        self.driver = driver_of(self.stage, self.member, shop=self.shop, average=average)

    def _compute(self, number):
        made = self.member.work.round(number).computed
        made.weight, made.base, self.shop.count = 1, (FIRST,), 1

    def take_cut(self, attempt, *seats):
        parts = tuple(self.member.part_of(0) if seat == B else Stage.part(seat) for seat in seats)
        cut = replace(self.stage.entry(0, FIRST, self.stage.epoch, seats, ()).entry.cut, attempt=attempt, parts=parts)
        self.member.take_cut(cut)

    def commit(self):
        """What this seat has averaged becomes an entry."""
        answer = self.member.work.open[0].answer
        digest = answer.said.body.digest
        agreement = tuple(self.stage.have(seat, answer.cut, digest) for seat in OTHERS)
        assert self.member.take_commit(Committed(Entry(answer.cut, digest), agreement, self.stage.close))

    def end_next_round(self):
        assert self.member.working.number == 1
        self._compute(1)
        assert self.member.take_close(close_of(self.stage, 1, FIRST))


async def test_a_seat_that_knows_no_leader_applies_the_update_that_it_has_and_tells_its_root_once():
    async def average(cut, means, weight):
        return means

    class Rooting(Shop):
        num_roots = 0

        async def root(self, standing):
            self.num_roots += 1
            assert self.num_roots == 1
            return await super().root(standing)

    seat = Delayed(average=average, shop=Rooting())
    async with running(seat.driver) as settle:
        seat.take_cut(0, *SEATS)
        await settle()
        seat.commit()
        await settle()
        assert seat.driver._weights[1] == FIRST, "the round that goes on began with these"
        seat.end_next_round()
        seat.member.reign = None
        await settle()
        assert seat.driver._weights[1] == seat.member.log.head
        assert seat.member.work.open[1].root


async def test_an_average_that_is_tried_again_does_not_wait_while_the_next_round_is_drained():
    """A slow microbatch of that round may be inside for a minute. Mates would take this seat for silent by then."""
    begun, stopped, drained = [], [], anyio.Event()

    async def average(cut, means, weight):
        begun.append(cut.attempt)
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(cut.attempt)

    class Slow(Shop):
        async def drain(self, number):
            if number == 1:
                await drained.wait()

    seat = Delayed(average=average, shop=Slow())
    async with running(seat.driver) as settle:
        seat.take_cut(0, *SEATS)
        await settle()
        seat.end_next_round()
        await settle()
        assert (begun, stopped) == ([0], [])
        seat.take_cut(1, A, B, D)
        await settle()
        assert (begun, stopped) == ([0, 1], [0])
        assert not seat.member.work.open[1].is_drained
        drained.set()
        await settle()
        assert seat.member.work.open[1].is_drained
        assert (begun, stopped) == ([0, 1], [0])
