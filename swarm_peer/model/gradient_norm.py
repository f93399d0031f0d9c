"""How large hidden states and gradients may be that travel between layers and stages, so that nobody overflows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarm_peer.errors import InvalidMessage

# The largest norm of a gradient between stages (1e15), for each sample and without the loss scale. Most are below 10;
# 1e8 was seen where hidden states are zeros and one RMS norm follows the other, each of which makes a thousandfold of
# it. The sum that a stage makes of such gradients in a round is still far from where fp32 ends (3e38), where it would
# have to skip its update.
MAX_GRADIENT_NORM = 2.0**50
# In fp16, a backward pass was seen to overflow between 100 and 1000.
MAX_FP16_GRADIENT_NORM = 2.0**6
# The largest value of a gradient between two layers, with the loss scale. A layer may make a millionfold of it, where
# hidden states are zeros.
MAX_LAYER_GRADIENT = 2.0**58
MAX_FP16_LAYER_GRADIENT = 2.0**13
# The largest value of a hidden state that is accepted, and that is sent: codecs round, and an honest peer must not be
# refused for that. With 1e38, the backward pass of an RMS norm makes NaNs; trained models have some ten thousand.
MAX_HIDDEN = 2.0**40
MAX_SENT_HIDDEN = 2.0**36
# On a CPU torch adds up the squares of a tensor one after the other: of 40 million random values its fp32 norm is 0.3 %
# too small, of 260 million equal ones 13 %. Of so few it is right to the seventh digit, and takes no longer.
_SLICE = 2**10
# Codecs round, so a gradient may arrive larger than it was sent. int4_hadamard makes the most of a gradient that has
# nothing but one block, of which, transformed, one number is 8 steps and all others just over half a step: 1.27.
ROUNDING = 1.3


def max_gradient_norm(precision: str) -> float:
    """The largest norm of a gradient between stages, for each sample and without the loss scale."""
    return MAX_FP16_GRADIENT_NORM if precision == "fp16" else MAX_GRADIENT_NORM


def limit_layer_gradient(gradient: Tensor, precision: str) -> Tensor:
    """The gradient of what a layer has computed, with no value beyond what the layers before it can take.

    One that is within that stays the same, bit by bit; and a GPU does not wait for the CPU to look.
    """
    largest = MAX_FP16_LAYER_GRADIENT if precision == "fp16" else MAX_LAYER_GRADIENT
    return gradient.clamp(-largest, largest)


def check_hidden(hidden_BTD: Tensor, most: float) -> None:
    """Hidden states of which no value is beyond `most`. That they are numbers is for the wire to check.

    Raises:
        InvalidMessage: one is
    """
    largest = float(hidden_BTD.abs().max())
    if largest > most:
        raise InvalidMessage(f"hidden states go up to {largest:.3g}; at most {most:.3g} is allowed")


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all values, fp32; also where their squares are beyond fp32."""
    norm = _norm_within_fp32(tensors)
    if not bool(norm.isfinite()):
        largest = torch.stack([tensor.abs().max() for tensor in tensors]).max()
        norm = largest * _norm_within_fp32([tensor / largest for tensor in tensors])
    return norm


def _norm_within_fp32(tensors: Sequence[Tensor]) -> Tensor:
    norms = [norm for tensor in tensors for norm in _norms_of_slices(tensor.reshape(-1))]
    return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64).float() if norms else torch.zeros(())


def _norms_of_slices(flat: Tensor) -> Iterator[Tensor]:
    whole = len(flat) // _SLICE * _SLICE
    if whole:
        yield torch.linalg.vector_norm(flat[:whole].view(-1, _SLICE), dim=1)
    if whole < len(flat):
        yield torch.linalg.vector_norm(flat[whole:]).view(1)


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
