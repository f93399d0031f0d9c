"""Low-rank adapters (LoRA, DoRA) on a frozen base: PEFT's own layers, put into a stage's module.

An adapter's parameters are named as in the module, by the layer's number in the whole model. So the adapters of all
stages together are those of the whole model, however it is cut, and each begins alike on every peer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swarm_peer.config import AdapterSection
from swarm_peer.config_errors import suggestion
from swarm_peer.errors import UserError
from swarm_peer.model.families import Cost, Family
from swarm_peer.model.frozen_base import without_values
from swarm_peer.model.parameters import replace_parameter, seeded, trained_parameters
from swarm_peer.model.stage import StageModule

if TYPE_CHECKING:
    from peft import LoraConfig

# Under which PEFT files an adapter that nobody has named.
ADAPTER_NAME = "default"
# The parts of an adapter, by a word in their parameters' names; the third is DoRA's.
DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"


def all_target_names(family: Family) -> list[str]:
    """The names of the matrices of a layer, within it."""
    return sorted({name for index in _distinct_layers(family) for name in _matrices(family, index)})


def fitting_names(family: Family, section: AdapterSection) -> list[str]:
    """The names of the matrices of a layer that have adapters, within it.

    Raises:
        UserError: see target_names
    """
    targets = target_names(family, section)
    return [name for name in all_target_names(family) if _fits(name, targets)]


def target_names(family: Family, section: AdapterSection) -> list[str]:
    """The names of the matrices that have adapters, as PEFT takes them: each stands for all that end in it.

    Raises:
        UserError: a name fits no matrix of the model's layers
    """
    matrices = all_target_names(family)
    if section.targets == "all-linear":
        # Spelled out, since PEFT would take those of a part for images as well.
        return sorted({name.rpartition(".")[2] for name in matrices})
    for target in section.targets:
        if not any(_fits(name, [target]) for name in matrices):
            raise UserError(
                f"model.adapter.targets: {target!r} is no matrix of the layers of {family.config.model_type} models: "
                f"choose among {', '.join(matrices)}{suggestion(target, matrices)}"
            )
    return list(section.targets)


def adapter_cost(family: Family, section: AdapterSection, layers: Iterable[int]) -> Cost:
    """The cost of the adapters of some layers. A DoRA's products with whole matrices, once a pass, are not counted.

    Raises:
        UserError: see target_names
    """
    targets = target_names(family, section)
    by_kind = {}
    for index in _distinct_layers(family):
        sizes = [size for name, size in _matrices(family, index).items() if _fits(name, targets)]
        pairs = sum(section.rank * (inputs + outputs) for inputs, outputs in sizes)
        magnitudes = sum(outputs for _, outputs in sizes) if section.dora else 0
        largest = max(section.rank * max(size) for size in sizes)
        by_kind[family.layer_kind(index)] = Cost(pairs + magnitudes, 2 * pairs, largest)
    total = Cost(0, 0, 0)
    for index in layers:
        total += by_kind[family.layer_kind(index)]
    return total


def num_adapted(family: Family, section: AdapterSection, index: int) -> int:
    """How many matrices of a layer have adapters."""
    targets = target_names(family, section)
    return sum(_fits(name, targets) for name in _matrices(family, index))


def lora_config(family: Family, section: AdapterSection, **notes: Any) -> LoraConfig:
    """The adapters as PEFT describes them.

    Args:
        notes: further fields, of no effect on what the adapters compute, or instead of what follows from the family
    """
    from peft import LoraConfig  # takes seconds to import, and most runs do without

    alpha: Any = int(section.alpha) if section.alpha.is_integer() else section.alpha  # PEFT declares an int
    notes = {"fan_in_fan_out": _has_conv1d(family.hollow_layer(0))} | notes
    return LoraConfig(
        r=section.rank,
        lora_alpha=alpha,
        use_rslora=section.rslora,
        use_dora=section.dora,
        target_modules=target_names(family, section),
        task_type="CAUSAL_LM",
        **notes,
    )


def add_adapters(module: StageModule, section: AdapterSection) -> None:
    """Freeze a stage, and give it adapters. Only these have gradients from now on; their values are anything."""
    from peft import inject_adapter_in_model

    # DoRA begins with the lengths of the base's rows. Other adapters ask for its type and device alone.
    showing = nullcontext() if section.dora else without_values(module)
    # PEFT draws values with torch's global generator, which nobody else shall notice.
    with torch.random.fork_rng(devices=[]), showing:
        config = lora_config(module.family, section, fan_in_fan_out=_has_conv1d(module))
        inject_adapter_in_model(config, module, ADAPTER_NAME)


def initialise_adapters(module: StageModule, seed: int) -> None:
    """Give adapters on real base weights the values with which they change nothing, in fp32.

    A random value depends on the seed and on the parameter's name alone. A DoRA's magnitudes are those of the base.
    """
    for name, parameter in trained_parameters(module).items():
        if f".{DOWN}." in name:
            # As PEFT does it: the default of nn.Linear.
            bound = 1 / math.sqrt(parameter.shape[1])
            values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=seeded(seed, peft_name(name)))
        elif f".{UP}." in name:
            values = torch.zeros(parameter.shape)
        else:
            values = parameter.detach().float()
        replace_parameter(module, name, values)


def clear_adapters(module: StageModule) -> None:
    """Give adapters zeros, on the CPU; the base may be on the meta device."""
    for name, parameter in trained_parameters(module).items():
        replace_parameter(module, name, torch.zeros(parameter.shape))


def peft_name(name: str) -> str:
    """The name that PEFT's files have for a parameter of a module with adapters."""
    path, _, last = name.partition(f".{ADAPTER_NAME}.")
    return f"base_model.model.{path}" + (f".{last}" if last and not path.endswith(MAGNITUDE) else "")


@torch.no_grad()
def merge_adapters(module: StageModule) -> dict[str, Tensor]:
    """Add the adapters of a stage to its base, and give the parameters that the stage has without them."""
    from peft.tuners.lora import LoraLayer

    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.merge()
    trained = trained_parameters(module)
    return {
        name.replace(".base_layer.", "."): value.detach()
        for name, value in module.named_parameters()
        if name not in trained
    }


def _distinct_layers(family: Family) -> list[int]:
    """A layer of each kind."""
    kinds = [family.layer_kind(index) for index in range(family.config.num_hidden_layers)]
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def _matrices(family: Family, index: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each matrix of a layer, by name within it."""
    found = {}
    for name, module in family.hollow_layer(index).named_modules():
        if isinstance(module, nn.Linear):
            found[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            found[name] = (module.weight.shape[0], module.weight.shape[1])
    return found


def _has_conv1d(module: nn.Module) -> bool:
    return any(isinstance(each, Conv1D) for each in module.modules())


def _fits(name: str, targets: Iterable[str]) -> bool:
    """Whether PEFT gives this matrix an adapter."""
    return any(f".{name}".endswith(f".{target}") for target in targets)
