"""Runs a microbatch through this stage and, nested inside, through all later ones; the same for every stage."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass

import anyio
import torch

from swarm_peer.config import RunManifest
from swarm_peer.errors import HopFailed, InvalidMessage, StepClosed
from swarm_peer.model.training import ForwardPass, StageTrainer
from swarm_peer.runtime.compute import ComputeThread, Priority
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.next_stage import HopResult, Microbatch, NextStage
from swarm_peer.wire.codecs import decode, decode_tokens, encode

log = logging.getLogger(__name__)


# Share of its time that a device in training may spend on queries. Though they go last, they cost: what computes is not
# interrupted, and peers may share a machine, where an idle one leaves the cores to the others.
QUERY_SHARE = 0.1
# With passes that long, queries take more than their share rather than wait out their callers.
LONGEST_QUERY_PAUSE_S = 10.0
# A device that has not trained for so long has nothing to train: the run waits, averages, or is over.
IDLE_S = 5.0

_OUT_OF_MEMORY = "this stage ran out of device memory: lower --max-memory, so that it takes fewer microbatches at once"


def query_pause_s(last_s: float, idle_s: float) -> float:
    """How long the device is left to training after a query that took `last_s` of it.

    Args:
        idle_s: since it last trained
    """
    return 0.0 if idle_s >= IDLE_S else min(last_s * (1 / QUERY_SHARE - 1), LONGEST_QUERY_PAUSE_S)


@dataclass(slots=True)
class _Pass:
    """What the forward job hands on: encoded activations for the next stage, or the loss or logits of the last."""

    graph: ForwardPass | None = None
    hidden: memoryview | None = None
    loss_sum: float = 0.0
    logits: memoryview | None = None


class StageRunner:
    """Belongs to the event loop's thread; what touches the trainer runs in the compute thread.

    Args:
        next_stage: None on the last stage
        replies_kept: gradients of counted microbatches that are kept for callers that lost the reply

    Attributes:
        counted: microbatches in this step's accumulator: id -> samples
    """

    def __init__(
        self,
        manifest: RunManifest,
        trainer: StageTrainer,
        compute: ComputeThread,
        next_stage: NextStage | None,
        metrics: PeerMetrics,
        replies_kept: int,
    ):
        assert (next_stage is None) == trainer.spec.is_last, "all stages but the last have a next one"
        self._manifest = manifest
        self._trainer = trainer
        self._compute = compute
        self._next_stage = next_stage
        self._metrics = metrics
        self._replies_kept = replies_kept
        self.counted: dict[bytes, int] = {}
        self._replies: OrderedDict[bytes, HopResult] = OrderedDict()
        self._query_turn = anyio.Lock()
        self._query_seconds = 0.0  # that the last query took of the compute thread
        self._query_ended = -math.inf
        self._weights = (-1, -1)  # a global step, and the version of the weights that it begins with

    @property
    def vocab_size(self) -> int:
        return int(self._trainer.module.config.vocab_size)

    @property
    def samples_per_s(self) -> float:
        return self._compute.samples_per_s

    def counted_reply(self, microbatch_id: bytes) -> HopResult | None:
        """The result of a microbatch that this step has counted already, for a caller that asks again.

        Raises:
            HopFailed: it is counted, and its gradient is not kept any more
        """
        if microbatch_id not in self.counted:
            return None
        reply = self._replies.get(microbatch_id)
        self._metrics.duplicates.labels("answered" if reply else "forgotten").inc()
        if reply is None:
            raise HopFailed("this microbatch is counted here already, and its gradient is gone")
        return reply

    def forget_step(self) -> None:
        """To be called when the accumulator is emptied."""
        self.counted.clear()
        self._replies.clear()

    def note_step(self, step: int) -> None:
        """To be called when the trainer holds the weights of a global step, which no job changes for now."""
        self._weights = (step, self._trainer.weights_version)

    async def run(self, microbatch: Microbatch, hidden: memoryview | None, deadline: float) -> HopResult:
        """Forward here, the rest of the pipeline, backward here.

        Args:
            hidden: encoded activations of the stage before; None on stage 0
            deadline: of anyio.current_time

        Returns:
            In training with the encoded gradient of `hidden` (None on stage 0). When it returns, the microbatch is
            counted; when it raises, it is not.

        Raises:
            InvalidMessage: what came in is malformed or not finite
            StepClosed: a query came too late for the weights of its step
            CallError: a later stage failed
        """
        if microbatch.mode != "train":
            return await self._run_forward(microbatch, hidden, deadline)
        passed = await self._compute.run(
            Priority.FORWARD, lambda: self._forward(microbatch, hidden), microbatch.num_samples
        )
        result = HopResult(passed.loss_sum)
        if self._next_stage is not None:
            assert passed.hidden is not None
            result = await self._next_stage.send(microbatch, passed.hidden, deadline)
        try:
            return await self._compute.run(
                Priority.BACKWARD, lambda: self._backward(microbatch, passed, result), microbatch.num_samples
            )
        except InvalidMessage as error:
            # The next stage's fault and not the caller's, who must not be blamed for it.
            assert self._next_stage is not None
            self._metrics.invalid_messages.labels("gradient").inc()
            reason = f"the next stage returned a gradient that cannot be used: {error}"
            self._next_stage.refuse(result, reason)
            raise HopFailed(reason) from error

    async def _run_forward(self, microbatch: Microbatch, hidden: memoryview | None, deadline: float) -> HopResult:
        if microbatch.is_query:
            passed = await self._forward_in_turn(microbatch, hidden)
        else:
            passed = await self._compute.run(Priority.EVALUATE, lambda: self._forward(microbatch, hidden))
        if self._next_stage is None:
            return HopResult(passed.loss_sum, logits=passed.logits)
        assert passed.hidden is not None
        return await self._next_stage.send(microbatch, passed.hidden, deadline)

    async def _forward_in_turn(self, microbatch: Microbatch, hidden: memoryview | None) -> _Pass:
        """Compute a query, after a pause that leaves the device to training."""

        def job() -> _Pass:
            begin = time.monotonic()
            try:
                return self._forward(microbatch, hidden)
            finally:
                self._query_ended = time.monotonic()
                self._query_seconds = self._query_ended - begin

        async with self._query_turn:
            pause_s = query_pause_s(self._query_seconds, self._compute.idle_s)
            await anyio.sleep(max(self._query_ended + pause_s - time.monotonic(), 0.0))
            return await self._compute.run(Priority.QUERY, job)

    # The rest runs in the compute thread.

    def _shape(self, microbatch: Microbatch) -> tuple[int, int, int]:
        return microbatch.hidden_shape(self._manifest, self._trainer.module.config.hidden_size)

    def _forward(self, microbatch: Microbatch, hidden: memoryview | None) -> _Pass:
        trainer, wire = self._trainer, self._manifest.wire
        # A query is not inside the step, which does not wait for it and may have ended since it came.
        if microbatch.is_query and self._weights != (microbatch.step, trainer.weights_version):
            raise StepClosed(f"the weights of global step {microbatch.step} have changed", microbatch.step + 1)
        shape = num_samples, length, _ = self._shape(microbatch)
        num_tokens = length + (microbatch.mode != "predict")
        tokens_BS = decode_tokens(microbatch.tokens, (num_samples, num_tokens), trainer.module.config.vocab_size)
        hidden_BTD = None if hidden is None else decode(hidden, shape, wire.activations)
        graph: ForwardPass | None = None
        try:
            if microbatch.mode == "train":
                graph = trainer.forward(tokens_BS, hidden_BTD)
                output = graph.losses_B if trainer.spec.is_last else graph.output
            elif microbatch.mode == "predict":
                output = trainer.predict(tokens_BS, hidden_BTD)
            else:
                output = trainer.evaluate(tokens_BS, hidden_BTD)
        except torch.OutOfMemoryError as error:
            raise HopFailed(_OUT_OF_MEMORY) from error
        assert output is not None
        if not trainer.spec.is_last:
            return _Pass(graph, self._encode(output, wire.activations))
        if microbatch.mode == "predict":
            return _Pass(logits=self._encode(output, "none"))
        loss_sum = float(output.sum())
        if loss_sum != loss_sum or abs(loss_sum) == float("inf"):
            raise HopFailed("the loss is not finite: lower the learning rate, or look for broken data")
        return _Pass(graph, loss_sum=loss_sum)

    def _backward(self, microbatch: Microbatch, passed: _Pass, result: HopResult) -> HopResult:
        """Raises InvalidMessage if the gradient that came back cannot be used."""
        trainer, codec = self._trainer, self._manifest.wire.gradients
        assert passed.graph is not None
        grad_BTD = None
        if not trainer.spec.is_last:
            assert result.grad is not None
            grad_BTD = decode(result.grad, self._shape(microbatch), codec)
        try:
            input_grad_BTD = trainer.backward(passed.graph, grad_BTD)
        except torch.OutOfMemoryError as error:
            # Half of a gradient may be in the accumulator, so the trainer has emptied it.
            self._lose_step()
            raise HopFailed(_OUT_OF_MEMORY) from error
        try:
            encoded = None if input_grad_BTD is None else self._encode(input_grad_BTD, codec)
        except HopFailed:
            # Not finite, and so is what it has left in the accumulator.
            trainer.discard_gradients()
            self._lose_step()
            raise
        # From here on the accumulator holds the microbatch; that it is counted must follow without fail.
        self.counted[microbatch.id] = microbatch.num_samples
        reply = HopResult(result.loss_sum, encoded)
        if encoded is not None:
            self._replies[microbatch.id] = reply
            while len(self._replies) > self._replies_kept:
                self._replies.popitem(last=False)
        return reply

    def _lose_step(self) -> None:
        self._metrics.lost_samples.inc(sum(self.counted.values()))
        self.forget_step()

    @staticmethod
    def _encode(tensor: torch.Tensor, codec: str) -> memoryview:
        try:
            return encode(tensor, codec)  # type: ignore[arg-type]
        except OverflowError as error:
            raise HopFailed(f"what this stage computed cannot be sent: {error}") from error
