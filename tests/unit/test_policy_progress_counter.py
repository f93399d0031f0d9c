import math
import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.progress_counter import MAX_LIVES, RESERVED_MICROBATCHES, ProgressCounter, RoundCount
from swarm_peer.policy.view import Life


def count(samples, claimed=None):
    return RoundCount(samples, samples if claimed is None else claimed, 2.0 * samples)


# Counts as honest peers report them: each peer's only grow.
grown_counts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6).map(
    lambda steps: [
        RoundCount(sum(s for s, _ in steps[:n]), sum(s + c for s, c in steps[:n]), float(sum(s for s, _ in steps[:n])))
        for n in range(1, len(steps) + 1)
    ]
)


def contents(ledger, round_number=0):
    return list(ledger.counts(round_number))


# --- a grow-only counter ----------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from("abcd"), grown_counts, max_size=4), st.randoms(use_true_random=False))
def test_order_and_repetition_of_messages_do_not_matter(history, rng):
    messages = [(Life(peer), c) for peer, counts in history.items() for c in counts]
    in_order, shuffled = ProgressCounter(100), ProgressCounter(100)
    for peer, c in messages:
        in_order.merge(0, peer, c)
    again = messages + rng.choices(messages, k=len(messages)) if messages else []
    rng.shuffle(again)
    for peer, c in again:
        shuffled.merge(0, peer, c)
    assert contents(shuffled) == contents(in_order)
    assert in_order.samples(0) == sum(counts[-1].samples for counts in history.values())
    assert in_order.loss_sum(0) == sum(counts[-1].loss_sum for counts in history.values())


def test_merge_tells_what_is_news():
    ledger = ProgressCounter(10)
    assert not ledger.knows(0, Life("a"), count(2))
    assert ledger.merge(0, Life("a"), count(2))
    assert ledger.knows(0, Life("a"), count(2))
    assert not ledger.merge(0, Life("a"), count(2))
    assert not ledger.merge(0, Life("a"), count(1)), "an old count"
    assert ledger.merge(0, Life("a"), count(2, claimed=4)), "a claim is news"
    assert ledger.merge(0, Life("a"), count(4))
    assert contents(ledger) == [(Life("a"), count(4))]


def test_a_round_is_full_when_its_samples_are_counted_and_not_when_they_are_claimed():
    ledger = ProgressCounter(4)
    ledger.merge(0, Life("a"), count(2, claimed=4))
    assert not ledger.is_full(0)
    ledger.merge(0, Life("b"), count(1))
    assert not ledger.is_full(0)
    ledger.merge(0, Life("b"), count(2))
    assert ledger.is_full(0)
    assert not ledger.is_full(1), "steps are counted apart"


def test_counts_come_sorted_so_that_all_peers_sum_in_the_same_order():
    ledger = ProgressCounter(4)
    for peer in "cab":
        ledger.merge(0, Life(peer), count(1))
    assert [author.peer_id for author, _ in ledger.counts(0)] == ["a", "b", "c"]


def test_old_rounds_are_forgotten():
    ledger = ProgressCounter(4)
    for round_number in range(4):
        ledger.merge(round_number, Life("a"), count(1))
    ledger.forget_before(2)
    assert [ledger.samples(round_number) for round_number in range(4)] == [0, 0, 1, 1]


# --- lives of one peer ------------------------------------------------------------------------------------------------


def test_what_a_former_life_has_counted_stays_beside_the_counts_of_the_new_one():
    ledger = ProgressCounter(10)
    ledger.merge(0, Life("a", 5), count(4))
    assert ledger.merge(0, Life("a", 9), count(2)), "the former life has counted more, and does not hide it"
    assert ledger.merge(0, Life("a", 5), count(6)), "an old count that comes late"
    assert ledger.samples(0) == 8
    assert ledger.count_of(0, Life("a", 9)) == count(2)
    assert contents(ledger) == [(Life("a", 5), count(6)), (Life("a", 9), count(2))]


def test_only_so_many_lives_of_a_peer_count_in_a_round():
    ledger = ProgressCounter(100)
    for incarnation in range(MAX_LIVES):
        assert ledger.may_count(0, Life("a", incarnation))
        ledger.merge(0, Life("a", incarnation), count(1))
    assert not ledger.may_count(0, Life("a", MAX_LIVES))
    assert not ledger.may_claim(0, Life("a", MAX_LIVES), {"a"}, 1), "nobody would believe that it has counted"
    assert ledger.may_count(0, Life("a", 0)), "known lives go on"
    assert ledger.may_count(0, Life("b", MAX_LIVES))
    assert ledger.may_count(1, Life("a", MAX_LIVES))


def test_a_peer_is_not_charged_with_what_its_former_life_had_under_way():
    ledger = ProgressCounter(8)
    ledger.merge(0, Life("a", 1), count(2, claimed=8))
    assert not ledger.may_claim(0, Life("b"), {"a", "b"}, 1), "as long as nobody knows of a new life"
    assert ledger.may_claim(0, Life("a", 2), {"a", "b"}, 1), "it knows best"
    ledger.merge(0, Life("a", 2), count(0, claimed=1))
    assert ledger.may_claim(0, Life("b"), {"a", "b"}, 1)


def test_claims_of_the_newest_life_alone_are_charged_in_whatever_order_counts_come():
    ledger = ProgressCounter(8)
    ledger.merge(0, Life("a", 2), count(0, claimed=7))
    ledger.merge(0, Life("a", 1), count(1, claimed=5))
    assert not ledger.may_claim(0, Life("b"), {"a", "b"}, 1), "seven and one"
    assert ledger.may_claim(0, Life("b"), {"b"}, 1), "it has died for good"


def test_all_lives_of_a_peer_have_one_share():
    ledger = ProgressCounter(8)
    ledger.merge(0, Life("a", 1), count(4))
    ledger.merge(0, Life("b", 1), count(0, claimed=2))
    assert not ledger.may_claim(0, Life("a", 2), {"a", "b"}, 1), "the last two are left to b"
    assert ledger.may_claim(0, Life("b", 1), {"a", "b"}, 1)


# --- claims -----------------------------------------------------------------------------------------------------------


class Claimants:
    """Stage-0 peers that see each other's claims at once."""

    def __init__(self, global_batch_size, num_samples, peers):
        self.num_samples = num_samples
        self.ledger = ProgressCounter(global_batch_size)
        self.own = dict.fromkeys(peers, RoundCount())
        self.live = set(peers)

    def try_to_claim(self, peer):
        if not self.ledger.may_claim(0, Life(peer), self.live - {peer}, self.num_samples):
            return False
        self.tell(peer, claimed=self.num_samples)
        return True

    def tell(self, peer, claimed=0, counted=0):
        own = self.own[peer]
        self.own[peer] = RoundCount(own.samples + counted, own.claimed + claimed)
        self.ledger.merge(0, Life(peer), self.own[peer])

    def claim_all(self, rng):
        """Have all live peers ask in a random order until nobody may claim any more."""
        while True:
            asking = sorted(self.live)
            rng.shuffle(asking)
            if sum(self.try_to_claim(peer) for peer in asking) == 0:
                return

    @property
    def charged(self):
        return sum(c.claimed if peer in self.live else c.samples for peer, c in self.own.items())


sizes = st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 7))


@given(sizes, st.randoms(use_true_random=False))
def test_together_they_claim_exactly_the_global_batch(size, rng):
    global_batch_size, num_samples, num_peers = size
    peers = Claimants(global_batch_size, num_samples, [f"p{n}" for n in range(num_peers)])
    peers.claim_all(rng)
    assert peers.charged == math.ceil(global_batch_size / num_samples) * num_samples


@given(sizes, st.data())
def test_some_peer_may_claim_while_something_remains(size, data):
    """However unequal their speeds: of those that ask at all times, some never get a turn before the others."""
    global_batch_size, num_samples, num_peers = size
    names = [f"p{n}" for n in range(num_peers)]
    peers = Claimants(global_batch_size, num_samples, names)
    while peers.charged < global_batch_size:
        able = [p for p in names if peers.ledger.may_claim(0, Life(p), peers.live, num_samples)]
        assert able, f"stalled with {peers.charged} of {global_batch_size} claimed"
        assert peers.try_to_claim(data.draw(st.sampled_from(able)))
    assert not any(peers.ledger.may_claim(0, Life(p), peers.live, num_samples) for p in names)


@given(sizes, st.randoms(use_true_random=False), st.data())
def test_what_a_peer_had_under_way_when_it_vanished_is_claimed_by_others(size, rng, data):
    global_batch_size, num_samples, num_peers = size
    names = [f"p{n}" for n in range(num_peers + 1)]
    peers = Claimants(global_batch_size, num_samples, names)
    for peer in data.draw(st.lists(st.sampled_from(names), max_size=20)):
        peers.try_to_claim(peer)
    for peer in names:
        done = data.draw(st.integers(0, peers.own[peer].claimed // num_samples))
        peers.tell(peer, counted=done * num_samples)
    peers.live -= set(data.draw(st.lists(st.sampled_from(names), max_size=num_peers, unique=True)))
    gone = sum(c.samples for peer, c in peers.own.items() if peer not in peers.live)
    claimed_before = peers.charged - gone
    peers.claim_all(rng)
    to_claim = max(math.ceil((global_batch_size - gone) / num_samples) * num_samples, 0)
    assert peers.charged - gone == max(to_claim, claimed_before)


def test_shares_are_kept_for_slow_peers():
    peers = Claimants(12, 1, ["fast", "slow", "slower"])
    for _ in range(100):
        peers.try_to_claim("fast")
    assert peers.own["fast"].claimed == 8, "the last two microbatches of each of the others are theirs"
    for _ in range(2):
        assert peers.try_to_claim("slow")
        assert peers.try_to_claim("slower")
    assert not peers.try_to_claim("slow")


@pytest.mark.parametrize("num_peers", [2, 9, 32])
def test_one_slow_peer_keeps_nobody_from_what_it_leaves(num_peers):
    peers = Claimants(512, 1, [f"p{number:02}" for number in range(num_peers)])
    assert peers.try_to_claim("p00")
    for _ in range(512):
        for number in range(1, num_peers):
            peers.try_to_claim(f"p{number:02}")
    assert peers.charged == 512 - RESERVED_MICROBATCHES


def test_peers_that_have_claimed_equally_much_take_what_is_left_one_after_the_other():
    peers = Claimants(9, 1, ["a", "b", "slow"])
    for peer in "ab" * 3:
        assert peers.try_to_claim(peer)
    assert not peers.try_to_claim("b"), "two of three are the slow one's"
    assert peers.try_to_claim("a")
    assert not peers.try_to_claim("a")
    assert not peers.try_to_claim("b")


def test_a_peer_alone_takes_all():
    peers = Claimants(10, 4, ["alone"])
    peers.claim_all(random.Random(0))
    assert peers.own["alone"].claimed == 12


def test_no_peer_claims_in_a_full_round():
    ledger = ProgressCounter(4)
    ledger.merge(0, Life("gone"), count(4))
    assert not ledger.may_claim(0, Life("me"), {"me"}, 1)
    assert ledger.may_claim(1, Life("me"), {"me"}, 1)


@pytest.mark.parametrize("order", list(permutations(["a", "b", "c"])))
def test_claims_do_not_depend_on_the_order_in_which_live_peers_are_named(order):
    ledger = ProgressCounter(4)
    ledger.merge(0, Life("a"), count(0, claimed=2))
    assert ledger.may_claim(0, Life("b"), list(order), 1)
    assert not ledger.may_claim(0, Life("a"), list(order), 1), (
        "its share is two of four: one each are left to the others"
    )
