"""Rounds hold what they promise in every order of few messages, and beside members that lie."""

import exhaustive
import liars
import planted_rounds
import pytest
import walks
from checks import Violation
from hypothesis import HealthCheck, settings
from machine import Rounds

from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.other_stages import OtherStages


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


@pytest.mark.parametrize("seed", [5, 9, 11])
def test_heads_of_other_stages_that_a_leader_makes_up_stop_nothing_and_nothing_goes_back(monkeypatch, seed):
    def lies(part):
        return part._member.me.peer == "p10"

    cut, to_show, told = Leader._cut, OtherStages.to_show, []

    def false_cut(self, now_s, epoch, base, *args, **options):
        if lies(self) and base is not None and self.round.number > 3:
            base = tuple(head if stage == 1 else "made up" for stage, head in enumerate(base))
            told.append(base)
        cut(self, now_s, epoch, base, *args, **options)

    monkeypatch.setattr(Leader, "_cut", false_cut)
    monkeypatch.setattr(OtherStages, "to_show", lambda self, *bases: () if lies(self) else to_show(self, *bases))
    world = liars.WorldWithLiar(seed, liars.Liar, num_faults=0)
    world.run()
    assert told
    assert world.counts["rounds"] > 10
    assert {epoch.restart for epoch in world.epochs.values()} == {BEGINNING}
