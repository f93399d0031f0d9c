"""Makes what a peer brings to the average that ends a round: nothing that is not finite, or too large for a sum."""

from __future__ import annotations

import torch

from swarm_peer.codecs.base import is_within
from swarm_peer.codecs.parts import LARGEST_MEAN
from swarm_peer.model.round_strategy import Work
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.trouble import UpdateRecord
from swarm_peer.runtime.host.metrics import PeerMetrics


def contribution(trainer: StageTrainer, metrics: PeerMetrics, updates: UpdateRecord, round_number: int) -> Work:
    """Make what this peer brings to the average that ends the round: nothing, if it is not finite.

    To be called in the device thread.
    """
    if lost := trainer.discard_if_not_finite():
        updates.not_finite()
        metrics.lose(lost, "their gradient is not finite", round_number=round_number)
    gradients = trainer.mean_gradients()
    brought, weight = trainer.strategy.contribution(gradients, trainer.weight)
    if brought is gradients or all(is_within(tensor, LARGEST_MEAN) for tensor in brought):
        return brought, weight
    # The weights of this replica are broken. Those that come of the average take their place.
    updates.not_finite()
    metrics.lose(trainer.samples_of(weight), "their difference is not finite", round_number=round_number)
    return [torch.zeros_like(tensor) for tensor in brought], 0
