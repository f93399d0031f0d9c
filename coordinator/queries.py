"""What a live run's model knows and writes: evaluation and sampling through the run's own pipeline.

A query is a microbatch that begins here and counts nowhere. Each answer comes of the weights of one global step at all
stages: the call names the step, and where a stage has left it, the query begins anew with the next.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from coordinator.fetching import open_transport
from coordinator.onlooker import onlooker
from coordinator.sampling import TextStream, choose_token
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, StepClosed, SwarmError, UserError
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.bootstrap import find_manifest, read_addresses
from swarm_peer.runtime.data import samples_of, validation_samples
from swarm_peer.runtime.directory import Directory
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.next_stage import HopResult, Microbatch, NextStage
from swarm_peer.runtime.preparation import forbidden_path
from swarm_peer.runtime.processes import run_loop
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.signal import Signal
from swarm_peer.runtime.tokenizers import load_tokenizer
from swarm_peer.runtime.transport import Transport
from swarm_peer.wire.codecs import decode, encode_tokens
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import Mode

# Longest wait for one answer. Queries have the device's idle moments; a busy stage has one at the end of each step.
PATIENCE_S = 300.0
PAUSE_S = 0.5
# How long the peers of a run may stay out of sight at first: announcements come every few seconds.
FIND_PEERS_S = 30.0
# What a stage-0 peer takes at once; see handlers.MAX_QUERIES.
QUERIES_PER_PEER = 2
# Times that samples are evaluated again because the run went on to its next global step meanwhile.
ROUNDS = 3
# Global steps that one round may meet. If it meets more, the next would as well.
LONGEST_SPAN = 2

Look = Callable[[Sequence[int]], Awaitable[SwarmView]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A mean over samples.

    Attributes:
        loss: nats per token
        updates: finished global steps of the weights, and
        oldest_updates: of those that some of the samples met, in a run whose steps are shorter than the evaluation
    """

    loss: float
    perplexity: float
    samples: int
    tokens: int
    updates: int
    oldest_updates: int
    seconds: float


class LiveModel:
    """The model of a live run, as its pipeline computes it. Belongs to the event loop's thread.

    Args:
        look: looks up who serves some stages now
    """

    def __init__(
        self,
        manifest: RunManifest,
        identity: Identity,
        transport: Transport,
        look: Look,
        rng: random.Random,
        patience_s: float = PATIENCE_S,
    ):
        assert isinstance(manifest.model.config, dict)
        self._manifest = manifest
        self._look = look
        self._rng = rng
        self._patience_s = patience_s
        self._view = SwarmView(manifest.stages.count)
        self._step: int | None = None
        config = parse_model_config(manifest.model.config)
        self._vocab_size = config.vocab_size
        metrics, changed, batch = PeerMetrics(), Signal(), manifest.training.global_batch_size
        progress = ProgressBook(manifest.hash, batch, identity, lambda author: False, metrics, changed)
        self._pipeline = NextStage(
            0, manifest, config.hidden_size, transport, progress, lambda: self._view, metrics, rng
        )  # fmt: skip

    async def evaluate(self, samples_NS: np.ndarray) -> Evaluation:
        """Mean loss of samples (N, T+1), all with the weights of one global step where the run leaves time for it.

        Raises:
            SwarmError: the pipeline gave no answer
        """
        began = time.monotonic()
        batches = torch.from_numpy(samples_NS).split(self._manifest.training.microbatch_size)
        results = [(-1, 0.0)] * len(batches)  # step and sum of losses
        for _ in range(ROUNDS):
            newest = max(step for step, _ in results)
            missing = [number for number, (step, _) in enumerate(results) if step < max(newest, 0)]
            if not missing or len({step for step, _ in results}) > LONGEST_SPAN:
                break
            await self._find_peers()
            for number, result in zip(missing, await self._score([batches[n] for n in missing]), strict=True):
                results[number] = result
        loss = sum(loss_sum for _, loss_sum in results) / len(samples_NS)
        steps = [step for step, _ in results]
        await self._find_peers()
        return Evaluation(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            samples=len(samples_NS),
            tokens=samples_NS.shape[1] - 1,
            updates=self._updates_at(max(steps)),
            oldest_updates=self._updates_at(min(steps)),
            seconds=time.monotonic() - began,
        )

    async def _score(self, batches: Sequence[torch.Tensor]) -> list[tuple[int, float]]:
        """Global step and sum of losses of each batch."""
        results = [(-1, 0.0)] * len(batches)
        failures: list[SwarmError] = []
        room = anyio.Semaphore(QUERIES_PER_PEER * len(self._view.serving(0)))

        async def score(number: int) -> None:
            try:
                async with room:
                    result, step = await self._ask("score", batches[number])
                results[number] = step, result.loss_sum
            except SwarmError as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for number in range(len(batches)):
                tasks.start_soon(score, number)
        if failures:
            raise failures[0]
        return results

    async def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        """Logits (V) of the token that follows a prefix, of which the last T tokens count.

        Raises:
            SwarmError: the pipeline gave no answer
        """
        tokens_1T = torch.tensor([list(prefix)[-self._manifest.data.sequence_length :]])
        result, _ = await self._ask("predict", tokens_1T)
        assert result.logits is not None
        return decode(result.logits, (1, self._vocab_size), "none")[0]

    async def generate(
        self, prompt: Sequence[int], num_tokens: int, temperature: float, top_k: int, generator: torch.Generator
    ) -> AsyncIterator[int]:
        """Continue a prompt, token by token.

        Peers keep nothing between two tokens (there is no key-value cache): for each, the whole prefix, cropped to the
        run's sequence length, goes through the pipeline again. The weights are those of the global step that each token
        meets.
        """
        tokens = list(prompt)
        for _ in range(num_tokens):
            logits_V = await self.logits(tokens)
            tokens.append(choose_token(logits_V, temperature, top_k, generator))
            yield tokens[-1]

    async def _ask(self, mode: Mode, tokens: torch.Tensor) -> tuple[HopResult, int]:
        """The answer to one microbatch, and its global step."""
        deadline = anyio.current_time() + self._patience_s
        length = tokens.shape[1] - (mode == "score")
        while True:
            step = self._step if self._step is not None else await self._find_step()
            microbatch = Microbatch(os.urandom(16), step, mode, len(tokens), encode_tokens(tokens), length)
            try:
                result = await self._pipeline.send(microbatch, None, deadline)
                if result.logits is not None:
                    decode(result.logits, (len(tokens), self._vocab_size), "none")  # finite
                return result, step
            except StepClosed as error:
                self._move_on(step, error.step)
                reason: CallError = error
            except CallError as error:
                # Whatever it was (peers come and go, somebody named a wrong step), the next try begins from nothing.
                self._step = None
                reason = error
                await anyio.sleep(PAUSE_S)
            if anyio.current_time() > deadline:
                raise SwarmError(f"the run gave no answer within {self._patience_s:.0f} s, last: {reason}") from reason

    def _move_on(self, step: int, known: int | None) -> None:
        """A stage has left `step`. Another query may have found out before."""
        if self._step == step:
            self._step = max(step + 1, known or 0)

    async def _find_step(self) -> int:
        """The newest step that stage 0 announces, which may be some seconds old."""
        await self._find_peers()
        self._step = max(peer.step for peer in self._view.serving(0))
        return self._step

    async def _find_peers(self) -> None:
        deadline = anyio.current_time() + min(FIND_PEERS_S, self._patience_s)
        while True:
            self._view = await self._look(range(self._manifest.stages.count))
            missing = [stage for stage in range(self._manifest.stages.count) if not self._view.serving(stage)]
            if not missing:
                return
            if anyio.current_time() > deadline:
                raise SwarmError(f"nobody serves stage {missing[0]} of the run: wait until it has peers")
            await anyio.sleep(PAUSE_S)

    def _updates_at(self, step: int) -> int:
        """From the announcement that is nearest to the step: updates and steps differ after a rewind."""
        peer = min(self._view.serving(0), key=lambda peer: abs(peer.step - step))
        return max(peer.updates + step - peer.step, 0)


def read_text_files(files: Sequence[Path]) -> list[str]:
    """Raises UserError: one of them cannot be read."""
    try:
        return [path.read_text(errors="replace") for path in files]
    except OSError as error:
        raise UserError(f"--files: cannot read {error.filename}: {error.strerror}; correct the path") from error


# --- the commands


def evaluate_run(
    initial_peers: Sequence[str],
    run_id: str | None,
    num_samples: int | None,
    files: Sequence[Path],
    data_dir: Path | None,
    cache_dir: Path | None,
) -> dict[str, Any]:
    """Evaluate a live run's model; returns an Evaluation's fields.

    Raises:
        UserError: nobody answers, there is no such run, or no text to evaluate
        SwarmError: the pipeline gave no answer
    """

    async def work(manifest: RunManifest, model: LiveModel) -> dict[str, Any]:
        count = num_samples or manifest.training.validation_samples
        draw = lambda: draw_samples(manifest, count, files, data_dir, cache_dir)  # noqa: E731
        return asdict(await model.evaluate(await anyio.to_thread.run_sync(draw)))

    return _with_live_model(initial_peers, run_id, work)


def draw_samples(
    manifest: RunManifest, num_samples: int, files: Sequence[Path], data_dir: Path | None, cache_dir: Path | None
) -> np.ndarray:
    """Samples of these text files, or of what the run has held out.

    Raises:
        UserError: they cannot be read or are too short, or the run wants to read files here that it may not
    """
    if files:
        if (samples := samples_of(manifest, read_text_files(files), num_samples, cache_dir)) is None:
            length = manifest.data.sequence_length
            raise UserError(f"--files have fewer tokens than one sample of {length + 1}: name more text")
        return samples
    # A manifest is somebody else's, and what is read goes to strangers.
    if (path := forbidden_path(manifest, data_dir)) is not None:
        raise UserError(
            f"the run's held-out text is in {path}: allow it to be read from this machine with --data-dir FOLDER, or "
            f"name a text of your own with --files"
        )
    return validation_samples(manifest, num_samples, cache_dir)


def sample_run(
    initial_peers: Sequence[str],
    run_id: str | None,
    prompt: str,
    num_tokens: int,
    temperature: float,
    top_k: int,
    seed: int | None,
    cache_dir: Path | None,
    write: Callable[[str], None],
) -> None:
    """Write a prompt and what a live run's model makes of it, piece by piece as it comes.

    Raises:
        UserError: nobody answers, or there is no such run
        SwarmError: the pipeline gave no answer
    """
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()

    async def work(manifest: RunManifest, model: LiveModel) -> None:
        assert isinstance(manifest.model.config, dict)
        vocab_size = parse_model_config(manifest.model.config).vocab_size
        tokenizer = load_tokenizer(manifest.data, vocab_size, cache_dir)
        tokens = tokenizer.encode(prompt) or [tokenizer.separator_id]
        text = TextStream(tokenizer, tokens)
        write(prompt)
        async for token in model.generate(tokens, num_tokens, temperature, top_k, generator):
            write(text.push(token))
        write(text.rest())

    _with_live_model(initial_peers, run_id, work)


def _with_live_model(
    initial_peers: Sequence[str], run_id: str | None, work: Callable[[RunManifest, LiveModel], Awaitable[Any]]
) -> Any:
    addresses = read_addresses(initial_peers)
    metrics = PeerMetrics()

    async def run() -> Any:
        _, manifest = await find_manifest(dht, addresses, run_id)
        directory = Directory(manifest, dht, "", None, metrics, Signal())
        async with open_transport(dht, metrics) as transport:
            model = LiveModel(manifest, dht.identity, transport, directory.refresh, random.Random())
            return await work(manifest, model)

    with onlooker(addresses) as dht:
        return run_loop(run)
