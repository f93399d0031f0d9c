"""The best that any assignment of peers to stages can do, moves being free.

`optimum` is never less than the truth, so that no policy looks better than it is: exact within OPTIMUM_TOLERANCE for
equal stages and few peers to each, elsewhere a bound that is close where there are many. Tests check both against
integer programming.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

# Share by which an optimum that is called exact may be overestimated.
OPTIMUM_TOLERANCE = 1e-3
# Above so many peers to a stage the bound is as good as exact: speeds can be combined in enough ways.
FEW_PER_STAGE = 6
# Groups that are tried before a question is given up; they take some hundredths of a second.
MAX_TRIES = 4000


def optimum(work_per_s: Sequence[float], stage_costs: Sequence[float]) -> float:
    """Samples per second, at the least stage, of the best assignment, or a little more."""
    work = sorted(work_per_s, reverse=True)
    num_stages = len(stage_costs)
    high = upper_bound(work, stage_costs)
    if len(work) > FEW_PER_STAGE * num_stages or len(set(stage_costs)) > 1 or high <= 0 or num_stages == 1:
        return high
    low = _greedy(work, num_stages)
    scale = stage_costs[0]
    high *= scale
    # The bound is often nearly met, so the first question is asked close to it.
    target = high * (1 - OPTIMUM_TOLERANCE)
    while high - low > OPTIMUM_TOLERANCE * high:
        found = _cover(work, num_stages, max(target, low * (1 + 1e-9)))
        if found is None:
            break  # given up: nothing better than `high` is proven
        if found:
            low = max(low, target)
        else:
            high = target
        target = (low + high) / 2
    return high / scale


def upper_bound(work_per_s: Sequence[float], stage_costs: Sequence[float]) -> float:
    """No assignment does more samples per second than this.

    A peer serves one stage. So if the j fastest peers are set aside, at most j stages are covered by them, and the
    others, at the least those of the smallest costs, have to do with the rest. For j = 0 that is all speed over all
    cost. In the same way, some stage has at most n / K peers, and at best it has the fastest and is the cheapest.
    """
    work = np.sort(np.asarray(work_per_s, dtype=np.float64))[::-1]
    costs = np.sort(np.asarray(stage_costs, dtype=np.float64))
    num_stages = len(costs)
    if len(work) < num_stages:
        return 0.0
    rest = work.sum() - np.concatenate([[0.0], np.cumsum(work[: num_stages - 1])])
    cheapest = np.cumsum(costs)[::-1]
    few = len(work) // num_stages
    return min(float(np.min(rest / cheapest)), float(work[:few].sum() / costs[0]))


def _greedy(work: Sequence[float], num_stages: int) -> float:
    loads = [0.0] * num_stages
    for done in work:
        loads[loads.index(min(loads))] += done
    return min(loads)


def _cover(work: Sequence[float], num_groups: int, target: float) -> bool | None:
    """Whether peers, fastest first, make `num_groups` groups that do `target` each; None if it takes too long to say.

    Equal stages: the fastest peer that is left is in some group, so groups are made one after the other around it. A
    group that would do without one of its peers need not be tried, nor one that wastes more than there is to spare.
    """
    tries = itertools.count()

    class TooManyError(Exception):
        pass

    def groups(left: tuple[float, ...], num_left: int) -> bool:
        while num_left and left and left[0] >= target:
            left, num_left = left[1:], num_left - 1
        if not num_left:
            return True
        spare = sum(left) - num_left * target + 1e-9 * target  # the last group wastes all there is, but for rounding
        if spare < 0 or len(left) < 2 * num_left:
            return False
        return complete(left[1:], 0, target - left[0], (), spare, num_left)

    def complete(
        left: tuple[float, ...], start: int, missing: float, taken: tuple[int, ...], spare: float, num_left: int
    ) -> bool:
        if next(tries) > MAX_TRIES:
            raise TooManyError
        # Slowest last: from the one that just completes the group on, none wastes more.
        for index in range(len(left) - 1, start - 1, -1):
            done = left[index]
            if done >= missing:
                if done - missing > spare:
                    break
                rest = tuple(other for n, other in enumerate(left) if n != index and n not in taken)
                if groups(rest, num_left - 1):
                    return True
        previous = None
        for index in range(start, len(left)):
            done = left[index]
            if done < missing and done != previous and sum(left[index:]) >= missing:
                if complete(left, index + 1, missing - done, (*taken, index), spare, num_left):
                    return True
                previous = done
        return False

    try:
        return groups(tuple(work), num_groups)
    except TooManyError:
        return None
