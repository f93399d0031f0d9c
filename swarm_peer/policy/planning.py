"""Which peers serve which stage, how many stages there should be, and what one more peer would change.

The cuts come from whoever knows the model; the speeds from prediction.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import comb, prod

from swarm_peer.policy.prediction import Counts, PeerGroup, Prediction, Predictor, StageWork, StepSettings

# Assignments that are all tried where there are no more than these; a search finds its way among more.
MOST_TRIED = 1_000
# Stages that a search looks at, at most, summed over the assignments that it tries: some microseconds each.
MOST_SEARCHED = 30_000
# Times that peers are spread anew, by what they do given the later stages' peers.
SPREADS = 3
# Beginnings that a search goes on from, the best ones: so many stages in all, and so many beginnings at least.
STARTED_STAGES = 120
LEAST_STARTS = 3
# Times that a better assignment, met while single peers were added and taken, is taken for the plan.
MOST_REVISIONS = 3

Assignment = list[list[int]]  # [stage][group]


@dataclass(frozen=True, slots=True)
class Option:
    """What becomes of one number of stages.

    Attributes:
        prediction: None if the peers cannot serve these stages
        reason: what sets the pace, or why it cannot be
    """

    works: tuple[StageWork, ...]
    prediction: Prediction | None
    reason: str

    @property
    def num_stages(self) -> int:
        return len(self.works)

    @property
    def samples_per_s(self) -> float:
        return self.prediction.samples_per_s if self.prediction else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """What one peer more, or one fewer, of a group would do to the chosen option, at the same number of stages.

    Attributes:
        samples_per_s: then; None if the stages could not be served any more
        stages: that have other peers then
    """

    group: int
    difference: int
    samples_per_s: float | None
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    groups: the peers, in the order that counts refer to
    options: one for each number of stages, in ascending order
    best: the fastest; of equally fast ones, that with the fewest stages; None if none can be
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
    """Choose the number of stages and give every peer a stage, or none where it would only slow the others down.

    The order of `groups` does not matter.

    Args:
        cuts: for each number of stages to consider, what its stages ask
        num_stages: one of them, to be taken whether it is the fastest or not
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
        options[number] = best = _option(Predictor(best.works, groups, settings), better)
        found, better = changes(best, groups, settings)
    return Plan(groups, tuple(options), best, found)


def consider(works: Sequence[StageWork], groups: Sequence[PeerGroup], settings: StepSettings) -> Option:
    """The best assignment of these peers to these stages, as far as it was found."""
    predictor = Predictor(works, groups, settings)
    counts = assign(predictor)
    if counts is None:
        return Option(tuple(works), None, _why_not(works, groups, settings.min_peers))
    return _option(predictor, counts)


def _option(predictor: Predictor, counts: Counts) -> Option:
    prediction = predictor.predict(counts)
    return Option(predictor.works, prediction, _why(prediction))


def assign(predictor: Predictor) -> Assignment | None:
    """Peers for every stage that make the fewest seconds a sample; None if some stage can have too few.

    No peer is put where its memory does not suffice. Exact for a few peers; for more, peers go to the stage that is
    worst off, those with the least choice and the fastest first, and single peers are then moved and swapped between
    the stages that set the pace and the others while that helps. A slow link makes the averaging of its stage slow, and
    taking single peers away may not show it: so the search also begins without the slow links.
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
    """Which stages may have a single peer, so that they need no averaging: none, some of those with the most, all."""
    if predictor.settings.min_peers > 1:
        return [[]]
    order = sorted(range(len(predictor.works)), key=lambda k: (-predictor.works[k].averaging_bytes, k))
    return [order[:number] for number in sorted({0, 1, 2, len(order)}) if number <= len(order)]


def _starts(predictor: Predictor, slowest_link: float, alone: Sequence[int]) -> Iterator[Assignment]:
    """Even assignments of the peers with such links and faster ones; none if they do not suffice.

    Args:
        alone: stages that get a single peer, the fastest that there is
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
    """Give each stage the peers that it must have, if that can be done.

    What fits into a memory fits into a larger one: so stages that need much choose first, and take the smallest memory
    that will do.
    """
    groups = predictor.groups
    needs = sorted(range(len(counts)), key=lambda stage: (-predictor.works[stage].memory_bytes(1), stage))
    for stage in [stage for stage in needs for _ in range(predictor.settings.min_peers)]:
        able = [index for index in range(len(groups)) if left[index] and predictor.fits(stage, index)]
        if not able:
            return False
        chosen = min(able, key=lambda index: (groups[index].memory_bytes, -groups[index].flops_per_s, index))
        counts[stage][chosen] += 1
        left[chosen] -= 1
    return True


def _spread(
    predictor: Predictor, counts: Assignment, left: list[int], rates: Sequence[Sequence[float]], stages: Sequence[int]
) -> None:
    """Give each peer that is left to that of these stages which is worst off."""
    totals = [sum(n * rates[k][g] for g, n in enumerate(here)) for k, here in enumerate(counts)]
    possible = [[k for k in stages if predictor.fits(k, g)] for g in range(len(left))]
    order = sorted(range(len(left)), key=lambda g: (len(possible[g]), -predictor.groups[g].flops_per_s, g))
    for index in order:
        for _ in range(left[index] if possible[index] else 0):
            stage = min(possible[index], key=lambda k: (totals[k], k))
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
    """Assignments that differ by one peer that came, went or was swapped at a stage that sets the pace."""
    num_stages, groups = len(counts), range(len(predictor.groups))
    idle = num_stages  # where peers are that have no stage
    slow_stages = sorted(predictor.slow_stages(counts))
    # Who can spare a peer comes first.
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
    """What one peer more, and one fewer, of each group would do.

    Returns:
        the changes; and a better assignment of the peers that there are, if the search has met one on the way
    """
    assert option.prediction is not None
    found, better = [], None
    before = [list(stage.peers) for stage in option.prediction.stages]
    score = Predictor(option.works, groups, settings).score(before)
    for index, group in enumerate(groups):
        for difference in (1, -1):
            other = list(groups)
            other[index] = replace(group, count=group.count + difference)
            predictor = Predictor(option.works, other, settings)
            if difference > 0:
                after: Assignment | None = _with_one_more(predictor, before, index)
            else:
                after = _with_one_fewer(predictor, before, index)
            if after is None:
                found.append(Change(index, difference, None, ()))
                continue
            found.append(Change(index, difference, predictor.score(after)[0], _differing(before, after)))
            if sum(here[index] for here in after) <= group.count and predictor.score(after) > score:
                better, score = after, predictor.score(after)
    return tuple(found), better


def _differing(before: Assignment, after: Assignment) -> tuple[int, ...]:
    return tuple(stage for stage, here in enumerate(after) if here != before[stage])


def _with_one_more(predictor: Predictor, before: Assignment, group: int) -> Assignment:
    """It may also stay without a stage, so that nothing gets slower."""
    candidates = [improve(predictor, before)]
    for stage in range(len(before)):
        if predictor.fits(stage, group):
            grown = [list(here) for here in before]
            grown[stage][group] += 1
            candidates.append(grown)
    return improve(predictor, max(candidates, key=predictor.score))


def _with_one_fewer(predictor: Predictor, before: Assignment, group: int) -> Assignment | None:
    if sum(here[group] for here in before) <= predictor.groups[group].count:
        return before  # one without a stage goes
    candidates = []
    for stage, here in enumerate(before):
        if here[group]:
            shrunk = [list(of_stage) for of_stage in before]
            shrunk[stage][group] -= 1
            candidates.append(shrunk)
    best = improve(predictor, max(candidates, key=predictor.score))
    return best if predictor.score(best)[0] > 0 else assign(predictor)


def smallest_fitting(cuts: Mapping[int, Sequence[StageWork]], groups: Sequence[PeerGroup]) -> int | None:
    """The fewest stages each of which fits into some peer, were there enough of them."""
    largest = max(group.memory_bytes for group in groups)
    fitting = (number for number in sorted(cuts) if all(work.memory_bytes(1) <= largest for work in cuts[number]))
    return next(fitting, None)


def _why_not(works: Sequence[StageWork], groups: Sequence[PeerGroup], min_peers: int) -> str:
    num_peers, largest = sum(group.count for group in groups), max(group.memory_bytes for group in groups)
    stage = max(range(len(works)), key=lambda k: works[k].memory_bytes(1))
    need = works[stage].memory_bytes(1)
    if need > largest:
        return (
            f"stage {stage} needs {need / 1e9:.1f} GB with one microbatch in flight, and the largest peer has "
            f"{largest / 1e9:.1f} GB"
        )
    if num_peers < len(works) * min_peers:
        return f"{len(works)} stages of {min_peers} need {len(works) * min_peers} peers, and there are {num_peers}"
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
