"""What does each way to train cost in loss, and in steps to the same loss? Reference processes without a network.

    python benchmarks/experiments/loss.py FOLDER --arms muon delayed periodic-10 periodic-10+muon --steps 210 \
        --reference-steps 120 150 210 300 --seeds 1 2 --sizes 2M
    python benchmarks/experiments/loss.py FOLDER --table

An arm is parts with + between them (arms.py). Trainings of one size and seed begin with the same weights, but for arms
with another boundary, and read the same samples of FOLDER/text, which the first call makes of `--text`: the sources of
all installed packages, if not given. Each training is a line of FOLDER/results.jsonl, and none is repeated.

The loss is the validation loss after the last step, without codecs on the wires, as the saved model has it. Differences
are from the reference's of the same seed. The steps' factor says how many times as many steps an arm takes to a loss as
the reference does: its own steps over those in which the reference comes to the same loss, between trainings of
`--reference-steps`, each with a schedule of its own length (linear in logarithms). < and > are bounds, where the
reference was not trained for so many or so few steps.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from arms import REFERENCE, SIZES, Arm
from members import baseline_of
from scipy.stats import t as student
from wan_report import add_line, commit, provenance, read_lines

from coordinator.run.baseline import train
from coordinator.run.resolving import resolve_manifest
from swarm_peer.codecs import find_codec
from swarm_peer.config import RunManifest, WireSection
from swarm_peer.errors import SwarmError, UserError

SHARDS = 16
# So many values that all blocks of codecs are whole.
MANY = 2**20
# Fewer pairs have no interval worth telling.
MIN_PAIRS = 3


class Training(NamedTuple):
    """One training of the reference process."""

    arm: str
    size: str
    steps: int
    seed: int


class Found(NamedTuple):
    """Times as many steps as the reference's; `bound` is < or > where only that much is known, else empty."""

    value: float
    bound: str = ""

    def __str__(self) -> str:
        return f"{self.bound}{self.value:.2f}"


def steps_factor(steps: int, loss: float, reference: Mapping[int, float]) -> Found:
    """How many times as many steps an arm took to a loss as the reference does.

    Args:
        reference: its last losses, by the number of steps of a training
    """
    lengths = sorted(reference)
    if loss > reference[lengths[0]]:
        return Found(steps / lengths[0], ">")
    for few, many in pairwise(lengths):
        begin, end = reference[few], reference[many]
        if begin >= loss >= end:
            share = math.log(begin / loss) / math.log(begin / end) if begin > end else 0.0
            return Found(steps / (few * (many / few) ** share))
    if loss == reference[lengths[-1]]:
        return Found(steps / lengths[-1])
    return Found(steps / lengths[-1], "<")


class Results:
    """The losses after the last steps of trainings with the same settings, as lines of a file that stays."""

    def __init__(self, file: Path, settings: Sequence[str]):
        """Read a file, if there is one."""
        self._file, self._settings = file, list(settings)
        fitting = [entry for entry in read_lines(file) if entry["settings"] == self._settings]
        self.losses = {Training(*entry["training"]): entry["loss"] for entry in fitting}

    def add(self, training: Training, loss: float, seconds: float) -> None:
        """Note a training that has ended; infinite is the loss of one whose weights diverged."""
        self.losses[training] = loss
        entry = {"training": training, "loss": loss, "settings": self._settings, "seconds": round(seconds)}
        print(json.dumps(entry), file=sys.stderr, flush=True)
        add_line(self._file, entry | {"commit": commit()})

    def pairs(self, arm: str, size: str, steps: int, reference: str) -> dict[int, tuple[float, dict[int, float]]]:
        """By seed: the arm's loss, and the reference's by its number of steps, where there are both."""
        found: dict[int, tuple[float, dict[int, float]]] = {}
        for training, loss in self.losses.items():
            if training[:3] == (arm, size, steps):
                curve = {
                    other.steps: of_other
                    for other, of_other in self.losses.items()
                    if (other.arm, other.size, other.seed) == (reference, size, training.seed)
                }
                if curve:
                    found[training.seed] = loss, curve
        return dict(sorted(found.items()))


def last_loss(manifest: RunManifest, arm: Arm, device: str = "cpu") -> float:
    """Train. Returns the validation loss after the last step; infinite if the weights diverge."""
    baseline = baseline_of(resolve_manifest(manifest), arm.members, arm.averages, device)
    # The trainers have the run's own manifest, and an evaluation goes by this one.
    baseline.manifest = manifest.model_copy(update={"wire": WireSection()})
    try:
        *_, last = train(baseline)
    except SwarmError as error:
        print(error, file=sys.stderr)
        return math.inf
    return last["validation_loss"]


def gather_text(patterns: Sequence[str], folder: Path) -> None:
    """Join files into SHARDS text files, in an order that their sorted names and one seed draw."""
    paths = sorted({path for pattern in patterns for path in glob.glob(pattern, recursive=True)})
    if not paths:
        raise UserError(f"--text {' '.join(patterns)} names no files: correct it")
    random.Random(0).shuffle(paths)
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        with (folder / f"{shard:02}.txt").open("w", encoding="utf-8") as out:
            for path in paths[shard::SHARDS]:
                if Path(path).is_file():
                    out.write(Path(path).read_text(encoding="utf-8", errors="replace") + "\n\n")


def bytes_of(manifest: RunManifest) -> tuple[float, float]:
    """Bytes of a token that pass one boundary, both ways; and of averages, for each parameter and step, one way."""
    width = resolve_manifest(manifest).boundary_width
    wires = sum(find_codec(codec).num_bytes(MANY) / MANY for _, codec in manifest.wire)
    averages = find_codec(manifest.averaging.compression).num_bytes(MANY) / MANY
    return wires * width, averages / manifest.averaging.steps_per_average


def interval(differences: Sequence[float]) -> str:
    """The 95 % interval of a mean (Student's t); least and most where there are few."""
    if len(differences) < MIN_PAIRS:
        return f"{min(differences):+.2%}, {max(differences):+.2%}" if len(differences) > 1 else ""
    mean, number = fmean(differences), len(differences)
    half = float(student.ppf(0.975, number - 1)) * stdev(differences) / number**0.5
    return f"{mean - half:+.2%} to {mean + half:+.2%} (95 %)"


def table(results: Results, settings: Sequence[str], reference: str) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield (
        "| size | arm | steps | bytes a token and boundary | bytes of averages a parameter and step | seeds | loss | "
        "difference | by seed | steps' factor, by seed |"
    )
    yield "|---" * 10 + "|"
    for arm, size, steps in dict.fromkeys(sorted((t[:3] for t in results.losses), key=lambda t: (t[1], t[2], t[0]))):
        pairs = results.pairs(arm, size, steps, reference)
        wires, averages = bytes_of(Arm.of(arm).manifest(size, 1, steps, settings))
        losses = {t.seed: loss for t, loss in results.losses.items() if t[:3] == (arm, size, steps)}
        differences = [loss / curve[steps] - 1 for loss, curve in pairs.values() if steps in curve]
        factors = [str(steps_factor(steps, loss, curve)) for loss, curve in pairs.values()]
        cells = (
            *(size, arm, str(steps), f"{wires:,.0f}", f"{averages:.2f}", ", ".join(map(str, sorted(losses)))),
            f"{fmean(losses.values()):.4f}",
            f"{fmean(differences):+.2%}" if differences else "",
            interval(differences) if differences else "",
            ", ".join(factors),
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the text and the results")
    parser.add_argument("--arms", nargs="+", default=[], help="see arms.py")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["2M"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", nargs="+", type=int, default=[210])
    parser.add_argument("--reference", default=REFERENCE, help="the arm that others are compared with")
    parser.add_argument("--reference-steps", nargs="+", type=int, default=[], help="if not given, those of --steps")
    parser.add_argument("--text", nargs="+", help="files, or patterns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="that computes all trainings")
    parser.add_argument("--set", dest="settings", nargs="+", default=[], help="of the manifest of all arms")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = Results(options.folder / "results.jsonl", options.settings)
    text = options.folder / "text"
    if not options.table:
        if not text.exists():
            gather_text(options.text or [f"{sysconfig.get_path('purelib')}/**/*.py"], text)
        settings = (*options.settings, "data.dataset=text", f"data.files={json.dumps([f'{text}/*.txt'])}")
        own = {options.reference: options.reference_steps or options.steps}
        wanted = [
            (Training(arm, size, steps, seed), Arm.of(arm).manifest(size, seed, steps, settings))
            for size in options.sizes
            for seed in options.seeds
            for arm in dict.fromkeys((options.reference, *options.arms))
            for steps in own.get(arm, options.steps)
        ]  # all manifests at once: a mistake shows now, and not after hours
        for training, manifest in wanted:
            if training not in results.losses:
                begun_s = time.monotonic()
                loss = last_loss(manifest, Arm.of(training.arm), options.device)
                results.add(training, loss, time.monotonic() - begun_s)
    print(f"{provenance()}\n")
    print("\n".join(table(results, options.settings, options.reference)))


if __name__ == "__main__":
    main()
