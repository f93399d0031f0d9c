"""The model families that can be trained, one file each: the only place that tells one from another.

A further family is one file here, which declares a Family, and its class in the list below.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from swarm_peer.errors import UserError
from swarm_peer.model.families.base import Cost, Family
from swarm_peer.model.families.gemma2 import Gemma2Family
from swarm_peer.model.families.gemma3 import Gemma3Family
from swarm_peer.model.families.gpt2 import GPT2Family
from swarm_peer.model.families.llama import LlamaFamily
from swarm_peer.model.families.mistral import MistralFamily
from swarm_peer.model.families.qwen2 import Qwen2Family
from swarm_peer.model.families.qwen3 import Qwen3Family

__all__ = ["FAMILIES", "Cost", "Family", "family_class", "family_of"]

_CLASSES: tuple[type[Family], ...] = (
    *(GPT2Family, LlamaFamily, MistralFamily, Qwen2Family, Qwen3Family, Gemma2Family, Gemma3Family),
)
FAMILIES = {family.config_class.model_type: family for family in _CLASSES}


def family_class(model_type: object) -> type[Family]:
    """The family that a config's `model_type` names.

    Raises:
        UserError: no family is called so
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"model.config: model_type={model_type!r} is not supported; choose one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def family_of(config: PretrainedConfig, write_width: int | None = None) -> Family:
    """The family of a config that parse_model_config returned.

    Args:
        write_width: see Family
    """
    return family_class(config.model_type)(config, write_width)
