"""The codec `blockwise_8bit`: bitsandbytes' dynamic 8-bit type, and an fp32 scale for every 256 numbers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarm_peer.codecs.base import Codec, is_finite

# Values that share a scale. With 256, the relative L2 error is 0.02 even with outliers in the data.
BLOCK_SIZE = 256
_SMALLEST = 2.0**-120


class Blockwise8Bit(Codec):
    """The scales of all blocks, then a byte for each number.

    bitsandbytes takes a second to import, and few runs need it.
    """

    name = "blockwise_8bit"

    def num_bytes(self, num_values: int) -> int:
        """One for each number, four for each block."""
        return num_values + 4 * -(-num_values // BLOCK_SIZE)

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Round to nearest, whatever the seed."""
        if not tensor.is_cuda:
            return _encode_on_cpu(tensor.float().reshape(-1))
        from bitsandbytes.functional import quantize_blockwise

        # Check first: a NaN does not show in the largest absolute value of its block.
        if not is_finite(tensor):
            raise OverflowError("the values are not finite")
        quantized, state = quantize_blockwise(tensor.float().contiguous(), blocksize=BLOCK_SIZE)
        return torch.cat([state.absmax.float().view(torch.uint8), quantized.view(-1)]).cpu()

    def decode(self, raw: Tensor, num_values: int) -> Tensor:
        """Only scales that are not finite make numbers that are not."""
        from bitsandbytes.functional import dequantize_blockwise

        start = raw.numel() - num_values
        decoded: Tensor = dequantize_blockwise(
            raw[start:].clone(),
            absmax=raw[:start].clone().view(torch.float32),
            code=_dynamic_map(raw.device),
            blocksize=BLOCK_SIZE,
        )
        return decoded.float()


def _encode_on_cpu(flat: Tensor) -> Tensor:
    """Look codes up by the numbers' fp16: seven times as fast as bitsandbytes, which searches for each of them.

    A code is another than the nearest one where fp16 cannot tell: for 1 of 200 numbers, each as far from both.
    """
    missing = -len(flat) % BLOCK_SIZE
    blocks = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK_SIZE)
    lowest, highest = torch.amin(blocks, 1), torch.amax(blocks, 1)
    absmax = torch.maximum(-lowest, highest)
    if not is_finite(absmax):
        raise OverflowError("the values are not finite")
    # Blocks of smaller numbers become zeros: the inverse of what they are divided by is finite.
    inverse = torch.where(absmax < _SMALLEST, 0.0, 1.0 / absmax)
    halves = (blocks * inverse[:, None]).half().view(torch.int16).view(-1)[: len(flat)]
    codes = torch.from_numpy(_codes_of_halves().take(halves.numpy().view(np.uint16)))
    return torch.cat([absmax.view(torch.uint8), codes])


@lru_cache(maxsize=1)
def _codes_of_halves() -> npt.NDArray[np.uint8]:
    """The code of each fp16 from -1 to 1, by its 16 bits; those of others are of no meaning."""
    codes = _dynamic_map(torch.device("cpu"))
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    return torch.bucketize(halves.nan_to_num(0.0), (codes[1:] + codes[:-1]) / 2).to(torch.uint8).numpy()


@lru_cache(maxsize=16)
def _dynamic_map(device: torch.device) -> Tensor:
    """The 256 values of bitsandbytes' dynamic 8-bit type, which its encoder uses by default."""
    from bitsandbytes.functional import create_dynamic_map

    return torch.as_tensor(create_dynamic_map(), device=device)  # type: ignore[no-untyped-call]


BLOCKWISE_8BIT = Blockwise8Bit()
