"""The swarm as a flow: a stage's throughput is that of its serving peers, and the least stage limits the swarm.

Nothing changes between two events, so that thousands of peers can be simulated. The microbatch level (microbatches.py)
simulates latency, queues and uneven routing, which this level leaves out.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import simpy

from coordinator.simulator.rebalancers import SimulatedRebalancer
from coordinator.simulator.traces import MachineChange, Trace
from coordinator.simulator.world import Machine, MachinePool
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.rebalancing import Move, choose_stage
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

# A process of the simulation: it yields what it waits for.
Process = Generator[simpy.Event, object, None]


@dataclass(frozen=True, slots=True)
class FlowOptions:
    """How long peers take to notice and to decide.

    Attributes:
        detection_s: from a peer's departure until the others know of it
        decision_s: from a change until the decision upon it
        newcomers_know_speed: whether a newcomer has measured its device before it joins
    """

    detection_s: float = 2.0
    decision_s: float = 0.5
    newcomers_know_speed: bool = False


@dataclass(slots=True, kw_only=True)
class FlowSample:
    """The state of the swarm from `time_s` until the next sample.

    Attributes:
        throughput: samples per second
        with_movers: throughput if peers that are moving had arrived
        with_all: throughput if newcomers had arrived, too
        waiting: idle shares of serving peers, summed
        downloading: peers that do nothing, since their state is on its way
    """

    time_s: float
    throughput: float
    with_movers: float
    with_all: float
    waiting: float
    downloading: int


@dataclass(frozen=True, slots=True)
class Decision:
    """A move, and when it was decided."""

    time_s: float
    move: Move


class FlowSwarm:
    """One simulation of a swarm.

    Args:
        env: the clock, if others go by it, too
        pinned: machines that serve one stage each and never move
    """

    def __init__(
        self,
        *,
        trace: Trace,
        population: MachinePool,
        seed: int,
        params: RebalancingParameters,
        rebalancer: SimulatedRebalancer,
        options: FlowOptions,
        env: simpy.Environment | None = None,
        pinned: Mapping[str, int] | None = None,
    ):
        self._pinned = pinned or {}
        self._trace = trace
        self._population = population
        self._seed = seed
        self._params = params
        self._rebalancer = rebalancer
        self._options = options
        self._num_stages = len(params.stage_costs)
        self.env = env or simpy.Environment()
        self._ids: list[str] = []  # in order; beside them, the announcements
        self._views: list[PeerView] = []
        self._machines: dict[str, Machine] = {}
        self._alive: dict[str, str] = {}  # machine -> peer id
        self._lives: dict[str, int] = {}
        self._begun = False
        self._decision_due = False
        self._again_s = math.inf
        # Of those alive, by stage: serving, moving there, joining it.
        self._work = [[0.0] * self._num_stages for _ in range(3)]
        self._counts = [[0] * self._num_stages for _ in range(3)]
        self.samples: list[FlowSample] = []
        self.decisions: list[Decision] = []
        self.bytes_migrated = 0.0
        self.bytes_joined = 0.0
        self.num_joined = 0
        self.version = 0  # rises with each change of who serves what

    def run(self) -> None:
        """Simulate the whole trace."""
        self.start()
        self.env.run(until=self._trace.duration_s)

    def start(self) -> None:
        """Begin the simulation on a clock that somebody else drives."""
        self.env.process(self._replay())
        if self._rebalancer.every_s is not None:
            self.env.process(self._decide_periodically(self._rebalancer.every_s))

    # --- what happens

    def _replay(self) -> Process:
        changes = self._trace.changes
        position = 0
        while position < len(changes):
            time_s = changes[position].time_s
            if time_s > self.env.now:
                yield self.env.timeout(time_s - self.env.now)
            behind = position
            while behind < len(changes) and changes[behind].time_s == time_s:
                behind += 1
            self._change(changes[position:behind])
            position = behind

    def _change(self, changes: Sequence[MachineChange]) -> None:
        for change in changes:
            if change.joins:
                self._join(change.machine)
            else:
                self._leave(change.machine)
        if not self._begun and all(self._counts[2]):
            # No step has been made yet, so there is nothing to download: weights come from the manifest's seed.
            self._begun = True
            for peer_id in list(self._ids):
                self._serve(peer_id)
        self._record()

    def _join(self, name: str) -> None:
        self._lives[name] = self._lives.get(name, 0) + 1
        peer_id = name if self._lives[name] == 1 else f"{name}-{self._lives[name]}"
        self._alive[name] = peer_id
        machine = self._machines[peer_id] = self._population.machine(name, self._seed)
        peer = PeerView(
            peer_id=peer_id,
            stage=UNDECIDED,
            state=PeerState.JOINING,
            movable=name not in self._pinned,
            work_per_s=machine.work_per_s if self._options.newcomers_know_speed else 0.0,
            memory_bytes=int(machine.memory_bytes),
            bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s,
        )
        index = bisect.bisect(self._ids, peer_id)
        self._ids.insert(index, peer_id)
        self._views.insert(index, peer)
        stage = self._pinned.get(name)
        if stage is None:
            memory_bytes = self._params.stage_memory_bytes
            stage = choose_stage(self.view(), self._params.stage_costs, peer_id, stage_memory_bytes=memory_bytes).stage
        self.num_joined += 1
        peer = replace(peer, stage=stage, since_s=self.env.now)
        self._set(peer)
        self._count(peer, 1)
        if self._begun:
            self.bytes_joined += self._params.state_bytes[stage]
            self._download(peer)

    def _leave(self, name: str) -> None:
        peer_id = self._alive.pop(name)
        peer = self._views[self._index(peer_id)]
        self._count(peer, -1)
        del self._machines[peer_id]
        self.env.process(self._detect(peer_id))

    def _detect(self, peer_id: str) -> Process:
        yield self.env.timeout(self._options.detection_s)
        index = self._index(peer_id)
        del self._ids[index], self._views[index]
        self.version += 1
        self._something_changed()

    def _download(self, peer: PeerView) -> None:
        self.env.process(self._downloading(peer))

    def _downloading(self, peer: PeerView) -> Process:
        """Download from stage-mates, which share their bandwidth among askers; without stage-mates, from snapshots."""
        machine = self._machines[peer.peer_id]
        donors = [
            self._machines[other.peer_id].bandwidth_bytes_per_s
            for other in self._views
            if other.stage == peer.stage and other.state is PeerState.SERVING and other.peer_id in self._machines
        ]
        asking = self._counts[1][peer.stage] + self._counts[2][peer.stage]
        bandwidth = machine.bandwidth_bytes_per_s
        if donors:
            bandwidth = min(bandwidth, sum(donors) / max(1, asking))
        yield self.env.timeout(self._params.overhead_s + self._params.state_bytes[peer.stage] / bandwidth)
        if peer.peer_id in self._machines:
            self._serve(peer.peer_id)
            self._record()

    def _serve(self, peer_id: str) -> None:
        peer = self._views[self._index(peer_id)]
        self._count(peer, -1)
        speed = self._machines[peer_id].work_per_s / self._params.stage_costs[peer.stage]
        peer = replace(peer, state=PeerState.SERVING, samples_per_s=speed, since_s=self.env.now, moved_from=UNDECIDED)
        self._set(peer)
        self._count(peer, 1)
        self._something_changed()

    # --- decisions

    def _something_changed(self) -> None:
        if self._rebalancer.every_s is None and not self._decision_due and self._begun:
            self._decision_due = True
            self.env.process(self._decide_soon())

    def _decide_soon(self) -> Process:
        yield self.env.timeout(self._options.decision_s)
        self._decision_due = False
        self._decide()

    def _decide_at(self, time_s: float) -> Process:
        yield self.env.timeout(time_s - self.env.now)
        self._something_changed()

    def _decide_periodically(self, every_s: float) -> Process:
        while True:
            yield self.env.timeout(every_s)
            if self._begun:
                self._decide()

    def _decide(self) -> None:
        decision = self._rebalancer.decide(self.view(), self.env.now)
        moves = decision.moves
        if decision.again_s not in (math.inf, self._again_s):
            self._again_s = decision.again_s
            self.env.process(self._decide_at(decision.again_s))
        for move in moves:
            if move.peer_id not in self._machines:
                continue  # it has died, and the others do not know yet
            self.decisions.append(Decision(self.env.now, move))
            peer = self._views[self._index(move.peer_id)]
            self._count(peer, -1)
            # In work per second a peer is as fast there as here, so its speed is known.
            peer = replace(
                peer,
                stage=move.to_stage,
                state=PeerState.JOINING,
                since_s=self.env.now,
                moved_from=move.from_stage,
                samples_per_s=self._machines[move.peer_id].work_per_s / self._params.stage_costs[move.to_stage],
            )
            self._set(peer)
            self._count(peer, 1)
            self.bytes_migrated += self._params.state_bytes[move.to_stage]
            self._download(peer)
        if moves:
            self._record()

    # --- what is known and what is counted

    def _index(self, peer_id: str) -> int:
        return bisect.bisect_left(self._ids, peer_id)

    def machine(self, peer_id: str) -> Machine | None:
        """A peer's machine; None if the peer has gone, whether the others know it or not."""
        return self._machines.get(peer_id)

    def peer(self, peer_id: str) -> PeerView:
        """A peer as it announces itself."""
        return self._views[self._index(peer_id)]

    def stage_cost(self, stage: int) -> float:
        """Work that one sample takes in a stage."""
        return self._params.stage_costs[stage]

    def view(self) -> SwarmView:
        """The swarm as it announces itself."""
        return SwarmView(self._num_stages, tuple(self._views))

    def _set(self, peer: PeerView) -> None:
        self.version += 1
        self._views[self._index(peer.peer_id)] = peer

    def _count(self, peer: PeerView, sign: int) -> None:
        kind = 0 if peer.state is PeerState.SERVING else 1 if peer.moved_from != UNDECIDED else 2
        self._counts[kind][peer.stage] += sign
        self._work[kind][peer.stage] += sign * self._machines[peer.peer_id].work_per_s
        if not self._counts[kind][peer.stage]:
            self._work[kind][peer.stage] = 0.0  # no rounding error is left of peers that have gone

    def _record(self) -> None:
        serving, moving, joining = self._work
        costs = self._params.stage_costs
        stages = range(self._num_stages)
        capacity = [serving[k] / costs[k] for k in stages]
        throughput = min(capacity)
        sample = FlowSample(
            time_s=self.env.now,
            throughput=throughput,
            with_movers=min((serving[k] + moving[k]) / costs[k] for k in stages),
            with_all=min((serving[k] + moving[k] + joining[k]) / costs[k] for k in stages),
            waiting=sum(self._counts[0][k] * (1 - throughput / capacity[k]) for k in stages if capacity[k] > 0),
            downloading=sum(self._counts[1]) + sum(self._counts[2]),
        )
        if self.samples and self.samples[-1].time_s == sample.time_s:
            self.samples[-1] = sample
        else:
            self.samples.append(sample)
