"""The square-cube law of pipelines over slow links, in numbers.

For each token, a layer of width d computes O(d^2) and sends O(d): the wider the model, the less the network matters
(Ryabinin et al., "SWARM Parallelism", ICML 2023, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One microbatch at a stage in the middle of a pipeline.

    Attributes:
        compute_s: compute of the microbatch, forward and backward
        activation_bytes, gradient_bytes: what crosses the boundary to the next stage, and what comes back
        bytes_per_s: bandwidth of the link in each direction
        latency_s: a round trip to the next stage
    """

    compute_s: float
    activation_bytes: float
    gradient_bytes: float
    bytes_per_s: float
    latency_s: float

    @property
    def transfer_s(self) -> float:
        """Seconds that it takes to send the activations to the next stage and the gradients back."""
        return (self.activation_bytes + self.gradient_bytes) / self.bytes_per_s

    @property
    def share_alone(self) -> float:
        """The share of time in which the device computes, if it waits for each microbatch and nothing overlaps."""
        return self.compute_s / (self.compute_s + self.transfer_s + self.latency_s)

    @property
    def share_in_flight(self) -> float:
        """The share of time in which the device computes, with enough microbatches in flight to hide latency.

        A peer in the middle of the pipeline sends activations on and gradients back, and receives as much: for each
        microbatch, each direction of its link carries activations and gradients once, while the device computes.
        """
        return self.compute_s / max(self.compute_s, self.transfer_s)

    @property
    def in_flight(self) -> float:
        """How many microbatches in flight hide the latency of one hop, by Little's law."""
        return (self.compute_s + self.transfer_s + self.latency_s) / max(self.compute_s, self.transfer_s)
