"""Who takes part in a run, and who is a stranger."""

from types import SimpleNamespace

import pytest
from contexts import MovedClock, make_context, unparsed

from swarm_peer.errors import CallError
from swarm_peer.policy.leadership import Term
from swarm_peer.runtime.network.members import LOOK_PAUSE_S, RunMembers


class Dht:
    """What the DHT has, and what has been found of it."""

    def __init__(self):
        self.announced, self.seen, self.coordinators = set(), set(), set()
        self.answers, self.num_looks = True, 0

    async def refresh(self, stages):
        self.num_looks += 1
        if not self.answers:
            raise CallError("no answer")
        self.seen |= self.announced

    def takes_part(self, peer_id):
        return peer_id in self.seen

    async def fetch_coordination(self, run_id):
        assert run_id == "the run's key"
        return {Term(number, name): SimpleNamespace() for number, name in enumerate(sorted(self.coordinators))}


@pytest.fixture
def dht():
    return Dht()


@pytest.fixture
def clock():
    return MovedClock(now=100.0)


@pytest.fixture
def members(dht, clock):
    return RunMembers(context=make_context(unparsed("0" * 32), clock=clock), directory=dht, dht=dht)


async def test_a_peer_that_is_in_the_view_is_not_looked_for(members, dht):
    dht.seen.add("a")
    assert await members.include("a")
    assert await members.include("the run's key"), "of the coordinator that began the run"
    assert dht.num_looks == 0


async def test_a_newcomer_that_has_just_announced_itself_is_found(members, dht):
    dht.announced.add("a")
    assert await members.include("a")


async def test_a_coordinator_is_known_by_its_warrant(members, dht):
    dht.coordinators = {"c1", "c2"}
    assert await members.include("c1")
    assert await members.include("c2")
    assert dht.num_looks == 1


async def test_strangers_do_not_have_the_dht_searched_again_and_again(members, dht, clock):
    for number in range(50):
        assert not await members.include(f"stranger {number}")
    assert dht.num_looks == 1
    clock.now += LOOK_PAUSE_S
    dht.announced.add("a")
    assert await members.include("a")


async def test_a_caller_is_a_stranger_while_the_dht_does_not_answer(members, dht, clock):
    dht.answers, dht.announced = False, {"a"}
    assert not await members.include("a")
    dht.answers, clock.now = True, clock.now + LOOK_PAUSE_S
    assert await members.include("a")
