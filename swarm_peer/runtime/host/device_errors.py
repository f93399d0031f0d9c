"""Tells a device that is out of memory, or has failed, from other errors."""

from __future__ import annotations

import torch

from swarm_peer.errors import SwarmError

# torch has a class for its own allocator's errors on GPUs. Those of its CPU allocator, of the driver and of CUDA's
# libraries have texts alone. The last one is what torch fails at where it is about to say that memory is out, and the
# driver's tools are another version's.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "NVML_SUCCESS == r",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device had too little memory left for a job, which may end well when there is more."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def drop_frames(error: Exception) -> Exception:
    """Have an error that the lack of memory has caused let go of what the job has made so far.

    The next job begins before anybody handles the error, and needs that memory. And from Python 3.12 on, the frames of
    context managers in such a traceback hold the error itself, until garbage is collected.
    """
    if is_out_of_memory(error) or is_out_of_memory(error.__cause__):
        for each in (error, error.__cause__):
            if each is not None:
                each.__traceback__ = None
    return error


def is_lost(error: BaseException) -> bool:
    """Whether this process has lost its GPU (a kernel that failed, a driver that crashed): all that follows fails."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error) and not is_out_of_memory(error)


def is_fault(error: Exception) -> bool:
    """Whether the device, or this program, has failed at a job; another peer's message may be to blame otherwise."""
    return not isinstance(error, SwarmError) or is_out_of_memory(error.__cause__)
