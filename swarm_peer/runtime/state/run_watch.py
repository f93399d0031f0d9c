"""Finds out whether the run goes on without this peer: on another timeline, or in later rounds.

Owns the questions to other peers and the waits; policy/recovery.py decides. Must not change anything in this peer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from swarm_peer.errors import CallError, OtherTimeline
from swarm_peer.policy.recovery import FIRST_TIMELINE, Claim, Standing, Timeline, find_overtaking, find_standing
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.state.claims import believable, claims_of, list_snapshots
from swarm_peer.runtime.state.index import timeline_of

log = logging.getLogger(__name__)


class RunWatch:
    """Compares where one replica stands with where the run stands. Belongs to the event loop's thread."""

    def __init__(self, *, context: PeerContext, stage: int, swarm: SwarmAccess):
        """Make a watch for one stage."""
        self._context = context
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
        while True:
            await self._context.changed.wait_for(lambda: admission.is_behind or admission.met_other_timeline)
            present = rounds.current
            # At the end of a round some are further for a moment. Only a peer that is stuck is left behind. Callers
            # avoid it for ever longer, so it does not wait for another one to name a later round.
            await anyio.sleep(patience_s)
            is_split, admission.met_other_timeline = admission.met_other_timeline, False
            if rounds.current is not present and not is_split:
                continue
            own = rounds.step
            try:
                standing, is_last, overtaking = await self._compare(own)
            except CallError as error:
                log.info("standing_unknown reason=%s", error)
                continue
            await anyio.sleep(patience_s)
            if rounds.step.timeline != own.timeline or rounds.step.phase is Phase.LEFT:
                continue
            is_stuck, timeline = rounds.current is present and rounds.step.phase is Phase.OPEN, standing.timeline
            if timeline > own.timeline and (is_stuck or is_split):
                if timeline.first_round > rounds.step.round_number:
                    return timeline
                raise OtherTimeline(f"the run has gone back to {timeline.first_optimizer_step} updates without it")
            if timeline < own.timeline and is_split:
                raise OtherTimeline(f"most go on without going back to {own.timeline.first_optimizer_step} updates")
            if timeline == own.timeline and standing.optimizer_step > own.optimizer_step and is_last and is_stuck:
                raise CallError(f"the run has made {standing.optimizer_step} updates, this stage {own.optimizer_step}")
            if overtaking is not None and is_stuck:
                raise OtherTimeline(
                    f"stage {overtaking} has passed round {own.timeline.first_round} without having heard that the "
                    f"run goes back to {own.timeline.first_optimizer_step} updates there"
                )

    async def _compare(self, own: StepState) -> tuple[Standing, bool, int | None]:
        """Where the run stands, whether no stage-mate is further than this peer, and which stage cannot come to it.

        Raises:
            CallError: nobody answers
        """
        view = await self._swarm.look(range(self._context.resolved.num_stages))
        serving = [peer.peer_id for peer in view.peers if peer.state is PeerState.SERVING]
        replies = await list_snapshots(self._context.resolved.hash, self._swarm.transport, serving)
        claimed = claims_of(view, replies)
        overtaking = find_overtaking(own.timeline, [c for c in claimed.values() if c.stage != self._stage])
        # With its own claim, so that all peers that ask at the same time find the same timeline.
        claimed[self._me] = Claim(self._stage, own.round_number, own.timeline)
        claims = believable(claimed).values()
        is_last = all(claim.round_number <= own.round_number for claim in claims if claim.stage == self._stage)
        return find_standing(FIRST_TIMELINE, claims), is_last, overtaking

    async def leave_out(self, mates: Sequence[str], shunned: Timeline) -> list[str]:
        """Those stage-mates that are not on a timeline, which this peer has left.

        Raises:
            CallError: there are none
        """
        replies = await list_snapshots(self._context.resolved.hash, self._swarm.transport, mates)
        others = sorted(peer_id for peer_id, reply in replies.items() if timeline_of(reply) != shunned)
        if not others:
            raise CallError("no stage-mate says that it is on another timeline than the one that this peer has left")
        return others
