"""Claims of other peers about the run: how they are asked for, and which of them are believed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import anyio

from swarm_peer.errors import CallError
from swarm_peer.policy.recovery import Claim, Timeline, credible
from swarm_peer.policy.view import PeerState, SwarmView
from swarm_peer.runtime.network.transport import Transport, check_body
from swarm_peer.runtime.state.index import timeline_of
from swarm_peer.wire.messages import ListSnapshotsCall, ListSnapshotsReply

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0


async def list_snapshots(
    manifest_hash: str, transport: Transport, peers: Sequence[str]
) -> dict[str, ListSnapshotsReply]:
    """Ask peers which snapshots they keep, and where they stand. Returns the answers of those that answer."""
    replies: dict[str, ListSnapshotsReply] = {}

    async def ask(peer_id: str) -> None:
        try:
            call = ListSnapshotsCall(manifest=manifest_hash)
            reply = await transport.call(peer_id, call, timeout_s=CALL_TIMEOUT_S)
            replies[peer_id] = check_body(ListSnapshotsReply, reply.body)
        except CallError as error:
            log.info("snapshots_unknown peer=%s reason=%s: %s", peer_id, error.code, error)

    async with anyio.create_task_group() as tasks:
        for peer_id in sorted(set(peers) - {transport.peer_id}):
            tasks.start_soon(ask, peer_id)
    return replies


def claims_of(view: SwarmView, replies: Mapping[str, ListSnapshotsReply]) -> dict[str, Claim]:
    """The claims of all serving peers that replied.

    Raises:
        CallError: there are serving peers, and none of them replied
    """
    serving = [peer for peer in view.peers if peer.state is PeerState.SERVING]
    claims = {
        peer.peer_id: Claim(peer.stage, replies[peer.peer_id].round_number, timeline_of(replies[peer.peer_id]))
        for peer in serving
        if peer.peer_id in replies
    }
    if serving and not claims:
        raise CallError(f"none of the {len(serving)} serving peers can be reached")
    return claims


def believable(claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """The claims that are credible.

    Raises:
        CallError: there are claims, and none of them is credible
    """
    believed = credible(claims)
    liars = claims.keys() - believed.keys()
    if liars:
        log.warning("claims_not_believed peers=%s", ",".join(sorted(liars)))
    if claims and not believed:
        raise CallError(f"the {len(claims)} serving peers claim to be in rounds that cannot be")
    return believed


def is_on_timeline(own: Timeline, created_at_round: int, timeline: Timeline) -> bool:
    """Whether a timeline may go on from weights that a peer on timeline `own` created in a round.

    A peer that has not gone back yet holds weights that the timeline has given up. A peer that has gone back further
    than most holds weights from before both.
    """
    return own == timeline or created_at_round <= max(
        timeline.created_at_round, own.created_at_round if own > timeline else 0
    )
