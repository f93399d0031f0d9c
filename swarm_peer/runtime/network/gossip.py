"""News that no microbatch carries in time: progress at the end of a round, and peers that come and go."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import anyio

from swarm_peer.errors import CallError, NotServing
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.transport import Handler, Reply, Transport, check_body
from swarm_peer.wire.messages import Body, CountsCall, CountsReply, GoodbyeCall, GreetCall

log = logging.getLogger(__name__)

# Deadline for each answer.
TIMEOUT_S = 5.0
# Each peer tells so many peers of the next stage that the global batch is full; they tell others at the barrier.
PEERS_TOLD = 4
# A newcomer greets until its stage-mates have seen its announcement. They look for it every three seconds or so, and
# at once when a stranger greets them.
GREET_TRIES = 20
GREET_PAUSE_S = 0.5


@dataclass(eq=False, kw_only=True)
class Gossip:
    """Exchanges news with other peers. Belongs to the event loop's thread.

    Attributes:
        welcome: called with each peer that greets as a stage-mate; raises NotServing until the peer's announcement
            has been seen
        drop: called with each peer that leaves and the serial number of its last announcement
    """

    manifest_hash: str
    transport: Transport
    progress: ProgressBook
    welcome: Callable[[str], None]
    drop: Callable[[str, int], None]

    @property
    def calls(self) -> dict[type[Body], Handler]:
        """The handlers of the calls that bring news."""
        return {CountsCall: self._handle_counts, GreetCall: self._handle_greet, GoodbyeCall: self._handle_goodbye}

    async def tell(self, peers: Iterable[str]) -> None:
        """Exchange counts with these peers. A peer that does not answer within TIMEOUT_S is skipped."""
        body = CountsCall(
            manifest=self.manifest_hash, round_number=self.progress.round_number, counts=self.progress.signed_counts()
        )
        await self._exchange(peers, body)

    async def tell_some(self, peers: Sequence[str], rng: random.Random) -> None:
        """Exchange counts with a few of these peers."""
        await self.tell(rng.sample(peers, min(PEERS_TOLD, len(peers))))

    async def greet(self, stage: int, peers: Iterable[str]) -> int:
        """Tell stage-mates that this peer serves from now on. Their averaging rounds expect it afterwards.

        Returns:
            the newest round that one of them or this peer is in, on this peer's timeline
        """
        body = GreetCall(
            manifest=self.manifest_hash,
            stage=stage,
            round_number=self.progress.round_number,
            counts=self.progress.signed_counts(),
        )
        to_greet, newest = set(peers), self.progress.round_number
        for attempt in range(GREET_TRIES):
            if attempt:
                await anyio.sleep(GREET_PAUSE_S)
            seen, to_greet = await self._exchange(to_greet, body)
            newest = max(newest, seen)
            if not to_greet:
                break
        return newest

    async def say_goodbye(self, peers: Iterable[str], serial: int) -> None:
        """Tell peers that this peer is gone, so that they do not wait for it.

        Args:
            serial: serial number of this peer's last announcement
        """
        counts = self.progress.signed_counts()
        await self._exchange(peers, GoodbyeCall(manifest=self.manifest_hash, serial=serial, counts=counts))

    async def _exchange(self, peers: Iterable[str], body: CountsCall | GreetCall | GoodbyeCall) -> tuple[int, set[str]]:
        """Send a call to these peers and merge the counts of their answers.

        Returns:
            the newest round that one of them or this peer is in, on this peer's timeline; and the peers that do not
            know this one yet
        """
        newest, refused = self.progress.round_number, set[str]()

        async def exchange(peer_id: str) -> None:
            nonlocal newest
            try:
                reply = await self.transport.call(peer_id, body, timeout_s=TIMEOUT_S)
                answer = check_body(CountsReply, reply.body)
                self.progress.merge(answer.counts, vouched=isinstance(body, GreetCall))
                if answer.timeline == self.progress.timeline:
                    newest = max(newest, answer.round_number)
            except CallError as error:
                log.info("peer_not_told peer=%s op=%s reason=%s: %s", peer_id, body.op, error.code, error)
                if isinstance(error, NotServing):
                    refused.add(peer_id)

        async with anyio.create_task_group() as tasks:
            for peer_id in sorted(set(peers) - {self.transport.peer_id}):
                tasks.start_soon(exchange, peer_id)
        return newest, refused

    async def _handle_counts(
        self, caller: str, call: CountsCall | GreetCall | GoodbyeCall, tensors: Sequence[memoryview]
    ) -> Reply:
        self.progress.merge(call.counts)
        reply = CountsReply(
            round_number=self.progress.round_number,
            timeline=self.progress.timeline,
            counts=self.progress.signed_counts(),
        )
        return Reply(reply.model_dump())

    async def _handle_greet(self, caller: str, call: GreetCall, tensors: Sequence[memoryview]) -> Reply:
        self.welcome(caller)
        return await self._handle_counts(caller, call, tensors)

    async def _handle_goodbye(self, caller: str, call: GoodbyeCall, tensors: Sequence[memoryview]) -> Reply:
        reply = await self._handle_counts(caller, call, tensors)
        self.drop(caller, call.serial)
        return reply
