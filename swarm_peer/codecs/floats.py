"""The codecs `none` (fp32, bitwise), `fp16` and `bf16`: numbers of another float type."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_peer.codecs.base import Codec, is_finite

# Gradients of a mean over T tokens are small, and fp16 ends at 6e-8: in fp16 they travel and accumulate this much
# larger. A larger one would leave too little below fp16's end at 65504.
FP16_SCALE = 2.0**10


class Floats(Codec):
    """Casts to a float type. Larger numbers than it has are clipped: fp16 ends at 65504."""

    def __init__(self, name: str, dtype: torch.dtype, scale: float = 1.0):
        """Cast to `dtype`."""
        self.name = name
        self.is_exact = dtype == torch.float32
        self.scale = scale
        self._dtype = dtype

    def num_bytes(self, num_values: int) -> int:
        """Those of the type."""
        return self._dtype.itemsize * num_values

    def encode(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """Round to nearest, whatever the seed."""
        encoded = tensor.to(self._dtype)
        if not is_finite(encoded):
            if not is_finite(tensor):
                raise OverflowError("the values are not finite")
            range_of = torch.finfo(self._dtype)
            encoded = tensor.clamp(range_of.min, range_of.max).to(self._dtype)
        return encoded.contiguous().cpu().view(-1).view(torch.uint8)

    def decode(self, raw: Tensor, num_values: int) -> Tensor:
        """Numbers that share the memory of the bytes, if they are fp32."""
        return raw.view(self._dtype).float()


FP32 = Floats("none", torch.float32)
FP16 = Floats("fp16", torch.float16, FP16_SCALE)
BF16 = Floats("bf16", torch.bfloat16)
