"""How fast does one device train a model that it keeps in the host's memory, against one that has room for it?

The alternative to a swarm on one device: weights, gradients and AdamW's states are the host's, and each layer's weights
come to the device for each of its passes (`fully_shard` with CPUOffloadPolicy, of torch's FSDP2, with one process). The
model has the shape that the SWARM paper compares with ZeRO-Offload: GPT's layers of width 4096, 32 heads, 512 tokens,
four stages of four layers, without an embedding and a head. The resident one is a swarm's device that never waits.

Both compute in bf16, with weights in fp32, and compute each layer's activations once more in the backward pass. For
each microbatch, gradients go to where the weights are, and are added up there; then AdamW steps there. The first step
is not counted. Unlike ZeRO-Offload's, a step of AdamW begins when all gradients are there, and ends before the next
pass begins.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# Sequences of a microbatch, and microbatches of a step. The paper's microbatch has 4; the last case is the slowest.
BATCHES = ((4, 1), (64, 1), (256, 1), (4, 8))
HEAD_DIM = 128
MODES = ("resident", "offloaded")


class Layer(nn.Module):
    """A layer of a decoder that keeps its input alone for the backward pass."""

    def __init__(self, dim: int, length: int, device: str):
        super().__init__()
        heads = max(1, dim // HEAD_DIM)
        self.block = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, device=device
        )
        is_later = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        self.register_buffer("is_later", is_later, persistent=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Give the next layer its input."""
        # With `is_causal` the mask is not read, and attention is torch's fastest.
        out_BTD: Tensor = checkpoint(self.block, hidden_BTD, self.is_later, is_causal=True, use_reentrant=False)
        return out_BTD


@dataclass(frozen=True)
class Figures:
    """Seconds of a step's passes and of its AdamW, and the most bytes of the device that torch gave out."""

    passes_s: float
    adamw_s: float
    device_bytes: int


class Training:
    """A model of equal layers, its optimizer, and inputs and targets that mean nothing."""

    def __init__(self, options: argparse.Namespace, mode: str):
        self._device, self._length, self._dim = options.device, options.length, options.dim
        mesh = init_device_mesh(self._device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=self._device == "cuda") if mode == "offloaded" else OffloadPolicy()
        self._model = nn.Sequential()
        for _ in range(options.layers):
            layer = Layer(self._dim, self._length, self._device)
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
            self._model.append(layer)
        fully_shard(self._model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        self._adamw = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=not options.plain_adamw)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def measure(self, microbatch_size: int, num_microbatches: int, num_steps: int) -> Figures:
        """The means of some steps, after one that is not counted."""
        hidden_BTD = torch.randn(microbatch_size, self._length, self._dim, device=self._device)
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        passes_s = adamw_s = 0.0
        for step in range(num_steps + 1):
            begin = self._now()
            for _ in range(num_microbatches):
                self._model(hidden_BTD).float().square().mean().backward()
            middle = self._now()
            self._adamw.step()
            self._adamw.zero_grad()
            if step:
                passes_s += (middle - begin) / num_steps
                adamw_s += (self._now() - middle) / num_steps
        return Figures(passes_s, adamw_s, torch.cuda.max_memory_allocated() if self._device == "cuda" else 0)

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()


def rows(options: argparse.Namespace, mode: str) -> Iterator[str]:
    """The table's rows of one mode."""
    training = Training(options, mode)
    for size, count in BATCHES:
        told = f"| {mode} | {size} | {count} |"
        try:
            found = training.measure(size, count, options.steps)
        except torch.OutOfMemoryError as error:
            yield f"{told} {str(error).partition('.')[0]} |"
            return
        tokens = size * count * options.length
        step_s = found.passes_s + found.adamw_s
        # Forward, forward again, and backward, which is twice as much; without attention, which is 2 % here.
        tflops = 8 * training.num_parameters * tokens / step_s / 1e12
        yield (
            f"{told} {tokens / step_s:.0f} | {tflops:.1f} | {found.passes_s:.3f} | {found.adamw_s:.3f} | "
            f"{found.device_bytes / 1e9:.1f} |"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", default=MODES, help=" or ".join(MODES))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=2, help="that are counted")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu shows that it runs, and no more")
    parser.add_argument("--plain-adamw", action="store_true", help="where torch has no fused one")
    options = parser.parse_args()
    backend = "nccl" if options.device == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]  # exported, but not in a way that mypy sees
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| weights | sequences | microbatches | tokens/s | TFLOP/s | passes, s | AdamW, s | allocated, GB |")
    print("|---|---|---|---|---|---|---|---|")
    for mode in options.modes:
        for row in rows(options, mode):
            print(row, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
