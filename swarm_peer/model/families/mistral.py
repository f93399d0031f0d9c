"""Mistral: a sliding window, the same in all layers."""

from __future__ import annotations

from transformers import MistralConfig, MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm, MistralRotaryEmbedding

from swarm_peer.model.families.rotary import RotaryFamily


class MistralFamily(RotaryFamily):
    """Mistral, as transformers has it."""

    config_class, model_class, layer_class = MistralConfig, MistralForCausalLM, MistralDecoderLayer
    norm_class, rotary_class = MistralRMSNorm, MistralRotaryEmbedding
    kinds = ("full_attention", "sliding_attention")
    wrappers = frozenset({"mistral3"})
    sizes = (*RotaryFamily.sizes, "head_dim")
    multiples = (("num_attention_heads", "num_key_value_heads"),)
    shape_keys = (*RotaryFamily.shape_keys, "head_dim")

    def layer_kind(self, index: int) -> str:
        """The same for all layers: config.json names a window or none."""
        return "full_attention" if self.config.sliding_window is None else "sliding_attention"
