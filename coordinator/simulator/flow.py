"""The swarm as a flow: a stage's throughput is that of its serving peers, and the least stage limits the swarm.

Nothing changes between two events, so that thousands of peers can be simulated. The microbatch level (microbatches.py)
simulates latency, queues and uneven routing, which this level leaves out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace

import simpy

from coordinator.simulator.rebalancers import SimulatedRebalancer
from coordinator.simulator.traces import Trace
from coordinator.simulator.world import Machine
from swarm_peer.policy.placement.lost_stage import choose_mover
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.rebalancing import Move, choose_stage
from swarm_peer.policy.placement.ways import as_reached, gives_way, lacked
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

# A process of the simulation: it yields what it waits for.
Process = Generator[simpy.Event, object, None]


# From a peer's departure until other peers, and the policies that know everything, know of it.
DETECTION_S = 2.0
# From a change until a decision upon it.
DECISION_S = 0.5
# Between two looks of a peer whether it has the ways that it needs; and until one with a place gives it up.
WAYS_LOOK_S = 7.5
WAYS_PATIENCE_S = 60.0


@dataclass(slots=True, kw_only=True)
class FlowSample:
    """The state of the swarm from `time_s` until the next sample.

    Attributes:
        throughput: samples per second
        with_movers: throughput if peers that are moving had arrived
        with_all: throughput if newcomers had arrived, too
    """

    time_s: float
    throughput: float
    with_movers: float
    with_all: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A move, and when it was decided."""

    time_s: float
    move: Move


class FlowSwarm:
    """One simulation of a swarm.

    Args:
        machine_of: draws the machine of a name, always the same
        rebalancer: None if no peer ever moves
        pinned: machines that serve one stage each and never move

    Attributes:
        peers: as they announce themselves, by id; peers that have died lately included, which others do not know yet
        machines: of the peers that are alive
        version: rises with each change of which peers serve what
    """

    def __init__(
        self,
        *,
        trace: Trace,
        machine_of: Callable[[str], Machine],
        params: RebalancingParameters,
        rebalancer: SimulatedRebalancer | None,
        pinned: Mapping[str, int] | None = None,
    ):
        self._pinned = pinned or {}
        self._trace = trace
        self._machine_of = machine_of
        self.params = params
        self._rebalancer = rebalancer
        self._num_stages = len(params.stage_costs)
        self.env = simpy.Environment()
        self.peers: dict[str, PeerView] = {}
        self.machines: dict[str, Machine] = {}
        self._alive: dict[str, str] = {}  # machine -> peer id
        self._closed: set[str] = set()  # peers of which no two have a way to each other
        self._lives: Counter[str] = Counter()
        self._begun = False
        self._decision_due = False
        self.samples: list[FlowSample] = []
        self.decisions: list[Decision] = []
        self.bytes_migrated = 0.0
        self.bytes_joined = 0.0
        self.num_joined = 0
        self.version = 0

    def run(self) -> None:
        """Simulate the whole trace."""
        self.start()
        self.env.run(until=self._trace.duration_s)

    def start(self) -> None:
        """Begin the simulation on a clock that somebody else drives."""
        self.env.process(self._replay())
        if self._rebalancer is not None and self._rebalancer.every_s is not None:
            self.env.process(self._decide_periodically(self._rebalancer.every_s))
        self.env.process(self._keep_ways())

    # --- what happens

    def _replay(self) -> Process:
        for time_s, changes in itertools.groupby(self._trace.changes, key=lambda change: change.time_s):
            yield self.env.timeout(time_s - self.env.now)
            for change in changes:
                if change.joins:
                    self._join(change.machine)
                else:
                    self._leave(change.machine)
            if not self._begun and {peer.stage for peer in self._here()} == {*range(self._num_stages)}:
                # No step has been made yet, so there is nothing to download: weights come from the manifest's seed.
                self._begun = True
                for peer in self._here():
                    if self._lacks(peer.peer_id):
                        self.env.process(self._arrive(peer.peer_id))
                    else:
                        self._serve(peer.peer_id)
            self._record()

    def _join(self, name: str) -> None:
        self._lives[name] += 1
        peer_id = name if self._lives[name] == 1 else f"{name}-{self._lives[name]}"
        self._alive[name] = peer_id
        machine = self.machines[peer_id] = self._machine_of(name)
        if machine.is_closed:
            self._closed.add(peer_id)
        peer = self.peers[peer_id] = PeerView(
            peer_id=peer_id,
            stage=UNDECIDED,
            state=PeerState.JOINING,
            movable=name not in self._pinned,
            too_large=machine.too_large,
            bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s,
        )
        stage = self._pinned.get(name)
        if stage is None:
            stage = choose_stage(self.view(), self.params.stage_costs, peer_id, self.env.now).stage
        self.num_joined += 1
        self._set(replace(peer, stage=stage, since_s=self.env.now))
        if self._begun:
            self.bytes_joined += self.params.state_bytes[stage]
            self.env.process(self._arrive(peer_id))

    def _leave(self, name: str) -> None:
        peer_id = self._alive.pop(name)
        del self.machines[peer_id]
        self._closed.discard(peer_id)
        self.env.process(self._detect(peer_id))

    def _detect(self, peer_id: str) -> Process:
        yield self.env.timeout(DETECTION_S)
        del self.peers[peer_id]
        self.version += 1
        self._something_changed()

    def _download_s(self, peer_id: str, stage: int) -> float:
        """Seconds of a download from stage-mates, which share their bandwidth among askers, or else from snapshots."""
        peers = [peer for peer in self._here() if peer.stage == stage]
        donors = [peer.bandwidth_bytes_per_s for peer in peers if peer.state is PeerState.SERVING]
        bandwidth = self.machines[peer_id].bandwidth_bytes_per_s
        if donors:
            bandwidth = min(bandwidth, sum(donors) / max(1, len(peers) - len(donors)))
        return self.params.state_bytes[stage] / bandwidth

    def _arrive(self, peer_id: str, has_state: bool = False) -> Process:
        """Make the peer serve the stage that it joins, once it lacks nobody there and has the stage's state."""
        while peer_id in self.machines:
            if self._lacks(peer_id):
                yield self.env.timeout(WAYS_LOOK_S)
                if peer_id in self.machines and self._lacks(peer_id):
                    has_state &= not self._goes_elsewhere(peer_id)
                continue
            download_s = 0.0 if has_state else self._download_s(peer_id, self.peers[peer_id].stage)
            yield self.env.timeout(self.params.overhead_s + download_s)
            if peer_id in self.machines and not self._lacks(peer_id):
                self._serve(peer_id)
                self._record()
                return

    def _serve(self, peer_id: str) -> None:
        peer = self.peers[peer_id]
        speed = self.machines[peer_id].work_per_s / self.params.stage_costs[peer.stage]
        self._set(replace(peer, state=PeerState.SERVING, samples_per_s=speed, since_s=self.env.now))
        self._something_changed()

    # --- ways

    def without_way(self, peer_id: str) -> frozenset[str]:
        """The peers that are here, and to whom a peer has no way."""
        return frozenset(self._closed - {peer_id}) if peer_id in self._closed else frozenset()

    def _rosters(self) -> list[list[str]]:
        serving = [peer for peer in self._here() if peer.state is PeerState.SERVING]
        serving.sort(key=lambda peer: (peer.since_s or 0.0, peer.peer_id))
        return [[peer.peer_id for peer in serving if peer.stage == stage] for stage in range(self._num_stages)]

    def _lacks(self, peer_id: str, stage: int | None = None) -> frozenset[str]:
        """Those that a peer needs in a stage (None: its own) and has no way to; it announces what was in vain."""
        if not (without_way := self.without_way(peer_id)):
            return frozenset()
        peer = self.peers[peer_id]
        lacks = lacked(peer.stage if stage is None else stage, self._rosters(), without_way)
        unreached = tuple(sorted(without_way.intersection(peer.unreached) | lacks))
        if unreached != peer.unreached:
            self._set(replace(peer, unreached=unreached))
        return lacks

    def _goes_elsewhere(self, peer_id: str) -> bool:
        """Have a peer that waits for a way join another stage, if it may and knows one in which it lacks nobody."""
        choice = choose_stage(self.view(), self.params.stage_costs, peer_id, self.env.now)
        goes = not choice.lacks and self.peers[peer_id].movable
        if goes:
            self._set(replace(self.peers[peer_id], stage=choice.stage, since_s=self.env.now))
        return goes

    def _rescue(self) -> None:
        """Have a peer take over the first stage of which nothing comes, as live peers do by themselves."""
        view = self.view()
        for stage in as_reached(view).empty_stages()[:1]:
            movable = [peer_id for peer_id in self.machines if self.peers[peer_id].movable]
            chosen = choose_mover(view, stage, movable)
            if chosen.peer_id is not None:
                self._begin(Move(chosen.peer_id, self.peers[chosen.peer_id].stage, stage, chosen.reason))
                self._record()

    def _keep_ways(self) -> Process:
        """Have closed peers give their places up where they lack somebody; without such peers nothing happens."""
        while True:
            yield self.env.timeout(WAYS_PATIENCE_S)
            if self._closed and self._begun and self._rebalancer is not None:
                self._rescue()
            missing = {peer_id: self._closed - {peer_id} for peer_id in self._closed}
            for peer_id in sorted(self._closed):
                rosters, peer = self._rosters(), self.peers[peer_id]
                if peer.state is PeerState.SERVING and gives_way(peer_id, peer.stage, rosters, missing):
                    self._set(replace(peer, state=PeerState.JOINING, since_s=self.env.now, moved_from=UNDECIDED))
                    self.env.process(self._arrive(peer_id))
                    self._record()

    # --- decisions

    def _something_changed(self) -> None:
        is_awaited = self._rebalancer is not None and self._rebalancer.every_s is None
        if is_awaited and self._begun and not self._decision_due:
            self._decision_due = True
            self.env.process(self._decide_soon())

    def _decide_soon(self) -> Process:
        yield self.env.timeout(DECISION_S)
        self._decision_due = False
        self._decide()

    def _decide_periodically(self, every_s: float) -> Process:
        while True:
            yield self.env.timeout(every_s)
            self._decide()

    def _decide(self) -> None:
        if self._rebalancer is None or not self._begun:
            return
        decision = self._rebalancer.decide(self.view(), self.env.now)
        for move in decision.moves:
            self._begin(move)
        if decision.moves:
            self._record()

    def _begin(self, move: Move) -> None:
        if move.peer_id not in self.machines or self._lacks(move.peer_id, move.to_stage):
            return  # it has died, and the others do not know yet; or it finds no way that it needs there
        self.decisions.append(Decision(self.env.now, move))
        self.bytes_migrated += self.params.state_bytes[move.to_stage]
        if self.params.serves_while_downloading:
            self.env.process(self._leave_with_state(move))
        else:
            self._leave_stage(move)
            self.env.process(self._arrive(move.peer_id))

    def _leave_with_state(self, move: Move) -> Process:
        yield self.env.timeout(self._download_s(move.peer_id, move.to_stage))
        if move.peer_id in self.machines:
            self._leave_stage(move)
            self._record()
            self.env.process(self._arrive(move.peer_id, has_state=True))

    def _leave_stage(self, move: Move) -> None:
        # In work per second a peer is as fast there as here, so its speed is known.
        speed = self.machines[move.peer_id].work_per_s / self.params.stage_costs[move.to_stage]
        self._set(
            replace(
                self.peers[move.peer_id],
                stage=move.to_stage,
                state=PeerState.JOINING,
                since_s=self.env.now,
                moved_from=move.from_stage,
                samples_per_s=speed,
            )
        )

    # --- what is known and what is counted

    def view(self) -> SwarmView:
        """The swarm as it announces itself."""
        return SwarmView(self._num_stages, tuple(self.peers.values()))

    def _here(self) -> list[PeerView]:
        """The peers that are alive."""
        return [self.peers[peer_id] for peer_id in self.machines]

    def _set(self, peer: PeerView) -> None:
        self.version += 1
        self.peers[peer.peer_id] = peer

    def _record(self) -> None:
        serving, moving, joining = ([0.0] * self._num_stages for _ in range(3))
        rosters = self._rosters() if self._closed else [[] for _ in serving]
        for peer in self._here():
            if peer.state is PeerState.SERVING and lacked(peer.stage, rosters, self.without_way(peer.peer_id)):
                continue  # no microbatch comes or goes
            kind = serving if peer.state is PeerState.SERVING else joining if peer.moved_from == UNDECIDED else moving
            kind[peer.stage] += self.machines[peer.peer_id].work_per_s / self.params.stage_costs[peer.stage]
        sample = FlowSample(
            time_s=self.env.now,
            throughput=min(serving),
            with_movers=min(map(sum, zip(serving, moving, strict=True))),
            with_all=min(map(sum, zip(serving, moving, joining, strict=True))),
        )
        if self.samples and self.samples[-1].time_s == sample.time_s:
            self.samples[-1] = sample
        else:
            self.samples.append(sample)
