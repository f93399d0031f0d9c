"""What do boundaries of few values cost in loss? The demo model in reference processes, at equal parameters.

Trainings of one seed read the same samples, with the same settings but for the boundary and the width of the MLPs: a
model that writes less of the residual stream has fewer parameters, and one with maxout more, so its MLPs are as much
wider or narrower. All are trained for `--steps`, and all but the one with whole hidden states for `--share` of them as
well, with a schedule that is as much longer. A boundary has cost no more steps than that if its last loss then is not
above the other's.

Every training is a line of `--results`; those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from statistics import fmean

import torch
from muon import ADAMW, CONFIG, Training, Trainings, add_common_options, text_settings
from wan_report import provenance

from coordinator.config_files import load_manifest
from coordinator.run.resolving import resolve_manifest

# Ranks are a part of the hidden size. Maxout's name ends with how many values it takes the largest of.
NONE, MAXOUT, IN_8_BIT = "none", "maxout-", "-8bit"
RANKS: Mapping[str, int] = {"d/2": 2, "d/4": 4, "d/8": 8}
EIGHT_BIT = ("wire.activations=blockwise_8bit", "wire.gradients=blockwise_8bit")
ARMS = [f"{name}{codec}" for codec in ("", IN_8_BIT) for name in (NONE, *RANKS, f"{MAXOUT}2", f"{MAXOUT}4")]
# MLPs are a multiple of so many values wide.
STEP = 4


def num_trained(settings: tuple[str, ...]) -> int:
    """How many values the demo with these settings trains."""
    resolved = resolve_manifest(load_manifest(CONFIG, settings))
    return sum(resolved.num_trained(spec) for spec in resolved.specs)


def settings_of(arm: str, common: tuple[str, ...]) -> tuple[str, ...]:
    """The settings of an arm: cut as the one without a boundary, with MLPs so wide that it trains as many values."""
    name = arm.removesuffix(IN_8_BIT)
    settings = common if name == arm else (*common, *EIGHT_BIT)
    if name == NONE:
        return settings
    reference = resolve_manifest(load_manifest(CONFIG, common))
    hidden_size, layers = reference.hidden_size, [len(spec.layers) for spec in reference.specs]
    is_maxout = name.startswith(MAXOUT)
    number = int(name.removeprefix(MAXOUT)) if is_maxout else hidden_size // RANKS[name]
    kind = "maxout" if is_maxout else "rank"
    settings = (*settings, f"stages.layers={layers}", f"model.boundary={{{kind}: {number}}}")
    low, high = (num_trained((*settings, f"model.config.n_inner={width}")) for width in (STEP, 2 * STEP))
    width = STEP * (1 + round((num_trained(common) - low) / (high - low)))
    return (*settings, f"model.config.n_inner={width}")


def compare(options: argparse.Namespace) -> Iterator[str]:
    """Train, and give the lines of a report in Markdown."""
    common, longer = (*text_settings(options), *options.settings), round(options.share * options.steps)
    arms = {arm: settings_of(arm, common) for arm in dict.fromkeys((NONE, *options.arms))}
    trainings = {arm: Trainings(options.results, settings) for arm, settings in arms.items()}
    yield f"| boundary | values | steps | {' | '.join(f'seed {seed}' for seed in options.seeds)} | mean difference |"
    yield "|---" * (4 + len(options.seeds)) + "|"
    for arm, settings in arms.items():
        for steps in [options.steps] if arm == NONE or options.only_equal else [options.steps, longer]:
            losses, differences = [], []
            for seed in options.seeds:
                reference = trainings[NONE].loss(Training(ADAMW, options.rate, seed, options.steps))
                losses.append(trainings[arm].loss(Training(ADAMW, options.rate, seed, steps)))
                differences.append(losses[-1] / reference - 1)
            cells = " | ".join(f"{loss:.4f}" for loss in losses)
            yield f"| {arm} | {num_trained(settings):,} | {steps} | {cells} | {fmean(differences):+.2%} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*RANKS, f"{MAXOUT}2"])
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--share", type=float, default=1.05, help="of the steps that others may need")
    parser.add_argument("--only-equal", action="store_true", help="train for as many steps only")
    add_common_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{provenance()}\n")
    for line in compare(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
