"""Which peers serve which stage, how many stages there should be, and what one more peer would change.

The caller cuts the model into stages; performance_model.py predicts how fast they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import comb, prod

from swarm_peer.policy.planning.performance_model import Counts, Prediction, Predictor
from swarm_peer.policy.planning.resources import PeerGroup, StageWork, StepSettings

# Up to this many assignments are all tried; with more, a search tries some of them.
MOST_TRIED = 1_000
# The most stages that a search evaluates, summed over the assignments that it tries; each takes some microseconds.
MOST_SEARCHED = 30_000
# Times that peers are spread over the stages anew, each with the rates that follow from the spread before.
SPREADS = 3
# The search goes on from the best beginnings: this many stages in all of them, and at least this many beginnings.
STARTED_STAGES = 120
LEAST_STARTS = 3
# Times that the plan takes a better assignment that was found while single peers were added and removed.
MOST_REVISIONS = 3

Assignment = list[list[int]]  # [stage][group]


@dataclass(frozen=True, slots=True)
class Option:
    """One number of stages, with the best assignment found for it.

    Attributes:
        works: the work of each stage
        prediction: that of the assignment; None if the peers cannot serve these stages
        reason: what limits the throughput, or why the peers cannot serve the stages
    """

    works: tuple[StageWork, ...]
    prediction: Prediction | None
    reason: str

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.works)

    @property
    def samples_per_s(self) -> float:
        """The predicted throughput; 0 if the peers cannot serve these stages."""
        return self.prediction.samples_per_s if self.prediction else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one peer more, or one fewer, in a group on the chosen option, at the same number of stages.

    Attributes:
        group: index of the group
        difference: 1 or -1
        samples_per_s: the throughput after the change; None if the peers could not serve the stages any more
        stages: the stages whose peers would change
    """

    group: int
    difference: int
    samples_per_s: float | None
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for a run, and the alternatives to it.

    Attributes:
        groups: the peers; counts and changes refer to this order
        options: one for each number of stages, in ascending order
        best: the fastest option, and of equally fast ones the one with the fewest stages; None if none is possible
        changes: the effect of one peer more or fewer in each group on `best`
    """

    groups: tuple[PeerGroup, ...]
    options: tuple[Option, ...]
    best: Option | None
    changes: tuple[Change, ...]


def plan(
    cuts: Mapping[int, Sequence[StageWork]],
    groups: Sequence[PeerGroup],
    settings: StepSettings,
    num_stages: int | None = None,
) -> Plan:
    """Choose the number of stages, and a stage for each peer; a peer that would slow the others down gets none.

    The order of `groups` does not matter.

    Args:
        cuts: for each number of stages to consider, the work of its stages
        num_stages: take this number of stages, even if another one is faster
    """
    groups = tuple(sorted(groups))
    options = [consider(cuts[number], groups, settings) for number in sorted(cuts)]
    able = [option for option in options if option.prediction and num_stages in (None, option.num_stages)]
    if not able:
        return Plan(groups, tuple(options), None, ())
    best = max(able, key=lambda option: (option.samples_per_s, -option.num_stages))
    number = options.index(best)
    found, better = changes(best, groups, settings)
    for _ in range(MOST_REVISIONS):
        if better is None:
            break
        options[number] = best = _option(Predictor(works=best.works, groups=groups, settings=settings), better)
        found, better = changes(best, groups, settings)
    return Plan(groups, tuple(options), best, found)


def consider(works: Sequence[StageWork], groups: Sequence[PeerGroup], settings: StepSettings) -> Option:
    """The best assignment of these peers to these stages that the search finds."""
    predictor = Predictor(works=works, groups=groups, settings=settings)
    counts = assign(predictor)
    if counts is None:
        return Option(tuple(works), None, _why_not(works, groups, settings.min_peers))
    return _option(predictor, counts)


def _option(predictor: Predictor, counts: Counts) -> Option:
    prediction = predictor.predict(counts)
    return Option(predictor.works, prediction, _why(prediction))


def assign(predictor: Predictor) -> Assignment | None:
    """The fastest assignment of peers to stages; None if some stage cannot have enough peers.

    No peer gets a stage that does not fit into its memory. For a few peers all assignments are tried. For more, the
    search begins with even assignments: it gives each peer to the slowest stage, first the peers that fit the fewest
    stages, then the fastest. It then moves and swaps single peers between the slowest stages and the others, for as
    long as that helps. One slow link makes the averaging of its whole stage slow. Where a stage has several, removing
    one of them brings nothing, so the search also begins without the slow links.
    """
    num_stages = len(predictor.works)
    if prod(comb(group.count + num_stages, num_stages) for group in predictor.groups) <= MOST_TRIED:
        best = max(_all_assignments(predictor), key=predictor.score)
        return [list(here) for here in best] if predictor.score(best)[0] > 0 else None
    links = sorted({group.link_bytes_per_s for group in predictor.groups})
    starts = [
        start for slowest in links for alone in _lone_stages(predictor) for start in _starts(predictor, slowest, alone)
    ]
    starts.sort(key=predictor.score, reverse=True)
    most = max(LEAST_STARTS, STARTED_STAGES // num_stages)
    return max((improve(predictor, counts) for counts in starts[:most]), key=predictor.score, default=None)


def _lone_stages(predictor: Predictor) -> list[list[int]]:
    """Sets of stages to try with a single peer, which needs no averaging: none, one or two that average most, all."""
    if predictor.settings.min_peers > 1:
        return [[]]
    order = sorted(range(len(predictor.works)), key=lambda k: (-predictor.works[k].averaging_bytes, k))
    return [order[:number] for number in sorted({0, 1, 2, len(order)}) if number <= len(order)]


def _starts(predictor: Predictor, slowest_link: float, alone: Sequence[int]) -> Iterator[Assignment]:
    """Even assignments of all peers whose link is at least this fast; none if they do not suffice.

    Args:
        slowest_link: in bytes per second
        alone: stages that get a single peer, the fastest one
    """
    rates = predictor.rates()
    for _ in range(SPREADS):
        counts = [[0] * len(predictor.groups) for _ in predictor.works]
        left = [group.count * (group.link_bytes_per_s >= slowest_link) for group in predictor.groups]
        if not _cover(predictor, counts, left):
            return
        for stage in alone:
            left = [number + here for number, here in zip(left, counts[stage], strict=True)]
            fastest = max((g for g, number in enumerate(left) if number), key=lambda g: (rates[stage][g], -g))
            left[fastest] -= 1
            counts[stage] = [int(g == fastest) for g in range(len(left))]
        _spread(predictor, counts, left, rates, [stage for stage in range(len(counts)) if stage not in alone])
        yield counts
        rates = predictor.rates(counts)


def _all_assignments(predictor: Predictor) -> Iterator[Counts]:
    num_stages = len(predictor.works)

    def of_group(index: int) -> list[tuple[int, ...]]:
        rooms = [range(predictor.groups[index].count * predictor.fits(stage, index) + 1) for stage in range(num_stages)]
        return [numbers for numbers in product(*rooms) if sum(numbers) <= predictor.groups[index].count]

    for by_group in product(*(of_group(index) for index in range(len(predictor.groups)))):
        yield list(zip(*by_group, strict=True))


def _cover(predictor: Predictor, counts: Assignment, left: list[int]) -> bool:
    """Give each stage the peers that it must have, if that is possible.

    The stages that need the most memory choose first, and each takes the peer with the smallest memory that suffices,
    since a stage that fits into one memory also fits into a larger one.
    """
    groups = predictor.groups
    needs = sorted(range(len(counts)), key=lambda stage: (-predictor.works[stage].memory.peak_bytes(1), stage))
    for stage in [stage for stage in needs for _ in range(predictor.settings.min_peers)]:
        able = [index for index in range(len(groups)) if left[index] and predictor.fits(stage, index)]
        able = [index for index in able if predictor.may_join(counts, stage, index)]
        if not able:
            return False
        chosen = min(able, key=lambda g: (groups[g].is_closed, groups[g].memory_bytes, -groups[g].flops_per_s, g))
        counts[stage][chosen] += 1
        left[chosen] -= 1
    return True


def _spread(
    predictor: Predictor, counts: Assignment, left: list[int], rates: Sequence[Sequence[float]], stages: Sequence[int]
) -> None:
    """Give each remaining peer to the slowest of these stages."""
    totals = [sum(n * rates[k][g] for g, n in enumerate(here)) for k, here in enumerate(counts)]
    possible = [[k for k in stages if predictor.fits(k, g)] for g in range(len(left))]
    groups = predictor.groups
    order = sorted(range(len(left)), key=lambda g: (groups[g].is_closed, len(possible[g]), -groups[g].flops_per_s, g))
    for index in order:
        for _ in range(left[index]):
            reached = [k for k in possible[index] if predictor.may_join(counts, k, index)]
            if not reached:
                break
            stage = min(reached, key=lambda k: (totals[k], k))
            counts[stage][index] += 1
            totals[stage] += rates[stage][index]


def improve(predictor: Predictor, counts: Assignment) -> Assignment:
    """Move and swap single peers while the score rises."""
    score, searched = predictor.score(counts), 0
    while True:
        for candidate in _neighbours(predictor, counts):
            searched += len(counts)
            if searched > MOST_SEARCHED:
                return counts
            if (found := predictor.score(candidate)) > score:
                counts, score = candidate, found
                break
        else:
            return counts


def _neighbours(predictor: Predictor, counts: Assignment) -> Iterator[Assignment]:
    """Assignments that differ by one peer that is added, removed or swapped at one of the slowest stages."""
    num_stages, groups = len(counts), range(len(predictor.groups))
    idle = num_stages  # stands for the place of peers without a stage
    slow_stages = sorted(predictor.slow_stages(counts))
    # Idle peers are tried first, then those of the fastest stages.
    by_wealth = [idle, *(predictor.stages_by_rate(counts) if all(map(any, counts)) else range(num_stages))]
    spare = [predictor.groups[g].count - sum(here[g] for here in counts) for g in groups]
    table = [*counts, spare]

    def moved(moves: Sequence[tuple[int, int, int]]) -> Assignment:
        changed = [list(here) for here in table]
        for group, source, target in moves:
            changed[source][group] -= 1
            changed[target][group] += 1
        return changed[:num_stages]

    def fits(stage: int, group: int) -> bool:
        return stage == idle or predictor.fits(stage, group)

    for slow in slow_stages:
        others = [place for place in by_wealth if place != slow]
        for other in others:
            for g in groups:
                if table[other][g] and fits(slow, g):
                    yield moved([(g, other, slow)])
        for g in groups:
            if table[slow][g]:
                yield moved([(g, slow, idle)] * table[slow][g])
                yield from (moved([(g, slow, other)]) for other in others if fits(other, g))
        for other in others:
            for g, h in product(groups, groups):
                if g != h and table[slow][g] and table[other][h] and fits(other, g) and fits(slow, h):
                    yield moved([(g, slow, other), (h, other, slow)])


def changes(
    option: Option, groups: Sequence[PeerGroup], settings: StepSettings
) -> tuple[tuple[Change, ...], Assignment | None]:
    """The effect of one peer more, and of one fewer, in each group.

    Returns:
        the changes, and a better assignment of the present peers if the search has found one on the way, else None
    """
    assert option.prediction is not None
    found, better = [], None
    before = [list(stage.peers) for stage in option.prediction.stages]
    score = Predictor(works=option.works, groups=groups, settings=settings).score(before)
    for index, group in enumerate(groups):
        for difference in (1, -1):
            other = list(groups)
            other[index] = replace(group, count=group.count + difference)
            predictor = Predictor(works=option.works, groups=other, settings=settings)
            if difference > 0:
                after: Assignment | None = _with_one_more(predictor, before, index)
            else:
                after = _with_one_fewer(predictor, before, index)
            if after is None:
                found.append(Change(index, difference, None, ()))
                continue
            changed = tuple(stage for stage, here in enumerate(after) if here != before[stage])
            found.append(Change(index, difference, predictor.score(after)[0], changed))
            if sum(here[index] for here in after) <= group.count and predictor.score(after) > score:
                better, score = after, predictor.score(after)
    return tuple(found), better


def _with_one_more(predictor: Predictor, before: Assignment, group: int) -> Assignment:
    """The assignment with one more peer. It may stay without a stage, so that nothing gets slower."""
    candidates = [improve(predictor, before)]
    for stage in range(len(before)):
        if predictor.fits(stage, group):
            grown = [list(here) for here in before]
            grown[stage][group] += 1
            candidates.append(grown)
    return improve(predictor, max(candidates, key=predictor.score))


def _with_one_fewer(predictor: Predictor, before: Assignment, group: int) -> Assignment | None:
    if sum(here[group] for here in before) <= predictor.groups[group].count:
        return before  # a peer without a stage is removed
    candidates = []
    for stage, here in enumerate(before):
        if here[group]:
            shrunk = [list(of_stage) for of_stage in before]
            shrunk[stage][group] -= 1
            candidates.append(shrunk)
    best = improve(predictor, max(candidates, key=predictor.score))
    return best if predictor.score(best)[0] > 0 else assign(predictor)


def smallest_fitting(cuts: Mapping[int, Sequence[StageWork]], groups: Sequence[PeerGroup]) -> int | None:
    """The smallest number of stages of which each fits into the largest peer, if there were enough such peers."""
    largest = max(group.memory_bytes for group in groups)
    fitting = (number for number in sorted(cuts) if all(work.memory.peak_bytes(1) <= largest for work in cuts[number]))
    return next(fitting, None)


def _why_not(works: Sequence[StageWork], groups: Sequence[PeerGroup], min_peers: int) -> str:
    num_peers, largest = sum(group.count for group in groups), max(group.memory_bytes for group in groups)
    stage = max(range(len(works)), key=lambda k: works[k].memory.peak_bytes(1))
    need = works[stage].memory.peak_bytes(1)
    if need > largest:
        return (
            f"stage {stage} needs {need / 1e9:.1f} GB with one microbatch in flight, and the largest peer has "
            f"{largest / 1e9:.1f} GB"
        )
    num_closed = sum(group.count for group in groups if group.is_closed)
    if num_peers < len(works) * min_peers:
        return f"{len(works)} stages of {min_peers} need {len(works) * min_peers} peers, and there are {num_peers}"
    if num_closed:
        return (
            f"{num_closed} of {num_peers} peers are closed: no two of them can be stage-mates, nor the only peers of "
            f"two stages, and too few others are there"
        )
    able = sum(group.count for group in groups if group.memory_bytes >= need)
    return (
        f"too few peers have the memory: stage {stage} needs {need / 1e9:.1f} GB, and {able} of {num_peers} have that"
    )


def _why(prediction: Prediction) -> str:
    slowest = prediction.stages[prediction.slowest_stage]
    pace = f"stage {prediction.slowest_stage} sets the pace of the stream ({slowest.limit})"
    if prediction.limit == slowest.limit:
        return pace
    return f"most of a step is {prediction.limit}; {pace}"
