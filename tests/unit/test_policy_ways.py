"""Placements in which peers lack a way to somebody that they need."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.placement.live_rebalancer import LiveRebalancer
from swarm_peer.policy.placement.lost_stage import choose_mover
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.movers import OpenMove
from swarm_peer.policy.placement.rebalancing import Move, choose_stage, rebalance
from swarm_peer.policy.placement.ways import (
    as_reached,
    cut_off,
    gives_way,
    helpful_ports,
    lacked,
    lacking,
    missing_ways,
)
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

PARAMS = RebalancingParameters(stage_costs=(1.0, 1.0), state_bytes=(1e6, 1e6), overhead_s=1.0)


def peer(peer_id: str, stage: int, unreached: str = "", *, state: PeerState = PeerState.SERVING, speed: float = 1.0):
    return PeerView(
        peer_id=peer_id, stage=stage, state=state, samples_per_s=speed, movable=True, unreached=tuple(unreached)
    )


def view(*peers: PeerView, num_stages: int = 2) -> SwarmView:
    return SwarmView(num_stages, peers)


@pytest.mark.parametrize(
    ("placed", "stage", "without_way", "lacks"),
    [
        (["ab", "c"], 0, "b", "b"),  # a stage-mate
        (["a", "bc"], 0, "b", ""),  # one of two neighbours: microbatches go by the other
        (["a", "bc"], 0, "bc", "bc"),
        (["a", "", "c"], 0, "c", "c"),  # the leaders of all stages talk to each other; an empty one has nobody yet
        (["b", "c", "a"], 1, "ba", "ab"),
        (["b", "c", "ad"], 1, "a", ""),
        (["ab", "c"], 0, "", ""),
    ],
)
def test_whom_a_peer_lacks(placed: list[str], stage: int, without_way: str, lacks: str) -> None:
    assert lacked(stage, placed, frozenset(without_way)) == frozenset(lacks)


def test_of_two_stage_mates_without_a_way_the_later_one_goes() -> None:
    missing = {"a": {"b"}, "b": {"a"}}
    assert not gives_way("a", 0, ["abc"], missing)
    assert gives_way("b", 0, ["abc"], missing) == {"a"}
    assert not gives_way("c", 0, ["abc"], missing)
    assert gives_way("a", 0, ["cba"], missing) == {"b"}


def test_who_lacks_another_stage_goes_if_a_mate_does_not() -> None:
    missing = {"a": {"x"}, "b": {"x"}, "x": {"a", "b"}}
    assert gives_way("a", 0, ["ac", "x"], missing) == {"x"}
    assert not gives_way("a", 0, ["a", "x"], missing), "the stage would be lost"
    assert not gives_way("a", 0, ["ab", "x"], missing), "neither is of more use than the other"
    assert not gives_way("a", 0, ["ac", "xy"], missing)


@given(st.integers(1, 3), st.data())
def test_those_that_stay_reach_each_other_and_each_stage_keeps_somebody(num_stages: int, data: st.DataObject) -> None:
    peers = [f"p{number}" for number in range(data.draw(st.integers(1, 8)))]
    rosters: list[list[str]] = [[] for _ in range(num_stages)]
    for each in peers:
        rosters[data.draw(st.integers(0, num_stages - 1))].append(each)
    missing: dict[str, set[str]] = {each: set() for each in peers}
    for a, b in combinations(peers, 2):
        if data.draw(st.booleans()):
            missing[a].add(b)
            missing[b].add(a)
    for stage, roster in enumerate(rosters):
        stay = [each for each in roster if not gives_way(each, stage, rosters, missing)]
        assert bool(stay) == bool(roster)
        assert not any(b in missing[a] for a, b in combinations(stay, 2))


def test_the_port_that_would_help_most_makes_most_ways() -> None:
    pairs = missing_ways([peer("a", 0, "bc"), peer("d", 0, "e")])
    assert pairs == {"a": {"b", "c"}, "b": {"a"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}
    assert helpful_ports("b", ["a"], pairs) == ("a",)
    assert helpful_ports("a", ["b", "c"], pairs) == ("a",)
    assert helpful_ports("d", ["e"], pairs) == ("d", "e")
    assert helpful_ports("z", ["e"], pairs) == ("e",), "what it has just found out counts, too"


def test_a_newcomer_goes_where_it_reaches_whom_it_needs() -> None:
    here = [peer("a", 0), peer("b", 1), peer("c", 1)]
    me = peer("me", UNDECIDED, "a", state=PeerState.JOINING)
    assert choose_stage(view(*here, replace(me, unreached=())), [1.0, 1.0], "me", 0.0).stage == 0
    # In stage 0 it has no way to its mate; in stage 1 none to the only neighbour.
    stuck = choose_stage(view(*here, me), [1.0, 1.0], "me", 0.0)
    assert (stuck.stage, stuck.lacks) == (0, {"a"}), "it takes what there is, and waits"
    here = [*here, replace(peer("d", 0), samples_per_s=0.1)]
    choice = choose_stage(view(*here, me), [1.0, 1.0], "me", 0.0)
    assert (choice.stage, choice.lacks) == (1, frozenset())
    assert "and reach it" in choice.reason


def test_a_peer_that_waits_for_a_way_fills_no_gap() -> None:
    here = [peer("a", 0), peer("b", 1, "a", state=PeerState.JOINING)]
    assert lacking(view(*here)) == {"b"}
    assert choose_stage(view(*here), [1.0, 1.0], "me", 0.0).stage == 1
    assert not lacking(view(here[0], replace(here[1], unreached=()))), "it comes soon"
    assert not lacking(view(*here, peer("c", 0), num_stages=3)), "it has a neighbour"


def test_a_stage_whose_peers_lack_their_neighbours_stands_as_if_it_was_lost() -> None:
    cut = view(peer("a", 0, "b"), peer("b", 1, "a"), peer("c", 2), peer("d", 2), num_stages=3)
    assert as_reached(cut).empty_stages() == [0, 1]
    assert choose_mover(cut, 1, {"c", "d"}).peer_id == "c"
    assert choose_mover(cut, 1, {"a", "b", "c", "d"}).peer_id == "c", "a and b are of no use, and not the ones to go"
    more = peer("c", 2, "b"), peer("d", 2), peer("e", 2)
    without_mate = view(*cut.peers[:2], *more, num_stages=3)
    assert choose_mover(without_mate, 1, {"c", "d"}).peer_id == "d", "b still has its place there"
    assert choose_stage(view(*cut.peers, num_stages=3), [1.0] * 3, "me", 0.0).stage == 0


def test_a_lost_stage_is_taken_over_by_one_that_reaches_all_other_stages() -> None:
    slow, fast = peer("a", 0, "x", speed=1.0), peer("b", 0, speed=2.0)
    swarm = view(slow, fast, peer("c", 0, speed=3.0), peer("x", 2), num_stages=3)
    assert choose_mover(swarm, 1, {"a", "b"}).peer_id == "b"
    waits = peer("w", 1, "x", state=PeerState.JOINING)
    assert choose_mover(view(*swarm.peers, waits, num_stages=3), 1, {"a", "b"}).peer_id == "b", "nobody waits for it"


def test_nobody_moves_to_a_mate_that_it_does_not_reach_nor_from_one_who_needs_it() -> None:
    poor = peer("x", 1)
    rich = [peer(name, 0) for name in "abcd"]
    (move,) = rebalance(view(*rich, poor), PARAMS, 0.0).moves
    assert (move.peer_id, move.to_stage) == ("a", 1)
    (move,) = rebalance(view(peer("a", 0, "x"), *rich[1:], poor), PARAMS, 0.0).moves
    assert move.peer_id == "b", "by its own word"
    (move,) = rebalance(view(*rich, replace(poor, unreached=("a", "b"))), PARAMS, 0.0).moves
    assert move.peer_id == "a", "the other one alone is not believed, and a mover tries for itself"
    assert not rebalance(view(*(replace(each, unreached=("x",)) for each in rich), poor), PARAMS, 0.0).moves
    # Of stage 0, y reaches a alone.
    poor_pair = peer("y", 1), peer("z", 1)
    assert [move.peer_id for move in rebalance(view(*rich, *poor_pair), PARAMS, 0.0).moves] == ["a"]
    unlike = [rich[0], *(peer(name, 0, "y") for name in "bcd")]
    assert [move.peer_id for move in rebalance(view(*unlike, *poor_pair), PARAMS, 0.0).moves] == ["a"]
    assert not rebalance(
        view(*unlike, replace(peer("y", 1), unreached=("b", "c", "d")), peer("z", 1)), PARAMS, 0.0
    ).moves


def test_a_mover_that_waits_for_a_way_where_it_has_come_counts_for_nothing() -> None:
    policy = LiveRebalancer(PARAMS, announcement_s=30.0, begun_s=0.0)
    moves = OpenMove(move=Move("m", 0, 1, ""), peer=peer("m", 0), work_per_s=9.0, given_s=0.0, patience_s=60.0)
    policy.movers.open["m"] = moves
    here = [peer("a", 0), peer("b", 0), peer("c", 0), peer("x", 1)]
    waits = peer("m", 1, "x", state=PeerState.JOINING)
    looks = (policy.look(view(*here, waits), 30.0, 30.0, float(second)) for second in range(0, 100, 2))
    notes = [note.text for each in looks for note in each]
    assert notes[0] == "peer_moved peer=m from=0 to=1"
    assert next(note for note in notes if "assigned" in note).startswith("peer_assigned peer=a to=1"), (
        "another one goes"
    )


@given(st.data())
def test_moves_cut_nobody_off(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 4))
    ids = [f"p{number}" for number in range(data.draw(st.integers(1, 12)))]
    pairs = data.draw(st.sets(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), max_size=12))
    peers = [
        replace(
            peer(each, data.draw(st.integers(0, num_stages - 1)), speed=data.draw(st.sampled_from([0.3, 1.0, 4.0]))),
            unreached=tuple(b for a, b in sorted(pairs) if a == each != b),
        )
        for each in ids
    ]
    params = replace(PARAMS, stage_costs=(1.0,) * num_stages, state_bytes=(1e6,) * num_stages)
    moves = {move.peer_id: move.to_stage for move in rebalance(SwarmView(num_stages, tuple(peers)), params, 0.0).moves}
    missing = missing_ways(peers)

    def lacking(placed: list[PeerView]) -> int:
        return cut_off([{each.peer_id for each in placed if each.stage == k} for k in range(num_stages)], missing)

    after = [replace(each, stage=moves.get(each.peer_id, each.stage)) for each in peers]
    assert lacking(after) <= lacking(peers)
