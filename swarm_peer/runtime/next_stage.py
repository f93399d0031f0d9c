"""Sends a microbatch to a peer of the next stage: chooses it, retries on others, and learns from what happens."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from swarm_peer.config import RunManifest
from swarm_peer.errors import Busy, CallError, HopFailed, InvalidMessage, PeerUnreachable, StepClosed
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.policy.health import PeerHealth
from swarm_peer.policy.routing import Router
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.transport import Reply, Transport, check_body
from swarm_peer.wire.codecs import encoded_bytes
from swarm_peer.wire.messages import QUERIES, MicrobatchCall, MicrobatchReply, Mode

log = logging.getLogger(__name__)

# Pause before all peers are asked again after each was busy or failed; doubled each time, with jitter.
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What travels.

    Attributes:
        id: 16 bytes, the same on every try and at every stage
        mode: train, evaluate, score or predict; see MicrobatchCall
        tokens: encoded (B, T+1), or (B, T) to predict
        length: T of a query that is shorter than the run's sequences
    """

    id: bytes
    step: int
    mode: Mode
    num_samples: int
    tokens: memoryview
    length: int | None = None

    @property
    def is_query(self) -> bool:
        return self.mode in QUERIES

    def hidden_shape(self, manifest: RunManifest, hidden_size: int) -> tuple[int, int, int]:
        return self.num_samples, self.length or manifest.data.sequence_length, hidden_size


@dataclass(frozen=True, slots=True)
class HopResult:
    loss_sum: float
    grad: memoryview | None = None  # encoded gradient (B, T, D) in training
    logits: memoryview | None = None  # (B, V), fp32, to predict
    peer_id: str | None = None  # of the next stage, whose reply it is


class NextStage:
    """The peers of one stage, as the stage before sees them. Belongs to the event loop's thread.

    Attributes:
        leaving: this peer goes, so that it waits for nobody to join a stage that has no peers; maybe all go
    """

    def __init__(
        self,
        stage: int,
        manifest: RunManifest,
        hidden_size: int,
        transport: Transport,
        progress: ProgressBook,
        view: Callable[[], SwarmView],
        metrics: PeerMetrics,
        rng: random.Random,
    ):
        self.stage = stage
        self.leaving = False
        self._manifest = manifest
        self._hash = manifest.hash
        self._hidden_size = hidden_size
        self._transport = transport
        self._progress = progress
        self._view = view
        self._metrics = metrics
        self._rng = rng
        self._router = Router(rng)
        self._health = PeerHealth()
        # Each of their replies looks like a success until it is decoded, so none of them clears the record; time does.
        self._refused = PeerHealth()
        # Queries wait for an idle moment, and may wait in vain: that says nothing of how well a peer trains.
        self._query_router = Router(rng)
        self._query_health = PeerHealth()
        assert isinstance(manifest.model.config, dict)
        self._vocab_size = parse_model_config(manifest.model.config).vocab_size

    @property
    def timeout_s(self) -> float:
        """For one try: a hop's time for this stage and for each one after it."""
        return self._manifest.limits.hop_timeout_s * (self._manifest.stages.count - self.stage)

    async def send(self, microbatch: Microbatch, hidden: memoryview | None, deadline: float) -> HopResult:
        """Run a microbatch through the next stage and all that follow.

        Args:
            hidden: encoded activations (B, T, D); None for stage 0
            deadline: of anyio.current_time; tries end there

        Raises:
            StepClosed: the step is over there: the microbatch belongs to a later one
            HopFailed: no peer did it within the tries and the time
        """
        router, health = self._router, self._health
        if microbatch.is_query:
            router, health = self._query_router, self._query_health
        tried: set[str] = set()
        failures = 0
        backoff_s = FIRST_BACKOFF_S
        reason = "no try was made"
        while failures < self._manifest.limits.hop_tries:
            remaining_s = deadline - anyio.current_time()
            if remaining_s <= 0:
                reason = f"out of time, last: {reason}"
                break
            serving = self._view().serving(self.stage)
            router.update(serving)
            now = time.monotonic()
            avoided = health.avoided(now) | self._health.avoided(now) | self._refused.avoided(now)
            route = router.choose(microbatch.num_samples, avoided | tried)
            if route.peer_id is None:
                reason = f"{route.reason} (tried {len(tried)}, last: {reason})" if tried else route.reason
                if self.leaving and not serving:
                    break
                await anyio.sleep(min(backoff_s * (0.5 + self._rng.random()), max(remaining_s, 0)))
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                tried.clear()
                continue
            try:
                timeout_s = min(remaining_s, self.timeout_s)
                result, samples_per_s = await self._call(route.peer_id, microbatch, hidden, timeout_s)
                health.succeeded(route.peer_id)
                router.observe(route.peer_id, samples_per_s)
                return result
            except StepClosed:
                raise
            except CallError as error:
                reason = f"{error.code}: {error}"
                self._metrics.retries.labels(error.code).inc()
                if error.avoid:
                    self._avoid(route.peer_id, health, reason)
                tried.add(route.peer_id)
                failures += not isinstance(error, Busy)
        raise HopFailed(f"stage {self.stage} after {failures} failed tries: {reason:.300}")

    def refuse(self, result: HopResult, reason: str) -> None:
        """Avoid whose result this is: it cannot be used, which every peer checks before it sends."""
        assert result.peer_id is not None
        self._metrics.retries.labels("refused").inc()
        self._avoid(result.peer_id, self._refused, reason)

    @staticmethod
    def _avoid(peer_id: str, health: PeerHealth, reason: str) -> None:
        pause_s = health.failed(peer_id, time.monotonic())
        log.info("peer_avoided peer=%s seconds=%.0f reason=%s", peer_id, pause_s, reason)

    async def _call(
        self, peer_id: str, microbatch: Microbatch, hidden: memoryview | None, timeout_s: float
    ) -> tuple[HopResult, float]:
        body = MicrobatchCall(
            manifest=self._hash,
            step=microbatch.step,
            stage=self.stage,
            microbatch=microbatch.id,
            mode=microbatch.mode,
            num_samples=microbatch.num_samples,
            length=microbatch.length or self._manifest.data.sequence_length,
            # The callee gives up first, and says why: otherwise this peer would blame it for what a later stage did.
            timeout_s=0.95 * timeout_s,
            counts=self._progress.signed_counts(),
        )
        tensors = (microbatch.tokens,) if hidden is None else (microbatch.tokens, hidden)
        deadline = anyio.current_time() + timeout_s
        try:
            reply = await self._transport.call(peer_id, body, tensors, timeout_s=timeout_s)
        except PeerUnreachable:
            # The reply may have been lost on the way. The same peer knows the id and does not count it twice; another
            # one would. If it cannot be reached again at once, it is gone, and its share of the step with it.
            self._metrics.retries.labels("reconnect").inc()
            reply = await self._transport.call(
                peer_id, body, tensors, timeout_s=max(deadline - anyio.current_time(), 0.001)
            )
        return self._check(peer_id, reply, microbatch)

    def _check(self, peer_id: str, reply: Reply, microbatch: Microbatch) -> tuple[HopResult, float]:
        body = check_body(MicrobatchReply, reply.body)
        self._progress.merge(body.counts)
        if microbatch.mode == "train":
            shape = microbatch.hidden_shape(self._manifest, self._hidden_size)
            grad = _only_tensor(reply, encoded_bytes(shape, self._manifest.wire.gradients))
            return HopResult(body.loss_sum, grad, peer_id=peer_id), body.samples_per_s
        if microbatch.mode == "predict":
            logits = _only_tensor(reply, encoded_bytes((microbatch.num_samples, self._vocab_size), "none"))
            return HopResult(body.loss_sum, logits=logits, peer_id=peer_id), body.samples_per_s
        return HopResult(body.loss_sum, peer_id=peer_id), body.samples_per_s


def _only_tensor(reply: Reply, num_bytes: int) -> memoryview:
    if len(reply.tensors) != 1 or reply.tensors[0].nbytes != num_bytes:
        sizes = [tensor.nbytes for tensor in reply.tensors]
        raise InvalidMessage(f"reply with tensors of {sizes} bytes; one of {num_bytes} is right")
    return reply.tensors[0]
