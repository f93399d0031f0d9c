"""The messages of the protocol, and how long it waits. docs/protocol.md says who sends which, and when."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_peer.protocol.epochs import Certified
from swarm_peer.protocol.statements import Accepted, Ballot, EpochId, Seat, Signed, Wish

# The wishes that make an epoch.
Wishes = tuple[Signed[Wish], ...]


@dataclass(frozen=True)
class Alive:
    """The sender lives."""


@dataclass(frozen=True)
class Probe:
    """The receiver shall say that it lives."""


@dataclass(frozen=True)
class Missing:
    """The sender has not heard of these seats, and has voters look."""

    seats: frozenset[Seat]


@dataclass(frozen=True)
class Wanted:
    """A wish for the next epoch."""

    wish: Signed[Wish]


@dataclass(frozen=True)
class Prepare:
    """A proposer asks for promises to accept nothing of an earlier ballot."""

    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """A voter promises that, and says what it has accepted, and in which ballot."""

    ballot: Ballot
    accepted: tuple[Ballot, Wishes] | None


@dataclass(frozen=True)
class Accept:
    """A proposer asks voters to accept the epoch that these wishes make."""

    ballot: Ballot
    wishes: Wishes


@dataclass(frozen=True)
class Vote:
    """A voter has accepted an epoch."""

    accepted: Signed[Accepted]


@dataclass(frozen=True)
class Fetch:
    """The sender asks for the epochs after the one that it names."""


@dataclass(frozen=True)
class News:
    """Epochs with their certificates, in their order."""

    epochs: tuple[Certified, ...]


Body = Alive | Probe | Missing | Wanted | Prepare | Promise | Accept | Vote | Fetch | News


@dataclass(frozen=True)
class Message:
    """A message of one seat to another peer.

    Attributes:
        epoch: that the sender is in
    """

    sender: Seat
    epoch: EpochId
    body: Body


# A message, and the id of the peer that it goes to.
Sent = tuple[str, Message]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a seat waits, in seconds of its own clock.

    Attributes:
        alive_s: between two signs of life
        silent_s: without one until a seat is asked for it
        probe_s: for the answer to that
        resend_s: until a message that has had no effect is repeated
        propose_s: for more wishes, and for each voter of a lower rank, before a voter proposes
        retry_s: for a ballot, before the next one
        lease_s: without a quorum of voters until a leader stops
        offers_s: for all to say which snapshots they hold, once a stage is lost
        key_s: without a quorum of voters until the holder of the run key decides
    """

    alive_s: float = 2.0
    silent_s: float = 6.0
    probe_s: float = 3.0
    resend_s: float = 1.0
    propose_s: float = 0.5
    retry_s: float = 3.0
    lease_s: float = 8.0
    offers_s: float = 4.0
    key_s: float = 60.0
