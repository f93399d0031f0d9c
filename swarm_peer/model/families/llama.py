"""Llama: layers whose products may have biases."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from swarm_peer.model.families.rotary import RotaryFamily


class LlamaFamily(RotaryFamily):
    """Llama, as transformers has it."""

    config_class, model_class, layer_class = LlamaConfig, LlamaForCausalLM, LlamaDecoderLayer
    writes = ("self_attn.o_proj", "mlp.down_proj")
    norm_class, rotary_class = LlamaRMSNorm, LlamaRotaryEmbedding
    carried_keys = RotaryFamily.carried_keys | {"rope_interleaved", "is_llama_config", "max_sequence_length"}
    sizes = (*RotaryFamily.sizes, "head_dim")
    shape_keys = (*RotaryFamily.shape_keys, "head_dim", "attention_bias", "mlp_bias")
