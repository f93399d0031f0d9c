"""Peers that have missed an announcement are called, and dropped if they do not answer."""

from __future__ import annotations

from typing import Any

import anyio

from coordinator.run import silent_peers
from swarm_peer.errors import CallTimeout
from swarm_peer.policy.view import PeerState, PeerView


async def test_a_peer_is_dropped_by_the_announcement_that_it_was_asked_for(monkeypatch: Any) -> None:
    """It may announce itself while it is called: after a halt, this process knows of no announcement since."""
    monkeypatch.setattr(silent_peers, "LOOK_S", 0.001)
    dropped = anyio.Event()

    class Swarm:
        serial = 5

        def overdue(self) -> list[PeerView]:
            return [PeerView(peer_id="a", stage=0, state=PeerState.SERVING, announced=self.serial)]

        async def call(self, *_: Any, **__: Any) -> None:
            self.serial += 1
            raise CallTimeout("no answer")

        def drop(self, peer_id: str, serial: int) -> None:
            assert (peer_id, serial) == ("a", self.serial - 1)
            dropped.set()

    swarm: Any = Swarm()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(silent_peers.drop_silent_peers, swarm, swarm, 32 * "a")
        with anyio.fail_after(5):
            await dropped.wait()
        tasks.cancel_scope.cancel()
