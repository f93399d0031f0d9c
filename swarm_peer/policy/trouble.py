"""The troubles of peers: which there are, and how a peer tells that it is in one. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Different batches that have to fail before the weights are to blame: each one is launched up to twenty times.
BATCHES_OF_DIVERGED = 3
# Of the batches that failed last, so many are remembered: one that fails for another reason must not count for ever.
BATCHES_REMEMBERED = 8
# For so long after the last failure, a peer that has nothing under way is still in trouble: it launches again in a
# moment, unless others have filled the global batch.
IDLE_S = 10.0
# Updates in a row that are left out before a peer complains: one may be due to a burst of odd samples.
UPDATES_MISSED = 3


class Trouble(str, Enum):
    """A trouble that keeps a peer from its work, or from a part of it; the worst first.

    NO_VOTERS: it does not hear most of those who vote on who takes part, and nothing is decided without them
    NO_STATE: it lacks the weights that its stage goes on with, and nobody gives them
    DIVERGED: every microbatch that it sends through the stages fails, since the numbers are not finite
    FAILING: every microbatch that it sends through the stages fails
    NO_UPDATES: no gradient of its stage has been finite for some rounds, so its weights stay as they are
    NO_DATA: it waits for samples to train on
    DATA_UNREAD: it cannot read a part of the data, and trains on
    NO_SNAPSHOTS: it cannot keep snapshots, and trains on
    """

    NO_VOTERS = "no_voters"
    NO_STATE = "no_state"
    DIVERGED = "diverged"
    FAILING = "failing"
    NO_UPDATES = "no_updates"
    NO_DATA = "no_data"
    DATA_UNREAD = "data_unread"
    NO_SNAPSHOTS = "no_snapshots"

    @property
    def holds_up(self) -> bool:
        """Whether a peer in this trouble does none of its work."""
        return self not in (Trouble.DATA_UNREAD, Trouble.NO_SNAPSHOTS)


class Complaint(NamedTuple):
    """A peer's account of its trouble.

    Attributes:
        since_s: when it began, on the peer's own clock
        words: the cause, for people
    """

    trouble: Trouble
    since_s: float
    words: str


def worst(complaints: Iterable[Complaint | None]) -> Complaint | None:
    """The one that a peer announces, since it has room for one."""
    order = list(Trouble)
    return min(filter(None, complaints), key=lambda each: order.index(each.trouble), default=None)


@dataclass(slots=True)
class _Failures:
    """The launches that have failed since the last success.

    Attributes:
        reason: of the newest failure
        finite: whether the last failure of each batch was another one than numbers that are not finite, by batch; the
            batch that failed last comes last
    """

    since_s: float
    last_s: float
    reason: str
    finite: dict[object, bool]


class LaunchRecord:
    """Whether the microbatches that one peer of stage 0 launches succeed, and why not.

    A launch that began before the first failure may still succeed: a microbatch may take ten minutes. So nothing is
    amiss until it has failed as well.
    """

    def __init__(self) -> None:
        self._number = 0
        self._under_way: dict[int, float] = {}
        self._failures: _Failures | None = None

    def begin(self, now_s: float) -> int:
        """Note a launch. Returns its number; `end` has to follow, whatever becomes of the launch."""
        self._number += 1
        self._under_way[self._number] = now_s
        return self._number

    def end(self, number: int) -> None:
        """Note that a launch is over; if it has succeeded or failed, say that as well."""
        del self._under_way[number]

    def forget(self) -> None:
        """Forget the failures: a microbatch has come through, or they say nothing of these weights and peers."""
        self._failures = None

    def failed(self, batch: object, reason: str, now_s: float, *, is_finite: bool) -> None:
        """Note a failure.

        Args:
            batch: the same for all launches of one batch
            is_finite: whether another thing is the cause than numbers that are not finite
        """
        known = self._failures or _Failures(now_s, now_s, reason, {})
        known.last_s, known.reason = now_s, reason
        known.finite.pop(batch, None)
        known.finite[batch] = is_finite
        if len(known.finite) > BATCHES_REMEMBERED:
            del known.finite[next(iter(known.finite))]
        self._failures = known

    def complaint(self, now_s: float) -> Complaint | None:
        """The trouble that follows; None if a microbatch has come through since, or may yet."""
        known = self._failures
        if known is None or any(began_s <= known.since_s for began_s in self._under_way.values()):
            return None
        if not self._under_way and now_s - known.last_s > IDLE_S:
            return None
        has_diverged = len(known.finite) >= BATCHES_OF_DIVERGED and not any(known.finite.values())
        trouble = Trouble.DIVERGED if has_diverged else Trouble.FAILING
        return Complaint(trouble, known.since_s, f"every microbatch fails: {known.reason}")


class UpdateRecord:
    """Whether the updates of one replica change its weights, or are left out since no gradient was finite."""

    def __init__(self) -> None:
        self._is_finite = True  # what this replica has computed itself in the present round
        self._num_missed = 0
        self._since_s = 0.0

    def begin(self) -> None:
        """Begin with weights that others have given."""
        self._is_finite, self._num_missed = True, 0

    def not_finite(self) -> None:
        """Note that what this replica has computed in the present round is not finite."""
        self._is_finite = False

    def end_round(self, now_s: float, *, is_skipped: bool) -> None:
        """Note the end of a round.

        Args:
            is_skipped: whether the weights have stayed as they were, as stage-mates have agreed
        """
        if not is_skipped:
            self._num_missed = 0
        elif not self._is_finite:
            self._since_s = self._since_s if self._num_missed else now_s
            self._num_missed += 1
        self._is_finite = True

    def complaint(self) -> Complaint | None:
        """The trouble that follows, if any."""
        if self._num_missed < UPDATES_MISSED:
            return None
        words = f"the last {self._num_missed} updates were left out: no gradient is finite"
        return Complaint(Trouble.NO_UPDATES, self._since_s, words)
