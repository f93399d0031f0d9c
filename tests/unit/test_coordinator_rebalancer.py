"""Orders to the peers of a live run: when they are given, what becomes of who moves, and whom nobody believes."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from coordinator.run.rebalancer import Rebalancer
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.placement.capacity import JOINING_PATIENCE_S
from swarm_peer.policy.placement.live_rebalancer import (
    EXCHANGE_PATIENCE,
    LEAST_PATIENCE_S,
    LEAST_REST_S,
    REST_S,
    SETTLING_S,
)
from swarm_peer.policy.placement.movers import OTHERS_PATIENCE_S, PREPARING_PATIENCE, REFUSAL_S, OpenMove
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView
from swarm_peer.wire.records import Assignment

ANNOUNCEMENT_S = 10.0
CONFIG = {
    "model_type": "gpt2", "vocab_size": 16, "n_positions": 8, "n_embd": 16, "n_layer": 4, "n_head": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MANIFEST = RunManifest.model_validate(
    {
        "name": "tiny",
        "model": {"config": CONFIG},
        "stages": {"count": 2, "layers": [2, 2]},
        "data": {"sequence_length": 8},
        "training": {"steps": 10, "global_batch_size": 8, "microbatch_size": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.1},
        "limits": {"announcement_s": ANNOUNCEMENT_S},
    }
)


class Run:
    """A run's announcements, and what its coordinator makes of them."""

    def __init__(self, min_replicas: int = 1, inherited: tuple[Assignment, ...] = ()):
        self.now_s = 100.0
        self.peers: dict[str, PeerView] = {}
        resolved = ResolvedManifest.of(MANIFEST)
        self.rebalancer = Rebalancer(resolved, min_replicas, begun_s=self.now_s, inherited=inherited)
        self.policy = self.rebalancer.policy
        # An advantage lasts for an hour, however often peers come and go.
        self.policy._churn.horizon_s = lambda num_stages, now_s: 3600.0
        self.delivered = 100
        self.left: set[str] = set()
        for name, stage in zip("abcdef", (0, 0, 0, 0, 0, 1), strict=True):
            self.add(name, stage, since_s=0.0)

    @property
    def open(self) -> dict[str, OpenMove]:
        """The moves under way, by the id that each peer had."""
        return self.policy.movers.open

    def add(self, name: str, stage: int, **fields: object) -> None:
        peer = PeerView(
            peer_id=name,
            stage=stage,
            state=PeerState.SERVING,
            round_number=1,
            samples_per_s=10.0,
            movable=True,
            since_s=self.now_s,
            announced=7,
        )
        self.peers[name] = replace(peer, **fields)

    def announce(self) -> None:
        """All say the same again."""
        for name, peer in self.peers.items():
            self.peers[name] = replace(peer, announced=peer.announced + 1)

    def look(self, after_s: float = 1.0) -> list[str]:
        """Those who are newly ordered."""
        self.now_s += after_s
        before = set(self.open)
        view = SwarmView(2, tuple(self.peers.values()), frozenset(self.left))
        self.rebalancer.look(view, self.delivered, 10.0, self.now_s)
        return sorted(set(self.open) - before)


def in_balance() -> Run:
    """Two in each stage."""
    run = Run()
    for name in "cde":
        del run.peers[name]
    run.add("g", 1)
    assert run.look(60) == []
    return run


def test_in_a_large_stage_a_smaller_gain_is_worth_a_move() -> None:
    """The errors of its peers' speeds cancel out, and a single peer is a small part of it."""
    run = Run()
    run.peers.clear()
    for number in range(40):
        run.add(f"p{number}", stage=0 if number < 22 else 1)
    assert len(run.look(60)) == 1, "it gains 5.6 %"


def test_nobody_is_moved_before_the_coordinator_has_heard_of_all() -> None:
    run = Run()
    for _ in range(4):
        run.announce()
        assert run.look((ANNOUNCEMENT_S - 1) / 4) == []
    assert len(run.look(3)) == 1


def test_movers_of_the_coordinator_before_this_one_are_waited_for() -> None:
    run = Run(inherited=(Assignment(peer="m", announced=3, from_stage=0, to_stage=1, reason=""),))
    assert run.look(30) == [], "it is on its way"
    run.add("m", 1, moved_from=0, samples_per_s=40.0)
    assert run.look(ANNOUNCEMENT_S) == []
    assert run.look(ANNOUNCEMENT_S) == [], "with it the stages are in balance"


def test_movers_of_the_coordinator_before_this_one_are_not_waited_for_for_ever() -> None:
    run = Run(inherited=(Assignment(peer="m", announced=3, from_stage=0, to_stage=1, reason=""),))
    assert run.look(30) == []
    assert len(run.look(LEAST_PATIENCE_S)) == 1


def test_who_did_not_follow_the_coordinator_before_this_one_is_not_waited_for() -> None:
    run = Run(inherited=(Assignment(peer="a", announced=3, from_stage=0, to_stage=1, reason=""),))
    assert len(run.look(30)) == 1


def test_nobody_is_moved_before_the_run_has_begun() -> None:
    run = Run()
    run.delivered = 0
    assert run.look(60) == []
    run.delivered = 100
    for _ in range(3):
        assert run.look() == [], "whatever is announced first is as good as nothing"
        run.announce()
    assert len(run.look()) == 1


@pytest.mark.parametrize("moved_from", [UNDECIDED, 0], ids=["a newcomer", "a mover"])
def test_who_serves_and_is_not_measured_yet_is_waited_for(moved_from: int) -> None:
    run = in_balance()
    for name in "cde":
        run.add(name, 0)
    run.add("new", 1, samples_per_s=0.0, moved_from=moved_from)
    asked = [run.look(1) for _ in range(2 * int(ANNOUNCEMENT_S) - 1)]
    assert not any(asked)
    assert run.look(3) != [], "it had time enough"


def test_where_somebody_is_always_new_not_all_are_waited_for() -> None:
    run = in_balance()
    for name in "cde":
        run.add(name, 0)
    asked = []
    for n in range(40):
        run.add(f"new{n}", 1, samples_per_s=0.0)
        run.peers.pop(f"new{n - 1}", None)
        asked += run.look(1)
    assert asked


def test_a_peer_is_not_moved_twice_as_long_as_the_others_are_the_same() -> None:
    run = Run()
    run.peers["f"] = replace(run.peers["f"], samples_per_s=1.0)
    [mover] = run.look(60)
    run.add(mover, 1, moved_from=0)
    for name in set(run.peers) - {mover}:
        run.peers[name] = replace(run.peers[name], movable=False)
    assert run.look(60) == []
    # Now its old stage needs it more.
    for name in set(run.peers) - {mover}:
        run.peers[name] = replace(run.peers[name], samples_per_s=1.0 if run.peers[name].stage == 0 else 10.0)
    run.delivered = 10
    for serial in range(8, 20):
        for name, peer in run.peers.items():
            run.peers[name] = replace(peer, announced=serial)
        assert run.look(ANNOUNCEMENT_S / 4) == []
    assert run.look(REST_S) == [mover], "but not for ever"


def test_who_has_moved_may_move_again_when_somebody_has_gone() -> None:
    run = Run()
    run.add("f", 1, samples_per_s=30.0, since_s=0.0)
    [mover] = run.look(60)
    run.add(mover, 1, moved_from=0)
    assert run.look(60) == [], "in balance"
    for name in run.peers.keys() - {"f", mover}:
        del run.peers[name]
    run.add("other", 0, movable=False)
    run.add("f", 1, movable=False)
    run.add("g", 1, movable=False)
    assert run.look(60) == [mover]


def needs_mover_back(run: Run, **fields: object) -> None:
    """A peer has moved to stage 1, and stage 0 has one peer for its three now."""
    for name in run.peers.keys() - {"f"}:
        del run.peers[name]
    run.add("a", 0, movable=False, since_s=0.0)
    run.add("f", 1, movable=False, since_s=0.0)
    run.add("g", 1, movable=False, since_s=0.0)
    run.add("mover", 1, **({"moved_from": 0} | fields))


def test_who_has_moved_rests_under_the_next_coordinator_too() -> None:
    run = Run()
    needs_mover_back(run)
    assert run.look(60) == []
    assert run.look(60) == []
    assert run.look(REST_S - 120) == ["mover"]


def test_who_has_moved_rests_a_little_whoever_comes_or_goes() -> None:
    run = Run()
    needs_mover_back(run)
    assert run.look(60) == []
    run.add("h", 1, movable=False, since_s=0.0)
    assert run.look(1) == []
    assert run.look(LEAST_REST_S - 62) == []
    assert run.look(2) == ["mover"]


def test_nobody_rests_when_a_stage_is_lost() -> None:
    run = Run()
    needs_mover_back(run)
    assert run.look(30) == []
    del run.peers["a"]
    assert run.look(1) == []
    assert run.look(ANNOUNCEMENT_S) == ["mover"]


def test_what_a_mover_does_is_known_from_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """So that nobody has to wait for it, and its first measurements move nobody."""
    run = Run()
    [mover] = run.look(60)
    run.add(mover, 1, moved_from=0, samples_per_s=0.1)
    assert run.look(1) == []
    [second] = run.look(3)
    assert second in "abcde", "four are left in stage 0, and two are in stage 1"
    run.add(second, 1, moved_from=0, samples_per_s=0.1)
    assert run.look(1) == []
    for _ in range(2):
        assert run.look(3) == [], "in balance"
        run.announce()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            run.look(3)
            run.announce()
    assert "moves_fell_short" in caplog.text, "now it is known that they do nothing"


def test_equal_peers_that_slow_each_other_down_are_not_moved_to_and_fro() -> None:
    """Who is alone in its stage computes all the time, and seems slow; whoever it is."""
    run = in_balance()
    del run.peers["g"]
    ordered: list[str] = []
    for _ in range(400):
        for name, peer in run.peers.items():
            alone = sum(other.stage == peer.stage for other in run.peers.values()) == 1
            run.peers[name] = replace(peer, announced=peer.announced + 1, samples_per_s=8.0 if alone else 10.0)
        for mover in run.look(2.5):
            ordered.append(mover)
            to_stage = run.open[mover].move.to_stage
            run.add(mover, to_stage, moved_from=1 - to_stage, samples_per_s=10.0)
    assert len(ordered) <= 1
    del run.peers[next(name for name, peer in run.peers.items() if peer.stage == 0)]
    run.add("h", 1)
    asked = [run.look(ANNOUNCEMENT_S) for _ in range(3)]
    assert any(asked), "a stage that nobody serves, or a third of what another takes, is worth a move all the same"


@pytest.mark.parametrize("is_noise", [True, False], ids=["noise", "a difference"])
def test_peers_are_exchanged_if_that_pays_for_a_while(is_noise: bool) -> None:
    run = in_balance()
    for name, speed in zip("abfg", (10.0, 10.0, 30.0, 30.0), strict=True):
        run.peers[name] = replace(run.peers[name], samples_per_s=speed)
    while "an exchange may pay" not in run.rebalancer.policy.reason:
        run.announce()
        assert run.look(ANNOUNCEMENT_S / 4) == []
    if is_noise:
        for name in "abfg":
            run.peers[name] = replace(run.peers[name], samples_per_s=20.0)
    ordered = []
    for _ in range(4 * EXCHANGE_PATIENCE):
        assert ordered == [], "not before the time is over"
        run.announce()
        ordered = run.look(ANNOUNCEMENT_S / 4)
    assert len(ordered) == (0 if is_noise else 2)


def test_who_moves_neither_comes_nor_goes() -> None:
    run = Run()
    [mover] = run.look(60)
    run.peers[mover] = replace(run.peers[mover], state=PeerState.DRAINING)
    run.look(1)
    del run.peers[mover]
    run.look(1)
    run.add(mover, 1, moved_from=0)
    run.look(1)
    assert len(run.policy._churn._moments) == 0
    run.add("another", 1)
    run.look(1)
    assert len(run.policy._churn._moments) == 1


def test_an_order_says_who_where_and_why() -> None:
    run = Run()
    [mover] = run.look(60)
    assert mover in "abcde"
    [order] = run.rebalancer.assignments()
    assert (order.peer, order.announced, order.from_stage, order.to_stage) == (mover, 7, 0, 1)
    assert order.reason.startswith("without the move, stage 0 would do")
    assert run.rebalancer.policy.num_moves == 1


def test_a_mover_counts_where_it_goes_to_whatever_is_announced_of_it_meanwhile() -> None:
    run = Run()
    [mover] = run.look(60)
    assert run.look() == [], "not obeyed yet"
    run.peers[mover] = replace(run.peers[mover], state=PeerState.DRAINING)
    assert run.look() == []
    del run.peers[mover]
    assert run.look() == [], "on its way"
    run.add(mover, 0)  # its last announcement may come back from a stale DHT node
    assert run.look() == []
    run.add(mover, 1, state=PeerState.JOINING, samples_per_s=0.0, moved_from=0)
    assert run.look() == []
    assert mover not in run.open
    run.add(mover, 1, samples_per_s=0.0, moved_from=0, since_s=run.now_s)
    run.now_s += 5
    assert run.look(ANNOUNCEMENT_S) == [], "the stages have just changed"
    second = run.look(ANNOUNCEMENT_S)
    assert len(second) == 1, "stage 0 has four, stage 1 two: one more moves"
    assert second != [mover]


def test_who_dies_before_it_obeys_is_not_waited_for() -> None:
    run = Run()
    [mover] = run.look(60)
    del run.peers[mover]
    assert run.look(0.1) == []
    assert run.open == {}
    [another] = run.look(ANNOUNCEMENT_S)
    assert another != mover


def test_who_has_left_before_it_was_seen_to_drain_is_on_its_way() -> None:
    run = Run()
    [mover] = run.look(60)
    del run.peers[mover]
    run.left = {mover}
    assert run.look(0.1) == []
    run.left = set()
    assert run.look(ANNOUNCEMENT_S) == []
    assert list(run.open) == [mover]
    run.add(mover, 1, state=PeerState.JOINING, samples_per_s=0.0, moved_from=0)
    run.look(1)
    assert run.open == {}


def test_peers_that_vanish_one_after_the_other_make_one_decision() -> None:
    run = in_balance()
    del run.peers["g"]
    assert run.look(1) == []
    del run.peers["a"]
    assert run.look(1) == [], "who else is gone shows within an announcement's interval"
    assert run.look(ANNOUNCEMENT_S) == []


def test_who_does_not_obey_is_not_asked_again_for_a_while() -> None:
    run = Run()
    asked: list[str] = []
    [mover] = run.look(60)
    patience_s = run.open[mover].patience_s
    assert patience_s >= LEAST_PATIENCE_S
    [other] = run.look(patience_s + 1)
    assert other != mover
    asked = [mover, other]
    while len(asked) < 5:
        asked += run.look(patience_s + 1)
    assert sorted(asked) == list("abcde"), "each once"
    assert run.look(patience_s + 1) == [] or run.now_s > 100 + REFUSAL_S


def test_who_prepares_its_move_is_waited_for_and_nobody_is_sent_in_its_place() -> None:
    run = Run()
    [mover] = run.look(60)
    patience_s = run.open[mover].patience_s
    run.peers[mover] = replace(run.peers[mover], moving_to=1)
    for _ in range(8):
        assert [other for other in run.look(patience_s / 2) if other == mover] == []
        assert mover in run.open
    run.peers[mover] = replace(run.peers[mover], moving_to=UNDECIDED, state=PeerState.DRAINING)
    run.look(patience_s - 1)
    assert mover in run.open, "it has as long from then on as one that closes its stage first"
    run.look(2)
    assert mover not in run.open


def test_who_prepares_for_ever_is_given_up() -> None:
    run = Run()
    [mover] = run.look(60)
    run.peers[mover] = replace(run.peers[mover], moving_to=1)
    patience_s = run.open[mover].patience_s
    run.look(PREPARING_PATIENCE * patience_s)
    assert mover in run.open
    run.look(patience_s + 1)
    assert mover not in run.open
    assert run.policy.movers.placed(SwarmView(2, tuple(run.peers.values())), (1.0, 1.0), bool).peer(mover).stage == 0


def test_the_next_coordinator_counts_who_prepares_its_move_where_it_goes_to() -> None:
    run = Run()
    for name in "cd":
        del run.peers[name]
    assert len(run.look(60)) == 1, "three and one"
    run = Run()
    for name in "cd":
        del run.peers[name]
    run.peers["e"] = replace(run.peers["e"], moving_to=1)
    for _ in range(10):
        assert run.look(60) == []
    run.peers["e"] = replace(run.peers["e"], state=PeerState.DRAINING)
    assert run.look(60) == []
    run.peers["e"] = replace(run.peers["e"], state=PeerState.SERVING)
    assert len(run.look(OTHERS_PATIENCE_S)) == 1, "it does not move"


def test_who_joins_for_ever_fills_no_gap() -> None:
    """It reaches nobody who has the state, perhaps, or lies: however recently it says that it has come."""
    run = Run()
    for name in "xyzv":
        run.add(name, 1, state=PeerState.JOINING, samples_per_s=0.0)
    assert run.look(60) == []
    for _ in range(20):
        for name in "xyzv":
            run.peers[name] = replace(run.peers[name], since_s=run.now_s)
        run.announce()
        assert run.look(JOINING_PATIENCE_S / 20) == []
    assert len(run.look(60)) == 1, "as if nobody had come"


def test_one_odd_measurement_moves_nobody() -> None:
    run = in_balance()
    for serial in range(8, 20):
        odd = 2.0 if serial == 15 else 10.0
        for name, peer in run.peers.items():
            run.peers[name] = replace(peer, announced=serial, samples_per_s=odd if name in "fg" else 10.0)
        assert run.look(ANNOUNCEMENT_S / 4) == []
    run.add("e", 0)
    asked: list[str] = []
    for serial in range(20, 30):
        for name, peer in run.peers.items():
            run.peers[name] = replace(peer, announced=serial, samples_per_s=2.0 if name in "fg" else 10.0)
        asked += run.look(ANNOUNCEMENT_S / 4)
    assert asked, "that they have become slower for good"


def test_pinned_peers_stay() -> None:
    run = Run()
    for name in "abcde":
        run.peers[name] = replace(run.peers[name], movable=False)
    assert run.look(60) == []


def test_a_stage_keeps_its_replicas() -> None:
    run = Run(min_replicas=5)
    assert run.look(60) == []


def test_what_is_not_believed_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.peers["f"] = replace(run.peers["f"], samples_per_s=1e9)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            run.look(20)
    assert [record.getMessage() for record in caplog.records if "speed_not_believed peer=f" in record.getMessage()] == [
        "speed_not_believed peer=f reason=announces 1e+09 samples/s; more than 192 is not believed"
    ]


def test_a_stage_that_does_more_than_it_announces_is_told_of_once_for_those_who_serve_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    run.peers = {name: replace(peer, movable=False) for name, peer in run.peers.items()}
    with caplog.at_level(logging.INFO):
        for come in range(2):
            for _ in range(3):
                for delivered in (100, 200):  # "f" alone announces 10 a second for stage 1
                    run.delivered = delivered
                    run.look(10 + SETTLING_S + 1)
            told = [record for record in caplog.records if "speed_not_believed stage=1" in record.getMessage()]
            assert [record.levelname for record in told] == ["INFO"] * (come + 1)
            run.add("g", 0, movable=False)


def test_of_a_run_that_all_have_left_no_decision_is_told(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.peers = {name: replace(peer, movable=False) for name, peer in run.peers.items()}
    run.look(60)
    reason = run.policy.reason
    run.peers = {}
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            run.look(60)
    assert "rebalancing" not in caplog.text
    assert run.policy.reason == reason


def test_what_was_delivered_before_a_peer_left_says_nothing_of_the_others() -> None:
    run = Run()
    run.delivered = 200  # 20 a second; "f" alone announces 10 for stage 1
    run.peers = {name: replace(peer, movable=False) for name, peer in run.peers.items()}
    run.look(60)
    assert run.policy._disbelieved == set(), "who is here has just come"
    run.look(10 + SETTLING_S + 1)
    assert run.policy._disbelieved == {"stage=1"}
