"""The modes of averaging by their names. A further one is a subclass of RoundStrategy and a row here."""

from __future__ import annotations

from swarm_peer.config import AveragingSection
from swarm_peer.model.agreed_eager import TrialStrategy
from swarm_peer.model.agreed_periodic import InnerStepsStrategy
from swarm_peer.model.delayed_strategy import DelayedStrategy, EagerStrategy
from swarm_peer.model.periodic_strategy import PeriodicStrategy
from swarm_peer.model.round_strategy import RoundStrategy

STRATEGIES: dict[str, type[RoundStrategy]] = {
    "synchronous": RoundStrategy,
    "periodic": PeriodicStrategy,
    "delayed": DelayedStrategy,
}
# Where rounds are agreed, the delay of updates is the protocol's.
AGREED_STRATEGIES: dict[str, type[RoundStrategy]] = {
    "synchronous": RoundStrategy,
    "periodic": InnerStepsStrategy,
    "delayed": RoundStrategy,
}


def strategy_of(averaging: AveragingSection, *, agreed: bool = False) -> type[RoundStrategy]:
    """The strategy that a manifest asks for.

    Args:
        agreed: whether rounds are agreed (docs/protocol.md)
    """
    if agreed:
        is_eager = averaging.mode == "delayed" and averaging.eager_updates
        return TrialStrategy if is_eager else AGREED_STRATEGIES[averaging.mode]
    strategy = STRATEGIES[averaging.mode]
    return EagerStrategy if strategy is DelayedStrategy and averaging.eager_updates else strategy
