import asyncio

import anyio
import pytest
from contexts import begin_round

from swarm_peer.errors import Busy, NotServing, RoundClosed
from swarm_peer.policy.step_state import Phase
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.rounds import RoundBook


def make_admission():
    changed = Condition()
    return RoundAdmission(capacity=Capacity(3), rounds=RoundBook(changed), changed=changed)


def begin(admission, round_number):
    begin_round(admission._rounds, round_number)


class Guests:
    """Those who enter and stay inside until told to go."""

    def __init__(self, admission):
        self.admission = admission
        self.inside = []

    async def _stay(self, round_number, leave):
        async with self.admission.enter(round_number):
            self.inside.append(round_number)
            await leave.wait()

    async def send(self, round_number):
        leave = anyio.Event()
        task = asyncio.ensure_future(self._stay(round_number, leave))
        task.leave = leave
        await anyio.wait_all_tasks_blocked()
        return task


@pytest.fixture
def admission():
    admission = make_admission()
    begin(admission, 5)
    return admission


@pytest.fixture
def guests(admission):
    return Guests(admission)


async def leaves(task):
    task.leave.set()
    await task


async def test_microbatches_of_this_round_come_in(admission, guests):
    guest = await guests.send(5)
    assert (admission.admitted, admission.held) == (1, 0)
    await leaves(guest)
    assert (admission.admitted, admission.held) == (0, 0)


async def test_microbatches_of_the_next_round_are_held(admission, guests):
    early = await guests.send(6)
    assert guests.inside == []
    assert (admission.admitted, admission.held) == (0, 1)
    admission._rounds.enter(Phase.ENDING)
    await anyio.wait_all_tasks_blocked()
    assert guests.inside == []
    begin(admission, 6)
    await anyio.wait_all_tasks_blocked()
    assert guests.inside == [6]
    assert (admission.admitted, admission.held) == (1, 0)
    await leaves(early)


async def test_a_closed_admission_holds_microbatches_of_the_next_round_too(admission, guests):
    admission._rounds.enter(Phase.ENDING)
    early = await guests.send(6)
    assert admission.held == 1
    begin(admission, 6)
    await leaves(early)
    assert guests.inside == [6]


async def test_a_held_microbatch_whose_round_is_skipped_is_turned_away(admission, guests):
    early = await guests.send(6)
    begin(admission, 7)
    with pytest.raises(RoundClosed) as caught:
        await early
    assert caught.value.round_number == 7
    assert admission.held == 0


async def test_a_held_microbatch_whose_round_has_opened_and_closed_is_turned_away(admission, guests):
    early = await guests.send(6)
    begin(admission, 6)
    admission._rounds.enter(Phase.ENDING)
    with pytest.raises(RoundClosed):
        await early
    assert guests.inside == []


@pytest.mark.parametrize("round_number", [0, 4])
async def test_microbatches_of_earlier_rounds_are_turned_away(admission, guests, round_number):
    with pytest.raises(RoundClosed, match=f"round {round_number} is closed here; this peer is in round 5") as caught:
        await (await guests.send(round_number))
    assert caught.value.round_number == 5


async def test_microbatches_of_a_closed_round_are_turned_away(admission, guests):
    inside = await guests.send(5)
    admission._rounds.enter(Phase.ENDING)
    assert not admission.is_open
    with pytest.raises(RoundClosed):
        await (await guests.send(5))
    assert admission.admitted == 1, "who is inside stays"
    await leaves(inside)


async def test_microbatches_of_far_rounds_are_not_held(admission, guests):
    with pytest.raises(NotServing, match="in round 5, too far behind round 7"):
        await (await guests.send(7))
    assert admission.held == 0


async def test_a_full_admission_says_so_at_once(admission, guests):
    staying = [await guests.send(round_number) for round_number in (5, 5, 6)]
    with pytest.raises(Busy, match="2 microbatches in flight and 1 held"):
        await (await guests.send(5))
    await leaves(staying[0])
    another = await guests.send(5)
    assert admission.admitted == 2
    begin(admission, 6)
    for guest in [*staying[1:], another]:
        await leaves(guest)


async def test_a_cancelled_microbatch_makes_room(admission, guests):
    for round_number in (5, 6):
        guest = await guests.send(round_number)
        guest.cancel()
        with pytest.raises(asyncio.CancelledError):
            await guest
    assert (admission.admitted, admission.held) == (0, 0)


async def test_a_failure_inside_makes_room(admission):
    with pytest.raises(ValueError, match="inside"):
        async with admission.enter(5):
            raise ValueError("inside")
    assert admission.admitted == 0


async def test_drained_waits_for_those_inside_and_not_for_those_held(admission, guests):
    inside, held = [await guests.send(5), await guests.send(5)], await guests.send(6)
    admission._rounds.enter(Phase.ENDING)
    drained = asyncio.ensure_future(admission.drained())
    for guest in inside:
        await anyio.wait_all_tasks_blocked()
        assert not drained.done()
        await leaves(guest)
    await drained
    begin(admission, 6)
    await leaves(held)


async def test_nobody_enters_before_the_first_round():
    admission = make_admission()
    with pytest.raises(NotServing):
        async with admission.enter(0):
            pass


async def test_a_leaving_peer_turns_all_away_and_keeps_those_inside(admission, guests):
    inside, held = await guests.send(5), await guests.send(6)
    admission.leave()
    with pytest.raises(NotServing, match="draining"):
        await held
    with pytest.raises(NotServing, match="draining"):
        await (await guests.send(5))
    assert admission.admitted == 1
    await leaves(inside)
    await admission.drained()


async def test_who_gives_up_what_is_inside_waits_for_it_no_more():
    admission = make_admission()
    begin(admission, 0)
    guests = Guests(admission)
    await guests.send(0)
    admission.leave()
    waiting = asyncio.ensure_future(admission.drained())
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    admission.give_up_inside()
    await waiting
