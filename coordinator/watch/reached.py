"""How others reach a peer, in words: it tells that itself, in its announcement."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.watch.run_watch import RunWatch
from swarm_peer.policy.placement.ways import missing_ways, most_missed
from swarm_peer.policy.plain_text import plain_text
from swarm_peer.policy.view import ID_CHARS, PeerView

# Peers that are named.
MOST_NAMED = 2


def how_reached(peer: PeerView, watch: RunWatch) -> str:
    """Such as `directly`, or `through anna, not by bob`; empty if that is not known."""
    missed = _named(peer.unreached, watch)
    return ", ".join(filter(None, (_way_of(peer, watch), missed and f"not by {missed}")))


def missing_ways_line(watch: RunWatch) -> str:
    """How many peers that need each other have no way, and whose open port would help most; empty if all have one."""
    missing = missing_ways(watch.view.peers)
    if not missing:
        return ""
    num_pairs = sum(map(len, missing.values())) // 2
    return (
        f"{num_pairs} pair{'s' * (num_pairs > 1)} of peers without a way: what would help most is a port that is "
        f"forwarded to {_named(most_missed(missing), watch, ' or ')}"
    )


def _named(peer_ids: Sequence[str], watch: RunWatch, link: str = ", ") -> str:
    """Some of the peers by their names, and how many more there are."""
    more = len(peer_ids) - MOST_NAMED
    names = link.join(_name_of(peer_id, watch) for peer_id in peer_ids[:MOST_NAMED])
    return f"{names} and {more} more" if more > 0 else names


def _way_of(peer: PeerView, watch: RunWatch) -> str:
    if peer.relays:
        return f"through {_named(peer.relays, watch)}"
    if peer.is_reachable is None:
        return ""
    return "directly" if peer.is_reachable else "with others' help"


def longest_round_trip(peer: PeerView) -> str:
    """Within what time a peer's busiest neighbours have all answered lately, such as `40 ms`; empty if not known."""
    return f"{max(each.round_trip_ms for each in peer.neighbours)} ms" if peer.neighbours else ""


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
