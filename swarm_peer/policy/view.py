"""An immutable snapshot of the swarm, as far as one peer knows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# The stage of a peer that has joined and has not chosen its stage yet.
UNDECIDED = -1


class PeerState(str, Enum):
    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PeerView:
    """What one peer last announced.

    Attributes:
        samples_per_s: measured compute throughput of its stage, forward and backward; 0 if not measured yet
        queue: microbatches that it holds
        updates: optimizer updates in its weights
        movable: it may be moved to another stage
        note: what keeps it from serving, in words
        work_per_s: what it expects of itself where `samples_per_s` is not measured, in units of a stage's cost; 0 if
            not known
        memory_bytes: what it has for a stage; 0 if not known, which is taken for enough
        bandwidth_bytes_per_s: at which it has downloaded; 0 if not measured
        since_s: when it came to be in this state, on the clock of `now_s`; None if not known
        moved_from: the stage that it has left for this one, as long as it does not serve here; else UNDECIDED
        formerly: its id before it moved
        announced: serial number of the announcement that this was read from
    """

    peer_id: str
    stage: int
    state: PeerState
    step: int = 0
    samples_per_s: float = 0.0
    queue: int = 0
    updates: int = 0
    movable: bool = False
    note: str = ""
    work_per_s: float = 0.0
    memory_bytes: int = 0
    bandwidth_bytes_per_s: float = 0.0
    since_s: float | None = None
    moved_from: int = UNDECIDED
    formerly: str = ""
    announced: int = 0


@dataclass(frozen=True, slots=True)
class SwarmView:
    """All announced peers, sorted by id, so that every peer that folds over them computes the same answer."""

    num_stages: int
    peers: tuple[PeerView, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "peers", tuple(sorted(self.peers, key=lambda peer: peer.peer_id)))

    def in_stage(self, stage: int) -> tuple[PeerView, ...]:
        return tuple(peer for peer in self.peers if peer.stage == stage)

    def serving(self, stage: int) -> tuple[PeerView, ...]:
        return tuple(peer for peer in self.in_stage(stage) if peer.state is PeerState.SERVING)

    def fewest_serving(self) -> int:
        """Peers that serve the stage that has the fewest."""
        return min(len(self.serving(stage)) for stage in range(self.num_stages))

    def peer(self, peer_id: str) -> PeerView | None:
        return next((peer for peer in self.peers if peer.peer_id == peer_id), None)
