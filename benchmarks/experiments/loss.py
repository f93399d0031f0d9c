"""What do codecs and modes of averaging cost in loss, at equal samples? The demo model in processes without a network.

Each arm trains the same manifest but for one codec, on the wires or in averaging, or but for the mode of averaging.
Where members average, each computes every n-th microbatch; in the other modes, it goes on with a random one of the next
stage, as in a swarm. An arm and the reference of the same seed begin with the same weights and read the same samples.
The control averages among members too, without a codec: its sums are rounded in another order, and what that alone
makes of the loss is how far two runs of no difference come apart.

The figure is the validation loss after the last step, without codecs on the wires, as the saved model has it; relative
to the reference's: the mean over seeds, and the 95 % interval of that mean (Student's t). Seeds go on until the
interval lies on one side of an arm's target, or are used up. Since the interval is looked at after each seed, from the
fifth one on, a verdict is wrong somewhat more often than one time in twenty.
Every training is a line of `--results`; those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import t as student
from wan_report import add_line, commit, machine, provenance, read_lines

from coordinator.config_files import load_manifest
from coordinator.run.baseline import Baseline, ReplicatedBaseline, train
from coordinator.run.resolving import resolve_manifest
from swarm_peer.config import RunManifest, WireSection
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.wire.codecs import decode, encode, rounding_seed

CONFIG = Path(__file__).parents[2] / "configs" / "demo.yaml"
REFERENCE = "reference"
# An interval of fewer pairs says little, wherever it lies.
MIN_PAIRS = 5


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        wires: codec of activations and gradients between stages
        averaging: codec of averaging; None for one process that averages with nobody
        mode: of averaging, as `--set` takes it
        target: largest relative difference of the loss that is wanted, if there is one
    """

    wires: str = "none"
    averaging: str | None = None
    mode: str = "{}"
    target: float | None = None


PLAIN_MEANS = "outer_learning_rate: 1, outer_momentum: 0"
ARMS = {
    REFERENCE: Arm(),
    "control": Arm(averaging="none"),
    "wires-8bit": Arm(wires="blockwise_8bit"),
    "wires-4bit": Arm(wires="int4_hadamard", target=0.003),
    "averaging-8bit": Arm(averaging="blockwise_8bit", target=0.001),
    "averaging-4bit": Arm(averaging="int4_hadamard"),
    "delayed": Arm(mode="{mode: delayed}", target=0.005),
    "delayed-plain": Arm(mode="{mode: delayed, eager_updates: false}"),
    "periodic-10": Arm(mode="{mode: periodic, inner_steps: 10}", target=0.003),
    "periodic-50": Arm(mode="{mode: periodic, inner_steps: 50}", target=0.01),
    "periodic-10-means": Arm(mode=f"{{mode: periodic, inner_steps: 10, {PLAIN_MEANS}}}", target=0.003),
    "periodic-50-means": Arm(mode=f"{{mode: periodic, inner_steps: 50, {PLAIN_MEANS}}}", target=0.01),
}


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


def manifest_of(arm: Arm, seed: int, settings: Sequence[str]) -> RunManifest:
    """The manifest of a training.

    Raises:
        UserError: the settings do not fit the arm's
    """
    wire = f"wire={{activations: {arm.wires}, gradients: {arm.wires}}}"
    # The arm's own come first: a mode is one mapping, and `--set averaging.outer_momentum=0.8` changes a part of it.
    # Nobody rewinds, and the demo's snapshots do not fit into each period.
    own = (wire, f"averaging={arm.mode}", "recovery.snapshot_every=0")
    return load_manifest(CONFIG, (*own, *settings, f"seed={seed}"))


def validation_losses(
    arm: Arm, seed: int, num_members: int, settings: Sequence[str], device: str = "cpu"
) -> dict[int, float]:
    """The validation losses of a training, by optimizer step; the last one comes last."""
    baseline = _baseline(resolve_manifest(manifest_of(arm, seed, settings)), arm, num_members, device)
    # The trainers have the run's own manifest, and an evaluation goes by this one.
    baseline.manifest = baseline.manifest.model_copy(update={"wire": WireSection()})
    lines = train(baseline)
    return {line["optimizer_step"]: line["validation_loss"] for line in lines if "validation_loss" in line}


def _baseline(resolved: ResolvedManifest, arm: Arm, num_members: int, device: str) -> Baseline:
    if resolved.manifest.averaging.mode != "synchronous":
        return RoutedBaseline(resolved, num_members, device)
    if arm.averaging is None:
        return Baseline(resolved, device)
    return AveragedBaseline(resolved, num_members, arm.averaging, device)


def name_of(settings: Sequence[str], num_members: int, device: str) -> str:
    """The name of some trainings' settings. Only those of one kind of device are compared."""
    return " ".join((*settings, f"members={num_members}", *(() if device == "cpu" else (f"device={device}",))))


@dataclass(frozen=True)
class Verdict:
    """The mean relative difference of an arm's losses from the reference's, with its 95 % interval `low` to `high`."""

    num_pairs: int
    mean: float
    low: float
    high: float

    def of(self, target: float | None) -> str:
        """Within or beyond the target, undecided, or nothing without a target."""
        if target is None:
            return ""
        if self.num_pairs < MIN_PAIRS or self.low <= target <= self.high:
            return "undecided"
        return "within" if self.high < target else "beyond"


def judge(differences: Sequence[float]) -> Verdict:
    """The mean of some relative differences, with its 95 % interval."""
    mean, num_pairs = fmean(differences), len(differences)
    if num_pairs < 2:
        return Verdict(num_pairs, mean, -float("inf"), float("inf"))
    half = float(student.ppf(0.975, num_pairs - 1)) * stdev(differences) / num_pairs**0.5
    return Verdict(num_pairs, mean, mean - half, mean + half)


class Results:
    """The validation losses of all trainings, as lines of a file that outlives this process.

    Attributes:
        commits: that the trainings are of
    """

    def __init__(self, file: Path | None, name: str):
        """Read a file, if there is one, of which the lines of the same `name` count: the settings of the trainings."""
        self._file = file
        self._name = name
        self._curves: dict[tuple[str, int], dict[int, float]] = {}
        self.commits: set[str] = set()
        if file is not None and file.exists():
            for entry in read_lines(file):
                if entry["settings"] == name and "losses" in entry:
                    curve = {int(step): loss for step, loss in entry["losses"].items()}
                    self._curves[entry["arm"], entry["seed"]] = curve
                    self.commits.add(entry["commit"])

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._curves

    def add(self, arm: str, seed: int, losses: Mapping[int, float]) -> None:
        """Note one training, with its losses by optimizer step."""
        self._curves[arm, seed] = dict(losses)
        self.commits.add(commit())
        entry = {"arm": arm, "seed": seed, "losses": losses, "settings": self._name, "commit": commit()}
        print(json.dumps(entry), file=sys.stderr, flush=True)
        if self._file is not None:
            add_line(self._file, entry)

    def curve(self, arm: str, seed: int) -> dict[int, float]:
        """The losses of a training, by optimizer step."""
        return self._curves[arm, seed]

    def pairs(self, arm: str, base: str = REFERENCE) -> list[tuple[float, float]]:
        """The last losses of an arm and of another one, of all seeds that both have."""
        seeds = sorted(seed for name, seed in self._curves if name == arm and (base, seed) in self._curves)
        return [(_last(self._curves[arm, seed]), _last(self._curves[base, seed])) for seed in seeds]

    def verdict(self, arm: str, base: str = REFERENCE) -> Verdict | None:
        """The verdict of an arm's pairs with another one, if there are any."""
        differences = [loss / of_base - 1 for loss, of_base in self.pairs(arm, base)]
        return judge(differences) if differences else None


def _last(curve: Mapping[int, float]) -> float:
    return curve[max(curve)]


def table(results: Results, arms: Sequence[str]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| arm | pairs | loss | the reference's, of the same seeds | difference | 95 % interval | target | |"
    yield "|---|---|---|---|---|---|---|---|"
    for arm in arms:
        found = results.verdict(arm)
        if found is None:
            continue
        losses, references = zip(*results.pairs(arm), strict=True)
        target = ARMS[arm].target
        interval = "" if found.num_pairs < 2 else f"{found.low:+.3%} to {found.high:+.3%}"
        yield (
            f"| {arm} | {found.num_pairs} | {fmean(losses):.4f} | {fmean(references):.4f} | {found.mean:+.3%} | "
            f"{interval} | "
            f"{'' if target is None else f'{target:.1%}'} | {found.of(target)} |"
        )


def draw(results: Results, arms: Sequence[str], title: str) -> Figure:
    """The mean difference of each arm with its interval, and its target."""
    figure = Figure(figsize=(8, 1.5 + 0.45 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axvline(0, color="grey", linewidth=0.8)
    for row, arm in enumerate(arms):
        found, target = results.verdict(arm), ARMS[arm].target
        if found is not None:
            half = 100 * (found.high - found.mean) if found.num_pairs > 1 else None
            axes.errorbar(100 * found.mean, row, xerr=half, fmt="o", color="#3a6ea5", capsize=4)
        if target is not None:
            axes.plot(100 * target, row, "|", color="#d98c3f", markersize=18, markeredgewidth=2)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlabel("validation loss, % above the reference's (95 % interval; the bar is the target)")
    axes.set_title(title, fontsize="medium")
    return figure


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=[arm for arm in ARMS if arm != REFERENCE], default=[*ARMS][1:])
    parser.add_argument("--seeds", type=int, default=3, help="at most so many pairs for each arm")
    parser.add_argument("--first-seed", type=int, default=1, help="processes of other seeds may share the results")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--members", type=int, default=2, help="of each stage that average")
    parser.add_argument("--validation-samples", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="that computes all trainings")
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], help="of the manifest, as in `swarm-coordinator`"
    )
    parser.add_argument("--results", type=Path, help="file of all trainings; those that it holds are not repeated")
    parser.add_argument("--report", type=Path, help="folder that gets a table and a figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = (
        f"training.steps={options.steps}",
        f"training.validation_samples={options.validation_samples}",
        f"training.validation_every={options.steps}",
        *options.settings,
    )
    for name in (REFERENCE, *options.arms):
        manifest_of(ARMS[name], 1, settings)  # a mistake shows now, and not after hours
    results = Results(options.results, name_of(settings, options.members, options.device))
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        wanted = [name for name in options.arms if (name, seed) not in results and not is_decided(results, name)]
        for name in (REFERENCE, *wanted) if wanted else ():
            if (name, seed) not in results:
                losses = validation_losses(ARMS[name], seed, options.members, settings, options.device)
                results.add(name, seed, losses)
        if options.report:
            write_report(options.report, results, options.arms)
    print("\n".join(table(results, options.arms)))


def is_decided(results: Results, arm: str) -> bool:
    """Whether an arm's interval lies on one side of its target."""
    found = results.verdict(arm)
    return found is not None and found.of(ARMS[arm].target) in ("within", "beyond")


def write_report(folder: Path, results: Results, arms: Sequence[str]) -> None:
    """Write table.md and figure.png."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = f"{provenance()}. Trainings of {', '.join(sorted(results.commits))}."
    (folder / "table.md").write_text("\n".join((origin, "", *table(results, arms))) + "\n")
    draw(results, arms, f"{date.today()}, {machine()}").savefig(folder / "figure.png", dpi=120)


if __name__ == "__main__":
    main()
