"""Shared by Gemma 2 and 3: scaled embeddings, normalisations before and behind attention and MLP, capped logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from swarm_peer.model.families.rotary import RotaryFamily


class GemmaFamily(RotaryFamily):
    """A family whose layers are built as Gemma 2's.

    Attributes:
        embedding_class: of the embedding, which scales its values
    """

    embedding_class: ClassVar[type[nn.Module]]
    carried_keys = RotaryFamily.carried_keys | {"cache_implementation"}
    norm_weight = 0.0  # of normalisations that multiply by 1 + weight
    fixed_values: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "use_bidirectional_attention": (False, "a model that predicts the next token must not see it"),
    }
    kinds = ("full_attention", "sliding_attention")
    sizes = (*RotaryFamily.sizes, "head_dim", "query_pre_attn_scalar")
    activation = "hidden_activation"
    shape_keys = (*RotaryFamily.shape_keys, "head_dim", "attention_bias")

    def build_embeddings(self) -> dict[str, nn.Module]:
        """The embedding, whose values are multiplied by the root of the hidden size."""
        config, scale = self.config, self.config.hidden_size**0.5
        embedding = self.embedding_class(config.vocab_size, config.hidden_size, config.pad_token_id, embed_scale=scale)
        # It follows from the config and is in no state dict: it is real from the start.
        embedding.embed_scale = torch.tensor(scale, device="cpu")
        return {"embed_tokens": embedding}

    def cap_logits(self, logits_BTV: Tensor) -> Tensor:
        """Bend the logits to at most `final_logit_softcapping`, where the config has it."""
        cap = self.config.final_logit_softcapping
        return logits_BTV if cap is None else torch.tanh(logits_BTV / cap) * cap

    def cap_activation_bytes(self, half: bool) -> float:
        """One more value for each logit, where they are capped."""
        capped: int = 0 if self.config.final_logit_softcapping is None else self.config.vocab_size
        return (2.0 if half else 4.0) * capped

    def layer_activation_bytes(self, index: int, sequence_length: int, half: bool) -> float:
        """Besides, of the normalisations behind attention and MLP their inputs in fp32 and the normalised values."""
        hidden: int = self.config.hidden_size
        return super().layer_activation_bytes(index, sequence_length, half) + 16.0 * hidden
