"""Recovers a stage that has lost all its peers: finds where it begins again, and takes the other stages back to there.

Owns the questions to other peers and the waits for them; policy/recovery.py decides. Must not change anything in this
peer: step/step_loop.py takes the state over or rewinds. Snapshots are taken by snapshot_keeper.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import anyio

from swarm_peer.errors import CallError, CallTimeout, PeerUnreachable
from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.recovery import (
    SNAPSHOTS_MISSED,
    Claim,
    Rewind,
    SnapshotRef,
    Standing,
    Timeline,
    checkpoints_beyond,
    choose_rewind,
    find_standing_by_snapshots,
    find_viable_standing,
    missed,
    timeline_offset,
)
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.network.transport import check_body
from swarm_peer.runtime.state.claims import believable, claims_of, is_on_timeline, list_snapshots
from swarm_peer.runtime.state.index import timeline_of
from swarm_peer.runtime.state.joining import Fetch, Take, take_snapshot
from swarm_peer.runtime.state.snapshot_store import SnapshotStore
from swarm_peer.runtime.state.wait import Wait
from swarm_peer.wire.messages import ListSnapshotsReply, RewindCall, RewindReply

log = logging.getLogger(__name__)

# Pause between reminders to peers that have not gone back yet.
PAUSE_S = 2.0
# A peer may have to ask the DHT whether the run has come so far.
REWIND_TIMEOUT_S = 20.0
# A new timeline begins so many rounds above the highest round known, so that a peer that is ahead of that is behind the
# new timeline, too.
ROUNDS_BETWEEN_TIMELINES = 4
# The following waits are in lifetimes of an announcement.
# Another peer has this long to take the same stage over. If it comes later, nothing is lost: both find the same start.
RIVAL_PATIENCE = 4
# A peer that could not be reached has this long to announce itself again: it may still serve, behind a closed port.
UNREACHED_PATIENCE = 4
# A coordinator has this long to give a checkpoint of where the run has been, before peers that were cut off go back.
CHECKPOINT_PATIENCE = 4
# A snapshot that no holder gives is tried for so long before an earlier one is gone back to.
HOLDER_PATIENCE = 4
# A coordinator reads all of a checkpoint before it gives it: from a slow disk, or a store far away.
CHECKPOINT_BYTES_PER_S = 1e8
# Without snapshots of all stages, the run begins anew if it has made at most this many snapshot intervals of updates.
INTERVALS_FROM_SCRATCH = 2


@dataclass(frozen=True, slots=True)
class Start:
    """Where a peer that finds no stage-mate begins.

    Attributes:
        fetch: gets the state of its stage; None for the run's initial weights
        rewound: whether the other stages have to go back to the timeline
    """

    timeline: Timeline
    fetch: Fetch | None
    rewound: bool
    reason: str


class Recovery:
    """Finds a start for a lost stage, and has the other stages follow. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        context: PeerContext,
        stage: int,
        swarm: SwarmAccess,
        snapshots: SnapshotStore,
        unreached: Callable[[], Sequence[PeerView]],
        furthest: Callable[[], tuple[int, int]],
    ):
        """Make a recovery for one stage.

        Args:
            snapshots: the snapshots that this peer keeps itself
            unreached: peers with a recent announcement that could not be reached, and are not in the view for that
                reason
            furthest: the latest round that peers stood in when some last served, and its optimizer step
        """
        manifest = context.resolved.manifest
        self._context = context
        self._manifest = manifest
        self._stage = stage
        self._swarm = swarm
        self._me = swarm.transport.peer_id
        self._snapshots = snapshots
        self._take = partial(
            take_snapshot,
            context=context,
            transport=swarm.transport,
            snapshots=snapshots,
            rng=context.random.stream("recovery"),
        )
        self._unreached = unreached
        self._furthest = furthest
        self._for_rivals = Wait(context.clock, RIVAL_PATIENCE * manifest.limits.announcement_s)
        self._not_given: dict[SnapshotRef, tuple[float, float]] = {}  # when each first and last was asked for in vain
        self._holder_patience_s = HOLDER_PATIENCE * manifest.limits.announcement_s
        num_bytes = sum(max_state_bytes(context.resolved, spec.index) for spec in context.resolved.specs)
        patience_s = CHECKPOINT_PATIENCE * manifest.limits.announcement_s + num_bytes / CHECKPOINT_BYTES_PER_S
        self._for_checkpoint = Wait(context.clock, patience_s)
        self._for_unreached = Wait(context.clock, UNREACHED_PATIENCE * manifest.limits.announcement_s)

    async def find_start(self) -> Start:
        """Find where to begin, now that no peer serves this peer's stage.

        Raises:
            CallError: this peer has to wait, for the reason that the message gives
        """
        view = self._swarm.view()
        missing = missed(view, self._stage, self._unreached())
        self._for_unreached.check([f"peer {peer} cannot be reached, and may announce itself again" for peer in missing])
        record = await self._swarm.beginning()
        first = record.timeline()
        # Coordinators give the checkpoint that the run goes on from, and the newest one where a stage is lost.
        coordinators = await self._swarm.coordinators()
        asked = [*(peer.peer_id for peer in view.peers), *coordinators]
        replies = await list_snapshots(self._context.resolved.hash, self._swarm.transport, asked)
        claims = claims_of(view, replies)
        believed = believable(claims)
        reached = record.reached()
        standing = self._find_standing(first, claims, believed, replies, coordinators, reached)
        # Peers that do not serve claim nothing, and may have moved here with the snapshots that are left.
        honest = {peer: reply for peer, reply in replies.items() if peer in believed or peer not in claims}
        # A run that was resumed has given up what it had made before.
        oldest = first.created_at_round if standing.timeline >= first else 0
        beginning = standing.timeline
        newest = max(standing.round_number, reached[0], beginning.first_round)
        # Others would refuse a timeline of weights from after that.
        snapshots = self._snapshots_on(beginning, range(oldest, newest + 1), honest)
        if newest == beginning.first_round:
            wanted = SnapshotRef(self._stage, beginning.created_at_round, beginning.first_optimizer_step)
            holders = sorted(peer for peer, held in snapshots.items() if wanted in held)
            # The coordinator gives the state that the run's first timeline begins with, and may come back.
            if beginning == first or (holders and wanted not in self._passed_over()):
                fetch = partial(self._take_given, wanted, holders) if beginning.first_optimizer_step else None
                return Start(beginning, fetch, False, "nothing was computed since the run's beginning")
        self._wait_for_rivals(view, anybody_serves=bool(claims))
        # A run that went on from a checkpoint would lose that, too. The coordinator may come back with it.
        intervals = 0 if first.first_optimizer_step else INTERVALS_FROM_SCRATCH
        from_scratch = intervals * self._manifest.recovery.snapshot_every
        if reached[1] > from_scratch:  # the peers that are left may have come less far
            from_scratch = -1
        rewind = self._choose_rewind(snapshots, standing.optimizer_step, from_scratch)
        checkpoints = {peer: snapshots.get(peer, ()) for peer in coordinators}
        if (forward := self._choose_forward(checkpoints, rewind, standing.optimizer_step, reached)) is not None:
            rewind = forward
        if rewind.optimizer_step is None:
            raise CallError(rewind.reason)
        # Where the run begins anew, nobody must take what it had made before for this.
        if rewind is forward or not rewind.optimizer_step or rewind.created_at_round > standing.round_number:
            standing = replace(standing, round_number=newest)
        return await self._rewind(rewind, standing, believed)

    def _wait_for_rivals(self, view: SwarmView, *, anybody_serves: bool) -> None:
        """Let peers with smaller ids go first."""
        # If no peer serves any stage, the first one to serve decides where all the others begin.
        peers = view.in_stage(self._stage) if anybody_serves else view.peers
        rivals = [peer for peer in peers if peer.state is PeerState.JOINING and peer.peer_id < self._me]
        self._for_rivals.check([f"peer {peer.peer_id} is taking stage {peer.stage} over" for peer in rivals])

    def _find_standing(
        self,
        first: Timeline,
        claims: Mapping[str, Claim],
        believed: Mapping[str, Claim],
        replies: Mapping[str, ListSnapshotsReply],
        coordinators: Collection[str],
        reached: tuple[int, int],
    ) -> Standing:
        """How far the run has come: by the claims of serving peers, or without any by what they have left.

        Args:
            believed: the credible ones of the claims
            reached: the latest round that a coordinator has seen the run in, and its optimizer step
        """
        if claims:
            return find_viable_standing(first, believed.values(), claims.values())
        left, seen = self._snapshots.snapshots(), [self._furthest(), reached]
        for peer_id, reply in replies.items():
            if peer_id in coordinators:  # a checkpoint does not say which timeline it is of
                seen += [(created_at_round, optimizer_step) for _, created_at_round, optimizer_step in reply.snapshots]
            else:
                left += [(SnapshotRef(*known), timeline_of(reply)) for known in reply.snapshots]
        rounds, optimizer_steps = zip(*seen, strict=True)
        interval = self._manifest.recovery.snapshot_every
        return find_standing_by_snapshots(first, left, interval, max(rounds), max(optimizer_steps))

    def _snapshots_on(
        self, timeline: Timeline, rounds: range, replies: Mapping[str, ListSnapshotsReply]
    ) -> dict[str, list[SnapshotRef]]:
        """The snapshots of these rounds that the timeline has not given up, by the peer that holds them."""
        snapshots = {
            peer_id: [
                SnapshotRef(*known)
                for known in reply.snapshots
                if is_on_timeline(timeline_of(reply), known[1], timeline)
            ]
            for peer_id, reply in replies.items()
        }
        # This peer may have moved here with the only snapshot that is left.
        snapshots[self._me] = [
            known for known, own in self._snapshots.snapshots() if is_on_timeline(own, known.created_at_round, timeline)
        ]
        return {peer_id: [k for k in held if k.created_at_round in rounds] for peer_id, held in snapshots.items()}

    async def _rewind(self, rewind: Rewind, standing: Standing, believed: Collection[str]) -> Start:
        """Begin a new timeline with a state that there is of all stages.

        Args:
            believed: the peers whose claims of where they stand are credible

        Raises:
            CallError: others see stage-mates
        """
        assert rewind.optimizer_step is not None
        wanted = SnapshotRef(self._stage, rewind.created_at_round, rewind.optimizer_step)
        first_round = standing.round_number + ROUNDS_BETWEEN_TIMELINES + timeline_offset(wanted, believed)
        timeline = Timeline(first_round, rewind.optimizer_step, rewind.created_at_round)
        await self._check_loss(timeline)
        holders = [holder for holder in rewind.holders if holder != self._me]
        fetch = partial(self._take_given, wanted, holders) if rewind.optimizer_step else None
        return Start(timeline, fetch, True, rewind.reason)

    def _choose_rewind(
        self, snapshots: Mapping[str, Sequence[SnapshotRef]], optimizer_step: int, from_scratch: int
    ) -> Rewind:
        """The newest snapshots of all stages, but for those that nobody has given for a while, if there are others.

        If there are none, each is tried anew, checkpoints as well: who gives them may be there again.
        """
        choose = partial(choose_rewind, num_stages=self._context.resolved.num_stages, lost_stage=self._stage)
        passed_over = self._passed_over()
        given = {peer: [known for known in held if known not in passed_over] for peer, held in snapshots.items()}
        rewind = choose(given, newest=optimizer_step, from_scratch=from_scratch)
        if passed_over and rewind.optimizer_step is not None:
            newest = max(known.optimizer_step for known in passed_over)
            return replace(rewind, reason=f"{rewind.reason}, and nobody gives that of {newest}")
        if passed_over:
            self._not_given.clear()
            rewind = choose(snapshots, newest=optimizer_step, from_scratch=from_scratch)
        return rewind

    def _passed_over(self) -> Collection[SnapshotRef]:
        # Once the time is over, each that fails is passed over at once: a liar may claim many. One that has not been
        # asked for since may be given by now.
        first_s = min((first_s for first_s, _ in self._not_given.values()), default=inf)
        last_s = max((last_s for _, last_s in self._not_given.values()), default=0.0)
        return self._not_given if first_s + self._holder_patience_s <= last_s else ()

    def _choose_forward(
        self,
        checkpoints: Mapping[str, Sequence[SnapshotRef]],
        back: Rewind,
        optimizer_step: int,
        reached: tuple[int, int],
    ) -> Rewind | None:
        """The newest checkpoint beyond the peers' optimizer step that the run has come to; see checkpoints_beyond.

        Args:
            back: what is gone back to without one

        Raises:
            CallError: a coordinator may give one soon
        """
        passed_over = self._passed_over()
        beyond = checkpoints_beyond(checkpoints, optimizer_step, reached, passed_over)
        forward = choose_rewind(beyond, self._context.resolved.num_stages, self._stage, reached[1], from_scratch=-1)
        if forward.optimizer_step is not None:
            self._for_checkpoint.check([])
            return forward
        steps = SNAPSHOTS_MISSED * self._manifest.recovery.snapshot_every
        is_far = back.optimizer_step is not None and 0 < steps < reached[1] - back.optimizer_step
        text = f"the run has made {reached[1]} updates, and a coordinator may give a checkpoint of them"
        is_coming = any(beyond.values())  # some of its stages
        self._for_checkpoint.check([text] if (is_far or is_coming) and not passed_over else [])
        return None

    async def _take_given(self, wanted: SnapshotRef, holders: Sequence[str], take: Take) -> None:
        """Take over a snapshot that others hold, and note one that none of them gives as it should be."""
        try:
            await self._take(wanted, holders, take)
        except CallError:
            now_s = self._context.clock.monotonic_s()
            first_s, _ = self._not_given.get(wanted, (now_s, now_s))
            self._not_given[wanted] = first_s, now_s
            raise

    def _rewind_call(self, timeline: Timeline, *, asks_only: bool) -> RewindCall:
        return RewindCall(
            manifest=self._context.resolved.hash,
            asks_only=asks_only,
            lost_stage=self._stage,
            first_round=timeline.first_round,
            first_optimizer_step=timeline.first_optimizer_step,
            created_at_round=timeline.created_at_round,
        )

    async def _check_loss(self, timeline: Timeline) -> None:
        """Ask the peers of the other stages whether this stage has lost its peers, as far as they know.

        This peer may be cut off from stage-mates that the others see. Until stage-mates outvoted it at the end of its
        first round, it would compute with weights that the others have left behind.

        Raises:
            CallError: at least half of those that answer would not go back
        """
        call = self._rewind_call(timeline, asks_only=True)
        answers: dict[str, str | None] = {}  # why a peer would not; None if it would

        async def ask(peer_id: str) -> None:
            try:
                reply = await self._swarm.transport.call(peer_id, call, timeout_s=REWIND_TIMEOUT_S)
                check_body(RewindReply, reply.body)
                answers[peer_id] = None
            except (CallTimeout, PeerUnreachable):
                return
            except CallError as error:
                answers[peer_id] = str(error)

        async with anyio.create_task_group() as tasks:
            for peer in self._swarm.view().peers:
                if peer.stage != self._stage and peer.state is PeerState.SERVING:
                    tasks.start_soon(ask, peer.peer_id)
        refusals = sorted(reason for reason in answers.values() if reason is not None)
        if refusals and 2 * len(refusals) >= len(answers):
            raise CallError(f"{len(refusals)} of {len(answers)} peers would not go back: {refusals[0]}")

    async def have_all_go_back(self, timeline: Timeline, is_there: Callable[[], bool]) -> None:
        """Tell the peers of all other stages that are in an earlier round to go back to a timeline, until each will.

        Args:
            is_there: whether this peer is on the timeline itself; otherwise nobody is told
        """
        call = self._rewind_call(timeline, asks_only=False)
        told: set[str] = set()
        refusals: dict[str, str] = {}

        async def tell(peer_id: str) -> None:
            try:
                reply = await self._swarm.transport.call(peer_id, call, timeout_s=REWIND_TIMEOUT_S)
                check_body(RewindReply, reply.body)
                told.add(peer_id)
            except CallError as error:
                reason = f"{error.code}: {error}"
                if refusals.get(peer_id) != reason:  # it is asked again until it goes back or is gone
                    log.warning("rewind_refused peer=%s reason=%s", peer_id, reason)
                refusals[peer_id] = reason

        while is_there():
            view = await self._swarm.look(range(self._context.resolved.num_stages))
            behind = [
                peer
                for peer in view.peers
                if peer.stage != self._stage
                and peer.state is PeerState.SERVING
                and peer.round_number < timeline.first_round
            ]
            others = {peer.peer_id for peer in behind} - told
            if not others:
                return
            async with anyio.create_task_group() as tasks:
                for peer_id in sorted(others):
                    tasks.start_soon(tell, peer_id)
            await anyio.sleep(PAUSE_S)
