"""The memory that one stage takes at a peer, and how many microbatches fit into it; counted in model/costs.py."""

from __future__ import annotations

from dataclasses import dataclass

# Memory of a GPU that training cannot use: the CUDA context, some 0.5 GB; kernels' workspaces, and gaps between
# allocations, which took 0.2 to 2 GB of an H200's (benchmarks/gpu-2026-11-26.md).
RESERVED_BYTES = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes that a stage takes of the memory that its peer trains in.

    Attributes:
        weight_bytes, weight_gradient_bytes, optimizer_bytes: memory in use all the time
        host_bytes: memory in use all the time beside the trainer, where that shares it: averaging buffers, a copy of
            the state, replies
        working_bytes: memory in use during the compute of a microbatch, without what is kept for the backward pass
        update_bytes: memory in use at the end of a round, when no microbatch is there
        microbatch_bytes: memory in use for each microbatch in flight
    """

    weight_bytes: float
    weight_gradient_bytes: float
    optimizer_bytes: float
    host_bytes: float = 0.0
    working_bytes: float = 0.0
    update_bytes: float = 0.0
    microbatch_bytes: float

    @property
    def held_bytes(self) -> float:
        """Memory in use all the time."""
        return self.weight_bytes + self.weight_gradient_bytes + self.optimizer_bytes + self.host_bytes

    def peak_bytes(self, in_flight: int) -> float:
        """Most memory in use at once, with `in_flight` microbatches."""
        return self.held_bytes + max(self.update_bytes, self.working_bytes + in_flight * self.microbatch_bytes)

    def window(self, memory_bytes: float, limit: int) -> int:
        """How many microbatches in flight fit into memory, at most `limit`; 0 if the stage does not fit at all."""
        if self.peak_bytes(limit) <= memory_bytes:
            return limit
        if self.peak_bytes(1) > memory_bytes:
            return 0
        return int((memory_bytes - self.held_bytes - self.working_bytes) // self.microbatch_bytes)
