"""How fast is a stage on a GPU, and does it take the memory that was predicted?

Each case is a stage of a run that comes with Swarm. Some microbatches go forward; then one goes backward and another
one forward, as at a peer, until the round has as many as it takes. It ends with the optimizer's step. The first round
is not counted. Measured are:

* tokens/s of the passes alone (hidden states and their gradients stay on the GPU), and of what a peer's device thread
  does: decoded from bytes before a pass, and encoded to bytes after it, with the run's codecs.
* TFLOP/s of the passes alone, by the model's own count, in which recomputation is work too.
* The peak of what torch's allocator gave out, against what model/costs.py predicts; and the most that it reserved.
* The seconds that the end of a round takes: the mean to the CPU, the average back, the optimizer's step.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from coordinator.config_files import load_manifest
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.forward_pass import ForwardPass
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.host.preparation import free_device_memory
from swarm_peer.wire.codecs import decode, encode

DEVICE = "cuda:0"


@dataclass(frozen=True)
class Case:
    """A stage, and how it is trained.

    Attributes:
        settings: of the run, other than in its file, as for --set
        in_flight: microbatches that wait for their backward pass
        in_round: microbatches of a round
    """

    name: str
    config: str
    stage: int
    settings: tuple[str, ...] = ()
    in_flight: int = 4
    in_round: int = 24

    def resolved(self) -> ResolvedManifest:
        """The run's manifest."""
        return ResolvedManifest.of(load_manifest(Path(self.config), self.settings))


@dataclass(frozen=True)
class Figures:
    """The columns of the table that main prints for a case."""

    tokens_per_s: float
    peer_tokens_per_s: float
    tflops: float
    predicted_mb: float
    allocated_mb: float
    reserved_mb: float
    round_end_s: float


EIGHT_BIT = ("optimizer.name=adamw_8bit",)
CHECKPOINTING = ("model.activation_checkpointing=true",)
KEPT = ("model.activation_checkpointing=false",)


def precision(name: str) -> tuple[str, ...]:
    """The setting of an autocast type."""
    return (f"model.precision={name}",)


# A Llama of 7 billion parameters has 32 such layers, here with as few heads for keys as newer ones have.
WIDE = (
    "model.config.hidden_size=4096",
    "model.config.intermediate_size=11008",
    "model.config.num_hidden_layers=6",
    "stages.layers=[2, 2, 2]",
    "model.config.num_attention_heads=32",
    "model.config.num_key_value_heads=8",
    "training.microbatch_size=2",
    "data.sequence_length=2048",
)
CASES = (
    *(Case(f"GPT-2 124M first, {name}", "gpt2-124m", 0, precision(name)) for name in ("fp32", "bf16", "fp16")),
    *(Case(f"GPT-2 124M last, {name}", "gpt2-124m", 1, precision(name)) for name in ("fp32", "bf16", "fp16")),
    Case("GPT-2 124M first, bf16, checkpointing", "gpt2-124m", 0, CHECKPOINTING),
    Case("GPT-2 124M last, bf16, checkpointing", "gpt2-124m", 1, CHECKPOINTING),
    Case("GPT-2 124M last, bf16, 8-bit AdamW", "gpt2-124m", 1, EIGHT_BIT),
    Case("Llama 135M middle, bf16, checkpointing", "llama", 1),
    Case("Llama 135M middle, bf16", "llama", 1, KEPT),
    Case("Llama 135M middle, fp32", "llama", 1, KEPT + precision("fp32")),
    Case("Llama 7B, 2 layers, bf16", "llama", 1, WIDE + KEPT),
    Case("Llama 7B, 2 layers, bf16, checkpointing", "llama", 1, WIDE),
    Case("Llama 7B, 2 layers, bf16, checkpointing, 8-bit AdamW", "llama", 1, WIDE + EIGHT_BIT),
    Case("1B shared, middle, fp16, checkpointing, 8-bit AdamW", "swarm-1b-shared", 1, (), 2, 8),
    Case("1B shared, last, fp16, checkpointing, 8-bit AdamW", "swarm-1b-shared", 2, (), 2, 8),
)


class Stage:
    """One stage with made-up neighbours.

    Attributes:
        through_wire: whether it decodes and encodes as a peer does
    """

    def __init__(self, resolved: ResolvedManifest, stage: int):
        self.manifest = manifest = resolved.manifest
        self.spec = resolved.specs[stage]
        self.through_wire = False
        self.trainer = StageTrainer(resolved, self.spec, device=DEVICE)
        shape = manifest.training.microbatch_size, manifest.data.sequence_length, resolved.boundary_width
        self.shape = shape
        self.tokens_BS = torch.randint(resolved.vocab_size, (shape[0], shape[1] + 1))
        hidden_BTD = torch.randn(shape)
        self.hidden = encode(hidden_BTD, manifest.wire.activations)
        self.gradient = encode(1e-4 * hidden_BTD, manifest.wire.gradients)
        self.hidden_BTD = hidden_BTD.to(DEVICE)
        self.grad_BTD = 1e-4 * self.hidden_BTD

    def forward(self) -> ForwardPass:
        """One forward pass, whose output is read where it is a loss or sent."""
        hidden_BTD = None
        if not self.spec.is_first:
            wire = self.manifest.wire.activations
            hidden_BTD = decode(self.hidden, self.shape, wire, DEVICE) if self.through_wire else self.hidden_BTD
        passed = self.trainer.forward(self.tokens_BS, hidden_BTD)
        if self.spec.is_last:
            float(passed.output.sum())
        elif self.through_wire:
            encode(passed.output, self.manifest.wire.activations)
        return passed

    def backward(self, passed: ForwardPass) -> None:
        """Its backward pass."""
        grad_BTD = None
        if not self.spec.is_last:
            wire = self.manifest.wire.gradients
            grad_BTD = decode(self.gradient, self.shape, wire, DEVICE) if self.through_wire else self.grad_BTD
        input_grad_BTD = self.trainer.backward(passed, grad_BTD)
        if self.through_wire and input_grad_BTD is not None:
            encode(input_grad_BTD, self.manifest.wire.gradients, 1)

    def train(self, in_flight: int, in_round: int) -> tuple[float, float]:
        """One round. Returns the seconds of its passes and of its end."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        waiting = [self.forward() for _ in range(in_flight)]
        for _ in range(in_round - in_flight):
            self.backward(waiting.pop(0))
            waiting.append(self.forward())
        while waiting:
            self.backward(waiting.pop(0))
        torch.cuda.synchronize()
        passed = time.perf_counter()
        self.trainer.apply(self.trainer.mean_gradients())
        torch.cuda.synchronize()
        return passed - begin, time.perf_counter() - passed


def measure(case: Case) -> Figures:
    """Run a case. Nothing else may hold memory of the GPU in this process."""
    resolved = case.resolved()
    training = resolved.manifest.training
    tokens = case.in_round * training.microbatch_size * resolved.manifest.data.sequence_length
    stage = Stage(resolved, case.stage)
    stage.train(case.in_flight, case.in_round)
    held_by_the_benchmark = stage.hidden_BTD.nbytes + stage.grad_BTD.nbytes
    torch.cuda.reset_peak_memory_stats()
    alone_s, end_s = stage.train(case.in_flight, case.in_round)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    stage.through_wire = True
    stage.train(case.in_flight, case.in_round)
    peer_s, _ = stage.train(case.in_flight, case.in_round)
    costs = stage_costs(resolved, "cuda")[case.stage]
    return Figures(
        tokens_per_s=tokens / alone_s,
        peer_tokens_per_s=tokens / peer_s,
        tflops=tokens * costs.flops / alone_s / 1e12,
        predicted_mb=costs.memory.peak_bytes(case.in_flight) / 1e6,
        allocated_mb=(allocated - held_by_the_benchmark) / 1e6,
        reserved_mb=reserved / 1e6,
        round_end_s=end_s,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="?", default="", help="cases whose names contain this")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    found = {}
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, bf16 and fp16 by autocast")
    print(
        "| stage | tokens/s | TFLOP/s | with wires | predicted, MB | allocated, MB | | reserved, MB | round's end, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if options.only not in case.name:
            continue
        figures = measure(case)
        free_device_memory(torch.device(DEVICE))
        found[case.name] = asdict(figures)
        print(
            f"| {case.name} | {figures.tokens_per_s:.0f} | {figures.tflops:.1f} "
            f"| {figures.peer_tokens_per_s / figures.tokens_per_s:.2f} | {figures.predicted_mb:.0f} "
            f"| {figures.allocated_mb:.0f} | {figures.predicted_mb / figures.allocated_mb - 1:+.1%} "
            f"| {figures.reserved_mb:.0f} | {figures.round_end_s:.2f} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
