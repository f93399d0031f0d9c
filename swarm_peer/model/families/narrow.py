"""Layers that write only some values of the residual stream, so that the others stay as the embedding has made them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D


def narrow_writes(layer: nn.Module, writes: Sequence[str], width: int) -> None:
    """Have products of a layer write only the first `width` values; for the others their results are zeros.

    Args:
        writes: their names within the layer
    """
    for name in writes:
        owner, _, key = name.rpartition(".")
        layer.get_submodule(owner).add_module(key, _narrowed(layer.get_submodule(name), width))


def _narrowed(product: nn.Module, width: int) -> nn.Module:
    narrow: nn.Module
    if isinstance(product, Conv1D):
        num_left, narrow = product.nf - width, Conv1D(width, product.nx)
    else:
        assert isinstance(product, nn.Linear), "layers write by products"
        num_left = product.out_features - width
        narrow = nn.Linear(product.in_features, width, bias=product.bias is not None)
    narrow.register_forward_hook(partial(_pad, num_left=num_left))
    return narrow


def _pad(_module: nn.Module, _inputs: Any, written: Tensor, *, num_left: int) -> Tensor:
    return functional.pad(written, (0, num_left))
