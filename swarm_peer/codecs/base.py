"""The class that each codec derives from, and a check that some of them need."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Codec(ABC):
    """Makes bytes of tensors, and fp32 numbers of these bytes. Stateless: any thread may use it.

    Attributes:
        name: as a manifest has it
        is_exact: fp32 numbers come back bit by bit, so that whoever has the tensor need not decode it
        scale: gradients and their means, which are small, are multiplied by it before they are encoded, and divided by
            it after they are decoded. A power of two, which changes no digits; 1 where the codec's range needs none
    """

    name: str
    is_exact: bool = False
    scale: float = 1.0

    @abstractmethod
    def num_bytes(self, num_values: int) -> int:
        """The size of so many encoded values. A message of any other length is refused."""

    @abstractmethod
    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Encode a tensor of any float type, layout and device to bytes (uint8) on the CPU.

        Values beyond the codec's range are clipped to it, so that a rare outlier costs no microbatch.

        Args:
            seed: of the codec's stochastic rounding, if it rounds so, without a bias; None rounds to nearest

        Raises:
            OverflowError: the values are not finite
        """

    @abstractmethod
    def decode(self, raw: Tensor, num_values: int) -> Tensor:
        """Decode bytes (uint8) of the right length, one value at least, to fp32 in one dimension, on their device.

        Whatever the bytes are, it returns numbers, which need not be finite: its caller checks that.
        """


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite: several times as fast as to ask for each of them."""
    return not tensor.numel() or all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def is_within(tensor: Tensor, largest: float) -> bool:
    """Whether all numbers are finite, and none is larger than `largest`, or smaller than its negative."""
    return not tensor.numel() or all(abs(float(bound)) <= largest for bound in torch.aminmax(tensor))
