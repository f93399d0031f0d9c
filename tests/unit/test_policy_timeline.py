from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline


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
