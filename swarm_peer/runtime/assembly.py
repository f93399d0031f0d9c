"""The composition root of a peer: makes its parts in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm_peer.model.costs import REPLIES_KEPT
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.recovery import Timeline
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.launcher import CountedHook, MicrobatchLauncher
from swarm_peer.runtime.data.leases import SliceLeases
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.data.slices import SliceReader
from swarm_peer.runtime.host.preparation import microbatch_capacity
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.gossip import Gossip
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.replica import StageReplica
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import StageClient
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.runtime.state.recovery import Recovery
from swarm_peer.runtime.state.snapshot_keeper import SnapshotKeeper
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.runtime.state.store import SnapshotStore
from swarm_peer.runtime.step.averaging import GradientAverager
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.runtime.step.step_loop import StepLoop

# Stage 0 bounds itself by its window of microbatches in flight; its admission only counts them.
UNBOUNDED = 10**6


@dataclass(frozen=True, kw_only=True)
class PeerParts:
    """The parts of one peer that `Peer` itself works with.

    Attributes:
        next_stage: None on the last stage
        launcher: of stage 0 alone
        dispatcher: answers the calls of other peers
    """

    replica: StageReplica
    swarm: SwarmAccess
    step_loop: StepLoop
    recovery: Recovery
    snapshot_keeper: SnapshotKeeper
    next_stage: StageClient | None
    launcher: MicrobatchLauncher | None
    dispatcher: CallDispatcher


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Makes the parts of one peer out of these.

    Attributes:
        snapshots: the snapshots of any stage that this peer keeps
        first_timeline: where the run began, by word of the run key
        held_out: samples (N, T+1) that a stage-0 peer validates with; None at other stages
        incarnation: which life of this peer it is
        counted: told of each microbatch that a stage-0 peer counts; for tests
    """

    context: PeerContext
    trainer: StageTrainer
    device_thread: DeviceThread
    directory: Directory
    transport: Transport
    snapshots: SnapshotStore
    first_timeline: Callable[[], Awaitable[Timeline]]
    held_out: npt.NDArray[np.int32] | None
    incarnation: int
    counted: CountedHook | None = None

    def assemble(self) -> PeerParts:
        """Make all parts. None of them does anything before it is run."""
        context, directory, spec = self.context, self.directory, self.trainer.spec
        rounds = RoundBook(context.changed)
        progress = ProgressBook(
            context=context,
            incarnation=self.incarnation,
            is_author=directory.is_author,
            on_stranger=lambda _: directory.look_soon(),
            step=lambda: rounds.step,
        )
        replica, next_stage = self._make_replica(rounds, progress)
        averager = GradientAverager(
            context=context,
            stage=spec.index,
            shapes=[parameter.shape for parameter in self.trainer.module.parameters()],
            transport=self.transport,
        )
        group = self._make_group(rounds, progress, averager)
        leases = self._make_leases(progress) if spec.is_first else None
        swarm = self._make_swarm_access(progress, group, leases)
        state_server = StateServer(context=context, replica=replica)
        self.snapshots.sources = {spec.index: state_server}
        handover = GradientHandover(context=context, replica=replica, swarm=swarm)
        step_loop = StepLoop(
            context=context,
            replica=replica,
            swarm=swarm,
            group=group,
            state_server=state_server,
            snapshots=self.snapshots,
            handover=handover,
            leases=leases,
        )
        recovery = Recovery(
            context=context,
            stage=spec.index,
            swarm=swarm,
            snapshots=self.snapshots,
            first_timeline=self.first_timeline,
            unreached=directory.unreached,
        )
        snapshot_keeper = SnapshotKeeper(
            context=context, stage=spec.index, swarm=swarm, state_server=state_server, snapshots=self.snapshots
        )
        server = StageServer(context=context, replica=replica, progress=progress)
        calls = server.calls | group.calls | averager.calls | self.snapshots.calls | swarm.gossip.calls
        calls |= handover.calls | step_loop.calls | ({} if leases is None else leases.calls)
        return PeerParts(
            replica=replica,
            swarm=swarm,
            step_loop=step_loop,
            recovery=recovery,
            snapshot_keeper=snapshot_keeper,
            next_stage=next_stage,
            launcher=None if leases is None else self._make_launcher(replica, swarm, leases),
            dispatcher=CallDispatcher(manifest_hash=context.resolved.hash, stage=spec.index, calls=calls),
        )

    def _make_replica(self, rounds: RoundBook, progress: ProgressBook) -> tuple[StageReplica, StageClient | None]:
        context, spec, manifest = self.context, self.trainer.spec, self.context.resolved.manifest
        capacity = microbatch_capacity(context.resolved, spec, self.trainer.device, context.options.max_memory)
        next_stage = None
        if not spec.is_last:
            next_stage = StageClient(
                context=context,
                stage=spec.index + 1,
                transport=self.transport,
                progress=progress,
                view=lambda: self.directory.view,
            )
        executor = StageExecutor(
            context=context,
            trainer=self.trainer,
            device_thread=self.device_thread,
            next_stage=next_stage,
            replies_kept=REPLIES_KEPT * manifest.limits.max_in_flight,
        )
        admission = RoundAdmission(
            capacity=UNBOUNDED if spec.is_first else capacity, rounds=rounds, changed=context.changed
        )
        replica = StageReplica(
            trainer=self.trainer,
            device_thread=self.device_thread,
            rounds=rounds,
            admission=admission,
            executor=executor,
        )
        return replica, next_stage

    def _make_group(self, rounds: RoundBook, progress: ProgressBook, averager: GradientAverager) -> StageGroup:
        return StageGroup(
            context=self.context,
            stage=self.trainer.spec.index,
            rounds=rounds,
            transport=self.transport,
            averager=averager,
            progress=progress,
            view=lambda: self.directory.view,
        )

    def _make_leases(self, progress: ProgressBook) -> SliceLeases:
        context = self.context
        reader = SliceReader(manifest=context.resolved.manifest, cache_dir=context.options.cache_dir)
        return SliceLeases(
            context=context,
            reader=reader,
            pool=SamplePool(context=context, reader=reader),
            transport=self.transport,
            progress=progress,
            view=lambda: self.directory.view,
        )

    def _make_swarm_access(self, progress: ProgressBook, group: StageGroup, leases: SliceLeases | None) -> SwarmAccess:
        directory = self.directory

        def welcome(peer_id: str) -> None:
            group.welcome(peer_id)
            if leases is not None:
                leases.welcome(peer_id)

        def dismiss(peer_id: str, serial: int) -> None:
            directory.drop(peer_id, serial)
            if leases is not None and directory.view.peer(peer_id) is None:  # else the goodbye is of a former life
                leases.forget(peer_id)

        gossip = Gossip(
            manifest_hash=self.context.resolved.hash,
            transport=self.transport,
            progress=progress,
            welcome=welcome,
            drop=dismiss,
        )
        return SwarmAccess(
            transport=self.transport,
            progress=progress,
            gossip=gossip,
            view=lambda: directory.view,
            look=directory.refresh_surely,
        )

    def _make_launcher(self, replica: StageReplica, swarm: SwarmAccess, leases: SliceLeases) -> MicrobatchLauncher:
        assert self.held_out is not None, "stage 0 has samples to validate with, if only none of them"
        return MicrobatchLauncher(
            context=self.context,
            replica=replica,
            swarm=swarm,
            leases=leases,
            validation=self.held_out,
            counted=self.counted,
        )
