import asyncio

import anyio
import pytest

from swarm_peer.errors import Busy, NotServing, StepClosed
from swarm_peer.runtime.gate import StepGate
from swarm_peer.runtime.signal import Signal


class Guests:
    """Those who enter and stay inside until told to go."""

    def __init__(self, gate):
        self.gate = gate
        self.inside = []

    async def _stay(self, step, leave):
        async with self.gate.enter(step):
            self.inside.append(step)
            await leave.wait()

    async def send(self, step):
        leave = anyio.Event()
        task = asyncio.ensure_future(self._stay(step, leave))
        task.leave = leave
        await anyio.wait_all_tasks_blocked()
        return task


@pytest.fixture
def gate():
    gate = StepGate(capacity=3, changed=Signal())
    gate.open(5)
    return gate


@pytest.fixture
def guests(gate):
    return Guests(gate)


async def leaves(task):
    task.leave.set()
    await task


async def test_microbatches_of_this_step_come_in(gate, guests):
    guest = await guests.send(5)
    assert (gate.admitted, gate.held) == (1, 0)
    await leaves(guest)
    assert (gate.admitted, gate.held) == (0, 0)


async def test_microbatches_of_the_next_step_are_held(gate, guests):
    early = await guests.send(6)
    assert guests.inside == []
    assert (gate.admitted, gate.held) == (0, 1)
    gate.close()
    await anyio.wait_all_tasks_blocked()
    assert guests.inside == []
    gate.open(6)
    await anyio.wait_all_tasks_blocked()
    assert guests.inside == [6]
    assert (gate.admitted, gate.held) == (1, 0)
    await leaves(early)


async def test_microbatches_of_the_next_step_are_held_by_a_closed_gate_too(gate, guests):
    gate.close()
    early = await guests.send(6)
    assert gate.held == 1
    gate.open(6)
    await leaves(early)
    assert guests.inside == [6]


async def test_a_held_microbatch_whose_step_is_skipped_is_turned_away(gate, guests):
    early = await guests.send(6)
    gate.open(7)
    with pytest.raises(StepClosed) as caught:
        await early
    assert caught.value.step == 7
    assert gate.held == 0


async def test_a_held_microbatch_whose_step_has_opened_and_closed_is_turned_away(gate, guests):
    early = await guests.send(6)
    gate.open(6)
    gate.close()
    with pytest.raises(StepClosed):
        await early
    assert guests.inside == []


@pytest.mark.parametrize("step", [0, 4])
async def test_microbatches_of_earlier_steps_are_turned_away(gate, guests, step):
    with pytest.raises(StepClosed, match=f"global step {step} is closed here; this peer is in step 5") as caught:
        await (await guests.send(step))
    assert caught.value.step == 5


async def test_microbatches_of_a_closed_step_are_turned_away(gate, guests):
    inside = await guests.send(5)
    gate.close()
    assert not gate.is_open
    with pytest.raises(StepClosed):
        await (await guests.send(5))
    assert gate.admitted == 1, "who is inside stays"
    await leaves(inside)


async def test_microbatches_of_far_steps_are_not_held(gate, guests):
    with pytest.raises(NotServing, match="in step 5, too far behind step 7"):
        await (await guests.send(7))
    assert gate.held == 0


async def test_a_full_gate_says_so_at_once(gate, guests):
    staying = [await guests.send(step) for step in (5, 5, 6)]
    with pytest.raises(Busy, match="2 microbatches in flight and 1 held"):
        await (await guests.send(5))
    await leaves(staying[0])
    another = await guests.send(5)
    assert gate.admitted == 2
    gate.open(6)
    for guest in [*staying[1:], another]:
        await leaves(guest)


async def test_whoever_is_cancelled_makes_room(gate, guests):
    for step in (5, 6):
        guest = await guests.send(step)
        guest.cancel()
        with pytest.raises(asyncio.CancelledError):
            await guest
    assert (gate.admitted, gate.held) == (0, 0)


async def test_a_failure_inside_makes_room(gate):
    with pytest.raises(ValueError, match="inside"):
        async with gate.enter(5):
            raise ValueError("inside")
    assert gate.admitted == 0


async def test_drained_waits_for_those_inside_and_not_for_those_held(gate, guests):
    inside, held = [await guests.send(5), await guests.send(5)], await guests.send(6)
    gate.close()
    drained = asyncio.ensure_future(gate.drained())
    for guest in inside:
        await anyio.wait_all_tasks_blocked()
        assert not drained.done()
        await leaves(guest)
    await drained
    gate.open(6)
    await leaves(held)


async def test_nobody_enters_before_the_gate_was_opened():
    gate = StepGate(capacity=3, changed=Signal())
    with pytest.raises(NotServing):
        async with gate.enter(0):
            pass


async def test_a_leaving_peer_turns_all_away_and_keeps_those_inside(gate, guests):
    inside, held = await guests.send(5), await guests.send(6)
    gate.leave()
    with pytest.raises(NotServing, match="draining"):
        await held
    with pytest.raises(NotServing, match="draining"):
        await (await guests.send(5))
    assert gate.admitted == 1
    await leaves(inside)
    await gate.drained()
