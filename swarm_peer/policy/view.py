"""An immutable snapshot of the swarm, as far as one peer knows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from swarm_peer.policy.trouble import Complaint, Trouble

# The stage of a peer that has joined and has not chosen its stage yet.
UNDECIDED = -1
# A peer announces itself so often within the lifetime of one announcement, since one or two may be lost.
ANNOUNCEMENTS_PER_LIFETIME = 4
# In intervals between announcements: a peer that has been silent for longer is overdue. Announcements may come a
# little late.
OVERDUE_ANNOUNCEMENTS = 1.5


class PeerState(str, Enum):
    """The state of a peer as it announces it.

    A peer that has left its stage says so with the last announcement of that life, its tombstone there. No view shows
    the peer in that state. One whose owner has it paused has left its stage, too: it holds nothing of it, and will come
    back to it.
    """

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"
    PAUSED = "paused"


class Life(NamedTuple):
    """One life of a peer, in one stage: the peer's id survives a move and a restart, and its lives are numbered.

    Attributes:
        incarnation: unix milliseconds at which the life began, larger than those of the lives before; 0 if not known
    """

    peer_id: str
    incarnation: int = 0


class TimeShares(NamedTuple):
    """How a peer has spent its time lately, each in percent of it; the rest of 100 it has waited for microbatches.

    Attributes:
        computing: its device computed
        ending: its device was idle while the round ended: it drained, averaged with stage-mates, or got their state
        joining: its device was idle while the peer joined its stage
    """

    computing: int = 0
    ending: int = 0
    joining: int = 0

    @property
    def waiting(self) -> int:
        """The rest: the round was open, and the device had nothing to compute."""
        return 100 - sum(self)


# By its last characters, people know a peer.
ID_CHARS = 8


class Neighbour(NamedTuple):
    """A peer with which another one exchanges much.

    Attributes:
        peer: the end of its id
        through: the end of the id of the member that carries the connection; empty if none does
        round_trip_ms: of the call that it has answered fastest lately
        bytes_per_s: of tensors that the two exchange, both ways together
    """

    peer: str
    through: str
    round_trip_ms: int
    bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer, by its last announcement.

    Attributes:
        round_number: the round that the peer is in
        samples_per_s: throughput of its stage, forward and backward, as its device is measured and its link is
            limited; 0 if not known yet
        queue: microbatches that it holds
        optimizer_step: that of its weights
        movable: whether the coordinator may move the peer to another stage
        note: why the peer does not serve, or what its trouble is, in words
        work_per_s: the speed that it expects of itself as long as `samples_per_s` is not measured, in units of a
            stage's cost; 0 if not known
        memory_bytes: memory that it may take for a stage, as its operator says; 0 for no limit
        too_large: the stages that it has no memory for
        bandwidth_bytes_per_s: how fast it has downloaded its state; 0 if not measured
        upload_bytes_per_s, download_bytes_per_s: what its owner lends of its link, in bytes of calls; 0 for no limit
        device_samples_per_s: what its device could do in its stage, if the link lets less through; else 0
        since_s: when it entered its state, on the clock of `now_s`; None if not known
        moved_from: the stage that it left to join this one; UNDECIDED if it did not move
        moving_to: the stage that it prepares to move to, or leaves this one for; UNDECIDED if none
        announced: serial number of the announcement
        is_reachable: whether others can dial it; None if that is not known
        relays: ids of those who carry its connections to others, where there is no direct way; some of them
        neighbours: those with which it exchanges most, the busiest first; for people alone
        unreached: ids of peers that it needs, or would need in another stage, and has found no way to; some of them
        incarnation: which life of the peer this is (see Life)
        name: by which people recognise it; empty if it has none
        device: what it computes on, in words, and
        version: of its program; for people alone, as is the name
        time_shares: how it has spent its time lately; None if not known
        metrics_address: IP:PORT of its Prometheus metrics; empty if it shows them to nobody
        trouble: what keeps it from its work while it serves, if anything does
        trouble_since_s: since when, on the clock of `now_s`; None without trouble
    """

    peer_id: str
    stage: int
    state: PeerState
    round_number: int = 0
    samples_per_s: float = 0.0
    queue: int = 0
    optimizer_step: int = 0
    movable: bool = False
    note: str = ""
    work_per_s: float = 0.0
    memory_bytes: int = 0
    too_large: tuple[int, ...] = ()
    bandwidth_bytes_per_s: float = 0.0
    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0
    device_samples_per_s: float = 0.0
    since_s: float | None = None
    is_reachable: bool | None = None
    relays: tuple[str, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    unreached: tuple[str, ...] = ()
    moved_from: int = UNDECIDED
    moving_to: int = UNDECIDED
    announced: int = 0
    incarnation: int = 0
    name: str = ""
    device: str = ""
    version: str = ""
    time_shares: TimeShares | None = None
    metrics_address: str = ""
    trouble: Trouble | None = None
    trouble_since_s: float | None = None

    @property
    def has_work(self) -> bool:
        """Whether it holds weights of its stage, and may have computed in the present round."""
        return self.state in (PeerState.SERVING, PeerState.DRAINING)

    @property
    def life(self) -> Life:
        """The peer in this life."""
        return Life(self.peer_id, self.incarnation)

    def complaining(self, complaint: Complaint) -> PeerView:
        """The peer, if it announces what keeps it from its work: trouble is of peers that serve."""
        if self.state is not PeerState.SERVING:
            return replace(self, note=complaint.words)
        return replace(self, note=complaint.words, trouble=complaint.trouble, trouble_since_s=complaint.since_s)


def fault_of(peer: PeerView, num_stages: int) -> str | None:
    """Why no peer of a run with so many stages can be as this one announces itself; None if one can."""
    stages = range(UNDECIDED, num_stages)
    if not {peer.stage, peer.moved_from, peer.moving_to} <= set(stages):
        named = f"stage {peer.stage}, moved from {peer.moved_from}, moving to {peer.moving_to}"
        return f"{named}; the run has stages 0 to {num_stages - 1}"
    if peer.moving_to != UNDECIDED and peer.stage in (UNDECIDED, peer.moving_to):
        return f"a move from stage {peer.stage} to {peer.moving_to}"
    if peer.stage == UNDECIDED and peer.state in (PeerState.SERVING, PeerState.DRAINING):
        return f"{peer.state.value}, and no stage"
    return None


@dataclass(frozen=True, slots=True)
class SwarmView:
    """All announced peers, sorted by id, so that every peer that sums over them computes the same answer.

    Attributes:
        left: the peers whose last announcement says that they have left their stage; they are in no stage now
    """

    num_stages: int
    peers: tuple[PeerView, ...] = ()
    left: frozenset[str] = frozenset()
    # The same peers by stage and by id: the peers of a stage are asked for at every turn, and there may be thousands.
    _in_stage: Mapping[int, tuple[PeerView, ...]] = field(init=False, repr=False, compare=False)
    _serving: Mapping[int, tuple[PeerView, ...]] = field(init=False, repr=False, compare=False)
    _by_id: Mapping[str, PeerView] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        peers = tuple(sorted(self.peers, key=lambda peer: peer.peer_id))
        object.__setattr__(self, "peers", peers)
        object.__setattr__(self, "_in_stage", _by_stage(peers))
        object.__setattr__(self, "_serving", _by_stage(peer for peer in peers if peer.state is PeerState.SERVING))
        object.__setattr__(self, "_by_id", {peer.peer_id: peer for peer in reversed(peers)})

    def in_stage(self, stage: int) -> tuple[PeerView, ...]:
        """The peers of a stage, in any state."""
        return self._in_stage.get(stage, ())

    def serving(self, stage: int) -> tuple[PeerView, ...]:
        """The peers that serve a stage."""
        return self._serving.get(stage, ())

    def fewest_serving(self) -> int:
        """The number of serving peers in the stage that has the fewest."""
        return min(len(self.serving(stage)) for stage in range(self.num_stages))

    def empty_stages(self) -> list[int]:
        """The stages that no peer serves."""
        return [stage for stage in range(self.num_stages) if not self.serving(stage)]

    def mean_time_shares(self, stage: int) -> tuple[float, float, float] | None:
        """The means of the `TimeShares` of a stage's peers, as fractions; None if no peer there tells its own."""
        known = [peer.time_shares for peer in self.in_stage(stage) if peer.time_shares is not None]
        if not known:
            return None
        computing, ending, joining = (sum(column) / len(known) / 100 for column in zip(*known, strict=True))
        return computing, ending, joining

    def peer(self, peer_id: str) -> PeerView | None:
        """The peer with this id, or None if it is not in the view."""
        return self._by_id.get(peer_id)


def _by_stage(peers: Iterable[PeerView]) -> dict[int, tuple[PeerView, ...]]:
    found: dict[int, list[PeerView]] = {}
    for peer in peers:
        found.setdefault(peer.stage, []).append(peer)
    return {stage: tuple(here) for stage, here in found.items()}
