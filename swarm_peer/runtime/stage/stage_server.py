"""Answers calls with microbatches: checks them, has them admitted and run, and replies.

Makes sure that a repeated call does not run twice. Must not know how a microbatch is computed (executor.py), or when a
round begins and ends. Calls for states are answered by state/state_server.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import anyio

from swarm_peer.codecs import PLAIN
from swarm_peer.errors import Busy, CallTimeout, InvalidMessage, RoundClosed
from swarm_peer.policy.routing import num_callers
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.transport import Handler, Reply
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.round_work import RoundWork
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.stage.stage_client import HopResult, Microbatch
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.messages import MAX_LOGITS_BYTES, QUERIES, Body, MicrobatchCall, MicrobatchReply

log = logging.getLogger(__name__)

# Queries that a peer holds at once for one caller: one computes while the next one arrives, and more would only wait.
MAX_QUERIES_OF_ONE = 2
# And for all callers together: those of strangers at stage 0, or of the stage before, which hands them on.
MAX_QUERIES = 4


class StageServer:
    """Answers the stage before, which sends microbatches, and at stage 0 observers, which send queries.

    Belongs to the event loop's thread.

    A round does not wait for queries (evaluation and sampling by observers). If it ends first, a query's weights are
    gone. Queries do not take room from training microbatches, and they get the device's idle moments.
    """

    def __init__(
        self,
        *,
        context: PeerContext,
        core: ReplicaCore,
        view: Callable[[], SwarmView],
        serves: Callable[[str, int], bool],
        saw_stranger: Callable[[], None],
        work: RoundWork,
    ):
        """Make the server of one replica.

        Args:
            serves: whether a peer serves a stage, by its last announcement that was seen here
            saw_stranger: told that a caller is not known yet
            work: encodes receipts
        """
        self._stage = core.stage
        self._work = work
        self._me = context.identity.peer_id
        self._view = view
        self._serves = serves
        self._resolved = context.resolved
        self._manifest = context.resolved.manifest
        self._rounds = core.rounds
        self._admission = core.admission
        self._executor = core.executor
        self._saw_stranger = saw_stranger
        self._metrics = context.metrics
        self._running: dict[bytes, asyncio.Event] = {}
        # How many callers have a part of this peer, by a view and in a round. Among 100 it takes 0.2 ms to count them.
        self._callers: tuple[SwarmView | None, int, int] = None, 0, 0
        self._queries: Counter[str] = Counter()  # by caller
        self.calls: dict[type[Body], Handler] = {MicrobatchCall: self.handle}

    async def handle(self, caller: str, call: MicrobatchCall, tensors: Sequence[memoryview]) -> Reply:
        """Run a microbatch through this stage and all later ones; count it once, however often the call is repeated."""
        self._check_caller(caller, call)
        self._check_sizes(call, tensors)
        microbatch = Microbatch(
            call.microbatch,
            call.round_number,
            call.mode,
            call.num_samples,
            tensors[0],
            call.length,
            call.timeline,
            call.base,
        )
        hidden = None if call.stage == 0 else tensors[1]
        outcome = "failed"
        limits, stages = self._manifest.limits, self._manifest.stages
        timeout_s = min(call.timeout_s, limits.hop_timeout_s * stages.count)
        try:
            with anyio.fail_after(timeout_s):
                result = await self._run_once(caller, microbatch, hidden, anyio.current_time() + timeout_s)
            outcome = "done"
        except TimeoutError:
            # The device may have been adding the gradient by then. If so, no other peer is to count the microbatch.
            if (counted := self._rounds.current.replies.get(microbatch.id)) is None or call.mode != "train":
                raise CallTimeout(f"not done within {timeout_s:.1f} s") from None
            result, outcome = counted, "done"
        except Exception as error:
            outcome = getattr(error, "code", "defect")
            raise
        finally:
            self._metrics.microbatches.labels(call.mode, outcome).inc()
        body = MicrobatchReply(
            loss_sum=result.loss_sum,
            samples_per_s=self._executor.samples_per_s,
            base=result.base,
            receipt=self._work.encode_receipt(result.receipt),
        )
        return Reply(body.model_dump(), [tensor for tensor in (result.grad, result.logits) if tensor is not None])

    def _check_caller(self, caller: str, call: MicrobatchCall) -> None:
        """Serve those who serve the stage before; at stage 0 anybody, since it takes nothing but queries.

        Raises:
            Busy: this peer has not seen yet that the caller serves that stage: it tries another peer, or again
        """
        if call.stage > 0 and not self._serves(caller, call.stage - 1):
            self._saw_stranger()
            self._metrics.microbatches.labels(call.mode, "stranger").inc()
            raise Busy(f"no announcement of this peer for stage {call.stage - 1} has been seen here yet")

    async def _query(
        self, caller: str, microbatch: Microbatch, hidden: memoryview | None, deadline: float
    ) -> HopResult:
        if self._queries[caller] >= MAX_QUERIES_OF_ONE or self._queries.total() >= MAX_QUERIES:
            raise Busy(f"{self._queries[caller]} queries of this caller are under way, {self._queries.total()} of all")
        self._queries[caller] += 1
        try:
            reached = await self._admission.reach(microbatch.round_number)
            return await self._executor.run(reached, microbatch, hidden, deadline)
        finally:
            self._queries[caller] -= 1
            self._queries += Counter()  # forget those at zero

    async def _run_once(
        self, caller: str, microbatch: Microbatch, hidden: memoryview | None, deadline: float
    ) -> HopResult:
        if microbatch.is_query:
            return await self._query(caller, microbatch, hidden, deadline)
        callers = self._num_callers(microbatch.round_number)
        enter = partial(self._admission.enter, microbatch.round_number, caller=caller, num_callers=callers)
        if microbatch.mode != "train":
            async with enter() as entered:
                self._check_timeline(microbatch, entered)
                return await self._executor.run(entered, microbatch, hidden, deadline)
        # The same microbatch can come again while it runs, from a caller that lost its connection.
        while (other := self._running.get(microbatch.id)) is not None:
            await other.wait()
        # Not admitted first: where this peer is full, drains or ends the round, another one would count it, too.
        if (known := self._executor.counted_reply(self._rounds.current, microbatch.id)) is not None:
            return known
        done = self._running[microbatch.id] = asyncio.Event()
        try:
            async with enter() as entered:
                self._metrics.in_flight.set(self._admission.admitted)
                self._check_timeline(microbatch, entered)
                return await self._executor.run(entered, microbatch, hidden, deadline, caller)
        finally:
            self._metrics.in_flight.set(self._admission.admitted)
            del self._running[microbatch.id]
            done.set()

    def _num_callers(self, round_number: int) -> int:
        view, (counted_view, counted_round, number) = self._view(), self._callers
        if view is not counted_view or round_number != counted_round:
            own, before = view.serving(self._stage), view.serving(self._stage - 1)
            number = num_callers(self._me, own, before, round_number)
            self._callers = view, round_number, number
        return number

    def _check_timeline(self, microbatch: Microbatch, entered: ReplicaRound) -> None:
        """Refuse a microbatch of another timeline.

        After the run was cut in two, both parts may be in a round of the same number, with different weights.
        """
        own, its = entered.step.timeline.first_round, microbatch.timeline
        if its is None or its == own:
            return
        text = (
            f"in round {entered.number}, the caller is on the timeline from round {its}, this peer on that from {own}"
        )
        raise RoundClosed(text, entered.number + (its < own))

    def _check_sizes(self, call: MicrobatchCall, tensors: Sequence[memoryview]) -> None:
        if call.num_samples > self._manifest.training.microbatch_size:
            most = self._manifest.training.microbatch_size
            raise InvalidMessage(f"microbatch of {call.num_samples} samples; at most {most} are allowed")
        longest = self._manifest.data.sequence_length
        if call.length > longest or (call.mode not in QUERIES and call.length != longest):
            raise InvalidMessage(f"{call.mode} with {call.length} tokens a sample; the run's samples have {longest}")
        logit_bytes = encoded_bytes((call.num_samples, self._resolved.vocab_size), PLAIN)
        if call.mode == "predict" and logit_bytes > MAX_LOGITS_BYTES:
            raise InvalidMessage(f"logits for {call.num_samples} samples are more than {MAX_LOGITS_BYTES} bytes")
        expected = [4 * call.num_samples * (call.length + (call.mode != "predict"))]
        if call.stage > 0:
            shape = (call.num_samples, call.length, self._resolved.boundary_width)
            expected.append(encoded_bytes(shape, self._manifest.wire.activations))
        sizes = [tensor.nbytes for tensor in tensors]
        if sizes != expected:
            raise InvalidMessage(f"tensors of {sizes} bytes where tokens and activations of {expected} were expected")
