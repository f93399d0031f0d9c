"""How others reach a peer, in words: it tells that itself, in its announcement."""

from __future__ import annotations

from coordinator.watch.run_watch import RunWatch
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import ID_CHARS, PeerView

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


def neighbours_of(peer: PeerView, watch: RunWatch) -> list[str]:
    """A line for each of a peer's busiest neighbours, such as `bob through anna: answers within 40 ms, 1.2 MB/s`."""
    lines = []
    for each in peer.neighbours:
        through = f" through {_name_of(each.through, watch)}" if each.through else ""
        rate = f"{each.bytes_per_s / 1e6:.2g} MB/s"
        lines.append(f"{_name_of(each.peer, watch)}{through}: answers within {each.round_trip_ms} ms, {rate}")
    return lines


def _name_of(end_of_id: str, watch: RunWatch) -> str:
    """The name of the node with this id, or with an id that ends so; without one, the end of its id."""
    if watch.coordination is not None and watch.coordination[0].coordinator.endswith(end_of_id):
        return "the coordinator"
    name = next((peer.name for peer in watch.view.peers if peer.peer_id.endswith(end_of_id)), "")
    return plain_text(name, 32) or f"…{plain_text(end_of_id, 64)[-ID_CHARS:]}"
