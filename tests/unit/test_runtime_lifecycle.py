import pytest
from contexts import MovedClock

from swarm_peer.errors import NotServing
from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.lifecycle import TRANSITIONS, Lifecycle, left_alone, refusing


@pytest.fixture
def lifecycle():
    return Lifecycle(MovedClock(now=2.5))


def test_every_state_has_its_successors():
    assert TRANSITIONS.keys() == set(PeerState)
    assert all(state not in following for state, following in TRANSITIONS.items())


def test_a_stay_goes_from_joining_to_left(lifecycle):
    lifecycle.explain("waits")
    served = (PeerState.SERVING, PeerState.JOINING, PeerState.SERVING, PeerState.DRAINING)
    for state in (*served, PeerState.SERVING, PeerState.DRAINING, PeerState.LEFT):
        lifecycle.enter(state)
        assert (lifecycle.state, lifecycle.since_s, lifecycle.note) == (state, 2.5, "")
    with pytest.raises(AssertionError, match="does not follow"):
        lifecycle.enter(PeerState.SERVING)


def test_the_same_state_again_changes_nothing(lifecycle):
    lifecycle.explain("waits")
    lifecycle.enter(PeerState.JOINING)
    assert lifecycle.note == "waits"


def leave(lifecycle):
    lifecycle.enter(PeerState.DRAINING)
    lifecycle.enter(PeerState.LEFT)


def test_after_a_move_another_stay_begins(lifecycle):
    assert lifecycle.move(1)
    assert not lifecycle.move(2), "it leaves already"
    assert (lifecycle.stop.is_set(), lifecycle.next_stage) == (True, 1)
    leave(lifecycle)
    lifecycle.begin_stay()
    assert (lifecycle.state, lifecycle.stop.is_set(), lifecycle.next_stage) == (PeerState.JOINING, False, None)
    assert lifecycle.move(2)


def test_who_is_told_to_end_during_a_move_joins_nothing(lifecycle):
    lifecycle.move(1)
    lifecycle.end()
    assert lifecycle.next_stage is None
    leave(lifecycle)
    lifecycle.begin_stay()
    assert lifecycle.stop.is_set()
    assert not lifecycle.move(1)


def test_a_pause_ends_a_stay_and_the_next_one_begins_once_it_is_over(lifecycle):
    lifecycle.enter(PeerState.SERVING)
    lifecycle.pause("paused by its owner")
    assert (lifecycle.stop.is_set(), lifecycle.halted.is_set(), lifecycle.resumed.is_set()) == (True, True, False)
    assert not lifecycle.move(1)
    leave(lifecycle)
    lifecycle.enter(PeerState.PAUSED)
    lifecycle.explain(lifecycle.pause_note)
    lifecycle.pause("paused until 22:00 (hours)")
    assert lifecycle.note == "paused until 22:00 (hours)"
    resumed = lifecycle.resumed
    lifecycle.resume()
    assert (resumed.is_set(), lifecycle.halted.is_set(), lifecycle.is_paused) == (True, False, False)
    lifecycle.begin_stay()
    assert (lifecycle.state, lifecycle.note, lifecycle.stop.is_set()) == (PeerState.JOINING, "", False)


def test_a_pause_ends_a_move(lifecycle):
    lifecycle.enter(PeerState.SERVING)
    lifecycle.move(1)
    lifecycle.pause("paused by its owner")
    assert (lifecycle.next_stage, lifecycle.is_paused) == (None, True)


def test_a_pause_that_begins_before_the_next_stay_ends_that_at_once(lifecycle):
    lifecycle.pause("paused by its owner")
    lifecycle.begin_stay()
    assert lifecycle.stop.is_set()


def test_who_is_told_to_end_is_paused_no_more(lifecycle):
    lifecycle.pause("paused by its owner")
    lifecycle.end()
    assert (lifecycle.is_paused, lifecycle.resumed.is_set()) == (False, True)
    lifecycle.resume()
    assert lifecycle.halted.is_set()
    lifecycle.pause("paused by its owner")
    assert lifecycle.resumed.is_set(), "nobody waits for an owner any more"


async def test_a_paused_peer_gives_nothing_large(lifecycle):
    async def handle(caller, call, tensors):
        return caller, call, tensors

    [give] = refusing({str: handle}, lifecycle).values()
    assert await give("a", "call", ()) == ("a", "call", ())
    lifecycle.pause("paused until 22:00 (hours)")
    with pytest.raises(NotServing, match=r"this peer is paused until 22:00 \(hours\)"):
        await give("a", "call", ())
    lifecycle.resume()
    assert await give("a", "call", ()) == ("a", "call", ())


@pytest.mark.parametrize(
    ("optimizer_step", "snapshot_every", "then"),
    [
        (0, 10, " until another peer does"),
        (9, 10, " until another peer does, and goes back to a checkpoint, or to its beginning: it has no snapshot yet"),
        (29, 10, " until another peer does, and goes back to its newest snapshot, of optimizer step 20 at the latest"),
        (29, 0, " until another peer does, and goes back to a checkpoint, or to its beginning: it has no snapshot yet"),
    ],
)
def test_who_leaves_a_stage_alone_says_what_comes_of_it(optimizer_step, snapshot_every, then):
    said = left_alone(1, optimizer_step, snapshot_every)
    assert said == f"nobody else serves stage 1, so the run waits{then}"
