"""Who is in the run and what counts is agreed whatever the network does, and mistakes in that are found."""

import ballots
import planted_membership
import planted_rounds
import pytest
import was_alone
import world

# In these, rounds once stood still: over a contribution that weighed too much, over the reign of a leader whose older
# epochs a member did not know, over counts that a leader believed and the close of their round did not, over a stage
# whose entries were made from some that another stage had made anew, where the run key had gone on without them, and
# over a longer log of the epoch before the run key's, which its leader preferred and another member refused. In one, a
# stage went on from entries that were made from what another stage had lost; in one, two seats led in turns; in one, a
# leader refused its own cut; in the last, a leader kept too short a log to tell of a head that another stage needed.
BROKEN_BEFORE = (50357, 50496, 50525, 50623, 50945, 203521, 415692, 500851, 640221, 675044, 802786)


@pytest.mark.parametrize("seed", [*range(16), *BROKEN_BEFORE])
def test_schedules(seed):
    world.run(seed)


@pytest.mark.parametrize("seed", [*range(8), 333, 349])
def test_schedules_whose_seats_forget_epochs_soon(seed):
    world.run(seed, kept=3)


@pytest.mark.parametrize(("seed", "num_faults"), [*((seed, 0) for seed in (0, 12, 26, 37)), (303, 3), (330, 3)])
def test_schedules_beside_one_that_was_alone_as_the_run_began(seed, num_faults):
    was_alone.run(seed, num_faults)


def test_walks_through_the_choice_of_one_epoch():
    chosen = [ballots.walk(seed, num_voters=2 + seed % 4) for seed in range(200)]
    assert sum(chosen) > 100, "epochs were chosen"


@pytest.mark.parametrize("mistake", planted_membership.BY_WALKS, ids=lambda mistake: mistake.__name__)
def test_walks_find(mistake):
    seed = planted_membership.BY_WALKS[mistake]
    with pytest.raises(world.Violation):
        ballots.walk(seed, mistake, num_voters=2 + seed % 3)
    ballots.walk(seed, num_voters=2 + seed % 3)


@pytest.mark.parametrize("mistake", planted_membership.BY_SCHEDULES, ids=lambda mistake: mistake.__name__)
def test_schedules_find(mistake):
    seed = planted_membership.BY_SCHEDULES[mistake]
    with pytest.raises(world.Violation):
        world.run(seed, mistake)
    world.run(seed)


@pytest.mark.parametrize("mistakes", planted_rounds.FOUND_BY, ids="+".join)
def test_schedules_find_mistakes_in_rounds(mistakes):
    with planted_rounds.planted(*mistakes), pytest.raises(world.Violation):
        world.run(planted_rounds.FOUND_BY[mistakes])
    world.run(planted_rounds.FOUND_BY[mistakes])
