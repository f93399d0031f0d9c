"""Evaluation and sampling through the pipeline of a run that trains on."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import fork
from programs import COORDINATOR
from swarm import LLAMA, LiveSwarm, SwarmRun, run_swarm, tiny_manifest
from test_keystone import check_counts, check_nothing_lost, relative_difference
from transformers import AutoModelForCausalLM

from coordinator.checkpoints.fetching import open_transport
from coordinator.query.live_model import Evaluation, LiveModel
from coordinator.run.baseline import Baseline
from coordinator.watch.observer import observer_directory
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.plain_text import without_controls
from swarm_peer.runtime.data.slices import validation_samples
from swarm_peer.runtime.data.tokenizers import BytesTokenizer
from swarm_peer.runtime.host.metrics import PeerMetrics

STEPS = 20
SAMPLES = 6
PROMPT = "The quick brown fox jumps over the lazy"  # longer than a sequence
NUM_TOKENS = 12
# A turn is its text; a colon begins an answer.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
QUESTION = "Hi?"


async def command(live: LiveSwarm, folder: Path, *arguments: str) -> str:
    """What a command prints, errors included."""
    printed = folder / f"{''.join(arguments[:2])}.log"
    process = fork([*COORDINATOR, *arguments, "--initial-peers", live.invite], printed)
    await live.until(lambda: process.poll() is not None, f"the end of {arguments[0]}")
    assert process.returncode == 0, printed.read_text()[-2000:]
    return printed.read_text()


def greedy_continuation(folder: Path, prompt: list[int], length: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[-length:]])).logits[0, -1].argmax()))
    return tokens


def baseline_losses(manifest: RunManifest, run: SwarmRun) -> np.ndarray:
    """Loss sums (steps + 1, batches) of the validation samples in one process that is fed what the swarm counted."""
    size = manifest.training.microbatch_size
    held_out = validation_samples(manifest, SAMPLES)
    batches = [held_out[begin : begin + size] for begin in range(0, SAMPLES, size)]
    baseline = Baseline(ResolvedManifest.of(manifest))

    def evaluate() -> list[float]:
        return [baseline.evaluate(batch) * len(batch) for batch in batches]

    losses = [evaluate()]
    for round_number in range(manifest.training.steps):
        baseline.train_step(run.counted[round_number])
        losses.append(evaluate())
    for trainer, states in zip(baseline.trainers, run.states, strict=True):
        for name, expected in trainer.state().items():
            assert relative_difference(states[0].tensors[name], expected) < 1e-5, name
    return np.array(losses)


def possible_losses(losses: np.ndarray, result: Evaluation) -> list[float]:
    """Mean losses that an evaluation may have found: each batch has met the weights of one step between its two."""
    steps = losses[result.oldest_optimizer_step : result.optimizer_step + 1]
    return [sum(choice) / SAMPLES for choice in itertools.product(*steps.T)]


def test_a_live_run_answers_and_trains_on(tmp_path: Path) -> None:
    training = {"steps": STEPS, "validation_samples": SAMPLES, "global_batch_size": 64}
    manifest = tiny_manifest(model={"config": LLAMA}, training=training, data={"chat_template": TEMPLATE})
    held_out = validation_samples(manifest, SAMPLES)
    live_results: list[Evaluation] = []
    said: dict[str, str] = {}

    async def script(live: LiveSwarm) -> None:
        await live.until(lambda: live.optimizer_step >= 1, "step 1")
        async with open_transport(live.dht, PeerMetrics()) as transport:
            directory = observer_directory(manifest, live.dht)
            model = LiveModel(
                ResolvedManifest.of(manifest),
                identity=live.dht.identity,
                transport=transport,
                look=directory.refresh,
                rng=random.Random(0),
            )
            while live.optimizer_step < STEPS - 5:
                live_results.append(await model.evaluate(held_out))
        await live.until(live.service.model_folder.exists, "the saved model")
        said["evaluate"] = await command(live, tmp_path, "evaluate", "--json")
        sample = ("sample", "--prompt", PROMPT, "--tokens", str(NUM_TOKENS), "--temperature", "0")
        said["sample"] = await command(live, tmp_path, *sample)
        chat = ("sample", "--chat", "--prompt", QUESTION, "--tokens", str(NUM_TOKENS), "--temperature", "0")
        said["chat"] = await command(live, tmp_path, *chat)

    run = run_swarm(manifest, [1, 1], tmp_path, script=script)

    check_counts(run, manifest)
    check_nothing_lost(run)
    losses = baseline_losses(manifest, run)

    assert len(live_results) >= 3, "some were asked while the run went on"
    assert len({result.optimizer_step for result in live_results}) >= 3
    for result in live_results:
        assert result.samples == SAMPLES
        assert min(abs(result.loss - loss) for loss in possible_losses(losses, result)) < 1e-5
    assert any(result.oldest_optimizer_step == result.optimizer_step for result in live_results), (
        "some were of one step"
    )

    at_end = json.loads(said["evaluate"])
    assert (at_end["oldest_optimizer_step"], at_end["optimizer_step"], at_end["samples"]) == (STEPS, STEPS, SAMPLES)
    assert at_end["loss"] == pytest.approx(losses[STEPS].sum() / SAMPLES, abs=1e-5)

    tokenizer = BytesTokenizer()
    tokens = greedy_continuation(tmp_path / "model", tokenizer.encode(PROMPT), manifest.data.sequence_length)
    assert said["sample"] == tokenizer.decode(tokens) + "\n"

    prompt = tokenizer.encode(f"{QUESTION}:")
    answer = greedy_continuation(tmp_path / "model", prompt, manifest.data.sequence_length)[len(prompt) :]
    assert tokenizer.separator_id not in answer, "it goes on to --tokens"
    remark = f"The answer is cut off: --tokens is {NUM_TOKENS}."
    assert said["chat"] == f"{without_controls(tokenizer.decode(answer))}\n{remark}\n"
