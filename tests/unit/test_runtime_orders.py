"""Which orders a peer follows."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest

from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime import orders
from swarm_peer.runtime.orders import wait_for_order
from swarm_peer.wire.records import Assignment, AssignmentsRecord

ORDER = Assignment(peer="me", announced=10, from_stage=0, to_stage=1, reason="stage 1 is slow")


@dataclass
class World:
    signed: dict[str, AssignmentsRecord] = field(default_factory=dict)
    mates: list[PeerView] = field(default_factory=lambda: [PeerView("mate", 0, PeerState.SERVING)])
    serial: int = 10
    looks: int = 0

    async def fetch(self) -> dict[str, AssignmentsRecord]:
        self.looks += 1
        return self.signed

    def order(self, *given: Assignment, by: str = "run") -> None:
        self.signed[by] = AssignmentsRecord(assignments=given)

    async def wait(self) -> Assignment:
        view = SwarmView(2, (PeerView("me", 0, PeerState.SERVING), *self.mates))
        return await wait_for_order("me", 0, "run", self.fetch, lambda: view, lambda: self.serial)

    async def is_refused(self) -> bool:
        async with anyio.create_task_group() as tasks:
            done: list[Assignment] = []

            async def wait() -> None:
                done.append(await self.wait())

            tasks.start_soon(wait)
            while self.looks < 4 and not done:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        return not done


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(orders, "POLL_S", 0.0)
    return World()


async def test_the_runs_order_is_followed(world: World) -> None:
    world.order(ORDER.model_copy(update={"peer": "another"}), ORDER)
    assert await world.wait() == ORDER


async def test_nobody_else_gives_orders(world: World) -> None:
    world.order(ORDER, by="stranger")
    assert await world.is_refused()


@pytest.mark.parametrize(
    "change",
    [
        {"peer": "another"},
        {"from_stage": 1},
        {"to_stage": 0},
        {"to_stage": 2},
        {"announced": 9},  # of its life before
        {"announced": 11},  # of no announcement yet
    ],
)
async def test_what_does_not_mean_this_peer_as_it_is(world: World, change: dict[str, object]) -> None:
    world.order(ORDER.model_copy(update=change))
    assert await world.is_refused()


async def test_the_last_peer_of_a_stage_stays(world: World) -> None:
    world.order(ORDER)
    world.mates = [PeerView("mate", 0, PeerState.JOINING), PeerView("other", 1, PeerState.SERVING)]
    assert await world.is_refused()
