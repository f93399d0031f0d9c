"""However many epochs follow one another while a round is open: nobody forgets those that the round needs."""

import pytest
from quiet import Quiet

from swarm_peer.protocol.epochs import KEPT_EPOCHS
from swarm_peer.protocol.round_rules import RoundRules

# What has been followed is remembered for a while after others have come in its place.
MANY = 2 * KEPT_EPOCHS + 8


def rejoins(run, process, times):
    """A peer crashes and comes back, each time by a new epoch."""
    for _ in range(times):
        run.start(process)
        run.run_until(run.now_s + 60, lambda: process.core.membership.stages == process.stages)
        run.run_until(run.now_s + 0.5)


@pytest.fixture
def computes(monkeypatch):
    """Have all compute, or not."""

    def set_computes(run, does):
        if does:
            monkeypatch.undo()
        else:
            monkeypatch.setattr(run.driver, "_train", lambda *_: None)

    return set_computes


def all_hold_receipts(run):
    """Whether all of stage 0 hold receipts of q2 that are of this epoch."""
    rounds = [core.members[0].working for core in run.cores if 0 in core.members]
    held = [present.computed.receipts.values() if present is not None else () for present in rounds]
    wanted = "q2", run.cores[0].epoch.id
    return all(wanted in {(each.body.author.peer, each.body.epoch) for each in receipts} for receipts in held)


def test_a_leader_that_comes_after_many_epochs_can_show_the_newest_entry(computes):
    run = Quiet(RoundRules(num_stages=1, batch=4, roots_every=(0,)))
    for number in range(3):
        run.add(f"p{number}", {0}, ticket=f"of {number}")
    late = run.add("late", {0}, ticket="of late")
    run.run_until(40)
    computes(run, False)
    rejoins(run, late, MANY)
    leader = run.cores[0].epoch.leader(0)
    run.processes[leader.peer].core = None
    computes(run, True)
    before = run.next_round()
    run.run_until(run.now_s + 90)
    assert run.next_round() > before + 3


def test_receipts_of_many_epochs_ago_still_close_a_round(computes):
    run = Quiet(RoundRules(num_stages=2, batch=80, roots_every=(0,)))
    for number in range(3):
        run.add(f"p{number}", {0})
        run.add(f"q{number}", {1})
    late = run.add("late", {1})
    run.run_until(60)
    number = run.next_round()
    run.run_until(90, lambda: min(run.next_round(0), run.next_round(1)) > number)
    rejoins(run, late, 1)  # no entry is of this epoch
    run.run_until(90, lambda: all_hold_receipts(run))
    assert all_hold_receipts(run)
    computes(run, False)
    run.processes["q2"].core = None
    rejoins(run, late, MANY)
    assert run.next_round() == number + 1
    computes(run, True)
    before = run.next_round()
    run.run_until(run.now_s + 60)
    assert run.next_round() > before + 3
