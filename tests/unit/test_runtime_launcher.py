"""Stage 0's microbatches, from the draw to the count: the runner, the leases and the other peers are fakes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
from contexts import MovedClock, ReadClock, begin_round, make_context
from swarm_peer.policy.progress_counter import MAX_LIVES, RoundCount
from swarm_peer.runtime.network.progress import ProgressBook
from transformers import PretrainedConfig

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, HopFailed, InvalidMessage, NotFinite, RoundClosed, UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.data.ranges import SampleId, WindowRange, merge_ranges, ranges_of
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import Life, PeerState, PeerView, SwarmView
from swarm_peer.runtime.data import launcher
from swarm_peer.runtime.data.launcher import MicrobatchLauncher
from swarm_peer.runtime.data.prefetch import Sample
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import HopResult
from swarm_peer.wire.codecs import decode_tokens
from swarm_peer.wire.fields import MAX_LOSS
from swarm_peer.wire.identity import Identity

LENGTH, SAMPLES, GLOBAL_BATCH = 4, 2, 8
MY_IDENTITY = Identity.generate()
ME = MY_IDENTITY.peer_id


def make_manifest(peers_to_start=1, **training):
    return RunManifest.model_validate(
        {
            "name": "tiny",
            "model": {"config": {"model_type": "gpt2", "vocab_size": 100}},
            "stages": {"count": 2, "peers_to_start": peers_to_start},
            "data": {"sequence_length": LENGTH},
            "training": {
                "steps": 4,
                "global_batch_size": GLOBAL_BATCH,
                "microbatch_size": SAMPLES,
                "validation_every": 0,
            }
            | training,
            "optimizer": {"learning_rate": 0.1},
        }
    )


class Leases:
    """One endless slice: the n-th window has the tokens n, n, n, ..."""

    def __init__(self):
        self.generation = 0
        self.next_window = 0
        self.given_up = []
        self.may_draw = asyncio.Event()
        self.may_draw.set()
        self.num_waiting = 0

    async def run(self):
        await anyio.sleep_forever()

    async def draw(self, count):
        self.num_waiting += 1
        await self.may_draw.wait()
        self.num_waiting -= 1
        windows = range(self.next_window, self.next_window + count)
        self.next_window += count
        return [Sample(SampleId(0, 0, n), np.full(LENGTH + 1, n, np.int32)) for n in windows]

    def note_counted(self, samples, before):
        return merge_ranges([*before.ranges, *ranges_of(samples)])

    def give_up(self, samples):
        self.given_up += samples

    def complaint(self, now_s):
        return None


class Running:
    """A microbatch on its way."""

    def __init__(self, microbatch):
        self.id, self.round_number, self.mode = microbatch.id, microbatch.round_number, microbatch.mode
        tokens = decode_tokens(microbatch.tokens, (microbatch.num_samples, LENGTH + 1), 100)
        self.windows = tokens[:, 0].tolist()
        self.result = asyncio.get_running_loop().create_future()

    def succeed(self, loss_sum=1.0):
        self.result.set_result(HopResult(loss_sum))

    def fail(self, error):
        self.result.set_exception(error)


class Runner:
    samples_per_s = 0.0  # not measured, so that the window stays as it is

    def __init__(self):
        self.running = deque()

    async def run(self, entered, microbatch, hidden, deadline):
        assert hidden is None
        assert deadline > anyio.current_time()
        running = Running(microbatch)
        self.running.append(running)
        return await running.result

    async def launched(self, count=1):
        """Wait for as many launches, which have then to be ended by the test."""
        await until(lambda: len(self.running) >= count)
        return [self.running.popleft() for _ in range(count)]


async def until(condition):
    """Let others go on until a condition holds that nobody gives notice of."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it does not come about")


async def settle():
    """Let others go on for as long as any of them has something to do, and then some."""
    for _ in range(50):
        await asyncio.sleep(0)


class World:
    """A launcher with all that it is made of, as the peer wires it. `async with` runs it, and stops it."""

    def __init__(self, capacity=8, clock=None, **training):
        self.manifest = make_manifest(**training)
        self.context = make_context(
            ResolvedManifest(self.manifest, "0" * 32, PretrainedConfig(), ()), identity=MY_IDENTITY, clock=clock
        )
        self.metrics, self.changed = self.context.metrics, self.context.changed
        self.leases, self.executor = Leases(), Runner()
        self.rounds = RoundBook(self.changed)
        self.admission = RoundAdmission(capacity=None, rounds=self.rounds, changed=self.changed)
        self.progress = ProgressBook(
            context=self.context,
            incarnation=7,
            is_author=lambda peer: True,
            on_stranger=lambda peer: None,
            step=lambda: self.rounds.step,
        )
        self.peers = [
            PeerView(peer_id=ME, stage=0, state=PeerState.SERVING),
            PeerView(peer_id="next", stage=1, state=PeerState.SERVING),
        ]
        self.told = []
        self.tells = None  # a list of events: that each telling waits for
        self.hooked = []
        self.timeline = FIRST_TIMELINE
        swarm = SimpleNamespace(
            progress=self.progress,
            gossip=SimpleNamespace(tell=self._tell),
            view=lambda: SwarmView(2, tuple(self.peers)),
        )
        self.capacity = Capacity(capacity)
        self.launcher = MicrobatchLauncher(
            context=self.context,
            core=SimpleNamespace(
                executor=self.executor, admission=self.admission, rounds=self.rounds, capacity=self.capacity
            ),
            swarm=swarm,
            leases=self.leases,
            validation=np.arange(10, 15, dtype=np.int32)[:, None].repeat(LENGTH + 1, axis=1),
            counted=lambda round_number, tokens, samples, microbatch_id: self.hooked.append(
                (round_number, tokens[:, 0].tolist(), samples, microbatch_id)
            ),
        )

    async def _tell(self, peers):
        self.told.append(sorted(peers))
        if self.tells is not None:
            self.tells.append(asyncio.Event())
            await self.tells[-1].wait()

    def enter(self, round_number):
        began_s = self.context.clock.monotonic_s()
        begin_round(self.rounds, round_number, timeline=self.timeline, began_s=began_s)
        self.progress.forget_past()

    @property
    def count(self):
        return self.progress.counter.count_of(self.rounds.step.round_number, self.progress.author)

    async def __aenter__(self):
        self.enter(0)
        self.task = asyncio.ensure_future(self.launcher.run())
        return self

    async def __aexit__(self, *error):
        if error[0] is None:
            self.launcher.stop()
            await until(lambda: self.task.done() or self.executor.running)
            assert self.task.done(), "all that was launched has been ended"
            assert self.admission.admitted == self.admission.held == 0
            await self.task
        self.task.cancel()

    def outcomes(self, outcome):
        return self.metrics.microbatches.labels("train", outcome)._value.get()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(launcher, "RELAUNCH_PAUSE_S", 0.0)


def drain(world):
    """All that is on its way now succeeds."""
    while world.executor.running:
        world.executor.running.popleft().succeed()


async def succeed(world, count):
    """That many microbatches, one after the other."""
    for _ in range(count):
        [running] = await world.executor.launched()
        running.succeed()
        await settle()


# --- launching --------------------------------------------------------------------------------------------------------


async def test_as_many_are_in_flight_as_the_window_has_room_for():
    async with World() as world:
        assert world.launcher._window.size() == 2
        first, second = await world.executor.launched(2)
        await settle()
        assert not world.executor.running
        assert (first.windows, second.windows, world.count.claimed) == ([0, 1], [2, 3], 2 * SAMPLES)
        assert first.id != second.id
        first.succeed()
        [third] = await world.executor.launched()
        assert third.windows == [4, 5]
        second.succeed()
        third.succeed()
        await succeed(world, 1)


async def test_what_is_in_flight_counts_though_the_data_cannot_be_read_any_more():
    """The peer hands over what it has computed, and ends then."""
    world = World()
    draw = world.leases.draw

    async def draw_until_launched(count):
        if world.executor.running:
            raise UserError("cannot read the data")
        return await draw(count)

    world.leases.draw = draw_until_launched
    async with world:
        await until(lambda: world.launcher.failure is not None)
        await settle()
        assert not world.task.done()
        num_running = len(world.executor.running)
        drain(world)
        await until(world.task.done)
        assert world.count.samples == num_running * world.manifest.training.microbatch_size > 0
    assert str(world.launcher.failure) == "cannot read the data"


async def test_no_more_are_in_flight_than_fit_into_memory():
    async with World(capacity=1) as world:
        [only] = await world.executor.launched()
        await settle()
        assert not world.executor.running
        only.succeed()
        await succeed(world, 3)
    world.launcher._window.observe(100.0, 1.0, now=0.0)
    assert world.launcher._window.size() == 1, "whatever the round trip"


async def test_a_round_gets_its_global_batch_and_no_more():
    async with World() as world:
        await succeed(world, GLOBAL_BATCH // SAMPLES)
        assert not world.executor.running
        assert world.leases.next_window == GLOBAL_BATCH
        world.enter(1)
        [running, other] = await world.executor.launched(2)
        assert (running.round_number, running.windows) == (1, [8, 9])
        running.succeed()
        other.succeed()
        await succeed(world, 2)


async def test_nothing_is_launched_after_the_last_step():
    async with World(steps=1) as world:
        await succeed(world, GLOBAL_BATCH // SAMPLES)
        world.enter(1)
        await settle()
        assert not world.executor.running


async def test_a_run_that_has_gone_back_makes_its_last_step_all_the_same():
    async with World(steps=4) as world:
        for running in await world.executor.launched(2):
            running.succeed()
        await succeed(world, 2)
        world.timeline = Timeline(7, 3, 3)
        world.enter(7)
        for running in await world.executor.launched(2):
            assert running.round_number == 7
            running.succeed()
        await succeed(world, 2)
        world.enter(8)
        await settle()
        assert not world.executor.running, "it has as many updates as it shall have"


async def test_the_first_round_waits_for_as_many_peers_as_shall_be_there():
    async with World(peers_to_start=2) as world:
        await settle()
        assert not world.executor.running
        world.peers += [
            PeerView(peer_id="mate", stage=0, state=PeerState.SERVING),
            PeerView(peer_id="other", stage=1, state=PeerState.SERVING),
        ]
        world.changed.notify()
        for running in await world.executor.launched(2):
            running.succeed()
        await settle()
        drain(world)
        world.peers = world.peers[:2]
        world.enter(1)
        for running in await world.executor.launched(2):
            assert running.round_number == 1
            running.succeed()
        await succeed(world, 2)


# --- what comes back --------------------------------------------------------------------------------------------------


async def test_what_succeeds_is_counted_once_and_told():
    async with World() as world:
        first, second = await world.executor.launched(2)
        first.succeed(3.5)
        [third] = await world.executor.launched()
        assert world.count == RoundCount(2, 6, 3.5, (WindowRange(0, 0, 0, 2),))
        (hooked,) = world.hooked
        assert hooked == (0, [0, 1], (SampleId(0, 0, 0), SampleId(0, 0, 1)), first.id)
        third.succeed(1.0)
        [fourth] = await world.executor.launched()
        second.succeed(1.0)
        fourth.succeed(1.0)
        await settle()
        assert world.count == RoundCount(8, 8, 6.5, (WindowRange(0, 0, 0, 8),))
        assert world.launcher.current.samples == 8
        assert len(world.hooked) == 4
        assert world.outcomes("counted") == 4


@pytest.mark.parametrize("error", [HopFailed("nobody"), InvalidMessage("nonsense")])
async def test_what_fails_is_launched_again_under_the_same_id_and_claim(error):
    async with World() as world:
        first, second = await world.executor.launched(2)
        first.fail(error)
        [again] = await world.executor.launched()
        assert (again.id, again.windows, again.round_number) == (first.id, [0, 1], 0)
        assert world.count.claimed == 2 * SAMPLES
        again.succeed()
        second.succeed()
        await succeed(world, 2)
        assert world.count.samples == GLOBAL_BATCH
        assert (world.outcomes("counted"), world.outcomes(error.code)) == (4, 1)
        assert world.leases.given_up == []


class Activations:
    """What a pass holds in the device's memory."""


@pytest.mark.parametrize("error", [HopFailed, RoundClosed])
async def test_what_has_failed_holds_no_memory_while_it_waits_for_the_next_launch(monkeypatch, error):
    monkeypatch.setattr(launcher, "RELAUNCH_PAUSE_S", 1000.0)
    passes = []

    async def run(entered, microbatch, hidden, deadline):
        activations = Activations()
        passes.append(weakref.ref(activations))
        await asyncio.sleep(0)
        raise error("the device has no memory left")

    world = World(capacity=1)
    world.executor.run = run
    gc.disable()  # what is held in a circle would be gone by chance
    try:
        await world.__aenter__()
        await until(lambda: passes)
        await settle()
        assert world.launcher._in_flight == 1, "it waits"
        assert [activations() for activations in passes] == [None]
    finally:
        gc.enable()
        world.task.cancel()


async def test_a_device_that_ran_out_of_memory_has_fewer_in_flight():
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.capacity.ran_out(inside=2)
        first.succeed()
        await settle()
        assert not world.executor.running
        second.succeed()
        await succeed(world, 2)


async def test_what_fails_each_time_gives_its_place_to_another(monkeypatch):
    monkeypatch.setattr(launcher, "MAX_LAUNCHES", 3)
    async with World() as world:
        first, second = await world.executor.launched(2)
        second.succeed()
        for launch in range(3):
            if launch:
                await until(lambda: any(item.id == first.id for item in world.executor.running))
                failing = next(item for item in world.executor.running if item.id == first.id)
                world.executor.running.remove(failing)
            else:
                failing = first
            failing.fail(HopFailed("its own fault"))
            await settle()
        assert world.leases.given_up == [SampleId(0, 0, 0), SampleId(0, 0, 1)]
        assert world.metrics.lost_samples._value.get() == SAMPLES
        ids = {item.id for item in world.executor.running}
        assert first.id not in ids
        assert {len(item) for item in ids} == {16}
        while not world.progress.counter.is_full(0):
            drain(world)
            await settle()
        assert world.count == RoundCount(8, 8, 4.0, (WindowRange(0, 0, 2, 10),)), "the place that it had claimed"


async def fail_all(world, error, passed_s=1.0):
    """Each microbatch under way fails, and is launched again, or another one in its place."""
    while world.executor.running:
        world.executor.running.popleft().fail(error)
    world.context.clock.passed_s += passed_s
    await settle()


async def test_a_peer_complains_as_long_as_every_microbatch_fails():
    async with World(clock=MovedClock()) as world:
        first, second = await world.executor.launched(2)
        assert world.launcher.complaint() is None
        first.fail(HopFailed("nobody"))
        await settle()
        assert world.launcher.complaint() is None, "the second one may succeed"
        second.fail(HopFailed("timeout: next"))
        await settle()
        await fail_all(world, HopFailed("stalled"))
        complaint = world.launcher.complaint()
        assert (complaint.trouble, complaint.words) == (Trouble.FAILING, "every microbatch fails: hop_failed: stalled")
        [running] = await world.executor.launched()
        running.succeed()
        await settle()
        assert world.launcher.complaint() is None
        while not world.progress.counter.is_full(0):
            drain(world)
            await settle()


async def test_weights_that_have_diverged_are_told_of_after_some_batches(monkeypatch):
    monkeypatch.setattr(launcher, "MAX_LAUNCHES", 2)
    async with World(clock=MovedClock()) as world:
        await world.executor.launched(0)
        await settle()
        seen = []
        for _ in range(4):
            await fail_all(world, NotFinite("the loss is not finite"))
            complaint = world.launcher.complaint()
            seen.append(complaint and complaint.trouble)
        assert seen[1:] == [Trouble.FAILING, Trouble.DIVERGED, Trouble.DIVERGED], "of two batches first, then of others"
        before = list(world.executor.running)
        world.executor.running.clear()
        world.leases.generation += 1
        world.enter(1)
        for running in before:
            running.fail(NotFinite("of the weights before"))
        await settle()
        await world.executor.launched(0)
        assert world.launcher.complaint() is None, "the run has gone back"
        while not world.progress.counter.is_full(1):
            drain(world)
            await settle()


async def test_an_empty_stage_is_no_failure_of_the_launcher(monkeypatch):
    """The stage has lost its peers, which is told of elsewhere; and the time before does not count later."""
    async with World(clock=MovedClock()) as world:
        await world.executor.launched(0)
        await settle()
        await fail_all(world, HopFailed("dying"))
        await fail_all(world, HopFailed("dying"))
        assert world.launcher.complaint() is not None
        next_stage = world.peers.pop()
        monkeypatch.setattr(SwarmView, "fewest_serving", lambda view: 1)
        await fail_all(world, HopFailed("nobody"), passed_s=500.0)
        assert world.launcher.complaint() is None
        world.peers.append(next_stage)
        while not world.progress.counter.is_full(0):
            drain(world)
            await settle()


async def test_nothing_is_dropped_because_a_stage_has_no_peers(monkeypatch):
    """It may stay empty overnight."""
    monkeypatch.setattr(launcher, "MAX_LAUNCHES", 3)
    async with World() as world:
        monkeypatch.setattr(SwarmView, "fewest_serving", lambda view: 1)  # for the first round it is waited
        [failing] = await world.executor.launched()
        microbatch_id, next_stage = failing.id, world.peers.pop()
        for _ in range(5):
            failing.fail(HopFailed("no peer serves the stage"))
            await until(lambda: any(item.id == microbatch_id for item in world.executor.running))
            failing = next(item for item in world.executor.running if item.id == microbatch_id)
            world.executor.running.remove(failing)
        world.peers.append(next_stage)
        failing.succeed()
        await settle()
        assert world.leases.given_up == []
        assert world.metrics.lost_samples._value.get() == 0
        while not world.progress.counter.is_full(0):
            drain(world)
            await settle()


async def test_what_has_not_failed_is_not_dropped_however_often_its_round_was_closed(monkeypatch):
    monkeypatch.setattr(launcher, "MAX_LAUNCHES", 3)
    async with World() as world:
        [first] = await world.executor.launched()
        for round_number in range(1, 4):
            world.rounds.enter(Phase.ENDING)
            first.fail(RoundClosed("over", round_number))
            await settle()
            drain(world)
            await settle()
            world.enter(round_number)
            await until(lambda: any(item.windows == [0, 1] for item in world.executor.running))
            first = next(item for item in world.executor.running if item.windows == [0, 1])
            world.executor.running.remove(first)
        first.fail(HopFailed("for the first time"))
        await until(lambda: any(item.windows == [0, 1] for item in world.executor.running))
        assert world.leases.given_up == []
        assert world.metrics.lost_samples._value.get() == 0
        while not world.progress.counter.is_full(3):
            drain(world)
            await settle()


async def test_what_comes_too_late_belongs_to_the_next_round():
    async with World() as world:
        first, second = await world.executor.launched(2)
        second.succeed()
        await succeed(world, 2)
        world.rounds.enter(Phase.ENDING)
        first.fail(RoundClosed("over", 1))
        await settle()
        assert not world.executor.running
        assert world.admission._newest_asked == 1
        world.enter(1)
        again, other = await world.executor.launched(2)
        assert (again.windows, again.round_number, other.round_number) == ([0, 1], 1, 1)
        assert again.id != first.id, "a peer that counted it in the round before shall count it again"
        assert world.count.claimed == 2 * SAMPLES
        again.succeed()
        other.succeed()
        await succeed(world, 2)
        assert world.count == RoundCount(8, 8, 4.0, (WindowRange(0, 0, 0, 2), WindowRange(0, 0, 8, 14)))
        assert [windows for _, windows, *_ in world.hooked].count([0, 1]) == 1


async def test_a_peer_that_hears_of_the_end_of_a_round_asks_for_the_counts_that_it_has_missed():
    async with World() as world:
        first, second = await world.executor.launched(2)
        assert world.told == []
        first.fail(RoundClosed("over", 1))
        [again] = await world.executor.launched()
        assert world.told == [["next"]]
        assert (again.id, again.round_number) == (first.id, 0), "nobody knew of any, so it is not"
        again.succeed()
        second.succeed()
        await succeed(world, 2)


async def test_a_batch_with_a_place_in_the_round_does_not_wait_for_one_without():
    """Otherwise a round that is claimed as a whole would never be full."""
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.tells = []
        first.fail(RoundClosed("over", 1))
        await until(lambda: len(world.tells) == 1)
        second.succeed()
        await succeed(world, 1)
        world.enter(1)
        [last] = await world.executor.launched()
        while world.count.claimed < GLOBAL_BATCH:
            last.succeed()
            [last] = await world.executor.launched()
        last.fail(RoundClosed("over, it says"))
        await until(lambda: len(world.tells) == 2)
        for told in world.tells:
            told.set()
            await settle()
        world.tells = None
        [again] = await world.executor.launched()
        assert (again.id, again.windows) == (last.id, last.windows)
        again.succeed()
        await settle()
        assert world.count.samples == GLOBAL_BATCH
        world.enter(2)
        running = await world.executor.launched(2)
        assert running[0].windows == first.windows
        for item in running:
            item.succeed()
        await succeed(world, 2)


# --- a ledger that is replaced ----------------------------------------------------------------------------------------


async def test_what_was_drawn_under_another_ledger_does_not_count():
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.leases.generation += 1
        first.succeed()
        second.fail(HopFailed("nobody"))
        third, fourth = await world.executor.launched(2)
        assert world.count.samples == 0
        assert world.hooked == []
        assert {tuple(third.windows), tuple(fourth.windows)}.isdisjoint({(0, 1), (2, 3)})
        third.succeed()
        fourth.succeed()
        await settle()
        assert world.count.ranges[0].start >= 4
        drain(world)
        assert world.leases.given_up == []


async def test_what_is_drawn_while_the_ledger_is_replaced_is_of_the_new_one():
    world = World()
    world.leases.may_draw.clear()
    async with world:
        await until(lambda: world.leases.num_waiting == 1)
        world.leases.generation += 1
        world.leases.may_draw.set()
        first, second = await world.executor.launched(2)
        assert (first.windows, second.windows) == ([0, 1], [2, 3])
        first.succeed()
        second.succeed()
        await settle()
        drain(world)
        assert world.count.samples >= 2 * SAMPLES


async def test_nothing_is_given_up_into_a_new_ledger(monkeypatch):
    monkeypatch.setattr(launcher, "MAX_LAUNCHES", 1)
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.leases.generation += 1
        first.fail(HopFailed("its own fault"))
        second.succeed()
        await settle()
        assert world.leases.given_up == []
        drain(world)


async def test_while_samples_are_waited_for_what_has_failed_is_launched_again():
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.leases.may_draw.clear()
        first.succeed()
        await until(lambda: world.leases.num_waiting == 1)
        second.fail(HopFailed("its own fault"))
        [again] = await world.executor.launched()
        assert again.windows == second.windows
        again.succeed()
        world.launcher.stop()
        await until(world.task.done)
        assert world.count.samples == 2 * SAMPLES, "and the launcher ends, though nothing comes"


async def test_samples_that_come_after_their_round_are_kept_for_the_next():
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.leases.may_draw.clear()
        first.succeed()
        await until(lambda: world.leases.num_waiting == 1)
        second.succeed()
        world.enter(1)
        world.leases.may_draw.set()
        third, fourth = await world.executor.launched(2)
        assert [(item.round_number, item.windows) for item in (third, fourth)] == [(1, [4, 5]), (1, [6, 7])]
        third.succeed()
        fourth.succeed()
        await settle()
        drain(world)


async def test_samples_that_come_while_their_round_ends_are_kept_for_the_next():
    """This peer's ledger has taken its counts of the round already, so that what it claimed now would be lost to it."""
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.leases.may_draw.clear()
        first.succeed()
        await until(lambda: world.leases.num_waiting == 1)
        second.succeed()
        await settle()
        told = world.count
        world.rounds.enter(Phase.ENDING)
        world.leases.may_draw.set()
        await settle()
        assert world.count == told
        world.enter(1)
        third, fourth = await world.executor.launched(2)
        assert [(item.round_number, item.windows) for item in (third, fourth)] == [(1, [4, 5]), (1, [6, 7])]
        third.succeed()
        fourth.succeed()
        await settle()
        drain(world)


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_after_stop_nothing_is_launched_and_what_is_in_flight_ends():
    world = World()
    async with world:
        first, second = await world.executor.launched(2)
        world.launcher.stop()
        first.succeed()
        await settle()
        assert not world.executor.running
        assert not world.task.done()
        second.succeed()
        await until(world.task.done)
        assert world.count.samples == 2 * SAMPLES


async def test_after_stop_what_fails_each_time_is_replaced_by_nothing(monkeypatch):
    """There may be no more samples to come, and a leaving peer would wait for them."""
    monkeypatch.setattr(launcher, "MAX_LAUNCHES", 1)
    async with World() as world:
        first, second = await world.executor.launched(2)
        world.leases.may_draw.clear()
        world.launcher.stop()
        first.fail(HopFailed("its own fault"))
        second.succeed()
        await until(world.task.done)


async def test_counts_are_exchanged_when_there_is_nothing_to_launch(monkeypatch):
    monkeypatch.setattr(launcher, "LAST_NEWS_EVERY_S", 0.0)
    async with World() as world:
        world.peers.append(PeerView(peer_id="mate", stage=0, state=PeerState.SERVING))
        # The mate has claimed what is left, and is at it.
        world.progress.counter.merge(0, Life("mate"), RoundCount(0, 4))
        await succeed(world, 2)
        await until(lambda: len(world.told) > 1)
        assert world.told[0] == ["mate"]
        assert not world.executor.running


async def test_all_others_are_told_once_and_then_some(monkeypatch):
    monkeypatch.setattr(launcher, "LAST_NEWS_EVERY_S", 0.0)
    async with World(global_batch_size=12 * SAMPLES) as world:
        mates = [f"mate-{number}" for number in range(5)]
        world.peers += [PeerView(peer_id=mate, stage=0, state=PeerState.SERVING) for mate in mates]
        for mate in mates:  # they have claimed all but this peer's share, and are at it
            world.progress.counter.merge(0, Life(mate), RoundCount(0, 2 * SAMPLES))
        first, second = await world.executor.launched(2)
        await until(lambda: len(world.told) > 3)
        assert world.told[0] == mates, "its own share is launched"
        assert {len(told) for told in world.told[1:]} == {launcher.PEERS_TOLD}
        first.succeed()
        second.succeed()
        await until(lambda: world.told.count(mates) == 2)
        num_told = len(world.told)
        await until(lambda: len(world.told) > num_told + 3)
        assert world.told.count(mates) == 2, "its last counts are told once"


async def test_what_others_have_left_is_launched_when_they_were_heard_and_not_before():
    """Two stage-0 peers may have no peer in common later on. So this one may not know of any claim of its mate."""
    async with World() as world:
        world.tells = []
        world.peers.append(PeerView(peer_id="mate", stage=0, state=PeerState.SERVING))
        world.progress.counter.merge(0, Life("mate"), RoundCount())
        await succeed(world, 2)
        assert world.tells, "its own half is launched"
        assert not world.executor.running
        world.progress.counter.merge(0, Life("mate"), RoundCount(0, GLOBAL_BATCH // 2))
        world.tells[0].set()
        await settle()
        assert not world.executor.running, "the mate has claimed its half"
        world.progress.counter.merge(0, Life("mate"), RoundCount(SAMPLES, SAMPLES))
        world.tells = None


async def test_what_a_mate_is_slow_to_claim_is_launched_once_it_was_heard():
    async with World(global_batch_size=8 * SAMPLES) as world:
        world.peers.append(PeerView(peer_id="mate", stage=0, state=PeerState.SERVING))
        world.progress.counter.merge(0, Life("mate"), RoundCount(SAMPLES, SAMPLES))
        await succeed(world, 4)
        [running] = await world.executor.launched()
        assert world.told, "beyond its own half"
        running.succeed()
        await settle()
        assert not world.executor.running, "the last two of those left are the mate's"


async def test_who_was_left_out_of_small_rounds_launches_one_microbatch_more_than_they_have():
    """All places are taken before it hears of a round, since the others have not heard of it for long."""
    now = 100.0
    async with World(clock=ReadClock(lambda: now)) as world:
        world.peers.append(PeerView(peer_id="mate", stage=0, state=PeerState.SERVING))
        world.progress.counter.merge(0, Life("mate"), RoundCount(0, GLOBAL_BATCH))
        now += 2 * world.manifest.limits.hop_timeout_s
        world.progress.counter.merge(1, Life("mate"), RoundCount(0, GLOBAL_BATCH))
        world.enter(1)
        world.changed.notify()
        await settle()
        assert not world.executor.running
        now += 1.0
        world.changed.notify()
        [running] = await world.executor.launched()
        await settle()
        assert not world.executor.running, "one is enough for the others to hear of it"
        running.succeed()
        await settle()
        assert not world.executor.running
        assert (world.count.samples, world.count.claimed) == (SAMPLES, SAMPLES)
        world.progress.counter.merge(2, Life("mate"), RoundCount(0, GLOBAL_BATCH))
        world.enter(2)
        world.changed.notify()
        await settle()
        assert not world.executor.running, "it had a place a moment ago"


async def test_who_has_had_too_many_lives_in_a_round_launches_nothing_that_nobody_would_hear_of():
    now = 100.0
    async with World(clock=ReadClock(lambda: now)) as world:
        for life in range(MAX_LIVES):
            world.progress.counter.merge(1, Life(ME, life + 100), RoundCount(0, SAMPLES))
        drain(world)
        world.enter(1)
        await settle()
        drain(world)
        now += 2 * world.manifest.limits.hop_timeout_s + 1.0
        world.changed.notify()
        await settle()
        assert not world.progress.counter.may_count(1, world.progress.author)
        assert not world.executor.running


async def test_the_counts_of_the_last_microbatches_are_told_at_once(monkeypatch):
    monkeypatch.setattr(launcher, "LAST_NEWS_EVERY_S", 1000.0)
    async with World() as world:
        world.peers.append(PeerView(peer_id="mate", stage=0, state=PeerState.SERVING))
        world.progress.counter.merge(0, Life("mate"), RoundCount(0, 4))
        first, second = await world.executor.launched(2)
        await until(lambda: world.told)
        first.succeed()
        await settle()
        assert len(world.told) == 1
        second.succeed()
        await until(lambda: len(world.told) > 1)


async def test_counts_are_exchanged_with_some_stage_mates_all_the_time(monkeypatch):
    monkeypatch.setattr(launcher, "NEWS_EVERY_S", 0.0)
    async with World(global_batch_size=100 * SAMPLES) as world:
        world.peers += [PeerView(peer_id=f"mate-{number}", stage=0, state=PeerState.SERVING) for number in range(5)]
        await until(lambda: len({name for told in world.told for name in told}) == 5)
        assert {len(told) for told in world.told} == {launcher.PEERS_TOLD}
        assert all(ME not in told for told in world.told)
        drain(world)


# --- validation -------------------------------------------------------------------------------------------------------


async def validate(world, loss_sum=1.0):
    """The validation that is due; returns the windows of it."""
    await settle()
    launched = list(world.executor.running)
    world.executor.running.clear()
    assert {item.mode for item in launched} == {"evaluate"}, "no training before"
    for item in launched:
        item.succeed(loss_sum)
    return sorted(window for item in launched for window in item.windows)


async def test_the_largest_losses_that_peers_may_reply_go_into_a_count_and_a_validation():
    async with World(validation_every=2, steps=3) as world:
        assert await validate(world, MAX_LOSS)
        await settle()
        while world.executor.running:
            world.executor.running.popleft().succeed(MAX_LOSS)
            await settle()
        assert world.launcher.validations[0].loss_sum == 3 * MAX_LOSS
        assert world.launcher.current.samples == GLOBAL_BATCH
        assert world.launcher.current.loss_sum == GLOBAL_BATCH // SAMPLES * MAX_LOSS


async def test_validation_comes_first_every_so_many_steps_and_at_the_end():
    async with World(validation_every=2, steps=3) as world:
        validated = []
        for round_number in range(4):
            if round_number:
                world.enter(round_number)
            await settle()
            if world.executor.running and world.executor.running[0].mode == "evaluate":
                validated.append(round_number)
                assert await validate(world) == [10, 11, 12, 13, 14]
            if round_number < 3:
                await succeed(world, GLOBAL_BATCH // SAMPLES)
        await settle()
        assert validated == [0, 2, 3]
        assert [(item.round_number, item.optimizer_step, item.samples) for item in world.launcher.validations] == [
            (0, 0, 5),
            (2, 2, 5),
            (3, 3, 5),
        ]
        assert world.launcher.validations[0].loss_sum == 3.0, "of as many microbatches"


async def test_validation_is_shared_and_its_failures_are_left_out():
    world = World(validation_every=2)
    mates = sorted([ME, "mate"])
    world.peers.append(PeerView(peer_id="mate", stage=0, state=PeerState.SERVING))
    async with world:
        await settle()
        share = list(range(10, 15))[mates.index(ME) :: 2]
        launched = list(world.executor.running)
        world.executor.running.clear()
        assert sorted(window for item in launched for window in item.windows) == share
        failed, *rest = sorted(launched, key=lambda item: item.windows)
        failed.fail(CallError("no"))
        for item in rest:
            item.succeed(0.5)
        await settle()
        assert [item.samples for item in world.launcher.validations] == [len(share) - 2] * bool(rest)
        assert {item.mode for item in world.executor.running} == {"train"}
        drain(world)
        await settle()
        drain(world)


async def test_a_leaving_peer_that_validates_ends():
    async with World(validation_every=2) as world:
        await settle()
        world.launcher.stop()
        await validate(world)
        await until(world.task.done)
