"""Token ids that say more: whether a token is learnt, and whether a document begins with it.

Samples of data for fine-tuning carry this beside each id, in the same 32 bits, so that it goes wherever the tokens go
and takes no bytes of its own. Ids are far smaller than the marks. Tokens without marks are learnt, and go on where the
one before ends: samples of plain text are what they were.

The functions take numpy's arrays and torch's tensors alike.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from swarm_peer.config import DataSection

# An array of numpy's or a tensor of torch's.
Tokens: TypeAlias = Any

NOT_LEARNT = 1 << 30
BEGINS_DOCUMENT = 1 << 29
IDS = BEGINS_DOCUMENT - 1


def ids_of(marked: Tokens) -> Tokens:
    """The token ids alone."""
    return marked & IDS


def are_learnt(marked: Tokens) -> Tokens:
    """Whether each token is learnt."""
    return (marked & NOT_LEARNT) == 0


def begin_documents(marked: Tokens) -> Tokens:
    """Whether a document begins with each token."""
    return (marked & BEGINS_DOCUMENT) != 0


def positions_in_documents(marked_BT: Any) -> Any:
    """The position of each token in its document, for tensors of torch's."""
    import torch

    positions_BT = torch.arange(marked_BT.shape[1], device=marked_BT.device).expand(marked_BT.shape)
    starts_BT = positions_BT.where(begin_documents(marked_BT), torch.zeros_like(positions_BT)).cummax(dim=1).values
    return positions_BT - starts_BT


def num_targets(marked_BS: Tokens) -> int:
    """How many tokens are learnt. The first of each sample is not: there is nothing that it follows from."""
    return int(are_learnt(marked_BS[..., 1:]).sum())


def weight_of(samples_NS: Tokens, section: DataSection) -> float:
    """The divisor of the sum of samples' losses that gives a mean over their targets, in nats per token.

    The loss of a sample is a sum over its targets, divided by T, however many of them count. So this is the number of
    samples where all count.
    """
    length = int(samples_NS.shape[1]) - 1
    return num_targets(samples_NS) / length if section.has_targets else float(len(samples_NS))
