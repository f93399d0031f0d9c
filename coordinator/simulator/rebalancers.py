"""The rebalancing policies that are compared: none, the paper's every T seconds, and ours upon every change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

from swarm_peer.policy.churn import ChurnMeter
from swarm_peer.policy.exchange import RebalancingParameters
from swarm_peer.policy.forecast import fits, work_per_s
from swarm_peer.policy.rebalancing import ExchangePatience, Move, Rebalancing, rebalance
from swarm_peer.policy.view import UNDECIDED, PeerState, SwarmView


class Rebalancer(Protocol):
    """Attributes:
    every_s: when it is asked; None for upon every change, and when its last decision said
    """

    every_s: float | None

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing: ...


@dataclass
class NoRebalancing:
    """Newcomers join the neediest stage and stay there. A stage that empties waits for the next newcomer."""

    every_s: float | None = None

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing:
        return Rebalancing((), "no rebalancing")


@dataclass
class PeriodicRebalancing:
    """SWARM parallelism (Ryabinin et al., ICML 2023), section 3.2.

    Every T seconds a peer of the least loaded stage moves to the most loaded one.

    The load of a stage is the work that comes in, the same for all, over what it can do. The paper does not say what
    keeps a peer from moving back and forth between two stages that are even; here it moves only if the lesser of the
    two gains by it. Of the stage's peers, the first by id of those whose move does that.
    """

    params: RebalancingParameters
    every_s: float | None

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing:
        costs = self.params.stage_costs
        work = work_per_s(view.peers, costs)
        capacity = [0.0] * view.num_stages
        for peer in view.peers:
            if peer.stage != UNDECIDED and peer.state is not PeerState.DRAINING:
                capacity[peer.stage] += work[peer.peer_id] / costs[peer.stage]
        loaded = min(range(view.num_stages), key=lambda k: (capacity[k], k))
        idle = max(range(view.num_stages), key=lambda k: (capacity[k], -k))
        serving = view.serving(idle)
        for peer in serving if len(serving) > 1 else ():
            done = work[peer.peer_id]
            lesser = min(capacity[idle] - done / costs[idle], capacity[loaded] + done / costs[loaded])
            if peer.movable and lesser > capacity[loaded] and fits(peer, loaded, self.params.stage_memory_bytes):
                reason = f"stage {idle} is the least loaded, stage {loaded} the most"
                return Rebalancing((Move(peer.peer_id, idle, loaded, reason),), reason)
        return Rebalancing((), f"no peer of stage {idle} would lift stage {loaded}")


@dataclass
class EventRebalancing:
    """The live policy, upon every change."""

    params: RebalancingParameters
    every_s: float | None = None
    churn: ChurnMeter = field(default_factory=ChurnMeter)
    patience: ExchangePatience = field(default_factory=ExchangePatience)

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing:
        self.churn.observe((peer.peer_id for peer in view.peers), now_s)
        horizon_s = self.churn.horizon_s(view.num_stages, now_s)
        decision = rebalance(view, replace(self.params, horizon_s=horizon_s), now_s)
        return self.patience.check(decision, self.params.exchange_patience_s, now_s)


def make_rebalancer(name: str, params: RebalancingParameters) -> Rebalancer:
    """`none`, `events`, or seconds."""
    if name == "none":
        return NoRebalancing()
    if name == "events":
        return EventRebalancing(params)
    return PeriodicRebalancing(params, float(name))
