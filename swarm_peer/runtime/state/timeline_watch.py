"""Finds out whether the run goes on without this peer: on another timeline, or in later rounds.

Owns the questions to other peers and the waits; policy/recovery.py decides. Must not change anything in this peer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from swarm_peer.errors import CallError, OtherTimeline
from swarm_peer.policy.recovery import (
    FIRST_TIMELINE,
    Claim,
    Standing,
    Timeline,
    find_overtaking,
    find_viable_standing,
    may_be_followed,
)
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.view import PeerState, PeerView
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.state.claims import believable, claims_of, list_snapshots
from swarm_peer.runtime.state.index import timeline_of

log = logging.getLogger(__name__)

# A stuck peer looks so often for a sure answer. Where it never reaches some stage itself, that would be for ever.
MOST_UNSURE_LOOKS = 4


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Where the run stands, beside one peer of it.

    Attributes:
        is_last: whether no stage-mate on the peer's timeline is further than the peer
        overtaking: a stage that cannot come to the peer's timeline
        may_be_followed: whether at least half of another stage's peers can still come to the peer's timeline
        has_quorum: whether more than half of the serving peers have answered, and some of each stage
    """

    standing: Standing
    is_last: bool
    overtaking: int | None
    may_be_followed: bool
    has_quorum: bool


class TimelineWatch:
    """Compares where one replica stands with where the run stands. Belongs to the event loop's thread."""

    def __init__(self, *, context: PeerContext, stage: int, swarm: SwarmAccess):
        """Make a watch for one stage."""
        self._context = context
        self._hash = context.resolved.hash
        self._manifest = context.resolved.manifest
        self._stage = stage
        self._swarm = swarm
        self._me = swarm.transport.peer_id

    async def wait_until_left(self, rounds: RoundBook, admission: RoundAdmission) -> Timeline:
        """Wait until the run has gone back and this peer has not heard of it. Returns the run's timeline.

        The peer that takes a lost stage over tells all others, but it may die, or be cut off from some, before it has.
        These meet nobody of their own round any more, and would wait for ever. Or the run was cut in two, and both
        parts train: a peer that meets one of another timeline finds out which of the two the run goes on with.

        Raises:
            OtherTimeline: the run goes on with a timeline that this peer cannot go back to: it has to join anew
            CallError: the run has gone on without this peer, which has to join anew
        """
        patience_s = self._manifest.limits.announcement_s
        num_unsure = 0
        while True:
            await self._context.changed.wait_for(lambda: admission.is_behind or admission.met_other_timeline)
            present = rounds.current
            # At the end of a round some are further for a moment. Only a peer that is stuck is left behind. Callers
            # avoid it for ever longer, so it does not wait for another one to name a later round.
            await anyio.sleep(patience_s)
            is_split, admission.met_other_timeline = admission.met_other_timeline, False
            # After a rewind, peers meet for a moment that have gone back and that have not.
            is_split = is_split and rounds.step.timeline == present.step.timeline
            if rounds.current is not present and not is_split:
                continue
            try:
                before = await self._compare(rounds.step)
                await anyio.sleep(patience_s)
                now = await self._compare(rounds.step)
            except CallError as error:
                log.info("standing_unknown reason=%s", error)
                admission.met_other_timeline |= is_split
                continue
            own, is_stuck = rounds.step, rounds.current is present and rounds.step.phase is Phase.OPEN
            if own.timeline != present.step.timeline or own.phase is Phase.LEFT:
                continue
            # Peers of both timelines leave or die while they ask, and answers get lost as long as a cut heals. A peer
            # that works takes its time, so that not all of both timelines leave them at once.
            is_sure = before.has_quorum and now.has_quorum and before.standing.timeline == now.standing.timeline
            num_unsure = 0 if is_sure or not is_stuck else num_unsure + 1
            if not is_sure and num_unsure < MOST_UNSURE_LOOKS:
                admission.met_other_timeline |= is_split
                continue
            timeline = self._check(own, now, is_stuck=is_stuck, is_split=is_split)
            if timeline is not None:
                return timeline

    def _check(self, own: StepState, found: _Comparison, *, is_stuck: bool, is_split: bool) -> Timeline | None:
        """Whether a peer has to go to another timeline, and can: if so, to which.

        Args:
            is_split: it has met another timeline

        Raises:
            OtherTimeline, CallError: it has to join anew; see `wait_until_left`
        """
        standing = found.standing
        if standing.timeline > own.timeline and (is_stuck or is_split):
            if standing.timeline.first_round > own.round_number:
                return standing.timeline
            raise OtherTimeline(f"the run has gone back to {standing.timeline.first_optimizer_step} updates without it")
        if found.overtaking is not None and is_stuck:
            raise OtherTimeline(
                f"stage {found.overtaking} has passed round {own.timeline.first_round} without having heard that the "
                f"run goes back to {own.timeline.first_optimizer_step} updates there"
            )
        # While some stage is lost, nobody sends anything, and so nobody meets peers of another timeline.
        if standing.timeline < own.timeline and (is_split or (is_stuck and not found.may_be_followed)):
            raise OtherTimeline(
                f"no stage goes back to {own.timeline.first_optimizer_step} updates with most of its peers"
            )
        is_ahead = standing.timeline == own.timeline and standing.optimizer_step > own.optimizer_step
        if is_ahead and found.is_last and is_stuck:
            raise CallError(f"the run has made {standing.optimizer_step} updates, this stage {own.optimizer_step}")
        return None

    async def _compare(self, own: StepState) -> _Comparison:
        """Compare where the run stands with where this peer does.

        Raises:
            CallError: nobody answers
        """
        serving, claimed = await self._ask_all()
        overtaking = find_overtaking(own.timeline, [c for c in claimed.values() if c.stage != self._stage])
        # With its own claim, so that peers of both timelines that hear the same answers find the same timeline.
        claimed[self._me] = Claim(self._stage, own.round_number, own.timeline)
        claims = believable(claimed).values()
        mates = [claim for claim in claims if claim.stage == self._stage and claim.timeline == own.timeline]
        is_last = all(mate.round_number <= own.round_number for mate in mates)
        heard = {claim.stage for claim in claimed.values()}
        num_serving = len({self._me, *(peer.peer_id for peer in serving)})
        has_quorum = 2 * len(claimed) > num_serving and heard.issuperset(peer.stage for peer in serving)
        followed = may_be_followed(own.timeline, [claim for claim in claims if claim.stage != self._stage])
        standing = find_viable_standing(FIRST_TIMELINE, claims, claimed.values())
        return _Comparison(standing, is_last, overtaking, followed, has_quorum)

    async def _ask_all(self) -> tuple[list[PeerView], dict[str, Claim]]:
        """Ask all serving peers where they stand. Returns these peers, and the claims of those that answer."""
        view = await self._swarm.look(range(self._manifest.stages.count))
        serving = [peer for peer in view.peers if peer.state is PeerState.SERVING]
        replies = await list_snapshots(self._hash, self._swarm.transport, [peer.peer_id for peer in serving])
        return serving, claims_of(view, replies)

    async def choose_donors(
        self, mates: Sequence[str], shunned: Timeline | None = None
    ) -> tuple[list[str], Timeline | None]:
        """Those stage-mates that are on the run's timeline, if they are on several; and the timeline.

        Args:
            shunned: a timeline that this peer has left: mates on it do not count

        Returns:
            all mates and None if nobody answers; with `shunned`, nobody and None if nobody answers or all are on it

        Raises:
            CallError: the mates are on several timelines, and no peer of the run says where it stands
        """
        replies = await list_snapshots(self._hash, self._swarm.transport, mates)
        timelines = {peer_id: timeline_of(reply) for peer_id, reply in sorted(replies.items())}
        usable = {peer_id: timeline for peer_id, timeline in timelines.items() if timeline != shunned}
        if not usable:
            return ([] if shunned is not None else list(mates)), None
        chosen = max(usable.values())
        if min(usable.values()) != chosen:
            _, claimed = await self._ask_all()
            standing = find_viable_standing(FIRST_TIMELINE, believable(claimed).values(), claimed.values())
            chosen = standing.timeline if standing.timeline in usable.values() else chosen
        return [peer_id for peer_id, timeline in usable.items() if timeline == chosen], chosen
