"""The line of updates that led to a state, by where it began: a run may go back to an earlier state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Timeline:
    """An unbroken line of updates, by where it began.

    Rounds never go back, so the number of a round tells which timeline it belongs to. A rewind begins a new timeline
    with a higher first round and a lower optimizer step. A newer timeline compares as greater.

    Attributes:
        first_round: the round that the timeline began with
        first_optimizer_step: the optimizer step of the weights that it began with
        created_at_round: the first round that ever began with those weights. Weights of the same optimizer step on two
            timelines differ in it.
    """

    first_round: int
    first_optimizer_step: int
    created_at_round: int

    def optimizer_step_at(self, round_number: int) -> int:
        """The optimizer step of the weights that the round begins with."""
        return self.first_optimizer_step + round_number - self.first_round

    def creation_round(self, round_number: int) -> int:
        """The first round that ever began with the weights that `round_number` begins with."""
        return self.created_at_round if round_number == self.first_round else round_number

    def allows_round(self, round_number: int) -> bool:
        """Whether a peer on this timeline can be in the round: each update takes a round of its own."""
        return self.first_optimizer_step <= self.created_at_round <= self.first_round <= round_number


FIRST_TIMELINE = Timeline(0, 0, 0)
