"""How many steps does Muon save against AdamW? The demo model in reference processes, each optimizer at its best rate.

Trainings of one seed begin with the same weights and read the same samples. With the first seed, each optimizer is
trained at several learning rates, and its best one is that of the lowest validation loss after the last step. With all
seeds, Muon is then also trained for `--share` of the steps, with a schedule that is as much shorter. It has saved these
steps if its last loss is not above AdamW's.

Every training is a line of `--results`; those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from wan_report import add_line, commit, provenance, read_lines

from coordinator.config_files import load_manifest
from coordinator.run.baseline import Baseline, train
from coordinator.run.resolving import resolve_manifest
from swarm_peer.config import RunManifest
from swarm_peer.errors import SwarmError

CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
ADAMW, MUON = "adamw", "muon"
# The part of the steps in which the learning rate rises.
WARM_UP = 0.1


class Training(NamedTuple):
    """One training of the reference process."""

    optimizer: str
    rate: float
    seed: int
    steps: int

    def manifest(self, settings: Sequence[str]) -> RunManifest:
        """The manifest of the training.

        Raises:
            UserError: the settings do not fit it
        """
        own = (
            f"seed={self.seed}",
            f"optimizer.name={self.optimizer}",
            f"optimizer.learning_rate={self.rate}",
            f"training.steps={self.steps}",
            f"training.validation_every={self.steps}",
            f"schedule.warmup_steps={round(WARM_UP * self.steps)}",
        )
        return load_manifest(CONFIG, (*settings, *own))


class Trainings:
    """Trainings with the same settings, and the validation losses after their last steps, in a file that stays."""

    def __init__(self, file: Path | None, settings: Sequence[str]):
        """Read a file, if there is one."""
        self._file, self._settings = file, list(settings)
        entries = read_lines(file) if file is not None else []
        fitting = [entry for entry in entries if entry["settings"] == self._settings]
        self.losses = {Training(*entry["training"]): float(entry["loss"]) for entry in fitting}

    def loss(self, training: Training) -> float:
        """The loss of a training, which is done now if it has not been; infinite if its weights diverge."""
        if training not in self.losses:
            baseline = Baseline(resolve_manifest(training.manifest(self._settings)))
            try:
                seconds, loss = 0.0, float("inf")
                for line in train(baseline):
                    seconds, loss = seconds + line["seconds"], line.get("validation_loss", loss)
            except SwarmError as error:
                print(error, file=sys.stderr)
                loss = float("inf")
            self.losses[training] = loss
            entry = {"training": training, "loss": loss, "seconds": round(seconds), "settings": self._settings}
            print(json.dumps(entry), file=sys.stderr, flush=True)
            if self._file is not None:
                add_line(self._file, entry | {"commit": commit()})
        return self.losses[training]

    def best_rate(self, optimizer: str, rates: Sequence[float], seed: int, steps: int) -> float:
        """The learning rate of the lowest loss."""
        return min(rates, key=lambda rate: self.loss(Training(optimizer, rate, seed, steps)))


def compare(trainings: Trainings, options: argparse.Namespace) -> Iterator[str]:
    """Train, and give the lines of a report in Markdown."""
    steps, short = options.steps, round(options.share * options.steps)
    best = {name: trainings.best_rate(name, options.rates, options.first_seed, steps) for name in (ADAMW, MUON)}
    yield "| optimizer | " + " | ".join(f"{rate:g}" for rate in options.rates) + " |"
    yield "|---" * (1 + len(options.rates)) + "|"
    for name in best:
        losses = (trainings.loss(Training(name, rate, options.first_seed, steps)) for rate in options.rates)
        yield f"| {name}, {steps} steps | " + " | ".join(f"{loss:.4f}" for loss in losses) + " |"
    yield ""
    yield f"| seed | AdamW at {best[ADAMW]:g} | Muon at {best[MUON]:g} | Muon, {short} steps | saved |"
    yield "|---|---|---|---|---|"
    differences = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        adamw, muon, fewer = (
            trainings.loss(Training(name, best[name], seed, num_steps))
            for name, num_steps in ((ADAMW, steps), (MUON, steps), (MUON, short))
        )
        differences.append((muon / adamw - 1, fewer / adamw - 1))
        yield f"| {seed} | {adamw:.4f} | {muon:.4f} | {fewer:.4f} | {'yes' if fewer <= adamw else 'no'} |"
    full, fewer = (fmean(column) for column in zip(*differences, strict=True))
    yield ""
    yield f"Mean difference from AdamW: {full:+.2%} in as many steps, {fewer:+.2%} in {options.share:.0%} of them."


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options of programs that compare trainings."""
    parser.add_argument("--text", nargs="+", help="files of text, or patterns, instead of the demo's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], help="of the manifest, as in `swarm-coordinator`"
    )
    parser.add_argument("--results", type=Path, help="file of all trainings; those that it holds are not repeated")


def text_settings(options: argparse.Namespace) -> tuple[str, ...]:
    """The settings of the text that `--text` names."""
    return ("data.dataset=text", f"data.files={json.dumps(options.text)}") if options.text else ()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2], help="learning rates to try")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1, help="at which learning rates are tried")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.75, help="of the steps that Muon shall do with")
    add_common_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    trainings = Trainings(options.results, (*text_settings(options), *options.settings))
    print(f"{provenance()}\n")
    for line in compare(trainings, options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
