"""A peer whose owner lends a part of its link is taken for a link of that size, wherever it is or goes."""

from dataclasses import replace
from math import inf

import pytest

from swarm_peer.policy.link_limit import StageTraffic, most_samples_per_s
from swarm_peer.policy.placement.capacity import measured_work, serving_capacity, work_per_s
from swarm_peer.policy.placement.move_search import RebalancingParameters
from swarm_peer.policy.placement.rebalancing import choose_stage, rebalance
from swarm_peer.policy.placement.throughput_validation import OUTLIER, believed
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

# Of three stages: those in the middle pass twice as much.
TRAFFIC = (StageTraffic(100.0, 100.0), StageTraffic(200.0, 200.0), StageTraffic(100.0, 100.0))
COSTS = (1.0, 1.0, 1.0)
PARAMS = RebalancingParameters(stage_costs=COSTS, state_bytes=(1e6,) * 3, overhead_s=5.0, traffic=TRAFFIC)


def peer(peer_id, stage, device, *, upload=0.0, download=0.0, state=PeerState.SERVING):
    """A peer as it announces itself: what it does, and, where the link does less, what its device would do."""
    limit = inf if stage == UNDECIDED else TRAFFIC[stage].samples_per_s(upload, download)
    return PeerView(
        peer_id=peer_id,
        stage=stage,
        state=state,
        samples_per_s=min(device, limit),
        device_samples_per_s=device if limit < device else 0.0,
        upload_bytes_per_s=upload,
        download_bytes_per_s=download,
        movable=True,
        since_s=0.0,
    )


def undecided(peer_id, upload=0.0):
    return replace(peer(peer_id, UNDECIDED, 0.0, upload=upload, state=PeerState.JOINING), since_s=None)


def moves_of(*peers, params=PARAMS):
    decision = rebalance(SwarmView(3, peers), params, 1000.0)
    return [(move.peer_id, move.from_stage, move.to_stage) for move in decision.moves]


@pytest.mark.parametrize(
    ("upload", "download", "stage", "expected"),
    [(0, 0, 1, inf), (1000, 0, 0, 10), (1000, 0, 1, 5), (0, 1000, 1, 5), (1000, 400, 2, 4), (400, 1000, 2, 4)],
)
def test_a_link_carries_less_in_the_middle(upload, download, stage, expected):
    limited = replace(peer("a", stage, 1.0), upload_bytes_per_s=upload, download_bytes_per_s=download)
    assert most_samples_per_s(limited, stage, TRAFFIC) == expected
    assert most_samples_per_s(limited, stage, ()) == inf


def test_a_stage_that_sends_nothing_has_no_limit():
    assert StageTraffic(0.0, 100.0).samples_per_s(1.0, 0.0) == inf


def test_capacity_counts_what_links_carry():
    view = SwarmView(3, (peer("a", 0, 8.0), peer("b", 1, 8.0, upload=1000.0), peer("c", 1, 2.0), peer("d", 2, 8.0)))
    work = work_per_s(view.peers, COSTS)
    assert work == {"a": 8.0, "b": 8.0, "c": 2.0, "d": 8.0}, "devices are what they are"
    assert serving_capacity(view, work, COSTS, TRAFFIC) == [8.0, 5.0 + 2.0, 8.0]


def test_what_a_device_could_do_goes_with_it():
    assert measured_work(peer("b", 1, 8.0, upload=1000.0), (1.0, 3.0, 1.0)) == 24.0
    assert measured_work(peer("b", 1, 2.0, upload=1000.0), (1.0, 3.0, 1.0)) == 6.0


def test_newcomers_with_little_to_lend_begin_at_the_ends():
    view = SwarmView(3, (undecided("a"), undecided("b", upload=1000.0), undecided("c", upload=1000.0)))
    stages = {name: choose_stage(view, COSTS, name, 0.0, TRAFFIC).stage for name in "abc"}
    assert stages == {"a": 0, "b": 2, "c": 1}
    assert choose_stage(SwarmView(3, (undecided("b", upload=1000.0),)), COSTS, "b", 0.0, TRAFFIC).stage == 0
    full = SwarmView(3, (peer("x", 0, 5.0), peer("y", 2, 9.0), undecided("b", upload=1000.0)))
    assert choose_stage(full, COSTS, "b", 0.0, TRAFFIC).stage == 1, "need goes before comfort"


def test_a_newcomer_that_is_placed_before_counts_with_its_link():
    """Two gaps: the stage that has got a peer with a thin link is still the needier one."""
    # The typical device does 8 samples/s; a's link carries 2 in the middle.
    view = SwarmView(
        3, (peer("x", 0, 8.0), peer("y", 1, 1.0), peer("z", 2, 8.0), undecided("a", upload=400.0), undecided("b"))
    )
    assert choose_stage(view, COSTS, "a", 0.0, TRAFFIC).stage == 1
    assert choose_stage(view, COSTS, "b", 0.0, TRAFFIC).stage == 1
    assert choose_stage(view, COSTS, "b", 0.0).stage == 0, "without links, the gap is filled"


def test_who_could_do_more_at_an_end_changes_places_with_one_that_has_a_wide_link():
    thin, wide = peer("thin", 1, 8.0, upload=1200.0), peer("wide", 2, 9.0)
    others = [peer("a", 0, 9.0), peer("a2", 0, 3.0), peer("b", 1, 3.0), peer("c", 2, 3.0)]
    assert sorted(moves_of(thin, wide, *others)) == [("a", 0, 1), ("thin", 1, 0)]
    assert moves_of(thin, wide, *others, params=replace(PARAMS, traffic=())) == [], "devices alone are in balance"


def test_nobody_is_moved_to_where_its_link_carries_nothing():
    rich = [peer(f"a{n}", 0, 4.0, upload=100.0) for n in range(6)]  # at an end they do 1 sample/s, in the middle 0.5
    assert [to for _, _, to in moves_of(*rich, peer("b", 1, 5.5), peer("c", 2, 9.0))] == []
    wide = [replace(each, upload_bytes_per_s=0.0) for each in rich]
    assert moves_of(*wide, peer("b", 1, 5.5), peer("c", 2, 9.0)) != []


def test_a_thin_link_downloads_for_longer():
    assert PARAMS.move_s(peer("a", 1, 8.0), 0) == 5.0 + 1e6 / 25e6
    assert PARAMS.move_s(peer("a", 1, 8.0, download=1e3), 0) == 5.0 + 1e6 / 1e3


def test_a_device_that_nobody_has_is_not_believed():
    liar = peer("liar", 1, 1e9, upload=1000.0)
    view, _ = believed(SwarmView(3, (liar, *(peer(f"p{n}", n % 3, 5.0) for n in range(5)))), COSTS, 0.0)
    assert view.peer("liar").device_samples_per_s == OUTLIER * 5.0
