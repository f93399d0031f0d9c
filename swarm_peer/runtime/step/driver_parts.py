"""The parts that the driver of a seat's rounds works with: a workplace, an averager, and sources of states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.log import Committed, Cut
from swarm_peer.protocol.statements import Seat
from swarm_peer.runtime.state.states import Taken
from swarm_peer.runtime.step.named_gradients import Held


class AverageFailed(Exception):
    """There is no average of a cut.

    Attributes:
        blamed: the members that were silent, or have sent what does not fit
    """

    def __init__(self, reason: str, blamed: frozenset[Seat] = frozenset()):
        super().__init__(reason)
        self.blamed = blamed


@dataclass(frozen=True)
class SeatWeights:
    """Where a seat stands: the weights that its rounds begin with.

    Attributes:
        entry: that the weights embody, and the round that begins after it
        ledger: after that entry, at stage 0
    """

    restart: Restart
    entry: str
    round: int
    ledger: Ledger | None


class Averager(Protocol):
    """Makes the average of what the members of a cut bring: the same numbers at all of them."""

    async def average(self, cut: Cut, means: Sequence[Tensor], weight: int) -> list[Tensor]:
        """The mean over all targets of the members of a cut.

        Args:
            means: over this member's targets; CPU, fp32; not changed
            weight: number of these targets

        Raises:
            AverageFailed: some member has not done its part
        """

    def begin(self, restart: Restart) -> None:
        """Go on from a restart, and from nothing that averages have left over."""

    def settle(self, cut: Cut) -> None:
        """Learn that an entry holds a cut; more than once, it may be."""


class Workplace(Protocol):
    """A stage's weights, gradient accumulator and microbatches."""

    def open(self, number: int, standing: SeatWeights) -> None:
        """Let microbatches of a round in, which are computed from these weights."""

    def close(self) -> None:
        """Let none in."""

    def fall_behind(self) -> None:
        """Turn away those that wait for the next round as well: this seat may lack its weights for long."""

    async def drain(self, number: int) -> None:
        """Wait until no microbatch of a round is inside; none is let in any more."""

    async def contribution(self, number: int) -> tuple[list[Tensor], int]:
        """Take what was computed in a round out of the accumulator: means over targets, and their number.

        To be called once at the end of each round: where it has no average, a period's work grows by it.
        """

    async def discard(self) -> None:
        """Empty the accumulator."""

    async def give_up(self) -> None:
        """Empty the accumulator, and drop what was computed in rounds that have ended without an average."""

    async def difference(self) -> list[Tensor]:
        """Give what this seat would bring to the average that ends the period, in the middle of it."""

    async def try_own(self, means: Sequence[Tensor]) -> None:
        """Where updates are eager, begin with this seat's own gradient of the round before, until `apply`."""

    async def apply(self, averages: Sequence[Tensor], word: str) -> None:
        """Update the weights; with no averages, as a round ends that has none.

        Args:
            word: what the run key had said, in the epoch in which the round was agreed
        """

    async def root(self, standing: SeatWeights) -> str:
        """The root of the state, whose weights are these."""

    async def digest(self, averages: Sequence[Tensor]) -> str:
        """A digest of an update, the same at all members."""

    async def mean(self, contributions: Sequence[Held]) -> Held:
        """The mean of several contributions over all of their targets, and their number; zeros of none."""


class Sources(Protocol):
    """Where a seat takes over what it lacks."""

    async def update(self, committed: Committed) -> list[Tensor]:
        """The averages of an entry, checked by its digest.

        Raises:
            CallError: nobody gives them
        """

    async def state(self) -> Taken:
        """Have the weights become those of a stage-mate, at one of the newest entries of the log.

        Raises:
            CallError: nobody gives one
        """

    def keep_weights(self) -> None:
        """Have the weights stay as they are: calls that are under way change them no more."""

    async def begin(self, restart: Restart) -> Ledger | None:
        """Have the weights become those that the run begins with, or begins anew. Returns the ledger, at stage 0.

        Raises:
            CallError: nobody gives the snapshot
        """

    async def adopt(self, root: str) -> bool:
        """Have the weights become those of a root, if they are close to this seat's. Returns whether they are.

        Raises:
            CallError: nobody gives them
        """
