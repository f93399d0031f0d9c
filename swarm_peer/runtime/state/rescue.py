"""Watches for a stage that has lost all its peers, which this peer may be chosen to take over."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import anyio

from swarm_peer.model.training import max_state_bytes
from swarm_peer.policy.placement.lost_stage import ChosenMover, choose_mover
from swarm_peer.policy.placement.ways import as_reached
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.context import PeerContext

log = logging.getLogger(__name__)

# In lifetimes of an announcement.
# A stage has to be without peers for this long before a peer moves there on its own. A coordinator is quicker, and
# chooses the peer better.
RESCUE_PATIENCE = 2
# A peer that joins a lost stage has this long before another one moves there, and beside it the time in which a home
# link brings a snapshot.
JOINER_PATIENCE = 20
JOINER_BYTES_PER_S = 5e6


class Look(Protocol):
    """Looks up the peers that announce some stages; waits until the DHT answers. See Directory.refresh_surely."""

    async def __call__(self, stages: Sequence[int], max_age_s: float = 0.0) -> SwarmView:
        """The swarm, with these stages as they are now, or were so short a time ago."""


async def watch_stages(context: PeerContext, look: Look) -> int:
    """Wait until a stage has lost its peers and this peer is chosen to move there. Returns the stage."""
    manifest, me = context.resolved.manifest, context.identity.peer_id

    def joining_s(stage: int) -> float:
        """How long a peer has to join a lost stage."""
        download_s = max_state_bytes(context.resolved, stage) / JOINER_BYTES_PER_S
        return JOINER_PATIENCE * manifest.limits.announcement_s + download_s

    patience_s = manifest.limits.announcement_s
    empty_since: dict[int, float] = {}
    ends_s: dict[str, float] = {}  # until when each peer that joins a lost stage is waited for
    reported: dict[int, str] = {}
    while True:
        await anyio.sleep(patience_s / 4)
        # This peer polls some of the stages for its work anyway.
        view = await look(range(context.resolved.num_stages), max_age_s=patience_s / 4)
        now = context.clock.monotonic_s()
        empty = as_reached(view).empty_stages()
        empty_since = {stage: empty_since.get(stage, now) for stage in empty}
        reported = {stage: reason for stage, reason in reported.items() if stage in empty}
        joining = [peer for peer in view.peers if peer.state is PeerState.JOINING and peer.stage in empty]
        ends_s = {peer.peer_id: ends_s.get(peer.peer_id, now + joining_s(peer.stage)) for peer in joining}
        stuck = [peer_id for peer_id, end_s in ends_s.items() if now >= end_s]
        movable = [peer.peer_id for peer in view.peers if peer.movable]
        for stage in empty:
            if now < empty_since[stage] + RESCUE_PATIENCE * patience_s:
                continue
            mover = choose_mover(view, stage, movable, stuck)
            if reported.get(stage) != mover.reason:
                _report(view, stage, mover, context.options.stage)
                reported[stage] = mover.reason
            if mover.peer_id == me:
                return stage


def _report(view: SwarmView, stage: int, mover: ChosenMover, own_stage: str) -> None:
    """Say that a stage is empty, and who takes it over; a run that begins is still waiting for its first peers."""
    begins = not any(peer.optimizer_step for peer in view.peers)
    chosen = f" mover={mover.peer_id}" if mover.peer_id is not None else ""
    reason = mover.reason
    if begins and mover.peer_id is None and not view.in_stage(stage):
        line = "the same line" if own_stage == "auto" else f"--stage {stage}"
        reason = f"stage {stage} has no peer yet: start another one with {line}"
    level = logging.INFO if begins else logging.WARNING
    log.log(level, "stage_empty stage=%d%s reason=%s", stage, chosen, reason)
