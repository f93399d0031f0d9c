"""Learns where the run goes back to: from a peer that has taken over a lost stage, from this peer's own look, or from
the run's key where the weights have diverged.

Owns the timeline that is gone back to next. Must not change anything else in this peer: step_loop.py goes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.policy.recovery import Timeline
from swarm_peer.policy.run_progress import MAX_ROUNDS_AHEAD
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.network.transport import Handler, Reply
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.wire.messages import Body, RewindCall, RewindReply

# A rewind may name a round so far ahead: its timeline begins above the highest round that its author believes, and this
# peer may be behind that.
MAX_ROUNDS_OF_REWIND = 2 * MAX_ROUNDS_AHEAD
# Pause between looks at where the run's key says that it begins, while some peer says that the weights are broken.
LOOK_S = 5.0


class Rewinds:
    """Knows which timeline a replica goes back to. Belongs to the event loop's thread.

    Attributes:
        target: the newest timeline that the replica has to go back to and has not gone back to yet, if there is one
    """

    def __init__(self, *, context: PeerContext, core: ReplicaCore, swarm: SwarmAccess):
        self.target: Timeline | None = None
        self._changed = context.changed
        self._stage = core.stage
        self._rounds = core.rounds
        self._admission = core.admission
        self._view = swarm.view
        self._look = swarm.look
        self._beginning = swarm.beginning

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The calls that this part answers."""
        return {RewindCall: self.handle}

    async def handle(self, caller: str, call: RewindCall, tensors: Sequence[memoryview]) -> Reply:
        """Rewind to the caller's timeline: it says that it took over a stage without peers, from a snapshot."""
        target = Timeline(call.first_round, call.first_optimizer_step, call.created_at_round)
        step = self._rounds.step
        if call.asks_only and call.first_round <= step.round_number and step.timeline != target:
            raise NotServing(f"the run is in round {step.round_number} already")
        if call.first_round > step.round_number and target != self.target:
            view = await self._look([call.lost_stage])
            others = [peer for peer in view.serving(call.lost_stage) if peer.peer_id != caller]
            known = view.peer(caller)
            if known is None or known.stage != call.lost_stage or call.lost_stage == self._stage:
                raise NotServing("only a peer that has taken over another stage rewinds the run")
            # Round by round: a mate that is on another timeline may have come to later rounds on that.
            if any(peer.optimizer_step != target.optimizer_step_at(peer.round_number) for peer in others):
                raise NotServing(f"stage {call.lost_stage} has not lost its peers: {len(others)} others serve it")
            # All peers that had come further may be gone. This one was cut off then, and has to go forward.
            step = self._rounds.step
            is_near = call.first_round <= step.round_number + MAX_ROUNDS_OF_REWIND
            knows = is_near and call.first_optimizer_step <= step.optimizer_step
            reached_round, reached_step = (0, 0) if knows else await self._reached()
            step = self._rounds.step
            if call.first_round > max(step.round_number, reached_round) + MAX_ROUNDS_OF_REWIND:
                raise InvalidMessage(f"the run is in round {step.round_number} and cannot go on in {call.first_round}")
            made = step.optimizer_step
            # No newcomer could join a timeline that cannot be. If the run has made more updates than this peer, a peer
            # that was cut off has begun its stage anew: so it looks where the run is.
            has_reached = call.created_at_round <= reached_round and call.first_optimizer_step <= reached_step
            if not (call.first_optimizer_step <= made or has_reached) or not target.allows_round(call.first_round):
                self._admission.saw_round(call.first_round)
                raise InvalidMessage(f"the run has made {made} updates and cannot go back to {target}")
            if not call.asks_only:
                self.go_back(target)
        return Reply(RewindReply(round_number=self._rounds.step.round_number).model_dump())

    async def _reached(self) -> tuple[int, int]:
        """The round and optimizer step that a coordinator has seen the run come to; zeros if nobody tells."""
        try:
            return (await self._beginning()).reached()
        except CallError:
            return 0, 0

    def go_back(self, timeline: Timeline) -> None:
        """Have the replica rewind to a newer timeline, if it has not done so already."""
        newest = self._rounds.step.round_number if self.target is None else self.target.first_round
        if timeline.first_round > newest:
            self.target = timeline
            self._changed.notify()

    async def wait_for_beginning(self) -> Timeline:
        """Wait until the run's key has the run begin anew from a checkpoint, and have the replica go back to that.

        A coordinator does so when the weights have diverged. Nobody looks for it at other times.
        """
        while True:
            await anyio.sleep(LOOK_S)
            if not any(peer.trouble is not None and peer.trouble.is_of_weights for peer in self._view().peers):
                continue
            try:
                timeline = (await self._beginning()).timeline()
            except CallError:
                continue
            if timeline.first_round > self._rounds.step.round_number:
                self.go_back(timeline)
                return timeline

    def drop_until(self, round_number: int) -> None:
        """Drop the target if its timeline begins in this round or earlier, and keep a newer one."""
        if self.target is not None and self.target.first_round <= round_number:
            self.target = None
