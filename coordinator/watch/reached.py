"""How others reach a peer, in words: it tells that itself, in its announcement."""

from __future__ import annotations

from coordinator.watch.run_watch import RunWatch
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import PeerView

# Relays that are named.
MOST_NAMED = 2


def how_reached(peer: PeerView, watch: RunWatch) -> str:
    """Such as `directly`, or `through anna`; empty if that is not known."""
    if peer.relays:
        named = [_name_of(relay, watch) for relay in peer.relays[:MOST_NAMED]]
        more = len(peer.relays) - len(named)
        return f"through {', '.join(named)}{f' and {more} more' if more else ''}"
    if peer.is_reachable is None:
        return ""
    return "directly" if peer.is_reachable else "with others' help"


def _name_of(relay: str, watch: RunWatch) -> str:
    if watch.coordination is not None and watch.coordination[0].coordinator == relay:
        return "the coordinator"
    name = next((peer.name for peer in watch.view.peers if peer.peer_id == relay), "")
    return plain_text(name, 32) or f"…{plain_text(relay, 64)[-8:]}"
