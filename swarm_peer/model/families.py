"""How each model family names, builds, calls and initialises its parts: all that stages must know of transformers.

The parts are transformers' own classes. A further family is one class here, its layer's costs in partition.py and
its config class in architecture.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

# transformers' own fallback, used where a config sets initializer_range to 0.
DEFAULT_STD = 0.02


class Family(ABC):
    """One model family, for one config.

    Attributes:
        body: name of the module that holds all but the head
        layers: name of the layers' list within the body
        norm: name of the last normalisation within the body
        model_class: the Hugging Face model whose state dict the names follow
    """

    body: ClassVar[str]
    layers: ClassVar[str]
    norm: ClassVar[str]
    model_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PretrainedConfig):
        self.config = config

    @abstractmethod
    def build_embeddings(self) -> dict[str, nn.Module]:
        """The modules, by name within the body, that embed() uses."""

    @abstractmethod
    def build_layer(self, index: int) -> nn.Module: ...

    @abstractmethod
    def build_norm(self) -> nn.Module: ...

    def build_rotary(self) -> nn.Module | None:
        """The module of rotary positions, which holds no weights; None where the family has none."""
        return None

    @abstractmethod
    def embed(self, body: nn.Module, tokens_BT: Tensor) -> Tensor:
        """Token ids (int64) to hidden_BTD."""

    def layer_arguments(self, rotary: nn.Module | None, hidden_BTD: Tensor) -> dict[str, Any]:
        """Keyword arguments of each layer, besides the hidden states."""
        return {}

    def weight_std(self, name: str) -> float:
        """Standard deviation of the initial values of a matrix."""
        return self.config.initializer_range or DEFAULT_STD


class GPT2Family(Family):
    body, layers, norm, model_class = "transformer", "h", "ln_f", GPT2LMHeadModel

    def build_embeddings(self) -> dict[str, nn.Module]:
        return {
            "wte": nn.Embedding(self.config.vocab_size, self.config.hidden_size),
            "wpe": nn.Embedding(self.config.max_position_embeddings, self.config.hidden_size),
            "drop": nn.Dropout(self.config.embd_pdrop),
        }

    def build_layer(self, index: int) -> nn.Module:
        return GPT2Block(self.config, layer_idx=index)

    def build_norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_epsilon)

    def embed(self, body: nn.Module, tokens_BT: Tensor) -> Tensor:
        position_ids = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return body.drop(body.wte(tokens_BT) + body.wpe(position_ids))

    def weight_std(self, name: str) -> float:
        std = super().weight_std(name)
        # Two residual branches per layer end in a c_proj (GPT-2 paper, section 2.3; modeling_gpt2.py, _init_weights).
        return std / math.sqrt(2 * self.config.num_hidden_layers) if name.endswith("c_proj.weight") else std


class LlamaFamily(Family):
    body, layers, norm, model_class = "model", "layers", "norm", LlamaForCausalLM

    def build_embeddings(self) -> dict[str, nn.Module]:
        return {"embed_tokens": nn.Embedding(self.config.vocab_size, self.config.hidden_size, self.config.pad_token_id)}

    def build_layer(self, index: int) -> nn.Module:
        return LlamaDecoderLayer(self.config, layer_idx=index)

    def build_norm(self) -> nn.Module:
        return LlamaRMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)

    def build_rotary(self) -> nn.Module:
        return LlamaRotaryEmbedding(self.config)

    def embed(self, body: nn.Module, tokens_BT: Tensor) -> Tensor:
        return body.embed_tokens(tokens_BT)

    def layer_arguments(self, rotary: nn.Module | None, hidden_BTD: Tensor) -> dict[str, Any]:
        assert rotary is not None
        position_ids_1T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device).unsqueeze(0)
        return {"position_embeddings": rotary(hidden_BTD, position_ids=position_ids_1T)}


FAMILIES: dict[str, type[Family]] = {"gpt2": GPT2Family, "llama": LlamaFamily}


def family_of(config: PretrainedConfig) -> Family:
    return FAMILIES[config.model_type](config)
