"""How far the run has come, as its peers announce it. Some peers may lie, lag or hang."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from swarm_peer.policy.view import PeerView, SwarmView

# The last round that messages can carry (wire/records.py, RoundNumber).
MAX_ROUND = 2**40 - 1
# The run makes fewer rounds than this while an announcement is valid and a view is in use, so no honest peer can seem
# further ahead. A smaller lie wastes round numbers, and the time of newcomers, which idle until the run gets there.
MAX_ROUNDS_AHEAD = 500
# The last round that a report from stage 0 may tell of: messages must carry the rounds after it, too, in which the run
# goes on or is resumed. No honest run comes so far.
LAST_BELIEVED_ROUND = MAX_ROUND - MAX_ROUNDS_AHEAD


class Position(NamedTuple):
    """A round, and the optimizer step of the weights that it begins with."""

    round_number: int
    optimizer_step: int

    def is_on_timeline(self, other: Position) -> bool:
        """Whether both positions can be on one timeline: no rewind was between them."""
        return self.round_number - other.round_number == self.optimizer_step - other.optimizer_step

    def is_beyond(self, other: Position) -> bool:
        """Whether neither the round nor the optimizer step is lower here, with or without a rewind in between."""
        return self.round_number >= other.round_number and self.optimizer_step >= other.optimizer_step

    def follows(self, other: Position) -> bool:
        """Whether the run comes from `other` to here without a rewind; true if the two are equal."""
        return self.round_number >= other.round_number and self.is_on_timeline(other)


def position_of(peer: PeerView) -> Position:
    """The position that a peer announces."""
    return Position(peer.round_number, peer.optimizer_step)


def is_reached(position: Position, told: Mapping[str, Collection[Position]], view: SwarmView, last: Position) -> bool:
    """Whether to believe a report from stage 0 that the run has come to `position`.

    One of two conditions must hold:

    * More than half of stage 0 say that they have come to the position or beyond it, and at least half of each other
      stage are near it: at most MAX_ROUNDS_AHEAD rounds before it, and on its timeline. The timeline does not matter if
      the position follows `last`.
    * More than half of each other stage have come to it. They announce that later than stage 0 reports it, but so no
      peer of stage 0 can hold the report back.

    A peer that has joined since, or lagged for a while, confirms earlier positions by its present one.

    While more than half of each stage's peers are honest, every believed report is true, and every true report is
    believed in time. A dishonest majority of stage 0 can invent up to MAX_ROUNDS_AHEAD rounds, and one of another stage
    can keep all reports from being believed. With a single stage, a dishonest majority can invent anything, and a
    dishonest half can hold all reports back. For rounds that are long over, other peers can confirm the number alone,
    so one peer can invent their losses. Nobody can invent a round after LAST_BELIEVED_ROUND.

    Args:
        told: the positions that each peer of stage 0 reports, by peer id
        last: the position that was believed last
    """
    if position.round_number > LAST_BELIEVED_ROUND:
        return False
    # A peer that has been rewound still confirms the rounds right before the rewind, up to the weights that it kept.
    continues = position.follows(last)
    authors = [peer for peer in view.in_stage(0) if peer.has_work]
    others = [view.serving(stage) for stage in range(1, view.num_stages)]

    def has_come(peer: PeerView) -> bool:
        return any(
            known.follows(position) or (continues and known.is_beyond(position))
            for known in (position_of(peer), *told.get(peer.peer_id, ()))
        )

    def is_near(peer: PeerView) -> bool:
        goes_on = continues or position.is_on_timeline(position_of(peer))
        return goes_on and position.round_number <= peer.round_number + MAX_ROUNDS_AHEAD

    if others and all(2 * sum(map(has_come, peers)) > len(peers) for peers in others):
        return True
    near = all(peers and 2 * sum(map(is_near, peers)) >= len(peers) for peers in others)
    return near and 2 * sum(map(has_come, authors)) > len(authors)
