"""Sends microbatches to peers of the next stage: chooses a peer, tries others if it fails, and learns from the outcome.

Owns the speeds and failures of these peers; policy/routing.py chooses. Must not know what the tensors mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import anyio

from swarm_peer.codecs import PLAIN
from swarm_peer.errors import Busy, CallError, HopFailed, InvalidMessage, NotFinite, PeerUnreachable, RoundClosed
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.peer_backoff import PeerBackoff
from swarm_peer.policy.routing import Router
from swarm_peer.policy.view import Life, SwarmView
from swarm_peer.protocol.log import Base, Receipt
from swarm_peer.protocol.statements import Signed
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network.transport import Reply, Transport, check_body
from swarm_peer.runtime.stage.round_work import RoundWork
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.messages import LONGEST_CALL_S, QUERIES, MicrobatchCall, MicrobatchReply, Mode

log = logging.getLogger(__name__)

# A callee gets so much less time than its caller has, or a share if that is more: for its reply's way back. A caller
# that gave up first would not learn which stage is to blame, and would have another peer count the microbatch.
WAY_BACK_S = 1.0
WAY_BACK_SHARE = 0.05
# Pause before the next try when every peer of the stage was busy or has failed; doubled each time, with jitter.
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples that travel through the pipeline together, without their hidden states.

    Attributes:
        id: 16 bytes, the same on every try and at every stage
        mode: train, evaluate, score or predict; see MicrobatchCall
        tokens: encoded (B, T+1), or (B, T) to predict
        length: T of a query that is shorter than the run's sequences; None for the run's own length
        timeline: first round of the timeline that it was launched on; None for queries
        base: heads of the stages that it has passed
    """

    id: bytes
    round_number: int
    mode: Mode
    num_samples: int
    tokens: memoryview
    length: int | None = None
    timeline: int | None = None
    base: Base = ()

    @property
    def is_query(self) -> bool:
        """Whether an observer sent it, so that no round waits for it."""
        return self.mode in QUERIES

    def passed_shape(self, resolved: ResolvedManifest) -> tuple[int, int, int]:
        """The shape (B, T, W) of what passes the boundary between stages."""
        return self.num_samples, self.length or resolved.manifest.data.sequence_length, resolved.boundary_width


@dataclass(frozen=True, slots=True)
class HopResult:
    """The result of a microbatch at one stage and all later ones.

    Attributes:
        grad: in training, the encoded gradient (B, T, W) with respect to the stage's input
        logits: in mode predict, encoded (B, V), fp32
        peer: the peer of the next stage that replied; None if this peer computed the result
        base: heads of the stages that have computed it
        receipt: what a peer of stage 1 has signed
    """

    loss_sum: float
    grad: memoryview | None = None
    logits: memoryview | None = None
    peer: Life | None = None
    base: Base = ()
    receipt: Signed[Receipt] | None = None


class StageClient:
    """Sends microbatches to the peers of one stage. Belongs to the event loop's thread."""

    def __init__(
        self,
        *,
        context: PeerContext,
        stage: int,
        transport: Transport,
        view: Callable[[], SwarmView],
        work: RoundWork | None,
        carried_samples_per_s: Callable[[str], float] = lambda peer_id: math.inf,
    ):
        """Make a client that has called nobody.

        Args:
            carried_samples_per_s: that the way to a peer carries
            work: takes the receipts of training microbatches; None for an observer, which sends queries alone
        """
        self.stage = stage
        self._work = work
        self._carried_samples_per_s = carried_samples_per_s
        self._leaving = False
        self._clock = context.clock
        self._resolved = context.resolved
        self._manifest = context.resolved.manifest
        self._transport = transport
        self._view = view
        self._metrics = context.metrics
        self._rng = context.random.stream(f"routes to stage {stage}")
        self._router = Router(self._rng)
        self._backoff: PeerBackoff[Life] = PeerBackoff()
        # The reply of a refused peer looks like a success until it is decoded. So no reply clears this record, only
        # time does.
        self._refused: PeerBackoff[Life] = PeerBackoff()
        # A query may wait for an idle device in vain, which does not mean that the peer trains badly.
        self._query_router = Router(self._rng)
        self._query_backoff: PeerBackoff[Life] = PeerBackoff()

    def stop_waiting(self) -> None:
        """Fail microbatches at once while the stage has no peers: this peer leaves, and perhaps all others do, too."""
        self._leaving = True

    @property
    def timeout_s(self) -> float:
        """Time for one try, in seconds: one hop for this stage and one for each after it, a day at most."""
        hops = self._manifest.stages.count - self.stage
        return min(self._manifest.limits.hop_timeout_s * hops, LONGEST_CALL_S)

    async def send(self, microbatch: Microbatch, hidden: memoryview | None, deadline: float) -> HopResult:
        """Run a microbatch through this stage and all later ones.

        Args:
            hidden: encoded activations (B, T, D); None for stage 0
            deadline: of all tries together, on the clock of anyio.current_time

        Raises:
            RoundClosed: the callee has ended the round, so the microbatch belongs to a later one
            NotFinite: what each of the peers that were tried has computed is not finite
            HopFailed: no peer succeeded within the tries and the time, for whatever other reason
        """
        with ExitStack() as until_done:
            return await self._send(microbatch, hidden, deadline, until_done)

    async def _send(
        self, microbatch: Microbatch, hidden: memoryview | None, deadline: float, until_done: ExitStack
    ) -> HopResult:
        router, backoff = self._router, self._backoff
        if microbatch.is_query:
            router, backoff = self._query_router, self._query_backoff
        tried: set[str] = set()
        sent: set[Life] = set()
        failures = num_not_finite = 0
        backoff_s, reason, cause = FIRST_BACKOFF_S, "no try was made", ""
        while failures < self._manifest.limits.hop_tries:
            remaining_s = deadline - anyio.current_time()
            if remaining_s <= 0:
                reason = f"{reason}, and then out of time"
                break
            view = self._view()
            serving = view.serving(self.stage)
            if microbatch.is_query:
                router.update(serving)
            else:
                callers = view.serving(self.stage - 1)
                router.update(serving, self._transport.peer_id, callers, microbatch.round_number)
            now = self._clock.monotonic_s()
            lives = {peer.peer_id: peer.life for peer in serving}
            failed = backoff.avoided(now) | self._backoff.avoided(now) | self._refused.avoided(now)
            avoided = {peer_id for peer_id, life in lives.items() if life in failed}
            route = router.choose(microbatch.num_samples, avoided | tried, self._carried_samples_per_s)
            if route.peer_id is None:
                reason = f"{cause}, and now {route.reason}" if cause else route.reason
                if self._leaving and not serving:
                    break
                await anyio.sleep(min(backoff_s * (0.5 + self._rng.random()), max(remaining_s, 0)))
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                tried.clear()
                continue
            peer = lives[route.peer_id]
            if peer in sent:  # it is outstanding there once, however often it is tried
                router.done(peer, microbatch.num_samples)
            else:
                sent.add(peer)
                until_done.callback(router.done, peer, microbatch.num_samples)
            try:
                timeout_s = min(remaining_s, self.timeout_s)
                result, samples_per_s = await self._call(peer, microbatch, hidden, timeout_s)
                backoff.succeeded(peer)
                router.observe(route.peer_id, samples_per_s)
                return result
            except RoundClosed:
                raise
            except CallError as error:
                reason = cause = _cause_of(error)
                self._metrics.retries.labels(error.code).inc()
                if error.avoid:
                    self._avoid(peer, backoff, reason)
                tried.add(route.peer_id)
                failures += not isinstance(error, Busy)
                num_not_finite += isinstance(error, NotFinite)
        raise _failed_hop(self.stage, reason, failures, num_not_finite)

    def refuse(self, result: HopResult, reason: str) -> None:
        """Avoid the peer that sent an unusable result: a good peer checks its results before it sends them."""
        assert result.peer is not None
        self._metrics.retries.labels("refused").inc()
        self._avoid(result.peer, self._refused, reason)

    def _avoid(self, peer: Life, backoff: PeerBackoff[Life], reason: str) -> None:
        pause_s = backoff.failed(peer, self._clock.monotonic_s())
        log.info("peer_avoided peer=%s seconds=%.0f reason=%s", peer.peer_id, pause_s, reason)

    async def _call(
        self, peer: Life, microbatch: Microbatch, hidden: memoryview | None, timeout_s: float
    ) -> tuple[HopResult, float]:
        deadline = anyio.current_time() + timeout_s
        try:
            reply = await self._ask(peer, microbatch, hidden, timeout_s)
        except PeerUnreachable:
            # The reply may have been lost on the way. So ask the same peer again: it knows the microbatch's id and does
            # not count it twice, as another peer would. If it cannot be reached now, it is gone, and its gradient, too.
            self._metrics.retries.labels("reconnect").inc()
            reply = await self._ask(peer, microbatch, hidden, max(deadline - anyio.current_time(), 0.001))
        return self._check(peer, reply, microbatch)

    async def _ask(self, peer: Life, microbatch: Microbatch, hidden: memoryview | None, timeout_s: float) -> Reply:
        body = MicrobatchCall(
            manifest=self._resolved.hash,
            round_number=microbatch.round_number,
            stage=self.stage,
            microbatch=microbatch.id,
            timeline=microbatch.timeline,
            mode=microbatch.mode,
            num_samples=microbatch.num_samples,
            length=microbatch.length or self._manifest.data.sequence_length,
            timeout_s=time_of_callee(timeout_s, self._manifest.stages.count - self.stage),
            base=microbatch.base,
        )
        tensors = (microbatch.tokens,) if hidden is None else (microbatch.tokens, hidden)
        return await self._transport.call(peer.peer_id, body, tensors, timeout_s=timeout_s)

    def _check(self, peer: Life, reply: Reply, microbatch: Microbatch) -> tuple[HopResult, float]:
        body = check_body(MicrobatchReply, reply.body)
        if microbatch.mode == "train":
            shape = microbatch.passed_shape(self._resolved)
            grad = _only_tensor(reply, encoded_bytes(shape, self._manifest.wire.gradients))
            receipt = self._work.decode_receipt(body.receipt, peer.peer_id) if self._work is not None else None
            return HopResult(body.loss_sum, grad, peer=peer, base=body.base, receipt=receipt), body.samples_per_s
        if microbatch.mode == "predict":
            logits = _only_tensor(reply, encoded_bytes((microbatch.num_samples, self._resolved.vocab_size), PLAIN))
            return HopResult(body.loss_sum, logits=logits, peer=peer), body.samples_per_s
        return HopResult(body.loss_sum, peer=peer), body.samples_per_s


def time_of_callee(timeout_s: float, num_hops: int) -> float:
    """How long a callee may take if its caller has `timeout_s`.

    Args:
        num_hops: stages that are left, the callee's included. Where they are many, each keeps less: together they would
            keep all of it
    """
    share = min(WAY_BACK_SHARE, 0.5 / num_hops)
    return timeout_s - min(max(share * timeout_s, WAY_BACK_S), 0.5 * timeout_s)


def _cause_of(error: CallError) -> str:
    """Why a try has failed; of failures further on, the cause of the last one comes first."""
    return str(error) if isinstance(error, HopFailed) else f"{error.code}: {error}"


def _failed_hop(stage: int, reason: str, num_failures: int, num_not_finite: int) -> HopFailed:
    """The error of a hop of which no try has succeeded. Its cause comes first, where people see it when it is cut."""
    failure = NotFinite if 0 < num_not_finite == num_failures else HopFailed
    return failure(f"{reason:.300} (stage {stage}, failed tries: {num_failures})")


def _only_tensor(reply: Reply, num_bytes: int) -> memoryview:
    if len(reply.tensors) != 1 or reply.tensors[0].nbytes != num_bytes:
        sizes = [tensor.nbytes for tensor in reply.tensors]
        raise InvalidMessage(f"reply with tensors of {sizes} bytes; one of {num_bytes} is right")
    return reply.tensors[0]
