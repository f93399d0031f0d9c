"""Makes the parts of a replica, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarm_peer.model.costs import REPLIES_KEPT
from swarm_peer.model.traffic import boundary_bytes, stage_traffic
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.trouble import UpdateRecord
from swarm_peer.policy.view import ID_CHARS, Neighbour, PeerState, SwarmView
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Log
from swarm_peer.protocol.member import Member
from swarm_peer.runtime.base.base_sources import BaseSources
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.data.granted_slices import GrantedSlices
from swarm_peer.runtime.data.launcher import BatchLauncher, CountedHook
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.data.slices import SliceReader
from swarm_peer.runtime.host.preparation import microbatch_capacity
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.needed_ways import NeededWays
from swarm_peer.runtime.network.transport import Handler, Transport
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread, SpeedMeter
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.round_work import RoundWork
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.stage.stage_client import StageClient
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.runtime.stage.time_meter import TimeMeter
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots
from swarm_peer.runtime.state.snapshots import SnapshotKeeper, SnapshotTaker
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.runtime.state.states import StageMates, StageSources
from swarm_peer.runtime.step.averaging import GradientAverager
from swarm_peer.runtime.step.cut_averager import CutAverager
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.giving import Giving
from swarm_peer.runtime.step.round_reports import RoundReports
from swarm_peer.runtime.step.workplace import StageWorkplace
from swarm_peer.wire.messages import Body
from swarm_peer.wire.records import MAX_NEIGHBOURS


@dataclass(frozen=True, kw_only=True)
class PeerParts:
    """The parts of a peer that its replicas share.

    Attributes:
        device: what the device thread computes on
        dispatcher: answers the calls of other peers
        snapshots: the snapshots of any stage that this peer keeps
        agreement: this peer's part in it
        base: finds the frozen weights of stages
        ways: to the peers that a stage needs
    """

    context: PeerContext
    device: torch.device
    device_thread: DeviceThread
    dht: SwarmDHT
    transport: Transport
    dispatcher: CallDispatcher
    directory: Directory
    snapshots: NamedSnapshots
    agreement: Agreement
    base: BaseSources
    ways: NeededWays

    def neighbours(self) -> tuple[Neighbour, ...]:
        """The peers with which this one exchanges most, and how it reaches them."""
        found = tuple(
            Neighbour(
                peer=each.peer_id[-ID_CHARS:],
                through=self.dht.relay_to(each.peer_id)[-ID_CHARS:],
                round_trip_ms=round(1000 * each.round_trip_s),
                bytes_per_s=round(each.bytes_per_s),
            )
            for each in self.transport.busiest(MAX_NEIGHBOURS)
        )
        self.context.metrics.show_neighbours(found)
        return found


@dataclass(frozen=True, kw_only=True)
class ReplicaParts:
    """The parts of one replica that `Replica` works with.

    Attributes:
        launcher, pool: of stage 0 alone
        calls: the handlers of other peers' calls for this stage
    """

    core: ReplicaCore
    driver: RoundDriver
    giving: Giving
    sources: StageSources
    state_server: StateServer
    keeper: SnapshotKeeper
    reports: RoundReports
    updates: UpdateRecord
    launcher: BatchLauncher | None
    pool: SamplePool | None
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


class Neighbours:
    """The peers that announce themselves; of those that serve, the ones that have a place there."""

    def __init__(self, peer: PeerParts):
        self._peer = peer
        self._made: tuple[SwarmView, Epoch, SwarmView] | None = None

    def view(self) -> SwarmView:
        """The swarm as this peer knows it now."""
        known, epoch = self._peer.directory.view, self._peer.agreement.core.epoch
        if self._made is None or self._made[0] is not known or self._made[1] is not epoch:
            placed = {(place.seat.peer, place.stage) for place in epoch.places}
            peers = (
                peer
                for peer in known.peers
                if peer.state is not PeerState.SERVING or (peer.peer_id, peer.stage) in placed
            )
            self._made = known, epoch, replace(known, peers=tuple(peers))
        return self._made[2]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Makes the parts of one replica out of these.

    Attributes:
        data: None at other stages than the first
        counted: told of each microbatch that a stage-0 peer counts; for tests
    """

    peer: PeerParts
    trainer: StageTrainer
    data: StageData | None
    counted: CountedHook | None = None

    @property
    def _stage(self) -> int:
        return self.trainer.spec.index

    def assemble(self) -> ReplicaParts:
        """Make all parts. None of them does anything before it is run."""
        context, agreement, transport = self.peer.context, self.peer.agreement, self.peer.transport
        stage, shapes, updates = self._stage, self.trainer.shapes, UpdateRecord()
        neighbours = Neighbours(self.peer)
        work = RoundWork(agreement=agreement, stage=stage)
        core = self._make_core(work, neighbours)
        averager = GradientAverager(context=context, stage=stage, shapes=shapes, transport=transport)
        taker, keeper = self._make_keeper()
        sources = StageSources(
            context=context,
            transport=transport,
            trainer=self.trainer,
            core=core,
            mates=self._make_mates(),
            num_slices=self.data.reader.num_slices() if self.data is not None else None,
            snapshots=taker,
        )
        workplace = StageWorkplace(context=context, core=core, updates=updates, copied=keeper.take)
        reports = RoundReports(
            context=context, stage=stage, result=lambda: workplace.result, samples_of=self.trainer.samples_of
        )
        driver = RoundDriver(
            agreement=agreement,
            stage=stage,
            workplace=workplace,
            averager=CutAverager(context=context, stage=stage, averager=averager, word_at=agreement.core.word_at),
            sources=sources,
            clock=context.clock,
            ended=lambda committed: reports.ended(committed, agreement.core.epoch.restart),
            lost=reports.lose,
        )
        state_server = StateServer(context=context, core=core, kept=lambda number: _kept_by(driver, number))
        giving = Giving(
            context=context, agreement=agreement, transport=transport, driver=driver, stage=stage, shapes=shapes
        )
        server = StageServer(
            context=context,
            core=core,
            view=neighbours.view,
            serves=self.peer.directory.serves,
            saw_stranger=self.peer.directory.look_soon,
            work=work,
        )
        launcher, pool = self._make_launcher(core, driver, neighbours)
        return ReplicaParts(
            core=core,
            driver=driver,
            giving=giving,
            sources=sources,
            state_server=state_server,
            keeper=keeper,
            reports=reports,
            updates=updates,
            launcher=launcher,
            pool=pool,
            calls=server.calls | averager.calls | giving.calls,
        )

    def _member(self) -> Member | None:
        return self.peer.agreement.core.members.get(self._stage)

    def _donors(self) -> Sequence[str]:
        """The ids of the stage-mates."""
        core = self.peer.agreement.core
        return [seat.peer for seat in core.epoch.roster(self._stage) if seat != core.membership.me]

    def _make_mates(self) -> StageMates:
        agreement = self.peer.agreement
        return StageMates(
            donors=self._donors,
            newest_log=self._newest_log,
            ask_for_log=partial(agreement.ask_for_log, self._stage),
            fears_lies=lambda: agreement.core.epoch.is_divided,
        )

    def _make_keeper(self) -> tuple[SnapshotTaker, SnapshotKeeper]:
        context, agreement, snapshots = self.peer.context, self.peer.agreement, self.peer.snapshots
        taker = SnapshotTaker(
            context=context,
            threads=context.threads,
            transport=self.peer.transport,
            agreement=agreement,
            snapshots=snapshots,
            holders=self._holders,
        )
        return taker, SnapshotKeeper(
            context=context, stage=self._stage, agreement=agreement, snapshots=snapshots, taker=taker
        )

    def _holders(self) -> Sequence[str]:
        """The ids of all peers that may have a snapshot."""
        placed = {seat.peer for seat in self.peer.agreement.core.epoch.seats}
        return sorted(placed | {peer.peer_id for peer in self.peer.directory.view.peers})

    def _newest_log(self) -> Log | None:
        member = self._member()
        return member.log if member is not None else self.peer.agreement.core.told.get(self._stage)

    def _carried_samples_per_s(self, peer_id: str) -> float:
        return self.peer.dht.carried_bytes_per_s(peer_id) / boundary_bytes(self.peer.context.resolved)

    def _make_core(self, work: RoundWork, neighbours: Neighbours) -> ReplicaCore:
        context, spec = self.peer.context, self.trainer.spec
        time = TimeMeter(clock=context.clock, busy_s=self.peer.device_thread.busy_s)
        rounds = RoundBook(context.changed, time.enter)
        fitting = microbatch_capacity(context.resolved, spec, self.trainer.device, context.options.max_memory)
        lent = stage_traffic(context.resolved)[spec.index].samples_per_s(*context.lent_bytes_per_s)
        capacity, speed = Capacity(fitting), SpeedMeter(context.metrics, lent)
        next_stage = None
        if not spec.is_last:
            next_stage = StageClient(
                context=context,
                stage=spec.index + 1,
                transport=self.peer.transport,
                view=neighbours.view,
                work=work,
                carried_samples_per_s=self._carried_samples_per_s,
            )
        executor = StageExecutor(
            context=context,
            trainer=self.trainer,
            device_thread=self.peer.device_thread,
            speed=speed,
            next_stage=next_stage,
            capacity=capacity,
            replies_kept=REPLIES_KEPT * fitting,
            work=work,
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

    def _make_launcher(
        self, core: ReplicaCore, driver: RoundDriver, neighbours: Neighbours
    ) -> tuple[BatchLauncher, SamplePool] | tuple[None, None]:
        if self.data is None:
            return None, None
        context = self.peer.context
        pool = SamplePool(context=context, reader=self.data.reader)
        slices = GrantedSlices(pool=pool, member=lambda: driver.member, num_readers=self._num_readers)
        launcher = BatchLauncher(
            context=context,
            core=core,
            slices=slices,
            member=lambda: driver.member,
            view=neighbours.view,
            validation=self.data.held_out,
            agreement=self.peer.agreement,
            counted=self.counted,
        )
        return launcher, pool

    def _num_readers(self) -> int:
        return max(1, len(self.peer.agreement.core.epoch.roster(0)))


def _kept_by(driver: RoundDriver, round_number: int) -> tuple[str, Sequence[Tensor]] | None:
    """The averages of a round's entry, with its hash, if the driver keeps them."""
    if (member := driver.member) is None:
        return None
    for committed in member.log.since(round_number)[:1]:
        averages = driver.updates.get(committed.entry.hash)
        if averages is not None and committed.entry.cut.round == round_number:
            return committed.entry.hash, averages
    return None
