"""What do slow links cost models of different shapes? Swarms and torch's pipelines, at 0 and at 100 +- 50 ms.

The shapes are those of the SWARM paper's experiment with latency (16 layers in 4 stages, on V100 GPUs), and GPT-2 124M
on T4 GPUs. A shape stands for the time of a microbatch, and for how long its activations (X) and averages (A) take in
relation to a stage's compute (C). For the paper's shapes the planner says that, with 256 microbatches in a global
batch, two peers in a stage, 8 bit everywhere, links of 500 Mb/s, and 0.4 of a data sheet's speed. Peers with these
ratios and times then run in a box of links (../wan.py), with a smaller model and smaller bandwidth, and devices that
sleep. Torch's pipelines have no codecs: they send fp32 from stage to stage, and average in fp16.

    python benchmarks/experiments/slow_links.py FOLDER
    python benchmarks/experiments/slow_links.py FOLDER --shapes d4096-b4 --arms swarm@0 swarm@100+-50 gpipe@100+-50

Each shape gets a folder with a table and a figure. All shapes and arms take two hours.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from processes import adopt_orphans
from wan import Arm, Measuring, costs_of, run_arms, shaped
from wan_report import table, write_report
from wan_workload import Workload

from coordinator.planning.gpus import find_gpu
from coordinator.planning.stage_work import stage_works
from swarm_peer.config import Codec, RunManifest

NUM_STAGES, NUM_PEERS = 4, 2
CODEC: Codec = "blockwise_8bit"
ARMS = ("swarm@0", "swarm@100+-50", "delayed@100+-50", "periodic@100+-50", "gpipe@0", "gpipe@100+-50", "1f1b@100+-50")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The times of a model on its devices, which the box of links emulates.

    Attributes:
        microbatch_s: of one stage, forward and backward
        x_over_c, a_over_c: see wan.py
    """

    microbatch_s: float
    x_over_c: float
    a_over_c: float


def of_the_paper(width: int, microbatch_size: int) -> Shape:
    """One of the paper's shapes, as the planner reckons it."""
    num_microbatches = 256
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
            "stages": {"count": NUM_STAGES},
            "data": {"sequence_length": 512},
            "training": {
                "steps": 1000,
                "global_batch_size": num_microbatches * microbatch_size,
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
    c_s = microbatch_s * num_microbatches / NUM_PEERS
    return Shape(microbatch_s=microbatch_s, x_over_c=x_s / microbatch_s, a_over_c=a_s / c_s)


SHAPES: dict[str, Callable[[], Shape]] = {
    "d4096-b4": lambda: of_the_paper(4096, 4),
    "d4096-b1": lambda: of_the_paper(4096, 1),
    "d12288-b1": lambda: of_the_paper(12288, 1),
    # 4 peers a stage at 200 Mb/s, and a GPU that reaches a tenth of its data sheet's speed.
    "gpt2-124m": lambda: Shape(microbatch_s=0.25, x_over_c=1.5, a_over_c=2.25),
}


def emulated(shape: Shape, num_microbatches: int, hop_values: int) -> tuple[Workload, float]:
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
            num_microbatches=num_microbatches,
            width=width,
            sequence_length=hop_values // width,
            averaging=CODEC,
            wire=CODEC,
        )
        workload, bytes_per_s = shaped(workload, shape.x_over_c, shape.a_over_c)
        if workload.layers_per_stage >= 5:
            break
    return workload, bytes_per_s


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", type=Arm.parse, default=[Arm.parse(arm) for arm in ARMS])
    parser.add_argument("--microbatches", type=int, default=64, help="in a round")
    parser.add_argument("--rounds", type=int, default=2, help="that are counted")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--hop-values", type=int, default=65536, help="numbers that go from stage to stage")
    options = parser.parse_args()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and processes are cleaned up
    for name in options.shapes:
        workload, bytes_per_s = emulated(SHAPES[name](), options.microbatches, options.hop_values)
        costs = costs_of(workload, bytes_per_s)
        print(f"{name}: {workload} {costs}", flush=True)
        measuring = Measuring(
            arms=options.arms, num_rounds=options.rounds, repeat=options.repeat, bytes_per_s=bytes_per_s
        )
        results = run_arms(workload, measuring)
        print(table(results), flush=True)
        write_report(options.folder / name, results, costs)


if __name__ == "__main__":
    main()
