"""Reference processes whose microbatches several members of each stage share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import torch

from coordinator.run.baseline import Baseline, ReplicatedBaseline
from swarm_peer.codecs import NEED_FEEDBACK
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.wire.codecs import decode, encode, rounding_seed


def baseline_of(resolved: ResolvedManifest, num_members: int, averages: bool, device: str) -> Baseline:
    """A process that trains as a swarm with so many members of each stage does.

    Args:
        averages: whether members average each gradient by a codec that loses nothing for later rounds; if not, and all
            average each step, one member does the work of all, which is the same
    """
    averaging = resolved.manifest.averaging
    if averaging.mode != "synchronous" or averaging.compression in NEED_FEEDBACK:
        assert not averages, "codecs without feedback are simulated for synchronous averages alone"
        return RoutedBaseline(resolved, num_members, device)
    if averages:
        return AveragedBaseline(resolved, num_members, averaging.compression, device)
    return Baseline(resolved, device)


class AveragedBaseline(Baseline):
    """A reference process whose microbatches several members of each stage share, which average their gradients.

    As in a swarm, each member averages a part of all values: the others send it theirs through the codec, and all
    members, itself among them, take the average that has gone through the codec.
    """

    def __init__(self, resolved: ResolvedManifest, num_members: int, codec: str, device: str = "cpu"):
        super().__init__(resolved, device)
        self._num_members = num_members
        self._codec = codec

    def train_step(self, microbatches: Iterable[torch.Tensor], ids: Iterable[bytes] | None = None) -> tuple[float, int]:
        """One optimizer step, as Baseline.train_step."""
        assert ids is None, "no swarm trains like this"
        microbatches, loss_sum, num_samples = list(microbatches), 0.0, 0
        gradients: list[list[tuple[torch.Tensor, int]]] = [[] for _ in self.trainers]
        for member in range(self._num_members):
            for number in range(member, len(microbatches), self._num_members):
                loss_sum += self.accumulate(microbatches[number], f"{self._step}/{number}".encode())
                num_samples += len(microbatches[number])
            for trainer, of_stage in zip(self.trainers, gradients, strict=True):
                of_stage.append((torch.cat([g.flatten() for g in trainer.mean_gradients()]), trainer.num_samples))
                trainer.discard_gradients()
        for trainer, of_stage in zip(self.trainers, gradients, strict=True):
            shapes = trainer.shapes
            means = torch.split(self._average(trainer.spec.index, of_stage), [shape.numel() for shape in shapes])
            trainer.apply([mean.view(shape) for mean, shape in zip(means, shapes, strict=True)])
        return loss_sum / num_samples, num_samples

    @property
    def _step(self) -> int:
        return self.trainers[0].optimizer_step

    def _average(self, stage: int, gradients: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """The mean over samples of the members' gradients, each of which is flat and a mean of so many samples."""
        total, averages = sum(samples for _, samples in gradients), []
        parts = [torch.chunk(flat, self._num_members) for flat, _ in gradients]
        for owner in range(self._num_members):
            average = torch.zeros_like(parts[owner][owner])
            for member, (_, samples) in enumerate(gradients):
                part = parts[member][owner]
                average += (part if member == owner else self._sent(part, stage, owner, member)) * (samples / total)
            averages.append(self._sent(average, stage, owner, -1))
        return torch.cat(averages)

    def _sent(self, part: torch.Tensor, stage: int, owner: int, member: int) -> torch.Tensor:
        seed = rounding_seed(self._step, stage, owner, member)
        return decode(encode(part, self._codec, seed), part.shape, self._codec, part.device)


class RoutedBaseline(Baseline):
    """A reference process with as many replicas of each stage as a swarm has, of which it trains random ones."""

    def __init__(self, resolved: ResolvedManifest, num_members: int, device: str = "cpu"):
        self.manifest = resolved.manifest
        self._replicated = ReplicatedBaseline(resolved, [num_members] * resolved.num_stages, device)
        self._rounds, self.num_missed = self._replicated.rounds, 0
        self._rng = random.Random(f"routes {resolved.manifest.seed}")
        # All replicas of a stage are alike when the loss is measured.
        self.trainers = [replicas[0] for replicas in self._replicated.stages]

    def train_step(self, microbatches: Iterable[torch.Tensor], ids: Iterable[bytes] | None = None) -> tuple[float, int]:
        """One optimizer step, as Baseline.train_step."""
        assert ids is None, "no swarm trains like this"
        batch = list(microbatches)
        orders: list[list[list[int]]] = [[[] for _ in replicas] for replicas in self._replicated.stages]
        for number, route in zip(range(len(batch)), self._routes(), strict=False):
            for stage, index in enumerate(route):
                orders[stage][index].append(number)
        return self._replicated.train_step(batch, orders)

    def _routes(self) -> Iterator[list[int]]:
        """Endless routes, on which all replicas of a stage get as many microbatches."""
        while True:
            turns = [self._rng.sample(range(len(replicas)), len(replicas)) for replicas in self._replicated.stages]
            yield from map(list, zip(*turns, strict=True))
