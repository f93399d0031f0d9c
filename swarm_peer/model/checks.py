"""Checks of tensors from other peers, before a stage touches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from swarm_peer.config import MAX_STEPS
from swarm_peer.errors import InvalidMessage
from swarm_peer.model.optimizer import STATE_PREFIX
from swarm_peer.token_marks import ids_of

# Entries of an optimizer's state that are counts, magnitudes or mean squares: below zero, the next step makes NaNs.
NON_NEGATIVE_ENTRIES = ("/step", "/exp_avg_sq", "/state2", "/absmax1", "/absmax2")


def check_tokens(tokens_BS: Tensor, config: PretrainedConfig, *, looks_up: bool, has_marks: bool = False) -> None:
    """Token ids of at least one sample, which the model has positions and, where they are looked up, words for.

    Args:
        looks_up: whether they are looked up
        has_marks: whether they may have marks (token_marks.py)

    Raises:
        InvalidMessage: they are not
    """
    shape, dtype = tuple(tokens_BS.shape), tokens_BS.dtype
    if len(shape) != 2 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise InvalidMessage(f"tokens are {dtype} of shape {shape}, not integers of shape (B, T + 1)")
    longest = config.max_position_embeddings + 1
    if shape[0] < 1 or not 2 <= shape[1] <= longest:
        raise InvalidMessage(f"tokens have shape {shape}, not at least one sample of 2 to {longest} token ids")
    if looks_up:
        lowest, highest = int(tokens_BS.min()), int((ids_of(tokens_BS) if has_marks else tokens_BS).max())
        # On a GPU, looking up an id that is out of range ends the whole process.
        if lowest < 0 or highest >= config.vocab_size:
            raise InvalidMessage(f"token ids {lowest} to {highest} leave the vocabulary of {config.vocab_size}")


def check_float(tensor: Tensor, shape: Sequence[int], what: str) -> None:
    """A floating-point tensor of a certain shape; whether its values are finite is for the wire to check.

    Raises:
        InvalidMessage: it is not
    """
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_floating_point():
        raise InvalidMessage(f"{what} is {tensor.dtype} of shape {tuple(tensor.shape)}, not a float {tuple(shape)}")


def check_state(tensors: Mapping[str, Tensor], template: Mapping[str, Tensor]) -> None:
    """A stage's weights, and its optimizer's state in full or, as before the first step, not at all.

    Args:
        template: names, types and shapes of the full state

    Raises:
        InvalidMessage: tensors are missing, unknown, of another type or shape, or hold impossible values
    """
    if not any(name.startswith(STATE_PREFIX) for name in tensors):
        template = {name: value for name, value in template.items() if not name.startswith(STATE_PREFIX)}
    if missing := sorted(template.keys() - tensors.keys()):
        raise InvalidMessage(f"the state lacks {len(missing)} tensors, such as {missing[0]}")
    if extra := sorted(tensors.keys() - template.keys()):
        raise InvalidMessage(f"the state has {len(extra)} tensors that this stage lacks, such as {extra[0]!r:.100}")
    for name, expected in template.items():
        value = tensors[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise InvalidMessage(
                f"state tensor {name} is {value.dtype} of shape {tuple(value.shape)}, "
                f"not {expected.dtype} of shape {tuple(expected.shape)}"
            )
        if not bool(value.isfinite().all()):
            raise InvalidMessage(f"state tensor {name} holds values that are not finite")
        if name.startswith(STATE_PREFIX) and name.endswith(NON_NEGATIVE_ENTRIES) and bool((value < 0).any()):
            raise InvalidMessage(f"state tensor {name} holds values below zero")
        if name.startswith(STATE_PREFIX) and name.endswith("/step") and bool((value > MAX_STEPS).any()):
            raise InvalidMessage(f"state tensor {name} counts more steps than a run can have")
