"""Gemma 3, text only: rotary positions for each kind of layer; queries and keys are normalised instead of capped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3DecoderLayer,
    Gemma3RMSNorm,
    Gemma3RotaryEmbedding,
    Gemma3TextScaledWordEmbedding,
)

from swarm_peer.model.families.gemma import GemmaFamily


class Gemma3Family(GemmaFamily):
    """Gemma 3's language model, as transformers has it."""

    config_class, model_class, layer_class = Gemma3TextConfig, Gemma3ForCausalLM, Gemma3DecoderLayer
    norm_class, rotary_class = Gemma3RMSNorm, Gemma3RotaryEmbedding
    embedding_class = Gemma3TextScaledWordEmbedding
    carried_keys = GemmaFamily.carried_keys | {"rope_local_base_freq", "sliding_window_pattern"}
    fixed_values: ClassVar[Mapping[str, tuple[Any, str]]] = {
        **GemmaFamily.fixed_values,
        "attn_logit_softcapping": (None, "transformers' Gemma 3 ignores it"),
    }
    passed_over = frozenset({"attn_logit_softcapping"})
    wrappers = frozenset({"gemma3"})

    def rope_types(self) -> tuple[str, ...]:
        """One of each kind of layer."""
        return tuple(self.config.rope_parameters[kind]["rope_type"] for kind in self.kinds)

    def rotate(
        self, kind: str, rotary: nn.Module, hidden_BTD: Tensor, position_ids_1T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, which differ by the kind of layer."""
        cosines_1TD, sines_1TD = rotary(hidden_BTD, position_ids_1T, kind)
        return cosines_1TD, sines_1TD

    def layer_activation_bytes(self, index: int, sequence_length: int, half: bool) -> float:
        """Besides, of the normalisations of queries and keys their inputs in fp32 and the normalised values."""
        width: int = (self.config.num_attention_heads + self.config.num_key_value_heads) * self.head_dim
        return super().layer_activation_bytes(index, sequence_length, half) + 8.0 * width
