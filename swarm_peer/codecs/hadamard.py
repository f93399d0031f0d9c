"""The codecs `int4_hadamard` and `int5_hadamard`: 4 or 5 bits a number, and a scale for every 64 of them.

That is 0.53 or 0.66 bytes a number.

Each block of 64 numbers is multiplied by an orthogonal matrix: random signs, which are always the same, and a Hadamard
transform. An outlier's weight is then shared by the whole block, whose numbers look normally distributed. They become
whole multiples, -8 to 7 (5 bits: -16 to 15), of the block's step. The sign of a step is that with which all of the
block fits at the smallest step: of a block from -2 to 1 it is positive, of one from -1 to 2 negative, and for both it
is 0.25.

The step follows the block's largest number. Relative L2 error of a round trip for 20,000 blocks, by the way to choose
the step (normal, Laplace, Student's t of 3 degrees, and normal with each block's fifth number 50 times as large):

    rounded to nearest, 15 levels -7..7, step = largest / 7          0.108  0.106  0.098  0.053
    16 levels without a zero, step = largest / 7.5                   0.101  0.099  0.092  0.050
    the same, step = 0.3352 x RMS, the best for a normal law         0.105  0.103  0.102  0.108
    -8..7 with a sign, nothing clipped                               0.096  0.095  0.088  0.051
    -8..7 with a sign, step x 0.95: what is used                     0.093  0.091  0.085  0.049
    the best of seven steps for each block                           0.091  0.089  0.083  0.047
    stochastically, -8..7 with a sign, nothing clipped: what is used 0.136  0.134  0.125  0.072
    (-8..7 with a sign, nearest, without the transform               0.096  0.125  0.159  0.128)
    5 bits, nearest, -16..15 with a sign, step x 0.98: what is used  0.047  0.046  0.044  0.024
    5 bits, stochastically, nothing clipped: what is used            0.067  0.066  0.062  0.034
    (blockwise_8bit                                                  0.011  0.013  0.015  0.009)

So a clip by the error's optimum wins nothing over the largest number: among 64 that is 2.6 standard deviations, which
is where the optimum for 16 levels lies. A block's own optimum, at the price of seven tries, wins another 3 %. Rounded
stochastically nothing may be clipped, or the mean of many roundings would not be the number.

The step is a bf16 rather than an fp16: gradients may be as small as they like without a loss scale, and a step that is
at most 0.8 % too large costs next to nothing. Rotated numbers are stored by their place in the block, so that no
operation runs along 64 numbers: the steps of all B blocks, then 32 rows of B bytes, each byte with the lower 4 bits of
the numbers of places i (low) and i + 32 (high); then for 5 bits 8 rows of B bytes, each with the fifth bit, the sign,
of places i, i + 8 and so on, the lowest first. The last block is filled up with zeros.

Decoding is exact: sums of 64 numbers from -16 to 15, whatever their order, times a bf16, need 19 bits of fp32's 24. So
all members of an averaging round read bitwise the same average, on whatever processors they run.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from swarm_peer.codecs.base import Codec

# Values that share a transform and a scale of two bytes.
BLOCK_SIZE = 64
_HALF, _EIGHTH = BLOCK_SIZE // 2, BLOCK_SIZE // 8
# Blocks that are worked on at a time: 1 MB of fp32, which stays in a core's cache.
_PIECE = 4096
# Rounded to nearest, numbers next to the largest one may be clipped a little, for finer steps; see above. By bits.
_NEAREST_STEP = {4: 0.95, 5: 0.98}
# Makes the transform and its inverse orthogonal.
_NORM = BLOCK_SIZE**-0.5
# Larger numbers are clipped: sums of 64 of them still are finite in fp32.
_LARGEST = 2.0**120
# Blocks of smaller steps become zeros: the inverse of a step is finite.
_SMALLEST_STEP = 2.0**-120
# The signs before the transform: the first 64 bits of pi's fraction.
_SIGNS = 0x243F6A8885A308D3


class Hadamard(Codec):
    """Transforms blocks, and rounds what that makes of them to whole multiples of a step."""

    def __init__(self, bits: int):
        """Make a codec of 4 or 5 bits a number."""
        self.name = f"int{bits}_hadamard"
        self._bits = bits

    def num_bytes(self, num_values: int) -> int:
        """Those of whole blocks, each with its step."""
        return (self._bits * _EIGHTH + 2) * -(-num_values // BLOCK_SIZE)

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Round stochastically if there is a seed; the random numbers are the same on all devices."""
        return _encode(tensor, self._bits, seed)

    def decode(self, raw: Tensor, num_values: int) -> Tensor:
        """Only steps that are not finite make numbers that are not."""
        return _decode(raw, self._bits, num_values)


INT4_HADAMARD = Hadamard(4)
INT5_HADAMARD = Hadamard(5)


def _encode(tensor: Tensor, bits: int, seed: int | None) -> Tensor:
    flat = tensor.reshape(-1)
    if not len(flat):
        return torch.empty(0, dtype=torch.uint8)
    lowest, highest = (float(bound) for bound in torch.aminmax(flat))
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        raise OverflowError("the values are not finite")
    if max(-lowest, highest) > _LARGEST:
        flat = flat.clamp(-_LARGEST, _LARGEST)
    num_blocks = -(-len(flat) // BLOCK_SIZE)
    encoded = torch.empty(num_blocks * (2 + bits * _EIGHTH), dtype=torch.uint8, device=tensor.device)
    steps, codes = encoded[: 2 * num_blocks].view(torch.bfloat16), encoded[2 * num_blocks :].view(-1, num_blocks)
    random = None if seed is None else np.random.SFC64(seed)
    factor = _NORM * (_NEAREST_STEP[bits] if random is None else 1.0)
    largest = 1 << bits - 1
    for begin in range(0, num_blocks, _PIECE):
        piece = flat[begin * BLOCK_SIZE : (begin + _PIECE) * BLOCK_SIZE].float()
        missing = -len(piece) % BLOCK_SIZE
        blocks = torch.nn.functional.pad(piece, (0, missing)) if missing else piece
        rotated = torch.mm(_rotation(tensor.device).T, blocks.view(-1, BLOCK_SIZE).T)
        step = _steps(rotated, largest, factor)
        end = begin + len(step)
        steps[begin:end] = step
        rotated *= torch.where(step == 0, 0.0, _NORM / step.float())
        _round(rotated, random)
        whole = rotated.clamp_(-largest, largest - 1).to(torch.int8).view(torch.uint8)
        codes[:_HALF, begin:end] = (whole[:_HALF] & 15) | (whole[_HALF:] << 4)
        if bits == 5:
            signs = (whole >> 7).view(8, _EIGHTH, -1) << _places(tensor.device)
            codes[_HALF:, begin:end] = signs.sum(0, dtype=torch.uint8)
    return encoded.cpu()


def _decode(raw: Tensor, bits: int, num_values: int) -> Tensor:
    num_blocks = -(-num_values // BLOCK_SIZE)
    steps = raw[: 2 * num_blocks].clone().view(torch.bfloat16).float()
    codes = raw[2 * num_blocks :].view(-1, num_blocks)
    values = torch.empty(num_blocks, BLOCK_SIZE, device=raw.device)
    for begin in range(0, num_blocks, _PIECE):
        whole = _unpack(codes[:, begin : begin + _PIECE], bits)
        blocks = values[begin : begin + _PIECE]
        # The step comes last, so that the sums are exact.
        torch.mm(whole.T, _rotation(raw.device).T, out=blocks)
        blocks *= steps[begin : begin + _PIECE, None] * _NORM
    return values.view(-1)[:num_values]


def _unpack(codes: Tensor, bits: int) -> Tensor:
    """The whole numbers (64, B) in fp32 of the codes of B blocks, which are uint8."""
    whole = torch.empty(BLOCK_SIZE, codes.shape[1], device=codes.device)
    low = codes[:_HALF]
    if bits == 4:
        low = low.view(torch.int8)
        whole[:_HALF] = (low << 4) >> 4  # the shift to the right repeats the sign
        whole[_HALF:] = low >> 4
        return whole
    whole[:_HALF] = low & 15
    whole[_HALF:] = low >> 4
    signs = (codes[_HALF:] >> _places(codes.device)) & 1
    return whole.sub_(signs.view(BLOCK_SIZE, -1), alpha=16)


def _steps(rotated: Tensor, largest: int, factor: float) -> Tensor:
    """The step of each block (64, B), bf16: the smaller one of the two signs' that clip nothing, times a factor.

    Args:
        largest: whole numbers go from its negative to the one before it
    """
    lowest, highest = torch.amin(rotated, 0), torch.amax(rotated, 0)  # ten times as fast as aminmax along an axis
    positive = torch.maximum(lowest / -largest, highest / (largest - 1))
    negative = torch.maximum(highest / largest, lowest / -(largest - 1))
    exact = torch.where(positive <= negative, positive, -negative) * factor
    exact = torch.where(exact.abs() < _SMALLEST_STEP, 0.0, exact)
    # Away from zero, so that nothing is clipped: the upper half of an fp32's bits, one more where the lower is not 0.
    return ((exact.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _round(values: Tensor, random: np.random.SFC64 | None) -> None:
    """Round to whole numbers in place, with 16 random bits for each number if there are any."""
    if random is None:
        values.round_()
        return
    drawn = random.random_raw(values.numel() // 4).view(np.int16).reshape(tuple(values.shape))
    # As uniform as 16 bits can be, in (0, 1).
    values.add_(torch.from_numpy(drawn).to(values.device), alpha=2.0**-16).add_(0.5 + 2.0**-17).floor_()


@lru_cache(maxsize=16)
def _places(device: torch.device) -> Tensor:
    """The places of 8 bits in a byte, to shift the rows (8, 8, B) of a byte's bits by."""
    return torch.arange(8, dtype=torch.uint8, device=device).view(8, 1, 1)


@lru_cache(maxsize=16)
def _rotation(device: torch.device) -> Tensor:
    """The matrix (64, 64) of 1 and -1 by which blocks, as rows, are multiplied. Its rows are orthogonal."""
    hadamard = torch.ones(1, 1)
    while len(hadamard) < BLOCK_SIZE:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.tensor([1.0 - 2.0 * (_SIGNS >> place & 1) for place in range(BLOCK_SIZE)])
    rotation: Tensor = signs[:, None] * hadamard
    return rotation.to(device)
