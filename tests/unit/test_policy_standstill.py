"""When a run stands still, by what its peers announce; and who is believed that its weights have diverged."""

from dataclasses import replace

import pytest

from swarm_peer.policy.placement.capacity import JOINING_PATIENCE_S
from swarm_peer.policy.standstill import (
    DIVERGED_S,
    NO_UPDATES_S,
    STANDS_S,
    find_divergence,
    find_standstill,
    find_troubled,
)
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, PeerView, SwarmView

NOW_S = 1000.0
LONG_AGO_S = NOW_S - STANDS_S
JUST_NOW_S = LONG_AGO_S + 1


def peer(name, stage=0, trouble=None, since_s=LONG_AGO_S, queue=2, **about):
    since_s = None if trouble is None else since_s
    state = about.pop("state", PeerState.SERVING)
    return PeerView(
        peer_id=name, stage=stage, state=state, queue=queue, trouble=trouble, trouble_since_s=since_s, **about
    )


def view(*peers, num_stages=2):
    return SwarmView(num_stages, (*peers, peer("last", num_stages - 1)))


@pytest.mark.parametrize("trouble", [Trouble.FAILING, Trouble.DIVERGED, Trouble.NO_DATA])
def test_a_run_of_which_no_microbatch_comes_through_stands_still(trouble):
    """Also for somebody who looks once."""
    found = find_standstill(view(peer("a", trouble=trouble), peer("b", trouble=trouble, since_s=JUST_NOW_S)), NOW_S)
    assert (found.trouble, found.stage, found.num_peers, found.since_s) == (trouble, 0, 2, LONG_AGO_S)


def test_the_newest_announcement_speaks():
    peers = [peer(name, trouble=Trouble.FAILING, announced=at, note=name) for name, at in (("a", 7), ("b", 9))]
    assert find_standstill(view(*peers), NOW_S).spokesman.note == "b"


def test_a_moment_is_no_standstill():
    assert find_standstill(view(peer("a", trouble=Trouble.FAILING, since_s=JUST_NOW_S)), NOW_S) is None


@pytest.mark.parametrize("progressed_s", [None, 0.0])
def test_a_peer_that_works_is_waited_for(progressed_s):
    """It may take ten minutes for a microbatch."""
    slow = view(peer("a", trouble=Trouble.FAILING), peer("b", queue=1))
    assert find_standstill(slow, NOW_S, progressed_s) is None


@pytest.mark.parametrize(("progressed_s", "stands"), [(None, False), (JUST_NOW_S, False), (LONG_AGO_S, True)])
def test_an_idle_peer_may_be_between_two_microbatches(progressed_s, stands):
    idle = view(peer("a", trouble=Trouble.FAILING), peer("b", queue=0))
    assert (find_standstill(idle, NOW_S, progressed_s) is not None) == stands


@pytest.mark.parametrize("trouble", [Trouble.DATA_UNREAD, Trouble.NO_SNAPSHOTS])
def test_a_peer_that_trains_on_holds_nothing_up_and_is_told_of(trouble):
    seen = view(peer("a", trouble=trouble, since_s=NOW_S))
    assert find_standstill(seen, NOW_S, 0.0) is None
    assert [each.peer_id for each in find_troubled(seen, NOW_S)] == ["a"]


def test_other_trouble_is_told_of_once_it_lasts():
    peers = peer("a", trouble=Trouble.FAILING), peer("b", trouble=Trouble.FAILING, since_s=JUST_NOW_S), peer("c")
    peers = *peers, peer("d", trouble=Trouble.FAILING, state=PeerState.JOINING)
    assert [each.peer_id for each in find_troubled(view(*peers), NOW_S)] == ["a"]


@pytest.mark.parametrize(("progressed_s", "stands"), [(JUST_NOW_S, False), (LONG_AGO_S, True)])
def test_a_peer_that_does_not_hear_those_who_vote_holds_up_a_run_that_rests(progressed_s, stands):
    """The others may be the side that hears them."""
    waiting = view(peer("a"), peer("b", 1, Trouble.NO_VOTERS), peer("c", 1), num_stages=2)
    found = find_standstill(waiting, NOW_S, progressed_s)
    assert (found is not None) == stands
    if found is not None:
        assert (found.trouble, found.stage, found.num_peers) == (Trouble.NO_VOTERS, 1, 1)


def test_a_stage_without_updates_holds_up_a_run_that_makes_steps():
    seen = view(peer("a"), peer("b", 1, Trouble.NO_UPDATES), num_stages=3)
    assert find_standstill(seen, NOW_S, NOW_S).trouble is Trouble.NO_UPDATES


def test_the_worst_of_several_stages_is_told():
    seen = view(peer("a", trouble=Trouble.FAILING), peer("b", 1, Trouble.NO_UPDATES), num_stages=3)
    assert find_standstill(seen, NOW_S).trouble is Trouble.FAILING


def test_a_stage_without_any_peer_is_told_of_elsewhere():
    """Or the run waits for its first peers."""
    assert find_standstill(SwarmView(2, (peer("a", trouble=Trouble.FAILING),)), NOW_S, 0.0) is None


@pytest.mark.parametrize(
    ("note", "joined_s", "stands"),
    [
        ("waits to join", LONG_AGO_S, True),
        ("waits to join", JUST_NOW_S, False),
        ("", LONG_AGO_S, False),
        ("", NOW_S - JOINING_PATIENCE_S, True),
        ("", None, False),
    ],
)
def test_peers_that_join_a_stage_in_vain_hold_up_the_run(note, joined_s, stands):
    """A state of a large model takes minutes to download."""
    joining = peer("b", 1, state=PeerState.JOINING, note=note, since_s=None)
    joining = replace(joining, since_s=joined_s)
    found = find_standstill(SwarmView(2, (peer("a"), joining)), NOW_S)
    assert (found is not None) == stands
    if found is not None:
        assert (found.trouble, found.stage, found.spokesman, found.kind) == (None, 1, joining, "joining")


def test_a_peer_that_has_just_begun_to_join_may_succeed():
    joining = [
        replace(peer(name, 1, state=PeerState.JOINING, note="waits"), since_s=since_s)
        for name, since_s in (("b", LONG_AGO_S), ("c", JUST_NOW_S))
    ]
    assert find_standstill(SwarmView(2, (peer("a"), *joining)), NOW_S) is None


# --- divergence -------------------------------------------------------------------------------------------------------

LONG_DIVERGED_S = NOW_S - DIVERGED_S


def diverged(name, stage=0, since_s=LONG_DIVERGED_S):
    return peer(name, stage, Trouble.DIVERGED, since_s)


def test_weights_have_diverged_when_all_of_stage_0_say_so_and_nothing_counts():
    found = find_divergence(view(diverged("a"), diverged("b")), NOW_S, LONG_DIVERGED_S)
    assert (found.trouble, found.stage, found.num_peers) == (Trouble.DIVERGED, 0, 2)


@pytest.mark.parametrize(
    "other",
    [
        peer("b"),
        peer("b", queue=0),
        peer("b", trouble=Trouble.FAILING),
        peer("b", trouble=Trouble.NO_UPDATES, since_s=0.0),
        diverged("b", since_s=LONG_DIVERGED_S + 1),
    ],
    ids=["trains", "idle", "fails", "no updates", "too early"],
)
def test_one_member_alone_ends_no_run(other):
    assert find_divergence(view(diverged("a"), other), NOW_S, 0.0) is None


def test_a_sample_that_counts_refutes_them():
    assert find_divergence(view(diverged("a")), NOW_S, LONG_DIVERGED_S + 1) is None


def test_a_member_of_another_stage_ends_no_run():
    assert find_divergence(view(peer("a"), diverged("b", 1)), NOW_S, 0.0) is None


def test_where_a_stage_is_lost_nothing_comes_through_anyhow():
    assert find_divergence(SwarmView(2, (diverged("a"),)), NOW_S, 0.0) is None


@pytest.mark.parametrize(("since_s", "has"), [(NOW_S - NO_UPDATES_S, True), (NOW_S - NO_UPDATES_S + 1, False)])
def test_a_stage_that_gets_no_update_for_long_has_diverged(since_s, has):
    stuck = [peer(name, 1, Trouble.NO_UPDATES, since_s) for name in "bc"]
    seen = SwarmView(2, (peer("a"), *stuck))
    assert (find_divergence(seen, NOW_S, NOW_S) is not None) == has
    assert find_divergence(SwarmView(2, (*seen.peers, peer("d", 1))), NOW_S, NOW_S) is None, "d gets one"
