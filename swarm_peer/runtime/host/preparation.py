"""The device that a peer computes on, and how much fits into its memory."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

import torch
from pydantic import ByteSize

from swarm_peer.errors import UserError, first_line
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.families.attention import AMPERE
from swarm_peer.model.partition import StageSpec
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.stage_memory import RESERVED_BYTES
from swarm_peer.runtime.host.identities import locked
from swarm_peer.runtime.host.memory import host_memory, within_addresses
from swarm_peer.runtime.host.processes import free_memory

log = logging.getLogger(__name__)

# A peer that is not told its memory holds so many microbatches whatever its device has free, as long as the device is
# large enough, and more only if they fit. Weights that are there already are counted twice then, and what others use
# now may be free later.
UNCHECKED_IN_FLIGHT = 8
# Values of `--device` that leave the choice of a GPU to the peer.
ANY_GPU = ("auto", "cuda")


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
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def devices_to_share(name: str) -> tuple[str, ...]:
    """The devices that several peers on this machine take in turns: all GPUs, unless `--device` names one of them.

    Raises:
        UserError: this machine has no such device
    """
    device = choose_device(name)
    if device.type == "cuda" and name in ANY_GPU:
        return tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    return (str(device),)


@contextmanager
def claimed_device(name: str, folder: Path) -> Iterator[torch.device]:
    """The device that a peer computes on. While the context is open, peers that are told none leave that GPU alone.

    If none is named, it is the first GPU that no other peer of this user has; one that is named may be another's, too.
    Does not initialise CUDA.

    Args:
        name: as `--device` has it
        folder: of what programs of this user keep

    Raises:
        UserError: this machine has no such device
    """
    devices = [torch.device(shared) for shared in devices_to_share(name)]
    device, lock = _first_free(devices, folder) if devices[0].type == "cuda" else (devices[0], None)
    if device.type == "cuda" and lock is None and name in ANY_GPU:
        log.warning(
            "gpu_may_be_shared device=%s: no GPU is known to be free of other peers; name one with --device", device
        )
    with lock or nullcontext():
        yield device


def _first_free(devices: Sequence[torch.device], folder: Path) -> tuple[torch.device, IO[str] | None]:
    """The first of some GPUs that no other peer has, and the lock on it; if there is none, the first one without."""
    try:
        for device in devices:
            # The folder may be one that machines share.
            if lock := locked(folder, f"gpu-{socket.gethostname()}-{_gpu_name(device.index)}"):
                return device, lock
    except OSError as error:
        log.warning("gpu_not_claimed folder=%s reason=%s", folder, error.strerror)
    return devices[0], None


def _gpu_name(index: int) -> str:
    """The name of a GPU among all of the machine: the environment may hide some from torch, which counts the others."""
    shown = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return shown[index].replace("/", "-") if index < len(shown) else str(index)


def set_threads(count: int) -> None:
    """Have torch compute with so many threads. The log tells of more than there are cores, which only slow it down."""
    if count > (cores := os.cpu_count() or count):
        log.warning("threads_beyond_cores threads=%d cores=%d reason=so many are slower", count, cores)
    torch.set_num_threads(count)


def check_device(device: torch.device, precision: str) -> None:
    """Compute something on the device, so that it fails here and not in the run.

    Args:
        precision: that the run asks GPUs to compute in

    Raises:
        UserError: the device cannot be used: its driver is too old for torch, torch has nothing for so old a GPU, or
            others have taken all of its memory
    """
    try:
        float(torch.ones(1, device=device).add_(1))
    except Exception as error:  # torch has no common class for what goes wrong when it initialises CUDA
        raise UserError(
            f"{device} cannot be used ({first_line(error)}): mend that, or take another with --device"
        ) from error
    if device.type != "cuda":
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    log.info("gpu device=%s name=%s capability=%d.%d", device, name, *capability)
    if precision == "bf16" and capability < AMPERE:
        log.warning("bf16_is_emulated name=%s: much slower; a run with model.precision=fp16 suits it", name)


def in_words(device: torch.device) -> str:
    """The device as people know it: a GPU by its model, such as Tesla T4. Initialises CUDA."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def believed_limit(max_memory: int | None, device: torch.device) -> int | None:
    """The limit that `--max-memory` sets, at most what the device has; None if it sets none."""
    has_bytes = memory_bytes(device)[1]
    if max_memory is None or max_memory <= has_bytes:
        return max_memory
    log.warning(
        "max_memory_is_more_than_there_is device=%s given=%s has=%s: the peer goes by what the device has",
        device,
        ByteSize(max_memory).human_readable(),
        ByteSize(has_bytes).human_readable(),
    )
    return has_bytes


def microbatch_capacity(
    resolved: ResolvedManifest, spec: StageSpec, device: torch.device, max_memory: int | None
) -> int:
    """Microbatches that a peer may hold at once.

    Args:
        max_memory: that the peer may use, in bytes; None for what the device has

    Raises:
        UserError: the stage does not fit, even with one microbatch
    """
    limit = resolved.manifest.limits.max_in_flight
    costs = stage_costs(resolved, device.type)[spec.index]
    memory = costs.memory
    free_bytes, all_bytes = memory_bytes(device) if max_memory is None else (max_memory, max_memory)
    capacity = memory.window(free_bytes, limit)
    if max_memory is None:
        capacity = max(capacity, memory.window(all_bytes, min(UNCHECKED_IN_FLIGHT, limit)))
    if not capacity:
        short = f"{ByteSize(all_bytes).human_readable()} is too little: stage {spec.index} needs about"
        needed = ByteSize(memory.peak_bytes(1)).human_readable()
        if max_memory is None:
            raise UserError(f"memory of {short} {needed}; serve a smaller stage, or take a device with more")
        raise UserError(f"--max-memory {short} {needed}; raise it, or serve a smaller stage")
    host_bytes = host_memory()[1]
    if device.type == "cuda" and costs.host_bytes > host_bytes:
        log.warning(
            "host_memory_is_short stage=%d has=%s needs=%s: beside the GPU's; the system may end this peer",
            spec.index,
            ByteSize(host_bytes).human_readable(),
            ByteSize(costs.host_bytes).human_readable(),
        )
    return capacity


def stages_too_large(resolved: ResolvedManifest, device: torch.device, max_memory: int | None) -> tuple[int, ...]:
    """The stages that a peer has no memory for, even with one microbatch and nothing else on its device.

    Args:
        max_memory: that the peer may use, in bytes; None for all that the device has

    Raises:
        UserError: it has memory for no stage
    """
    room = memory_bytes(device)[1] if max_memory is None else max_memory
    needed = [costs.memory.peak_bytes(1) for costs in stage_costs(resolved, device.type)]
    if room < min(needed):
        short = f"{ByteSize(room).human_readable()} of memory: the smallest needs about"
        remedy = "take a device with more"
        if max_memory is not None:
            remedy = f"raise --max-memory if {device} has more, or {remedy}"
        raise UserError(f"no stage of this run fits into {short} {ByteSize(min(needed)).human_readable()}; {remedy}")
    return tuple(stage for stage, bytes_ in enumerate(needed) if bytes_ > room)


def has_room_beside(
    resolved: ResolvedManifest, serving: int, joining: int, device: torch.device, max_memory: int | None
) -> bool:
    """Whether a replica of one stage can get its state while the replica of another stage serves.

    Args:
        max_memory: that the peer may use, in bytes; None for what the device has free
    """
    costs = stage_costs(resolved, device.type)
    if device.type == "cuda" and costs[serving].host_bytes + costs[joining].host_bytes > host_memory()[1]:
        return False
    joining_bytes = costs[joining].memory.peak_bytes(0)
    if max_memory is not None:
        in_flight = microbatch_capacity(resolved, resolved.specs[serving], device, max_memory)
        return costs[serving].memory.peak_bytes(in_flight) + joining_bytes <= max_memory
    return joining_bytes <= memory_bytes(device)[0]


def free_device_memory(device: torch.device) -> None:
    """Give memory that nothing refers to any more back to the device, and to the system."""
    free_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes of a device's memory that are free for training, and that would be if nothing else used it."""
    if device.type != "cuda":
        return within_addresses(*host_memory())
    free_bytes, all_bytes = torch.cuda.mem_get_info(device)
    return max(free_bytes - RESERVED_BYTES, 0), all_bytes - RESERVED_BYTES
