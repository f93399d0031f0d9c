"""Finds out soon that a peer is gone: to wait until its last announcement expires would take longer."""

from __future__ import annotations

import anyio

from swarm_peer.errors import CallError, CallTimeout, PeerUnreachable
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.wire.messages import AgreeCall

LOOK_S = 2.0
PROBE_TIMEOUT_S = 3.0


async def drop_silent_peers(transport: Transport, directory: Directory, manifest_hash: str) -> None:
    """Call peers that have missed an announcement, and drop those that cannot be reached; for ever."""
    call = AgreeCall(manifest=manifest_hash)

    async def ask(peer_id: str, serial: int) -> None:
        try:
            await transport.call(peer_id, call, timeout_s=PROBE_TIMEOUT_S)
        except (PeerUnreachable, CallTimeout):
            directory.drop(peer_id, serial)  # unless it has announced itself meanwhile
        except CallError:
            return  # it answers

    while True:
        await anyio.sleep(LOOK_S)
        async with anyio.create_task_group() as tasks:
            for peer in directory.overdue():
                tasks.start_soon(ask, peer.peer_id, peer.announced)
