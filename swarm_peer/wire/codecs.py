"""Tensors as bytes: activations and their gradients on their way between stages.

The device thread encodes a tensor, right where the tensor is. A decoded tensor is checked for its size and for finite
numbers before anybody computes with it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from swarm_peer.codecs import find_codec
from swarm_peer.codecs.base import is_finite
from swarm_peer.errors import InvalidMessage
from swarm_peer.token_marks import ids_of


def encoded_bytes(shape: Sequence[int], codec: str) -> int:
    """The length of an encoded tensor, in bytes. A message of any other length is refused."""
    return find_codec(codec).num_bytes(math.prod(shape))


def rounding_seed(*names: bytes | int | str) -> int:
    """The seed of one tensor's stochastic rounding: two peers that use the same names round alike.

    A gradient goes by its microbatch's id and the stage that sends it, so that a further try, and the reference process
    that is told the ids, send the same bytes.
    """
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "big")


def encode(tensor: torch.Tensor, codec: str, seed: int | None = None) -> memoryview:
    """Encode a tensor of any float type and device with the codec of that name.

    Args:
        seed: rounding_seed of a gradient, with which some codecs round stochastically, without a bias; None for
            activations, which are rounded to nearest

    Raises:
        OverflowError: the values are not finite
    """
    return bytes_of(find_codec(codec).encode(tensor.detach(), seed))


def decode(data: memoryview, shape: Sequence[int], codec: str, device: torch.device | str = "cpu") -> torch.Tensor:
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
    tensor = find_codec(codec).decode(raw, math.prod(shape)).view(tuple(shape))
    if not is_finite(tensor):
        raise InvalidMessage(f"tensor of shape {tuple(shape)} holds non-finite numbers")
    return tensor


def encode_tokens(tokens_BS: torch.Tensor) -> memoryview:
    """Encode token ids (B, S) of any integer type as int32."""
    return bytes_of(tokens_BS.to(torch.int32).contiguous().cpu())


def decode_tokens(data: memoryview, shape: Sequence[int], vocab_size: int, *, has_marks: bool = False) -> torch.Tensor:
    """Decode token ids (B, S) to int64 and check that each is in the vocabulary.

    Args:
        has_marks: whether they may have marks (token_marks.py), which are left where they are

    Raises:
        InvalidMessage: the length is wrong for the shape, or a token is not in the vocabulary
    """
    if len(data) != 4 * math.prod(shape):
        raise InvalidMessage(f"{len(data)} bytes of tokens; {4 * math.prod(shape)} are right for shape {tuple(shape)}")
    if not data:
        return torch.empty(tuple(shape), dtype=torch.int64)
    tokens = torch.frombuffer(data, dtype=torch.int32).view(tuple(shape)).long()
    ids = ids_of(tokens) if has_marks else tokens
    if not (int(tokens.min()) >= 0 and int(ids.max()) < vocab_size):
        raise InvalidMessage(f"token ids outside of the vocabulary of {vocab_size}")
    return tokens


def bytes_of(data: torch.Tensor | npt.NDArray[np.generic]) -> memoryview:
    """The memory of a contiguous CPU tensor or array as bytes, which shares it."""
    array = data.view(-1).view(torch.uint8).numpy() if isinstance(data, torch.Tensor) else data.view(np.uint8)
    return memoryview(array)  # type: ignore[arg-type]  # a buffer since numpy 1
