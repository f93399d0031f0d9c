"""`evaluate` and `sample`: join a live run's DHT for a while, and ask its model through its pipeline."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import numpy as np

from coordinator.checkpoints.fetching import open_transport
from coordinator.query.chatting import Chat
from coordinator.query.live_model import Evaluation, LiveModel
from coordinator.query.sampling import Sampling, TextStream
from coordinator.watch.observer import LiveRun, observe_run
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.allowed_files import check_tokenizer, forbidden_path
from swarm_peer.runtime.data.corpus import check_shards, open_shards
from swarm_peer.runtime.data.slices import samples_of, validation_samples
from swarm_peer.runtime.data.tokenizers import load_tokenizer
from swarm_peer.runtime.host.machine import SystemThreads

T = TypeVar("T")


class Screen(Protocol):
    """Where a person talks to a model."""

    def read(self) -> str:
        """The next message, waited for in a thread that may be abandoned; empty if there is none any more."""
        ...

    def write(self, text: str) -> None:
        """Show a piece of an answer."""
        ...

    def tell(self, sentence: str) -> None:
        """Show a remark that is not the model's."""
        ...


def evaluate_run(
    initial_peers: Sequence[str], run_id: str | None, draw: Callable[[RunManifest], np.ndarray]
) -> Evaluation:
    """Evaluate a live run's model on the samples that `draw` takes for it.

    Raises:
        UserError: nobody answers, there is no such run, or no text to evaluate
        SwarmError: the pipeline gave no answer
    """

    async def work(model: LiveModel) -> Evaluation:
        return await model.evaluate(await anyio.to_thread.run_sync(draw, model.resolved.manifest))

    return _with_live_model(initial_peers, run_id, work)


def draw_samples(
    manifest: RunManifest,
    num_samples: int | None = None,
    files: Sequence[Path] = (),
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
) -> np.ndarray:
    """Samples of these text files, or of what the run has held out.

    Args:
        num_samples: as many as the run's own validation takes if None
        data_dir: folder of this machine that the run may have its held-out text and its tokenizer read from
        cache_dir: where datasets and tokenizers are cached

    Raises:
        UserError: they cannot be read or are too short, or the run wants to read files here that it may not
    """
    num_samples = num_samples or manifest.training.validation_samples
    check_tokenizer(manifest.data, data_dir)
    if files:
        if (samples := samples_of(manifest, _documents_of(files, manifest), num_samples, cache_dir)) is None:
            length = manifest.data.sequence_length
            raise UserError(f"--files have fewer tokens than one sample of {length + 1}: name more text")
        return samples
    # Somebody else wrote the manifest, and the text that is read goes to strangers.
    if (path := forbidden_path(manifest, data_dir)) is not None:
        raise UserError(
            f"the run's held-out text is in {path.resolve()}: allow it to be read from this machine with --data-dir "
            f"FOLDER, which is that folder or one above it, or name a text of your own with --files"
        )
    return validation_samples(manifest, num_samples, cache_dir)


def _documents_of(files: Sequence[Path], manifest: RunManifest) -> Iterator[str]:
    """The documents of these files, as the run would read them: of text where a name does not say anything else.

    Raises:
        UserError: one of them cannot be read
    """
    for path in files:
        if not path.exists():
            raise UserError(f"--files: cannot read {path}: there is no such file; correct the path")
    section = manifest.data.model_copy(update={"dataset": "text", "files": tuple(map(str, files))})
    shards = open_shards(section, None)
    check_shards(section, shards)
    return itertools.chain.from_iterable(shard() for shard in shards)


def sample_run(
    initial_peers: Sequence[str],
    run_id: str | None,
    prompt: str,
    sampling: Sampling,
    write: Callable[[str], None],
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> None:
    """Write a prompt and what a live run's model makes of it, piece by piece as it comes.

    Args:
        data_dir: folder of this machine that the run may have its tokenizer read from

    Raises:
        UserError: nobody answers, or there is no such run
        SwarmError: the pipeline gave no answer
    """

    async def work(model: LiveModel) -> None:
        check_tokenizer(model.resolved.manifest.data, data_dir)
        tokenizer = load_tokenizer(model.resolved.manifest.data, model.resolved.vocab_size, cache_dir)
        tokens = tokenizer.encode(prompt) or [tokenizer.separator_id]
        text, unwritten = TextStream(tokenizer, tokens), prompt
        async for token in model.generate(tokens, sampling):
            write(unwritten + text.push(token))
            unwritten = ""
        write(unwritten + text.rest())

    _with_live_model(initial_peers, run_id, work)


def chat_with_run(
    initial_peers: Sequence[str],
    run_id: str | None,
    prompt: str | None,
    sampling: Sampling,
    screen: Screen,
    cache_dir: Path | None = None,
    data_dir: Path | None = None,
) -> None:
    """Have a live run's model answer a message, or talk with it.

    Args:
        prompt: the only message; if None, messages come from `screen` until it has none
        data_dir: folder of this machine that the run may have its tokenizer read from

    Raises:
        UserError: nobody answers, there is no such run, it has no chat template, or the prompt is too long for it
        SwarmError: the pipeline gave no answer
    """

    async def work(model: LiveModel) -> None:
        check_tokenizer(model.resolved.manifest.data, data_dir)
        tokenizer = load_tokenizer(model.resolved.manifest.data, model.resolved.vocab_size, cache_dir)
        chat = Chat(model.resolved.manifest.data, tokenizer, sampling.num_tokens, screen.tell)

        def go_on(tokens: Sequence[int], most: int) -> AsyncGenerator[int, None]:
            return model.generate(tokens, replace(sampling, num_tokens=most))

        async def answer(message: str) -> None:
            async for piece in chat.answer(message, go_on):
                screen.write(piece)

        if prompt is not None:
            await answer(prompt)
            return
        while message := await SystemThreads().run(screen.read, abandon_on_cancel=True):
            try:
                await answer(message)
            except UserError as error:
                screen.tell(f"{error}.")

    _with_live_model(initial_peers, run_id, work)


def _with_live_model(initial_peers: Sequence[str], run_id: str | None, work: Callable[[LiveModel], Awaitable[T]]) -> T:
    async def ask(run: LiveRun) -> T:
        resolved = ResolvedManifest.of(run.manifest)
        async with open_transport(run.dht, run.metrics) as transport:
            model = LiveModel(
                resolved,
                identity=run.dht.identity,
                transport=transport,
                look=run.directory.refresh,
                rng=random.Random(),
            )
            return await work(model)

    return observe_run(initial_peers, run_id, ask)
