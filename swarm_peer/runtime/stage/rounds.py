"""The present round of one replica, and where the replica stands.

A `ReplicaRound` holds all that belongs to one round, and is gone with it. Each of its fields is changed by the part
that the field is of; only the workplace begins rounds and changes their phase.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.stage.stage_client import HopResult


class ReplicaRound:
    """All that belongs to one round of a replica.

    Attributes:
        step: where the replica stood when the round began
        admitted: microbatches that are inside
        counted: the microbatches in the accumulator, with their samples by id; the device thread changes it
        replies: the results of the last counted microbatches, for callers that lost the reply; the device thread's, too
    """

    def __init__(self, step: StepState):
        self.step = step
        self.admitted = 0
        self.counted: dict[bytes, int] = {}
        self.replies: OrderedDict[bytes, HopResult] = OrderedDict()

    @property
    def number(self) -> int:
        """The round's number."""
        return self.step.round_number

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
    """

    def __init__(self, changed: Condition, on_phase: Callable[[Phase], None] = lambda _: None):
        self._changed = changed
        self._on_phase = on_phase
        self.step = StepState()
        self.current = ReplicaRound(self.step)

    def begin(self, step: StepState) -> None:
        """Go on to a round, which is not open yet. Its phase is the one that the replica is in."""
        phase = Phase.CATCHING_UP if self.step.phase is Phase.EMPTY else self.step.phase
        self.step = replace(step, phase=phase)
        self._on_phase(phase)
        self.current = ReplicaRound(self.step)
        self._changed.notify()

    def enter(self, phase: Phase) -> None:
        """Enter a phase of the present round. LEFT is the last one, whatever is entered afterwards."""
        if self.step.phase is not Phase.LEFT:
            self.step = replace(self.step, phase=phase)
            self._on_phase(phase)
            self._changed.notify()
