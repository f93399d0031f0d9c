"""Makes the parts of a replica, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from swarm_peer.errors import CallError
from swarm_peer.model.costs import REPLIES_KEPT
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.launcher import CountedHook, MicrobatchLauncher
from swarm_peer.runtime.data.leases import SliceLeases
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.data.slices import SliceReader
from swarm_peer.runtime.host.preparation import microbatch_capacity
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.gossip import Gossip
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.network.transport import Handler, Transport
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread, Priority, SpeedMeter
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import StageClient
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.runtime.stage.time_meter import TimeMeter
from swarm_peer.runtime.state.index import digest_weights
from swarm_peer.runtime.state.own_work import OwnWork
from swarm_peer.runtime.state.recovery import Recovery
from swarm_peer.runtime.state.snapshot_keeper import SnapshotKeeper
from swarm_peer.runtime.state.snapshot_store import SnapshotStore
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.runtime.state.timeline_watch import TimelineWatch
from swarm_peer.runtime.step.averaging import GradientAverager
from swarm_peer.runtime.step.barrier import Barrier
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.runtime.step.step_loop import StepLoop
from swarm_peer.wire.messages import Body
from swarm_peer.wire.records import TimelineRecord, timeline_key

# Each has had a warrant of the run's key; but the DHT keeps the records of those that are gone, for a while.
COORDINATORS_ASKED = 3


@dataclass(frozen=True, kw_only=True)
class PeerParts:
    """The parts of a peer that its replicas share.

    Attributes:
        device: what the device thread computes on
        dispatcher: answers the calls of other peers
        snapshots: the snapshots of any stage that this peer keeps
        own_work: what this peer brought to the updates of each stage that it has served, by stage
    """

    context: PeerContext
    device: torch.device
    device_thread: DeviceThread
    dht: SwarmDHT
    transport: Transport
    dispatcher: CallDispatcher
    directory: Directory
    snapshots: SnapshotStore
    own_work: dict[int, OwnWork] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReplicaParts:
    """The parts of one replica that `StageReplica` works with.

    Attributes:
        launcher: of stage 0 alone
        calls: the handlers of other peers' calls for this stage
    """

    core: ReplicaCore
    swarm: SwarmAccess
    step_loop: StepLoop
    recovery: Recovery
    timeline_watch: TimelineWatch
    snapshot_keeper: SnapshotKeeper
    state_server: StateServer
    launcher: MicrobatchLauncher | None
    calls: Mapping[type[Body], Handler]


@dataclass(frozen=True, kw_only=True)
class StageData:
    """The data that stage 0 reads.

    Attributes:
        reader: it has read already how many slices there are
        held_out: samples (N, T+1) that a peer validates with
    """

    reader: SliceReader
    held_out: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Makes the parts of one replica out of these.

    Attributes:
        incarnation: which life of this peer it is
        data: None at other stages than the first
        counted: told of each microbatch that a stage-0 peer counts; for tests
    """

    peer: PeerParts
    trainer: StageTrainer
    incarnation: int
    data: StageData | None
    counted: CountedHook | None = None

    def assemble(self) -> ReplicaParts:
        """Make all parts. None of them does anything before it is run."""
        context, directory, spec = self.peer.context, self.peer.directory, self.trainer.spec
        time = TimeMeter(clock=context.clock, busy_s=self.peer.device_thread.busy_s)
        rounds = RoundBook(context.changed, time.enter)
        progress = ProgressBook(
            context=context,
            incarnation=self.incarnation,
            is_author=directory.is_author,
            on_stranger=lambda _: directory.look_soon(),
            step=lambda: rounds.step,
        )
        core = self._make_core(rounds, progress, time)
        averager = GradientAverager(
            context=context,
            stage=spec.index,
            shapes=self.trainer.shapes,
            transport=self.peer.transport,
        )
        barrier = self._make_barrier(core, progress)
        group = self._make_group(rounds, averager, barrier)
        leases = self._make_leases(progress, core.admission) if spec.is_first else None
        swarm = self._make_swarm_access(progress, barrier, leases)
        state_server = StateServer(context=context, core=core)
        handover = GradientHandover(context=context, core=core, swarm=swarm, barrier=barrier)
        own_work = OwnWork(
            averaging=context.resolved.manifest.averaging, metrics=context.metrics, snapshots=self.peer.snapshots
        )
        step_loop = StepLoop(
            context=context,
            core=core,
            swarm=swarm,
            group=group,
            state_server=state_server,
            own_work=self.peer.own_work.setdefault(spec.index, own_work),
            handover=handover,
            leases=leases,
        )
        snapshot_keeper = SnapshotKeeper(
            context=context, stage=spec.index, swarm=swarm, state_server=state_server, snapshots=self.peer.snapshots
        )
        server = StageServer(
            context=context, core=core, progress=progress, view=lambda: directory.view, serves=directory.serves
        )
        calls = server.calls | barrier.calls | group.calls | averager.calls | swarm.gossip.calls
        calls |= handover.calls | step_loop.rewinds.calls | ({} if leases is None else leases.calls)
        return ReplicaParts(
            core=core,
            swarm=swarm,
            step_loop=step_loop,
            recovery=self._make_recovery(swarm),
            timeline_watch=TimelineWatch(context=context, stage=spec.index, swarm=swarm),
            snapshot_keeper=snapshot_keeper,
            state_server=state_server,
            launcher=None if leases is None else self._make_launcher(core, swarm, leases),
            calls=calls,
        )

    def _make_barrier(self, core: ReplicaCore, progress: ProgressBook) -> Barrier:
        return Barrier(
            context=self.peer.context,
            stage=core.stage,
            rounds=core.rounds,
            transport=self.peer.transport,
            progress=progress,
            view=lambda: self.peer.directory.view,
            on_other_timeline=core.admission.saw_other_timeline,
        )

    def _make_recovery(self, swarm: SwarmAccess) -> Recovery:
        directory = self.peer.directory
        return Recovery(
            context=self.peer.context,
            stage=self.trainer.spec.index,
            swarm=swarm,
            snapshots=self.peer.snapshots,
            unreached=directory.unreached,
            furthest=directory.furthest,
        )

    async def _beginning(self) -> TimelineRecord:
        """The timeline that the run began with, and how far it has come, by word of the run key.

        Raises:
            CallError: the DHT does not answer, or no coordinator has published it yet
        """
        run_id = self.peer.context.run_id
        records = await self.peer.dht.fetch(timeline_key(run_id), TimelineRecord, run_id)
        if run_id not in records:
            raise CallError("the run's coordinator has not said where it begins")
        return records[run_id]

    async def _coordinators(self) -> Sequence[str]:
        """The coordinators that may live: the first one, whose identity often is the run's key, and the newest."""
        run_id = self.peer.context.run_id
        try:
            terms = await self.peer.dht.fetch_coordination(run_id)
        except CallError:  # the DHT has logged it
            return [run_id]
        return sorted({run_id, *(term.coordinator for term in sorted(terms)[-COORDINATORS_ASKED:])})

    def _make_core(self, rounds: RoundBook, progress: ProgressBook, time: TimeMeter) -> ReplicaCore:
        context, spec = self.peer.context, self.trainer.spec
        fitting = microbatch_capacity(context.resolved, spec, self.trainer.device, context.options.max_memory)
        capacity = Capacity(fitting)
        next_stage = None
        if not spec.is_last:
            next_stage = StageClient(
                context=context,
                stage=spec.index + 1,
                transport=self.peer.transport,
                progress=progress,
                view=lambda: self.peer.directory.view,
            )
        speed = SpeedMeter(context.metrics)
        executor = StageExecutor(
            context=context,
            trainer=self.trainer,
            device_thread=self.peer.device_thread,
            speed=speed,
            next_stage=next_stage,
            capacity=capacity,
            replies_kept=REPLIES_KEPT * fitting,
        )
        admission = RoundAdmission(capacity=None if spec.is_first else capacity, rounds=rounds, changed=context.changed)
        return ReplicaCore(
            trainer=self.trainer,
            capacity=capacity,
            device_thread=self.peer.device_thread,
            speed=speed,
            rounds=rounds,
            admission=admission,
            executor=executor,
            time=time,
        )

    def _make_group(self, rounds: RoundBook, averager: GradientAverager, barrier: Barrier) -> StageGroup:
        return StageGroup(
            context=self.peer.context,
            stage=self.trainer.spec.index,
            rounds=rounds,
            transport=self.peer.transport,
            averager=averager,
            barrier=barrier,
            digest_weights=lambda: self.peer.device_thread.run(
                Priority.STEP, lambda: digest_weights(self.trainer.strategy.shared_weights())
            ),
            device=self.trainer.device,
        )

    def _make_leases(self, progress: ProgressBook, admission: RoundAdmission) -> SliceLeases:
        context = self.peer.context
        assert self.data is not None, "stage 0 reads data"
        return SliceLeases(
            context=context,
            reader=self.data.reader,
            pool=SamplePool(context=context, reader=self.data.reader),
            transport=self.peer.transport,
            progress=progress,
            view=lambda: self.peer.directory.view,
            on_other_timeline=admission.saw_other_timeline,
        )

    def _make_swarm_access(self, progress: ProgressBook, barrier: Barrier, leases: SliceLeases | None) -> SwarmAccess:
        directory = self.peer.directory

        def welcome(peer_id: str) -> None:
            barrier.welcome(peer_id)
            if leases is not None:
                leases.welcome(peer_id)

        def dismiss(peer_id: str, serial: int) -> None:
            directory.drop(peer_id, serial)
            if leases is not None and directory.view.peer(peer_id) is None:  # else the goodbye is of a former life
                leases.forget(peer_id)

        gossip = Gossip(
            manifest_hash=self.peer.context.resolved.hash,
            transport=self.peer.transport,
            progress=progress,
            welcome=welcome,
            drop=dismiss,
        )
        return SwarmAccess(
            transport=self.peer.transport,
            progress=progress,
            gossip=gossip,
            view=lambda: directory.view,
            look=directory.refresh_surely,
            coordinators=self._coordinators,
            beginning=self._beginning,
        )

    def _make_launcher(self, core: ReplicaCore, swarm: SwarmAccess, leases: SliceLeases) -> MicrobatchLauncher:
        assert self.data is not None, "stage 0 reads data"
        return MicrobatchLauncher(
            context=self.peer.context,
            core=core,
            swarm=swarm,
            leases=leases,
            validation=self.data.held_out,
            counted=self.counted,
        )
