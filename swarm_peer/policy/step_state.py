"""Where one replica stands in the run: its round, the weights that the round began with, and how far the round is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline


class Phase(Enum):
    """How far a replica is with its present round."""

    EMPTY = "empty"  # it has no weights yet
    CATCHING_UP = "catching up"  # it has weights, and has not taken in any microbatch yet
    OPEN = "open"  # microbatches of the round come in
    ENDING = "ending"  # no more come in: the stage-mates average, or the replica goes to another round
    LEFT = "left"  # it takes part in no further round


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """One replica's place in the run. Its workplace publishes it; nobody keeps a copy of what it says.

    Attributes:
        timeline: the unbroken line of updates that led to the weights
        history_hash: of the entry of the stage's log that the weights embody
        lag: updates of earlier rounds that these weights have yet to have
        ledger: at stage 0, the samples that these updates have counted, encoded
        weights_version: that of the trainer (StageTrainer.weights_version) while it holds these weights
        began_s: when the replica began the round, on the context's clock
    """

    round_number: int = 0
    timeline: Timeline = FIRST_TIMELINE
    history_hash: str = ""
    lag: int = 0
    ledger: bytes = b""
    weights_version: int = -1
    began_s: float = 0.0
    phase: Phase = Phase.EMPTY

    @property
    def weights_round(self) -> int:
        """The first round that began with the weights: where updates are delayed, a later one goes on with them."""
        return self.round_number - self.lag

    @property
    def optimizer_step(self) -> int:
        """How many updates the weights have had."""
        return self.timeline.optimizer_step_at(self.weights_round)
