"""Does periodic averaging with 4-bit wires learn faster over slow links? The demo's loss in equal time.

slow_links.py and ../wan.py measure what an optimizer step takes over given links; loss.py, in processes without a
network, what a step brings. Here both come together. `synchronous` trains for so many steps. `periodic` trains for as
many as it can take in a share of that time: half of it, and all of it, each a training of its own, since the learning
rate falls until the last step. Its differences are averaged without a codec here, which its seconds have.

    python benchmarks/experiments/equal_time.py FOLDER --synchronous-s 50 --periodic-s 15 --steps 1000

The seconds are those of a step; for `periodic`, with its share of an average. FOLDER gets a table, a figure for each
seed, and each training as a line of trainings.jsonl; those that are there already are not repeated. One pass over the
demo's text has some 70,000 samples: take a global batch, with --set, of which all steps together need no more.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from loss import Arm, Results, manifest_of, validation_losses
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from wan_report import provenance
from wan_workload import INNER_STEPS

SYNCHRONOUS = Arm(wires="blockwise_8bit", averaging="blockwise_8bit")
PERIODIC = Arm(wires="int4_hadamard", mode=f"{{mode: periodic, inner_steps: {INNER_STEPS}}}")
SHARES = (0.5, 1.0)


def steps_in(share: float, num_steps: int, synchronous_s: float, periodic_s: float) -> int:
    """How many periodic steps fit into a share of the time of so many synchronous ones: whole periods."""
    return math.floor(share * num_steps * synchronous_s / periodic_s / INNER_STEPS + 1e-9) * INNER_STEPS


def name_of(share: float) -> str:
    """The name of periodic averaging in a share of the time."""
    return f"periodic, {share:.0%} of the time"


def table(results: Results, names: Sequence[str]) -> str:
    """How the last loss of each arm compares with that of `synchronous`, in Markdown."""
    lines = ["| arm | seeds | loss | of synchronous | difference | 95 % interval |", "|---|---|---|---|---|---|"]
    for name in names:
        found, pairs = results.verdict(name, "synchronous"), results.pairs(name, "synchronous")
        if found is not None:
            loss, base = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
            interval = "" if found.num_pairs < 2 else f"{found.low:+.2%} to {found.high:+.2%}"
            lines.append(f"| {name} | {found.num_pairs} | {loss:.4f} | {base:.4f} | {found.mean:+.2%} | {interval} |")
    return "\n".join(lines)


def draw(curves: Mapping[str, Mapping[float, float]], title: str) -> Figure:
    """The loss of each arm over hours."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot([seconds / 3600 for seconds in curve], list(curve.values()), label=name)
    axes.set_xlabel("hours")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title(title, fontsize="x-small", wrap=True)
    axes.legend()
    return figure


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--synchronous-s", type=float, required=True, help="of an optimizer step")
    parser.add_argument("--periodic-s", type=float, required=True)
    parser.add_argument("--steps", type=int, default=1000, help="of synchronous averaging")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--members", type=int, default=2, help="of each stage")
    parser.add_argument("--validation-samples", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="that computes all trainings")
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], help="of the manifest, as in `swarm-coordinator`"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    arms = {"synchronous": (SYNCHRONOUS, options.steps)}
    for share in SHARES:
        num_steps = steps_in(share, options.steps, options.synchronous_s, options.periodic_s)
        arms[name_of(share)] = (PERIODIC, num_steps)
    step_s = {
        name: options.synchronous_s if arm is SYNCHRONOUS else options.periodic_s for name, (arm, _) in arms.items()
    }

    def settings(num_steps: int) -> tuple[str, ...]:
        own = (
            f"steps={num_steps}",
            f"validation_every={INNER_STEPS}",
            f"validation_samples={options.validation_samples}",
        )
        return (*(f"training.{setting}" for setting in own), *options.settings)

    for arm, num_steps in arms.values():
        manifest_of(arm, 1, settings(num_steps))  # a mistake shows now, and not after hours
    told = f"{[num_steps for _, num_steps in arms.values()]} {settings(0)} members={options.members}"
    told += "" if options.device == "cpu" else f" device={options.device}"
    options.folder.mkdir(parents=True, exist_ok=True)
    results = Results(options.folder / "trainings.jsonl", told)
    for seed in range(1, options.seeds + 1):
        for name, (arm, num_steps) in arms.items():
            if (name, seed) not in results:
                losses = validation_losses(arm, seed, options.members, settings(num_steps), options.device)
                results.add(name, seed, losses)
        text = table(results, [*arms][1:])
        (options.folder / "table.md").write_text(f"{provenance()}\n\n{text}\n")
        curves = {
            name: {step * step_s[name]: loss for step, loss in results.curve(name, seed).items()} for name in arms
        }
        draw(curves, f"seed {seed}; {provenance()}").savefig(options.folder / f"seed-{seed}.png", dpi=120)
    print(text)


if __name__ == "__main__":
    main()
