"""The reference: one process trains the run's manifest without any network.

It shares the model, data and optimizer code with the peers, and nothing else. The stages are chained, so that each
stage clips its own gradients as in a swarm.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
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
            loss_sum += train_microbatch(self.trainers, tokens_BS)
            num_samples += len(tokens_BS)
        for trainer in self.trainers:
            end_round([trainer])
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


class ReplicatedBaseline:
    """All stages of a run in one process, with several replicas of each, as in a swarm.

    Where stage-mates average every step, this gives what Baseline gives. Where they average periodically, the routes of
    the microbatches matter, and this is what a swarm with the same routes is held to.
    """

    def __init__(self, resolved: ResolvedManifest, num_replicas: Sequence[int]):
        """Make replicas.

        Args:
            num_replicas: of each stage
        """
        self.stages = [
            [StageTrainer(resolved, spec) for _ in range(count)]
            for spec, count in zip(resolved.specs, num_replicas, strict=True)
        ]

    def train_step(self, routed: Iterable[tuple[torch.Tensor, Sequence[int]]]) -> tuple[float, int]:
        """One optimizer step. Returns the mean loss and the number of samples.

        Args:
            routed: token tensors of shape (B, T+1), each with the replica of each stage that computes it
        """
        loss_sum, num_samples = 0.0, 0
        for tokens_BS, route in routed:
            trainers = [replicas[index] for replicas, index in zip(self.stages, route, strict=True)]
            loss_sum += train_microbatch(trainers, tokens_BS)
            num_samples += len(tokens_BS)
        for replicas in self.stages:
            end_round(replicas)
        return loss_sum / num_samples, num_samples


def train_microbatch(trainers: Sequence[StageTrainer], tokens_BS: torch.Tensor) -> float:
    """Run a microbatch forward and backward through one trainer of each stage. Returns the sum of its losses."""
    passes = []
    hidden_BTD = None
    for trainer in trainers:
        passes.append(trainer.forward(tokens_BS, hidden_BTD))
        hidden_BTD = passes[-1].output
    grad_BTD = None
    for trainer, forward_pass in zip(reversed(trainers), reversed(passes), strict=True):
        grad_BTD = trainer.backward(forward_pass, grad_BTD)
    return float(passes[-1].output.sum())


def end_round(replicas: Sequence[StageTrainer]) -> None:
    """End a round among the replicas of a stage."""
    brought = [trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples) for trainer in replicas]
    total = max(sum(samples for _, samples in brought), 1)
    weighted = [[tensor * (samples / total) for tensor in tensors] for tensors, samples in brought]
    averages = [torch.stack(same).sum(0) for same in zip(*weighted, strict=True)]
    for trainer in replicas:
        trainer.apply(averages)


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
