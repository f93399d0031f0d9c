"""Gemma 2: sliding windows in every other layer, and a soft cap on attention, which only eager attention knows."""

from __future__ import annotations

from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2DecoderLayer,
    Gemma2RMSNorm,
    Gemma2RotaryEmbedding,
    Gemma2TextScaledWordEmbedding,
)

from swarm_peer.model.families.gemma import GemmaFamily


class Gemma2Family(GemmaFamily):
    """Gemma 2, as transformers has it."""

    config_class, model_class, layer_class = Gemma2Config, Gemma2ForCausalLM, Gemma2DecoderLayer
    norm_class, rotary_class = Gemma2RMSNorm, Gemma2RotaryEmbedding
    embedding_class = Gemma2TextScaledWordEmbedding
    carried_keys = GemmaFamily.carried_keys | {"hidden_act"}

    @property
    def attention_implementation(self) -> str:
        """Scaled-dot-product attention takes no soft cap."""
        return super().attention_implementation if self.config.attn_logit_softcapping is None else "eager"

    def layer_activation_bytes(self, index: int, sequence_length: int, half: bool) -> float:
        """Besides, where attention is capped, what each head makes of all tokens.

        That is the cap's result and the softmax in fp32; under autocast the former has 16 bits, and so has a copy.
        """
        kept = super().layer_activation_bytes(index, sequence_length, half)
        heads: int = self.config.num_attention_heads if self.attention_implementation == "eager" else 0
        return kept + 8.0 * heads * sequence_length
