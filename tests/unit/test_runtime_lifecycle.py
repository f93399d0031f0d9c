from contexts import MovedClock

from swarm_peer.runtime.lifecycle import Lifecycle


def test_a_life_is_numbered_by_the_time_at_which_it_began():
    assert Lifecycle(MovedClock(now=2.5)).incarnation == 2500


def test_each_life_has_a_larger_number_than_the_life_before_had_announcements():
    clock = MovedClock(now=2.5)
    assert Lifecycle(clock, last_serial=2500).incarnation == 2501, "it begins in the same millisecond"
    clock.now = 1.0
    assert Lifecycle(clock, last_serial=2501).incarnation == 2502, "somebody has set the clock back"
