"""`evaluate` and `sample`: join a live run's DHT for a while, and ask its model through its pipeline."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
import numpy as np
import torch

from coordinator.checkpoints.fetching import open_transport
from coordinator.query.live_model import Evaluation, LiveModel
from coordinator.query.sampling import Sampling, TextStream
from coordinator.watch.observer import observer_dht, observer_directory
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.allowed_files import forbidden_path
from swarm_peer.runtime.data.slices import samples_of, validation_samples
from swarm_peer.runtime.data.tokenizers import load_tokenizer
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import run_loop
from swarm_peer.runtime.network.bootstrap import find_manifest, read_addresses

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EvaluationText:
    """Which text a run is evaluated on.

    Attributes:
        num_samples: of the run's sequence length; as many as the run's own validation takes if None
        files: text files, instead of what the run has held out
        data_dir: folder of this machine that the run may have its held-out text read from
        cache_dir: where datasets and tokenizers are cached
    """

    num_samples: int | None = None
    files: Sequence[Path] = ()
    data_dir: Path | None = None
    cache_dir: Path | None = None


def evaluate_run(initial_peers: Sequence[str], run_id: str | None, text: EvaluationText) -> Evaluation:
    """Evaluate a live run's model.

    Raises:
        UserError: nobody answers, there is no such run, or no text to evaluate
        SwarmError: the pipeline gave no answer
    """

    async def work(resolved: ResolvedManifest, model: LiveModel) -> Evaluation:
        manifest = resolved.manifest
        count = text.num_samples or manifest.training.validation_samples
        samples_NS = await anyio.to_thread.run_sync(
            draw_samples, manifest, count, text.files, text.data_dir, text.cache_dir
        )
        return await model.evaluate(samples_NS)

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
    # Somebody else wrote the manifest, and the text that is read goes to strangers.
    if (path := forbidden_path(manifest, data_dir)) is not None:
        raise UserError(
            f"the run's held-out text is in {path}: allow it to be read from this machine with --data-dir FOLDER, or "
            f"name a text of your own with --files"
        )
    return validation_samples(manifest, num_samples, cache_dir)


def read_text_files(files: Sequence[Path]) -> list[str]:
    """The texts of these files.

    Raises:
        UserError: one of them cannot be read
    """
    try:
        return [path.read_text(errors="replace") for path in files]
    except OSError as error:
        raise UserError(f"--files: cannot read {error.filename}: {error.strerror}; correct the path") from error


def sample_run(
    initial_peers: Sequence[str],
    run_id: str | None,
    prompt: str,
    sampling: Sampling,
    write: Callable[[str], None],
    cache_dir: Path | None = None,
) -> None:
    """Write a prompt and what a live run's model makes of it, piece by piece as it comes.

    Raises:
        UserError: nobody answers, or there is no such run
        SwarmError: the pipeline gave no answer
    """
    generator = torch.Generator()
    generator.manual_seed(sampling.seed) if sampling.seed is not None else generator.seed()

    async def work(resolved: ResolvedManifest, model: LiveModel) -> None:
        tokenizer = load_tokenizer(resolved.manifest.data, resolved.vocab_size, cache_dir)
        tokens = tokenizer.encode(prompt) or [tokenizer.separator_id]
        text = TextStream(tokenizer, tokens)
        write(prompt)
        async for token in model.generate(tokens, sampling.num_tokens, sampling.temperature, sampling.top_k, generator):
            write(text.push(token))
        write(text.rest())

    _with_live_model(initial_peers, run_id, work)


def _with_live_model(
    initial_peers: Sequence[str], run_id: str | None, work: Callable[[ResolvedManifest, LiveModel], Awaitable[T]]
) -> T:
    addresses = read_addresses(initial_peers)
    metrics = PeerMetrics()

    async def run() -> T:
        _, manifest = await find_manifest(dht, addresses, run_id)
        directory = observer_directory(manifest, dht, metrics)
        async with open_transport(dht, metrics) as transport:
            resolved = ResolvedManifest.of(manifest)
            model = LiveModel(
                resolved,
                identity=dht.identity,
                transport=transport,
                look=directory.refresh,
                rng=random.Random(),
            )
            return await work(resolved, model)

    with observer_dht(addresses) as dht:
        return run_loop(run)
