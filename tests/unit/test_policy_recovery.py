from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from swarm_peer.policy.recovery import (
    FIRST_TIMELINE,
    MIN_ROUNDS_LEFT,
    TIMELINE_OFFSETS,
    ChosenMover,
    Claim,
    SnapshotRef,
    Standing,
    Timeline,
    choose_mover,
    choose_rewind,
    credible,
    find_overtaking,
    find_standing,
    find_standing_by_snapshots,
    find_viable_standing,
    last_credible_round,
    timeline_offset,
)
from swarm_peer.policy.run_progress import MAX_ROUND, MAX_ROUNDS_AHEAD
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView
from swarm_peer.wire.fields import RoundNumber

# --- where a new timeline begins --------------------------------------------------------------------------------------


def test_rivals_find_the_same_timeline_and_others_another_one():
    state, other_stage, older = SnapshotRef(1, 44, 40), SnapshotRef(2, 44, 40), SnapshotRef(1, 34, 30)
    assert timeline_offset(state, {"b", "a"}) == timeline_offset(state, ["a"])
    assert timeline_offset(state, ()) == timeline_offset(other_stage, ()), "where nobody serves, all stages are lost"
    others = [timeline_offset(state, ["b"]), timeline_offset(other_stage, ["a"]), timeline_offset(older, ["a"])]
    assert timeline_offset(state, ["a"]) not in others
    assert timeline_offset(state, ()) != timeline_offset(older, ())
    assert all(0 <= offset < TIMELINE_OFFSETS for offset in others)


# --- origins ----------------------------------------------------------------------------------------------------------


def test_the_optimizer_step_follows_from_the_round():
    assert FIRST_TIMELINE.optimizer_step_at(7) == 7
    assert Timeline(20, 5, 5).optimizer_step_at(20) == 5
    assert Timeline(20, 5, 5).optimizer_step_at(23) == 8


def test_the_newest_origin_is_the_largest():
    """A rewind has a higher round and a lower optimizer step."""
    assert max(Timeline(0, 0, 0), Timeline(24, 10, 10), Timeline(12, 50, 50)) == Timeline(24, 10, 10)


def test_weights_that_were_gone_back_to_were_born_before():
    assert FIRST_TIMELINE.creation_round(0) == 0
    assert Timeline(20, 5, 9).creation_round(20) == 9
    assert Timeline(20, 5, 9).creation_round(21) == 21


def test_each_update_takes_a_round():
    assert Timeline(20, 5, 9).allows_round(20)
    assert not Timeline(20, 5, 9).allows_round(19)
    assert not Timeline(20, 5, 21).allows_round(30)
    assert not Timeline(20, 10, 9).allows_round(30)


def test_no_peer_is_far_ahead_of_what_most_say():
    assert last_credible_round([7, 8, 8]) == 8 + MAX_ROUNDS_AHEAD
    assert last_credible_round([7, 8, MAX_ROUND]) == 8 + MAX_ROUNDS_AHEAD
    assert last_credible_round([0, 0, 7, 8, 8]) == 7 + MAX_ROUNDS_AHEAD
    assert last_credible_round([MAX_ROUND - 1]) == MAX_ROUND
    assert last_credible_round([]) == MAX_ROUND, "nobody says anything"


def test_the_last_round_is_the_last_that_the_wire_carries():
    round_number = TypeAdapter(RoundNumber)
    assert round_number.validate_python(MAX_ROUND) == MAX_ROUND
    with pytest.raises(ValidationError):
        round_number.validate_python(MAX_ROUND + 1)


def test_what_was_born_after_the_weights_that_the_run_went_back_to_was_given_up():
    timeline = Timeline(20, 5, 5)
    assert timeline.discarded(FIRST_TIMELINE, 6)
    assert not timeline.discarded(FIRST_TIMELINE, 5)
    assert not timeline.discarded(timeline, 21)
    assert not timeline.discarded(Timeline(30, 5, 5), 31), "of a later timeline"


# --- where the run is -------------------------------------------------------------------------------------------------

OLD, NEW = FIRST_TIMELINE, Timeline(38, 30, 30)


def standing(*claims, first=FIRST_TIMELINE):
    return find_standing(first, [Claim(*claim) for claim in claims])


def test_claims_that_cannot_be_are_left_out():
    possible = {"a": Claim(0, 34, OLD), "b": Claim(1, 38, NEW), "c": Claim(2, 34 + MAX_ROUNDS_AHEAD, OLD)}
    possible |= {"g": Claim(1, 34, OLD), "h": Claim(1, 38, NEW)}
    liars = {
        "d": Claim(0, 39 + MAX_ROUNDS_AHEAD, OLD),
        "e": Claim(0, 37, NEW),
        "f": Claim(0, 2**40 - 1, Timeline(2**40 - 1, 2**40 - 1, 0)),
    }
    assert credible(possible) == possible
    assert credible(possible | liars) == possible
    last = MAX_ROUND - MIN_ROUNDS_LEFT // 2
    assert credible({"a": Claim(0, 1, OLD), "b": Claim(1, last, OLD)}).keys() == {"a", "b"}, "either may be right"
    assert credible({"a": Claim(0, 1, OLD), "b": Claim(1, last + 1, OLD)}).keys() == {"a"}
    assert credible({}) == {}


def test_a_run_that_nobody_serves_is_where_it_began():
    assert standing() == Standing(FIRST_TIMELINE, 0, 0)
    assert standing(first=NEW) == Standing(NEW, 0, 30)


def test_the_highest_round_counts():
    """A peer in a later round would not follow a rewind."""
    assert standing((0, 33, OLD), (0, 34, OLD), (2, 33, OLD)) == Standing(OLD, 34, 33)


def test_the_timeline_of_a_stage_that_was_taken_over_is_the_runs():
    old = [(stage, 34, OLD) for stage in (0, 0, 0, 2, 2)]
    assert standing(*old, (1, 38, NEW)) == Standing(NEW, 38, 30)
    assert standing(*old, (1, 38, NEW), (1, 39, NEW), (0, 39, NEW)) == Standing(NEW, 39, 31)


def test_a_stage_that_has_passed_the_beginning_of_a_timeline_cannot_go_back_to_it():
    def overtaking(*claims):
        return find_overtaking(NEW, [Claim(*claim) for claim in claims])

    assert overtaking((0, 38, OLD), (2, 37, OLD)) == 0
    assert overtaking((0, 37, OLD), (2, 60, OLD), (2, 61, OLD), (2, 38, NEW)) == 2
    assert overtaking((0, 37, OLD), (2, 37, OLD)) is None, "they go back once they hear of it"
    assert overtaking((0, 60, OLD), (0, 38, NEW)) is None, "one of two may lie, and the other one is there"
    assert overtaking((0, 60, Timeline(50, 30, 30))) is None, "that is where the run is now"
    assert overtaking((0, 38, Timeline(40, 30, 30))) is None, "nobody is there before it has begun"
    assert overtaking() is None


lie = st.tuples(st.sampled_from((0, 2)), st.integers(0, 500), st.sampled_from((OLD, NEW, Timeline(400, 0, 0))))


@given(st.lists(lie, max_size=4))
def test_a_minority_of_each_stage_changes_neither_timeline_nor_optimizer_step(lies):
    honest = [(stage, 60, NEW) for stage in (0, 2) for _ in range(len(lies) + 1)]
    found = standing(*honest, *lies)
    assert (found.timeline, found.optimizer_step) == (NEW, 52)


# --- where the run goes back to ---------------------------------------------------------------------------------------

NUM_STAGES = 3
snapshot = st.builds(
    lambda stage, tens, line: SnapshotRef(stage, 10 * tens + line, 10 * tens),
    st.integers(-1, NUM_STAGES), st.integers(0, 5), st.integers(0, 1),
)  # fmt: skip
holdings = st.dictionaries(st.sampled_from("abcdef"), st.lists(snapshot, max_size=8))


def rewind(kept, lost_stage=1, newest=40, from_scratch=-1):
    return choose_rewind(kept, NUM_STAGES, lost_stage, newest, from_scratch)


def all_stages(optimizer_step, created_at_round=None):
    return [at(stage, optimizer_step, created_at_round) for stage in range(NUM_STAGES)]


def at(stage, optimizer_step, created_at_round=None):
    return SnapshotRef(stage, optimizer_step if created_at_round is None else created_at_round, optimizer_step)


@given(
    holdings, st.integers(0, NUM_STAGES - 1), st.integers(0, 60), st.integers(0, 60), st.randoms(use_true_random=False)
)
def test_the_order_of_what_peers_say_does_not_matter(kept, lost_stage, newest, from_scratch, rng):
    shuffled = [(peer, rng.sample(snapshots, len(snapshots))) for peer, snapshots in kept.items()]
    rng.shuffle(shuffled)
    assert rewind(dict(shuffled), lost_stage, newest, from_scratch) == rewind(kept, lost_stage, newest, from_scratch)


@given(holdings, st.integers(0, NUM_STAGES - 1), st.integers(0, 60), st.integers(0, 60))
def test_what_is_chosen_exists_for_all_stages_and_is_the_newest(kept, lost_stage, newest, from_scratch):
    chosen = rewind(kept, lost_stage, newest, from_scratch)
    everything = {known for snapshots in kept.values() for known in snapshots}
    points = {
        (optimizer_step, created_at_round)
        for _, created_at_round, optimizer_step in everything
        if optimizer_step <= newest
    }
    whole = {
        (optimizer_step, created_at_round)
        for optimizer_step, created_at_round in points
        if set(all_stages(optimizer_step, created_at_round)) <= everything
    }
    if chosen.optimizer_step is None:
        assert not whole
        assert newest > from_scratch
    elif not whole:
        assert (chosen.optimizer_step, chosen.holders) == (0, ())
        assert newest <= from_scratch
    else:
        assert (chosen.optimizer_step, chosen.created_at_round) == max(whole)
        wanted = SnapshotRef(lost_stage, chosen.created_at_round, chosen.optimizer_step)
        assert set(chosen.holders) == {peer for peer in kept if wanted in kept[peer]}
        assert chosen.holders
    assert chosen.reason


def test_the_newest_snapshot_that_is_whole_is_chosen():
    kept = {"a": [at(0, 10), at(1, 10), at(0, 20), at(1, 20)], "b": [at(2, 10), at(1, 10)], "c": [at(2, 30)]}
    chosen = rewind(kept)
    assert (chosen.optimizer_step, chosen.holders) == (10, ("a", "b"))
    assert chosen.reason == "all stages' snapshots of 10 updates exist"


def test_snapshots_of_two_timelines_are_not_mixed():
    """One stage has gone back and has made the updates anew, and another has not gone back yet."""
    kept = {
        "a": [at(0, 20, created_at_round=34), at(1, 20, created_at_round=34), at(1, 20)],
        "b": [at(2, 20)],
        "c": all_stages(10),
    }
    chosen = rewind(kept)
    assert (chosen.optimizer_step, chosen.created_at_round) == (10, 10)


def test_snapshots_are_better_than_to_begin_anew():
    assert rewind({"a": all_stages(10)}, from_scratch=100).optimizer_step == 10


def test_a_run_that_is_young_begins_anew():
    assert rewind({}, newest=9, from_scratch=9).optimizer_step == 0
    assert rewind({}, newest=9, from_scratch=9).reason == "the run has made 9 updates only and begins anew"
    assert rewind({}, newest=10, from_scratch=9).optimizer_step is None


def test_snapshots_of_the_future_are_not_believed():
    assert rewind({"liar": all_stages(50)}, newest=40).optimizer_step is None
    assert rewind({"liar": all_stages(50), "a": all_stages(30)}, newest=40).optimizer_step == 30


def test_the_reason_says_what_there_is():
    assert rewind({}).reason == "no snapshot of stage 1 exists that all other stages have too; there are: none"
    kept = {"a": [at(0, 10), at(2, 10), at(0, 20)], "b": [at(2, 30)], "c": [at(1, 40)]}
    assert rewind(kept).reason == (
        "no snapshot of stage 1 exists that all other stages have too; there are: of 40 updates, stages 1; "
        "of 30 updates, stages 2; of 20 updates, stages 0"
    )


# --- who takes a lost stage over --------------------------------------------------------------------------------------

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
    assert mover(*peers) == ChosenMover(None, "1 peers are joining stage 1")
    assert mover(*peers[:2], serving("c", 1, state=PeerState.DRAINING)).peer_id == "a", "who leaves does not count"


def test_a_stuck_peer_keeps_no_other_from_moving():
    peers = [serving("a", 0), serving("b", 0), serving("c", 1, state=PeerState.JOINING)]
    view = SwarmView(NUM_STAGES, (*peers, serving("d", 1, state=PeerState.JOINING)))
    assert choose_mover(view, 1, {"a"}, stuck=["c"]).reason == "1 peers are joining stage 1"
    assert choose_mover(view, 1, {"a"}, stuck=["c", "d"]).peer_id == "a"


def test_the_reason_says_why_nobody_may_move():
    reason = "no peer may move to stage 1: none is free, or each is the last of its stage"
    assert mover(serving("a", 0), serving("b", 2)) == ChosenMover(None, reason)
    assert mover(serving("a", 0), serving("b", 0), movable=()) == ChosenMover(None, reason)
    assert mover() == ChosenMover(None, reason)


BEFORE, AFTER, LATER = FIRST_TIMELINE, Timeline(110, 40, 40), Timeline(130, 40, 40)


@pytest.mark.parametrize(
    ("claims", "timeline"),
    [
        pytest.param([(0, 115, AFTER), (1, 115, AFTER)], AFTER, id="all are on it"),
        pytest.param([(0, 90, BEFORE), (1, 115, AFTER)], AFTER, id="a stage may come to it"),
        pytest.param(
            [(0, 500, BEFORE), (1, 500, BEFORE), (1, 115, AFTER), (1, 115, AFTER)], BEFORE, id="a stage has passed it"
        ),
        pytest.param(
            [(0, 700, BEFORE), (1, 115, AFTER), (1, 115, AFTER), (1, 115, AFTER)], BEFORE, id="far, and not credible"
        ),
        pytest.param([(0, 115, AFTER), (1, 140, AFTER), (2, 140, LATER)], AFTER, id="the older one of two"),
        pytest.param([], BEFORE, id="nobody"),
    ],
)
def test_nobody_goes_to_a_timeline_that_some_stage_has_passed(claims, timeline):
    told = [Claim(*claim) for claim in claims]
    believed = credible({str(number): claim for number, claim in enumerate(told)})
    assert find_viable_standing(BEFORE, believed.values(), told).timeline == timeline


def test_a_lie_about_its_round_leaves_rounds_for_the_next_timeline():
    """A peer that is alone in its stage is believed to have passed the timeline."""
    told = [Claim(0, 115, AFTER), Claim(1, MAX_ROUND, BEFORE)]
    believed = credible({str(number): claim for number, claim in enumerate(told)})
    assert find_viable_standing(BEFORE, believed.values(), told).round_number == MAX_ROUND - MIN_ROUNDS_LEFT


def test_a_run_that_a_lie_has_brought_near_the_last_round_can_be_recovered_again():
    beyond = find_standing_by_snapshots(FIRST_TIMELINE, [], 10, round_seen=MAX_ROUND, optimizer_step_seen=20)
    timeline = Timeline(beyond.round_number + TIMELINE_OFFSETS, 20, 20)
    claims = {str(stage): Claim(stage, timeline.first_round + 1000, timeline) for stage in range(2)}
    assert credible(claims) == claims
    standing = find_viable_standing(FIRST_TIMELINE, claims.values(), claims.values())
    assert standing == Standing(timeline, timeline.first_round + 1000, 1020), "the next timeline begins above it"


def test_a_resumed_run_goes_on_with_the_peers_that_have_passed_it():
    """They were out of the operator's sight, and never hear of the record that tells where the run begins."""
    passed = [Claim(0, 500, BEFORE), Claim(1, 500, BEFORE)]
    assert find_viable_standing(AFTER, passed, passed).optimizer_step == 500
    not_yet = [Claim(0, 90, BEFORE), Claim(1, 90, BEFORE)]
    assert find_viable_standing(AFTER, not_yet, not_yet).timeline == AFTER


def test_without_anybody_who_serves_the_furthest_that_is_known_counts():
    """A survivor may hold older snapshots, from which the round is guessed; a checkpoint of later steps is there."""
    left = [(SnapshotRef(1, 500, 500), BEFORE)]
    standing = find_standing_by_snapshots(BEFORE, left, 50, round_seen=555, optimizer_step_seen=555)
    assert (standing.round_number, standing.optimizer_step) == (500 + 4 * 50, 555)
