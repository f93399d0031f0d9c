"""Tells a device that is out of memory, or has failed, from other errors."""

from __future__ import annotations

import torch

from swarm_peer.errors import SwarmError

# torch has a class for its own allocator's errors on GPUs. Those of its CPU allocator, of the driver and of CUDA's
# libraries have texts alone.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device had too little memory left for a job, which may end well when there is more."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def is_fault(error: Exception) -> bool:
    """Whether the device, or this program, has failed at a job; another peer's message may be to blame otherwise."""
    return not isinstance(error, SwarmError) or is_out_of_memory(error.__cause__)
