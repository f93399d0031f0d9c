"""A newcomer says what it waits for."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest

from swarm_peer.errors import NotServing
from swarm_peer.protocol.epochs import Epoch, Place
from swarm_peer.protocol.statements import EpochId, Seat
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.state import joining
from swarm_peer.runtime.state.joining import LOST, join

MATE, OTHER = Seat("mate", 1, ""), Seat("other", 1, "")


class Nobody:
    """Nobody gives a state."""

    async def state(self):
        raise NotServing("nobody gives it")


@pytest.mark.parametrize(
    ("places", "begun", "told"),
    [
        ([Place(0, OTHER), Place(1, MATE)], {0, 1}, {"waits to join stage 1: nobody gives it"}),
        ([Place(0, OTHER)], {0, 1}, {f"waits to join stage 1: {LOST}"}),
        ([Place(0, OTHER)], {0}, set()),  # at the beginning of a run
    ],
)
async def test_a_newcomer_says_what_it_waits_for(monkeypatch, caplog, places, begun, told):
    monkeypatch.setattr(joining, "PAUSE_S", 0.001)
    epoch = Epoch(EpochId(1, OTHER, 0), tuple(places), begun=tuple(begun))
    membership = SimpleNamespace(desired=frozenset(), prepared=frozenset(), stages=frozenset())
    agreement = SimpleNamespace(
        core=SimpleNamespace(epoch=epoch, membership=membership),
        changed=Condition(),
        look=lambda: None,
        ask_for_log=lambda stage: None,
    )
    explained = []
    with anyio.move_on_after(0.05):
        await join(agreement, 1, Nobody(), explained.append)
    assert set(explained) == told
    assert caplog.text.count("waiting stage=1") == (LOST in caplog.text)


async def test_a_newcomer_wishes_for_no_place_as_long_as_it_lacks_a_way(monkeypatch, caplog):
    monkeypatch.setattr(joining, "PAUSE_S", 0.001)
    membership = SimpleNamespace(desired=frozenset({1}), prepared=frozenset(), stages=frozenset())
    core = SimpleNamespace(epoch=Epoch(EpochId(1, OTHER, 0), (Place(0, OTHER),)), membership=membership)
    agreement = SimpleNamespace(core=core, changed=Condition(), look=lambda: None)
    missing = ["no way to mate", "no way to mate", ""]
    desired = []

    def lacks():
        desired.append(membership.desired)
        if len(missing) == 1:
            membership.stages = frozenset({1})
        return missing.pop(0)

    explained = []
    await join(agreement, 1, Nobody(), explained.append, lacks)
    assert desired == [{1}, set(), set()]
    assert membership.desired == {1}
    assert explained == ["waits to join stage 1: no way to mate"] * 2
    assert caplog.text.count("waiting stage=1") == 1
