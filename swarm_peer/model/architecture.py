"""Which models can be trained: from what a person names to a transformers config that is known to work.

Owns the checks of a model's config. Knows nothing of stages, nor what tells one family from another: see families/.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swarm_peer.config import ModelSection
from swarm_peer.config_errors import suggestion
from swarm_peer.errors import UserError, first_line, last_line
from swarm_peer.model.families import Family, family_class, family_of
from swarm_peer.model.families.base import FIXED_VALUES, RANGES, shapes_only
from swarm_peer.model.peft_folder import resolve_adapter
from swarm_peer.model.pretrained import ModelSource, is_tied
from swarm_peer.model.published import ROPE_KEYS, as_trained, check_sizes, is_known, settings_of, unknown_rope_keys


def resolve_model(section: ModelSection, cache_dir: Path | None = None) -> ModelSection:
    """A run's model as it is published: with an inline config, and with pretrained weights that cannot change.

    Raises:
        UserError: see resolve_model_config and resolve_adapter
    """
    if section.pretrained is not None:
        section = section.model_copy(update={"pretrained": ModelSource(section.pretrained, cache_dir).pinned()})
    config = resolve_model_config(section, cache_dir)
    section = section.model_copy(update={"config": config})
    if section.adapter is None and section.pretrained is not None and not section.untie:
        _check_tied(family_of(parse_model_config(config)), ModelSource(section.pretrained, cache_dir))
    if section.adapter is not None and section.pretrained is not None:
        family, source = family_of(parse_model_config(config)), ModelSource(section.pretrained, cache_dir)
        if source.read_config().get("model_type") in family.wrappers:
            # Its layers have other names there, and PEFT loads adapters that fit none without an error.
            raise source.error("also takes images, and adapters are for models of text alone: give one of these")
        section = section.model_copy(update={"adapter": resolve_adapter(section.adapter, family, cache_dir)})
    return section


def _check_tied(family: Family, source: ModelSource) -> None:
    """Refuse to train two matrices as if they were the one that they have been, unless that is meant."""
    if not is_tied(family, source):
        return
    config = family.config
    more, layers = config.vocab_size * config.hidden_size, range(config.num_hidden_layers)
    body = family.embedding_cost().parameters + sum(family.layer_cost(index, 1).parameters for index in layers)
    raise source.error(
        f"has one matrix for embedding and head, which belong to different stages here: all of it trained, they become "
        f"two, of {more / 1e6:.0f} million parameters more ({more / body:.0%} of the model), which learn apart. Train "
        f"adapters, which leave both as they are (model.adapter: {{}}), or set model.untie to true"
    )


def resolve_model_config(section: ModelSection, cache_dir: Path | None = None) -> dict[str, Any]:
    """Turn what `model.config` or `model.pretrained` names into an inline transformers config, to be published.

    Reads a folder's config.json, or the hub's (from the cache alone where HF_HUB_OFFLINE is set). A config that stands
    in a manifest is not checked: parse_model_config does that. One that comes with a model may have keys that
    transformers ignores (published.py).

    Raises:
        UserError: the folder, its config.json or the hub's model cannot be read, or the model is none that can be
            trained or has other shapes than `model.config`
    """
    config = copy.deepcopy(section.config)
    if isinstance(config, str):
        # A name that looks like the hub's may be a folder's here.
        name = os.path.join(".", config) if os.path.isdir(config) else config
        config = _published(ModelSource(name, cache_dir, key="model.config"))
    if section.pretrained is None:
        assert config is not None, "a model has a config, if nothing pretrained"
        return config
    source = ModelSource(section.pretrained, cache_dir)
    pretrained_config = _published(source)
    if config is None:
        return pretrained_config
    _check_shapes(parse_model_config(config), parse_model_config(pretrained_config), source)
    return config


def _published(source: ModelSource) -> dict[str, Any]:
    """The config that comes with a model, known to work."""
    config = source.read_config()
    try:
        config = as_trained(config, source.name)
        parse_model_config(config)
    except UserError as error:
        raise source.error(f"cannot be trained: {error}") from error
    return config


def _check_shapes(ours: PretrainedConfig, theirs: PretrainedConfig, source: ModelSource) -> None:
    ours_by_key, theirs_by_key = ({"model_type": c.model_type} | family_of(c).shapes() for c in (ours, theirs))
    for key, here in ours_by_key.items():
        there = theirs_by_key[key]
        if here != there:
            raise source.error(
                f"has {key}={there}, and model.config has {key}={here}: leave model.config out, or correct it"
            )


def parse_model_config(config: dict[str, Any]) -> PretrainedConfig:
    """Check an inline transformers config and make it the object that the stages are built from.

    Raises:
        UserError: no family of FAMILIES, a key that the family does not know, a value that cannot work
    """
    family = family_class(config.get("model_type"))
    model_type = family.config_class.model_type
    for key in config:
        if not is_known(key, family):
            raise UserError(
                f"model.config: {key}={config[key]!r} is no setting of {model_type} models: "
                f"remove it or correct its spelling{suggestion(key, settings_of(family))}"
            )
    for section, key in unknown_rope_keys(config, family):
        raise UserError(
            f"model.config: {section}.{key} is no setting of rotary positions: "
            f"remove it or correct its spelling{suggestion(key, ROPE_KEYS)}"
        )
    check_sizes(config, family)
    try:
        parsed = family.config_class.from_dict(copy.deepcopy(config))
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        reason = last_line(error)
        if isinstance(error, AttributeError) and isinstance(
            dtype := config.get("dtype", config.get("torch_dtype")), str
        ):
            reason = f"dtype={dtype!r} is no type of torch's, such as float32"
        raise UserError(f"model.config is no {model_type} model: {reason}; correct that value") from error
    for key, (value, why) in {**FIXED_VALUES, **family.fixed_values}.items():
        found = getattr(parsed, key, value)
        if found != value and (found or value):  # false and null both turn a setting off
            origin = "" if key in config else f", which is the default of {model_type},"
            raise UserError(
                f"model.config: {key}={found!r}{origin} is not supported ({why}): set {key}: {json.dumps(value)}"
            )
    _check_sizes(family(parsed))
    for key, value in config.items():
        try:
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError) as error:  # as YAML has them, and the manifest that peers read cannot
            raise UserError(
                f"model.config: {key}={value!r:.80} is no finite number, text or list: correct it"
            ) from error
    parsed._attn_implementation = family(parsed).attention_implementation
    return parsed


def _check_sizes(family: Family) -> None:
    """Refuse what transformers finds only when it builds or runs a layer, or does not find at all."""
    config = family.config
    for key in family.sizes:
        if (size := getattr(config, key)) is not None and size < 1:
            raise UserError(f"model.config: {_own_name(config, key)}={size} must be at least 1")
    _check_ranges(family)
    kinds = {family.layer_kind(index) for index in range(config.num_hidden_layers)}
    if unknown := sorted(kinds - set(family.kinds)):
        raise UserError(
            f"model.config: layer_types names {unknown[0]}, and {config.model_type} has none but "
            f"{', '.join(family.kinds)}: correct it"
        )
    if "sliding_attention" in kinds and ((window := config.sliding_window) is None or window < 1):
        raise UserError(
            f"model.config: sliding_window={window} must be at least 1, since layers have sliding attention"
        )
    activation = getattr(config, family.activation)
    if activation not in ACT2FN:
        raise UserError(
            f"model.config: activation {activation!r} is unknown to transformers; choose one of {', '.join(ACT2FN)}"
        )
    for key, divisor in family.multiples:
        if getattr(config, key) % getattr(config, divisor):
            raise UserError(
                f"model.config: {_own_name(config, key)}={getattr(config, key)} is not a multiple of "
                f"{_own_name(config, divisor)}={getattr(config, divisor)}: change one of them"
            )
    try:
        with shapes_only():
            family.build_embeddings()
    except AssertionError as error:  # torch's, which names no value
        raise UserError(
            f"model.config: pad_token_id={config.pad_token_id} is outside of the vocabulary of {config.vocab_size}: "
            f"correct it, or set it to null"
        ) from error
    _check_positions(family)


def _check_ranges(family: Family) -> None:
    """Refuse numbers with which no layer can compute; transformers finds them when it builds or runs one, or never."""
    for key in settings_of(type(family)):
        value = getattr(family.config, key, None)
        is_off = value is None and key.endswith("softcapping")
        for low, high in (RANGES[end] for end in RANGES if key.endswith(end) and not is_off):
            if value is None or not low <= value <= high:
                raise UserError(f"model.config: {key}={value} must be {low:g} to {high:g}")


def _check_positions(family: Family) -> None:
    """Refuse rotary positions that transformers cannot compute, or not those that the layers need."""
    parameters = getattr(family.config, "rope_parameters", None)
    # Wrong values make transformers raise nearly anything.
    try:
        for rope_type in family.rope_types():
            if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
                raise UserError(
                    f"model.config: rope_type={rope_type!r} is unknown to transformers; "
                    f"choose one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"
                )
        reason = family.wrong_positions()
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    if reason:
        raise UserError(
            f"model.config: rotary positions cannot be computed with {parameters!r:.200} ({reason}): correct "
            f"rope_theta, rope_scaling or rope_parameters"
        )


def _own_name(config: PretrainedConfig, key: str) -> str:
    name: str = config.attribute_map.get(key, key)
    return name
