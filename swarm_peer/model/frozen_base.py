"""A frozen base in fewer bits: how its matrices are kept, and how layers compute with them.

A matrix is quantised on the CPU, wherever it is used, so that all peers of a stage have the same one, bit by bit. Only
weights are quantised: activations and gradients are those of the run's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from swarm_peer.config import BasePrecision
from swarm_peer.model.parameters import replace_parameter
from swarm_peer.model.pretrained import ROW_STEP, StoredTensor, fill

# bitsandbytes' defaults, and so QLoRA's: values of a block that have one scale in common, and scales of a block.
NF4_BLOCK, SCALES_BLOCK = 64, 256
# Bytes of a value of a layer's matrix, scales included; beside these, int8 has a scale of fp32 for each row.
MATRIX_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "nf4": 0.5 + (1 + 4 / SCALES_BLOCK) / NF4_BLOCK}
# Embedding and head are not quantised: errors in them are dearest (QLoRA, LLM.int8() and transformers leave them out).
END_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 2.0, "nf4": 2.0}


class FrozenLinear(nn.Linear):
    """A matrix that is kept in fewer bits, and made whole where it is multiplied with; no gradient leads to it.

    Args:
        shape: outputs and inputs
        blocks: all rows in turn, some at a time, fp32, on the CPU; all but the last have a multiple of 64 rows
        bias: stays as it is
    """

    def __init__(
        self, shape: tuple[int, int], blocks: Iterable[Tensor], bias: nn.Parameter | None, precision: BasePrecision
    ):
        super().__init__(shape[1], shape[0], bias=False, device="meta")
        del self.weight
        self.register_parameter("bias", bias)
        self.has_no_values = False
        self._nf4: Any = None  # bitsandbytes' QuantState
        scales = None
        if precision == "bf16":
            kept = torch.empty(shape, dtype=torch.bfloat16)
            fill(kept, blocks)
        elif precision == "int8":
            kept, scales = _as_int8(shape, blocks)
        else:
            kept, self._nf4 = _as_nf4(shape, blocks)
        self.kept: Tensor
        self.register_buffer("kept", kept, persistent=False)
        self.scales: Tensor | None
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The whole matrix in fp32, for PEFT; one number in its place, of the same shape, while `has_no_values`."""
        if self.has_no_values:
            return torch.zeros((), device=self.kept.device).expand(self.out_features, self.in_features)
        return self.whole(torch.float32)

    @weight.deleter
    def weight(self) -> None:
        del self._parameters["weight"]

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, of a floating-point type."""
        if self._nf4 is not None:
            from bitsandbytes.functional import dequantize_4bit

            self._nf4.to(self.kept.device)
            self._nf4.dtype = dtype
            return dequantize_4bit(self.kept, self._nf4)
        if self.scales is not None:
            return (self.kept * (self.scales.unsqueeze(1) / 127)).to(dtype)
        return self.kept.to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """The product, of the input's type, or under autocast of autocast's."""
        product: Tensor = _FrozenProduct.apply(input, self)  # type: ignore[no-untyped-call]
        return product


class _FrozenProduct(torch.autograd.Function):
    """A product whose backward pass makes the matrix whole once more, instead of keeping it all the while."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, input.dtype
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        return functional.linear(input, layer.whole(dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient @ ctx.layer.whole(gradient.dtype)).to(ctx.dtype), None


@contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """While the context is open, frozen matrices show PEFT their type, device and shape alone: none is made whole."""
    layers = [layer for layer in module.modules() if isinstance(layer, FrozenLinear)]
    for layer in layers:
        layer.has_no_values = True
    try:
        yield
    finally:
        for layer in layers:
            layer.has_no_values = False


def _as_int8(shape: tuple[int, int], blocks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bit, and the scale of each row."""
    from bitsandbytes.functional import int8_vectorwise_quant  # takes seconds to import

    kept, scales = torch.empty(shape, dtype=torch.int8), torch.empty(shape[0])
    start = 0
    for block in blocks:
        rows = slice(start, start := start + len(block))
        kept[rows], scales[rows], _ = int8_vectorwise_quant(block.half())
    return kept, scales


def _as_nf4(shape: tuple[int, int], blocks: Iterable[Tensor]) -> tuple[Tensor, Any]:
    """A matrix in 4 bit, and its state: the same that quantize_4bit makes of a whole one, for which it takes 16 bytes
    more for each value meanwhile.
    """
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    kept, largest, start, state = torch.empty(((shape[0] * shape[1] + 1) // 2, 1), dtype=torch.uint8), [], 0, None
    for block in blocks:
        part, state = quantize_4bit(block, blocksize=NF4_BLOCK, quant_type="nf4")
        kept[start : start + len(part)] = part
        largest.append(state.absmax)
        start += len(part)
    assert state is not None, "a matrix has rows"
    absmax = torch.cat(largest)
    offset = absmax.mean()  # of all blocks, as the scales of the scales are
    quantised, outer = quantize_blockwise(absmax - offset, blocksize=SCALES_BLOCK)
    return kept, QuantState(  # type: ignore[no-untyped-call]
        absmax=quantised,
        shape=torch.Size(shape),
        code=state.code,
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=torch.float32,
        offset=offset,
        state2=outer,
    )


def keeper(precision: BasePrecision, layers: str) -> Callable[[nn.Module, str, StoredTensor], None] | None:
    """How a stage keeps the values of one of its frozen parameters, as they are read; None for as they are, in fp32.

    Vectors (biases, normalisations) stay fp32.

    Args:
        layers: name of the layers' list within the stage; matrices elsewhere are at most halved
    """

    def keep(module: nn.Module, name: str, stored: StoredTensor) -> None:
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        if key == "weight" and isinstance(owner, (nn.Linear, Conv1D)):
            (inputs, outputs), blocks = (stored.shape[1], stored.shape[0]), stored.blocks()
            if isinstance(owner, Conv1D):  # which has inputs first
                inputs, outputs, blocks = (
                    outputs,
                    inputs,
                    iter(torch.split(stored.whole().T.contiguous(), 16 * ROW_STEP)),
                )
            in_layers = f".{layers}." in f".{path}"
            frozen = FrozenLinear((outputs, inputs), blocks, owner.bias, precision if in_layers else "bf16")
            module.set_submodule(path, frozen)
        elif isinstance(owner, nn.Embedding):
            values = torch.empty(stored.shape, dtype=torch.bfloat16)
            fill(values, stored.blocks())
            replace_parameter(module, name, values)
            owner.register_forward_hook(_as_fp32)
        else:
            replace_parameter(module, name, stored.whole())

    return None if precision == "fp32" else keep


def _as_fp32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.float()
