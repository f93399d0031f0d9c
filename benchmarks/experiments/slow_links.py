"""What do slow links cost models of different shapes? Swarms and torch's pipelines, at 0 and at 100 +- 50 ms.

The shapes are those of the SWARM paper's experiment with latency (16 layers in 4 stages, on V100 GPUs), and GPT-2 124M
on T4 GPUs. A shape stands for the time of a microbatch, and for how long its activations (X) and averages (A) take in
relation to a stage's compute (C). For the paper's shapes the planner says that, with 256 microbatches in a global
batch, two peers in a stage, 8 bit everywhere, links of 500 Mb/s, and 0.4 of a data sheet's speed. Peers with these
ratios and times then run in a box of links (../wan.py), with a smaller model and smaller bandwidth, and devices that
sleep. Torch's pipelines send as many bytes as swarms do (../wan_pipeline.py).

    python benchmarks/experiments/slow_links.py FOLDER
    python benchmarks/experiments/slow_links.py FOLDER --shapes d4096-b4 --arms swarm@0 swarm@100+-50 gpipe@100+-50

Each shape gets a folder with a table and a figure, with the figures of each run (runs.jsonl), and with the peers' logs.
All shapes and arms take some five hours; a run that FOLDER has is not repeated. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from processes import adopt_orphans
from wan import Arm, Measuring, costs_of, failed_arms, run_arms, shaped
from wan_report import Results, table, write_report
from wan_workload import INNER_STEPS, Workload

from coordinator.planning.gpus import find_gpu
from coordinator.planning.stage_work import stage_works
from swarm_peer.codecs import CODECS
from swarm_peer.config import RunManifest

NUM_STAGES, NUM_PEERS, NUM_MICROBATCHES = 4, 2, 256
CODEC = "blockwise_8bit"
ARMS = (
    "swarm@0",
    "swarm@100+-50",
    "delayed@100+-50",
    "periodic@100+-50",
    "periodic/int4_hadamard@100+-50",
    "gpipe@0",
    "gpipe@100+-50",
    "1f1b@100+-50",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The times of a model on its devices, which the box of links emulates.

    Attributes:
        microbatch_s: of one stage, forward and backward
        x_over_c, a_over_c: see wan.py
        num_microbatches: in a round that is measured
    """

    microbatch_s: float
    x_over_c: float
    a_over_c: float
    num_microbatches: int = NUM_MICROBATCHES


def of_the_paper(width: int, microbatch_size: int, num_measured: int = NUM_MICROBATCHES) -> Shape:
    """One of the paper's shapes, as the planner reckons it; rounds of `num_measured` microbatches are measured."""
    manifest = RunManifest.model_validate(
        {
            "name": "paper",
            "model": {
                "config": {
                    "model_type": "gpt2",
                    "n_layer": 4 * NUM_STAGES,
                    "n_embd": width,
                    "n_head": width // 128,
                    "n_positions": 512,
                    "vocab_size": 50257,
                    "tie_word_embeddings": False,
                },
                "precision": "fp16",
                "activation_checkpointing": True,
            },
            "stages": {"count": NUM_STAGES, "layers": [4] * NUM_STAGES},  # the paper's: no head makes up for a layer
            "data": {"sequence_length": 512},
            "training": {
                "steps": 1000,
                "global_batch_size": NUM_MICROBATCHES * microbatch_size,
                "microbatch_size": microbatch_size,
            },
            "optimizer": {"learning_rate": 1e-4},
            "wire": {"activations": CODEC, "gradients": CODEC},
            "averaging": {"compression": CODEC},
        }
    )
    work = stage_works(manifest, NUM_STAGES)[1]
    bytes_per_s = 500e6 / 8
    microbatch_s = work.flops * microbatch_size / (0.4 * 1e12 * find_gpu("V100").tflops("fp16"))
    x_s = (work.activation_bytes + work.gradient_bytes) * microbatch_size / bytes_per_s
    a_s = 2 * (NUM_PEERS - 1) / NUM_PEERS * work.averaging_bytes / bytes_per_s
    c_s = microbatch_s * NUM_MICROBATCHES / NUM_PEERS
    return Shape(
        microbatch_s=microbatch_s,
        x_over_c=x_s / microbatch_s,
        a_over_c=a_s / c_s,
        num_microbatches=num_measured,
    )


SHAPES: dict[str, Callable[[], Shape]] = {
    "d4096-b4": lambda: of_the_paper(4096, 4),
    # With 256, peers with averages of the same share would hold ten gigabytes of weights and gradients together.
    "d12288-b1": lambda: of_the_paper(12288, 1, NUM_MICROBATCHES // 2),
    # T4s that reach a tenth of their data sheet's speed, at 200 Mb/s; a rough estimate, in which averages are dear.
    "gpt2-124m": lambda: Shape(microbatch_s=0.25, x_over_c=1.5, a_over_c=2.25),
}


def emulated(shape: Shape, hop_values: int) -> tuple[Workload, float]:
    """The run that has a shape's times, and its bandwidth.

    A stage's layers are narrow enough that their number can bring A/C within a tenth of what it is.

    Args:
        hop_values: numbers that a peer sends to the next one for each microbatch
    """
    for width in (512, 256, 128, 64):
        workload = Workload(
            num_stages=NUM_STAGES,
            num_peers=NUM_PEERS,
            microbatch_s=shape.microbatch_s,
            num_microbatches=shape.num_microbatches,
            width=width,
            sequence_length=hop_values // width,
            averaging=CODEC,
            wire=CODEC,
        )
        workload, bytes_per_s = shaped(workload, shape.x_over_c, shape.a_over_c)
        if workload.layers_per_stage >= 5:
            break
    return workload, bytes_per_s


def with_averages(results: Results) -> Results:
    """The results, where the rounds of `periodic` have their share of an average, which none of those measured has.

    It is taken from the synchronous swarm of the same repetition and links.
    """
    shared = dict(results)
    for name, runs in results.items():
        system, _, links = name.partition("@")
        averages = results.get(f"swarm@{links}", {})
        if system.startswith("periodic") and runs.keys() & averages.keys():
            shared[f"{name}, with 1/{INNER_STEPS} of an average"] = {
                number: slower(runs[number], mean_averaging_s(averages[number]) / INNER_STEPS)
                for number in runs.keys() & averages.keys()
            }
    return shared


def mean_averaging_s(figures: Mapping[str, Any]) -> float:
    """How long an averaging round takes, as a mean over stages."""
    return fmean(stage["averaging_s"] for stage in figures["stages"])


def slower(figures: Mapping[str, Any], more_s: float) -> dict[str, Any]:
    """Figures of rounds that take so much longer."""
    by = figures["round_s"] / (figures["round_s"] + more_s)
    return {
        **figures,
        "round_s": figures["round_s"] + more_s,
        "share": figures["share"] * by,
        "microbatches_per_s": figures["microbatches_per_s"] * by,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", type=Arm.parse, default=[Arm.parse(arm) for arm in ARMS])
    parser.add_argument("--rounds", type=int, default=3, help="that are counted")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--averaging", default=CODEC, choices=CODECS, help="over links whose bandwidth stays the same")
    parser.add_argument("--hop-values", type=int, default=65536, help="numbers that go from stage to stage")
    options = parser.parse_args()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and processes are cleaned up
    failed: list[str] = []
    for name in options.shapes:
        workload, bytes_per_s = emulated(SHAPES[name](), options.hop_values)
        workload = replace(workload, averaging=options.averaging)
        costs = costs_of(workload, bytes_per_s)
        print(f"{name}: {workload} {costs}", flush=True)
        folder = options.folder / name
        measuring = Measuring(
            arms=options.arms,
            num_rounds=options.rounds,
            repeat=options.repeat,
            bytes_per_s=bytes_per_s,
            keep=folder / "peers",
            runs=folder / "runs.jsonl",
        )
        shown = {"shape": name, "layers_per_stage": workload.layers_per_stage, "width": workload.width} | costs
        found: Results = {}
        results: Results = {arm.name: {} for arm in options.arms}
        for results in run_arms(workload, measuring):
            found = with_averages(results)
            write_report(folder, found, shown)
        print(table(found), flush=True)
        failed += [f"{name}:{arm}" for arm in failed_arms(results, options.repeat)]
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
