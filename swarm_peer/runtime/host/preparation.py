"""The device that a peer computes on, and how much fits into its memory."""

from __future__ import annotations

import torch

from swarm_peer.errors import UserError
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.partition import StageSpec
from swarm_peer.model.resolved import ResolvedManifest


def choose_device(name: str) -> torch.device:
    """The device that `--device` names. Does not initialise CUDA.

    Raises:
        UserError: this machine has no such device
    """
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


def microbatch_capacity(
    resolved: ResolvedManifest, spec: StageSpec, device: torch.device, max_memory: int | None
) -> int:
    """Microbatches that a peer may hold at once.

    Raises:
        UserError: the stage does not fit into `max_memory` bytes
    """
    limit = resolved.manifest.limits.max_in_flight
    if max_memory is None:
        return limit
    memory = stage_costs(resolved, device.type)[spec.index].memory
    capacity = memory.window(max_memory, limit)
    if not capacity:
        raise UserError(
            f"--max-memory {max_memory / 2**30:.1f}GiB is too little: stage {spec.index} needs about "
            f"{memory.peak_bytes(1) / 2**30:.1f} GiB; choose a smaller stage, or let it have more"
        )
    return capacity
