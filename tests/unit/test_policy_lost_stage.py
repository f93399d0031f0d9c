"""Who takes a lost stage over."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.placement.lost_stage import ChosenMover, choose_mover
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

NUM_STAGES = 3

peer_views = st.lists(
    st.builds(
        PeerView,
        peer_id=st.sampled_from("abcdefgh"),
        stage=st.integers(UNDECIDED, NUM_STAGES - 1),
        state=st.sampled_from(PeerState),
        samples_per_s=st.sampled_from([0.0, 1.0, 2.0]),
    ),
    unique_by=lambda peer: peer.peer_id,
    max_size=8,
)


def serving(peer_id, stage, speed=1.0, state=PeerState.SERVING):
    return PeerView(peer_id=peer_id, stage=stage, state=state, samples_per_s=speed)


def mover(*peers, movable=None, lost_stage=1):
    view = SwarmView(NUM_STAGES, peers)
    return choose_mover(view, lost_stage, {peer.peer_id for peer in peers} if movable is None else movable)


def test_nobody_takes_over_a_stage_that_it_has_no_memory_for():
    slow = replace(serving("a", 0, 1.0), too_large=(1,))
    assert mover(slow, serving("b", 0, 2.0)).peer_id == "b"
    assert mover(slow, serving("b", 0, 2.0), serving("c", 1), lost_stage=2).peer_id == "a"
    assert mover(slow, replace(serving("b", 0), too_large=(0, 1))).peer_id is None


@given(peer_views, st.sets(st.sampled_from("abcdefgh")), st.randoms(use_true_random=False))
def test_peers_that_see_the_same_choose_the_same(peers, movable, rng):
    shuffled = rng.sample(peers, len(peers))
    assert mover(*shuffled, movable=sorted(movable, reverse=True)) == mover(*peers, movable=movable)


@given(peer_views, st.sets(st.sampled_from("abcdefgh")))
def test_the_last_peer_of_a_stage_never_moves(peers, movable):
    chosen = mover(*peers, movable=movable)
    assert chosen.reason
    view = SwarmView(NUM_STAGES, tuple(peers))
    free = [peer for peer in peers if peer.state is PeerState.SERVING and len(view.serving(peer.stage)) > 1]
    joining = any(peer.state is PeerState.JOINING for peer in view.in_stage(1))
    if chosen.peer_id is None:
        assert joining or not any(peer.peer_id in movable for peer in free)
    else:
        assert chosen.peer_id in movable
        assert view.peer(chosen.peer_id) in free
        assert not joining, "somebody is on the way already"


def test_the_slowest_of_the_fullest_stage_moves():
    peers = [serving("a", 0, 0.1), serving("b", 0, 3), serving("c", 2, 5), serving("d", 2, 4), serving("e", 2, 4)]
    assert mover(*peers) == ChosenMover("d", "it is the slowest of the 3 peers of the fullest stage")
    assert mover(*peers, movable={"b", "c"}).peer_id == "c", "of those that may"
    assert mover(*peers, movable={"b"}).peer_id == "b"


@pytest.mark.parametrize("state", [PeerState.JOINING, PeerState.DRAINING])
def test_a_peer_that_does_not_serve_is_no_stage_mate(state):
    assert mover(serving("a", 0), serving("b", 0, state=state)).peer_id is None


def test_no_peer_moves_to_a_stage_that_another_joins():
    peers = [serving("a", 0), serving("b", 0), serving("c", 1, state=PeerState.JOINING)]
    assert mover(*peers) == ChosenMover(None, "1 peer is joining stage 1")
    assert mover(*peers[:2], serving("c", 1, state=PeerState.DRAINING)).peer_id == "a", "who leaves does not count"


def test_a_stuck_peer_keeps_no_other_from_moving():
    peers = [serving("a", 0), serving("b", 0), serving("c", 1, state=PeerState.JOINING)]
    view = SwarmView(NUM_STAGES, (*peers, serving("d", 1, state=PeerState.JOINING)))
    assert choose_mover(view, 1, {"a"}, stuck=["c"]).reason == "1 peer is joining stage 1"
    assert choose_mover(view, 1, {"a"}, stuck=["c", "d"]).peer_id == "a"


def test_the_reason_says_why_nobody_may_move():
    reason = "no peer may move to stage 1: none is free, or each is the last of its stage"
    assert mover(serving("a", 0), serving("b", 2)) == ChosenMover(None, reason)
    assert mover(serving("a", 0), serving("b", 0), movable=()) == ChosenMover(None, reason)
    assert mover() == ChosenMover(None, reason)
