"""Whether a run fits into this one machine's memory, before anything is allocated: the system ends what does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from pydantic import ByteSize

from swarm_peer.errors import UserError, first_line
from swarm_peer.model.costs import FP32_BYTES, stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.strategies import strategy_of
from swarm_peer.runtime.host.device_errors import is_out_of_memory
from swarm_peer.runtime.host.memory import host_memory
from swarm_peer.runtime.host.preparation import memory_bytes

log = logging.getLogger(__name__)


def check_one_process(resolved: ResolvedManifest, device: torch.device) -> None:
    """Check that all stages fit into the memory of one process, with one microbatch.

    Raises:
        UserError: they do not
    """
    costs = stage_costs(resolved, device.type)
    memories = [each.memory for each in costs]
    per_parameter = FP32_BYTES * strategy_of(resolved.manifest.averaging, agreed=True).kept_values
    held = sum(memory.held_bytes - memory.host_bytes for memory in memories)
    held += per_parameter * sum(each.trained for each in costs)
    computing = sum(memory.microbatch_bytes for memory in memories) + max(memory.working_bytes for memory in memories)
    free_bytes, all_bytes = memory_bytes(device)
    advice = "take a smaller model or microbatch, or a device with more, or let several machines share the stages"
    _check(held + max(computing, *(memory.update_bytes for memory in memories)), free_bytes, all_bytes, device, advice)


def check_local_peers(resolved: ResolvedManifest, peers_by_stage: Sequence[int], devices: Sequence[str]) -> None:
    """Check that all peers of a run fit into this machine's memory, with one microbatch each.

    On GPUs each of them checks that itself.

    Raises:
        UserError: they do not
    """
    if set(devices) != {"cpu"}:
        return
    costs = stage_costs(resolved, "cpu")
    needed = sum(count * each.memory.peak_bytes(1) for count, each in zip(peers_by_stage, costs, strict=True))
    advice = "name fewer in --peers, take a smaller model or microbatch, or let several machines share the stages"
    _check(needed, *host_memory(), f"{sum(peers_by_stage)} peers on this machine", advice)


@contextmanager
def running_out_told(device: torch.device) -> Iterator[None]:
    """Tell in one line that the device has run out of memory all the same.

    Raises:
        UserError: it has
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{device} has run out of memory: end what else uses it, or take a smaller model or microbatch "
            f"({first_line(error)})"
        ) from error


def _check(needed_bytes: float, free_bytes: int, all_bytes: int, who: object, advice: str) -> None:
    needed, free, there = (ByteSize(size).human_readable() for size in (int(needed_bytes), free_bytes, all_bytes))
    if needed_bytes > all_bytes:
        raise UserError(f"this run needs about {needed} of memory, and {who} may use {there}: {advice}")
    if needed_bytes > free_bytes:
        log.warning("memory_is_short needs=%s free=%s: the system may end this; end what else uses it", needed, free)
