"""The modes of averaging by their names. A further one is a subclass of RoundStrategy and a row here."""

from __future__ import annotations

from swarm_peer.config import AveragingSection
from swarm_peer.model.delayed_strategy import DelayedStrategy, EagerStrategy
from swarm_peer.model.periodic_strategy import PeriodicStrategy
from swarm_peer.model.round_strategy import RoundStrategy

STRATEGIES: dict[str, type[RoundStrategy]] = {
    "synchronous": RoundStrategy,
    "periodic": PeriodicStrategy,
    "delayed": DelayedStrategy,
}


def strategy_of(averaging: AveragingSection) -> type[RoundStrategy]:
    """The strategy that a manifest asks for."""
    strategy = STRATEGIES[averaging.mode]
    return EagerStrategy if strategy is DelayedStrategy and averaging.eager_updates else strategy
