"""The search for moves that even the stages out.

Steps are single moves and swaps of two peers between two stages. Each step is the one that takes the most off the
stages' shortfall, which is a smooth stand-in for what counts: it sees a way where lifting the least stage alone brings
nothing, since another is as low. Of all plans on the way, the one is taken that does the most samples, the time in
which movers do nothing included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm_peer.policy.forecast import Shift, discounted_samples, fits
from swarm_peer.policy.view import PeerView

Floats = npt.NDArray[np.float64]

# Peers of one stage that are tried as movers, from the slowest to the fastest: all in a swarm of tens.
TRIED_PER_STAGE = 12
# First steps that are each followed up by a plan.
BEAM = 3
# Above so many peers in the stages, single moves alone even them out well enough, and swaps take long to look through.
MANY_PEERS = 120
# A plan that has got worse so many steps in a row is given up.
PATIENCE = 3
# Of plans with at most so many moves, all parts are looked at for one that does as well; of longer ones, those that are
# one move or one swap shorter.
FEW_MOVES = 6
# Of what the whole plan must lift the least stage by, each part of it must: what lifts it by less is noise.
PART_GAIN = 0.3
# Of what a plan gains: less is rounding.
NEARLY = 1e-9
# The higher, the more the least stage counts in the shortfall and the less the others.
SHORTFALL_POWER = 3.0


@dataclass(frozen=True, slots=True)
class RebalancingParameters:
    """What the decision needs to know of the run.

    Attributes:
        stage_costs: compute of one sample in each stage, in any one unit
        state_bytes: what a peer downloads that comes to a stage
        stage_memory_bytes: what each stage takes; empty where memory is no limit
        min_replicas: peers that go on serving each stage while one of them moves; 1 at least
        bandwidth_bytes_per_s: of a peer whose own has not been measured
        overhead_s: what a move takes besides the download: to leave, to build the stage's module
        horizon_s: how long an advantage lasts, roughly, until comings and goings have changed the stages anyway
        payback: the swarm must gain this many times the samples that the mover would have done in its stage while it
            moves; what bounds the bytes that are moved, and keeps a swarm at rest
        least_gain: by how much of itself the swarm's throughput must rise; above the noise of measured speeds
        exchange_patience_s: for how long an exchange of peers must have looked worth it (ExchangePatience)
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
        return max(1, self.min_replicas[stage]) if self.min_replicas else 1

    def move_s(self, peer: PeerView, stage: int) -> float:
        bandwidth = peer.bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        return self.overhead_s + self.state_bytes[stage] / bandwidth


@dataclass(frozen=True, slots=True)
class Situation:
    """Attributes:
    now: samples/s of each stage
    planned: when all have arrived that are on their way
    ideal: what each would have if speed could be shared out at will
    leaving_s: until when a peer is on its way from each stage; 0 if none is
    coming_s: until when a mover is on its way to each stage
    """

    now: Sequence[float]
    planned: Sequence[float]
    arrivals: Sequence[Shift]
    ideal: float
    leaving_s: Sequence[float]
    coming_s: Sequence[float]
    num_serving: Sequence[int]
    movers: Sequence[PeerView]  # that may move, each with its
    work: Sequence[float]


@dataclass(frozen=True, slots=True)
class PlannedMove:
    peer: PeerView
    to_stage: int
    work_per_s: float
    start_s: float
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    samples: discounted; of the plan without moves, what the swarm does anyway
    capacity: of each stage at the end
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

    def best(self) -> Plan:
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
                if worse > PATIENCE:
                    break
                following = self._steps(plan, 1) if len(plan.moves) < 2 * self._num_stages else []
                if not following:
                    break
                plan = self._evaluate([*self._pairs(plan), *following[0]])
        best = self._pruned(best, empty)
        return best if min(best.capacity) > min(empty.capacity) * (1 + self._params.least_gain) else empty

    def _may_pay(self, empty: Plan) -> bool:
        """Whether even an ideal move would pay: the least a move costs, and the most that can be had after it."""
        params = self._params
        quickest = max(self._movers, key=lambda peer: peer.bandwidth_bytes_per_s or params.bandwidth_bytes_per_s)
        move_s = min(params.move_s(quickest, k) for k in range(self._num_stages))
        most = (self._situation.ideal - min(empty.capacity)) * params.horizon_s * math.exp(-move_s / params.horizon_s)
        return most > params.payback * move_s * float((self._work / self._costs[self._stages]).min())

    def _merit(self, plan: Plan) -> float:
        """Samples, less what the plan's moves must bring at least."""
        costs = self._params.stage_costs
        undone = sum((move.arrival_s - move.start_s) * move.work_per_s / costs[move.peer.stage] for move in plan.moves)
        return plan.samples - self._params.payback * undone

    def _pairs(self, plan: Plan) -> list[tuple[int, int]]:
        return [(self._number(move), move.to_stage) for move in plan.moves]

    def _number(self, move: PlannedMove) -> int:
        return self._numbers[move.peer.peer_id]

    def _pruned(self, plan: Plan, empty: Plan) -> Plan:
        """Without the moves that it can do without, so that all that are left pay, each and together."""
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

    def _shorter(self, plan: Plan) -> Iterator[Plan]:
        """Plans of some of the moves, and those where one move does the work of two that change places."""
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

    def _evaluate(self, pairs: Sequence[tuple[int, int]]) -> Plan:
        """Schedule moves, one at a time from and to each stage, and see what the swarm does."""
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
            moves.append(PlannedMove(peer, to_stage, work, start_s, arrival_s))
        return Plan(
            tuple(moves), discounted_samples(situation.now, shifts, params.horizon_s), tuple(capacity)
        )  # fmt: skip

    def _steps(self, plan: Plan, limit: int) -> list[list[tuple[int, int]]]:
        """The steps that take the most off the shortfall, best first, at most `limit` of singles and of swaps."""
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

        # Swaps: the row's peer, of a stage that falls short, and the column's change places.
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


def best_plan(situation: Situation, params: RebalancingParameters) -> tuple[Plan, Plan]:
    """The best plan found, and the one without moves."""
    search = _Search(situation, params)
    plan = search.best()
    return plan, search._evaluate(())
