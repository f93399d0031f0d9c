"""A trained model as a Hugging Face folder, which AutoModelForCausalLM.from_pretrained loads, or adapters as PEFT's."""

from __future__ import annotations

import glob
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from swarm_peer.config import ModelSection
from swarm_peer.errors import SwarmError, UserError
from swarm_peer.files import sync
from swarm_peer.model.adapters import add_adapters, merge_adapters, peft_name
from swarm_peer.model.boundary import frozen_values
from swarm_peer.model.families import family_of
from swarm_peer.model.parameters import replace_parameter, trained_parameters
from swarm_peer.model.partition import StageSpec
from swarm_peer.model.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, describe_adapter
from swarm_peer.model.pretrained import CONFIG_FILE, WEIGHTS_FILE, ModelSource, load_pretrained
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import is_weight
from swarm_peer.model.stage import StageModule

README = "README.md"
# The weights of a model that is none of Hugging Face's.
OWN_WEIGHTS_FILE = "swarm.safetensors"
NOT_PLAIN = "model.boundary.maxout has layers at the boundaries that no Hugging Face model has: there is none to export"
# Nobody writes a model any more whose files have not changed for so long.
LEFTOVER_S = 3600.0


class NotWritten(UserError):
    """The disk did not take a model: there may be room for it later."""


class NotFiniteWeights(SwarmError):
    """The weights of a model are not finite, so nobody could use it."""


def check_folder(folder: Path) -> None:
    """Check that a model can be written to this folder.

    Raises:
        UserError: it is in use
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and is no empty folder: name another one, or remove it")


def export_model(
    resolved: ResolvedManifest,
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    merge: bool = False,
    cache_dir: Path | None = None,
    readme: str = "",
) -> None:
    """Write config.json and model.safetensors, or of adapters what PEFT has instead of them.

    A model that has maxout at its boundaries is none of Hugging Face's: of it only the weights are written, under their
    own names. The folder appears complete or not at all.

    Args:
        tensors: the union of all stages' states; entries of optimizers are left out. If each stage has one layer only,
            which its layers share, each layer gets a copy of it under its own name
        folder: must not exist, or be empty
        merge: add adapters to the pretrained weights, as these were published, for a model without adapters
        cache_dir: where pretrained weights from the hub are kept
        readme: text of a README.md beside them, if there is to be one

    Raises:
        UserError: the folder is not empty, tensors are missing, unknown, or of another shape than the model's, or the
            pretrained weights cannot be read
        NotFiniteWeights: there is nothing to use in it
        NotWritten: the disk does not take it
    """
    check_folder(folder)
    model = resolved.manifest.model
    weights = {name: value for name, value in tensors.items() if is_weight(name)}
    if model.boundary is not None:
        _check_complete(weights, _boundary_template(resolved))
    if not model.is_plain:
        _write(folder, {README: f"{readme}\n{NOT_PLAIN}.\n"}, OWN_WEIGHTS_FILE, weights)
        return
    whole = StageModule(resolved.config, StageSpec(0, 1, 0, resolved.config.num_hidden_layers), ModelSection(config={}))
    if model.share_layers:
        weights = _unshare(weights, f"{whole.family.body}.{whole.family.layers}", resolved.specs)
    names = (CONFIG_FILE, WEIGHTS_FILE)
    if model.boundary is not None:
        weights = _widen(resolved, weights, whole)
    if model.adapter is None:
        _check_complete(weights, whole.state_dict())
    else:
        add_adapters(whole, model.adapter)
        _check_complete(weights, trained_parameters(whole))
        if merge:
            weights = _merge(resolved, weights, cache_dir)
        else:
            weights = {peft_name(name): value for name, value in weights.items()}
            names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    content = _model_config(resolved) if names[0] == CONFIG_FILE else describe_adapter(model, whole.family)
    texts = {names[0]: json.dumps(content, indent=2, sort_keys=True) + "\n"} | ({README: readme} if readme else {})
    _write(folder, texts, names[1], weights)


def _boundary_template(resolved: ResolvedManifest) -> dict[str, Tensor]:
    """The weights of all stages, which are not those of the Hugging Face model."""
    modules = [StageModule(resolved.config, spec, resolved.manifest.model) for spec in resolved.specs]
    return {name: value for module in modules for name, value in module.state_dict().items()}


def _widen(resolved: ResolvedManifest, weights: Mapping[str, Tensor], whole: StageModule) -> dict[str, Tensor]:
    """The weights of the model that writes all of the residual stream: zeros where stages write nothing.

    Of a token's embedding the values that no stage writes are those that all stages look up.
    """
    widened = dict(weights)
    for name, expected in whole.state_dict().items():
        narrow = weights[name]
        if narrow.shape == expected.shape:
            continue
        wide = widened[name] = torch.zeros(expected.shape)
        wide[tuple(slice(size) for size in narrow.shape)] = narrow
    family, width = whole.family, resolved.boundary_width
    widened[f"{family.body}.{family.tokens}.weight"][:, width:] = frozen_values(family, width, resolved.manifest.seed)
    return widened


def _model_config(resolved: ResolvedManifest) -> dict[str, Any]:
    content = {key: value for key, value in resolved.inline_config.items() if key != "torch_dtype"}
    return content | {
        "architectures": [family_of(resolved.config).model_class.__name__],
        "dtype": "float32",
        "transformers_version": transformers.__version__,
    }


def _merge(resolved: ResolvedManifest, adapters: Mapping[str, Tensor], cache_dir: Path | None) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes what the one with them does; stage by stage."""
    model, merged = resolved.manifest.model, dict[str, Tensor]()
    assert model.adapter is not None
    assert model.pretrained is not None
    for spec in resolved.specs:
        module = StageModule(resolved.config, spec, model)
        load_pretrained(module, module.family, ModelSource(model.pretrained, cache_dir))
        add_adapters(module, model.adapter)
        for name in trained_parameters(module):
            replace_parameter(module, name, adapters[name])
        merged |= merge_adapters(module)
    return merged


def _write(folder: Path, texts: Mapping[str, str], weights_name: str, weights: dict[str, Tensor]) -> None:
    """Write a folder of texts, by their files' names, and weights."""
    _remove_leftovers(folder)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        save_file(weights, partial / weights_name, metadata={"format": "pt"})
        # safetensors makes a file that nobody else can read.
        shutil.copymode(partial / next(iter(texts)), partial / weights_name)
        # Peers go once the model is saved: from then on it must survive a power failure.
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.replace(folder)
        sync(folder.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise NotWritten(f"{folder}: cannot be written ({error}); check space and permissions") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed have left of this model: each is as large as the model."""
    for partial in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
        try:
            newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
        except OSError:  # it has gone meanwhile, or is another user's
            continue
        if newest < time.time() - LEFTOVER_S:
            shutil.rmtree(partial, ignore_errors=True)


def _unshare(weights: Mapping[str, Tensor], layers_path: str, specs: Sequence[StageSpec]) -> dict[str, Tensor]:
    """Each stage's one layer, copied to the names of all of them."""
    unshared = {}
    for name, value in weights.items():
        layer, _, suffix = name.removeprefix(f"{layers_path}.").partition(".")
        if not name.startswith(f"{layers_path}."):
            unshared[name] = value
            continue
        spec = next((spec for spec in specs if str(spec.first_layer) == layer), None)
        if spec is None:
            raise UserError(f"tensor {name} belongs to no stage's first layer: do stages and states belong together?")
        unshared |= {f"{layers_path}.{index}.{suffix}": value for index in spec.layers}
    return unshared


def _check_complete(weights: dict[str, Tensor], template: Mapping[str, Tensor]) -> None:
    """Compare with the model's state dict, and give each tensor memory of its own, as safetensors wants it.

    A tensor that has its own already keeps it. It may lie on a disk: the model may be larger than the memory here.
    """
    if missing := sorted(template.keys() - weights.keys()):
        raise UserError(
            f"the model lacks {len(missing)} of its {len(template)} tensors, such as {missing[0]}: "
            f"export needs the states of all stages"
        )
    if extra := sorted(weights.keys() - template.keys()):
        raise UserError(
            f"{len(extra)} tensors are none of the model's, such as {extra[0]}: do config and states belong together?"
        )
    taken = set[int]()
    for name, expected in template.items():
        if weights[name].shape != expected.shape:
            raise UserError(
                f"tensor {name} has shape {tuple(weights[name].shape)}, and the config says {tuple(expected.shape)}: "
                f"do config and states belong together?"
            )
        weight = weights[name].detach().to("cpu", torch.float32).contiguous()
        if not bool(weight.isfinite().all()):
            raise NotFiniteWeights(f"tensor {name} holds values that are not finite: the weights have diverged")
        weights[name] = weight.clone() if weight.data_ptr() in taken else weight
        taken.add(weights[name].data_ptr())
