"""GPT-2: learned positions, LayerNorms with biases, a plain MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from swarm_peer.model.families.attention import mask_of
from swarm_peer.model.families.base import Family


class GPT2Family(Family):
    """GPT-2, as transformers has it."""

    config_class, model_class, layer_class = GPT2Config, GPT2LMHeadModel, GPT2Block
    body, layers, norm, tokens = "transformer", "h", "ln_f", "wte"
    writes = ("attn.c_proj", "mlp.c_proj")
    carried_keys = frozenset({"n_ctx"})
    fixed_values: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "add_cross_attention": (False, "there is no encoder to attend to"),
        "reorder_and_upcast_attn": (False, "scaled-dot-product attention ignores it"),
    }
    passed_over = frozenset({"reorder_and_upcast_attn"})
    sizes = (*Family.sizes, "n_inner")
    activation = "activation_function"
    shape_keys = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")
    widths = ("n_embd", "n_head", "n_inner")

    def layers_differ_by(self) -> str:
        """By their scales of attention, where these follow from a layer's number."""
        key = "scale_attn_by_inverse_layer_idx"
        return f"{key}: true" if getattr(self.config, key) else super().layers_differ_by()

    @property
    def _inner(self) -> int:
        inner: int = 4 * self.config.hidden_size if self.config.n_inner is None else self.config.n_inner
        return inner

    def shapes(self) -> dict[str, Any]:
        """With the MLP's size spelled out, which a config may leave to its default."""
        return super().shapes() | {"n_inner": self._inner}

    def build_embeddings(self) -> dict[str, nn.Module]:
        """Tokens, positions, and the dropout behind their sum."""
        return {
            "wte": nn.Embedding(self.config.vocab_size, self.embedding_width),
            "wpe": nn.Embedding(self.config.max_position_embeddings, self.embedding_width),
            "drop": nn.Dropout(self.config.embd_pdrop),
        }

    def build_norm(self) -> nn.Module:
        """A LayerNorm, with a bias."""
        return nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_epsilon)

    def build_layer(self, index: int) -> nn.Module:
        """A block, with torch's GELU for transformers' formula of it (gelu_new).

        The function is the same. The formula is seven operations, and autograd keeps three values more for each of the
        MLP's inner ones: nearly half of what a layer keeps in all.
        """
        layer = super().build_layer(index)
        if self.config.activation_function == "gelu_new":
            layer.get_submodule("mlp").act = nn.GELU(approximate="tanh")
        return layer

    def embed(self, body: nn.Module, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Token ids (int64) to hidden_BTD, positions added."""
        position_ids = (
            torch.arange(tokens_BT.shape[1], device=tokens_BT.device) if positions_BT is None else positions_BT
        )
        wte, wpe, drop = (body.get_submodule(name) for name in ("wte", "wpe", "drop"))
        hidden_BTD: Tensor = drop(wte(tokens_BT) + wpe(position_ids))
        return hidden_BTD

    def layer_arguments(
        self, kind: str, rotary: nn.Module | None, hidden_BTD: Tensor, positions_BT: Tensor | None = None
    ) -> dict[str, Any]:
        """A mask, where a sample has several documents."""
        if positions_BT is None:
            return {}
        return {"attention_mask": mask_of(self.config, kind, hidden_BTD, positions_BT)}

    def weight_std(self, name: str) -> float:
        """Smaller for the matrices that end a residual branch."""
        std = super().weight_std(name)
        # Two residual branches per layer end in a c_proj (GPT-2 paper, section 2.3; modeling_gpt2.py, _init_weights).
        return std / math.sqrt(2 * self.config.num_hidden_layers) if name.endswith("c_proj.weight") else std

    def layer_activation_bytes(self, index: int, sequence_length: int, half: bool) -> float:
        """Bytes per token that a layer keeps for its backward pass.

        Inputs of both normalisations, of both first products, query, key, value and their result; the activation
        function's input and its output.
        """
        hidden: int = self.config.hidden_size
        return (20.0 * hidden + 4.0 * self._inner) if half else (32.0 * hidden + 8.0 * self._inner)
