"""Attention with grouped queries, whose memory grows with the tokens and not with their square on any GPU; masks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, sdpa_mask

# The name by which transformers finds the function below.
GROUPED_ATTENTION = "swarm_grouped_sdpa"
# Compute capability of the first GPUs with bf16, and with flash attention, the one kernel of torch's that takes grouped
# queries, in 16 bits.
AMPERE = (8, 0)
# Transformers 5.24 has given the argument another name, and warns of the old one. Nothing is cached here.
_NO_CACHE: dict[str, Any] = {
    name: None for name in ("cache", "past_key_values") if name in inspect.signature(create_causal_mask).parameters
}


def mask_of(
    config: PretrainedConfig, kind: str, hidden_BTD: Tensor, positions_BT: Tensor | None = None
) -> Tensor | None:
    """Added to attention in the layers of one kind; None where tokens see all before them and need no mask.

    Args:
        positions_BT: of the tokens in their documents, where samples have several: none is seen from another one
    """
    create = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
    embeds_BTD = hidden_BTD[:1] if positions_BT is None else hidden_BTD
    mask_B1TT = create(
        config=config, inputs_embeds=embeds_BTD, attention_mask=None, position_ids=positions_BT, **_NO_CACHE
    )
    assert mask_B1TT is None or isinstance(mask_B1TT, Tensor), "only flex attention has other masks"
    if mask_B1TT is None or mask_B1TT.dtype != torch.bool:
        return mask_B1TT
    # In the type that attention computes in: else each layer would make and keep a copy of its own.
    device = hidden_BTD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_BTD.dtype
    return torch.zeros_like(mask_B1TT, dtype=dtype).masked_fill_(~mask_B1TT, -torch.inf)


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
