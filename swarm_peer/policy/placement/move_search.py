"""The search for moves that balance the stages.

A step of the search is a single move, or a swap of two peers between two stages. Each step is the one that reduces the
stages' shortfall most. The shortfall is a smooth stand-in for the slowest stage's capacity. If two stages are equally
slow, helping one of them alone does not raise that capacity, but it reduces the shortfall. Of all plans on the way the
search takes the one that computes the most samples; the time in which movers compute nothing is counted in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from swarm_peer.policy.link_limit import StageTraffic
from swarm_peer.policy.placement.capacity import (
    Shift,
    discounted_samples,
    ideal_capacity,
    serving_capacity,
    speed_in,
    work_per_s,
)
from swarm_peer.policy.placement.ways import agreed_ways, cut_off, lacked
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

# With more peers than this, single moves balance the stages well enough, and there are too many swaps to try.
MANY_PEERS = 120
# A plan is given up once more than this many steps in a row have brought nothing better.
MAX_WORSE_STEPS = 3
# From a plan with at most this many moves, any set of moves may be left out if it does as well without them. From a
# longer plan, one move or one swap at a time.
FEW_MOVES = 6
# Each part of a plan must raise the slowest stage by this share of `least_gain`: less is noise.
PART_GAIN = 0.3
# Differences below this share of a plan's gain are rounding.
NEARLY = 1e-9
# Differences of the shortfall beyond so many digits are rounding.
DIGITS = 9
# The higher the power, the more the slowest stage counts in the shortfall.
SHORTFALL_POWER = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancingParameters:
    """The run's numbers that rebalancing depends on.

    Attributes:
        stage_costs: compute of one sample in each stage, in any one unit
        state_bytes: size of each stage's state, which a peer downloads when it joins the stage
        min_replicas: peers that go on serving each stage while one of them moves; at least 1
        bandwidth_bytes_per_s: assumed for peers whose own bandwidth has not been measured
        overhead_s: time of a move besides the download: the peer leaves its stage and builds the new module
        horizon_s: how long the gain of a move lasts, until other peers have come and gone
        payback: the swarm must gain this many times the samples that the mover computes in the time of a move. This
            bounds the bytes of all moves, and keeps a balanced swarm at rest.
        least_gain: the share by which the swarm's throughput must rise; above the noise of measured speeds
        serves_while_downloading: whether a mover serves its former stage until it has the state of the new one
        traffic: of a sample in each stage; empty if all links are wide
    """

    stage_costs: tuple[float, ...]
    state_bytes: tuple[float, ...]
    min_replicas: tuple[int, ...] = ()
    bandwidth_bytes_per_s: float = 25e6
    overhead_s: float = 5.0
    horizon_s: float = 900.0
    payback: float = 2.2
    least_gain: float = 0.01
    serves_while_downloading: bool = False
    traffic: tuple[StageTraffic, ...] = ()

    def replicas(self, stage: int) -> int:
        """Peers that must go on serving the stage."""
        return max(1, self.min_replicas[stage]) if self.min_replicas else 1

    def move_s(self, peer: PeerView, stage: int) -> float:
        """Seconds that it takes the peer to move to the stage."""
        bandwidth = peer.bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        if peer.download_bytes_per_s:
            bandwidth = min(bandwidth, peer.download_bytes_per_s)
        return self.overhead_s + self.state_bytes[stage] / bandwidth


# A mover by its number, and the stage that it goes to; a plan holds some in the order in which they are made.
Pairs = tuple[tuple[int, int], ...]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """One move of a plan, with its times in seconds from now."""

    peer: PeerView
    to_stage: int
    work_per_s: float
    start_s: float
    arrival_s: float


@dataclass(frozen=True, slots=True)
class MovePlan:
    """A set of moves, and what the swarm gains by them.

    Attributes:
        pairs: the moves, by the numbers of their movers
        merit: samples from now on, discounted (capacity.py), less those that the moves must gain at least
        capacity: capacity of each stage after the last move
    """

    pairs: Pairs
    moves: tuple[PlannedMove, ...]
    merit: float
    capacity: tuple[float, ...]

    @property
    def pairs_at_once(self) -> Pairs:
        """The moves that wait for no other one."""
        return tuple(pair for pair, move in zip(self.pairs, self.moves, strict=True) if move.start_s <= 0)


class MoveSearch:
    """Searches the moves of one view.

    Attributes:
        movers: the peers that may move
        rest: the plan without moves
        ideal: the capacity of every stage if speed could be divided among the stages at will
    """

    def __init__(self, view: SwarmView, params: RebalancingParameters, now_s: float):
        self._params = params
        costs, num_stages = params.stage_costs, view.num_stages
        speeds = work_per_s(view.peers, costs)
        self._now = serving_capacity(view, speeds, costs, params.traffic)
        self._arrivals, self._leaving_s, self._coming_s = [], [0.0] * num_stages, [0.0] * num_stages
        self._num_serving = [0] * num_stages
        for peer in view.peers:
            if peer.state is PeerState.SERVING:
                self._num_serving[peer.stage] += 1
            elif peer.state is PeerState.JOINING and peer.stage != UNDECIDED:
                elapsed_s = 0.0 if peer.since_s is None else max(0.0, now_s - peer.since_s)
                # A peer that is late may arrive at any time.
                remaining_s = max(params.move_s(peer, peer.stage) - elapsed_s, 1.0)
                speed = speed_in(peer, peer.stage, speeds[peer.peer_id], costs, params.traffic)
                self._arrivals.append(Shift(remaining_s, peer.stage, speed))
                if peer.moved_from != UNDECIDED:
                    self._leaving_s[peer.moved_from] = max(self._leaving_s[peer.moved_from], remaining_s)
                    self._coming_s[peer.stage] = max(self._coming_s[peer.stage], remaining_s)
        movers = (peer for peer in view.peers if peer.movable and peer.state is PeerState.SERVING)
        # Of movers that serve as well, the search takes the first: the one that misses the fewest samples.
        self.movers = sorted(movers, key=lambda peer: speeds[peer.peer_id] * params.move_s(peer, peer.stage))
        self._work = np.array([*(speeds[peer.peer_id] for peer in self.movers), *(0.0 for _ in costs)])
        # Samples per second of each mover in each stage; behind the movers, nobody does nothing.
        self._speeds = np.zeros((len(self._work), num_stages))
        for number, peer in enumerate(self.movers):
            work = speeds[peer.peer_id]
            self._speeds[number] = [speed_in(peer, k, work, costs, params.traffic) for k in range(num_stages)]
        # A mover is believed in what it says of its own ways, and nobody alone in what concerns others.
        self._unreached = [set(peer.unreached) for peer in self.movers]
        self._ways = agreed_ways(view.peers)
        self._placed = [{peer.peer_id for peer in view.in_stage(stage)} for stage in range(num_stages)]
        self._num_cut_off = cut_off(self._placed, self._ways)
        self.rest = self.schedule(())
        self.ideal = ideal_capacity(self.rest.capacity, costs)

    def best(self) -> MovePlan:
        """The best plan that was found; `rest` if none pays."""
        best = plan = self.rest
        num_worse = 0
        while num_worse <= MAX_WORSE_STEPS and len(plan.moves) < 2 * len(self._now):
            step = self._step(plan)
            if not step:
                break
            plan = self.schedule((*plan.pairs, *step))
            if plan.merit > best.merit and self._begins_well(plan):
                best, num_worse = plan, 0
            else:
                num_worse += 1
        best = self._pruned(best)
        if min(best.capacity) <= min(self.rest.capacity) * (1 + self._params.least_gain):
            return self.rest
        return self._begun(best)

    def _begins_well(self, plan: MovePlan) -> bool:
        """Whether some of the moves that a plan makes at once, if any, reduce the shortfall by themselves."""
        return not plan.pairs_at_once or bool(self._beginning(plan))

    def _beginning(self, plan: MovePlan) -> Pairs:
        """Of the moves that a plan makes at once, those that reduce the shortfall by themselves.

        All others are planned anew once these have arrived. Less is missing each time, so that no move is taken back.
        """
        pairs, missing_now = plan.pairs_at_once, self._missing(self.rest)

        def is_bad(begun: MovePlan) -> bool:
            return begun.merit == -math.inf or self._missing(begun) >= missing_now - NEARLY

        while pairs and is_bad(self.schedule(pairs)):
            shorter = itertools.combinations(pairs, len(pairs) - 1)
            pairs = min(shorter, key=lambda part: self._missing(self.schedule(part)))
        return pairs

    def _begun(self, plan: MovePlan) -> MovePlan:
        """The plan, of which those moves wait that would begin it badly."""
        beginning = self._beginning(plan)
        arrival_s = max((move.arrival_s for move in self.schedule(beginning).moves), default=0.0)
        moves = (
            replace(move, start_s=arrival_s, arrival_s=arrival_s + move.arrival_s)
            if move.start_s <= 0 and pair not in beginning
            else move
            for pair, move in zip(plan.pairs, plan.moves, strict=True)
        )
        return replace(plan, moves=tuple(moves))

    def _missing(self, plan: MovePlan) -> float:
        """The shortfall of all stages together after a plan's last move."""
        return float(self._shortfall(np.array(plan.capacity)).sum())

    @cached_property
    def _stages(self) -> npt.NDArray[np.intp]:
        """The stage of each mover. A move is a swap with nobody, so behind the movers stands nobody of each stage."""
        return np.array([*(peer.stage for peer in self.movers), *range(len(self._now))])

    @cached_property
    def _fits(self) -> npt.NDArray[np.bool_]:
        """Whether each mover can move to each stage; nobody fits everywhere."""
        stages = range(len(self._now))

        def fits(number: int, stage: int) -> bool:
            peer = self.movers[number]
            return stage not in (peer.stage, *peer.too_large) and self._keeps_ways(((number, stage),))

        return np.array(
            [[fits(number, stage) for stage in stages] for number in range(len(self.movers))]
            + [[True for _ in stages] for _ in stages]
        )

    def _keeps_ways(self, pairs: Pairs) -> bool:
        """Whether after some moves no mover lacks a way to somebody that it needs, and no more others than now do."""
        if not self._ways and not any(self._unreached):
            return True
        placed = list(self._placed)
        for number, to_stage in pairs:
            peer = self.movers[number]
            placed[peer.stage] = placed[peer.stage] - {peer.peer_id}
            placed[to_stage] = placed[to_stage] | {peer.peer_id}
        moved = ((to_stage, self._unreached[number]) for number, to_stage in pairs)
        lacks = any(lacked(to_stage, placed, without_way) for to_stage, without_way in moved)
        return not lacks and cut_off(placed, self._ways) <= self._num_cut_off

    def schedule(self, pairs: Pairs) -> MovePlan:
        """Schedule moves, one at a time from and to each stage, and count the samples that the swarm computes."""
        params = self._params
        leaving_s, coming_s, shifts = list(self._leaving_s), list(self._coming_s), list(self._arrivals)
        moves, undone = [], 0.0
        for number, to_stage in pairs:
            peer, work = self.movers[number], float(self._work[number])
            start_s = max(leaving_s[peer.stage], coming_s[to_stage])
            arrival_s = start_s + params.move_s(peer, to_stage)
            leaving_s[peer.stage] = coming_s[to_stage] = arrival_s
            away_s = arrival_s - params.overhead_s if params.serves_while_downloading else start_s
            lost, won = (float(self._speeds[number, stage]) for stage in (peer.stage, to_stage))
            shifts += [Shift(away_s, peer.stage, -lost), Shift(arrival_s, to_stage, won)]
            undone += (arrival_s - start_s) * lost
            moves.append(
                PlannedMove(peer=peer, to_stage=to_stage, work_per_s=work, start_s=start_s, arrival_s=arrival_s)
            )
        capacity = list(self._now)
        for shift in shifts:
            capacity[shift.stage] += shift.samples_per_s
        merit = discounted_samples(self._now, shifts, params.horizon_s) - params.payback * undone
        if not self._keeps_ways(pairs):
            merit = -math.inf
        return MovePlan(pairs, tuple(moves), merit, tuple(capacity))

    def _pruned(self, plan: MovePlan) -> MovePlan:
        """The plan without the moves that it does not need, so that each move that is left pays."""
        while plan.moves:
            as_good = plan.merit - NEARLY * abs(plan.merit - self.rest.merit)
            enough = min(plan.capacity) * (1 - PART_GAIN * self._params.least_gain)
            shorter = [self.schedule(pairs) for pairs in self._shorter(plan.pairs)]
            spared = [other for other in shorter if other.merit >= as_good or min(other.capacity) >= enough]
            spared = [other for other in spared if other.merit > -math.inf and self._begins_well(other)]
            if not spared:
                break
            plan = max(spared, key=lambda plan: plan.merit)
        return plan

    def _shorter(self, pairs: Pairs) -> Iterator[Pairs]:
        """Plans with some of the moves left out, and plans with one move in place of a swap."""
        for num_out in range(1, len(pairs) + 1) if len(pairs) <= FEW_MOVES else (1,):
            yield from itertools.combinations(pairs, len(pairs) - num_out)
        for swap in itertools.combinations(pairs, 2):
            ways = {self.movers[number].stage: to_stage for number, to_stage in swap}
            if set(ways) != set(ways.values()):
                continue
            yield (others := tuple(pair for pair in pairs if pair not in swap))
            taken = {number for number, _ in others}
            for number, peer in enumerate(self.movers):
                if peer.stage in ways and number not in taken and self._fits[number, ways[peer.stage]]:
                    yield (*others, (number, ways[peer.stage]))

    def _step(self, plan: MovePlan) -> Pairs:
        """The move or the swap that reduces the shortfall most for each peer that moves; empty if none reduces it."""
        spare = [number - self._params.replicas(stage) for stage, number in enumerate(self._num_serving)]
        for move in plan.moves:
            spare[move.peer.stage] -= 1
        taken = {number for number, _ in plan.pairs}
        free = [n for n, peer in enumerate(self.movers) if n not in taken and spare[peer.stage] > 0]
        if not free:
            return ()
        num_movers, num_stages = len(self.movers), len(self._now)
        rows = np.array(free)
        swapped = free if sum(self._num_serving) <= MANY_PEERS else []
        columns = np.array([*swapped, *range(num_movers, num_movers + num_stages)])
        speeds, capacity = self._speeds, np.array(plan.capacity)
        here, there = self._stages[rows][:, None], self._stages[columns][None, :]
        net = self._work[rows][:, None] - self._work[columns][None, :]
        # Of the one who goes less that of the one who comes in its place.
        net_here = speeds[rows[:, None], here] - speeds[columns[None, :], here]
        net_there = speeds[rows[:, None], there] - speeds[columns[None, :], there]
        change_RC = (
            self._shortfall(capacity[here] - net_here)
            - self._shortfall(capacity)[here]
            + self._shortfall(capacity[there] + net_there)
            - self._shortfall(capacity)[there]
        ) / np.where(columns < num_movers, 2, 1)
        change_RC[(net <= 0) | ~self._fits[rows][:, there[0]] | ~self._fits[columns][:, here[:, 0]].T] = 0.0
        row, column = np.unravel_index(np.argmin(change_RC.round(DIGITS)), change_RC.shape)
        if change_RC[row, column] > -NEARLY:
            return ()
        step = (free[row], int(there[0, column])), (int(columns[column]), int(here[row, 0]))
        return step if columns[column] < num_movers else step[:1]

    def _shortfall(self, capacity: Floats) -> Floats:
        shortfall: Floats = np.maximum(0.0, 1.0 - capacity / self.ideal) ** SHORTFALL_POWER
        return shortfall
