"""Tensors as bytes: activations and their gradients on their way between stages.

The device thread encodes a tensor, right where the tensor is. A decoded tensor is checked for its size and for finite
numbers before anybody computes with it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from swarm_peer.config import CODEC_BLOCK_SIZE, Codec, codec_bytes
from swarm_peer.errors import InvalidMessage
from swarm_peer.wire.hadamard import decode_hadamard, encode_hadamard

# Of the codecs that transform blocks of numbers; see hadamard.py.
_BITS: dict[Codec, int] = {"int4_hadamard": 4, "int5_hadamard": 5}
_DTYPE: dict[Codec, torch.dtype] = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def encoded_bytes(shape: Sequence[int], codec: Codec) -> int:
    """The length of an encoded tensor, in bytes. A message of any other length is refused."""
    return codec_bytes(math.prod(shape), codec)


def rounding_seed(*names: bytes | int | str) -> int:
    """The seed of one tensor's stochastic rounding: two peers that use the same names round alike.

    A gradient goes by its microbatch's id and the stage that sends it, so that a further try, and the reference process
    that is told the ids, send the same bytes.
    """
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "big")


def encode(tensor: torch.Tensor, codec: Codec, seed: int | None = None) -> memoryview:
    """Encode a tensor of any float type and device. Lossy for all codecs but `none` (fp32, bitwise).

    Values beyond the codec's range (fp16 ends at 65504) are clipped to it, so that a rare outlier costs no microbatch.

    Args:
        seed: rounding_seed of a gradient, which int4_hadamard and int5_hadamard round stochastically with it, without
            a bias; None for activations, which are rounded to nearest. Other codecs always do that.

    Raises:
        OverflowError: the values are not finite
    """
    tensor = tensor.detach()
    if codec == "blockwise_8bit":
        return _encode_8bit(tensor)
    if codec in _BITS:
        return bytes_of(encode_hadamard(tensor, _BITS[codec], seed))
    encoded = tensor.to(_DTYPE[codec])
    if not _is_finite(encoded):
        if not _is_finite(tensor):
            raise OverflowError("the values are not finite")
        range_of = torch.finfo(_DTYPE[codec])
        encoded = tensor.clamp(range_of.min, range_of.max).to(_DTYPE[codec])
    return bytes_of(encoded.contiguous().cpu())


def decode(data: memoryview, shape: Sequence[int], codec: Codec, device: torch.device | str = "cpu") -> torch.Tensor:
    """Decode to an fp32 tensor on a device, where the work is done.

    A CPU tensor may share memory with `data`; torch needs `data` to be writable.

    Raises:
        InvalidMessage: the length is wrong for the shape, or a number is not finite
    """
    expected = encoded_bytes(shape, codec)
    if len(data) != expected:
        raise InvalidMessage(f"tensor of {len(data)} bytes; {expected} are right for shape {tuple(shape)} as {codec}")
    if not expected:  # torch makes nothing of no bytes
        return torch.empty(tuple(shape), device=device)
    raw = torch.frombuffer(data, dtype=torch.uint8).to(device)
    if codec == "blockwise_8bit":
        tensor = _decode_8bit(raw, shape)
    elif codec in _BITS:
        tensor = decode_hadamard(raw, _BITS[codec], math.prod(shape)).view(tuple(shape))
    else:
        tensor = raw.view(_DTYPE[codec]).view(tuple(shape)).float()
    if not _is_finite(tensor):
        raise InvalidMessage(f"tensor of shape {tuple(shape)} holds non-finite numbers")
    return tensor


def encode_tokens(tokens_BS: torch.Tensor) -> memoryview:
    """Encode token ids (B, S) of any integer type as int32."""
    return bytes_of(tokens_BS.to(torch.int32).contiguous().cpu())


def decode_tokens(data: memoryview, shape: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Decode token ids (B, S) to int64 and check that each is in the vocabulary.

    Raises:
        InvalidMessage: the length is wrong for the shape, or a token is not in the vocabulary
    """
    if len(data) != 4 * math.prod(shape):
        raise InvalidMessage(f"{len(data)} bytes of tokens; {4 * math.prod(shape)} are right for shape {tuple(shape)}")
    if not data:
        return torch.empty(tuple(shape), dtype=torch.int64)
    tokens = torch.frombuffer(data, dtype=torch.int32).view(tuple(shape)).long()
    if not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        raise InvalidMessage(f"token ids outside of the vocabulary of {vocab_size}")
    return tokens


def bytes_of(data: torch.Tensor | npt.NDArray[np.generic]) -> memoryview:
    """The memory of a contiguous CPU tensor or array as bytes, which shares it."""
    array = data.view(-1).view(torch.uint8).numpy() if isinstance(data, torch.Tensor) else data.view(np.uint8)
    return memoryview(array)  # type: ignore[arg-type]  # a buffer since numpy 1


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers are finite: several times as fast as to ask for each of them."""
    return not tensor.numel() or all(math.isfinite(bound) for bound in torch.aminmax(tensor))


def _encode_8bit(tensor: torch.Tensor) -> memoryview:
    from bitsandbytes.functional import quantize_blockwise  # takes a second to import, and few runs need it

    # Check first: a NaN does not show in the largest absolute value of its block.
    if not _is_finite(tensor):
        raise OverflowError("the values are not finite")
    quantized, state = quantize_blockwise(tensor.float().contiguous(), blocksize=CODEC_BLOCK_SIZE)
    return bytes_of(torch.cat([state.absmax.float().view(torch.uint8), quantized.view(-1)]).cpu())


@lru_cache(maxsize=16)
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """The 256 values of bitsandbytes' dynamic 8-bit type, which its encoder uses by default."""
    from bitsandbytes.functional import create_dynamic_map

    return torch.as_tensor(create_dynamic_map(), device=device)  # type: ignore[no-untyped-call]


def _decode_8bit(raw: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_blockwise

    num_elements = math.prod(shape)
    absmax = raw[: raw.numel() - num_elements].clone().view(torch.float32)
    decoded = dequantize_blockwise(
        raw[raw.numel() - num_elements :].clone(),
        absmax=absmax,
        code=_dynamic_map(raw.device),
        blocksize=CODEC_BLOCK_SIZE,
    )
    return decoded.view(tuple(shape)).float()
