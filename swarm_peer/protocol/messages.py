"""The messages of the protocol, and how long it waits. docs/protocol.md says who sends which, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_peer.policy.data.ranges import SliceId
from swarm_peer.protocol.epochs import Certified
from swarm_peer.protocol.grants import Grant, Wants
from swarm_peer.protocol.log import Base, Blamed, Close, Committed, Cut, Done, EpochOf, Have, Name, Part, Pass
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
    """A member of stage 0 says what it has done, and what it would like to do.

    Attributes:
        guests: contributions of the open round that others have given it
    """

    done: Signed[Done]
    wants: Wants
    guests: tuple[Name, ...]


@dataclass(frozen=True)
class Granted:
    """The leader of stage 0 says what a member may read and launch."""

    grant: Grant


@dataclass(frozen=True)
class Head:
    """The newest entries of a stage, which the rounds of others are computed from: of its leader, or as asked."""

    stage: int
    committed: tuple[Committed, ...]


@dataclass(frozen=True)
class WantHead:
    """A leader asks the members of another stage for its head, since it has not heard that of their leader."""

    stage: int


@dataclass(frozen=True)
class Begin:
    """The leader says from which heads the open round is computed: what a member has computed from others is void.

    Attributes:
        is_rooted: whether members tell the root of the state that they begin the round with
    """

    stage: int
    round: int
    base: Base
    is_rooted: bool


@dataclass(frozen=True)
class WantRoot:
    """A newcomer asks for the log, and a leader for the root of a coming state, which it can take from anybody then."""

    stage: int


@dataclass(frozen=True)
class Evidence:
    """An entry of another stage, to a leader whose log lacks what that was computed from."""

    committed: Committed


@dataclass(frozen=True)
class Status:
    """A member says where it stands, and asks for the leader's log.

    Attributes:
        committed: the newest entries
        state: hash of the entry that its weights embody
        said: what it has signed for the cut of the open round, and that cut
        reads: slices of the data, at stage 0
    """

    stage: int
    committed: tuple[Committed, ...]
    state: str
    closes: tuple[Close, ...]
    said: tuple[tuple[Cut, Signed[Have] | Signed[Pass]], ...]
    reads: tuple[SliceId, ...]


@dataclass(frozen=True)
class Entries:
    """The newest entries of a stage's log, as its leader has it.

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
        root: of these weights, if it is asked for
    """

    stage: int
    round: int
    head: str
    root: str
    part: Part


@dataclass(frozen=True)
class Cutting:
    """The leader says who is in a round, and who brings what.

    Attributes:
        shown: the entries of other stages that have taken the place of those that the round's counts were computed from
    """

    cut: Cut
    shown: tuple[Committed, ...] = ()


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


Batches = Counted | Granted | Close
Stages = Head | WantHead | Begin | WantRoot | Evidence | Status | Entries
Rounds = Batches | Stages | Ready | Cutting | Said | Blame | Commit
Body = Alive | Probe | Missing | Wanted | Prepare | Promise | Accept | Vote | Fetch | Recall | News | Rounds


# A message of 1 MiB holds so many signed statements, and its receiver keeps so many past epochs that they are about.
MAX_STATEMENTS = 1500
MAX_EPOCHS = 32


def that_fit(entries: Sequence[Committed], epoch_of: EpochOf) -> tuple[Committed, ...]:
    """The newest of some entries: those that one message can hold, and whose epochs are known; at least one."""
    told, epochs, num_statements = list[Committed](), set[EpochId](), 0
    for committed in reversed(entries):
        counts = [signed.body for signed in committed.close.counts]
        cut = committed.entry.cut
        num_statements += len(cut.brings) + len(committed.agreement) + sum(1 + len(each.receipts) for each in counts)
        its = {cut.epoch, *(each.epoch for each in counts)}
        its |= {receipt.body.epoch for each in counts for receipt in each.receipts}
        epochs |= its
        is_known = all(epoch_of(past) is not None for past in its)
        if told and (num_statements > MAX_STATEMENTS or len(epochs) > MAX_EPOCHS or not is_known):
            break
        told.insert(0, committed)
    return tuple(told)


def epochs_in(body: Rounds) -> set[EpochId]:
    """The epochs that a message's statements are about."""
    entries, closes, cuts = tuple[Committed, ...](), list[Close](), set[EpochId]()
    match body:
        case Close():
            closes = [body]
        case Cutting(cut, entries):
            cuts = {cut.epoch, *(signed.body.epoch for part in cut.parts for signed in part.given)}
        case Ready():
            cuts = {signed.body.epoch for signed in body.part.given}
        case Commit(committed) | Evidence(committed):
            entries = (committed,)
        case Entries():
            entries = body.committed if body.lost is None else (*body.committed, body.lost)
        case Head():
            entries = body.committed
        case Status():
            entries, closes, cuts = body.committed, list(body.closes), {cut.epoch for cut, _ in body.said}
    closes += [committed.close for committed in entries]
    cuts |= {committed.entry.cut.epoch for committed in entries}
    counts = [signed.body for close in closes for signed in close.counts]
    return cuts | {done.epoch for done in counts} | {each.body.epoch for done in counts for each in done.receipts}


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
        relent_s: since an epoch began, until a voter accepts a restart that goes back further than it has to
        key_s: without a quorum of voters until the holder of the run key decides
        status_s: for the members of a stage to say where they stand, once its leader is new
        synced_s: for those that may know of an entry which nobody else knows
        ready_s: for the others, once a member is ready
        average_s: for the members of a cut to say that they have its result
        share_s: without a microbatch until others may take a seat's share of the batch
        others_s: for the others, once most members of the cut have its result, and as long as these took
        heads_s: for the leaders of other stages to tell their heads, before their members are asked
        stuck_s: for the leader in all, before a member finds that it is stuck; longer than ready_s and average_s
    """

    alive_s: float = 2.0
    silent_s: float = 6.0
    probe_s: float = 3.0
    resend_s: float = 1.0
    propose_s: float = 0.5
    retry_s: float = 3.0
    lease_s: float = 8.0
    offers_s: float = 4.0
    relent_s: float = 30.0
    key_s: float = 60.0
    status_s: float = 3.0
    synced_s: float = 12.0
    ready_s: float = 10.0
    average_s: float = 60.0
    share_s: float = 60.0
    others_s: float = 3.0
    heads_s: float = 20.0
    stuck_s: float = 90.0
