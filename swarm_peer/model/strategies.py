"""The modes of averaging by their names. A further one is a subclass of RoundStrategy and a row here."""

from __future__ import annotations

from swarm_peer.config import AveragingSection
from swarm_peer.model.eager_strategy import TrialStrategy
from swarm_peer.model.periodic_strategy import InnerStepsStrategy
from swarm_peer.model.round_strategy import RoundStrategy

# The delay of updates is the protocol's.
STRATEGIES: dict[str, type[RoundStrategy]] = {
    "synchronous": RoundStrategy,
    "periodic": InnerStepsStrategy,
    "delayed": RoundStrategy,
}


def strategy_of(averaging: AveragingSection) -> type[RoundStrategy]:
    """The strategy that a manifest asks for."""
    is_eager = averaging.mode == "delayed" and averaging.eager_updates
    return TrialStrategy if is_eager else STRATEGIES[averaging.mode]
