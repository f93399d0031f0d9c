"""Real stages whose rounds are agreed make the updates of one process, with hivemind's all-reduce."""

from __future__ import annotations

from functools import partial
from random import Random

import anyio
import pytest
import torch
from agreeing import quickly, swarm, until
from tiny_models import LENGTH, LLAMA, VOCABULARY

from swarm_peer.config import RunManifest
from swarm_peer.errors import NotServing
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.data.ranges import SampleId, WindowRange
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.trouble import UpdateRecord
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.step import driver as driver_module
from swarm_peer.runtime.step.averaging import GradientAverager
from swarm_peer.runtime.step.cut_averager import CutAverager
from swarm_peer.runtime.step.driver import RoundDriver, Taken
from swarm_peer.runtime.step.workplace import StageWorkplace
from swarm_peer.wire.identity import Identity

BATCH = 6
NUM_SLICES = 3


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    quickly(monkeypatch)
    monkeypatch.setattr(driver_module, "RETRY_PAUSE_S", 0.02)


def resolved_of(optimizer):
    return ResolvedManifest.of(
        RunManifest.model_validate(
            {
                "name": "test",
                "model": {"config": LLAMA},
                "stages": {"count": 2},
                "data": {"sequence_length": LENGTH},
                "training": {"steps": 100, "global_batch_size": BATCH, "microbatch_size": 1},
                "optimizer": {"name": optimizer, "learning_rate": 0.05},
                "averaging": {"compare_weights_every": 2},
            }
        )
    )


def tokens_of(sample):
    generator = torch.Generator().manual_seed(hash(sample) % 2**31)
    return torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)


def microbatch(first, second, sample):
    """Forward and backward of one sample through two stages."""
    tokens = tokens_of(sample)
    lower = first.forward(tokens)
    upper = second.forward(tokens, lower.output)
    first.backward(lower, second.backward(upper))


class Rig:
    """One peer with a real stage."""

    def __init__(self, peer, stage, resolved, rigs):
        self.peer, self.stage, self.rigs = peer, stage, rigs
        context = peer.context
        self.trainer = StageTrainer(resolved, resolved.specs[stage])
        self.thread = DeviceThread(clock=context.clock, threads=context.threads, metrics=context.metrics)
        self.rounds = RoundBook(context.changed)
        core = ReplicaCore(
            trainer=self.trainer,
            capacity=Capacity(8),
            device_thread=self.thread,
            speed=None,
            rounds=self.rounds,
            admission=RoundAdmission(capacity=None, rounds=self.rounds, changed=context.changed),
            executor=None,
            time=None,
        )
        shapes = [parameter.shape for parameter in self.trainer.trained.values()]
        averager = GradientAverager(context=context, stage=stage, shapes=shapes, transport=peer.transport)
        peer.calls.add(stage, averager.calls)
        self.ended = []
        self.driver = RoundDriver(
            agreement=peer.agreement,
            stage=stage,
            workplace=StageWorkplace(context=context, core=core, updates=UpdateRecord()),
            averager=CutAverager(averager),
            sources=self,
            changed=context.changed,
            ended=self.ended.append,
        )
        self.next_window = {}

    # --- what it takes over of the others

    def _mates(self):
        return [rig for rig in self.rigs.values() if rig is not self and rig.stage == self.stage]

    async def update(self, committed):
        for rig in self._mates():
            if (found := rig.driver.updates.get(committed.entry.hash)) is not None:
                return found
        raise NotServing("nobody has it")

    async def state(self, log):
        for rig in self._mates():
            member = rig.driver.member
            if member is not None and member.state == log.head == rig.driver._weights[1]:
                self.trainer.load_state(rig.trainer.state(), rig.trainer.optimizer_step)
                ledger = member.ledger.copy() if member.ledger is not None else None
                return Taken(log.head, dict(rig.driver.updates), log.head, ledger)
        raise NotServing("nobody is there")

    async def begin(self, restart):
        return Ledger(NUM_SLICES) if self.stage == 0 else None

    async def adopt(self, root):
        return False

    def take_over(self, other, state):
        rig = self.rigs.get(other.identity.peer_id)
        if rig is None or rig.driver._weights[1] != state or rig.rounds.step.phase is not Phase.OPEN:
            return False
        self.trainer.load_state(rig.trainer.state(), rig.trainer.optimizer_step)
        return True

    # --- what it computes

    def _is_open(self, number):
        member = self.driver.member
        is_open = self.rounds.step.phase is Phase.OPEN and self.rounds.step.round_number == number
        return is_open and member is not None and member.working is not None

    def launch(self, random):
        first = self.driver.member
        if first is None or first.ledger is None:
            return
        first.wants_samples, first.wants_slices = 2, 1 - len(first.reads)
        working = first.working
        if working is None or not self._is_open(working.number) or not first.may_launch(1):
            return
        number, slice_id = working.number, first.granted.slices[0]
        mates = [rig for rig in self.rigs.values() if rig.stage == 1 and rig._is_open(number)]
        if not mates:
            return
        mate = random.choice(mates)
        second = mate.driver.member
        window = max(first.ledger.uncounted(slice_id).next_window, self.next_window.get(slice_id, 0))
        sample, base = SampleId(*slice_id, window), (first.base(number), second.base(number))
        if not (second.work.admits(number, base) and first.work.admits(number, base)):
            return
        microbatch(self.trainer, mate.trainer, sample)
        second.work.computed(number, base, weight=1, caller=first.me, num_samples=1)
        receipt = second.receipt_for(first.me, number, mate.peer.core.epoch)
        first.launched(1)
        samples = [WindowRange(*sample, window + 1)]
        first.work.computed(number, base, weight=1, samples=samples, receipt=receipt)
        self.next_window[slice_id] = window + 1
        first.reads = tuple({*first.reads, slice_id})
        self.peer.agreement.look()


class Hall:
    """Peers of two stages."""

    def __init__(self, resolved):
        self.resolved = resolved
        self.rigs = {}
        self.random = Random(1)

    async def work(self, own, others):
        if not (stages := own.core.membership.desired - {-1}):
            return
        (stage,) = stages
        rig = self.rigs[own.identity.peer_id] = Rig(own, stage, self.resolved, self.rigs)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rig.driver.run)
                while True:
                    own.prepare([each for each in others if each is not own], rig.take_over)
                    if stage == 0:
                        rig.launch(self.random)
                    await anyio.sleep(0.002)
        finally:
            rig.thread.stop()

    def cuts(self):
        """The cuts of stage 0, by round."""
        found = {}
        for rig in self.rigs.values():
            for committed in rig.ended if rig.stage == 0 else ():
                found.setdefault(committed.entry.cut.round, committed.entry.cut)
        return [found[number] for number in sorted(found)]

    def one_process(self, num_rounds):
        """The weights of both stages that one process has after so many rounds of the same samples."""
        trainers = [StageTrainer(self.resolved, spec) for spec in self.resolved.specs]
        for cut in self.cuts()[:num_rounds]:
            for item in cut.samples:
                for window in range(item.start, item.end):
                    microbatch(*trainers, SampleId(*item.slice_id, window))
            for trainer in trainers:
                trainer.apply(trainer.mean_gradients())
        return [trainer.state() for trainer in trainers]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_new_house_makes_the_updates_of_one_process(optimizer):
    async def run():
        hall = Hall(resolved_of(optimizer))
        async with swarm(hall.work, hall.resolved) as some:
            first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(first, lambda peer: peer.core.membership.stages != frozenset())
            more = [some.add(Identity.generate(), stage) for stage in (0, 1)]
            await until(more, lambda peer: peer.core.membership.stages != frozenset(), 60)
            start = first[0].log(0).next_round
            for stage, peers in ((0, (first[0], more[0])), (1, (first[1], more[1]))):
                await until(peers, partial(has_come_to, stage, start + 4), 60)
            assert any(len(cut.seats) == 2 for cut in hall.cuts())
            for rig in hall.rigs.values():
                await until([rig.peer], lambda _, rig=rig: rig.rounds.step.phase is Phase.OPEN)
                state, num_rounds = rig.trainer.state(), rig.trainer.optimizer_step
                assert num_rounds >= start + 4
                expected = hall.one_process(num_rounds)[rig.stage]
                for name, value in expected.items():
                    torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)

    anyio.run(run)


def has_come_to(stage, round_number, peer):
    return stage in peer.core.members and peer.log(stage).next_round >= round_number
