"""The round that the leader of a stage ends next, and its attempt to do so."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

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
