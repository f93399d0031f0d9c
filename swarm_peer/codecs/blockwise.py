"""The codec `blockwise_8bit`: bitsandbytes' dynamic 8-bit type, and an fp32 scale for every 256 numbers."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from swarm_peer.codecs.base import Codec, is_finite

# Values that share a scale. With 256, the relative L2 error is 0.02 even with outliers in the data.
BLOCK_SIZE = 256


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


@lru_cache(maxsize=16)
def _dynamic_map(device: torch.device) -> Tensor:
    """The 256 values of bitsandbytes' dynamic 8-bit type, which its encoder uses by default."""
    from bitsandbytes.functional import create_dynamic_map

    return torch.as_tensor(create_dynamic_map(), device=device)  # type: ignore[no-untyped-call]


BLOCKWISE_8BIT = Blockwise8Bit()
