"""What do averages by codecs with error feedback cost in loss? The demo model, replicas in one process.

Each stage has `--replicas` replicas, which compute as many samples each, and average by the codec as stage-mates do.
Trainings of one seed begin with the same weights and read the same samples; each codec is trained at each of the
learning rates. Every training is a line of `--results`; those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from wan_report import add_line, commit, provenance, read_lines

from coordinator.config_files import load_manifest
from coordinator.run.baseline import STREAM_ID, Baseline, ReplicatedBaseline, microbatches_of
from coordinator.run.resolving import resolve_manifest
from swarm_peer.codecs import find_codec
from swarm_peer.runtime.data.slices import sample_stream, validation_samples

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
# The part of the steps in which the learning rate rises.
WARM_UP = 0.1


class Training(NamedTuple):
    """One training of replicas."""

    codec: str
    replicas: int
    optimizer: str
    rate: float
    seed: int
    steps: int
    samples: int

    def loss(self, settings: Sequence[str]) -> float:
        """Train. Returns the validation loss after the last step."""
        own = (
            f"seed={self.seed}",
            f"optimizer.name={self.optimizer}",
            f"optimizer.learning_rate={self.rate}",
            f"averaging.compression={self.codec}",
            f"training.steps={self.steps}",
            f"training.global_batch_size={self.samples}",
            f"training.microbatch_size={self.samples // self.replicas}",
            f"schedule.warmup_steps={round(WARM_UP * self.steps)}",
        )
        manifest = load_manifest(CONFIG, (*own, *settings))
        resolved = resolve_manifest(manifest)
        replicated = ReplicatedBaseline(resolved, [self.replicas] * resolved.num_stages)
        batches = microbatches_of(sample_stream(manifest, STREAM_ID, None), manifest)
        order = [[number] for number in range(self.replicas)]
        for _ in range(self.steps):
            replicated.train_step(next(batches), [order] * resolved.num_stages)
        evaluated = Baseline(resolved)
        evaluated.trainers = [replicas[0] for replicas in replicated.stages]
        return evaluated.evaluate(validation_samples(manifest, manifest.training.validation_samples, None))


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Train what has not been trained, and give the lines of a table in Markdown."""
    known = read_lines(options.results) if options.results is not None else []
    losses = {Training(*each["training"]): each["loss"] for each in known if each["settings"] == options.settings}
    names = f"{options.replicas} replicas, {options.optimizer}, {options.steps} steps of {options.samples} samples"
    yield f"| {names} | bytes a value | " + " | ".join(f"{rate:g}" for rate in options.rates) + " |"
    yield "|---" * (2 + len(options.rates)) + "|"
    for codec in options.codecs:
        found = []
        for rate in options.rates:
            own = options.replicas, options.optimizer, rate, options.seed, options.steps, options.samples
            training = Training(codec, *own)
            if training not in losses:
                begun_s = time.monotonic()
                losses[training] = training.loss(options.settings)
                entry = {"training": training, "loss": losses[training], "settings": options.settings}
                entry |= {"seconds": round(time.monotonic() - begun_s), "commit": commit()}
                print(json.dumps(entry), file=sys.stderr, flush=True)
                if options.results is not None:
                    add_line(options.results, entry)
            found.append(f"{losses[training]:.4f}")
        yield f"| {codec} | {find_codec(codec).num_bytes(2**20) / 2**20:.3f} | " + " | ".join(found) + " |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codecs", nargs="+", default=["none", "topk_2bit", "sign"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--rates", nargs="+", type=float, default=[3e-3])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=16, help="of a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], help="of the manifest, as in `swarm-coordinator`"
    )
    parser.add_argument("--results", type=Path, help="file of all trainings; those that it holds are not repeated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{provenance()}\n")
    for line in lines(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
