"""Peers with real stages, whose rounds are agreed, over a network without wires."""

from __future__ import annotations

import anyio
import numpy as np
import torch
from agreeing import quickly, until
from made_up_slices import FakeReader
from tiny_models import LENGTH, LLAMA, VOCABULARY

from coordinator.run.baseline import ReplicatedBaseline
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import shared_entries
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.data.ranges import SampleId, merge_ranges, num_windows
from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.trouble import UpdateRecord
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.data.granted_slices import GrantedSlices
from swarm_peer.runtime.data.launcher import BatchLauncher
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.host.machine import FolderStorage
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread, SpeedMeter
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.round_work import RoundWork
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import StageClient
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.runtime.state import joining
from swarm_peer.runtime.state.joining import join
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots
from swarm_peer.runtime.state.snapshots import SnapshotKeeper, SnapshotTaker
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.runtime.state.states import StageMates, StageSources
from swarm_peer.runtime.step import driver as driver_module
from swarm_peer.runtime.step.averaging import GradientAverager
from swarm_peer.runtime.step.cut_averager import CutAverager
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.giving import Giving
from swarm_peer.runtime.step.workplace import StageWorkplace
from swarm_peer.token_marks import NOT_LEARNT, num_targets
from swarm_peer.wire.identity import Identity

BATCH = 6
LENGTHS = (40, 1, 25, 30)


def quick_stages(monkeypatch):
    """Nobody waits for long."""
    quickly(monkeypatch)
    monkeypatch.setattr(driver_module, "RETRY_PAUSE_S", 0.02)
    monkeypatch.setattr(joining, "PAUSE_S", 0.05)


def resolved_of(optimizer="sgd", **sections):
    training = {"steps": 1000, "global_batch_size": BATCH, "microbatch_size": 1, "validation_every": 0}
    return ResolvedManifest.of(
        RunManifest.model_validate(
            {
                "name": "test",
                "model": {"config": LLAMA},
                "stages": {"count": 2},
                "data": {"sequence_length": LENGTH},
                "training": training | sections.pop("training", {}),
                "optimizer": {"name": optimizer, "learning_rate": 0.05 if optimizer == "sgd" else 0.002},
                "averaging": {"compare_weights_every": 2} | sections.pop("averaging", {}),
                "recovery": {"snapshot_every": 0},
            }
            | sections
        )
    )


def tokens_of(sample):
    generator = torch.Generator().manual_seed(hash(tuple(sample)) % 2**31)
    return torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)


VALIDATION = np.concatenate([tokens_of((9, 9, number)).numpy() for number in range(4)]).astype(np.int32)


def microbatch(first, second, sample):
    """Forward and backward of one sample through two stages."""
    tokens = tokens_of(sample)
    lower = first.forward(tokens)
    upper = second.forward(tokens, lower.output)
    first.backward(lower, second.backward(upper))


class Slices(FakeReader):
    """Slices whose windows hold tokens; where samples have targets, of some not even one."""

    has_targets = False

    def windows(self, slice_id):
        for window in range(self.lengths[slice_id.slice_index]):
            tokens = tokens_of(SampleId(*slice_id, window))[0].numpy().astype(np.int32)
            if self.has_targets:
                tokens[: 1 + 5 * window % (LENGTH + 1)] |= NOT_LEARNT
            yield tokens


async def is_member(peer_id):
    return True


class RecordingTrainer(StageTrainer):
    """A trainer that knows the tokens of the microbatches in its accumulator."""

    def __init__(self, *args, **options):
        self.held = []
        super().__init__(*args, **options)

    def forward(self, tokens_BS, hidden_BTD=None):
        made = super().forward(tokens_BS, hidden_BTD)
        made.tokens = tokens_BS
        return made

    def backward(self, forward_pass, grad_BTD=None, *, counts=True):
        result = super().backward(forward_pass, grad_BTD, counts=counts)
        if counts:
            self.held.append(forward_pass.tokens.to(torch.int32).numpy().tobytes())
        return result

    def discard_gradients(self):
        self.held = []
        return super().discard_gradients()


class RecordingWorkplace(StageWorkplace):
    """A workplace that notes which microbatches were computed in which round."""

    def __init__(self, **options):
        super().__init__(**options)
        self.computed = {}

    async def contribution(self, number):
        assert number not in self.computed, "each round ends once"
        self.computed[number] = list(self._trainer.held)
        return await super().contribution(number)


class Rig:
    """One peer with a real stage."""

    def __init__(self, peer, stage, resolved, rigs, folder):
        self.peer, self.stage, self.rigs = peer, stage, rigs
        self.folder = folder and folder / peer.identity.peer_id
        context = peer.context
        self.trainer = RecordingTrainer(resolved, resolved.specs[stage])
        self.thread = DeviceThread(clock=context.clock, threads=context.threads, metrics=context.metrics)
        self.rounds = RoundBook(context.changed)
        work = RoundWork(agreement=peer.agreement, stage=stage)
        capacity, speed = Capacity(8), SpeedMeter(context.metrics)
        client = None
        if stage == 0:
            client = StageClient(context=context, stage=1, transport=peer.transport, view=self.view, work=work)
        executor = StageExecutor(
            context=context,
            trainer=self.trainer,
            device_thread=self.thread,
            speed=speed,
            next_stage=client,
            capacity=capacity,
            replies_kept=8,
            work=work,
        )
        core = ReplicaCore(
            trainer=self.trainer,
            capacity=capacity,
            device_thread=self.thread,
            speed=speed,
            rounds=self.rounds,
            admission=RoundAdmission(capacity=None, rounds=self.rounds, changed=context.changed),
            executor=executor,
            time=None,
        )
        server = StageServer(
            context=context,
            core=core,
            view=self.view,
            serves=lambda *_: True,
            saw_stranger=lambda: None,
            work=work,
        )
        shapes = [parameter.shape for parameter in self.trainer.trained.values()]
        averager = GradientAverager(context=context, stage=stage, shapes=shapes, transport=peer.transport)
        self.ended = []
        self.snapshots = NamedSnapshots(
            clock=context.clock,
            threads=context.threads,
            storage=FolderStorage(self.folder) if folder else context.storage,
            is_member=is_member,
            restart=lambda: peer.core.epoch.restart,
        )
        taker = SnapshotTaker(
            context=context,
            threads=context.threads,
            transport=peer.transport,
            agreement=peer.agreement,
            snapshots=self.snapshots,
            holders=lambda: sorted({seat.peer for seat in peer.core.epoch.seats} | self.rigs.keys()),
        )
        self.keeper = SnapshotKeeper(
            context=context, stage=stage, agreement=peer.agreement, snapshots=self.snapshots, taker=taker
        )
        self.workplace = RecordingWorkplace(context=context, core=core, updates=UpdateRecord(), copied=self.keeper.take)
        self.sources = StageSources(
            context=context,
            transport=peer.transport,
            trainer=self.trainer,
            core=core,
            mates=StageMates(
                donors=lambda: [rig.peer.identity.peer_id for rig in self._mates()],
                newest_log=self.newest_log,
                ask_for_log=lambda: peer.agreement.ask_for_log(stage),
                fears_lies=lambda: peer.core.epoch.is_divided,
            ),
            snapshots=taker,
            num_slices=len(LENGTHS) if stage == 0 else None,
        )
        self.state_server = StateServer(context=context, core=core, kept=self.kept)
        self.snapshots.sources[stage] = self.state_server
        peer.calls.add(None, peer.agreement.calls | self.snapshots.calls)
        self.driver = RoundDriver(
            agreement=peer.agreement,
            stage=stage,
            workplace=self.workplace,
            averager=CutAverager(context=context, stage=stage, averager=averager, word_at=peer.core.word_at),
            sources=self.sources,
            clock=context.clock,
            ended=self.ended.append,
        )
        giving = Giving(
            context=context,
            agreement=peer.agreement,
            transport=peer.transport,
            driver=self.driver,
            stage=stage,
            shapes=shapes,
        )
        peer.calls.add(stage, server.calls | averager.calls | giving.calls)
        self.giving, self.admission = giving, core.admission
        reader = Slices(*LENGTHS)
        reader.has_targets = resolved.manifest.data.has_targets
        self.pool = SamplePool(context=context, reader=reader)
        slices = GrantedSlices(pool=self.pool, member=lambda: self.driver.member, num_readers=lambda: 2)
        self.launcher = BatchLauncher(
            context=context,
            core=core,
            slices=slices,
            member=lambda: self.driver.member,
            view=self.view,
            validation=VALIDATION,
            agreement=peer.agreement,
        )

    def _mates(self):
        mates = (rig for rig in self.rigs.values() if rig is not self and rig.stage == self.stage)
        return [rig for rig in mates if rig.driver.member is not None]

    def newest_log(self):
        member = self.driver.member
        return member.log if member is not None else self.peer.core.told.get(self.stage)

    def kept(self, round_number):
        for committed in self.driver.member.log.since(round_number)[:1]:
            if (found := self.driver.updates.get(committed.entry.hash)) is not None:
                return committed.entry.hash, found
        return None

    def view(self):
        """All that have a place, as they announce themselves."""
        found = (
            PeerView(
                peer_id=peer_id,
                stage=rig.stage,
                state=PeerState.SERVING,
                samples_per_s=1.0,
                work_per_s=1.0,
                round_number=rig.rounds.step.round_number,
            )
            for peer_id, rig in self.rigs.items()
            if rig.driver.member is not None
        )
        return SwarmView(2, tuple(found))

    def has_validated(self, optimizer_step):
        """Whether it has computed its share of a validation loss."""
        return any(each.optimizer_step == optimizer_step for each in self.launcher.validations)

    async def run(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.driver.run)
            tasks.start_soon(self.state_server.run)
            tasks.start_soon(self.keeper.run)
            tasks.start_soon(join, self.peer.agreement, self.stage, self.sources)
            if self.stage == 0:
                tasks.start_soon(self.pool.run)
                tasks.start_soon(self.launcher.run)

    async def leave(self):
        """Give what it has computed to a stage-mate, and give up the place. Returns whether all was taken."""
        self.admission.leave()
        self.launcher.stop()
        held = await self.driver.leave()
        missing = await self.giving.give(held, [rig.peer.identity.peer_id for rig in self._mates()], enough=1)
        self.peer.core.membership.desired = frozenset()
        self.peer.agreement.look()
        return not missing


class Hall:
    """Peers of two stages.

    Attributes:
        folder: for the peers' snapshots
    """

    def __init__(self, resolved, folder=None):
        self.resolved = resolved
        self.folder = folder
        self.rigs = {}
        self.all_rigs = []

    async def work(self, own, others):
        if not (stages := own.core.membership.desired - {-1}):
            return
        (stage,) = stages
        rig = self.rigs[own.identity.peer_id] = Rig(own, stage, self.resolved, self.rigs, self.folder)
        self.all_rigs.append(rig)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rig.run)
                await anyio.sleep_forever()
        finally:
            rig.thread.stop()

    def takes_part(self, peer):
        """Whether it has a place, and lets microbatches in: it has caught up with the others."""
        rig = self.rigs.get(peer.identity.peer_id)
        return rig is not None and rig.rounds.step.phase is Phase.OPEN

    def cuts(self, stage=0):
        """The cuts of a stage, by round."""
        found = {}
        for rig in self.all_rigs:
            for committed in rig.ended if rig.stage == stage else ():
                found.setdefault(committed.entry.cut.round, committed.entry.cut)
        return [found[number] for number in sorted(found)]

    def one_process(self, cuts):
        """The weights of both stages that one process has after the rounds of these cuts of stage 0."""
        trainers = [StageTrainer(self.resolved, spec) for spec in self.resolved.specs]
        for cut in cuts:
            for item in cut.samples:
                for window in range(item.start, item.end):
                    microbatch(*trainers, SampleId(*item.slice_id, window))
            for trainer in trainers:
                trainer.apply(trainer.mean_gradients())
        return [trainer.state() for trainer in trainers]

    def history(self, stage=0):
        """The cuts of a stage that the newest one rests on, in their order: the run may have gone back."""
        restart = next(iter(self.rigs.values())).peer.core.epoch.restart
        cuts = self.cuts(stage)
        return [cut for cut in cuts if cut.round < restart.optimizer_step or cut.round >= restart.first_round]

    def replicas(self):
        """The shared state of both stages by optimizer step, as replicas in one process make it."""
        stages = [[rig for rig in self.all_rigs if rig.stage == stage] for stage in (0, 1)]
        reference = ReplicatedBaseline(self.resolved, [len(rigs) for rigs in stages])
        found = {}

        def note():
            states = [shared_entries(replicas[0].state()) for replicas in reference.stages]
            found[reference.stages[0][0].optimizer_step] = states

        def update():
            for rounds in reference.rounds:
                rounds._update()  # where updates are delayed, the last one has yet to come

        restart = next(iter(self.rigs.values())).peer.core.epoch.restart
        others = {cut.round: cut for cut in self.history(1)}
        for cut in self.history():
            number = cut.round
            if number not in others:
                break
            if number == restart.first_round:
                update()
            computed = [[rig.workplace.computed.get(number, []) for rig in rigs] for rigs in stages]
            batch, others_batch = (sorted(each for held in by_rig for each in held) for by_rig in computed)
            assert batch == others_batch, f"both stages have computed the same in round {number}, each sample once"
            orders = [[[batch.index(each) for each in held] for held in by_rig] for by_rig in computed]
            tokens = [torch.frombuffer(bytearray(each), dtype=torch.int32).view(1, -1) for each in batch]
            seats = [sorted(seat.peer for seat in each.seats) for each in (cut, others[number])]
            ids = [[rig.peer.identity.peer_id for rig in rigs] for rigs in stages]
            members = [[own.index(peer) for peer in peers] for own, peers in zip(ids, seats, strict=True)]
            reference.train_step(tokens, orders, members)
            note()
        update()
        note()
        return found

    def mate_of(self, rig):
        """The other peer of its stage."""
        return next(other for other in self.rigs.values() if other is not rig and other.stage == rig.stage)

    def validation_loss(self, first, second):
        """The mean loss of the held-out samples with two rigs' weights."""
        tokens = torch.from_numpy(VALIDATION)
        return float(second.trainer.evaluate(tokens, first.trainer.evaluate(tokens)).mean())

    def weight(self, held):
        """The weight of a microbatch that was computed."""
        tokens = np.frombuffer(held, np.int32)
        return num_targets(tokens) if self.resolved.manifest.data.has_targets else 1

    def check_counts(self, period=1):
        """All that was computed has counted, once."""
        for stage in (0, 1):
            for cut in self.history(stage):
                rounds = range(cut.round + 1 - period, cut.round + 1)
                rigs = [rig for rig in self.all_rigs if rig.stage == stage]
                held = [each for rig in rigs for number in rounds for each in rig.workplace.computed.get(number, ())]
                made = sum(self.weight(each) for each in held)
                assert sum(each.weight for each in cut.brings) == (made if cut.averages else 0), (stage, cut)

    async def check_replicas(self, start, period=1, atol=1e-5):
        """All have the shared state that replicas in one process make of the same microbatches."""
        self.check_counts(period)
        assert any(len(cut.seats) == 2 for cut in self.cuts())
        expected = self.replicas()
        for rig in list(self.rigs.values()):
            await until([rig.peer], lambda _, rig=rig: rig.rounds.step.phase is Phase.OPEN)
            state, step = shared_entries(rig.trainer.state()), rig.trainer.optimizer_step
            assert step >= start
            if step not in expected:  # meanwhile more rounds have ended
                await until([rig.peer], lambda _, step=step: min(map(len, map(self.history, (0, 1)))) >= step)
                expected = self.replicas()
            assert state.keys() == expected[step][rig.stage].keys()
            for name, value in expected[step][rig.stage].items():
                torch.testing.assert_close(state[name], value, rtol=10 * atol, atol=atol)

    async def check(self, start, atol=1e-5):
        """All have the weights that one process makes of the samples that have counted."""
        counted = [each for cut in self.history() for each in cut.samples]
        assert num_windows(merge_ranges(counted)) == num_windows(counted), "nothing counts twice"
        for rig in list(self.rigs.values()):
            await until([rig.peer], lambda _, rig=rig: rig.rounds.step.phase is Phase.OPEN)
            state, num_rounds = rig.trainer.state(), rig.trainer.optimizer_step
            assert num_rounds >= start
            await until([rig.peer], lambda _, count=num_rounds: len(self.history()) >= count)
            expected = self.one_process(self.history()[:num_rounds])[rig.stage]
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=10 * atol, atol=atol)


async def two_of_each(some, hall):
    """Two peers of each of two stages, at work."""
    first = [some.add(Identity.generate(), stage) for stage in (0, 1)]
    await until(first, lambda peer: peer.core.membership.stages != frozenset())
    more = [some.add(Identity.generate(), stage) for stage in (0, 1)]
    await until(more, lambda peer: hall.takes_part(peer), 60)
    return first, more


def has_come_to(stage, round_number, peer):
    return stage in peer.core.members and peer.log(stage).next_round >= round_number
