"""Which of a run's coordinators acts, when several are there.

Each time that a coordinator takes over it begins a term with a higher number: the time of day, so that it is the newest
also for who has not heard of those before, and at least one more than the newest that it knows. The one that acts shows
that it is alive by a beat that grows; who only watches takes over when the beat has stood still for a lease: each
coordinator measures the other's silence on its own clock.

In a partition both sides miss the other's beat, so a lease alone cannot keep two from acting. Peers therefore remember
the newest term that they have heard of and follow no older one (runtime/orders.py): each is moved by one coordinator at
a time, and when the partition heals, the older term is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Beats of a lease; some may be lost on the way.
BEATS_PER_LEASE = 4


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """Attributes:
    number: grows with each takeover; Unix seconds, or more
    coordinator: id of the one that acts in it; of two that take over at the same time, the greater one does
    """

    number: int
    coordinator: str


@dataclass(frozen=True, slots=True)
class Role:
    """What a coordinator is to do now.

    Attributes:
        term: the newest one; None before the first
        acts: decide, give orders, write checkpoints
        beat: publish this beat of `term`; None for not now
        reason: why it does not act; empty if it does
    """

    term: Term | None
    acts: bool
    beat: int | None
    reason: str


class Leadership:
    """One coordinator's part in it.

    Args:
        me: its peer id
        lease_s: how long the one that acts may be silent
        waits: leave the run's first term to another, if there is one that takes it
    """

    def __init__(self, me: str, lease_s: float, now_s: float, waits: bool):
        self._me = me
        self._lease_s = lease_s
        self._newest: Term | None = None
        self._heard_beat = -1  # of the newest term
        self._heard_s = now_s if waits else now_s - lease_s  # when that beat was new
        self._mine: Term | None = None
        self._beat = -1  # of mine, as published last
        self._beat_s = 0.0
        self._begun_s = 0.0  # when mine began

    def look(self, beats: Mapping[Term, int], now_s: float, unix_s: int) -> Role:
        """Args:
        beats: the newest known of each term, by word of the run key; a look that got no answer is none
        unix_s: what the clock says, which may be wrong
        """
        newest = max(beats, default=None)
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest, self._heard_beat, self._heard_s = newest, beats[newest], now_s
        elif self._newest is not None and beats.get(self._newest, -1) > self._heard_beat:
            self._heard_beat, self._heard_s = beats[self._newest], now_s
        if self._mine is not None and (self._mine != self._newest or self._heard_beat > self._beat):
            self._mine = None  # taken over, or the run's key and this identity are in use elsewhere
        if self._mine is None:
            if now_s - self._heard_s < self._lease_s:
                return Role(self._newest, False, None, _who(self._newest))
            # Where the clock is behind the last coordinator's, nobody follows until that one's term has been heard of.
            number = max(unix_s, 1 if self._newest is None else self._newest.number + 1)
            self._mine = self._newest = Term(number, self._me)
            self._beat, self._heard_beat, self._begun_s = -1, -1, now_s
        beat = None
        if self._beat < 0 or now_s - self._beat_s >= self._lease_s / BEATS_PER_LEASE:
            self._beat, self._beat_s = self._beat + 1, now_s
            beat = self._beat
        return self._role(beat, now_s)

    def _role(self, beat: int | None, now_s: float) -> Role:
        if now_s - self._begun_s < self._lease_s / BEATS_PER_LEASE:
            return Role(self._mine, False, beat, "its term has just begun: another one's claim may be on its way")
        # Half a lease before another one may take over.
        if self._heard_beat < 0 or now_s - self._heard_s >= self._lease_s / 2:
            return Role(self._mine, False, beat, "its own beat does not come back from the DHT")
        return Role(self._mine, True, beat, "")


def _who(term: Term | None) -> str:
    if term is None:
        return "the run's first coordinator is waited for"
    return f"coordinator {term.coordinator} acts in term {term.number}"
