from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm_peer.policy.placement.throughput_validation import OUTLIER, TOLERANCE, believed
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView

COSTS = [1.0, 2.0]


def view_of(*speeds: tuple[str, int, float]) -> SwarmView:
    return SwarmView(
        2,
        tuple(
            PeerView(peer_id=name, stage=stage, state=PeerState.SERVING, samples_per_s=s) for name, stage, s in speeds
        ),
    )


def speeds_of(view: SwarmView) -> dict[str, float]:
    return {peer.peer_id: peer.samples_per_s for peer in view.peers}


def test_honest_peers_are_believed() -> None:
    view = view_of(("a", 0, 10.0), ("b", 0, 3.0), ("c", 1, 4.0), ("d", 1, 0.0))
    assert believed(view, COSTS, 4.0) == (view, ())
    assert believed(SwarmView(2), COSTS, 0.0) == (SwarmView(2), ())


def test_a_boast_is_capped_by_the_typical_peer() -> None:
    view = view_of(("a", 0, 4.0), ("b", 1, 1e12), ("c", 1, 2.0), ("d", 0, 4.0))
    result, findings = believed(view, COSTS, 0.0)
    assert speeds_of(result) == speeds_of(view) | {"b": OUTLIER * 4.0 / 2.0}
    assert [finding.subject for finding in findings] == ["peer=b"]
    assert findings[0].reason == "announces 1e+12 samples/s; more than 40 is not believed"


def test_a_stage_does_what_it_was_seen_to_do() -> None:
    view = view_of(("a", 0, 10.0), ("b", 1, 1.0), ("c", 1, 3.0))
    result, findings = believed(view, COSTS, 8.0)
    assert speeds_of(result) == {"a": 10.0, "b": 2.0, "c": 6.0}
    assert [(finding.subject, finding.reason) for finding in findings] == [
        ("stage=1", "its peers announce 4 samples/s, and 8 pass through it")
    ]
    assert believed(view, COSTS, 4.0 * TOLERANCE)[1] == ()


any_peer = st.builds(
    PeerView,
    peer_id=st.text("abcdef", min_size=1, max_size=4),
    stage=st.integers(UNDECIDED, 1),
    state=st.sampled_from(PeerState),
    samples_per_s=st.floats(0, 1e30),
)


@given(st.lists(any_peer, unique_by=lambda peer: peer.peer_id), st.floats(0, 1e6), st.randoms())
def test_whatever_is_announced_speeds_stay_finite_and_do_not_depend_on_order(peers, delivered, rng) -> None:  # type: ignore[no-untyped-def]
    result, findings = believed(SwarmView(2, tuple(peers)), COSTS, delivered)
    rng.shuffle(peers)
    assert believed(SwarmView(2, tuple(peers)), COSTS, delivered) == (result, findings)
    assert all(0 <= peer.samples_per_s < float("inf") for peer in result.peers)
    assert [peer.peer_id for peer in result.peers] == sorted(peer.peer_id for peer in peers)
