"""Shared by most families of today: rotary positions, RMSNorms, grouped queries, a gated MLP."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from swarm_peer.model.families.attention import GROUPED_ATTENTION, mask_of
from swarm_peer.model.families.base import Family


class RotaryFamily(Family):
    """A family whose layers are built as Llama's.

    Attributes:
        norm_class: of the last normalisation
        rotary_class: of the rotary positions
    """

    norm_class: ClassVar[type[nn.Module]]
    rotary_class: ClassVar[type[nn.Module]]
    body, layers, norm, tokens = "model", "layers", "norm", "embed_tokens"
    carried_keys = frozenset({"rope_theta", "rope_scaling"})
    sizes = (*Family.sizes, "intermediate_size", "num_key_value_heads")
    multiples = (*Family.multiples, ("num_attention_heads", "num_key_value_heads"))
    activation = "hidden_act"
    shape_keys: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        "num_key_value_heads",
    )
    widths = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")

    @property
    def attention_implementation(self) -> str:
        """Queries may share keys."""
        return GROUPED_ATTENTION

    def rope_types(self) -> tuple[str, ...]:
        """One, for all layers."""
        return (self.config.rope_parameters["rope_type"],)

    def wrong_positions(self) -> str:
        """Why no layer can work with the rotary positions that the config asks for: first and last are tried."""
        parameters = self.config.rope_parameters
        sections = (parameters, *(value for value in parameters.values() if isinstance(value, dict)))
        for key, value in (item for section in sections for item in section.items()):
            is_text = isinstance(value, str) and key not in ("rope_type", "type")
            if is_text or (isinstance(value, float) and not math.isfinite(value)):
                return f"{key}={value!r} is no number"
        rotary = self.build_rotary()
        position_ids_1T = torch.tensor([[0, self.config.max_position_embeddings - 1]])
        for kind in sorted({self.layer_kind(index) for index in range(self.config.num_hidden_layers)}):
            for values_1TD in self.rotate(kind, rotary, torch.zeros(1, 2, self.head_dim), position_ids_1T):
                if values_1TD.shape[-1] != self.head_dim:
                    return f"they turn {values_1TD.shape[-1]} values of a head, which has {self.head_dim}"
                if not bool(values_1TD.isfinite().all()):
                    return "they are not finite"
        is_wrong = any(bool((~buffer.isfinite() | (buffer < 0)).any()) for buffer in rotary.buffers())
        return "their frequencies are no positive numbers" if is_wrong else ""

    def build_embeddings(self) -> dict[str, nn.Module]:
        """Tokens alone: positions are the layers' business."""
        return {"embed_tokens": nn.Embedding(self.config.vocab_size, self.embedding_width, self.config.pad_token_id)}

    def build_norm(self) -> nn.Module:
        """An RMSNorm of the family's own class."""
        return self.norm_class(self.config.hidden_size, eps=self.config.rms_norm_eps)

    def build_rotary(self) -> nn.Module:
        """The module that gives cosines and sines of positions."""
        return self.rotary_class(self.config)

    def embed(self, body: nn.Module, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Token ids (int64) to hidden_BTD, without their positions."""
        hidden_BTD: Tensor = body.get_submodule("embed_tokens")(tokens_BT)
        return hidden_BTD

    def layer_arguments(
        self, kind: str, rotary: nn.Module | None, hidden_BTD: Tensor, positions_BT: Tensor | None = None
    ) -> dict[str, Any]:
        """Positions and mask of the layers of one kind."""
        assert rotary is not None
        position_ids_1T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device).unsqueeze(0)
        position_ids = position_ids_1T if positions_BT is None else positions_BT
        return {
            "position_embeddings": self.rotate(kind, rotary, hidden_BTD, position_ids),
            "attention_mask": mask_of(self.config, kind, hidden_BTD, positions_BT),
        }

    def rotate(
        self, kind: str, rotary: nn.Module, hidden_BTD: Tensor, position_ids_1T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, in layers of one kind."""
        cosines_1TD, sines_1TD = rotary(hidden_BTD, position_ids=position_ids_1T)
        return cosines_1TD, sines_1TD

    def layer_activation_bytes(self, index: int, sequence_length: int, half: bool) -> float:
        """Bytes per token that a layer keeps for its backward pass.

        Of each normalisation its input, the normalised values and its output; query and result; keys and values; the
        gate before and after its activation function, what it multiplies, and the product. Autocast makes an output
        anew for each product that it goes into: query, key and value, or the gate and what it multiplies.
        """
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        attention = 2 * self.attention_width + 2 * self.kept_key_width(index, sequence_length)
        if half:
            return float(26 * hidden + 2 * attention + 8 * inner)
        return float(24 * hidden + 4 * attention + 16 * inner)

    def kept_key_width(self, index: int, sequence_length: int) -> int:
        """Values of a token's keys, as the backward pass finds them: under a mask, copied for each query's head."""
        masked = self.is_masked(index, sequence_length)
        width: int = (self.config.num_attention_heads if masked else self.config.num_key_value_heads) * self.head_dim
        return width

    def copied_key_width(self, index: int, sequence_length: int) -> int:
        """The copies that grouped_attention makes, where GPUs compute in fp32."""
        return self.attention_width - self.kept_key_width(index, sequence_length)
