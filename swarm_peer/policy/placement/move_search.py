"""The search for moves that balance the stages.

A step of the search is a single move, or a swap of two peers between two stages. Each step is the one that reduces the
stages' shortfall most. The shortfall is a smooth stand-in for the slowest stage's capacity. If two stages are equally
slow, helping one of them alone does not raise that capacity, but it reduces the shortfall. Of all plans on the way the
search takes the one that computes the most samples; the time in which movers compute nothing is counted in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm_peer.policy.placement.capacity import Shift, discounted_samples, fits
from swarm_peer.policy.view import PeerView

Floats = npt.NDArray[np.float64]

# Peers of one stage that are tried as movers, spread from the slowest to the fastest. In a swarm of tens that is all.
TRIED_PER_STAGE = 12
# First steps from which a plan is searched.
BEAM = 3
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
# The higher the power, the more the slowest stage counts in the shortfall.
SHORTFALL_POWER = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancingParameters:
    """The run's numbers that rebalancing depends on.

    Attributes:
        stage_costs: compute of one sample in each stage, in any one unit
        state_bytes: size of each stage's state, which a peer downloads when it joins the stage
        stage_memory_bytes: memory that each stage takes; empty if memory is no limit
        min_replicas: peers that go on serving each stage while one of them moves; at least 1
        bandwidth_bytes_per_s: assumed for peers whose own bandwidth has not been measured
        overhead_s: time of a move besides the download: the peer leaves its stage and builds the new module
        horizon_s: how long the gain of a move lasts, until other peers have come and gone
        payback: the swarm must gain this many times the samples that the mover misses while it moves. This bounds the
            bytes of all moves, and keeps a balanced swarm at rest.
        least_gain: the share by which the swarm's throughput must rise; above the noise of measured speeds
        exchange_patience_s: for how long an exchange of peers must have seemed worthwhile (ExchangePatience)
    """

    stage_costs: tuple[float, ...]
    state_bytes: tuple[float, ...]
    stage_memory_bytes: tuple[float, ...] = ()
    min_replicas: tuple[int, ...] = ()
    bandwidth_bytes_per_s: float = 25e6
    overhead_s: float = 5.0
    horizon_s: float = 900.0
    payback: float = 2.2
    least_gain: float = 0.01
    exchange_patience_s: float = 120.0

    def replicas(self, stage: int) -> int:
        """Peers that must go on serving the stage."""
        return max(1, self.min_replicas[stage]) if self.min_replicas else 1

    def move_s(self, peer: PeerView, stage: int) -> float:
        """Seconds that it takes the peer to move to the stage."""
        bandwidth = peer.bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        return self.overhead_s + self.state_bytes[stage] / bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The swarm as the search finds it.

    Attributes:
        now: present capacity of each stage, in samples/s
        planned: capacity of each stage when all joining peers have arrived
        arrivals: the changes of capacity that lead from `now` to `planned`
        ideal: capacity of every stage if speed could be divided among the stages at will
        leaving_s: seconds until the peer that moves away from each stage has arrived elsewhere; 0 if none does
        coming_s: seconds until the peer that moves to each stage has arrived; 0 if none does
        num_serving: serving peers of each stage
        movers: the peers that may move
        work: the speed of each mover
    """

    now: Sequence[float]
    planned: Sequence[float]
    arrivals: Sequence[Shift]
    ideal: float
    leaving_s: Sequence[float]
    coming_s: Sequence[float]
    num_serving: Sequence[int]
    movers: Sequence[PeerView]
    work: Sequence[float]


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
    """A set of moves, and what the swarm computes with them.

    Attributes:
        samples: samples from now on, discounted (capacity.py); without moves, what the swarm computes anyway
        capacity: capacity of each stage after the last move
    """

    moves: tuple[PlannedMove, ...]
    samples: float
    capacity: tuple[float, ...]


class _Search:
    def __init__(self, situation: Situation, params: RebalancingParameters):
        self._situation = situation
        self._params = params
        self._costs = np.array(params.stage_costs, dtype=np.float64)
        self._num_stages = len(params.stage_costs)
        tried = sorted(self._tried())
        self._movers = [situation.movers[number] for number in tried]
        self._numbers = {peer.peer_id: number for number, peer in enumerate(self._movers)}
        self._stages = np.array([peer.stage for peer in self._movers], dtype=np.intp)
        self._work = np.array([situation.work[number] for number in tried], dtype=np.float64)
        self._fits = np.array(
            [
                [peer.stage != k and fits(peer, k, params.stage_memory_bytes) for k in range(self._num_stages)]
                for peer in self._movers
            ],
            dtype=bool,
        ).reshape(len(tried), self._num_stages)

    def _tried(self) -> list[int]:
        situation = self._situation
        by_stage: dict[int, list[int]] = {}
        for number, peer in enumerate(situation.movers):
            if situation.num_serving[peer.stage] > self._params.replicas(peer.stage):
                by_stage.setdefault(peer.stage, []).append(number)
        tried = []
        for numbers in by_stage.values():
            numbers.sort(key=lambda number: (situation.work[number], situation.movers[number].peer_id))
            ranks = np.linspace(0, len(numbers) - 1, min(len(numbers), TRIED_PER_STAGE)).round().astype(int)
            tried += [numbers[rank] for rank in ranks]
        return tried

    def best(self) -> MovePlan:
        empty = self._evaluate(())
        best = empty
        if not self._movers or not self._may_pay(empty):
            return empty
        many = sum(self._situation.num_serving) > MANY_PEERS
        for first in self._steps(empty, 1 if many else BEAM):
            plan = self._evaluate(first)
            worse = 0
            while True:
                worse = 0 if self._merit(plan) > self._merit(best) else worse + 1
                best = max(best, plan, key=self._merit)
                if worse > MAX_WORSE_STEPS:
                    break
                following = self._steps(plan, 1) if len(plan.moves) < 2 * self._num_stages else []
                if not following:
                    break
                plan = self._evaluate([*self._pairs(plan), *following[0]])
        best = self._pruned(best, empty)
        return best if min(best.capacity) > min(empty.capacity) * (1 + self._params.least_gain) else empty

    def _may_pay(self, empty: MovePlan) -> bool:
        """Whether an ideal move would pay: the cheapest mover, with the largest possible gain."""
        params = self._params
        quickest = max(self._movers, key=lambda peer: peer.bandwidth_bytes_per_s or params.bandwidth_bytes_per_s)
        move_s = min(params.move_s(quickest, k) for k in range(self._num_stages))
        most = (self._situation.ideal - min(empty.capacity)) * params.horizon_s * math.exp(-move_s / params.horizon_s)
        return most > params.payback * move_s * float((self._work / self._costs[self._stages]).min())

    def _merit(self, plan: MovePlan) -> float:
        """The plan's samples, less those that its moves must gain at least."""
        costs = self._params.stage_costs
        undone = sum((move.arrival_s - move.start_s) * move.work_per_s / costs[move.peer.stage] for move in plan.moves)
        return plan.samples - self._params.payback * undone

    def _pairs(self, plan: MovePlan) -> list[tuple[int, int]]:
        return [(self._number(move), move.to_stage) for move in plan.moves]

    def _number(self, move: PlannedMove) -> int:
        return self._numbers[move.peer.peer_id]

    def _pruned(self, plan: MovePlan, empty: MovePlan) -> MovePlan:
        """The plan without the moves that it does not need, so that each move that is left pays."""
        while plan.moves:
            merit = self._merit(plan)
            as_good = merit - NEARLY * abs(merit - self._merit(empty))
            enough = min(plan.capacity) * (1 - PART_GAIN * self._params.least_gain)
            spared = [
                shorter
                for shorter in self._shorter(plan)
                if self._merit(shorter) >= as_good or min(shorter.capacity) >= enough
            ]
            if not spared:
                break
            plan = max(spared, key=self._merit)
        return plan

    def _shorter(self, plan: MovePlan) -> Iterator[MovePlan]:
        """Plans with some of the moves left out, and plans with one move in place of a swap."""
        pairs = self._pairs(plan)
        numbers = range(len(pairs))
        swaps = [
            (first, second)
            for first, second in itertools.combinations(numbers, 2)
            if plan.moves[first].peer.stage == plan.moves[second].to_stage
            and plan.moves[second].peer.stage == plan.moves[first].to_stage
        ]
        counts = range(1, len(pairs) + 1) if len(pairs) <= FEW_MOVES else [1]
        parts = [out for count in counts for out in itertools.combinations(numbers, count)]
        for out in parts if len(pairs) <= FEW_MOVES else [*parts, *swaps]:
            yield self._evaluate([pair for n, pair in enumerate(pairs) if n not in out])
        for swap in swaps:
            others = [pair for n, pair in enumerate(pairs) if n not in swap]
            taken = {number for number, _ in others}
            ways = {plan.moves[n].peer.stage: plan.moves[n].to_stage for n in swap}
            for number, stage in enumerate(self._stages.tolist()):
                if stage in ways and number not in taken and self._fits[number, ways[stage]]:
                    yield self._evaluate([*others, (number, ways[stage])])

    def _evaluate(self, pairs: Sequence[tuple[int, int]]) -> MovePlan:
        """Schedule moves, one at a time from and to each stage, and count the samples that the swarm computes."""
        situation, params = self._situation, self._params
        leaving_s, coming_s = list(situation.leaving_s), list(situation.coming_s)
        shifts = list(situation.arrivals)
        capacity = list(situation.planned)
        moves = []
        for number, to_stage in pairs:
            peer, work = self._movers[number], float(self._work[number])
            start_s = max(leaving_s[peer.stage], coming_s[to_stage])
            arrival_s = start_s + params.move_s(peer, to_stage)
            leaving_s[peer.stage] = coming_s[to_stage] = arrival_s
            lost, won = work / params.stage_costs[peer.stage], work / params.stage_costs[to_stage]
            shifts += [Shift(start_s, peer.stage, -lost), Shift(arrival_s, to_stage, won)]
            capacity[peer.stage] -= lost
            capacity[to_stage] += won
            moves.append(
                PlannedMove(peer=peer, to_stage=to_stage, work_per_s=work, start_s=start_s, arrival_s=arrival_s)
            )
        return MovePlan(tuple(moves), discounted_samples(situation.now, shifts, params.horizon_s), tuple(capacity))

    def _steps(self, plan: MovePlan, limit: int) -> list[list[tuple[int, int]]]:
        """The steps that reduce the shortfall most, best first: at most `limit` single moves and `limit` swaps."""
        capacity = np.array(plan.capacity)
        shortfall = self._shortfall(capacity)
        free = np.ones(len(self._movers), dtype=bool)
        left = np.array(self._situation.num_serving)
        for move in plan.moves:
            free[self._number(move)] = False
            left[move.peer.stage] -= 1
        replicas = np.array([self._params.replicas(k) for k in range(self._num_stages)])
        free &= (left > replicas)[self._stages]
        numbers = np.flatnonzero(free)
        if not numbers.size:
            return []
        stages, work = self._stages[numbers], self._work[numbers]
        without = capacity[stages] - work / self._costs[stages]
        change_without = self._shortfall(without) - shortfall[stages]
        gained = capacity[None, :] + work[:, None] / self._costs[None, :]
        change = change_without[:, None] + self._shortfall(gained) - shortfall[None, :]
        change[~self._fits[numbers]] = np.inf
        steps: list[tuple[float, list[tuple[int, int]]]] = []
        for flat in np.argsort(change, axis=None, kind="stable")[:limit]:
            row, to_stage = divmod(int(flat), self._num_stages)
            steps.append((float(change[row, to_stage]), [(int(numbers[row]), to_stage)]))

        if sum(self._situation.num_serving) > MANY_PEERS:
            return [pairs for gain, pairs in steps if gain < -1e-9]

        # Swaps: the row's peer, of a stage below the ideal, and the column's peer change places.
        rows = np.flatnonzero((capacity < self._situation.ideal)[stages])
        here, there = stages[rows][:, None], stages[None, :]
        net = work[None, :] - work[rows][:, None]
        swapped = (
            self._shortfall(capacity[here] + net / self._costs[here])
            - shortfall[here]
            + self._shortfall(capacity[there] - net / self._costs[there])
            - shortfall[there]
        )
        fits_there = self._fits[numbers[rows]][:, stages]
        fits_here = self._fits[numbers][:, stages[rows]].T
        swapped[~(fits_there & fits_here) | (net <= 0)] = np.inf
        for flat in np.argsort(swapped, axis=None, kind="stable")[:limit]:
            row, column = divmod(int(flat), len(numbers))
            row = int(rows[row])
            pair = [(int(numbers[row]), int(stages[column])), (int(numbers[column]), int(stages[row]))]
            steps.append((float(swapped.flat[flat]), pair))
        steps = [(gain, pairs) for gain, pairs in steps if gain < -1e-9]
        # Per move, so that a swap must bring more than one move does.
        return [pairs for _, pairs in sorted(steps, key=lambda step: step[0] / len(step[1]))]

    def _shortfall(self, capacity: Floats) -> Floats:
        shortfall: Floats = np.maximum(0.0, 1.0 - capacity / self._situation.ideal) ** SHORTFALL_POWER
        return shortfall


def best_plan(situation: Situation, params: RebalancingParameters) -> tuple[MovePlan, MovePlan]:
    """The best plan found, and the one without moves."""
    search = _Search(situation, params)
    plan = search.best()
    return plan, search._evaluate(())
