"""The model of a live run: evaluation and sampling through the run's own pipeline.

A query is a microbatch that begins here and counts nowhere. Each answer comes of the weights of one round at all
stages: the call names the round, and where a stage has left it, the query begins anew with the next.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import anyio
import numpy as np
import torch

from coordinator.query.sampling import Sampling, choose_token
from swarm_peer.codecs import PLAIN
from swarm_peer.errors import CallError, RoundClosed, SwarmError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.host.machine import FolderStorage, SystemClock, SystemRandom, SystemThreads
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.runtime.stage.stage_client import HopResult, Microbatch, StageClient
from swarm_peer.token_marks import weight_of
from swarm_peer.wire.codecs import decode, encode_tokens
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import Mode

# Longest wait for one answer. Queries have the device's idle moments; a busy stage has one at the end of each round.
PATIENCE_S = 300.0
QUERY_PAUSE_S = 0.5
# How long the peers of a run may stay out of sight at first: announcements come every few seconds.
FIND_PEERS_S = 30.0
# Queries that a stage-0 peer takes of one caller at once; see MAX_QUERIES_OF_ONE in runtime/stage/stage_server.py.
QUERIES_PER_PEER = 2
# Passes over the samples: where the run went on meanwhile, those of the older rounds are evaluated again.
EVALUATION_PASSES = 3
# Rounds that one pass over the samples may meet. If it meets more, the next pass would as well.
LONGEST_SPAN = 2

Look = Callable[[Sequence[int]], Awaitable[SwarmView]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A mean over samples.

    Attributes:
        loss: nats per token
        optimizer_step: of the newest weights that a sample met
        oldest_optimizer_step: of the oldest ones, where rounds are shorter than the evaluation
    """

    loss: float
    perplexity: float
    samples: int
    tokens_per_sample: int
    optimizer_step: int
    oldest_optimizer_step: int
    seconds: float


def _observer_context(resolved: ResolvedManifest, identity: Identity, rng: random.Random) -> PeerContext:
    """The context of a process that sends microbatches to stage 0 and serves no stage itself."""
    return PeerContext(
        run_id="",
        resolved=resolved,
        identity=identity,
        options=PeerOptions(initial_peers=("none: it serves no stage",)),
        clock=SystemClock(),
        random=SystemRandom(str(rng.random())),
        threads=SystemThreads(),
        storage=FolderStorage(Path(os.devnull)),
        metrics=PeerMetrics(),
        changed=Condition(),
    )


class LiveModel:
    """The model of a live run, as its pipeline computes it. Belongs to the event loop's thread.

    Args:
        look: looks up which peers serve some stages now
        rng: draws the routes of microbatches
    """

    def __init__(
        self,
        resolved: ResolvedManifest,
        *,
        identity: Identity,
        transport: Transport,
        look: Look,
        rng: random.Random,
        patience_s: float = PATIENCE_S,
    ):
        self.resolved = resolved
        self._manifest = manifest = resolved.manifest
        self._look = look
        self._patience_s = patience_s
        self._view = SwarmView(manifest.stages.count)
        self._round: int | None = None
        context = _observer_context(resolved, identity, rng)
        self._pipeline = StageClient(context=context, stage=0, transport=transport, view=lambda: self._view, work=None)

    async def evaluate(self, samples_NS: np.ndarray) -> Evaluation:
        """Mean loss of samples (N, T+1), all with the weights of one round where the run leaves time for it.

        Raises:
            SwarmError: the pipeline gave no answer
        """
        began = time.monotonic()
        batches = torch.split(torch.from_numpy(samples_NS), self._manifest.training.microbatch_size)
        results = [(-1, 0.0)] * len(batches)  # round and sum of losses
        for _ in range(EVALUATION_PASSES):
            newest = max(round_number for round_number, _ in results)
            missing = [number for number, (round_number, _) in enumerate(results) if round_number < max(newest, 0)]
            if not missing or len({round_number for round_number, _ in results}) > LONGEST_SPAN:
                break
            await self._refresh_view()
            for number, result in zip(missing, await self._score([batches[n] for n in missing]), strict=True):
                results[number] = result
        loss = sum(loss_sum for _, loss_sum in results) / weight_of(samples_NS, self._manifest.data)
        rounds = [round_number for round_number, _ in results]
        await self._refresh_view()
        return Evaluation(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            samples=len(samples_NS),
            tokens_per_sample=samples_NS.shape[1] - 1,
            optimizer_step=self._optimizer_step_at(max(rounds)),
            oldest_optimizer_step=self._optimizer_step_at(min(rounds)),
            seconds=time.monotonic() - began,
        )

    async def _score(self, batches: Sequence[torch.Tensor]) -> list[tuple[int, float]]:
        """Round and sum of losses of each batch."""
        results = [(-1, 0.0)] * len(batches)
        room = anyio.Semaphore(QUERIES_PER_PEER * len(self._view.serving(0)))

        async def score(number: int) -> None:
            async with room:
                result, round_number = await self._ask("score", batches[number])
            results[number] = round_number, result.loss_sum

        with first_error():
            async with anyio.create_task_group() as tasks:
                for number in range(len(batches)):
                    tasks.start_soon(score, number)
        return results

    async def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        """Logits (V) of the token that follows a prefix, of which the last T tokens count.

        Raises:
            SwarmError: the pipeline gave no answer
        """
        tokens_1T = torch.tensor([list(prefix)[-self._manifest.data.sequence_length :]])
        result, _ = await self._ask("predict", tokens_1T)
        assert result.logits is not None
        return decode(result.logits, (1, self.resolved.vocab_size), PLAIN)[0]

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[int, None]:
        """Continue a prompt, token by token.

        Peers keep nothing between two tokens (there is no key-value cache): for each, the whole prefix, cropped to the
        run's sequence length, goes through the pipeline again. The weights are those of the round that each token
        meets.
        """
        generator = torch.Generator()
        generator.manual_seed(sampling.seed) if sampling.seed is not None else generator.seed()
        tokens = list(prompt)
        for _ in range(sampling.num_tokens):
            logits_V = await self.logits(tokens)
            tokens.append(choose_token(logits_V, sampling.temperature, sampling.top_k, generator))
            yield tokens[-1]

    async def _ask(self, mode: Mode, tokens: torch.Tensor) -> tuple[HopResult, int]:
        """The answer to one microbatch, and its round."""
        deadline = anyio.current_time() + self._patience_s
        length = tokens.shape[1] - (mode == "score")
        while True:
            round_number = self._round if self._round is not None else await self._refresh_round()
            microbatch = Microbatch(os.urandom(16), round_number, mode, len(tokens), encode_tokens(tokens), length)
            try:
                result = await self._pipeline.send(microbatch, None, deadline)
                if result.logits is not None:
                    decode(result.logits, (len(tokens), self.resolved.vocab_size), PLAIN)  # finite
                return result, round_number
            except RoundClosed as error:
                if self._round == round_number:  # otherwise another query has found out before
                    self._round = max(round_number + 1, error.round_number or 0)
                reason: CallError = error
            except CallError as error:
                # Whatever it was (peers come and go, a peer announced a wrong round), the next try begins from nothing.
                self._round = None
                reason = error
                await anyio.sleep(QUERY_PAUSE_S)
            if anyio.current_time() > deadline:
                raise SwarmError(f"the run gave no answer within {self._patience_s:.0f} s, last: {reason}") from reason

    async def _refresh_round(self) -> int:
        """Look up the round of stage 0, which may be some seconds old."""
        await self._refresh_view()
        # Half of the peers may announce anything. In doubt the older round: a peer that has ended it answers with its
        # own round, and it refuses one that is far ahead.
        self._round = median_low(peer.round_number for peer in self._view.serving(0))
        return self._round

    async def _refresh_view(self) -> None:
        deadline = anyio.current_time() + min(FIND_PEERS_S, self._patience_s)
        while True:
            self._view = await self._look(range(self._manifest.stages.count))
            missing = [stage for stage in range(self._manifest.stages.count) if not self._view.serving(stage)]
            if not missing:
                return
            if anyio.current_time() > deadline:
                raise SwarmError(f"nobody serves stage {missing[0]} of the run: wait until it has peers")
            await anyio.sleep(QUERY_PAUSE_S)

    def _optimizer_step_at(self, round_number: int) -> int:
        """The optimizer step of a round, by the announcement that is nearest to it: the two differ after a rewind."""
        peer = min(self._view.serving(0), key=lambda peer: abs(peer.round_number - round_number))
        return max(peer.optimizer_step + round_number - peer.round_number, 0)
