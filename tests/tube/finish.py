"""What must hold where a run comes to its last optimizer step, and how its weights are validated on the way."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import torch
from delayed import DelayedInvariants
from hosts import Host
from invariants import Beginning, Invariants, around, same_weights
from loop import HOST, OUTSIDE
from periodic import PeriodicInvariants
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import coordinator.run.service as service_module
import swarm_peer.runtime.data.launcher as launcher_module
from coordinator.checkpoints.model_folder import export_states
from coordinator.run.service import RunService
from swarm_peer.model.round_strategy import is_weight
from swarm_peer.policy.step_state import StepState
from swarm_peer.runtime.data.launcher import MicrobatchLauncher
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.step.step_loop import StepLoop
from swarm_peer.wire.messages import Mode

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
        self._sent: dict[tuple[Host, StepState], list[torch.Tensor]] = {}  # held-out samples, by sender and round

    @contextmanager
    def watching(self) -> Iterator[None]:
        def export_and_check(resolved: Any, states: Sequence[StageState], folder: Path, *args: Any) -> None:
            self._check_saved(states)
            export_states(resolved, states, folder, *args)
            saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
            given = {name: value for state in states for name, value in state.tensors.items() if is_weight(name)}
            if not same_weights(saved, given):
                self.tube.violation("the model that transformers loads has other weights than the stages gave")

        with (
            super().watching(),
            patch.object(service_module, "export_states", export_and_check),
            around(RunService, "run", self._coordinated),
            patch.object(launcher_module, "_microbatch", partial(self._made, launcher_module._microbatch)),
            around(MicrobatchLauncher, "_validate", self._validated),
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
        steps = self._resolved.manifest.training.steps
        if {state.optimizer_step for state in states} != {steps}:
            self.tube.violation(f"a model is saved of steps {[state.optimizer_step for state in states]}, not {steps}")
        if len({(state.timeline, state.round_number) for state in states}) > 1:
            self.tube.violation(f"a model is saved of timelines {[state.timeline for state in states]}")
        for stage, state in enumerate(states):
            place = (stage, state.timeline.first_round, state.round_number, state.history_hash)
            begun = self.records.beginnings.get(place)
            if begun is None or not same_weights(self.shared(begun.state), self.shared(dict(state.tensors))):
                self.tube.violation(f"a model is saved with weights that stage {stage} never had")

    async def _committed(self, call: Any, loop: StepLoop, settlement: Any) -> None:
        await super()._committed(call, loop, settlement)
        if loop.step.optimizer_step > self._resolved.manifest.training.steps:
            self.tube.violation(f"an update is made after the last optimizer step: {loop.step}")

    def _made(self, call: Any, microbatch_id: bytes, tokens_BS: torch.Tensor, present: ReplicaRound, mode: Mode) -> Any:
        if mode == "evaluate":
            self._sent.setdefault((HOST.get(), present.step), []).append(tokens_BS)
        return call(microbatch_id, tokens_BS, present, mode)

    async def _validated(self, call: Any, launcher: MicrobatchLauncher, present: ReplicaRound) -> None:
        """A peer's share of a validation is the loss of its round's weights, of the samples that it has sent on."""
        before = list(launcher.validations)
        await call(present)
        if list(launcher.validations) == before:
            return
        share, sent = launcher.validations[-1], torch.cat(self._sent.pop((HOST.get(), present.step)))
        stages = [
            self._beginning_of(stage, present.step.timeline, present.number) for stage in range(len(self._reference))
        ]
        if share.samples < len(sent) or None in stages:
            return  # some hops have failed, or there are forks
        self.records.validated += 1
        expected = self._loss_sum([known for known in stages if known is not None], sent)
        if abs(share.loss_sum - expected) > TOLERANCE * share.samples:
            self.tube.violation(f"{HOST.get()} validates round {present.number} with {share}, and not {expected:.4f}")

    def _loss_sum(self, stages: Sequence[Beginning], tokens_BS: torch.Tensor) -> float:
        hidden = None
        for trainer, known in zip(self._reference, stages, strict=True):
            trainer.load_state(known.state, known.optimizer_step)
            hidden = trainer.evaluate(tokens_BS, hidden)
        assert hidden is not None
        return float(hidden.sum())


class FinishDelayedInvariants(FinishInvariants, DelayedInvariants):
    """The same where updates are delayed."""


class FinishPeriodicInvariants(FinishInvariants, PeriodicInvariants):
    """The same where stage-mates average periodically."""
