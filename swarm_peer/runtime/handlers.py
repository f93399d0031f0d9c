"""Answers the calls of other peers: checks who and what, and hands on to the part that does it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import Busy, CallTimeout, InvalidMessage, NotServing
from swarm_peer.runtime.gate import StepGate
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.next_stage import HopResult, Microbatch
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.stage_runner import StageRunner
from swarm_peer.runtime.transport import AnyBody, Handler, Reply, check_body
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.messages import MAX_LOGITS_BYTES, QUERIES, Body, MicrobatchCall, MicrobatchReply

log = logging.getLogger(__name__)

# Queries that a peer holds at once: one computes while the next arrives, and more would only wait.
MAX_QUERIES = 2


class CallDispatcher:
    """The CallHandler of a peer.

    Args:
        calls: what answers each kind of call
    """

    def __init__(self, manifest_hash: str, stage: int, calls: Mapping[type[Body], Handler]):
        self._hash = manifest_hash
        self._stage = stage
        self._calls = {schema.model_fields["op"].default: (schema, handler) for schema, handler in calls.items()}

    async def __call__(self, caller: str, op: str, body: dict[str, Any], tensors: Sequence[memoryview]) -> Reply:
        known = self._calls.get(op)
        if known is None:
            raise InvalidMessage(f"unknown operation {op[:40]!r}")
        schema, handler = known
        call = check_run(schema, body, self._hash)
        if getattr(call, "stage", self._stage) != self._stage:
            raise NotServing(f"this peer serves stage {self._stage}, not {call.stage}")
        return await handler(caller, call, tensors)


def check_run(schema: type[AnyBody], body: dict[str, Any], manifest_hash: str) -> AnyBody:
    """Validate a call's body and that it is meant for this run.

    Raises:
        InvalidMessage
    """
    call = check_body(schema, body)
    if getattr(call, "manifest", manifest_hash) != manifest_hash:
        raise InvalidMessage(f"call for the run with manifest {call.manifest}; this one has {manifest_hash}")
    return call


class MicrobatchHandler:
    """Serves the microbatches that the stage before sends, and queries. Belongs to the event loop's thread.

    Queries (evaluation and sampling by onlookers) are not inside the step: it ends without them, and they find their
    weights gone. They have room of their own, and the device's idle moments.
    """

    def __init__(
        self,
        manifest: RunManifest,
        hidden_size: int,
        gate: StepGate,
        runner: StageRunner,
        progress: ProgressBook,
        metrics: PeerMetrics,
    ):
        self._manifest = manifest
        self._hidden_size = hidden_size
        self._gate = gate
        self._runner = runner
        self._progress = progress
        self._metrics = metrics
        self._running: dict[bytes, asyncio.Event] = {}
        self._num_queries = 0
        gate.on_open = runner.note_step
        self.calls: dict[type[Body], Handler] = {MicrobatchCall: self.handle}

    async def handle(self, caller: str, call: MicrobatchCall, tensors: Sequence[memoryview]) -> Reply:
        self._progress.merge(call.counts)
        self._check_sizes(call, tensors)
        microbatch = Microbatch(call.microbatch, call.step, call.mode, call.num_samples, tensors[0], call.length)
        hidden = None if call.stage == 0 else tensors[1]
        outcome = "failed"
        limits, stages = self._manifest.limits, self._manifest.stages
        timeout_s = min(call.timeout_s, limits.hop_timeout_s * stages.count)
        try:
            with anyio.fail_after(timeout_s):
                result = await self._run_once(microbatch, hidden, anyio.current_time() + timeout_s)
            outcome = "done"
        except TimeoutError:
            raise CallTimeout(f"not done within {timeout_s:.1f} s") from None
        except Exception as error:
            outcome = getattr(error, "code", "defect")
            raise
        finally:
            self._metrics.microbatches.labels(call.mode, outcome).inc()
        body = MicrobatchReply(
            loss_sum=result.loss_sum,
            samples_per_s=self._runner.samples_per_s,
            counts=self._progress.signed_counts(),
        )
        return Reply(body.model_dump(), [tensor for tensor in (result.grad, result.logits) if tensor is not None])

    async def _query(self, microbatch: Microbatch, hidden: memoryview | None, deadline: float) -> HopResult:
        if self._num_queries >= MAX_QUERIES:
            raise Busy(f"{self._num_queries} queries are under way")
        self._num_queries += 1
        try:
            await self._gate.reach(microbatch.step)
            return await self._runner.run(microbatch, hidden, deadline)
        finally:
            self._num_queries -= 1

    async def _run_once(self, microbatch: Microbatch, hidden: memoryview | None, deadline: float) -> HopResult:
        if microbatch.is_query:
            return await self._query(microbatch, hidden, deadline)
        if microbatch.mode != "train":
            async with self._gate.enter(microbatch.step):
                return await self._runner.run(microbatch, hidden, deadline)
        # The same microbatch can come again while it runs, from a caller that lost its connection.
        while (other := self._running.get(microbatch.id)) is not None:
            await other.wait()
        done = self._running[microbatch.id] = asyncio.Event()
        try:
            async with self._gate.enter(microbatch.step):
                self._metrics.in_flight.set(self._gate.admitted)
                known = self._runner.counted_reply(microbatch.id)
                return known or await self._runner.run(microbatch, hidden, deadline)
        finally:
            self._metrics.in_flight.set(self._gate.admitted)
            del self._running[microbatch.id]
            done.set()

    def _check_sizes(self, call: MicrobatchCall, tensors: Sequence[memoryview]) -> None:
        if call.num_samples > self._manifest.training.microbatch_size:
            raise InvalidMessage(
                f"microbatch of {call.num_samples} samples; at most {self._manifest.training.microbatch_size} go"
            )
        longest = self._manifest.data.sequence_length
        if call.length > longest or (call.mode not in QUERIES and call.length != longest):
            raise InvalidMessage(f"{call.mode} with {call.length} tokens a sample; the run's samples have {longest}")
        if call.mode == "predict" and encoded_bytes((call.num_samples, self._runner.vocab_size), "none") > (
            MAX_LOGITS_BYTES
        ):
            raise InvalidMessage(f"logits for {call.num_samples} samples are more than {MAX_LOGITS_BYTES} bytes")
        expected = [4 * call.num_samples * (call.length + (call.mode != "predict"))]
        if call.stage > 0:
            shape = (call.num_samples, call.length, self._hidden_size)
            expected.append(encoded_bytes(shape, self._manifest.wire.activations))
        sizes = [tensor.nbytes for tensor in tensors]
        if sizes != expected:
            raise InvalidMessage(f"tensors of {sizes} bytes where tokens and activations of {expected} were expected")
