"""Qwen 3, dense: queries and keys are normalised; heads have a size of their own; later layers may have a window."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from swarm_peer.model.families.rotary import RotaryFamily


class Qwen3Family(RotaryFamily):
    """Qwen 3, as transformers has it."""

    config_class, model_class, layer_class = Qwen3Config, Qwen3ForCausalLM, Qwen3DecoderLayer
    norm_class, rotary_class = Qwen3RMSNorm, Qwen3RotaryEmbedding
    kinds = ("full_attention", "sliding_attention")
    sizes = (*RotaryFamily.sizes, "head_dim")
    multiples = (("num_attention_heads", "num_key_value_heads"),)
    shape_keys = (*RotaryFamily.shape_keys, "head_dim", "attention_bias")

    def layer_activation_bytes(self, index: int, sequence_length: int, half: bool) -> float:
        """Besides, of the normalisations of queries and keys their inputs in fp32 and the normalised values."""
        width: int = (self.config.num_attention_heads + self.config.num_key_value_heads) * self.head_dim
        return super().layer_activation_bytes(index, sequence_length, half) + (6.0 if half else 8.0) * width
