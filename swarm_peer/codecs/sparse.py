"""The codec `topk_2bit`: of each chunk of 4,096 numbers the largest 256, in 2 bits, and where they are, in 12.

That is 452 bytes a chunk, 1/36 of fp32. A member has to add what it leaves out to what it encodes next.

A number that is kept becomes one of four: plus or minus the larger or the smaller of its chunk's two levels. The larger
level is the mean of those magnitudes that reach the mean of all that are kept, the smaller one that of the others.

The bytes, for C chunks: 2 bf16 levels of each, the smaller one first; 64 bytes of codes of each, 4 to a byte, the first
one lowest, with the sign as the upper bit; 384 bytes of places of each, two to 3 bytes, the lower bits first. Decoding
is exact, so all members of an averaging round read bitwise the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_peer.codecs.base import Codec, is_finite

# Values of which the largest are kept; 12 bits say which one.
CHUNK_SIZE = 4096
# So many of them; a multiple of 4.
KEPT = 256


class TopK2Bit(Codec):
    """Keeps the largest numbers of each chunk, roughly."""

    name = "topk_2bit"

    def __init__(self, kept: int = KEPT):
        """Keep so many numbers of each chunk."""
        self._kept = kept

    def num_bytes(self, num_values: int) -> int:
        """Those of whole chunks."""
        return (4 + self._kept // 4 + 3 * self._kept // 2) * -(-num_values // CHUNK_SIZE)

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Keep the largest numbers, whatever the seed."""
        flat = tensor.reshape(-1).float()
        missing = -len(flat) % CHUNK_SIZE
        chunks = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, CHUNK_SIZE)
        _, places = torch.topk(chunks.abs(), self._kept, sorted=False)
        kept = chunks.gather(1, places)
        # An infinity or a NaN is larger than all numbers.
        if not is_finite(kept):
            raise OverflowError("the values are not finite")
        sizes = kept.abs()
        is_large = sizes >= sizes.mean(1, keepdim=True)
        num_large = is_large.sum(1)
        large = (sizes * is_large).sum(1)
        small = (sizes.sum(1) - large).clamp_(min=0.0) / (self._kept - num_large).clamp_(min=1)
        levels = torch.stack([small, large / num_large.clamp_(min=1)], 1).bfloat16()
        codes = (is_large.to(torch.uint8) | (kept < 0).to(torch.uint8) << 1).view(len(chunks), -1, 4)
        places = places.to(torch.int32)
        low, high = places[:, 0::2], places[:, 1::2]
        packed = torch.stack([low & 255, low >> 8 | (high & 15) << 4, high >> 4], 2).to(torch.uint8)
        shifted = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
        parts = levels.view(torch.uint8), shifted, packed
        return torch.cat([part.reshape(-1) for part in parts]).cpu()

    def decode(self, raw: Tensor, num_values: int) -> Tensor:
        """Only levels that are not finite make numbers that are not."""
        num_chunks = -(-num_values // CHUNK_SIZE)
        sizes = [4 * num_chunks, self._kept // 4 * num_chunks, 3 * self._kept // 2 * num_chunks]
        levels, codes, packed = (part.view(num_chunks, -1) for part in torch.split(raw, sizes))
        levels = levels.clone().view(torch.bfloat16).float()
        codes = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(num_chunks, -1)
        kept = torch.where((codes & 1).bool(), levels[:, 1:], levels[:, :1])
        kept = torch.where(codes > 1, -kept, kept)
        first, middle, last = packed.view(num_chunks, -1, 3).long().unbind(2)
        places = torch.stack([first | (middle & 15) << 8, middle >> 4 | last << 4], 2).view(num_chunks, -1)
        chunks = torch.zeros(num_chunks, CHUNK_SIZE, device=raw.device)
        return chunks.scatter_(1, places, kept).view(-1)[:num_values]


TOPK_2BIT = TopK2Bit()
