"""One process of a torch.distributed.pipelining pipeline over gloo: the yardstick of throughput.py.

It trains what the baseline trains: the same stage modules, samples, microbatches, clipping and optimizer. Only the
order in which the modules are called is torch's.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from coordinator.config_files import load_manifest
from coordinator.run.baseline import STREAM_ID, microbatches_of
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.data.slices import sample_stream

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# GPipe holds the activations of all microbatches at once, of GPT-2 124M some 0.4 GB each: those of larger global
# batches go through the pipeline in groups of at most so many, and the gradients accumulate.
MOST_MICROBATCHES_OF_GPIPE = 16


def loss_sum(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """The sum over samples of each sample's mean cross entropy, as StageTrainer accumulates it."""
    losses_N = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
    return losses_N / targets_BT.shape[1]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--schedule", choices=SCHEDULES, required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--rendezvous", required=True, help="tcp://127.0.0.1:PORT")
    parser.add_argument("--output", type=Path, required=True, help="the last stage writes its metrics.jsonl here")
    options = parser.parse_args()

    torch.set_num_threads(1)
    resolved = ResolvedManifest.of(load_manifest(options.manifest))
    init_process_group(
        "gloo",
        init_method=options.rendezvous,
        rank=options.stage,
        world_size=resolved.num_stages,
        timeout=timedelta(seconds=300),
    )
    try:
        train(options, StageTrainer(resolved, resolved.specs[options.stage]))
    finally:
        destroy_process_group()


def train(options: argparse.Namespace, trainer: StageTrainer) -> None:
    """Finish optimizer steps, with one line of metrics.jsonl for each."""
    manifest, spec = trainer.manifest, trainer.spec
    samples = manifest.training.global_batch_size
    microbatches = samples // manifest.training.microbatch_size
    group = min(microbatches, MOST_MICROBATCHES_OF_GPIPE) if options.schedule == "gpipe" else microbatches
    stage = PipelineStage(trainer.module, spec.index, spec.num_stages, trainer.device)
    schedule = SCHEDULES[options.schedule](stage, group, loss_fn=loss_sum, scale_grads=False)
    batches = microbatches_of(sample_stream(manifest, STREAM_ID), manifest)
    metrics = (options.output / "metrics.jsonl").open("w") if spec.is_last else None
    for optimizer_step in range(1, manifest.training.steps + 1):
        begin = time.monotonic()
        tokens_NS = torch.cat(next(batches)).long()
        loss_sums = 0.0
        for tokens_GS in torch.split(tokens_NS, group * manifest.training.microbatch_size):
            inputs = (tokens_GS[:, :-1],) if spec.is_first else ()
            targets = tokens_GS[:, 1:] if spec.is_last else None
            losses: list[torch.Tensor] = []
            schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
            loss_sums += float(sum(losses))
        trainer.num_samples = samples
        trainer.apply(trainer.mean_gradients())
        if metrics is not None:
            tokens = samples * manifest.data.sequence_length
            line = {
                "optimizer_step": optimizer_step,
                "loss": loss_sums / samples,
                "tokens": tokens,
                "seconds": time.monotonic() - begin,
            }
            print(json.dumps(line), file=metrics, flush=True)


if __name__ == "__main__":
    main()
