"""Tells progress to peers that no call would tell in time: those at the end of a step, and those that idle."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import anyio

from swarm_peer.errors import CallError
from swarm_peer.runtime.progress import ProgressBook
from swarm_peer.runtime.transport import Transport, check_body
from swarm_peer.wire.messages import CountsCall, CountsReply, GreetCall

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class Gossip:
    """Belongs to the event loop's thread."""

    def __init__(self, manifest_hash: str, transport: Transport, progress: ProgressBook):
        self._hash = manifest_hash
        self._transport = transport
        self._progress = progress

    async def tell(self, peers: Iterable[str]) -> None:
        """Exchange counts with these peers; who does not answer within some seconds is left alone."""
        body = CountsCall(manifest=self._hash, step=self._progress.step, counts=self._progress.signed_counts())
        await self._exchange(peers, body)

    async def greet(self, stage: int, peers: Iterable[str]) -> int:
        """Tell stage-mates that this peer serves from now on; afterwards their rounds expect it.

        Returns:
            the newest step that any of them is in
        """
        body = GreetCall(
            manifest=self._hash, stage=stage, step=self._progress.step, counts=self._progress.signed_counts()
        )
        return await self._exchange(peers, body)

    async def _exchange(self, peers: Iterable[str], body: CountsCall | GreetCall) -> int:
        newest = self._progress.step

        async def exchange(peer_id: str) -> None:
            nonlocal newest
            try:
                reply = await self._transport.call(peer_id, body, timeout_s=TIMEOUT_S)
                answer = check_body(CountsReply, reply.body)
                self._progress.merge(answer.counts)
                newest = max(newest, answer.step)
            except CallError as error:
                log.info("peer_not_told peer=%s op=%s reason=%s: %s", peer_id, body.op, error.code, error)

        async with anyio.create_task_group() as tasks:
            for peer_id in sorted(set(peers) - {self._transport.peer_id}):
                tasks.start_soon(exchange, peer_id)
        return newest
