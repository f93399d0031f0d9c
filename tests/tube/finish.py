"""What must hold where a run comes to its last optimizer step, and how its weights are validated on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import torch
from hosts import Host
from invariants import Invariants
from loop import HOST, OUTSIDE
from periodic import PeriodicInvariants
from records import Place, State, same_weights
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging
from wrapping import around

import coordinator.run.service as service_module
from coordinator.checkpoints.model_folder import export_states
from coordinator.run.service import RunService
from swarm_peer.model.round_strategy import is_weight
from swarm_peer.policy.decay import last_step_of
from swarm_peer.protocol.log import Committed
from swarm_peer.protocol.member import Member
from swarm_peer.runtime.data.launcher import BatchLauncher
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.state.index import StageState

# Of a loss: microbatches are summed up in another order.
TOLERANCE = 1e-4
# The share of runs whose coordinator dies after it has saved the model, before all peers have heard of it.
SAVERS_KILLED = 0.4
transformers_logging.disable_progress_bar()


def num_steps(seed: str) -> int:
    """The optimizer steps of a run, which comes to its end while faults strike or after them."""
    return random.Random(f"steps {seed}").choice([10, 20, 30, 40, 50])


class FinishInvariants(Invariants):
    """Watches a tube whose run has few optimizer steps."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._rng = self.tube.world.rng("finish")
        self._sent: dict[Host, list[torch.Tensor]] = {}  # held-out samples of a validation, by sender

    @contextmanager
    def watching(self) -> Iterator[None]:
        def export_and_check(resolved: Any, states: Sequence[StageState], folder: Path, *args: Any, **more: Any) -> Any:
            self._check_saved(states)
            result = export_states(resolved, states, folder, *args, **more)
            saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
            given = {name: value for state in states for name, value in state.tensors.items() if is_weight(name)}
            if not same_weights(saved, given):
                self.tube.violation("the model that transformers loads has other weights than the stages gave")
            return result

        with (
            super().watching(),
            patch.object(service_module, "export_states", export_and_check),
            around(RunService, "run", self._coordinated),
            around(BatchLauncher, "_run", self._sending),
            around(BatchLauncher, "_validate", self._validated),
        ):
            yield

    async def _coordinated(self, call: Any, service: RunService) -> bool:
        saved: bool = await call()
        if saved and self.finished_s is None:
            self.note_ends()
            self.finished_s = self.tube.world.loop.time()
            self.at_finish = [host for host in self.tube.peers() if host.peer is not None]
            if self._rng.random() < SAVERS_KILLED:
                await self._die_soon(HOST.get())
        return saved

    async def _die_soon(self, saver: Host) -> None:
        """The coordinator dies before or while it tells the peers that they may go; it is started again."""
        after_s = self._rng.choice([0.0, 0.0, 0.3, 4.0])
        loop = self.tube.world.loop
        self.tube.struck("kill_saver", saver)
        loop.call_later(after_s, saver.die, context=OUTSIDE)
        loop.call_later(self._rng.uniform(1.0, 40.0), self._start_again, saver, context=OUTSIDE)
        if not after_s:
            await anyio.sleep_forever()

    def _start_again(self, saver: Host) -> None:
        if self.tube.peers():  # otherwise nobody answers, and it is refused
            self.tube.start_coordinator_again(saver)

    def _check_saved(self, states: Sequence[StageState]) -> None:
        """The model is that of the last optimizer step, and its stages have been through the same rounds."""
        places = [(stage, state.history_hash) for stage, state in enumerate(states)]
        if unknown := [place for place in places if place not in self.records.weights]:
            self.tube.violation(f"a model is saved with states that no stage has come to: {unknown}")
            return
        steps = {self._last_step(place) for place in places}
        if {self.step_at(place) for place in places} != steps or len(steps) > 1:
            self.tube.violation(f"a model is saved of steps {[self.step_at(place) for place in places]}, not {steps}")
        for place, state in zip(places, states, strict=True):
            if not same_weights(self.shared(self.records.weights[place]), self.shared(dict(state.tensors))):
                self.tube.violation(f"a model is saved with weights that stage {place[0]} never had")

    def _last_step(self, place: Place) -> int:
        """The run's last optimizer step, by what the run key had said where an entry was agreed, or last."""
        word = self.records.word_of.get(place, self.records.newest_word)
        return last_step_of(self._resolved.manifest.training.steps, word)

    def _appending(self, member: Member, committed: Committed) -> None:
        super()._appending(member, committed)
        place = member.stage, committed.entry.hash
        if (step := self.step_at(place)) > self._last_step(place):
            self.tube.violation(f"an entry follows that of the last optimizer step: {step}")

    async def _sending(
        self, call: Any, launcher: BatchLauncher, batch: bytes, tokens: Any, entered: Any, mode: Any
    ) -> Any:
        if mode == "evaluate":
            self._sent.setdefault(HOST.get(), []).append(tokens)
        return await call(batch, tokens, entered, mode)

    async def _validated(self, call: Any, launcher: BatchLauncher, entered: ReplicaRound) -> None:
        """A peer's share of a validation is the loss of its round's weights, of the samples that it has sent on."""
        before = list(launcher.validations)
        self._sent.pop(HOST.get(), None)
        await call(entered)
        sent = self._sent.pop(HOST.get(), [])
        if list(launcher.validations) == before or not sent:
            return
        share, tokens = launcher.validations[-1], torch.cat(sent)
        stages = self._states_at(entered.step.history_hash)
        if share.samples < len(tokens) or stages is None:
            return  # some hops have failed, or it is not known which weights the others had
        self.records.validated += 1
        expected = self._loss_sum(stages, share.optimizer_step, tokens)
        if abs(share.loss_sum - expected) > TOLERANCE * share.samples:
            self.tube.violation(f"{HOST.get()} validates round {entered.number} with {share}, and not {expected:.4f}")

    def _states_at(self, head: str) -> list[State] | None:
        """The weights of all stages beside those of an entry of stage 0; None if they are not known for sure."""
        entry = self.records.entries.get((0, head))
        if entry is None:
            return None
        found: list[State] = [self.records.weights[0, head]]
        for stage in range(1, len(self._reference)):
            alike = [
                place
                for place, other in self.records.entries.items()
                if place[0] == stage and (other.cut.round, other.cut.base) == (entry.cut.round, entry.cut.base)
            ]
            if len(alike) != 1 or alike[0] not in self.records.weights:
                return None
            found.append(self.records.weights[alike[0]])
        return found

    def _loss_sum(self, stages: Sequence[State], optimizer_step: int, tokens_BS: torch.Tensor) -> float:
        hidden = None
        for trainer, known in zip(self._reference, stages, strict=True):
            trainer.load_state(known, optimizer_step)
            hidden = trainer.evaluate(tokens_BS, hidden)
        assert hidden is not None
        return float(hidden.sum())


class FinishPeriodicInvariants(FinishInvariants, PeriodicInvariants):
    """The same where stage-mates average periodically."""

    def _states_at(self, head: str) -> list[State] | None:
        """Within a period, each replica has weights of its own."""
        entry = self.records.entries.get((0, head))
        return super()._states_at(head) if entry is not None and entry.cut.averages else None
