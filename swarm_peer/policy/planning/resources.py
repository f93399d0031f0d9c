"""The inputs of the performance model: the work of each stage, the groups of peers, and the settings of a step.

These are plain numbers. This module knows neither models nor machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from swarm_peer.policy.stage_memory import StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """The work of one stage: the compute, traffic and memory that it takes at each of its peers.

    Attributes:
        layers: number of transformer layers
        parameters: number of weights
        trained: number of those that training changes
        flops: compute of one sample, forward and backward, recomputation included
        activation_bytes: one sample's activations as sent to the next stage, encoded; 0 for the last stage
        gradient_bytes: one sample's gradients as sent to the previous stage, encoded; 0 for the first stage
        averaging_bytes: the gradients of all trained weights, encoded
        memory: what it takes of a peer's memory
        host_bytes: what it takes of the machine's memory beside a GPU
    """

    layers: int
    parameters: int
    trained: int
    flops: float
    activation_bytes: float
    gradient_bytes: float
    averaging_bytes: float
    memory: StageMemory
    host_bytes: float = 0.0


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class PeerGroup:
    """A number of equal peers.

    Attributes:
        flops_per_s: the speed that each of them reaches, not that of its data sheet
        memory_bytes: memory that training may use
        upload_bytes_per_s, download_bytes_per_s: what microbatches reach
        averaging_gain: how many times as fast averages, which queue many parts, pass the link
        latency_s: round trip to another peer
        is_closed: whether no two of all closed peers have a way to each other
    """

    name: str
    count: int
    flops_per_s: float
    memory_bytes: float = inf
    upload_bytes_per_s: float = inf
    download_bytes_per_s: float = inf
    averaging_gain: float = 1.0
    latency_s: float = 0.0
    dollars_per_hour: float = 0.0
    dollars_per_sent_byte: float = 0.0
    is_closed: bool = False

    @property
    def link_bytes_per_s(self) -> float:
        """The slower direction of the link."""
        return min(self.upload_bytes_per_s, self.download_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The run's settings that determine the time of a step.

    Attributes:
        max_in_flight: most microbatches that one peer holds at once
        min_peers: the fewest peers that each stage must have
        steps_per_average: optimizer steps from one average among stage-mates to the next
        averages_ahead: whether stage-mates average while the next step computes
    """

    global_batch_size: int
    microbatch_size: int
    max_in_flight: int
    min_peers: int = 1
    steps_per_average: int = 1
    averages_ahead: bool = False
