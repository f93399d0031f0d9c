"""The rounds of one replica: the present one, and the one before it, which stage-mates may still ask about.

A `ReplicaRound` holds all that belongs to one round, and is gone with it. Each of its fields is changed by the part
that the field is of; only the step loop begins rounds and changes their phase.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from swarm_peer.errors import RoundClosed
from swarm_peer.policy.data.ranges import SampleId, WindowRange, ranges_of
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.voting import AveragingVote
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.stage.stage_client import HopResult


@dataclass(slots=True)
class Transfer:
    """A leaving stage-mate's gradient that is arriving.

    Attributes:
        data: its bytes, uint8
        received: offsets of the chunks that have arrived
        round_number: the round in which the last of them has
    """

    id: bytes
    data: torch.Tensor
    received: set[int]
    round_number: int = 0


class ReplicaRound:
    """All that belongs to one round of a replica.

    Attributes:
        step: where the replica stood when the round began
        admitted: microbatches that are inside
        counted: the microbatches in the accumulator, with their samples by id; the device thread changes it
        replies: the results of the last counted microbatches, for callers that lost the reply; the device thread's, too
        vacated: places in the global batch that this peer has claimed for microbatches which it dropped
        validated: whether this peer has begun its share of the round's validation
        transfers: gradients of leaving stage-mates that are arriving, by caller; each has at most one
        given: samples for the average that ends this round which leaving stage-mates have handed over, where that
            average has begun before, by giver; the device thread's, too
        attempt: the try of averaging that this peer is ready for; None while microbatches are inside
        asked_attempt: the newest try that a stage-mate has asked this peer about
        samples: number of samples that this peer brings to the averaging
        next_samples: the same for the averaging of the next round, if stage-mates begin with it when this round ends
        weights_digest: of this peer's weights, if stage-mates compare them in this round
        vote: this peer's newest vote on the result; None before the first
        settled_with: the members of the stage that a round without an average ended with, this peer included
        names: the samples that this peer of stage 0 has counted in this round itself
        earlier: those of the rounds before it that this peer brings to the next average as well
        taken_over: the samples of leaving stage-mates whose work it brings, as they say; the device thread's, too
        brings: the samples that this peer brings to the average that ends a period; empty before that
    """

    def __init__(self, step: StepState):
        self.step = step
        self.admitted = 0
        self.counted: dict[bytes, int] = {}
        self.replies: OrderedDict[bytes, HopResult] = OrderedDict()
        self.vacated = 0
        self.validated = False
        self.transfers: dict[str, Transfer] = {}
        self.given: dict[str, int] = {}
        self.attempt: int | None = None
        self.asked_attempt = 0
        self.samples = 0
        self.next_samples = 0
        self.weights_digest = ""
        self.vote: AveragingVote | None = None
        self.settled_with: frozenset[str] = frozenset()
        self.names: list[SampleId] = []
        self.earlier: tuple[WindowRange, ...] = ()
        self.taken_over: tuple[WindowRange, ...] = ()
        self.brings: tuple[WindowRange, ...] = ()

    @property
    def number(self) -> int:
        """The round's number."""
        return self.step.round_number

    @property
    def held(self) -> tuple[WindowRange, ...]:
        """The samples whose work this peer of stage 0 brings to the next average; those that it holds twice, twice."""
        return *self._own, *self.taken_over

    @property
    def _own(self) -> tuple[WindowRange, ...]:
        return *self.earlier, *ranges_of(self.names)

    def go_on_from(self, before: ReplicaRound) -> None:
        """Bring what was held in the round before to the next average as well."""
        self.earlier, self.taken_over = before._own, before.taken_over

    def forget_counted(self) -> None:
        """Note that the accumulator was emptied; in the device thread."""
        self.counted.clear()
        self.replies.clear()


class RoundBook:
    """The rounds of one replica. Belongs to the event loop's thread; any thread may read `current`.

    Args:
        on_phase: told of each phase that the replica enters

    Attributes:
        step: where the replica stands now
        current: the round that is open or ending
        previous: the round before it; None if this replica has not been in one
    """

    def __init__(self, changed: Condition, on_phase: Callable[[Phase], None] = lambda _: None):
        self._changed = changed
        self._on_phase = on_phase
        self.step = StepState()
        self.current = ReplicaRound(self.step)
        self.previous: ReplicaRound | None = None

    def begin(self, step: StepState, *, keeps_transfers: bool = False, keeps_work: bool = False) -> None:
        """Go on to a round, which is not open yet. Its phase is the one that the replica is in.

        Args:
            keeps_transfers: what leaving stage-mates have begun to hand over fits this round as well
            keeps_work: what this peer has computed so far goes into the next average as well
        """
        phase = Phase.CATCHING_UP if self.step.phase is Phase.EMPTY else self.step.phase
        self.step = replace(step, phase=phase)
        self._on_phase(phase)
        transfers = self.current.transfers if keeps_transfers else {}
        # Stage-mates still ask about the round that is over. Its transfers and replies are large, and of no more use.
        self.current.transfers = {}
        self.current.replies.clear()
        self.previous, self.current = self.current, ReplicaRound(self.step)
        self.current.transfers = transfers
        if keeps_work:
            self.current.go_on_from(self.previous)
        self._changed.notify()

    def enter(self, phase: Phase) -> None:
        """Enter a phase of the present round. LEFT is the last one, whatever is entered afterwards."""
        if self.step.phase is not Phase.LEFT:
            self.step = replace(self.step, phase=phase)
            self._on_phase(phase)
            self._changed.notify()

    def find(self, round_number: int) -> ReplicaRound | None:
        """The present round or the previous one, if it has this number."""
        known = (self.current, self.previous)
        return next((known for known in known if known is not None and known.number == round_number), None)

    def is_past(self, round_number: int) -> bool:
        """Whether a round is over here."""
        return round_number < self.step.round_number

    def refusal(self, round_number: int) -> RoundClosed:
        """The error that refuses a call of a round that is over here."""
        return RoundClosed(f"round {round_number} is over in this stage", self.step.round_number)
