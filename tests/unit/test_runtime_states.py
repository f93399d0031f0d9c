"""What a seat takes over from its stage-mates, and what these keep for it."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
import torch
from agreed_stages import is_member, resolved_of
from contexts import make_context
from memory_transport import MemoryNetwork

from swarm_peer.errors import CallError
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.log import Close, Committed, Cut, Entry, Log
from swarm_peer.protocol.statements import EpochId, Seat
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread, SpeedMeter
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import Microbatch
from swarm_peer.runtime.state import states
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots
from swarm_peer.runtime.state.roots import digest_of, root_of
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.runtime.state.states import StageMates, StageSources
from swarm_peer.runtime.step.workplace import timeline_of
from swarm_peer.wire.codecs import encode, encode_tokens
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import StateIndexCall

SEAT = Seat("a", 1, "")
STAGE = 1


class Replica:
    """A peer's replica of a stage, at the head of a log."""

    def __init__(self, network, resolved, log, work=None):
        self.identity, self.log = Identity.generate(), log
        self.context = make_context(resolved, identity=self.identity)
        self.transport = network.transport(self.identity.peer_id)
        self.trainer = StageTrainer(resolved, resolved.specs[STAGE])
        self.thread = DeviceThread(clock=self.context.clock, threads=self.context.threads, metrics=self.context.metrics)
        self.rounds = RoundBook(self.context.changed)
        capacity, speed = Capacity(8), SpeedMeter(self.context.metrics)
        self.executor = StageExecutor(
            context=self.context,
            trainer=self.trainer,
            device_thread=self.thread,
            speed=speed,
            next_stage=None,
            capacity=capacity,
            replies_kept=8,
            work=work,
        )
        self.core = ReplicaCore(
            trainer=self.trainer,
            capacity=capacity,
            device_thread=self.thread,
            speed=speed,
            rounds=self.rounds,
            admission=RoundAdmission(capacity=None, rounds=self.rounds, changed=self.context.changed),
            executor=self.executor,
            time=None,
        )
        self.kept = {}
        self.server = StateServer(context=self.context, core=self.core, kept=self.kept.get)
        self.donors, self.fears_lies = [], True
        self.num_asked, self.asked = 0, Condition()
        self.sources = StageSources(
            context=self.context,
            transport=self.transport,
            trainer=self.trainer,
            core=self.core,
            mates=StageMates(
                donors=lambda: self.donors,
                newest_log=lambda: self.log,
                ask_for_log=self._ask,
                fears_lies=lambda: self.fears_lies,
            ),
            num_slices=None,
            snapshots=None,
        )

    def _ask(self):
        self.num_asked += 1
        self.asked.notify()

    def begin(self, number):
        """Begin a round with the weights that it has."""
        step = StepState(
            round_number=number,
            timeline=timeline_of(BEGINNING),
            history_hash=self.log.head,
            weights_version=self.trainer.weights_version,
        )
        self.rounds.begin(step)
        self.rounds.enter(Phase.OPEN)

    def weights(self):
        return self.trainer.state()

    async def serve(self):
        snapshots = NamedSnapshots(
            clock=self.context.clock,
            threads=self.context.threads,
            storage=self.context.storage,
            is_member=is_member,
            restart=lambda: BEGINNING,
        )
        snapshots.sources[STAGE] = self.server
        await self.transport.serve(CallDispatcher(manifest_hash=self.context.resolved.hash, calls=snapshots.calls))


def cut_of(log, root=""):
    """The next round's, which names the root of the state before it."""
    return Cut(
        stage=STAGE,
        round=log.next_round,
        epoch=EpochId(1, SEAT, 0),
        attempt=0,
        parent=log.head,
        root=root,
        base=(),
        averages=True,
        parts=(),
    )


def append(log, root=""):
    """An entry more, whose cut names the root of the state before it."""
    cut = cut_of(log, root)
    log.append(Committed(Entry(cut, f"digest {log.next_round}"), (), Close(log.next_round, ())))


@pytest.fixture
def resolved():
    return resolved_of()


@asynccontextmanager
async def mates_and_newcomer(resolved, num_mates):
    """Replicas of a stage with one entry, whose round is over; the first ones can be donors."""
    async with MemoryNetwork() as network:
        replicas = [Replica(network, resolved, Log(STAGE, BEGINNING)) for _ in range(num_mates + 1)]
        for mate in replicas[:-1]:
            mate.begin(1)
            await mate.serve()
        replicas[-1].donors = [mate.identity.peer_id for mate in replicas[:-1]]
        try:
            yield replicas
        finally:
            for replica in replicas:
                replica.thread.stop()


@asynccontextmanager
async def donor_and_newcomer(resolved):
    """Two replicas, whose stage has one entry; the donor has its state."""
    async with MemoryNetwork() as network:
        donor, newcomer = (Replica(network, resolved, Log(STAGE, BEGINNING)) for _ in range(2))
        append(donor.log)
        append(newcomer.log)
        with torch.no_grad():
            for parameter in donor.trainer.trained.values():
                parameter.add_(1.0)
        donor.begin(1)
        await donor.serve()
        newcomer.donors = [donor.identity.peer_id]
        try:
            yield donor, newcomer
        finally:
            donor.thread.stop()
            newcomer.thread.stop()


async def fails(error, call):
    with pytest.raises(error) as raised:
        await call()
    return str(raised.value)


async def test_where_no_lies_are_feared_the_state_of_a_mate_is_enough(resolved):
    """The round that would name its root may stand still, for want of a peer in another stage."""
    async with donor_and_newcomer(resolved) as (donor, newcomer):
        newcomer.fears_lies = False
        taken = await newcomer.sources.state()
        assert (taken.weights, taken.state) == (donor.log.head,) * 2
        assert all(map(torch.equal, newcomer.weights().values(), donor.weights().values()))
        append(newcomer.log, root="another")
        assert "another root" in await fails(CallError, newcomer.sources.state)


async def test_where_lies_are_feared_a_state_waits_for_the_entry_that_names_it(resolved, monkeypatch):
    monkeypatch.setattr(states, "ASK_S", 0.01)
    async with donor_and_newcomer(resolved) as (donor, newcomer), anyio.create_task_group() as tasks:
        tasks.start_soon(newcomer.sources.state)
        await newcomer.asked.wait_for(lambda: newcomer.num_asked >= 3)
        assert not torch.equal(*(next(iter(each.weights().values())) for each in (donor, newcomer)))
        append(newcomer.log, root=root_of(donor.weights(), b""))
        newcomer.context.changed.notify()
    assert all(map(torch.equal, newcomer.weights().values(), donor.weights().values()))


async def test_a_newcomer_that_hears_late_that_no_round_has_ended_downloads_nothing(resolved, monkeypatch):
    monkeypatch.setattr(states, "ASK_S", 0.01)
    async with donor_and_newcomer(resolved) as (_, newcomer), anyio.create_task_group() as tasks:
        newcomer.log = None
        initial = newcomer.weights()
        tasks.start_soon(newcomer.sources.state)
        await newcomer.asked.wait_for(lambda: newcomer.num_asked >= 3)
        newcomer.log = Log(STAGE, BEGINNING)
        newcomer.context.changed.notify()
    assert all(map(torch.equal, newcomer.weights().values(), initial.values()))
    assert not newcomer.sources.bytes_per_s


async def test_a_state_of_an_entry_that_is_not_in_the_log_is_refused(resolved, monkeypatch):
    monkeypatch.setattr(states, "LOG_S", 0.05)
    async with donor_and_newcomer(resolved) as (_, newcomer):
        newcomer.log = Log(STAGE, BEGINNING)
        append(newcomer.log, root="of another history")
        assert "no entry" in await fails(CallError, newcomer.sources.state)
        assert not newcomer.transport.network.num_calls("state_chunk")


@pytest.mark.parametrize("is_kept", [False, True])
async def test_weights_that_others_take_or_keep_meanwhile_stay(resolved, is_kept):
    """A newcomer that gets its place while it takes a state over begins with other weights, or with those it has."""
    async with donor_and_newcomer(resolved) as (donor, newcomer), anyio.create_task_group() as tasks:

        async def take():
            assert "other weights by now" in await fails(CallError, newcomer.sources.state)

        tasks.start_soon(take)
        await newcomer.asked.wait_for(lambda: newcomer.num_asked > 1)
        if is_kept:
            newcomer.sources.keep_weights()
        else:
            await newcomer.sources.begin(BEGINNING)
        initial = newcomer.weights()
        append(newcomer.log, root=root_of(donor.weights(), b""))
        newcomer.context.changed.notify()
    assert all(map(torch.equal, newcomer.weights().values(), initial.values()))


WRONG_UPDATES = [
    lambda averages: [average + 1 for average in averages],
    lambda averages: averages[:1],
    lambda averages: [average.view(torch.int32) for average in averages],
]


@pytest.mark.parametrize("wrong", WRONG_UPDATES)
async def test_if_a_mate_gives_another_update_than_the_entry_names_others_are_asked(resolved, wrong):
    async with mates_and_newcomer(resolved, 3) as (*mates, newcomer):
        averages = [torch.randn(parameter.shape) for parameter in newcomer.trainer.trained.values()]
        cut = cut_of(newcomer.log)
        committed = Committed(Entry(cut, digest_of(averages)), (), Close(0, ()))
        for mate in mates:
            mate.kept[0] = committed.entry.hash, wrong(averages)
        assert "an update that" in await fails(CallError, partial(newcomer.sources.update, committed))
        mates[1].kept[0], mates[2].kept[0] = (committed.entry.hash, averages), ("another entry", averages)
        for mate in mates:
            mate.server.stored.clear()
        newcomer.transport.network.calls.clear()
        assert all(map(torch.equal, await newcomer.sources.update(committed), averages))
        assert not newcomer.transport.network.num_calls("state_chunk", mates[2].identity.peer_id)


async def test_a_held_state_is_given_only_with_the_updates_since(resolved):
    async with donor_and_newcomer(resolved) as (donor, _):
        call = StateIndexCall(manifest=resolved.hash, of_stage=STAGE)

        async def given_at(number):
            donor.begin(number)
            return (await donor.server.find(call)).index.round_number

        assert [await given_at(number) for number in (1, 2)] == [1, 2]
        donor.kept[2] = "entry", []
        assert await given_at(3) == 2, "no third state is held"
        assert await given_at(4) == 4, "the update of round 3 is gone: nobody could go on from the state of round 2"


class Counting:
    """Notes what counts."""

    def __init__(self):
        self.counted, self.changed = [], Condition()

    def head(self, number):
        return "head"

    def admit(self, number, base):
        pass

    def count(self, number, base, weight, num_samples, caller):
        self.counted.append((number, base, weight, caller))
        self.changed.notify()


async def test_what_is_added_counts_though_its_caller_has_gone(resolved):
    """The gradient has it, so the weight of the contribution has to."""
    agreed = Counting()
    async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
        replica = Replica(network, resolved, Log(STAGE, BEGINNING), agreed)
        backward, running, release = replica.trainer.backward, threading.Event(), threading.Event()

        def slow_backward(*about, **options):
            running.set()
            assert release.wait(10)
            return backward(*about, **options)

        replica.trainer.backward = slow_backward
        replica.begin(1)
        manifest = resolved.manifest
        tokens = encode_tokens(torch.zeros((1, manifest.data.sequence_length + 1), dtype=torch.int32))
        microbatch = Microbatch(b"i" * 16, 1, "train", 1, tokens, timeline=0, base=("first",))
        hidden = encode(torch.zeros(1, manifest.data.sequence_length, resolved.hidden_size), manifest.wire.activations)
        run = partial(replica.executor.run, replica.rounds.current, microbatch, hidden, anyio.current_time() + 10)
        calling = anyio.CancelScope()

        async def call():
            with calling:
                await run("a caller")

        tasks.start_soon(call)
        await anyio.to_thread.run_sync(running.wait, 10)
        calling.cancel()
        release.set()
        await agreed.changed.wait_for(lambda: agreed.counted)
        assert agreed.counted == [(1, ("first", "head"), 1, "a caller")]
        again = await run("a caller")
        assert again.base == ("head",)
        assert len(agreed.counted) == replica.trainer.num_samples == 1
        replica.thread.stop()
