"""What must hold where replicas update their weights alone, and average their differences now and then.

Outer weights take the place of weights. Which microbatches a replica's difference holds is followed from round to
round: through departures, to the stage-mate that takes it over, and until an average, a rewind or a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from invariants import TOLERANCE, Beginning, Invariants, Place, State, after, around, before
from loop import HOST

from swarm_peer.model.round_strategy import STRATEGY_PREFIX
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.data.ranges import SampleId
from swarm_peer.policy.timeline import Timeline
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.step_loop import StepLoop


def _own_samples(strategy: Any) -> int:
    """The samples of a replica's difference, with those of the inner step that ends its round."""
    return int(strategy._weight + (strategy._waiting[1] if strategy._waiting else 0))


class PeriodicInvariants(Invariants):
    """Watches a tube whose run averages periodically."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._averaging = self._resolved.manifest.averaging
        # The microbatches that a replica's difference holds, by its trainer.
        self._work: WeakKeyDictionary[StageTrainer, list[bytes]] = WeakKeyDictionary()
        # Those counted in a round that came with a leaving stage-mate's difference.
        self._from_others: WeakKeyDictionary[Any, set[bytes]] = WeakKeyDictionary()
        self._given_work: dict[str, list[bytes]] = {}  # by the giver
        self._trainers: dict[str, StageTrainer] = {}  # by the peer that settles with it
        # What a member brought to an average: tensors and samples, by (stage, timeline, round, peer).
        self._contributions: dict[tuple[int, int, int, str], tuple[list[torch.Tensor], int]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with super().watching(), ExitStack() as stack:
            stack.enter_context(around(StepLoop, "_contributions", self._contributed))
            stack.enter_context(before(GradientHandover, "hand_over", self._giving))
            stack.enter_context(around(StageTrainer, "load_state", self._changed))
            stack.enter_context(around(StageTrainer, "apply", self._changed))
            stack.enter_context(after(StageTrainer, "restart", self._restarted))
            yield

    def shared(self, state: State) -> State:
        return {name: value for name, value in state.items() if name.startswith(STRATEGY_PREFIX)}

    # --- what a difference holds

    def _work_of(self, trainer: StageTrainer) -> list[bytes]:
        return self._work.setdefault(trainer, [])

    def _add_round(self, trainer: StageTrainer, present: Any) -> None:
        others = self._from_others.get(present, set())
        self._work_of(trainer).extend(each for each in present.counted if each not in others)

    def _contributed(self, call: Any, loop: Any) -> Any:
        trainer = loop._trainer
        known = _own_samples(trainer.strategy)
        result = call()
        if _own_samples(trainer.strategy) > known:  # otherwise its gradient was not finite
            self._add_round(trainer, loop._rounds.current)
        self._trainers[loop._group._me] = trainer
        return result

    def _giving(self, handover: Any, **_: Any) -> None:
        trainer = handover._trainer
        if trainer.num_samples:
            self._add_round(trainer, handover._rounds.current)
        self._given_work[handover._transport.peer_id] = list(self._work_of(trainer))

    def _added(self, handover: Any, giver: str, data: Any, call: Any, entered: Any) -> None:
        super()._added(handover, giver, data, call, entered)
        self._work_of(handover._trainer).extend(self._given_work[giver])
        self._from_others.setdefault(entered, set()).update({each for each, _ in call.counted} - set(self._both))

    def _changed(self, call: Any, trainer: StageTrainer, *args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if not trainer.strategy.pending_samples:
            self._work_of(trainer).clear()
        return result

    def _restarted(self, trainer: StageTrainer) -> None:
        self._work_of(trainer).clear()

    # --- what must hold

    def _settling(self, group: Any, ending: Any, gradients: Any, samples: int, upcoming: Any = None) -> None:
        super()._settling(group, ending, gradients, samples)
        if not self._averaging.averages_at(ending.step.optimizer_step):
            return
        place = (group._stage, ending.step.timeline.first_round, ending.number, group._me)
        work = list(self._work_of(self._trainers[group._me]))
        self.records.shares[place] = work
        self._contributions[place] = [tensor.clone() for tensor in gradients], samples
        held = sum(len(self.records.microbatches[each][0]) for each in work)
        if held != samples:
            self.tube.violation(f"{HOST.get()} brings {samples} samples to an average, and has computed {held}")

    async def _averaged(
        self, call: Any, group: Any, ending: Any, gradients: Any, attempt: int, members: Any
    ) -> tuple[Any, Any]:
        """Who brings samples to an average names them: stage-mates may not have heard of them."""
        if group._stage == 0:
            named = {
                SampleId(item.pass_number, item.slice_index, window)
                for item in ending.brings
                for window in range(item.start, item.end)
            }
            if unnamed := set(self.names(self._work_of(self._trainers[group._me]))) - named:
                self.tube.violation(f"{HOST.get()} brings {len(unnamed)} samples that it does not name")
        return await super()._averaged(call, group, ending, gradients, attempt, members)

    def _begun(self, loop: Any, round_number: int, history_hash: str, timeline: Timeline, *about: Any) -> None:
        """After an average, a replica goes on from the outer weights, and not from its own."""
        super()._begun(loop, round_number, history_hash, timeline, *about)
        if self._averaging.averages_at(timeline.optimizer_step_at(round_number) - 1):
            trainer = loop._trainer
            if not all(map(torch.equal, trainer.trained.values(), trainer.strategy._outer)):
                self.tube.violation(f"{HOST.get()} begins round {round_number} with weights that are not the average's")

    async def _committed(self, call: Any, loop: Any, settlement: Any) -> None:
        step, stage = loop.step, loop._stage
        if self._averaging.averages_at(step.optimizer_step):
            await super()._committed(call, loop, settlement)
            return
        parent = (stage, step.timeline.first_round, step.round_number, step.history_hash)
        await self.commit(call, loop, settlement)
        place = (stage, step.timeline.first_round, step.round_number + 1, settlement.history_hash)
        beginning = self.records.beginnings[place]
        if beginning.ids is None:
            beginning.parent, beginning.ids = parent, ()
            self.tube.committed(stage, step.round_number)

    def _check_update(self, place: Place, beginning: Beginning) -> None:
        """The outer step is that of torch, with the mean of the members' differences over their samples."""
        stage, first_round, number, _ = place
        assert beginning.parent is not None
        brought = [self._contributions[(stage, first_round, number - 1, peer)] for peer in self.records.made[place]]
        total = sum(samples for _, samples in brought)
        before_it = self.records.beginnings[beginning.parent].state
        self.records.checked += 1
        for index in range(len(brought[0][0])):
            outer = torch.nn.Parameter(before_it[f"{STRATEGY_PREFIX}outer/{index:05d}"].clone())
            momentum = before_it[f"{STRATEGY_PREFIX}momentum/{index:05d}"].clone()
            rate, decay = self._averaging.outer_learning_rate, self._averaging.outer_momentum
            optimizer = torch.optim.SGD([outer], lr=rate, momentum=decay, nesterov=True)
            optimizer.state[outer] = {"momentum_buffer": momentum}
            if total:
                outer.grad = sum(
                    (tensors[index] * (samples / total) for tensors, samples in brought), 0 * outer.detach()
                )
                optimizer.step()
            error = float((outer.detach() - beginning.state[f"{STRATEGY_PREFIX}outer/{index:05d}"]).abs().max())
            if not error <= TOLERANCE:
                self.tube.violation(
                    f"the outer step of round {number - 1} of stage {stage} ({total} samples) is wrong by {error:.2g}"
                )
                return
