"""Qwen 2 and 2.5, dense: queries, keys and values have biases; later layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from swarm_peer.model.families.rotary import RotaryFamily


class Qwen2Family(RotaryFamily):
    """Qwen 2, as transformers has it."""

    config_class, model_class, layer_class = Qwen2Config, Qwen2ForCausalLM, Qwen2DecoderLayer
    norm_class, rotary_class = Qwen2RMSNorm, Qwen2RotaryEmbedding
    # No setting of transformers' Qwen2Config, but its layers ask for it.
    carried_keys = RotaryFamily.carried_keys | {"use_mrope", "head_dim"}
    fixed_values: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "use_mrope": (False, "text has positions in one dimension")
    }
    kinds = ("full_attention", "sliding_attention")

    def shapes(self) -> dict[str, Any]:
        """With the size of heads, which a config may leave to its default."""
        return super().shapes() | {"head_dim": self.head_dim}
