"""What must hold where a gradient updates the weights one round late, while the next one is computed.

Which microbatches the gradient that a replica holds back is of is followed from round to round: through departures, to
the stage-mate that takes it over, and until an average, a rewind or a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from invariants import Beginning, Invariants, Place, State, after, before
from loop import HOST
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.step_loop import StepLoop

from swarm_peer.model.round_strategy import STRATEGY_PREFIX
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.timeline import Timeline


class DelayedInvariants(Invariants):
    """Watches a tube whose updates are delayed."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # The microbatches of the gradient that a replica holds back, by its trainer.
        self._waiting: WeakKeyDictionary[StageTrainer, list[bytes]] = WeakKeyDictionary()
        self._in_round: WeakSet[StageTrainer] = WeakSet()  # those that are ending a round that they have been in
        self._given_waiting: dict[str, list[bytes]] = {}  # by the giver
        self._trainers: dict[str, StageTrainer] = {}  # by the peer that settles with it
        # Those that a member brought to an average ahead, by (stage, timeline, round that computed them, peer).
        self._ahead: dict[tuple[int, int, int, str], list[bytes]] = {}
        self._made_ahead: dict[Place, set[str]] = {}  # the members of an average ahead, by the place it led to
        # Averages and their microbatches, by (stage, round that they ended): several, if stage-mates went on without
        # each other.
        self._averages: dict[tuple[int, int], list[tuple[list[torch.Tensor], tuple[bytes, ...]]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), ExitStack() as stack:
            stack.enter_context(before(StepLoop, "_contributions", self._contributing))
            stack.enter_context(before(GradientHandover, "hand_over", self._giving))
            stack.enter_context(after(StageTrainer, "load_state", self._lost))
            stack.enter_context(after(StageTrainer, "restart", self._lost))
            stack.enter_context(after(StageTrainer, "apply", self._applied))
            yield

    def shared(self, state: State) -> State:
        return {name: value for name, value in state.items() if not name.startswith(STRATEGY_PREFIX)}

    # --- what a gradient that is held back is of

    def _waiting_of(self, trainer: StageTrainer) -> list[bytes]:
        return self._waiting.setdefault(trainer, [])

    def _contributing(self, loop: Any) -> None:
        self._trainers[loop._group._me] = loop._trainer

    def _giving(self, handover: Any, **_: Any) -> None:
        self._given_waiting[handover._transport.peer_id] = list(self._waiting_of(handover._trainer))

    def _added(self, handover: Any, giver: str, data: Any, call: Any, entered: Any) -> None:
        super()._added(handover, giver, data, call, entered)
        given = self._given_waiting[giver]
        self._waiting_of(handover._trainer).extend(given)
        if self._num_samples(given) != call.samples[1]:
            self.tube.violation(f"{HOST.get()} takes in {call.samples[1]} samples that wait, and not those that did")

    def _lost(self, trainer: StageTrainer, *args: Any, **options: Any) -> None:
        self._waiting_of(trainer).clear()
        self._in_round.discard(trainer)

    def _applied(self, trainer: StageTrainer, averages: Any) -> None:
        """After a round that its replica was not in, what it holds back is too old."""
        if trainer not in self._in_round:
            self._lost(trainer)
        self._in_round.discard(trainer)

    def _num_samples(self, ids: list[bytes]) -> int:
        return sum(len(self.records.microbatches[each][0]) for each in ids)

    # --- what must hold

    def _settling(self, group: Any, ending: Any, gradients: Any, samples: int, upcoming: Any = None) -> None:
        held_back = 0 if upcoming is None else upcoming[1]
        if (upcoming is None) != (ending.step.optimizer_step + 1 >= self.manifest.training.steps):
            what = "nothing" if upcoming is None else f"a gradient of {held_back} samples"
            self.tube.violation(
                f"{HOST.get()} brings {what} to the round after that of optimizer step {ending.step.optimizer_step} "
                f"of {self.manifest.training.steps}"
            )
        super()._settling(group, ending, gradients, held_back)
        place = (group._stage, ending.step.timeline.first_round, ending.number, group._me)
        trainer = self._trainers[group._me]
        self._in_round.add(trainer)
        brought, self._ahead[place] = list(self._waiting_of(trainer)), self.records.shares[place]
        self._waiting_of(trainer)[:] = self._ahead[place]
        self.records.shares[place] = brought
        for ids, told in ((brought, samples), (self._ahead[place], held_back)):
            if self._num_samples(ids) != told:
                self.tube.violation(f"{HOST.get()} brings {told} samples, and holds {self._num_samples(ids)}")

    async def _averaged(
        self, call: Any, group: Any, ending: Any, gradients: Any, attempt: int, members: Any
    ) -> tuple[Any, Any]:
        vote, result = await super()._averaged(call, group, ending, gradients, attempt, members)
        if attempt == 0 and vote.checksum is not None:
            step = ending.step
            place = (group._stage, step.timeline.first_round, step.round_number + 1, vote.checksum)
            self._made_ahead[place] = set(group.ahead._newest.shares)
        return vote, result

    def shares_in(self, place: Place) -> Iterator[list[bytes]]:
        if place not in self._made_ahead:
            yield from super().shares_in(place)
            return
        stage, first_round, number, _ = place
        for peer_id in self._made_ahead[place]:
            yield self._ahead[(stage, first_round, number - 2, peer_id)]

    async def _committed(self, call: Any, loop: Any, settlement: Any) -> None:
        step, stage = loop.step, loop._stage
        parent = (stage, step.timeline.first_round, step.round_number, step.history_hash)
        place = (*parent[:2], step.round_number + 1, settlement.history_hash)
        if not step.begins_timeline:
            average = [gradient.clone() for gradient in settlement.gradients]
            # Before the call, which a rewind may cut off when a snapshot has been taken.
            ids = tuple(sorted(each for share in self.shares_in(place) for each in share))
            self._averages.setdefault((stage, step.round_number), []).append((average, ids))
            await super()._committed(call, loop, settlement)
            return
        await self.commit(call, loop, settlement)
        beginning = self.records.beginnings[place]
        if beginning.ids is None:
            # Not by the state that the parent was recorded with: two halves of a stage may have waited for averages of
            # their own with the same weights.
            average = [gradient.clone() for gradient in settlement.gradients]
            beginning.ids = self._ids_expected(stage, step.timeline, average)
            beginning.parent = parent
            # A snapshot of a timeline's first round has the same average again.
            self._averages.setdefault((stage, step.round_number), []).append((average, beginning.ids))
            self.tube.committed(stage, step.round_number)
            self._check_expected(place, beginning, average)

    def _ids_expected(self, stage: int, timeline: Timeline, expected: list[torch.Tensor]) -> tuple[bytes, ...]:
        """The microbatches of the average that came with the first state of a timeline."""
        if not timeline.first_optimizer_step:
            return ()
        for average, ids in self._averages.get((stage, timeline.created_at_round), []):
            if all(torch.equal(one, other) for one, other in zip(average, expected, strict=True)):
                return ids
        self.tube.violation(f"{timeline} begins without the average that stage {stage} waited for")
        return ()

    def _check_expected(self, place: Place, beginning: Beginning, average: list[torch.Tensor]) -> None:
        """The first round of a timeline ends with the average that came with the snapshot."""
        assert beginning.parent is not None
        begun = self.records.beginnings[beginning.parent]
        self._compare(place, average, beginning, self._nothing_expected(begun.state))

    def _check_update(self, place: Place, beginning: Beginning) -> None:
        """An update is the one that a single process makes of the same microbatches a round before."""
        stage, _, number, _ = place
        if beginning.parent is None or beginning.ids is None:
            return
        stages = [self._beginning_of(each, beginning.timeline, number - 2) for each in range(len(self._reference))]
        if any(known is None for known in stages):
            self.records.forks += 1
            return
        self._compare(place, self._gradients(stages, beginning.ids)[stage], beginning)

    def _nothing_expected(self, state: State) -> State:
        return {name: torch.zeros_like(value) for name, value in state.items() if name.startswith(STRATEGY_PREFIX)}
