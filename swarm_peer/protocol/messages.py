"""The messages of the protocol, and how long it waits. docs/protocol.md says who sends which, and when."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_peer.protocol.epochs import Certified
from swarm_peer.protocol.log import Blamed, Close, Committed, Cut, Done, Have, Part, Pass
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
class Recall:
    """The sender asks for an epoch of the past that a statement is about, with all that certifies it."""

    past: EpochId


@dataclass(frozen=True)
class News:
    """Epochs with their certificates, in their order."""

    epochs: tuple[Certified, ...]


# --- rounds


@dataclass(frozen=True)
class Counted:
    """A member of stage 0 says what it has done."""

    done: Signed[Done]


@dataclass(frozen=True)
class Head:
    """The leader of a stage says which round comes next there, and from which heads the newest ones were computed.

    Attributes:
        bases: of rounds, the last one of which is the newest that can be open
    """

    stage: int
    round: int
    bases: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Begin:
    """The leader says from which heads the open round is computed: what a member has computed from others is void."""

    stage: int
    round: int
    base: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """An entry of another stage, to a leader whose log lacks what that was computed from."""

    committed: Committed


@dataclass(frozen=True)
class Status:
    """A member says where it stands, and asks for the leader's log.

    Attributes:
        state: hash of the entry that its weights embody
        said: what it has signed for the cut of the open round, and that cut
    """

    stage: int
    committed: tuple[Committed, ...]
    state: str
    closes: tuple[Close, ...]
    said: tuple[tuple[Cut, Signed[Have] | Signed[Pass]], ...]


@dataclass(frozen=True)
class Entries:
    """The log of a stage, as its leader has it.

    Attributes:
        reign: the epoch since which it leads
        lost: an entry of another stage, which was computed from one that is gone; None if there is none
    """

    stage: int
    reign: EpochId
    committed: tuple[Committed, ...]
    lost: Committed | None


@dataclass(frozen=True)
class Ready:
    """A member has nothing inside, and says what it brings.

    Attributes:
        head: of its log, which its weights embody
    """

    stage: int
    round: int
    head: str
    part: Part


@dataclass(frozen=True)
class Cutting:
    """The leader says who is in a round, and who brings what."""

    cut: Cut


@dataclass(frozen=True)
class Said:
    """A member has the result of a cut, or agrees that it is left out."""

    stage: int
    statement: Signed[Have] | Signed[Pass]


@dataclass(frozen=True)
class Blame:
    """A member has no result of a cut, and says who is to blame."""

    stage: int
    statement: Signed[Blamed]


@dataclass(frozen=True)
class Commit:
    """The leader has committed an entry."""

    committed: Committed


Rounds = Counted | Close | Head | Begin | Evidence | Status | Entries | Ready | Cutting | Said | Blame | Commit
Body = Alive | Probe | Missing | Wanted | Prepare | Promise | Accept | Vote | Fetch | Recall | News | Rounds


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
        status_s: for the members of a stage to say where they stand, once its leader is new
        ready_s: for the others, once a member is ready
        average_s: for the members of a cut to say that they have its result
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
    status_s: float = 3.0
    ready_s: float = 10.0
    average_s: float = 60.0
