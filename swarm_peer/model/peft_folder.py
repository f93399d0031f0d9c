"""Folders of PEFT: adapters to begin with, and the description of those that a run has trained."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from torch import nn

from swarm_peer.config import AdapterSection, ModelSection
from swarm_peer.model.adapters import DOWN, all_target_names, fitting_names, lora_config, peft_name
from swarm_peer.model.families import Family
from swarm_peer.model.parameters import replace_parameter, trained_parameters
from swarm_peer.model.pretrained import ModelSource, StoredTensor

log = logging.getLogger(__name__)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "model.adapter.begin_with"
# PEFT's names of our settings.
SETTINGS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
# Fields of LoraConfig that say where adapters come from, or how they were trained: not what they compute.
NOTES = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"),
        *("peft_type", "target_modules", "exclude_modules", "fan_in_fan_out", "lora_dropout", "init_lora_weights"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "arrow_config", "megatron_core"),
        *("layers_pattern", "qalora_group_size", "ensure_weight_tying", "parent_library"),
    }
)
# Initial values that change no weight of the base.
PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")


def adapter_source(section: AdapterSection, cache_dir: Path | None) -> ModelSource | None:
    """Where the adapters are that a run begins with; None for new ones."""
    return None if section.begin_with is None else ModelSource(section.begin_with, cache_dir, key=KEY)


def resolve_adapter(section: AdapterSection, family: Family, cache_dir: Path | None = None) -> AdapterSection:
    """Adapters as a run publishes them: with the settings of those that it begins with.

    Raises:
        UserError: the folder cannot be read, its adapters are no LoRA or none of such layers, or contradict the section
    """
    if (source := adapter_source(section, cache_dir)) is None:
        return section
    config = source.read_json(ADAPTER_CONFIG)
    if config is None:
        raise source.error(f"has no {ADAPTER_CONFIG}: give the folder or hub name of adapters that PEFT has saved")
    _check_kind(config, source)
    defaults = {"rank": 8, "alpha": 8, "rslora": False, "dora": False}  # PEFT's
    found = {ours: config.get(theirs, defaults[ours]) for ours, theirs in SETTINGS.items()}
    for key, value in found.items():
        if key in section.model_fields_set and getattr(section, key) != value:
            raise source.error(
                f"has {SETTINGS[key]}={value}, and model.adapter.{key} is {getattr(section, key)}: leave that out"
            )
    matrices = _adapted(family, source)
    if "targets" in section.model_fields_set and set(fitting_names(family, section)) != set(matrices):
        raise source.error(f"adapts {', '.join(matrices)}, and model.adapter.targets says otherwise: leave targets out")
    pinned = source.pinned(ADAPTER_CONFIG)
    return AdapterSection.model_validate(found | {"targets": tuple(matrices), "begin_with": pinned})


def load_adapters(module: nn.Module, source: ModelSource) -> None:
    """Give a stage's adapters, whose base is real, the values of a folder, in fp32.

    Raises:
        UserError: tensors are missing, damaged, of other shapes than the stage's, or not finite
    """
    path = _weights(source)
    with source.opened(ADAPTER_WEIGHTS, path) as content:
        stored = set(content.keys())
    for name, parameter in trained_parameters(module).items():
        if (key := peft_name(name)) not in stored:
            raise source.error(f"lacks the tensor {key}: give adapters of all layers of model.pretrained")
        replace_parameter(module, name, StoredTensor(source, ADAPTER_WEIGHTS, path, key, parameter.shape).whole())


def describe_adapter(model: ModelSection, family: Family) -> dict[str, Any]:
    """The content of adapter_config.json, by which PEFT loads adapters and finds their base."""
    assert model.adapter is not None
    assert model.pretrained is not None
    source = ModelSource(model.pretrained)
    name, _, revision = model.pretrained.partition("@")
    base = name if source.folder is None else str(source.folder.absolute())
    notes = {"base_model_name_or_path": base, "revision": (revision or None) if source.folder is None else None}
    config: Any = lora_config(family, model.adapter, inference_mode=True, **notes)
    content: dict[str, Any] = config.to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}


def _check_kind(config: dict[str, Any], source: ModelSource) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise source.error(f"has adapters of the kind {kind!r}, and only LORA can be trained: give others")
    if (begun := config.get("init_lora_weights")) not in PLAIN_BEGINNINGS:
        raise source.error(
            f"has init_lora_weights={begun!r}, which changes the base as well: convert it with PEFT "
            f"(path_initial_model_for_weight_conversion), and give the result"
        )
    for key, value in config.items():
        if key not in (*NOTES, *SETTINGS.values()) and value and value != "none":
            raise source.error(f"has {key}={value!r:.80}, which is not supported: give adapters without it")


def _weights(source: ModelSource) -> Path:
    if (path := source.fetch(ADAPTER_WEIGHTS)) is None:
        raise source.error(f"has no {ADAPTER_WEIGHTS}: give adapters that PEFT has saved as safetensors")
    return path


def _adapted(family: Family, source: ModelSource) -> list[str]:
    """The names, within a layer, of the matrices that the folder has adapters of. That all layers have them, the
    stages find out.
    """
    known = all_target_names(family)
    adapter = re.compile(rf"{re.escape(peft_name(family.body))}\.{family.layers}\.\d+\.(.+?)\.lora_[a-z_A-Z]+(\..+)?")
    found = set()
    with source.opened(ADAPTER_WEIGHTS, _weights(source)) as content:
        for name in content.keys():  # noqa: SIM118
            match = adapter.fullmatch(name)
            if match is None or match[1] not in known:
                raise source.error(
                    f"has the tensor {name}, which belongs to no matrix of the layers of {family.config.model_type} "
                    f"models: give adapters of model.pretrained that change its layers alone"
                )
            found.add(match[1])
    if not found:
        raise source.error(f"has no adapters ({DOWN}) in {ADAPTER_WEIGHTS}: give others")
    return sorted(found)
