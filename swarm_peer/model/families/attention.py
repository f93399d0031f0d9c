"""Attention with grouped queries, whose memory grows with the tokens and not with their square on any GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# The name by which transformers finds the function below.
GROUPED_ATTENTION = "swarm_grouped_sdpa"
# Compute capability of the first GPUs with bf16, and with flash attention, the one kernel of torch's that takes grouped
# queries, in 16 bits.
AMPERE = (8, 0)


def grouped_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """transformers' scaled-dot-product attention, but for GPUs on which torch would hold T x T values for each head.

    There each of the G keys and values is copied for all heads that use it: a kernel that keeps no T x T values takes
    those, and the copies are small beside what else a layer keeps.
    """
    heads, groups = query_BHTD.shape[1], key_BGTD.shape[1]
    if heads == groups or attention_mask is not None or not query_BHTD.is_cuda or _has_flash_attention(query_BHTD):
        arguments |= {"dropout": dropout, "scaling": scaling}
        result_BTHD, _ = sdpa_attention_forward(module, query_BHTD, key_BGTD, value_BGTD, attention_mask, **arguments)
        return result_BTHD, None
    key_BHTD, value_BHTD = (each.repeat_interleave(heads // groups, dim=1) for each in (key_BGTD, value_BGTD))
    result_BHTD = functional.scaled_dot_product_attention(
        query_BHTD, key_BHTD, value_BHTD, dropout_p=dropout, scale=scaling, is_causal=query_BHTD.shape[2] > 1
    )
    return result_BHTD.transpose(1, 2).contiguous(), None


def _has_flash_attention(query_BHTD: Tensor) -> bool:
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query_BHTD.dtype
    return dtype != torch.float32 and torch.cuda.get_device_capability(query_BHTD.device) >= AMPERE


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
