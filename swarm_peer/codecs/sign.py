"""The codec `sign`: a bit for each number, and a bf16 for every 256 of them, the mean of their magnitudes.

That is 1/30 of fp32. A member has to add what it rounds away to what it encodes next.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swarm_peer.codecs.base import Codec, is_finite

# Values that share a magnitude.
BLOCK_SIZE = 256


class SignBits(Codec):
    """The magnitudes of all blocks, then the signs, the first one lowest; a set bit is a number below zero."""

    name = "sign"

    def num_bytes(self, num_values: int) -> int:
        """Those of whole blocks."""
        return (2 + BLOCK_SIZE // 8) * -(-num_values // BLOCK_SIZE)

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Round to the magnitude of the block, whatever the seed."""
        flat = tensor.reshape(-1).float().cpu()
        missing = -len(flat) % BLOCK_SIZE
        blocks = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK_SIZE)
        sizes = blocks.abs().mean(1)
        if not is_finite(sizes):
            raise OverflowError("the values are not finite")
        signs = np.packbits((blocks < 0).numpy(), bitorder="little")
        return torch.cat([sizes.bfloat16().view(torch.uint8), torch.from_numpy(signs)])

    def decode(self, raw: Tensor, num_values: int) -> Tensor:
        """Only magnitudes that are not finite make numbers that are not."""
        num_blocks = -(-num_values // BLOCK_SIZE)
        sizes = raw[: 2 * num_blocks].clone().view(torch.bfloat16).float()
        signs = np.unpackbits(raw[2 * num_blocks :].cpu().numpy(), bitorder="little")
        factors = torch.from_numpy(signs).to(raw.device).view(num_blocks, BLOCK_SIZE).float().mul_(-2.0).add_(1.0)
        return factors.mul_(sizes[:, None]).view(-1)[:num_values]


SIGN = SignBits()
