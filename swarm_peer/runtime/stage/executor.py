"""Runs a microbatch through this stage and all later ones: forward here, the rest of the pipeline, backward here.

Owns which microbatches the gradient accumulator holds. Must not know when a round admits them (admission.py), or which
peer of the next stage takes it (stage_client.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import anyio
import torch

from swarm_peer.codecs import PLAIN
from swarm_peer.errors import HopFailed, InvalidMessage, NotFinite, NotServing, RoundClosed, first_line
from swarm_peer.model.forward_pass import ForwardPass
from swarm_peer.model.gradient_norm import MAX_SENT_HIDDEN, check_hidden
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.host.device_errors import is_out_of_memory
from swarm_peer.runtime.stage.device_thread import DeviceThread, Priority, SpeedMeter
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.round_work import RoundWork
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.stage.stage_client import HopResult, Microbatch, StageClient
from swarm_peer.wire.codecs import decode, decode_tokens, encode, rounding_seed
from swarm_peer.wire.fields import MAX_LOSS

# Share of its time that a device in training may spend on queries. Though queries have the lowest priority, they slow
# training down: a job is never interrupted, and peers that share a machine compete for its cores.
QUERY_SHARE = 0.1
# The pause is never longer than this, or the callers would give up. After very long passes, queries may therefore take
# more than their share.
LONGEST_QUERY_PAUSE_S = 10.0
# A device that has not trained for so long has nothing to train: the run waits, averages, or is over.
IDLE_S = 5.0

_OUT_OF_MEMORY = "this stage ran out of device memory: with a lower --max-memory it takes fewer microbatches"


def query_pause_s(last_s: float, idle_s: float) -> float:
    """How long the device is left to training after a query, in seconds.

    Args:
        last_s: time that the query took
        idle_s: time since the device last trained
    """
    return 0.0 if idle_s >= IDLE_S else min(last_s * (1 / QUERY_SHARE - 1), LONGEST_QUERY_PAUSE_S)


@contextmanager
def out_of_memory_fails_hop() -> Iterator[None]:
    """Raise HopFailed where the device has no memory left."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise HopFailed(_OUT_OF_MEMORY) from error


@dataclass(slots=True)
class _Pass:
    """The result of the forward job: encoded activations for the next stage, or the loss or logits of the last one."""

    graph: ForwardPass | None = None
    hidden: memoryview | None = None
    loss_sum: float = 0.0
    logits: memoryview | None = None


class StageExecutor:
    """Computes this stage's part of microbatches. Belongs to the event loop's thread; jobs run in the device thread.

    Args:
        next_stage: None on the last stage
        work: counts what was computed
        capacity: is told where the device runs out of memory in training
        replies_kept: number of counted microbatches whose gradients are kept, for callers that lost the reply
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        trainer: StageTrainer,
        device_thread: DeviceThread,
        speed: SpeedMeter,
        next_stage: StageClient | None,
        capacity: Capacity,
        replies_kept: int,
        work: RoundWork,
    ):
        assert (next_stage is None) == trainer.spec.is_last, "all stages but the last have a next one"
        self._clock = context.clock
        self._resolved = context.resolved
        self._work = work
        self._trainer = trainer
        self._device_thread = device_thread
        self._speed = speed
        self._next_stage = next_stage
        self._metrics = context.metrics
        self._capacity = capacity
        self._replies_kept = replies_kept
        self._has_given_up = False
        self._query_turn = anyio.Lock()
        self._query_seconds = 0.0  # that the last query took of the device thread
        self._query_ended = -math.inf

    @property
    def samples_per_s(self) -> float:
        """Measured throughput of this stage; see SpeedMeter."""
        return self._speed.samples_per_s

    def stop_waiting(self) -> None:
        """Fail microbatches at once while the next stage has no peers: this peer leaves, perhaps like all others."""
        if self._next_stage is not None:
            self._next_stage.stop_waiting()

    def counted_reply(self, entered: ReplicaRound, microbatch_id: bytes) -> HopResult | None:
        """The result of a microbatch that is counted in a round already.

        None if it is not, or if its result is not kept any more: it is computed again then, and not counted.
        """
        reply = entered.replies.get(microbatch_id)
        if microbatch_id in entered.counted:
            self._metrics.duplicates.labels("answered" if reply else "computed").inc()
        return reply

    async def run(
        self,
        entered: ReplicaRound,
        microbatch: Microbatch,
        hidden: memoryview | None,
        deadline: float,
        caller: str = "",
    ) -> HopResult:
        """Run a microbatch through this stage and all later ones.

        A training microbatch is counted if this returns, and not counted if this raises.

        Args:
            entered: the round that has admitted it
            hidden: encoded activations from the stage before; None on stage 0
            deadline: on the clock of anyio.current_time
            caller: id of the peer that has sent it; empty for this peer itself

        Returns:
            the loss, and in training the encoded gradient with respect to `hidden` (None on stage 0)

        Raises:
            InvalidMessage: the tokens or `hidden` are malformed or not finite
            RoundClosed: the weights of the microbatch's round are gone
            CallError: a later stage failed
        """
        if microbatch.mode != "train":
            return await self._run_forward(entered, microbatch, hidden, deadline)
        microbatch = replace(microbatch, base=(*microbatch.base, self._work.head(entered.number)))
        with self._noting_out_of_memory(entered):
            passed = await self._device_thread.run(
                Priority.FORWARD,
                lambda: self._forward(entered, microbatch, hidden),
                microbatch.num_samples,
                self._speed,
            )
        result = HopResult(passed.loss_sum)
        if self._next_stage is not None:
            assert passed.hidden is not None
            result = await self._next_stage.send(microbatch, passed.hidden, deadline)
        self._work.admit(entered.number, (*microbatch.base, *result.base))
        try:
            with self._noting_out_of_memory(entered):
                return await self._add(entered, microbatch, passed, result, caller)
        except InvalidMessage as error:
            # The next stage is to blame for this, and not the caller, as an InvalidMessage would say.
            assert self._next_stage is not None
            self._metrics.invalid_messages.labels("gradient").inc()
            reason = f"the next stage returned a gradient that cannot be used: {error}"
            self._next_stage.refuse(result, reason)
            raise HopFailed(reason) from error

    async def _add(
        self, entered: ReplicaRound, microbatch: Microbatch, passed: _Pass, behind: HopResult, caller: str
    ) -> HopResult:
        """Add a microbatch's gradient, and have it counted, if it was not before."""
        added: list[HopResult] = []

        def add() -> HopResult:
            is_new = microbatch.id not in entered.counted
            reply = self._backward(entered, microbatch, passed, behind)
            added.extend([reply] if is_new else [])
            return reply

        try:
            done = await self._device_thread.run(Priority.BACKWARD, add, microbatch.num_samples, self._speed)
        except anyio.get_cancelled_exc_class():
            # The caller has given up, or its connection is gone, as the gradient was added: it counts all the same.
            if added:
                with suppress(RoundClosed):
                    self._counted(entered, microbatch, behind, added[0], caller, passed.graph)
            raise
        return self._counted(entered, microbatch, behind, done, caller, passed.graph if added else None)

    def _counted(
        self,
        entered: ReplicaRound,
        microbatch: Microbatch,
        behind: HopResult,
        done: HopResult,
        caller: str,
        counts: ForwardPass | None,
    ) -> HopResult:
        """Have the protocol count a microbatch whose gradient was added; stage 0 counts its own.

        Args:
            counts: None if it was counted before
        """
        base = (*microbatch.base, *behind.base)
        receipt = behind.receipt if self._trainer.spec.is_first else None
        if counts is not None and not self._trainer.spec.is_first:
            has_targets = self._resolved.manifest.data.has_targets
            weight = counts.num_targets if has_targets else microbatch.num_samples
            receipt = self._work.count(entered.number, base, weight, microbatch.num_samples, caller)
        done = replace(done, base=base[len(microbatch.base) - 1 :], receipt=receipt)
        if microbatch.id in entered.replies:
            entered.replies[microbatch.id] = done
        return done

    @contextmanager
    def _noting_out_of_memory(self, entered: ReplicaRound) -> Iterator[None]:
        try:
            yield
        except HopFailed as error:
            if is_out_of_memory(error.__cause__):
                self._capacity.ran_out(entered.admitted)
            raise

    async def _run_forward(
        self, entered: ReplicaRound, microbatch: Microbatch, hidden: memoryview | None, deadline: float
    ) -> HopResult:
        if microbatch.is_query:
            passed = await self._forward_in_turn(entered, microbatch, hidden)
        else:
            passed = await self._device_thread.run(
                Priority.EVALUATE, lambda: self._forward(entered, microbatch, hidden)
            )
        if self._next_stage is None:
            return HopResult(passed.loss_sum, logits=passed.logits)
        assert passed.hidden is not None
        return await self._next_stage.send(microbatch, passed.hidden, deadline)

    async def _forward_in_turn(self, entered: ReplicaRound, microbatch: Microbatch, hidden: memoryview | None) -> _Pass:
        """Compute a query, after a pause that leaves the device to training."""

        def job() -> _Pass:
            begin = self._clock.monotonic_s()
            try:
                return self._forward(entered, microbatch, hidden)
            finally:
                self._query_ended = self._clock.monotonic_s()
                self._query_seconds = self._query_ended - begin

        async with self._query_turn:
            pause_s = query_pause_s(self._query_seconds, self._device_thread.idle_s)
            await anyio.sleep(max(self._query_ended + pause_s - self._clock.monotonic_s(), 0.0))
            return await self._device_thread.run(Priority.QUERY, job)

    # The rest runs in the device thread.

    def give_up(self) -> None:
        """Count no microbatch any more: this peer leaves, and brings none to an average.

        Callers have those that come after it computed elsewhere.
        """
        self._has_given_up = True

    def _forward(self, entered: ReplicaRound, microbatch: Microbatch, hidden: memoryview | None) -> _Pass:
        trainer, wire = self._trainer, self._resolved.manifest.wire
        # The round may have ended since this microbatch came: no round waits for queries, and a rewind for nothing.
        if entered.step.weights_version != trainer.weights_version:
            raise RoundClosed(f"the weights of round {entered.number} have changed", entered.number + 1)
        shape = num_samples, length, _ = microbatch.passed_shape(self._resolved)
        num_tokens = length + (microbatch.mode != "predict")
        graph: ForwardPass | None = None
        with out_of_memory_fails_hop():
            has_marks = self._resolved.manifest.data.has_targets and microbatch.mode != "predict"
            tokens_BS = decode_tokens(
                microbatch.tokens, (num_samples, num_tokens), self._resolved.vocab_size, has_marks=has_marks
            )
            hidden_BTD = None if hidden is None else decode(hidden, shape, wire.activations, trainer.device)
            if microbatch.mode == "train":
                graph = trainer.forward(tokens_BS, hidden_BTD)
                output = graph.output
            elif microbatch.mode == "predict":
                output = trainer.predict(tokens_BS, hidden_BTD)
            else:
                output = trainer.evaluate(tokens_BS, hidden_BTD)
            if not trainer.spec.is_last:
                self._check_output(output)
                return _Pass(graph, self._encode(output, wire.activations))
            if microbatch.mode == "predict":
                return _Pass(logits=self._encode(output, PLAIN))
            loss_sum = float(output.sum())
        if not abs(loss_sum) <= MAX_LOSS:
            raise NotFinite(
                "the loss is not finite, or beyond reason: lower the learning rate, or look for broken data"
            )
        return _Pass(graph, loss_sum=loss_sum)

    def _backward(self, entered: ReplicaRound, microbatch: Microbatch, passed: _Pass, result: HopResult) -> HopResult:
        """Compute the gradient of the stage's input, and count the microbatch, if it is not counted already.

        Raises:
            InvalidMessage: the gradient that came back from the next stage cannot be used
            NotServing: this peer has given up
        """
        if self._has_given_up:
            raise NotServing("this peer leaves, and hands nothing over any more")
        trainer, codec = self._trainer, self._resolved.manifest.wire.gradients
        assert passed.graph is not None
        grad_BTD = None
        if not trainer.spec.is_last:
            assert result.grad is not None
            with out_of_memory_fails_hop():
                grad_BTD = decode(result.grad, microbatch.passed_shape(self._resolved), codec, trainer.device)
        counts, held = microbatch.id not in entered.counted, trainer.num_samples
        try:
            with out_of_memory_fails_hop():
                input_grad_BTD = trainer.backward(passed.graph, grad_BTD, counts=counts)
                seed = rounding_seed(microbatch.id, trainer.spec.index)
                encoded = None if input_grad_BTD is None else self._encode(input_grad_BTD, codec, seed)
                if encoded is None and trainer.device.type == "cuda":
                    # Nothing is read from the GPU: its time, and its errors, would count as those of a later pass.
                    torch.cuda.synchronize(trainer.device)
        except (InvalidMessage, RoundClosed):
            raise  # nothing has been added
        except Exception as error:
            if counts:  # the accumulator may hold a part of the gradient, all of it uncounted, or what is not finite
                self.lose(entered, held, error)
            raise
        # The accumulator holds the microbatch now, so nothing may fail before it is counted.
        if counts:
            entered.counted[microbatch.id] = microbatch.num_samples
        reply = HopResult(result.loss_sum, encoded)
        if encoded is not None:
            entered.replies[microbatch.id] = reply
            while len(entered.replies) > self._replies_kept:
                entered.replies.popitem(last=False)
        return reply

    def lose(self, entered: ReplicaRound, num_samples: int, error: Exception) -> None:
        """Empty the accumulator, since the device has failed half-way: the round is void."""
        self._trainer.discard_gradients()
        entered.forget_counted()
        self._work.lose(entered.number)
        self._metrics.tell_lost(num_samples, first_line(error), round_number=entered.number)

    @staticmethod
    def _check_output(hidden_BTD: torch.Tensor) -> None:
        """Raise NotFinite if the next stage would refuse it, and take this peer for one that sends nonsense."""
        try:
            check_hidden(hidden_BTD, MAX_SENT_HIDDEN)
        except InvalidMessage as error:
            raise NotFinite(f"what this stage computed cannot be sent: {error}") from error

    @staticmethod
    def _encode(tensor: torch.Tensor, codec: str, seed: int | None = None) -> memoryview:
        try:
            return encode(tensor, codec, seed)
        except OverflowError as error:
            raise NotFinite(f"what this stage computed cannot be sent: {error}") from error
