"""Norms of gradients: how large one may be that travels between stages, so that nobody makes others overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_peer.errors import InvalidMessage

# The largest norm of a gradient between stages (1e15), for each sample and without the loss scale. Most are below 10;
# 1e8 was seen where hidden states are zeros and one RMS norm follows the other, each of which makes a thousandfold of
# it. The sum that a stage makes of such gradients in a round is still far from where fp32 ends (3e38), where it would
# have to skip its update.
MAX_GRADIENT_NORM = 2.0**50
# Codecs round, so a gradient may arrive larger than it was sent. int4_hadamard makes the most of a gradient that has
# nothing but one block, of which, transformed, one number is 8 steps and all others just over half a step: 1.27.
ROUNDING = 1.3


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all values, fp32; also where their squares are beyond fp32."""
    norm: Tensor = torch.nn.utils.get_total_norm(tensors)
    if not bool(norm.isfinite()):
        largest = torch.stack([tensor.abs().max() for tensor in tensors]).max()
        norm = largest * torch.nn.utils.get_total_norm([tensor / largest for tensor in tensors])
    return norm


def check_norm(gradient: Tensor, largest: float) -> None:
    """A gradient whose norm is at most `largest`, but for a codec's rounding.

    Raises:
        InvalidMessage: it is larger, or not finite
    """
    norm = float(total_norm([gradient]))
    if not norm <= ROUNDING * largest:
        raise InvalidMessage(f"gradient has norm {norm:.3g}; at most {largest:.3g} is allowed")


def limit_norm(gradient: Tensor, largest: float) -> Tensor:
    """A gradient, scaled down to norm `largest` if it is larger. One that is not finite stays as it is."""
    norm = total_norm([gradient])
    return gradient * (largest / norm) if largest < norm < torch.inf else gradient
