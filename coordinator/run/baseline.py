"""The reference: one process trains the run's manifest without any network.

It shares the model, data and optimizer code with the peers, and nothing else. The stages are chained, so that each
stage clips its own gradients as in a swarm.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from coordinator.watch.metrics_file import MetricsLine, ValidationLoss, metrics_line
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.data.slices import sample_stream, validation_samples

# The stream that the baseline reads; peers use their ids.
STREAM_ID = "baseline"


class Baseline:
    """All stages of a run in one process."""

    def __init__(
        self, resolved: ResolvedManifest, device: torch.device | str = "cpu", *, cache_dir: Path | None = None
    ):
        self.manifest = resolved.manifest
        self.trainers = [StageTrainer(resolved, spec, device=device, cache_dir=cache_dir) for spec in resolved.specs]

    def train_step(self, microbatches: Iterable[torch.Tensor]) -> tuple[float, int]:
        """One optimizer step over token tensors of shape (B, T+1). Returns the mean loss and the number of samples."""
        loss_sum, num_samples = 0.0, 0
        for tokens_BS in microbatches:
            passes = []
            hidden_BTD = None
            for trainer in self.trainers:
                passes.append(trainer.forward(tokens_BS, hidden_BTD))
                hidden_BTD = passes[-1].output
            loss_sum += float(passes[-1].output.sum())
            num_samples += len(tokens_BS)
            grad_BTD = None
            for trainer, forward_pass in zip(reversed(self.trainers), reversed(passes), strict=True):
                grad_BTD = trainer.backward(forward_pass, grad_BTD)
        for trainer in self.trainers:
            trainer.apply(trainer.mean_gradients())
        return loss_sum / num_samples, num_samples

    def evaluate(self, samples: np.ndarray) -> float:
        """Mean loss of samples (N, T+1), in nats per token."""
        loss_sum = 0.0
        for tokens_BS in torch.split(torch.from_numpy(samples), self.manifest.training.microbatch_size):
            value = None
            for trainer in self.trainers:
                value = trainer.evaluate(tokens_BS, value)
            assert value is not None
            loss_sum += float(value.sum())
        return loss_sum / len(samples)

    def state(self) -> dict[str, torch.Tensor]:
        """The weights and optimizer states of all stages."""
        return {name: tensor for trainer in self.trainers for name, tensor in trainer.state().items()}


def microbatches_of(stream: Iterator[np.ndarray], manifest: RunManifest) -> Iterator[list[torch.Tensor]]:
    """Cut a sample stream into global batches of microbatches."""
    training = manifest.training
    while True:
        batch = [next(stream) for _ in range(training.global_batch_size)]
        yield list(torch.split(torch.from_numpy(np.stack(batch)), training.microbatch_size))


def train(baseline: Baseline, cache_dir: Path | None = None) -> Iterator[MetricsLine]:
    """Train on a sample stream of its own, yielding the line of metrics.jsonl after each optimizer step."""
    manifest = baseline.manifest
    training = manifest.training
    held_out = validation_samples(manifest, training.validation_samples, cache_dir)
    batches = microbatches_of(sample_stream(manifest, STREAM_ID, cache_dir), manifest)
    for optimizer_step in range(1, training.steps + 1):
        begin = time.monotonic()
        loss, samples = baseline.train_step(next(batches))
        seconds = time.monotonic() - begin
        due = training.validates_at(optimizer_step)
        yield metrics_line(
            optimizer_step=optimizer_step,
            round_number=optimizer_step,  # the run never goes back
            loss=loss,
            samples=samples,
            seconds=seconds,
            sequence_length=manifest.data.sequence_length,
            peers=[1] * manifest.stages.count,
            validation=ValidationLoss(baseline.evaluate(held_out), len(held_out)) if due else None,
        )
