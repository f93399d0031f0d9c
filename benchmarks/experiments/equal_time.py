"""Does periodic averaging with 4-bit wires learn faster over slow links? The demo's loss in equal time.

slow_links.py and ../wan.py measure what an optimizer step takes over given links; loss.py, in processes without a
network, what a step brings. Here both come together: the loss of each arm over time, and when `periodic` has come to
the loss that `synchronous` ends with.

    python benchmarks/experiments/equal_time.py FOLDER --synchronous-s 50 --periodic-s 15 --steps 1000

The seconds are those of a step; for `periodic`, with its share of an average. FOLDER gets a table and a figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from loss import Arm, validation_losses
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from wan_report import machine, provenance

ARMS = {
    "synchronous": Arm(wires="blockwise_8bit", averaging="blockwise_8bit"),
    "periodic": Arm(wires="int4_hadamard", mode="{mode: periodic, inner_steps: 50}"),
}


def first_step_at(losses: Mapping[int, float], target: float) -> float | None:
    """When a loss is reached for the first time, in optimizer steps; between two validations on a straight line."""
    before: tuple[int, float] | None = None
    for step, loss in losses.items():
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def draw(curves: Mapping[str, Mapping[float, float]], title: str) -> Figure:
    """The loss of each arm over hours."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot([seconds / 3600 for seconds in curve], list(curve.values()), label=name)
    axes.set_xlabel("hours")
    axes.set_ylabel("validation loss, nats per token")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    return figure


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--synchronous-s", type=float, required=True, help="of an optimizer step")
    parser.add_argument("--periodic-s", type=float, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--validation-every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--members", type=int, default=2, help="of each stage")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], help="of the manifest, as in `swarm-coordinator`"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = (
        f"training.steps={options.steps}",
        f"training.validation_every={options.validation_every}",
        *options.settings,
    )
    step_s = {"synchronous": options.synchronous_s, "periodic": options.periodic_s}
    lines = [
        provenance(),
        "",
        "| seed | loss of synchronous | of periodic, at equal samples | share of the time |",
        "|---|---|---|---|",
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    for seed in range(1, options.seeds + 1):
        losses = {name: validation_losses(arm, seed, options.members, settings) for name, arm in ARMS.items()}
        final = {name: loss[options.steps] for name, loss in losses.items()}
        reached = first_step_at(losses["periodic"], final["synchronous"])
        whole_s = options.steps * step_s["synchronous"]
        share = "not reached" if reached is None else f"{reached * step_s['periodic'] / whole_s:.2f}"
        lines.append(f"| {seed} | {final['synchronous']:.4f} | {final['periodic']:.4f} | {share} |")
        print(lines[-1], flush=True)
        (options.folder / "table.md").write_text("\n".join(lines) + "\n")
        curves = {name: {step * step_s[name]: loss for step, loss in of_arm.items()} for name, of_arm in losses.items()}
        draw(curves, f"{date.today()}, {machine()}, seed {seed}").savefig(options.folder / f"seed-{seed}.png", dpi=120)


if __name__ == "__main__":
    main()
