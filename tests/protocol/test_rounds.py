"""Rounds hold what they promise in every order of few messages, and beside members that lie."""

import exhaustive
import liars
import planted_rounds
import pytest
import walks
from checks import Violation
from hypothesis import HealthCheck, settings
from machine import Rounds


@pytest.mark.parametrize(("num_members", "depth"), [(2, 3), (3, 2)])
def test_all_orders_of_a_few_steps(num_members, depth):
    assert exhaustive.explore(num_members, depth) > 100


def test_walks():
    rounds = 0
    for seed in range(40):
        walk = walks.walk(seed)
        rounds += max(m.log.next_round for each in walk.living for m in each.core.members.values())
    assert rounds > 200


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mistakes", planted_rounds.FOUND_BY_WALKS, ids="+".join)
def test_walks_find_mistakes(mistakes):
    seed = planted_rounds.FOUND_BY_WALKS[mistakes]
    with planted_rounds.planted(*mistakes), pytest.raises(Violation):
        walks.walk(seed)
    walks.walk(seed)


@pytest.mark.parametrize("kind", liars.KINDS, ids=lambda kind: kind.__name__)
def test_one_member_that_lies_stops_nothing_and_nothing_goes_back(kind):
    world = liars.run(3, kind)
    assert world.counts["rounds"] > 10
    assert all(epoch.restart.first_round == 0 for epoch in world.epochs.values())
