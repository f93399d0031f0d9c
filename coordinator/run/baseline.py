"""The reference: one process trains the run's manifest without any network.

It shares the model, data, codec and optimizer code with the peers, and nothing else. The stages are chained, so that
each stage clips its own gradients as in a swarm, and what one stage gives to the next goes through the run's wire
codecs. Averaging has nobody to average with, so its codec is not used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from coordinator.watch.metrics_file import MetricsLine, ValidationLoss, metrics_line
from swarm_peer.codecs import NEED_FEEDBACK, PLAIN, find_codec
from swarm_peer.codecs.feedback import ErrorFeedback, flat
from swarm_peer.codecs.parts import averaged
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage, SwarmError
from swarm_peer.model.forward_pass import ForwardPass
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import StepResult, Work
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.trouble import UPDATES_MISSED
from swarm_peer.runtime.data.slices import sample_stream, validation_samples
from swarm_peer.token_marks import num_targets, weight_of
from swarm_peer.wire.codecs import decode, encode, rounding_seed
from swarm_peer.wire.fields import MAX_LOSS

# The stream that the baseline reads; peers use their ids.
STREAM_ID = "baseline"


class Baseline:
    """All stages of a run in one process.

    Attributes:
        num_missed: updates in a row that some stage has left out, since its gradient was not finite
    """

    def __init__(
        self,
        resolved: ResolvedManifest,
        device: torch.device | str = "cpu",
        *,
        cache_dir: Path | None = None,
    ):
        """Make the stages, with the run's initial weights."""
        self.manifest = resolved.manifest
        make = partial(StageTrainer, resolved, device=device, cache_dir=cache_dir)
        self.trainers = [make(spec) for spec in resolved.specs]
        self.num_missed = 0
        self._rounds = [StageRounds([trainer]) for trainer in self.trainers]

    def train_step(self, microbatches: Iterable[torch.Tensor], ids: Iterable[bytes] | None = None) -> tuple[float, int]:
        """One optimizer step over token tensors of shape (B, T+1). Returns the mean loss and the number of samples.

        Args:
            ids: of the microbatches, if a swarm has trained on them: its peers round gradients by them
        """
        microbatches = list(microbatches)
        if ids is None:
            ids = [f"{self._rounds[0].num_ended}/{number}".encode() for number in range(len(microbatches))]
        loss_sum, num_samples, weight = 0.0, 0, 0.0
        for tokens_BS, microbatch_id in zip(microbatches, ids, strict=True):
            loss_sum += self.accumulate(tokens_BS, microbatch_id)
            num_samples += len(tokens_BS)
            weight += weight_of(tokens_BS, self.manifest.data)
        results = [result for stage in self._rounds for result in stage.end()]
        has_missed = any(result.skipped and not math.isfinite(result.grad_norm) for result in results)
        self.num_missed = self.num_missed + 1 if has_missed else 0
        return loss_sum / weight, num_samples

    def accumulate(self, tokens_BS: torch.Tensor, microbatch_id: bytes) -> float:
        """Add a microbatch's gradients to the accumulators of all stages. Returns the sum of its samples' losses."""
        stages = [[trainer] for trainer in self.trainers]
        return accumulate(stages, {microbatch_id: tokens_BS}, [[[microbatch_id]] for _ in stages])

    def evaluate(self, samples: np.ndarray) -> float:
        """Mean loss of samples (N, T+1), in nats per token."""
        loss_sum = 0.0
        with ExitStack() as stack:
            for stage in self._rounds:
                stack.enter_context(stage.up_to_date())
            for tokens_BS in torch.split(torch.from_numpy(samples), self.manifest.training.microbatch_size):
                value = self.trainers[0].evaluate(tokens_BS)
                for trainer in self.trainers[1:]:
                    value = trainer.evaluate(tokens_BS, _received(value, self.manifest.wire.activations))
                loss_sum += float(value.sum())
        return loss_sum / weight_of(samples, self.manifest.data)

    def state(self) -> dict[str, torch.Tensor]:
        """The weights and optimizer states of all stages."""
        return {name: tensor for trainer in self.trainers for name, tensor in trainer.state().items()}


class ReplicatedBaseline:
    """All stages of a run in one process, with several replicas of each, as in a swarm.

    Where stage-mates average every step, this gives what Baseline gives. Elsewhere it matters which replica computes a
    microbatch, and this is what a swarm is held to.

    Attributes:
        stages: the replicas of each stage
        rounds: the ends of each stage's rounds
    """

    def __init__(self, resolved: ResolvedManifest, num_replicas: Sequence[int], device: torch.device | str = "cpu"):
        """Make replicas.

        Args:
            num_replicas: of each stage
        """
        self.stages = [
            [StageTrainer(resolved, spec, device=device) for _ in range(count)]
            for spec, count in zip(resolved.specs, num_replicas, strict=True)
        ]
        self.rounds = [StageRounds(replicas) for replicas in self.stages]

    def train_step(
        self,
        microbatches: Sequence[torch.Tensor],
        orders: Sequence[Sequence[Sequence[int]]],
        members: Sequence[Sequence[int]] | None = None,
    ) -> tuple[float, int]:
        """One optimizer step. Returns the mean loss and the number of samples.

        Args:
            microbatches: token tensors of shape (B, T+1)
            orders: for each stage, for each of its replicas: the numbers of the microbatches that it computes, in the
                order in which it adds their gradients. A sum's last digits depend on it
            members: of each stage, the replicas that average, in the order of their peers' ids; None for all. With
                codecs that need feedback it matters who they are
        """
        ids = [f"{self.rounds[0].num_ended}/{number}".encode() for number in range(len(microbatches))]
        orders_of_ids = [[[ids[number] for number in numbers] for numbers in order] for order in orders]
        loss_sum = accumulate(self.stages, dict(zip(ids, microbatches, strict=True)), orders_of_ids)
        for number, stage in enumerate(self.rounds):
            stage.end(None if members is None else members[number])
        data = self.stages[0][0].manifest.data
        return loss_sum / sum(weight_of(each, data) for each in microbatches), sum(map(len, microbatches))


class StageRounds:
    """The ends of the rounds of one stage's replicas.

    Attributes:
        num_ended: how many rounds have ended
    """

    def __init__(self, replicas: Sequence[StageTrainer]):
        """Begin with replicas that have the run's initial weights.

        Args:
            replicas: in the order of their peers' ids
        """
        manifest = replicas[0].manifest
        self.num_ended = 0
        self._replicas = replicas
        # Where updates are delayed, round k is computed from W(k-2).
        self._is_delayed = manifest.averaging.rounds_ahead > 0
        self._last_step = manifest.training.steps
        self._waiting: Sequence[torch.Tensor] | None = None  # the average of the newest round
        num_values = sum(shape.numel() for shape in replicas[0].shapes)
        has_feedback = manifest.averaging.compression in NEED_FEEDBACK
        self._feedback = [ErrorFeedback(num_values) for _ in replicas] if has_feedback else None

    def end(self, members: Sequence[int] | None = None) -> list[StepResult]:
        """End a round; returns how the replicas have taken updates, if any.

        Args:
            members: the replicas that average, in the order of their peers' ids; None for all
        """
        self.num_ended += 1
        brought = _brought(self._replicas)
        members = range(len(brought)) if members is None else members
        if not self._is_delayed:
            averages = self._average(brought, members)
            return [trainer.apply(averages) for trainer in self._replicas]
        results = self._update()
        self._waiting = self._average(brought, members)
        for trainer, (own, _) in zip(self._replicas, brought, strict=True):
            trainer.discard_gradients()
            if self.num_ended < self._last_step:
                trainer.strategy.try_own(own)
        return results if self.num_ended < self._last_step else results + self._update()

    def _average(self, brought: Sequence[Work], members: Sequence[int]) -> Sequence[torch.Tensor]:
        averaging = self._replicas[0].manifest.averaging
        if self._feedback is None or not averaging.averages_at(self.num_ended - 1):
            return _average(brought)
        codec = averaging.codec_at(self.num_ended, self._last_step) if len(members) > 1 else PLAIN
        feedback = [self._feedback[number] for number in members]
        return average_with_feedback([brought[number] for number in members], feedback, self.num_ended, codec)

    def _update(self) -> list[StepResult]:
        averages, self._waiting = self._waiting, None
        return [] if averages is None else [trainer.apply(averages) for trainer in self._replicas]

    @contextmanager
    def up_to_date(self) -> Iterator[None]:
        """While the context is open, the weights have the update of the newest round, too."""
        averages = self._waiting
        if averages is None or self._replicas[0].manifest.averaging.eager_updates:
            yield  # a replica alone has made it already, for a trial
            return
        before = [trainer.try_update(averages) for trainer in self._replicas]
        try:
            yield
        finally:
            for trainer, weights in zip(self._replicas, before, strict=True):
                trainer.set_weights(weights)


def accumulate(
    stages: Sequence[Sequence[StageTrainer]],
    microbatches: Mapping[bytes, torch.Tensor],
    orders: Sequence[Sequence[Sequence[bytes]]],
) -> float:
    """Add microbatches' gradients to the accumulators of the replicas that compute them.

    Args:
        stages: the replicas of each stage
        microbatches: token tensors of shape (B, T+1), by id
        orders: for each stage, for each of its replicas: ids, in the order in which it adds the gradients

    Returns:
        the sum of the samples' losses
    """
    wire = stages[0][0].manifest.wire
    passes: list[dict[bytes, ForwardPass]] = []
    received: dict[bytes, torch.Tensor] = {}
    for replicas, order in zip(stages, orders, strict=True):
        computed = {
            each: trainer.forward(microbatches[each], received.get(each))
            for trainer, ids in zip(replicas, order, strict=True)
            for each in ids
        }
        if not replicas[0].spec.is_last:  # whose output is losses, which are not sent
            received = {each: _received(computed[each].output, wire.activations) for each in computed}
        passes.append(computed)
    received = {}
    for replicas, order, computed in reversed(list(zip(stages, orders, passes, strict=True))):
        for trainer, ids in zip(replicas, order, strict=True):
            for each in ids:
                grad_BTD = trainer.backward(computed[each], received.pop(each, None))
                if grad_BTD is not None:
                    received[each] = _received(grad_BTD, wire.gradients, rounding_seed(each, trainer.spec.index))
    return sum(float(passes[-1][each].output.sum()) for each in microbatches)


def end_round(replicas: Sequence[StageTrainer]) -> list[StepResult]:
    """End a round among the replicas of a stage, with all of an average; returns how each has taken its update.

    Args:
        replicas: in the order of their peers' ids, in which stage-mates add what they bring. The last digits of an
            average depend on it
    """
    averages = _average(_brought(replicas))
    return [trainer.apply(averages) for trainer in replicas]


def _brought(replicas: Sequence[StageTrainer]) -> list[Work]:
    return [trainer.strategy.contribution(trainer.mean_gradients(), trainer.weight) for trainer in replicas]


def _average(brought: Sequence[Work]) -> Sequence[torch.Tensor]:
    return _mean(brought) if len(brought) > 1 else brought[0][0]  # a peer without stage-mates takes its own


def average_with_feedback(
    brought: Sequence[Work], feedback: Sequence[ErrorFeedback], round_number: int, codec: str
) -> list[torch.Tensor]:
    """The mean over what they weigh, as stage-mates come to it by a codec that needs feedback.

    Args:
        feedback: of each of them; settled with what is left over
    """
    total, tensors = sum(weight for _, weight in brought), brought[0][0]
    tries = [each.begin_try("", round_number, codec) for each in feedback]
    names = [f"{number:06}" for number in range(len(brought))]
    values = [flat(means) for means, _ in brought]
    if not total:
        for each in tries:
            each.keep()
        average = torch.zeros_like(values[0])
    else:
        for own, (_, weight), each in zip(values, brought, tries, strict=True):
            each.bring(own, weight)
        leftovers = dict(zip(names, (each.after for each in tries), strict=True))
        average = averaged(dict(zip(names, values, strict=True)), total, find_codec(codec), leftovers)
    for own_feedback in feedback:
        own_feedback.settle("", round_number, is_member=True)
    parts = torch.split(average, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _mean(brought: Sequence[Work]) -> list[torch.Tensor]:
    """The mean over what they weigh, as the all-reduce computes it."""
    total = max(sum(weight for _, weight in brought), 1)
    averages = [torch.zeros_like(tensor) for tensor in brought[0][0]]
    for tensors, weight in brought:
        for average, tensor in zip(averages, tensors, strict=True):
            average.add_(tensor, alpha=weight)
    return [average.div_(total) for average in averages]


def _received(tensor: torch.Tensor, codec: str, seed: int | None = None) -> torch.Tensor:
    """A tensor as the peer reads it to whom it is sent."""
    if find_codec(codec).is_exact:
        return tensor
    return decode(encode(tensor, codec, seed), tensor.shape, codec, tensor.device)


def microbatches_of(stream: Iterator[np.ndarray], manifest: RunManifest) -> Iterator[list[torch.Tensor]]:
    """Cut a sample stream into global batches of microbatches."""
    training = manifest.training
    while True:
        batch = [next(stream) for _ in range(training.global_batch_size)]
        yield list(torch.split(torch.from_numpy(np.stack(batch)), training.microbatch_size))


def train(baseline: Baseline, cache_dir: Path | None = None) -> Iterator[MetricsLine]:
    """Train on a sample stream of its own, yielding the line of metrics.jsonl after each optimizer step.

    Raises:
        SwarmError: the weights have diverged
    """
    manifest = baseline.manifest
    training = manifest.training
    held_out = validation_samples(manifest, training.validation_samples, cache_dir)
    batches = microbatches_of(sample_stream(manifest, STREAM_ID, cache_dir), manifest)
    for optimizer_step in range(1, training.steps + 1):
        begin = time.monotonic()
        batch = next(batches)
        with _diverging(optimizer_step):
            loss, samples = baseline.train_step(batch)
        _check_finite(loss, "loss", optimizer_step)
        if baseline.num_missed >= UPDATES_MISSED:
            raise _diverged(optimizer_step, f"no gradient of the last {baseline.num_missed} steps is finite")
        seconds = time.monotonic() - begin
        validation = None
        if training.validates_at(optimizer_step):
            with _diverging(optimizer_step):
                validation = ValidationLoss(baseline.evaluate(held_out), len(held_out))
            _check_finite(validation.loss, "validation loss", optimizer_step)
        yield metrics_line(
            optimizer_step=optimizer_step,
            round_number=optimizer_step,  # the run never goes back
            loss=loss,
            samples=samples,
            seconds=seconds,
            sequence_length=manifest.data.sequence_length,
            peers=[1] * manifest.stages.count,
            validation=validation,
            targets=sum(map(num_targets, batch)) if manifest.data.has_targets else None,
        )


@contextmanager
def _diverging(optimizer_step: int) -> Iterator[None]:
    """Tell of numbers that one stage could not send to the next."""
    try:
        yield
    except (InvalidMessage, OverflowError) as error:
        raise _diverged(optimizer_step, str(error)) from error


def _check_finite(loss: float, name: str, optimizer_step: int) -> None:
    if not abs(loss) <= MAX_LOSS:
        raise _diverged(optimizer_step, f"the {name} is {loss:.3g}")


def _diverged(optimizer_step: int, reason: str) -> SwarmError:
    what = f"the weights have diverged: at optimizer step {optimizer_step}, {reason}"
    return SwarmError(f"{what}; begin anew, with a lower learning rate")
