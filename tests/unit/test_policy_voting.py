from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.placement.rebalancing import choose_stage
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView
from swarm_peer.policy.voting import AveragingVote, HeldWeights, Verdict, agree, choose_weights

# --- agreement --------------------------------------------------------------------------------------------------------

vote = st.builds(AveragingVote, st.just(0), st.sampled_from([None, "x", "y", "z"]), st.integers(0, 3))
electorate = st.dictionaries(st.sampled_from("abcdef"), vote, min_size=1)


@given(electorate, st.booleans(), st.randoms(use_true_random=False))
def test_peers_that_know_the_same_votes_agree(votes, may_retry, rng):
    shuffled = list(votes.items())
    rng.shuffle(shuffled)
    agreements = {peer: agree(peer, dict(shuffled), may_retry=may_retry) for peer in votes}
    assert agreements == {peer: agree(peer, votes, may_retry=may_retry) for peer in votes}
    assert len({agreement.holders for agreement in agreements.values()}) == 1
    verdicts = {agreement.verdict for agreement in agreements.values()}
    assert verdicts == {Verdict.RETRY} or Verdict.RETRY not in verdicts, "all run another round, or nobody does"
    if Verdict.RETRY not in verdicts:
        holders = next(iter(agreements.values())).holders
        committed = {peer for peer, agreement in agreements.items() if agreement.verdict is Verdict.COMMIT}
        assert committed == set(holders), "exactly those that hold the winning result commit it"
        assert len({votes[peer].checksum for peer in holders}) == 1
        assert votes[holders[0]].checksum is not None
        left_out = [peer for peer in votes if votes[peer].checksum == votes[holders[0]].checksum]
        assert set(left_out) == set(holders)


@given(electorate, st.booleans())
def test_rounds_are_repeated_for_one_reason_each(votes, may_retry):
    checksums = {vote.checksum for vote in votes.values()}
    repeated = agree(next(iter(votes)), votes, may_retry=may_retry).verdict is Verdict.RETRY
    assert repeated == (checksums == {None} or (may_retry and (len(checksums) > 1)))


@given(electorate)
def test_the_most_samples_win(votes):
    agreement = agree(next(iter(votes)), votes, may_retry=False)
    if agreement.verdict is not Verdict.RETRY:
        best = max(vote.samples for vote in votes.values() if vote.checksum is not None)
        assert max(votes[peer].samples for peer in agreement.holders) == best


@pytest.mark.parametrize("may_retry", [True, False])
def test_who_abstains_takes_over_what_the_others_hold(may_retry):
    votes = {"a": AveragingVote(0, "x", 5), "b": AveragingVote(0, "x", 5), "c": AveragingVote(0, None, abstains=True)}
    assert agree("a", votes, may_retry=may_retry).verdict is Verdict.COMMIT
    behind = agree("c", votes, may_retry=may_retry)
    assert (behind.verdict, behind.holders) == (Verdict.RESYNC, ("a", "b"))


def test_who_abstains_tries_with_the_others_when_it_failed():
    votes = {"a": AveragingVote(0, "x", 5), "b": AveragingVote(0, None), "c": AveragingVote(0, None, abstains=True)}
    assert {agree(peer, votes, may_retry=True).verdict for peer in votes} == {Verdict.RETRY}
    alone = {"c": AveragingVote(0, None, abstains=True)}
    assert agree("c", alone, may_retry=True).verdict is Verdict.RETRY


def test_of_equal_samples_the_most_peers_win():
    votes = {"a": AveragingVote(0, "x", 5), "b": AveragingVote(0, "y", 5), "c": AveragingVote(0, "y", 5)}
    assert agree("a", votes, may_retry=False).holders == ("b", "c")
    assert agree("a", votes, may_retry=False).verdict is Verdict.RESYNC


def test_of_equal_peers_the_smallest_checksum_wins():
    votes = {"a": AveragingVote(0, "y", 5), "b": AveragingVote(0, "x", 5)}
    assert agree("b", votes, may_retry=False).verdict is Verdict.COMMIT


@pytest.mark.parametrize(
    ("votes", "may_retry", "reason"),
    [
        ({"a": "x", "b": "x"}, True, "2 of 2 peers hold this result"),
        ({"a": None, "b": "x"}, False, "the round failed here, 1 peers hold one of 4 samples"),
        ({"a": "y", "b": "x"}, False, "the result here differs, 1 peers hold one of 4 samples"),
        ({"a": None, "b": None}, False, "2 peers: it failed for 2, the others hold 0 results"),
        ({"a": None, "b": "x"}, True, "2 peers: it failed for 1, the others hold 1 results"),
    ],
)
def test_the_reason_says_what_happened(votes, may_retry, reason):
    agreement = agree("a", {peer: AveragingVote(0, digest, 4) for peer, digest in votes.items()}, may_retry=may_retry)
    assert agreement.reason == reason


# --- which weights to go on with --------------------------------------------------------------------------------------

held_weights = st.builds(HeldWeights, st.sampled_from("hi"), st.sampled_from("xyz"), st.integers(0, 3))
held_by_peer = st.dictionaries(st.sampled_from("abcdef"), held_weights, min_size=1)


@given(held_by_peer, st.randoms(use_true_random=False))
def test_peers_that_know_the_same_go_on_with_the_same_weights(held, rng):
    shuffled = list(held.items())
    rng.shuffle(shuffled)
    chosen = {peer: choose_weights(peer, dict(shuffled)) for peer in held}
    [holders] = {choice.holders for choice in chosen.values()}
    assert holders == tuple(sorted(holders))
    assert {peer for peer, choice in chosen.items() if choice.verdict is Verdict.COMMIT} == set(holders)
    [weights] = {(held[peer].history_hash, held[peer].digest) for peer in holders}
    alike = {peer for peer, known in held.items() if (known.history_hash, known.digest) == weights}
    assert alike == set(holders), "nobody who holds them is left out"


@given(st.sampled_from([("h", "a"), ("h", "z"), ("a", "a"), ("z", "z")]), st.integers(0, 10**9))
def test_no_number_of_samples_outweighs_a_peer(weights, claimed):
    held = dict.fromkeys("ab", HeldWeights("h", "x", 1)) | {"c": HeldWeights(*weights, claimed)}
    assert choose_weights("c", held).holders == ("a", "b")


@given(st.permutations([HeldWeights("h", "x", 4), HeldWeights("h", "y", 60)]))
def test_of_as_many_peers_the_most_samples_go_on(held):
    peers = dict(zip("ab", held, strict=True))
    [holder] = choose_weights("a", peers).holders
    assert peers[holder].samples == 60


def test_the_samples_of_all_who_hold_the_same_weights_count():
    held = {"a": ("x", 5), "b": ("x", 5), "c": ("y", 8), "d": ("y", 1)}
    chosen = choose_weights("a", {peer: HeldWeights("h", *known) for peer, known in held.items()})
    assert (chosen.verdict, chosen.holders) == (Verdict.COMMIT, ("a", "b"))


def test_a_history_is_not_lost_since_those_who_hold_it_round_otherwise():
    held = {"a": ("h", "x", 1), "b": ("h", "y", 2), "c": ("h", "z", 1), "d": ("i", "w", 9), "e": ("i", "w", 9)}
    assert choose_weights("a", {peer: HeldWeights(*known) for peer, known in held.items()}).holders == ("b",)


def test_of_as_many_peers_and_samples_the_smallest_digest_goes_on():
    held = {"a": HeldWeights("h", "y", 5), "b": HeldWeights("h", "x", 5)}
    assert choose_weights("a", held).holders == ("b",)


# --- choosing a stage -------------------------------------------------------------------------------------------------


def peer(peer_id, stage, speed=1.0, state=PeerState.SERVING):
    return PeerView(peer_id=peer_id, stage=stage, state=state, samples_per_s=speed)


def newcomers(*names):
    return [PeerView(peer_id=name, stage=UNDECIDED, state=PeerState.JOINING) for name in names]


def plan(view, costs, names):
    return {name: choose_stage(view, costs, name, 0.0).stage for name in names}


def test_the_first_peers_spread_over_the_stages():
    names = ["a", "b", "c", "d"]
    view = SwarmView(4, tuple(newcomers(*names)))
    assert plan(view, [1.0] * 4, names) == {"a": 0, "b": 1, "c": 2, "d": 3}


@given(
    st.integers(1, 5).flatmap(
        lambda k: st.tuples(
            st.lists(st.floats(0.1, 10), min_size=k, max_size=k),
            st.lists(st.tuples(st.integers(0, k - 1), st.sampled_from([0.0, 0.5, 1.0, 4.0])), max_size=8),
            st.integers(1, 2 * k),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_newcomers_come_to_one_plan_whatever_the_order_they_are_seen_in(swarm, rng):
    costs, members, num_new = swarm
    k = len(costs)
    names = [f"new{n}" for n in range(num_new)]
    peers = [peer(f"old{n}", stage, speed) for n, (stage, speed) in enumerate(members)] + newcomers(*names)
    shuffled = list(peers)
    rng.shuffle(shuffled)
    chosen = plan(SwarmView(k, tuple(peers)), costs, names)
    assert chosen == plan(SwarmView(k, tuple(shuffled)), costs, names)
    # Each is where it would be if those before it had chosen and announced already.
    for number, name in enumerate(names):
        unseen = tuple(p for p in peers if p.peer_id not in names[number:])
        assert choose_stage(SwarmView(k, unseen), costs, name, 0.0).stage == chosen[name], "it need not be in the view"
    empty = set(range(k)) - {stage for stage, _ in members}
    assert len(empty & set(chosen.values())) == min(len(empty), num_new), "no two fill the same gap"


def test_the_stage_of_least_throughput_is_chosen_and_not_the_one_of_fewest_peers():
    view = SwarmView(2, (peer("a", 0, 10.0), peer("b", 1, 1.0), peer("c", 1, 1.0)))
    choice = choose_stage(view, [1.0, 1.0], "me", 0.0)
    assert choice.stage == 1
    assert choice.reason == "stage 1 has 2 peers and the least capacity, 2 samples/s"


def test_those_that_leave_do_not_count():
    view = SwarmView(2, (peer("a", 0, 1.0), peer("b", 1, 9.0, PeerState.DRAINING)))
    assert choose_stage(view, [1.0, 1.0], "me", 0.0).stage == 1


def test_those_that_are_joining_a_stage_count():
    view = SwarmView(2, (peer("a", 0, 1.0), peer("b", 1, 0.0, PeerState.JOINING)))
    assert choose_stage(view, [1.0, 1.0], "me", 0.0).stage == 0


def test_an_unmeasured_peer_is_expected_to_be_slower_where_samples_cost_more():
    # "a" does 1 unit of work a second; "b" is taken for its like, so stage 1 does a quarter of a sample a second.
    view = SwarmView(2, (peer("a", 0, 1.0), peer("b", 1, 0.0)))
    assert choose_stage(view, [1.0, 4.0], "me", 0.0).stage == 1
    assert choose_stage(view, [4.0, 1.0], "me", 0.0).stage == 0


def test_what_a_peer_serves_now_does_not_hold_it_back():
    view = SwarmView(2, (peer("me", 0, 5.0), peer("a", 1, 1.0)))
    assert choose_stage(view, [1.0, 1.0], "me", 0.0).stage == 0


@pytest.mark.parametrize("order", list(permutations("abcd")))
def test_the_order_of_the_view_does_not_decide_through_rounding(order):
    # 0.3 + 0.2 + 0.1 is 0.6 in the order of the ids, and a little more in another one, which would make it a tie.
    peers = {"a": peer("a", 0, 0.3), "b": peer("b", 0, 0.2), "c": peer("c", 0, 0.1), "d": peer("d", 1, 0.1 + 0.2 + 0.3)}
    assert 0.3 + 0.2 + 0.1 < 0.1 + 0.2 + 0.3
    view = SwarmView(2, tuple(peers[name] for name in order))
    assert choose_stage(view, [1.0, 1.0], "me", 0.0).stage == 0
