"""A model family declares its configs, the modules of its parts, how they are called, and what they cost.

The modules are transformers' own classes. Shapes: B samples, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from swarm_peer.model.families.narrow import narrow_writes

# transformers' own fallback, used where a config sets initializer_range to 0.
DEFAULT_STD = 0.02

# Keys that the config.json files of published models of all families carry and that are no fields of transformers'
# config classes: renamed (torch_dtype), or never read by models that only decode.
CARRIED_KEYS = frozenset(
    {
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "torch_dtype",
        "task_specific_params",
        "tokenizer_class",
        "gradient_checkpointing",
        "torchscript",
        "is_decoder",
        "sep_token_id",
        "decoder_start_token_id",
        "is_causal",
        "mask_token_id",
        "unk_token_id",
        "transformers.js_config",
    }
)

# Settings that no family can honour, the only value that works, and why.
FIXED_VALUES: Mapping[str, tuple[Any, str]] = {
    "tie_word_embeddings": (False, "the embedding and the head belong to different stages"),
    "is_encoder_decoder": (False, "only decoders can be cut into stages"),
    "is_causal": (True, "a model that predicts the next token must not see it"),
}

# The least and the highest values of settings of all families, by the ends of their names. Initial weights of a larger
# deviation make products that are not finite.
RANGES: Mapping[str, tuple[float, float]] = {
    "pdrop": (0.0, 1.0),
    "dropout": (0.0, 1.0),
    "eps": (0.0, 1.0),
    "epsilon": (0.0, 1.0),
    "initializer_range": (0.0, 100.0),
    "softcapping": (1e-3, 1e9),
}

# The largest values of a family's sizes. With larger ones, transformers and our own checks make endless lists of
# layers, and torch has no room for the products.
MAX_SIZE = 1 << 24
MAX_LAYERS = 1 << 12

# torch.nn.init's functions that fill a tensor. Some of them ask no mode, and fill tensors on the meta device: nothing.
FILLS = frozenset(fill for name, fill in vars(nn.init).items() if name.endswith("_") and not name.startswith("_"))


class _NoFill(TorchFunctionMode):
    """Leaves tensors as they are where a module would fill them with initial values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules that are built inside are on the meta device. To fill them takes most of the time, and does nothing."""
    with torch.device("meta"), _NoFill():
        yield


@dataclass(frozen=True)
class Cost:
    """Parameters, floating-point operations of the forward pass per token, and values of the largest parameter.

    Attributes:
        matrices: those of the parameters that are matrices of layers
    """

    parameters: int
    forward_flops: int
    largest_parameter: int
    matrices: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.forward_flops + other.forward_flops,
            max(self.largest_parameter, other.largest_parameter),
            self.matrices + other.matrices,
        )


class Family(ABC):
    """One model family, for one config.

    Args:
        write_width: if given, embeddings and layers write only so many values of the residual stream, the first ones

    Attributes:
        config_class: its `model_type` is the family's name
        model_class: the Hugging Face model whose state dict the names of modules follow
        layer_class: of one layer, made from the config and the layer's index
        body: name of the module that holds all but the head
        layers: name of the layers' list within the body
        norm: name of the last normalisation within the body
        tokens: name of the tokens' embedding within the body
        writes: names, within a layer, of the products whose results are added to the residual stream as they are; none
            where that is not so, and a write_width has no meaning
        kinds: of layers that the family may have, by transformers' names
        norm_weight: initial weight of a normalisation, with which it changes no scale
        carried_keys: further CARRIED_KEYS of this family
        fixed_values: further FIXED_VALUES of this family
        passed_over: keys of fixed_values that transformers ignores, so that a published model may have any value there
        wrappers: model types of models that also take images, whose part for text is a model of this family
        sizes: keys whose values must be 1 or more, if there is one
        multiples: pairs of keys, of which the first one's value must be a multiple of the second one's
        activation: key of the activation function
        shape_keys: keys that decide the shapes of the weights, and how they are read
        widths: keys whose values grow with a model's width; heads keep their size
    """

    config_class: ClassVar[type[PretrainedConfig]]
    model_class: ClassVar[type[PreTrainedModel]]
    layer_class: ClassVar[type[nn.Module]]
    body: ClassVar[str]
    layers: ClassVar[str]
    norm: ClassVar[str]
    tokens: ClassVar[str]
    writes: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    norm_weight: ClassVar[float] = 1.0
    carried_keys: ClassVar[frozenset[str]] = frozenset()
    fixed_values: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    passed_over: ClassVar[frozenset[str]] = frozenset()
    wrappers: ClassVar[frozenset[str]] = frozenset()
    sizes: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden_size", "num_attention_heads"),)
    activation: ClassVar[str]
    shape_keys: ClassVar[tuple[str, ...]]
    widths: ClassVar[tuple[str, ...]]

    def __init__(self, config: PretrainedConfig, write_width: int | None = None):
        self.config = config
        self.write_width = write_width

    # --- the config

    @property
    def attention_implementation(self) -> str:
        """Which of transformers' implementations of attention the layers call."""
        return "sdpa"

    def rope_types(self) -> tuple[str, ...]:
        """The kinds of rotary positions that the config asks for."""
        return ()

    def wrong_positions(self) -> str:
        """Why no layer can work with the rotary positions that the config asks for; empty if they can."""
        return ""

    def shapes(self) -> dict[str, Any]:
        """Values that decide the shapes of the weights and how these are read, by key of the config."""
        return {key: getattr(self.config, key) for key in self.shape_keys}

    def widened(self, factor: int) -> Family:
        """The family of a model so much wider, with as many layers."""
        config = copy.deepcopy(self.config)
        for key in self.widths:
            if getattr(config, key) is not None:
                setattr(config, key, factor * getattr(config, key))
        return type(self)(config)

    def layer_kind(self, index: int) -> str:
        """The kind of a layer: all of one kind have the same modules, arguments and costs."""
        types = getattr(self.config, "layer_types", None)
        kind: str = "full_attention" if types is None else types[index]
        return kind

    def layers_differ_by(self) -> str:
        """By what layers differ, so that none can stand for the others; empty if they are all alike."""
        kinds = sorted({self.layer_kind(index) for index in range(self.config.num_hidden_layers)})
        return f"kinds: {', '.join(kinds)}" if len(kinds) > 1 else ""

    # --- the modules

    @abstractmethod
    def build_embeddings(self) -> dict[str, nn.Module]:
        """The modules, by name within the body, that embed() uses."""

    @abstractmethod
    def build_norm(self) -> nn.Module:
        """The last normalisation."""

    def build_layer(self, index: int) -> nn.Module:
        """One layer, which layer_arguments() of its kind are for."""
        layer = self.layer_class(self.config, layer_idx=index)
        if self.write_width is not None:
            narrow_writes(layer, self.writes, self.write_width)
        return layer

    @property
    def embedding_width(self) -> int:
        """Values of a token that embeddings hold."""
        size: int = self.config.hidden_size
        return size if self.write_width is None else self.write_width

    def hollow_layer(self, index: int) -> nn.Module:
        """One layer whose parameters are shapes alone."""
        with shapes_only():
            return self.build_layer(index)

    def build_rotary(self) -> nn.Module | None:
        """The module of rotary positions, which holds no weights; None where the family has none."""
        return None

    @abstractmethod
    def embed(self, body: nn.Module, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Token ids (int64) to hidden_BTD, or to the values of it that embeddings hold.

        Args:
            positions_BT: of the tokens in their documents, where a sample has several; else in their samples
        """

    def layer_arguments(
        self, kind: str, rotary: nn.Module | None, hidden_BTD: Tensor, positions_BT: Tensor | None = None
    ) -> dict[str, Any]:
        """Keyword arguments of the layers of one kind, besides the hidden states.

        Args:
            positions_BT: as for embed(); no token attends to another document's
        """
        return {}

    def cap_logits(self, logits_BTV: Tensor) -> Tensor:
        """The logits that go into the loss, from those that the head's product gives."""
        return logits_BTV

    def weight_std(self, name: str) -> float:
        """Standard deviation of the initial values of a matrix."""
        std: float = self.config.initializer_range or DEFAULT_STD
        return std

    # --- the costs

    def embedding_cost(self) -> Cost:
        """Of the embeddings, which are looked up."""
        with shapes_only():
            sizes = _sizes(nn.ModuleDict(self.build_embeddings()))
        return Cost(sum(sizes), 0, max(sizes))

    def layer_cost(self, index: int, sequence_length: int) -> Cost:
        """Of one layer at T tokens. A multiplication and its addition count as two operations.

        Counted are products with the layer's matrices and causal attention; the rest is negligible.
        """
        layer = self.hollow_layer(index)
        matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.ndim > 1)
        sizes = _sizes(layer)
        flops = 2 * matrices + self.attention_flops(index, sequence_length)
        return Cost(sum(sizes), flops, max(sizes), matrices)

    def attention_flops(self, index: int, sequence_length: int) -> int:
        """Operations per token that attend: an average token has T / 2 keys and values before it.

        Under a mask they are T, since what is masked is computed all the same.
        """
        return (4 if self.is_masked(index, sequence_length) else 2) * sequence_length * self.attention_width

    def is_masked(self, index: int, sequence_length: int) -> bool:
        """Whether a layer attends under a mask: a sliding window shorter than the sequence, or eager attention's."""
        is_sliding = self.layer_kind(index) == "sliding_attention" and self.config.sliding_window <= sequence_length
        return is_sliding or self.attention_implementation == "eager"

    def head_cost(self) -> Cost:
        """Of the head, with the last normalisation."""
        with shapes_only():
            norm = self.build_norm()
        head: int = self.config.vocab_size * self.config.hidden_size
        return Cost(head + sum(_sizes(norm)), 2 * head, head)

    @property
    def head_dim(self) -> int:
        """Values of one head's query."""
        size: int = getattr(self.config, "head_dim", self.config.hidden_size // self.config.num_attention_heads)
        return size

    @property
    def attention_width(self) -> int:
        """Values of a token's queries, of all heads together."""
        width: int = self.config.num_attention_heads * self.head_dim
        return width

    @abstractmethod
    def layer_activation_bytes(self, index: int, sequence_length: int, half: bool) -> float:
        """Bytes per token that a layer without dropout keeps for its backward pass: counted from what autograd keeps.

        Args:
            half: products, queries, keys and values are of 16 bits, as under autocast; normalisations stay fp32
        """

    def copied_key_width(self, index: int, sequence_length: int) -> int:
        """Values of a token's keys that attention copies on GPUs without a kernel for grouped queries."""
        return 0

    def cap_activation_bytes(self, half: bool) -> float:
        """Bytes per token that cap_logits() keeps for the backward pass."""
        return 0.0


def _sizes(module: nn.Module) -> list[int]:
    return [parameter.numel() for parameter in module.parameters()]
