"""The loss of the last stage: cross entropy of each token, whose logits are never all there at once.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Logits that exist at once, 128 MiB of fp32. A microbatch that has more is computed in chunks of tokens, and the logits
# of each chunk once more in the backward pass.
MAX_LOGITS = 2**25


def tokens_at_once(vocab_size: int) -> int:
    """Tokens of a chunk."""
    return max(MAX_LOGITS // vocab_size, 1)


def token_losses(head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets_N: Tensor, vocab_size: int) -> Tensor:
    """losses_N in fp32, of the logits that the head makes of hidden states."""

    def losses(hidden_CD: Tensor, targets_C: Tensor) -> Tensor:
        return functional.cross_entropy(head(hidden_CD).float(), targets_C, reduction="none")

    size = tokens_at_once(vocab_size)
    if len(hidden_ND) <= size:
        return losses(hidden_ND, targets_N)
    chunks = zip(torch.split(hidden_ND, size), torch.split(targets_N, size), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([losses(*chunk) for chunk in chunks])
    # Dropout is in no head, so that there is no random state to keep.
    return torch.cat([checkpoint(losses, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])
