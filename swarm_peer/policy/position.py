"""How far the run has come, by what its peers say: some of them may lie, lag or hang."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from swarm_peer.policy.view import PeerState, PeerView, SwarmView

# The last global step that the wire carries (wire/records.py, Step).
MAX_STEP = 2**40 - 1
# Announcements are up to their lifetime old, and views some seconds more: a run makes fewer steps in that time. Lies
# within it cost step numbers that nobody uses, and newcomers that are of no use until the run is there.
MAX_STEPS_AHEAD = 500


class Position(NamedTuple):
    """At the beginning of global step `step` the weights have had `updates` optimizer updates."""

    step: int
    updates: int

    def is_on_line(self, other: Position) -> bool:
        """Whether the run was not rewound between the two."""
        return self.step - other.step == self.updates - other.updates

    def is_beyond(self, other: Position) -> bool:
        """Whether the run is here later, with at least as many updates, whatever was between the two."""
        return self.step >= other.step and self.updates >= other.updates

    def follows(self, other: Position) -> bool:
        """Whether the run goes from `other` to here without a rewind, or is there."""
        return self.step >= other.step and self.is_on_line(other)


def position_of(peer: PeerView) -> Position:
    """As it announces it."""
    return Position(peer.step, peer.updates)


def is_reached(position: Position, told: Mapping[str, Collection[Position]], view: SwarmView, last: Position) -> bool:
    """Whether to believe somebody of stage 0 who says that the run has come to `position`.

    More than half of stage 0 must have come there or further, and half of each other stage near: not many steps before
    it, and on its line of updates unless that is the one of `last`. Or else more than half of each other stage must
    have come there, who announce it later: so nobody in stage 0 can hold the run's account back. Who has joined since,
    or was left behind for a while, bears out what came before by where it is now.

    As long as more than half of each stage's peers are honest, what is believed is true, and comes. A majority of
    stage 0 can tell of up to MAX_STEPS_AHEAD steps that have not been, and one of another stage can keep all from being
    believed. If there is one stage only, a majority tells what it likes, and half of it can hold all back. Of steps
    that are long over the others know no more than the number: one peer alone can make up their losses.

    Args:
        told: by peer of stage 0, where it says that it has been
        last: what was believed last
    """
    # Of what the run did right before it went back, whoever has gone back bears out what it has kept.
    continues = position.follows(last)
    authors = [peer for peer in view.in_stage(0) if peer.state is not PeerState.JOINING]
    others = [view.serving(stage) for stage in range(1, view.num_stages)]

    def has_come(peer: PeerView) -> bool:
        return any(
            known.follows(position) or (continues and known.is_beyond(position))
            for known in (position_of(peer), *told.get(peer.peer_id, ()))
        )

    def is_near(peer: PeerView) -> bool:
        goes_on = continues or position.is_on_line(position_of(peer))
        return goes_on and position.step <= peer.step + MAX_STEPS_AHEAD

    if others and all(2 * sum(map(has_come, peers)) > len(peers) for peers in others):
        return True
    near = all(peers and 2 * sum(map(is_near, peers)) >= len(peers) for peers in others)
    return near and 2 * sum(map(has_come, authors)) > len(authors)
