"""The square-cube law of pipelines over slow links, in numbers.

A layer of width d computes O(d^2) for each token and sends O(d): the wider the model, the less the network matters
(Ryabinin et al., "SWARM Parallelism", ICML 2023, section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hop:
    """A stage in the middle of a pipeline and one microbatch.

    Attributes:
        compute_s: forward and backward
        activation_bytes, gradient_bytes: of one boundary
        bytes_per_s: of the link, each way
        latency_s: round trip
    """

    compute_s: float
    activation_bytes: float
    gradient_bytes: float
    bytes_per_s: float
    latency_s: float

    @property
    def transfer_s(self) -> float:
        """Of one activation to the next stage and its gradient back."""
        return (self.activation_bytes + self.gradient_bytes) / self.bytes_per_s

    @property
    def share_alone(self) -> float:
        """Share of the time that a device computes if it waits for each microbatch: nothing overlaps."""
        return self.compute_s / (self.compute_s + self.transfer_s + self.latency_s)

    @property
    def share_in_flight(self) -> float:
        """The same with so many microbatches in flight that latency is hidden.

        In the middle of the pipeline a peer sends activations on and gradients back, and receives as much: each
        direction of its link carries one of both for each microbatch, while it computes.
        """
        return self.compute_s / max(self.compute_s, self.transfer_s)

    @property
    def in_flight(self) -> float:
        """Microbatches that hide the latency of one hop (Little's law)."""
        return (self.compute_s + self.transfer_s + self.latency_s) / max(self.compute_s, self.transfer_s)
