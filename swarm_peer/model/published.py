"""The config.json of a published model, made into a config that a manifest may hold.

Other programs write many keys into these files that transformers ignores. architecture.py is strict with the keys that
a person writes into a manifest. Of those that come with a model, only one that transformers would honour is an error.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from swarm_peer.errors import UserError
from swarm_peer.model.families import FAMILIES, Family, family_class
from swarm_peer.model.families.base import CARRIED_KEYS, MAX_LAYERS, MAX_SIZE, shapes_only

log = logging.getLogger(__name__)

# Keys that transformers reads while it loads a model, before there is one that could ask for them.
LOADING_KEYS: Mapping[str, str] = {
    "quantization_config": "its weights are quantised",
    "per_layer_config": "its layers differ from each other",
}
# Remedies for some of them.
REMEDIES: Mapping[str, str] = {
    "quantization_config": "give the model that it was made of, and have model.base quantise it: int8 or nf4",
}
# Settings of other tasks than to predict the next token. They may be long.
_OTHER_TASKS = frozenset({"id2label", "label2id", "num_labels", "problem_type", "task_specific_params"})
# Settings of rotary positions, as transformers has them today, and by the name that old files have for the type.
ROPE_KEYS = frozenset({*RopeParameters.__annotations__, "type"})
# num_experts, num_local_experts, n_routed_experts, num_experts_per_tok
_EXPERTS = re.compile(r"(^|_)experts?(_|$)")


def settings_of(family: type[Family]) -> list[str]:
    """The settings of a family's models, by the family's own names and by those common to all families."""
    return [*(field.name for field in fields(family.config_class)), *family.config_class.attribute_map]


def is_known(key: str, family: type[Family]) -> bool:
    """Whether a key is a setting of a family's models, or one that all kinds of models are known to carry."""
    return (
        key in settings_of(family)
        or key in CARRIED_KEYS | family.carried_keys
        or key in GenerationConfig._get_default_generation_params()
        or key.startswith("_")  # what transformers notes for itself, such as _name_or_path
    )


def unknown_rope_keys(config: Mapping[str, Any], family: type[Family]) -> Iterator[tuple[str, str]]:
    """The keys within the rotary positions that transformers does not know, each with its section's name."""
    for name in ("rope_scaling", "rope_parameters"):
        section = config.get(name)
        for key, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, dict) and "layer_types" in settings_of(family):  # for one kind of layers
                yield from ((f"{name}.{key}", inner) for inner in value if inner not in ROPE_KEYS)
            elif key not in ROPE_KEYS:
                yield name, key


def check_sizes(config: Mapping[str, Any], family: type[Family]) -> None:
    """Refuse sizes beyond reason before anybody makes something of that size.

    Raises:
        UserError: there is one
    """
    own_names = family.config_class.attribute_map
    for size in family.sizes:
        most = MAX_LAYERS if size == "num_hidden_layers" else MAX_SIZE
        for key in {size, own_names.get(size, size)}:
            if isinstance(value := config.get(key), (int, float)) and value > most:
                raise UserError(f"model.config: {key}={value} must be at most {most}")


def as_trained(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A published model's config as a manifest holds it: with known keys alone, and with embedding and head apart.

    Of a model that also takes images, it is the part for text. Keys that transformers ignores are left out; the log
    says which. A padding token beyond the embedding is none.

    Args:
        name: of the model, for the log

    Raises:
        UserError: the model belongs to no family of ours, or has a key that changes what it computes
    """
    config = _text_part(config, name)
    family = family_class(config.get("model_type"))
    check_sizes(config, family)
    settings = settings_of(family)
    known = {
        key: copy.deepcopy(value)
        for key, value in config.items()
        if is_known(key, family) and key not in _OTHER_TASKS and (value is not None or key in settings)
    }
    # A key that is null, false or empty changes nothing.
    further = {key: value for key, value in config.items() if value and not is_known(key, family)}
    _check_computation(known, further, family)
    known["tie_word_embeddings"] = False  # they belong to different stages
    ignored = further | _take_ignored(known, family)
    if ignored:
        keys = ",".join(f"{key}={value!r:.60}" for key, value in ignored.items())
        reason = f"they change nothing that transformers' {family.config_class.model_type} models compute"
        log.warning("config_keys_ignored model=%s keys=%s reason=%s", name, keys, reason)
    return known


def _take_ignored(known: dict[str, Any], family: type[Family]) -> dict[str, Any]:
    """Take known keys away whose values transformers ignores. Returns them."""
    ignored = {}
    for key in family.passed_over & known.keys():
        usual, _ = family.fixed_values[key]
        if known[key] and known[key] != usual:
            ignored[key] = known[key]
        known[key] = usual
    for section, key in list(unknown_rope_keys(known, family)):
        name, _, kind = section.partition(".")
        value = (known[name][kind] if kind else known[name]).pop(key)
        ignored |= {f"{section}.{key}": value} if value is not None else {}
    vocab_size, padding = known.get("vocab_size", family.config_class().vocab_size), known.get("pad_token_id")
    if isinstance(padding, int) and isinstance(vocab_size, int) and not -vocab_size <= padding < vocab_size:
        ignored["pad_token_id"] = padding
        known["pad_token_id"] = None
    return ignored


def _text_part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config of the language model within one that also takes images."""
    kind, part = config.get("model_type"), config.get("text_config")
    if not isinstance(part, dict) or not isinstance(kind, str):
        return config
    for family in FAMILIES.values():
        model_type = family.config_class.model_type
        if kind in family.wrappers and part.get("model_type", model_type) == model_type:
            log.warning("images_left_out model=%s reason=of a %s model, only the text's part is trained", name, kind)
            around = {key: config[key] for key in LOADING_KEYS if key in config}
            return around | part | {"model_type": model_type}
    return config


def _check_computation(known: Mapping[str, Any], further: Mapping[str, Any], family: type[Family]) -> None:
    """Refuse keys that are no settings of the family's, and change what transformers would compute all the same.

    Raises:
        UserError: there is one
    """
    asked_for: set[str] | None = None
    for key, value in further.items():
        reason = LOADING_KEYS.get(key)
        if key == "auto_map":  # names code that transformers runs for unknown kinds of models, or where it is told to
            continue
        if reason is None and _EXPERTS.search(key) and isinstance(value, int) and value > 1:
            reason = "it has experts"
        if reason is None and isinstance(value, dict) and ("model_type" in value or "hidden_size" in value):
            reason = "it holds another model"
        if reason is None:
            asked_for = _asked_for({**known, **further}, family) if asked_for is None else asked_for
            reason = "transformers honours it" if key in asked_for else None
        if reason is not None:
            model_type = family.config_class.model_type
            raise UserError(
                f"config.json has {key}={value!r:.80}, which changes what a {model_type} model computes ({reason}), "
                f"and that is not supported: {REMEDIES.get(key, 'choose another model')}"
            )


def _asked_for(config: dict[str, Any], family: type[Family]) -> set[str]:
    """The keys of a config that transformers asks for while it builds and runs the model, on the meta device.

    A key that its config class does not declare is an attribute like any other to transformers: it changes something if
    anybody asks for it.
    """
    asked: set[str] = set()

    class AskedConfig(family.config_class):  # type: ignore[misc, name-defined]
        def __getattribute__(self, key: str) -> Any:
            asked.add(key)
            return super().__getattribute__(key)

    # Whatever fails here fails again, and in words, where the config is checked.
    try:
        parsed: PretrainedConfig = family.config_class.from_dict(copy.deepcopy(config))
        parsed._attn_implementation = family(parsed).attention_implementation
        kinds = sorted({family(parsed).layer_kind(index) for index in range(parsed.num_hidden_layers)})
        parsed.num_hidden_layers = len(kinds)  # one layer of each kind
        if hasattr(parsed, "layer_types"):
            parsed.layer_types = kinds
        parsed.__class__ = AskedConfig
        with shapes_only():
            tokens_BT, mask_11TT = torch.zeros((1, 2), dtype=torch.int64), torch.zeros((1, 1, 2, 2))
            family.model_class(parsed)(input_ids=tokens_BT, attention_mask=mask_11TT, use_cache=False)
    except Exception as error:
        log.debug("model_not_tried reason=%s", error)
    return asked
