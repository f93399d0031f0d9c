"""Which of a run's coordinators acts, if there are several.

A coordinator that takes over begins a term with a higher number. The number is the Unix time, so that the term is the
newest even for peers that have not heard of earlier terms, and at least one more than the newest term that the
coordinator knows. The coordinator that acts publishes a growing beat as its sign of life. Any other coordinator takes
over when that beat has stood still for a lease, measured on its own clock.

A coordinator acts only if its latest look shows its own term as the newest. So where all coordinators find the same
records, only one acts. In a partition they do not: each part may have a coordinator that acts, and when the parts meet,
the older one goes on until it finds the newer term. Peers therefore remember the newest term that they have heard of
and follow no older one (runtime/network/assignments.py). So only one coordinator at a time moves a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Beats that a coordinator publishes in the time of a lease; some may be lost on the way.
BEATS_PER_LEASE = 4


@dataclass(frozen=True, slots=True, order=True)
class Term:
    """The time in which one coordinator acts; a newer term compares as greater.

    Attributes:
        number: grows with each takeover; Unix seconds, or more
        coordinator: peer id of the coordinator that acts. If two take over at the same time, the greater id acts.
    """

    number: int
    coordinator: str


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a coordinator at this moment.

    Attributes:
        term: the newest known term; None before the first
        acts: whether it decides, assigns stages and writes checkpoints
        beat: the beat of `term` to publish now; None for no beat
        reason: why it does not act; empty if it does
    """

    term: Term | None
    acts: bool
    beat: int | None
    reason: str


class Leadership:
    """Decides whether one coordinator acts.

    Args:
        me: peer id of this coordinator
        lease_s: for how long the coordinator that acts may be silent
        waits: whether this coordinator waits for a lease before it takes the run's first term
    """

    def __init__(self, *, me: str, lease_s: float, now_s: float, waits: bool):
        self._me = me
        self._lease_s = lease_s
        self._newest: Term | None = None
        self._heard_beat = -1  # of the newest term
        self._heard_s = now_s if waits else now_s - lease_s  # when that beat was new
        self._mine: Term | None = None
        self._beat = -1  # of this coordinator's own term, as last published
        self._beat_s = 0.0
        self._begun_s = 0.0  # when its own term began

    def look(self, beats: Mapping[Term, int], now_s: float, unix_s: int) -> Role:
        """The role of this coordinator after a look into the DHT. Do not call it if the look got no answer.

        Args:
            beats: the newest beat of each term that has a valid warrant
            now_s: monotonic clock
            unix_s: clock of the machine, which may be wrong
        """
        newest = max(beats, default=None)
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest, self._heard_beat, self._heard_s = newest, beats[newest], now_s
        elif self._newest is not None and beats.get(self._newest, -1) > self._heard_beat:
            self._heard_beat, self._heard_s = beats[self._newest], now_s
        if self._mine is not None and (self._mine != self._newest or self._heard_beat > self._beat):
            self._mine = None  # another one took over, or another process uses the run's key and this identity
        if self._mine is None:
            if now_s - self._heard_s < self._lease_s:
                return Role(self._newest, False, None, self._who_acts())
            # If this clock is behind the last coordinator's, peers follow this one only once it has heard of that term.
            number = max(unix_s, 1 if self._newest is None else self._newest.number + 1)
            self._mine = self._newest = Term(number, self._me)
            self._beat, self._heard_beat, self._begun_s = -1, -1, now_s
        beat = None
        if self._beat < 0 or now_s - self._beat_s >= self._lease_s / BEATS_PER_LEASE:
            self._beat, self._beat_s = self._beat + 1, now_s
            beat = self._beat
        return self._role(beat, self._mine in beats, now_s)

    def was_cut_off(self, now_s: float) -> None:
        """Note that a look got no answer: the coordinator that acts may have gone on with its beats all the while."""
        if self._mine is None and self._newest is not None:  # the first one of a run has nobody to wait for
            self._heard_s = max(self._heard_s, now_s)

    def _who_acts(self) -> str:
        if self._newest is None:
            return "the run's first coordinator is waited for"
        if self._newest.coordinator == self._me:
            return f"term {self._newest.number} of this coordinator's last life is not over yet"
        return f"coordinator {self._newest.coordinator} acts in term {self._newest.number}"

    def _role(self, beat: int | None, is_shown: bool, now_s: float) -> Role:
        if now_s - self._begun_s < self._lease_s / BEATS_PER_LEASE:
            return Role(self._mine, False, beat, "its term has just begun: another one's claim may be on its way")
        # Its term may be missing where it has just come into another part of the network, and others act there until
        # they see it. And stop half a lease before another coordinator may take over.
        if not is_shown or now_s - self._heard_s >= self._lease_s / 2:
            return Role(self._mine, False, beat, "its own beat does not come back from the DHT")
        return Role(self._mine, True, beat, "")
