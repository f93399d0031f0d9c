"""Whether the coordinator of a run lives, for those who look at the run from outside. Pure: time is an argument."""

from __future__ import annotations

from swarm_peer.policy.leadership import Term
from swarm_peer.wire.records import CoordinationRecord


class CoordinatorPulse:
    """Hears the beats of a run's coordinators. A record outlives its coordinator by a day, but its beat stands still.

    Args:
        lease_s: a coordinator that has been silent for so long does not direct the run any more
    """

    def __init__(self, lease_s: float):
        self._lease_s = lease_s
        self._heard: tuple[Term, int] | None = None
        self._heard_s = 0.0

    def living(
        self, newest: tuple[Term, CoordinationRecord] | None, now_s: float
    ) -> tuple[Term, CoordinationRecord] | None:
        """The newest term and its coordinator's record, or None if that coordinator has fallen silent.

        Within a lease of the first look nobody can tell, and the coordinator counts as living.
        """
        if newest is None:
            return None
        term, record = newest
        if self._heard != (term, record.beat):
            self._heard, self._heard_s = (term, record.beat), now_s
        return newest if now_s - self._heard_s < self._lease_s else None
