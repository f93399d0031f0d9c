"""Pairs of peers without a way to each other, the places that they rule out, and the ports that would help most.

Two peers behind routers may find no way to each other, not even through a third one. Stage-mates all average with each
other, microbatches need some peer of each stage, and the leaders of all stages tell each other where they stand. So a
peer *lacks* somebody in a stage if it has no way to one of its stage-mates there, or none to any peer of some other
stage. A peer that lacks somebody waits, and takes no place: then no round waits for two that cannot talk. Peers find
out themselves which ways they lack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

Ids = set[str] | frozenset[str]
Missing = Mapping[str, set[str]]


def lacked(stage: int, placed: Sequence[Collection[str]], without_way: Ids) -> frozenset[str]:
    """The peers that somebody would need in a stage, and has no way to.

    Args:
        placed: the ids of the peers of each stage; itself may be among them
        without_way: the ids of those to whom it has no way
    """
    if not without_way:
        return frozenset()
    needed = set(without_way.intersection(placed[stage]))
    for other, there in enumerate(placed):
        if other != stage and there and without_way.issuperset(there):
            needed.update(there)
    return frozenset(needed)


def missing_ways(peers: Iterable[PeerView]) -> dict[str, set[str]]:
    """By peer, those to whom it has no way, by its own word or by theirs; without those that lack none."""
    missing: dict[str, set[str]] = {}
    for peer in peers:
        for other in peer.unreached:
            missing.setdefault(peer.peer_id, set()).add(other)
            missing.setdefault(other, set()).add(peer.peer_id)
    return missing


def agreed_ways(peers: Iterable[PeerView]) -> dict[str, set[str]]:
    """By peer, those to whom it has no way by its own word and by theirs: what one of them says alone may be a lie."""
    own = {peer.peer_id: set(peer.unreached) for peer in peers}
    agreed = {name: {each for each in others if name in own.get(each, ())} for name, others in own.items()}
    return {name: others for name, others in agreed.items() if others}


def lacking(view: SwarmView) -> frozenset[str]:
    """The peers that join or serve a stage and lack somebody there, by their own word: nothing comes of them now."""
    told = [peer for peer in view.peers if peer.unreached and peer.stage != UNDECIDED]
    if not told:
        return frozenset()
    placed = [[peer.peer_id for peer in view.serving(stage)] for stage in range(view.num_stages)]
    return frozenset(
        peer.peer_id
        for peer in told
        if peer.state in (PeerState.JOINING, PeerState.SERVING)
        and lacked(peer.stage, placed, frozenset(peer.unreached))
    )


def as_reached(view: SwarmView) -> SwarmView:
    """The view without joiners that wait for a way, in which members that lack somebody stand as if they drained."""
    if not (idle := lacking(view)):
        return view
    peers = (replace(peer, state=PeerState.DRAINING) if peer.peer_id in idle else peer for peer in view.peers)
    waiting = {peer.peer_id for peer in view.peers if peer.state is PeerState.JOINING} & idle
    return replace(view, peers=tuple(peer for peer in peers if peer.peer_id not in waiting))


def gives_way(me: str, stage: int, rosters: Sequence[Sequence[str]], missing: Missing) -> frozenset[str]:
    """Those because of whom a peer gives up its place; none if it stays.

    Of two stage-mates without a way, the one that came later goes. A peer that lacks another stage goes if a stage-mate
    lacks nobody. So the stage keeps somebody, and never two that have no way.

    Args:
        rosters: the ids of the peers that have a place in each stage, oldest first
    """
    mates = rosters[stage]
    without_way = missing.get(me, set())
    if before := without_way.intersection(mates[: mates.index(me)]):
        return frozenset(before)
    others = lacked(stage, rosters, without_way).difference(mates)
    lacks = (lacked(stage, rosters, missing.get(mate, set())) for mate in mates if mate != me)
    return frozenset() if all(lacks) else others


def cut_off(placed: Sequence[set[str]], missing: Missing) -> int:
    """How many peers lack somebody where they are."""
    return sum(
        bool(lacked(stage, placed, missing[peer_id]))
        for stage, here in enumerate(placed)
        for peer_id in missing.keys() & here
    )


def most_missed(missing: Missing) -> tuple[str, ...]:
    """The peers to and from which most ways are missing: their open ports would make most of them."""
    most = max(map(len, missing.values()), default=0)
    return tuple(sorted(peer_id for peer_id, others in missing.items() if len(others) == most))


def helpful_ports(me: str, lacks: Collection[str], missing: Missing) -> tuple[str, ...]:
    """Of a peer and those that it lacks, those whose open port would make most missing ways good; several if alike."""
    ends = {peer_id: missing.get(peer_id, set()) | {me} for peer_id in lacks}
    return most_missed({**ends, me: missing.get(me, set()) | set(lacks)})
