"""What a peer works out before it takes part: its device, its averager, how much it may hold, what it may read."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.partition import StageSpec, model_costs, stage_cost, stages_of
from swarm_peer.model.stage import StageModule
from swarm_peer.runtime.averaging import GradientAverager
from swarm_peer.runtime.dht import SwarmDHT
from swarm_peer.runtime.documents import find_files, local_folder

# fp32 tensors of one value a parameter: weights, gradients, two of AdamW, averaging buffers.
VALUES_PER_PARAMETER = 5
# Hidden-sized fp32 tensors that the backward pass of one transformer layer keeps, roughly.
KEPT_TENSORS_PER_LAYER = 24


def stage_costs(manifest: RunManifest) -> list[float]:
    """Forward FLOPs of a token in each stage."""
    assert isinstance(manifest.model.config, dict)
    costs = model_costs(parse_model_config(manifest.model.config), manifest.data.sequence_length)
    return [float(stage_cost(costs, spec, manifest.model.share_layers).forward_flops) for spec in stages_of(manifest)]


def stage_memory(manifest: RunManifest) -> list[float]:
    """Bytes that each stage takes at least, with one microbatch."""
    assert isinstance(manifest.model.config, dict)
    costs = model_costs(parse_model_config(manifest.model.config), manifest.data.sequence_length)
    return [
        float(sum(_memory_bytes(manifest, spec, stage_cost(costs, spec, manifest.model.share_layers).parameters)))
        for spec in stages_of(manifest)
    ]


def _memory_bytes(manifest: RunManifest, spec: StageSpec, num_parameters: int) -> tuple[int, int]:
    """What a stage takes, roughly, and what each microbatch adds to it."""
    assert isinstance(manifest.model.config, dict)
    hidden_size = parse_model_config(manifest.model.config).hidden_size
    hidden = 4 * manifest.training.microbatch_size * manifest.data.sequence_length * hidden_size
    each = hidden * (2 if manifest.model.activation_checkpointing else KEPT_TENSORS_PER_LAYER) * len(spec.layers)
    return 4 * VALUES_PER_PARAMETER * num_parameters, each


def make_averager(manifest: RunManifest, spec: StageSpec, dht: SwarmDHT) -> GradientAverager:
    assert isinstance(manifest.model.config, dict)
    module = StageModule(
        parse_model_config(manifest.model.config), spec, share_layers=manifest.model.share_layers
    )  # on the meta device: shapes alone
    shapes = [parameter.shape for parameter in module.parameters()]
    return GradientAverager(shapes, dht.node, f"swarm-{manifest.hash}-stage{spec.index}", manifest.averaging)


def check_data_files(manifest: RunManifest, data_dir: Path | None) -> None:
    """A run's manifest is somebody else's: it reads those of our files alone that we let it.

    Raises:
        UserError: it names files outside of `data_dir`, or none that exist
    """
    if (path := forbidden_path(manifest, data_dir)) is not None:
        raise UserError(
            f"the run wants to read {path} on this machine: allow it with --data-dir FOLDER, or serve another stage "
            f"than 0"
        )


def forbidden_path(manifest: RunManifest, data_dir: Path | None) -> Path | None:
    """What the run's training data would read outside of `data_dir`; None if there is nothing of the kind.

    Raises:
        UserError: it names no files that exist
    """

    def is_forbidden(path: Path) -> bool:
        return data_dir is None or not path.resolve().is_relative_to(data_dir.resolve())

    files, folder = manifest.data.files, local_folder(manifest.data)
    named = [Path(os.path.expanduser(file)) for file in files] + ([] if folder is None else [folder])
    if (forbidden := next(filter(is_forbidden, named), None)) is not None:
        return forbidden
    # Patterns are followed through links, too; not before they are known to begin where they may.
    return next(filter(is_forbidden, map(Path, find_files(files) if files else ())), None)


def choose_device(name: str) -> torch.device:
    """Raises UserError: no such device here. Does not initialise CUDA, because forks are still to come."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.device_count() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: no such kind of device; use cpu, cuda, cuda:N or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: only cpu and cuda devices are supported")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices that torch can use; use cpu "
            f"or auto, or install a CUDA build of torch and a driver for it"
        )
    return device


def microbatch_capacity(manifest: RunManifest, spec: StageSpec, num_parameters: int, max_memory: int | None) -> int:
    """Microbatches that a peer may hold at once.

    Raises:
        UserError: the stage does not fit into `max_memory` bytes
    """
    if max_memory is None:
        return manifest.limits.max_in_flight
    fixed, each = _memory_bytes(manifest, spec, num_parameters)
    if fixed + each > max_memory:
        raise UserError(
            f"--max-memory {max_memory / 2**30:.1f}GiB is too little: stage {spec.index} needs about "
            f"{(fixed + each) / 2**30:.1f} GiB; choose a smaller stage, or let it have more"
        )
    return min(manifest.limits.max_in_flight, (max_memory - fixed) // each)
