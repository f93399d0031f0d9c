"""The rebalancing policies that are compared: none, the paper's every T seconds, and the live one upon every change."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

from coordinator.simulator.announcements import ANNOUNCEMENT_S, LOOK_S, Announcements
from swarm_peer.policy.placement.capacity import serving_capacity, work_per_s
from swarm_peer.policy.placement.churn import ChurnMeter
from swarm_peer.policy.placement.live_rebalancer import LiveRebalancer
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.rebalancing import Move, Rebalancing, rebalance
from swarm_peer.policy.placement.ways import as_reached
from swarm_peer.policy.view import UNDECIDED, PeerState, SwarmView

# The live policy hears of the samples of the last rounds, which took about so many looks.
LOOKS_DELIVERED = 15


class SimulatedRebalancer(Protocol):
    """A rebalancing policy in the simulator.

    Attributes:
        every_s: seconds between decisions; None for a decision upon every change
    """

    every_s: float | None

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing:
        """Decide on moves, and remember the view where the policy learns from it."""


@dataclass
class PeriodicRebalancing:
    """SWARM parallelism (Ryabinin et al., ICML 2023), section 3.2.

    Every T seconds a peer of the least loaded stage moves to the most loaded one.

    The load of a stage is the work that comes in, the same for all, over what it can do. The paper does not say what
    keeps a peer from moving back and forth between two stages that are even; here it moves only if the lesser of the
    two gains by it. Among the peers whose move does that, the first by id moves.
    """

    params: RebalancingParameters
    every_s: float | None

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing:
        """See SimulatedRebalancer."""
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
            if peer.movable and lesser > capacity[loaded] and loaded not in peer.too_large:
                reason = f"stage {idle} is the least loaded, stage {loaded} the most"
                return Rebalancing((Move(peer.peer_id, idle, loaded, reason),), reason)
        return Rebalancing((), f"no peer of stage {idle} would lift stage {loaded}")


@dataclass
class EventRebalancing:
    """The live search for moves upon every change, by a policy that knows everything: a bound for the live policy."""

    params: RebalancingParameters
    every_s: float | None = None
    churn: ChurnMeter = field(default_factory=ChurnMeter)

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing:
        """See SimulatedRebalancer."""
        self.churn.observe((peer.peer_id for peer in view.peers), now_s)
        horizon_s = self.churn.horizon_s(view.num_stages, now_s)
        return rebalance(view, replace(self.params, horizon_s=horizon_s), now_s)


class LiveRebalancing:
    """The live policy, as a coordinator runs it: every two seconds, by what peers announce."""

    every_s: float | None = LOOK_S

    def __init__(self, params: RebalancingParameters, seed: int):
        self._policy = LiveRebalancer(params, announcement_s=ANNOUNCEMENT_S, begun_s=0.0)
        self._announcements = Announcements(drain_s=params.overhead_s, seed=seed)
        self._costs = params.stage_costs
        self._delivered: deque[float] = deque(maxlen=LOOKS_DELIVERED)
        self._given: tuple[Move, ...] = ()

    def decide(self, view: SwarmView, now_s: float) -> Rebalancing:
        """See SimulatedRebalancer. Peers find an assignment when the coordinator looks again."""
        # While a stage is empty no round ends, so that the last ones still count.
        reached = as_reached(view)
        if (throughput := min(serving_capacity(reached, work_per_s(view.peers, self._costs), self._costs))) > 0:
            self._delivered.append(throughput * LOOK_S)
        known = set(self._policy.movers.open)
        found = self._announcements.look(view, now_s)
        self._policy.look(found, sum(self._delivered), LOOK_S * len(self._delivered), now_s)
        given = self._given
        opened = self._policy.movers.open.items()
        self._given = tuple(assigned.move for peer_id, assigned in opened if peer_id not in known)
        return Rebalancing(given, self._policy.reason)


def make_rebalancer(name: str, params: RebalancingParameters, seed: int) -> SimulatedRebalancer | None:
    """The policy of a name: `live`, `events`, the seconds of the periodic one, or `none`.

    With none, newcomers join the neediest stage and stay there. A stage that empties waits for the next newcomer.
    """
    if name == "none":
        return None
    if name == "events":
        return EventRebalancing(params)
    return LiveRebalancing(params, seed) if name == "live" else PeriodicRebalancing(params, float(name))
