"""Single parameters of a module: how they get their values, by their names."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name, in the order of the module's own.

    It leaves out frozen parameters (`requires_grad` is False) and all buffers: a model family makes its own from the
    config, and those of a frozen base belong to the base.
    """
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def replace_parameter(module: nn.Module, name: str, values: Tensor) -> None:
    """Give a parameter other values, perhaps of another type or on another device."""
    owner, _, key = name.rpartition(".")
    parameter = nn.Parameter(values, module.get_parameter(name).requires_grad)
    module.get_submodule(owner).register_parameter(key, parameter)


def seeded(seed: int, name: str) -> torch.Generator:
    """The generator of a parameter's initial values: any cut of a model, on any peer, draws the same ones."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # torch takes 63 bits
