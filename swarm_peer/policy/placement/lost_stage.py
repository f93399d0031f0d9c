"""Which peer takes over a stage that has lost all its peers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from swarm_peer.policy.placement.ways import as_reached, lacked
from swarm_peer.policy.view import PeerState, SwarmView


@dataclass(frozen=True, slots=True)
class ChosenMover:
    """The peer that moves to a lost stage, or None with the reason."""

    peer_id: str | None
    reason: str


def choose_mover(
    view: SwarmView, lost_stage: int, movable: Collection[str], stuck: Collection[str] = ()
) -> ChosenMover:
    """The peer that takes over a stage in which nobody serves, or only peers that lack somebody (see ways.py).

    All peers with the same view choose the same one. It is the slowest movable peer of the stage with the most peers,
    since that stage misses it least, of those that lack nobody in the lost stage, as far as they know.

    Args:
        movable: peers that may move
        stuck: peers that have been joining for too long to wait for them
    """
    placed = [[peer.peer_id for peer in view.in_stage(stage) if peer.has_work] for stage in range(view.num_stages)]
    view = as_reached(view)
    joining = [
        peer.peer_id
        for peer in view.in_stage(lost_stage)
        if peer.state is PeerState.JOINING and peer.peer_id not in stuck
    ]
    if joining:
        return ChosenMover(None, f"{_peers_are(len(joining))} joining stage {lost_stage}")
    candidates = [
        (-len(view.serving(peer.stage)), peer.samples_per_s, peer.peer_id)
        for peer in view.peers
        if peer.state is PeerState.SERVING and peer.peer_id in movable and len(view.serving(peer.stage)) > 1
        if lost_stage not in peer.too_large and not lacked(lost_stage, placed, frozenset(peer.unreached))
    ]
    if not candidates:
        reason = f"no peer may move to stage {lost_stage}: none is free, or each is the last of its stage"
        return ChosenMover(None, reason)
    num_peers, _, peer_id = min(candidates)
    return ChosenMover(peer_id, f"it is the slowest of the {-num_peers} peers of the fullest stage")


def _peers_are(count: int) -> str:
    return "1 peer is" if count == 1 else f"{count} peers are"
