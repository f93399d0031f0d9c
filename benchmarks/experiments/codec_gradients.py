"""How far do codecs turn a gradient aside, and how does that add up over the boundaries between stages?

The demo model is trained for some steps without codecs, as a reference process of some number of stages. Then its
gradient of one global batch is computed with each pair of wire codecs, and sent once through each codec of averaging.
The figure is the relative L2 distance from the gradient without codecs, by stage. The measure of what matters is the
first line: the distance of another global batch's gradient.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from coordinator.config_files import load_manifest
from coordinator.run.baseline import STREAM_ID, Baseline, microbatches_of
from coordinator.run.resolving import resolve_manifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.slices import sample_stream
from swarm_peer.wire.codecs import decode, encode

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
# Activations, gradients.
WIRES: tuple[tuple[str, str], ...] = (
    ("blockwise_8bit", "blockwise_8bit"),
    ("int5_hadamard", "none"),
    ("int4_hadamard", "none"),
    ("none", "int4_hadamard"),
    ("int5_hadamard", "int4_hadamard"),
    ("int4_hadamard", "int4_hadamard"),
)
AVERAGING: tuple[str, ...] = ("fp16", "blockwise_8bit", "int4_hadamard")


def resolved(num_stages: int, activations: str = "none", gradients: str = "none") -> ResolvedManifest:
    """The demo's manifest, cut into so many stages, with these codecs on the wires."""
    wire = f"wire={{activations: {activations}, gradients: {gradients}}}"
    return resolve_manifest(load_manifest(CONFIG, (f"stages.count={num_stages}", wire)))


def gradients_of(
    trained: Baseline, batch: Sequence[torch.Tensor], activations: str = "none", gradients: str = "none"
) -> list[torch.Tensor]:
    """The mean gradient of a global batch at each stage, flat."""
    baseline = Baseline(resolved(len(trained.trainers), activations, gradients))
    for mine, its in zip(baseline.trainers, trained.trainers, strict=True):
        mine.load_state(its.state(), its.optimizer_step)
    for number, tokens_BS in enumerate(batch):
        baseline.accumulate(tokens_BS, str(number).encode())
    return [torch.cat([mean.flatten() for mean in trainer.mean_gradients()]) for trainer in baseline.trainers]


def distances(of: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> str:
    """Relative distances by stage, as cells of a table."""
    return " | ".join(f"{float((a - b).norm() / b.norm()):.2%}" for a, b in zip(of, to, strict=True))


def measure(num_stages: int, steps: int) -> Iterator[str]:
    """The lines of the table for so many stages."""
    trained = Baseline(resolved(num_stages))
    batches = microbatches_of(sample_stream(trained.manifest, STREAM_ID), trained.manifest)
    for _ in range(steps):
        trained.train_step(next(batches)[:1])
    batch, other = next(batches), next(batches)
    exact = gradients_of(trained, batch)
    yield f"| gradient of | {' | '.join(f'stage {stage}' for stage in range(num_stages))} |"
    yield "|---" * (num_stages + 1) + "|"
    yield f"| another global batch | {distances(gradients_of(trained, other), exact)} |"
    for activations, gradients in WIRES:
        found = gradients_of(trained, batch, activations, gradients)
        yield f"| wires: {activations}, {gradients} | {distances(found, exact)} |"
    for codec in AVERAGING:
        sent = [decode(encode(gradient, codec, 1), gradient.shape, codec) for gradient in exact]
        yield f"| averaging: {codec}, once | {distances(sent, exact)} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=60, help="of one microbatch each, before the measurement")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for num_stages in options.stages:
        print("\n".join(measure(num_stages, options.steps)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
