"""Which models can be trained: from what a person names to a transformers config that is known to work.

Owns the checks of a model's config. Knows nothing of stages: families.py builds the modules, partition.py cuts.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, GPT2Config, LlamaConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarm_peer.config import ModelSection
from swarm_peer.errors import UserError
from swarm_peer.model.pretrained import PretrainedSource

CONFIG_CLASSES: dict[str, type[PretrainedConfig]] = {"gpt2": GPT2Config, "llama": LlamaConfig}

# Keys that the config.json files of published GPT-2 and Llama models carry and that no longer are fields of
# transformers' config classes: renamed (torch_dtype, rope_*), or never read by these two families.
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
        "mask_token_id",
        "unk_token_id",
        "n_ctx",
        "rope_theta",
        "rope_scaling",
        "rope_interleaved",
        "is_llama_config",
        "max_sequence_length",
        "transformers.js_config",
    }
)

# Settings that this project cannot honour, the only value that works, and why.
FIXED_VALUES: dict[str, tuple[Any, str]] = {
    "tie_word_embeddings": (False, "the embedding and the head belong to different stages"),
    "add_cross_attention": (False, "there is no encoder to attend to"),
    "is_encoder_decoder": (False, "only decoders can be cut into stages"),
    "scale_attn_by_inverse_layer_idx": (False, "layers must not depend on their number, since they can be shared"),
    "reorder_and_upcast_attn": (False, "scaled-dot-product attention ignores it"),
}

# What decides the shapes of a model's weights, and how they are read.
SHAPE_KEYS = {
    "gpt2": ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    "llama": (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    ),
}


def resolve_model(section: ModelSection, cache_dir: Path | None = None) -> ModelSection:
    """A run's model as it is published: with an inline config, and with pretrained weights that cannot change.

    Raises:
        UserError: see resolve_model_config
    """
    if section.pretrained is not None:
        section = section.model_copy(update={"pretrained": PretrainedSource(section.pretrained, cache_dir).pinned()})
    return section.model_copy(update={"config": resolve_model_config(section, cache_dir)})


def resolve_model_config(section: ModelSection, cache_dir: Path | None = None) -> dict[str, Any]:
    """Turn what `model.config` or `model.pretrained` names into an inline transformers config, to be published.

    Reads a folder's config.json, or the hub's (from the cache alone where HF_HUB_OFFLINE is set). A config that stands
    in a manifest is not checked: parse_model_config does that. One that a pretrained model brings is untied, since
    head and embedding belong to different stages.

    Raises:
        UserError: the folder, its config.json or the hub's model cannot be read, or the pretrained model is none that
            can be trained or has other shapes than `model.config`
    """
    if section.pretrained is None:
        return _read_named_config(section.config) if isinstance(section.config, str) else copy.deepcopy(section.config)
    source = PretrainedSource(section.pretrained, cache_dir)
    pretrained_config = source.read_config() | {"tie_word_embeddings": False}
    try:
        theirs = parse_model_config(pretrained_config)
    except UserError as error:
        raise source.error(f"cannot be trained: {error}") from error
    if section.config is None:
        return pretrained_config
    if isinstance(section.config, str):
        config = _read_named_config(section.config) | {"tie_word_embeddings": False}
    else:
        config = copy.deepcopy(section.config)
    _check_shapes(parse_model_config(config), theirs, source)
    return config


def _check_shapes(ours: PretrainedConfig, theirs: PretrainedConfig, source: PretrainedSource) -> None:
    for key in ("model_type", *SHAPE_KEYS[ours.model_type]):
        here, there = getattr(ours, key), getattr(theirs, key)
        if key == "n_inner":
            here, there = (4 * c.n_embd if c.n_inner is None else c.n_inner for c in (ours, theirs))
        if here != there:
            raise source.error(
                f"has {key}={there}, and model.config has {key}={here}: leave model.config out, or correct it"
            )


def _read_named_config(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if path.is_dir():
        return _read_config(path / "config.json", name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"model.config={name!r} is no folder: correct the path, or give a hub name or an inline config")
    try:
        file = hf_hub_download(name, "config.json")
    except (OSError, ValueError) as error:  # every error of the hub's client is one of the two
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"model.config={name!r} is no folder here, and the Hugging Face hub does not give it ({reason}): "
            f"correct the name, check the network and HF_HUB_OFFLINE, or give the config inline"
        ) from error
    return _read_config(Path(file), name)


def _read_config(path: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"model.config={name!r}: cannot read {path.name} there ({error}); check the folder") from error
    if not isinstance(config, dict):
        raise UserError(f"model.config={name!r}: {path.name} holds no mapping; check the folder")
    return config


def parse_model_config(config: dict[str, Any]) -> PretrainedConfig:
    """Check an inline transformers config and make it the object that the stages are built from.

    Raises:
        UserError: another family than GPT-2 and Llama, a key that the family does not know, a value that cannot work
    """
    model_type = config.get("model_type")
    if model_type not in CONFIG_CLASSES:
        raise UserError(
            f"model.config: model_type={model_type!r} is not supported; choose one of {', '.join(CONFIG_CLASSES)}"
        )
    config_class = CONFIG_CLASSES[model_type]
    for key in config:
        if not _is_known(key, config_class):
            raise UserError(
                f"model.config: {key}={config[key]!r} is no setting of {model_type} models: "
                f"remove it or correct its spelling"
            )
    try:
        parsed = config_class.from_dict(copy.deepcopy(config))
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"model.config is no {model_type} model: {reason}; correct that value") from error
    for key, (value, why) in FIXED_VALUES.items():
        if getattr(parsed, key, value) != value:
            origin = "" if key in config else f", which is the default of {model_type},"
            raise UserError(
                f"model.config: {key}={getattr(parsed, key)!r}{origin} is not supported ({why}): "
                f"set {key}: {json.dumps(value)}"
            )
    _check_sizes(parsed)
    parsed._attn_implementation = "sdpa"
    return parsed


def _is_known(key: str, config_class: type[PretrainedConfig]) -> bool:
    return (
        key in {field.name for field in fields(config_class)}
        or key in config_class.attribute_map
        or key in CARRIED_KEYS
        or key in GenerationConfig._get_default_generation_params()
        or key.startswith("_")  # what transformers notes for itself, such as _name_or_path
    )


def _check_sizes(config: PretrainedConfig) -> None:
    """Refuse what transformers finds only when it builds or runs a layer, or does not find at all."""
    sizes = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        *(("intermediate_size", "num_key_value_heads", "head_dim") if config.model_type == "llama" else ()),
    ]
    for key in sizes:
        if getattr(config, key) < 1:
            raise UserError(f"model.config: {_own_name(config, key)}={getattr(config, key)} must be at least 1")
    activation = config.activation_function if config.model_type == "gpt2" else config.hidden_act
    if activation not in ACT2FN:
        raise UserError(
            f"model.config: activation {activation!r} is unknown to transformers; choose one of {', '.join(ACT2FN)}"
        )
    _check_multiple(config, "hidden_size", "num_attention_heads")
    if config.model_type == "llama":
        _check_multiple(config, "num_attention_heads", "num_key_value_heads")
        rope_type = config.rope_parameters["rope_type"]
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            raise UserError(
                f"model.config: rope_type={rope_type!r} is unknown to transformers; "
                f"choose one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
            )


def _check_multiple(config: PretrainedConfig, key: str, divisor: str) -> None:
    if getattr(config, key) % getattr(config, divisor):
        raise UserError(
            f"model.config: {_own_name(config, key)}={getattr(config, key)} is not a multiple of "
            f"{_own_name(config, divisor)}={getattr(config, divisor)}: change one of them"
        )


def _own_name(config: PretrainedConfig, key: str) -> str:
    return config.attribute_map.get(key, key)
