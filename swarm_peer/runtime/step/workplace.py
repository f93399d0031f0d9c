"""The workplace of a real stage: its trainer, its device thread, and the admission of its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor, empty_like, zeros_like

from swarm_peer.codecs.base import is_within
from swarm_peer.codecs.parts import LARGEST_MEAN
from swarm_peer.model.round_strategy import StepResult
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.decay import Decay, decay_in
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.trouble import UpdateRecord
from swarm_peer.protocol.epochs import Restart
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.roots import digest_of, root_of
from swarm_peer.runtime.step.contribution import contribution
from swarm_peer.runtime.step.driver_parts import SeatWeights
from swarm_peer.runtime.step.named_gradients import Held, mean_of
from swarm_peer.wire.ledger_codec import encode_ledger

Result = TypeVar("Result")


def timeline_of(restart: Restart) -> Timeline:
    """The timeline that states name, for those who take them over."""
    return Timeline(restart.first_round, restart.optimizer_step, created_at_round=restart.first_round)


def _encoded(ledger: Ledger | None) -> bytes:
    """The ledger as states carry it."""
    return b"" if ledger is None else encode_ledger(ledger)


class StageWorkplace:
    """A `Workplace` of one replica. Belongs to the event loop's thread.

    Args:
        copied: told of each state whose root is asked for, with the root

    Attributes:
        result: how the last update went; None before the first
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        core: ReplicaCore,
        updates: UpdateRecord,
        copied: Callable[[StageState, str], None] = lambda state, root: None,
    ):
        self._context = context
        self._core = core
        self._trainer = core.trainer
        self._updates = updates
        self._copied = copied
        self.result: StepResult | None = None

    def open(self, number: int, standing: SeatWeights) -> None:
        """Let microbatches of a round in, which are computed from these weights."""
        rounds = self._core.rounds
        if rounds.step.timeline != timeline_of(standing.restart):
            self._updates.begin()
        step = StepState(
            round_number=number,
            timeline=timeline_of(standing.restart),
            history_hash=standing.entry,
            ledger=_encoded(standing.ledger),
            lag=number - standing.round,
            weights_version=self._trainer.weights_version,
            began_s=self._context.clock.monotonic_s(),
        )
        present = rounds.step
        known = present.round_number, present.history_hash, present.weights_version
        if known != (number, standing.entry, step.weights_version) or present.phase is Phase.EMPTY:
            rounds.begin(step)
            self._context.metrics.optimizer_step.set(step.optimizer_step)
        rounds.enter(Phase.OPEN)

    def close(self) -> None:
        """Let none in."""
        if self._core.rounds.step.phase is Phase.OPEN:
            self._core.rounds.enter(Phase.ENDING)

    def fall_behind(self) -> None:
        """Turn away those that wait for the next round as well: this seat may lack its weights for long."""
        self._updates.begin()
        if self._core.rounds.step.phase is not Phase.EMPTY:
            self._core.rounds.enter(Phase.CATCHING_UP)

    async def drain(self, number: int) -> None:
        """Wait until no microbatch of a round is inside; none is let in any more."""
        await self._core.admission.drained()

    async def contribution(self, number: int) -> tuple[list[Tensor], int]:
        """Take what was computed in a round out of the accumulator."""
        return await self._in_device_thread(partial(self._take, number))

    def _take(self, number: int) -> tuple[list[Tensor], int]:
        means, weight = contribution(self._trainer, self._context.metrics, self._updates, number)
        self._trainer.discard_gradients()
        return list(means), weight

    async def discard(self) -> None:
        """Empty the accumulator."""
        await self._in_device_thread(self._discard)

    def _discard(self) -> None:
        self._trainer.discard_gradients()
        self._core.rounds.current.forget_counted()

    async def give_up(self) -> None:
        """Empty the accumulator, and drop what was computed in rounds that have ended without an average."""
        await self._in_device_thread(self._give_up)

    def _give_up(self) -> None:
        self._discard()
        self._trainer.strategy.forget_work()

    async def difference(self) -> list[Tensor]:
        """Give what this seat would bring to the average that ends the period, in the middle of it."""
        return await self._in_device_thread(self._difference)

    def _difference(self) -> list[Tensor]:
        means, _ = self._trainer.strategy.difference()
        if all(is_within(mean, LARGEST_MEAN) for mean in means):
            return list(means)
        self._updates.not_finite()
        return [zeros_like(mean) for mean in means]

    async def try_own(self, means: Sequence[Tensor]) -> None:
        """Where updates are eager, begin with this seat's own gradient of the round before, until `apply`."""
        await self._in_device_thread(partial(self._trainer.strategy.try_own, means))

    async def apply(self, averages: Sequence[Tensor], word: str) -> None:
        """Update the weights; with no averages, as a round ends that has none.

        Args:
            word: what the run key had said, in the epoch in which the round was agreed
        """
        self.result = await self._in_device_thread(partial(self._apply, averages, decay_in(word)))
        self._updates.end_round(self._context.clock.monotonic_s(), is_skipped=self.result.skipped)

    def _apply(self, averages: Sequence[Tensor], decay: Decay | None) -> StepResult:
        self._trainer.decay = decay
        return self._trainer.apply(averages)

    async def root(self, standing: SeatWeights) -> str:
        """The root of the state, whose weights are these."""
        tensors = await self._in_device_thread(self._trainer.state)
        timeline, ledger = timeline_of(standing.restart), _encoded(standing.ledger)
        root = await self._context.threads.run(root_of, tensors, ledger)
        self._copied(StageState(standing.round, standing.entry, tensors, timeline, ledger), root)
        return root

    async def digest(self, averages: Sequence[Tensor]) -> str:
        """A digest of an update, the same at all members."""
        return await self._context.threads.run(digest_of, averages)

    async def mean(self, contributions: Sequence[Held]) -> Held:
        """The mean of several contributions over all of their targets, and their number; zeros of none."""
        shapes = [empty_like(parameter, device="meta") for parameter in self._trainer.trained.values()]
        return await self._context.threads.run(mean_of, contributions, shapes)

    async def _in_device_thread(self, job: Callable[[], Result]) -> Result:
        return await self._core.device_thread.run(Priority.STEP, job)
