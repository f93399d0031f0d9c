"""A frozen base in fewer bits: how its matrices are kept, and how layers compute with them.

A matrix is quantised on the CPU, wherever it is used, so that all peers of a stage have the same one, bit by bit. Only
weights are quantised: activations and gradients are those of the run's precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from swarm_peer.config import BasePrecision
from swarm_peer.model.parameters import replace_parameter

# bitsandbytes' defaults, and so QLoRA's: values of a block that have one scale in common, and scales of a block.
NF4_BLOCK, SCALES_BLOCK = 64, 256
# Bytes of a value of a layer's matrix, scales included; beside these, int8 has a scale of fp32 for each row.
MATRIX_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "nf4": 0.5 + (1 + 4 / SCALES_BLOCK) / NF4_BLOCK}
# Embedding and head are not quantised: errors in them are dearest (QLoRA, LLM.int8() and transformers leave them out).
END_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 2.0, "nf4": 2.0}


class FrozenLinear(nn.Linear):
    """A matrix that is kept in fewer bits, and made whole where it is multiplied with; no gradient leads to it.

    Args:
        weight: (outputs, inputs), fp32, on the CPU
        bias: stays as it is
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, precision: BasePrecision):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        del self.weight
        self.register_parameter("bias", bias)
        self._nf4: Any = None  # bitsandbytes' QuantState
        scales = None
        if precision == "bf16":
            kept = weight.bfloat16()
        elif precision == "int8":
            from bitsandbytes.functional import int8_vectorwise_quant  # takes seconds to import

            kept, scales, _ = int8_vectorwise_quant(weight.half())
        else:
            from bitsandbytes.functional import quantize_4bit

            kept, self._nf4 = quantize_4bit(weight, blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4")
        self.kept: Tensor
        self.register_buffer("kept", kept, persistent=False)
        self.scales: Tensor | None
        self.register_buffer("scales", scales, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The whole matrix in fp32, for PEFT."""
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


def keeper(precision: BasePrecision, layers: str) -> Callable[[nn.Module, str, Tensor], None]:
    """How a stage keeps the values of one of its frozen parameters, once they are read.

    Vectors (biases, normalisations) stay fp32.

    Args:
        layers: name of the layers' list within the stage; matrices elsewhere are at most halved
    """

    def keep(module: nn.Module, name: str, values: Tensor) -> None:
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)
        if key == "weight" and isinstance(owner, (nn.Linear, Conv1D)):
            whole = values.T.contiguous() if isinstance(owner, Conv1D) else values
            in_layers = f".{layers}." in f".{path}"
            frozen = FrozenLinear(whole, owner.bias, precision if in_layers else "bf16")
            module.set_submodule(path, frozen)
        elif isinstance(owner, nn.Embedding):
            replace_parameter(module, name, values.bfloat16())
            owner.register_forward_hook(_as_fp32)
        else:
            replace_parameter(module, name, values)

    return replace_parameter if precision == "fp32" else keep


def _as_fp32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.float()
