"""The round that the leader of a stage ends next, and its attempt to do so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Blamed, Committed, Cut, Have, Pass
from swarm_peer.protocol.messages import Ready
from swarm_peer.protocol.statements import Seat, Signed


@dataclass
class Attempt:
    """One cut of a round, as the leader sees it.

    Attributes:
        most_s: when its entry was agreed
        failed_s: when most of its members had said that they have no result
        left_out: those with whom most averaged the one before in vain
    """

    cut: Cut
    shown: tuple[Committed, ...]
    since_s: float
    most_s: float | None = None
    failed_s: float | None = None
    left_out: Collection[Seat] = ()
    said: dict[Seat, Signed[Have] | Signed[Pass]] = field(default_factory=dict)
    blamed: dict[Seat, Signed[Blamed]] = field(default_factory=dict)

    @property
    def silent(self) -> set[Seat]:
        """Its members that have said nothing of a result."""
        return {seat for seat in self.cut.seats if seat not in self.said and seat not in self.blamed}

    def has_result(self, epoch: Epoch) -> bool:
        """Whether most of its members have the same result."""
        having = defaultdict[str, set[Seat]](set)
        for seat, signed in self.said.items():
            if isinstance(signed.body, Have):
                having[signed.body.digest].add(seat)
        return any(epoch.is_quorum(seats, self.cut.seats) for seats in having.values())

    def accuses_nobody(self, epoch: Epoch) -> bool:
        """Whether it has failed, and neither accusations nor silence tell a member that is to blame from the others."""
        accused = {seat for signed in self.blamed.values() for seat in signed.body.seats} & set(self.cut.seats)
        return not self.has_result(epoch) and not accused and self.silent in (set(), set(self.cut.seats))


@dataclass
class Round:
    """The round that comes next, as the leader sees it.

    Attributes:
        late: those who have kept the others waiting
        learning: those who have asked for the log: what they were told of the round before had no effect
        unreached: those with whom most of a cut have averaged in vain
        tried: those who were in a cut
    """

    number: int
    ready: dict[Seat, Ready] = field(default_factory=dict)
    first_ready_s: float = 0.0
    late: set[Seat] = field(default_factory=set)
    learning: set[Seat] = field(default_factory=set)
    unreached: set[Seat] = field(default_factory=set)
    tried: set[Seat] = field(default_factory=set)
    attempt: Attempt | None = None
