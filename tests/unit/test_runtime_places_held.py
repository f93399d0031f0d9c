"""Places that nobody holds all of."""

from contextlib import ExitStack

import pytest

from swarm_peer.errors import NoRoom
from swarm_peer.runtime.network.places_held import Places


def test_holders_of_one_ticket_leave_places_to_others() -> None:
    places = Places(10, 4)
    with ExitStack() as held:
        for holder in "aaaabbbb":
            held.enter_context(places.hold(holder, "one"))
        with pytest.raises(NoRoom), places.hold("c", "one"):
            pass
        with places.hold("d", "two"), places.hold("e"):
            with pytest.raises(NoRoom), places.hold("f", "three"):
                pass
            assert places.num_held == 10
    with places.hold("c", "one"):
        assert places.num_held == 1
    assert not places._held
    assert not places._of_ticket


def test_each_holder_has_some_and_those_without_a_ticket_have_no_other_limit() -> None:
    places = Places(4, 2)
    with places.hold("a"), places.hold("a"), places.hold("b"):
        with pytest.raises(NoRoom), places.hold("a"):
            pass
        with places.hold("b"), pytest.raises(NoRoom), places.hold("c"):
            pass
