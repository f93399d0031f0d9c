"""Signed records in hivemind's DHT: its node, the deadlines of requests, and the check before a record is stored."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
from hivemind.dht.node import DHTNode

from swarm_peer.addresses import announced_address, announced_addresses, own_address
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, InvalidMessage, NotAdmitted, SwarmError, UserError
from swarm_peer.policy.leadership import Term
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.ports import FIRST_PORT, usable, with_ports
from swarm_peer.runtime.network.guarded_p2p import (
    GuardedP2P,
    PassBearer,
    check_multiaddress,
    check_peer_address,
    explain_start_failure,
    refusal_of,
)
from swarm_peer.runtime.network.meetings import Meetings
from swarm_peer.runtime.network.own_pipes import Carrier
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.peer_addresses import door_of, is_loopback, listening, ports_of
from swarm_peer.runtime.network.reachability import Reachability, Ways
from swarm_peer.runtime.network.record_storage import KeepingNode, keep_records
from swarm_peer.runtime.network.record_validator import SignedRecordValidator, key_id_of, place_of
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite, RevocationsRecord, revocations_key
from swarm_peer.wire.places import RecordPlaces
from swarm_peer.wire.records import (
    MAX_STORED_BYTES,
    AnyRecord,
    CoordinationRecord,
    Record,
    coordination_key,
    seal,
    unseal,
)

log = logging.getLogger(__name__)

# If a request takes longer, the network is lost.
REQUEST_TIMEOUT_S = 10.0
# The start of libp2p itself takes half a second. To dial an address that does not answer takes all the time there is.
START_TIMEOUT_S = 15.0
# A node that is busy, with a model to make or too many processes beside it, answers its first caller late. Later calls
# have less time, since others can be asked.
FIRST_CALL_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 3.0
# The daemon ends upon a signal, and at once as a rule.
SHUTDOWN_S = 5.0
# Pause between looks for peers that the routing table has lost. While others are there, one that has been called so
# often in vain is called at every so many looks alone, each ten minutes: most are gone, but the swarm may be split.
REJOIN_S = 10.0
REJOIN_TRIES = 60
# Lost peers that are called. Anybody can enter a routing table, and leave it.
MOST_LOST = 32
# A request asks the nodes nearest to its key, so many of them at most: each answer costs two peers a millisecond.
# hivemind keeps a record on the five nearest ones, so that some of these may be dead or not know of it yet.
NODES_ASKED = 8


class SwarmDHT:
    """This process's DHT node, and the libp2p daemon that the node shares with the transport. Made by `open`.

    Attributes:
        p2p: client of the daemon
        metrics: count the requests that fail
        passes: who may take part in the run
    """

    def __init__(
        self,
        *,
        node: DHTNode,
        identity: Identity,
        metrics: PeerMetrics,
        ways: Callable[[], Ways],
        clock: Clock,
        places: RecordPlaces,
        passes: PassChecker,
        carriers: Mapping[str, Carrier] = MappingProxyType({}),
    ):
        self.p2p: GuardedP2P = node.p2p
        self.passes = passes
        self.identity = identity
        self._ways = ways
        self._carriers = carriers
        self._node = node
        self.metrics = metrics
        self._clock = clock
        self._places = places
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        initial_peers: Sequence[str],
        invite: Invite | None,
        host_maddrs: Sequence[str],
        first_port: int = FIRST_PORT,
        announce_maddrs: Sequence[str],
        map_port: bool = False,
        relay_mbps: float = 0.0,
        identity: Identity,
        identity_path: Path,
        metrics: PeerMetrics,
    ) -> AsyncIterator[SwarmDHT]:
        """Start a node and join the DHT of `initial_peers`, or begin a new one if there are none.

        Args:
            invite: to a run by invitation; None if the run is open to everybody
            first_port: where an address to listen on names no port, it gets the first one from here on that is free
            map_port: whether to ask the router to forward the port
            relay_mbps: megabits a second to carry between members that do not reach each other

        Raises:
            UserError: an address is malformed, no initial peer answers, or a port is taken
        """
        host_maddrs = usable(list(map(own_address, host_maddrs)))
        initial_peers = await _checked(initial_peers, (*host_maddrs, *map(announced_address, announce_maddrs)))
        clock = SystemClock()
        validator = SignedRecordValidator(clock, PassChecker.for_holder(invite, identity, clock))
        async with AsyncExitStack() as opened:
            host_maddrs = opened.enter_context(with_ports(host_maddrs, first_port))
            announce_maddrs = announced_addresses(announce_maddrs, ports_of(host_maddrs))
            try:
                p2p = await _start_daemon(host_maddrs, announce_maddrs, identity_path, map_port, validator.passes)
                opened.push_async_callback(_in_time, p2p.shutdown)
                await p2p.connect_first(initial_peers)
                node = await _join(p2p, initial_peers, validator)
                reachability = await Reachability.begin(p2p, announce_maddrs, host_maddrs)
                meetings = _make_meetings(p2p, reachability, host_maddrs, relay_mbps, metrics)
            except UserError:
                raise
            except Exception as error:  # hivemind raises errors of many types
                raise explain_start_failure(error, initial_peers) from error
            dht = cls(
                node=node,
                identity=identity,
                metrics=metrics,
                ways=lambda: reachability.ways,
                clock=clock,
                places=validator.places,
                passes=validator.passes,
                carriers=meetings.carriers,
            )
            opened.push_async_callback(_in_time, dht._close)
            dht._go_on(dht._rejoin(), reachability.run(), meetings.run())
            yield dht

    @property
    def addresses(self) -> list[str]:
        """The multiaddresses, with this node's id, at which others may reach it; the best one first."""
        return [f"{address}/p2p/{self.identity.peer_id}" for address in self._ways().addresses]

    @property
    def ways(self) -> Ways:
        """How others reach this node, as far as it knows."""
        return self._ways()

    @property
    def num_answers(self) -> int:
        """How often other nodes have answered. One that is cut off finds what it keeps itself, and stores it there."""
        return int(self._node.num_answers)

    @property
    def is_reachable(self) -> bool | None:
        """Whether others can dial this node; None if nobody has told."""
        return self._ways().is_reachable

    @property
    def relays(self) -> tuple[str, ...]:
        """The nodes that carry this one's connections to others, those first that carry most of them."""
        carried = Counter(carrier.helper for carrier in self._carriers.values())
        self.metrics.carried_connections.set(carried.total())
        return tuple(relay for relay, _ in carried.most_common())

    def relay_to(self, peer_id: str) -> str:
        """The node that carries this one's connection to a peer; empty if none does."""
        carrier = self._carriers.get(peer_id)
        return "" if carrier is None else carrier.helper

    def carried_bytes_per_s(self, peer_id: str) -> float:
        """The bytes a second that a connection to a peer has if another node carries it; else inf."""
        carrier = self._carriers.get(peer_id)
        return math.inf if carrier is None else max(1.0, carrier.bytes_per_s)  # as the carrier says

    async def _rejoin(self) -> None:
        """Call peers that the routing table has lost.

        While a node is cut off, the others forget it and it forgets them. hivemind never looks for them again, so that
        the DHT would stay split.
        """
        tries: dict[Any, int] = {}  # in vain, by peer; the peer that was in the table last is the last
        while True:
            present = set(self._node.protocol.routing_table.peer_id_to_uid)
            lost = [peer for peer in tries if peer not in present][-MOST_LOST:]
            tries = {peer: tries[peer] + 1 for peer in lost} | dict.fromkeys(present, 0)
            # If nobody is there, it is this node that is cut off, for however long.
            called = [
                peer for peer in lost if not present or tries[peer] < REJOIN_TRIES or tries[peer] % REJOIN_TRIES == 0
            ]
            # With hivemind's deadline of three seconds. It raises for an answer that is none.
            await asyncio.gather(*map(self._node.protocol.call_ping, called), return_exceptions=True)
            await anyio.sleep(REJOIN_S)

    def _go_on(self, *jobs: Coroutine[Any, Any, None]) -> None:
        """Run jobs that take as long as the node is there."""
        for job in jobs:
            task = asyncio.create_task(job)
            self._tasks.add(task)
            task.add_done_callback(self._tell_end)

    def _tell_end(self, job: asyncio.Task[None]) -> None:
        """Count a job that has ended before the node has, and say so: nobody does its work any more."""
        if not job.cancelled():
            self.metrics.handler_defects.inc()
            text = "node_job_ended job=%s reason=a defect of this program: start it again"
            log.error(text, job.get_coro(), exc_info=job.exception())

    async def _close(self) -> None:
        tasks = [*self._tasks, *([self._node.cache_refresh_task] if self._node.cache_refresh_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._node.shutdown()

    def dial_by(
        self,
        announced: Callable[[str], Sequence[str]],
        can_be_dialled: Callable[[str], bool | None],
        has_left: Callable[[str], bool],
    ) -> None:
        """Have peers dialled at the addresses that they announce; where they cannot be, others help.

        Args:
            has_left: whether a peer has said that it leaves: it is no wonder if there is no way to it
        """
        self.p2p.announced, self.p2p.can_be_dialled, self.p2p.has_left = announced, can_be_dialled, has_left

    async def dial(self, peer_ids: Sequence[str]) -> None:
        """Keep connections to some peers: those that cannot dial this node call it by them."""
        async with anyio.create_task_group() as tasks:
            for peer_id in peer_ids:
                tasks.start_soon(self.p2p.dial, peer_id)

    async def connected(self) -> set[str]:
        """The ids of the nodes that this one has a connection to.

        Raises:
            PeerUnreachable: the daemon does not answer
        """
        return set(await self.p2p.connections())

    def keep_run(self, run_id: str, manifest: RunManifest) -> None:
        """Have this node store the records of this run alone from now on."""
        self._places.keep_run(run_id, manifest)
        if manifest.admission == "open":
            self.passes.open_to_everybody()

    async def store(
        self, key: str, record: Record, run: str, lifetime_s: float, signer: Identity | None = None
    ) -> bool:
        """Sign a record and store it under its author's id. A failure is counted and logged, not raised.

        Args:
            run: the run that the record belongs to
            signer: the author; by default this peer

        Returns:
            whether the DHT has stored it

        Raises:
            UserError: no node of the run would store the record: it is too large, or does not belong under this key
        """
        signer, key_id, now_s = signer or self.identity, key_id_of(key), self._clock.unix_s()
        expiration = self._places.expiration(key_id, signer.peer_id, now_s, lifetime_s)
        place = place_of(key_id, expiration)
        envelope = seal(record, run, signer, place)
        if len(envelope) > MAX_STORED_BYTES:
            raise UserError(f"the {record.kind} has {len(envelope)} bytes: at most {MAX_STORED_BYTES} fit into the DHT")
        try:
            # Other nodes, and hivemind's own, would drop it without a word.
            self._places.check(key_id, signer.peer_id, envelope, place, expiration - now_s)
        except InvalidMessage as error:
            raise UserError(f"the DHT does not store the {record.kind} under {key}: {error}") from error
        try:
            value = [envelope, b"" if signer is not self.identity else self.passes.own_pass]
            stored = self._node.store(key, value, expiration, subkey=signer.peer_id, beam_size=NODES_ASKED)
            return bool(await self._request("store", key, stored))
        except CallError:
            return False

    async def fetch(self, key: str, record_type: type[AnyRecord], run: str | None) -> dict[str, AnyRecord]:
        """All valid records under a key, by author. Invalid ones are dropped and counted.

        Args:
            run: the run that the records must belong to; None if each must belong to the run of its author's key

        Raises:
            CallError: the DHT does not answer, which says nothing about the records
        """
        found = await self._request("fetch", key, self._node.get(key, latest=True, beam_size=NODES_ASKED))
        entries = found.value if found is not None else None
        if not isinstance(entries, dict):
            return {}
        records: dict[str, AnyRecord] = {}
        key_id = key_id_of(key)
        for author, (value, expiration) in entries.items():
            try:
                match author, value:
                    case str(), [bytes() as envelope, bytes() as shown]:
                        # This node may have stored it before it knew its run.
                        self._places.check_lifetime(key_id, expiration - self._clock.unix_s())
                    case _:
                        raise InvalidMessage("not the record and the pass of a peer")
                record = unseal(record_type, envelope, run or author, author, place_of(key_id, expiration))
                self.passes.check(author, shown)  # after the signature: it counts the author as present
                records[author] = record
                if author in (self.identity.peer_id, run):  # what the run's key has signed, this may sign as well
                    self._places.note(key_id, author, expiration)
            except (InvalidMessage, NotAdmitted) as error:
                self.metrics.invalid_messages.labels("record").inc()
                log.warning("invalid_record key=%s reason=%s", key, error)
        return records

    async def fetch_coordination(self, run_id: str) -> dict[Term, CoordinationRecord]:
        """The records of all coordinators that hold a warrant of the run key, by term. Others are dropped and counted.

        Raises:
            CallError: the DHT does not answer
        """
        found: dict[Term, CoordinationRecord] = {}
        for author, record in (await self.fetch(coordination_key(run_id), CoordinationRecord, run_id)).items():
            try:
                found[record.term(run_id, author)] = record
            except InvalidMessage as error:
                self.metrics.invalid_messages.labels("record").inc()
                log.warning("invalid_record key=%s reason=%s", coordination_key(run_id), error)
        return found

    async def learn_revocations(self, run_id: str) -> None:
        """Look for a newer list of what the run's operator has revoked. A failure is logged, not raised."""
        if self.passes.is_open:
            return
        try:
            found = await self.fetch(revocations_key(run_id), RevocationsRecord, run_id)
            if run_id in found:
                self.passes.learn(found[run_id].revocations)
        except InvalidMessage as error:
            log.warning("invalid_record key=%s reason=%s", revocations_key(run_id), error)
        except CallError:
            return  # it is logged already

    async def _request(self, name: str, key: str, request: Coroutine[Any, Any, Any]) -> Any:
        # In a task of its own, which goes on without its asker: hivemind's requests are not made to be cancelled.
        task = asyncio.get_running_loop().create_task(request)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        await asyncio.wait([task], timeout=REQUEST_TIMEOUT_S)
        if not task.done():
            reason = f"no answer within {REQUEST_TIMEOUT_S:.0f} s"
        elif task.cancelled():
            reason = "the node is shutting down"
        elif (error := task.exception()) is None:
            return task.result()
        else:
            reason = repr(error)
        self.metrics.dht_failures.labels(name).inc()
        log.warning("dht_%s_failed key=%s reason=%s", name, key, reason)
        raise CallError(f"the DHT request {name} {key} failed: {reason:.200}")

    def _forget(self, request: asyncio.Task[Any]) -> None:
        self._tasks.discard(request)
        if not request.cancelled():
            request.exception()  # taken: its asker may have gone

    @property
    def daemon_pid(self) -> int:
        """The process id of the libp2p daemon."""
        return int(self.p2p._child.pid)

    async def watch(self) -> None:
        """Wait until the libp2p daemon has died, and raise SwarmError: a peer cannot go on then."""
        await self.p2p._child.wait()
        raise SwarmError(
            "libp2p's daemon has died: start the peer again (out of memory? see the kernel's log; or was it told to "
            "end together with the peer, as systemd does without KillMode=mixed?)"
        )


async def _start_daemon(
    host_maddrs: Sequence[str], announce_maddrs: Sequence[str], identity_path: Path, map_port: bool, passes: PassChecker
) -> GuardedP2P:
    """Start the daemon, which speaks TCP alone (docs/routers.md says why not QUIC); see GuardedP2P.create."""
    p2p = await GuardedP2P.create(
        host_maddrs=host_maddrs,
        announce_maddrs=announce_maddrs or None,
        identity_path=str(identity_path),
        check_if_identity_free=False,
        nat_port_map=map_port and not all(map(is_loopback, host_maddrs)),
        # libp2p's own help for nodes behind routers is there for strangers as well; see meetings.py. A daemon that
        # takes itself for public, as a stranger can have it do, would begin to relay, whoever answers those who ask.
        auto_nat=False,
        use_relay=False,
        force_reachability="private",
        startup_timeout=START_TIMEOUT_S,
    )
    p2p.passes = passes
    return p2p


def _make_meetings(
    p2p: GuardedP2P, reachability: Reachability, host_maddrs: Sequence[str], relay_mbps: float, metrics: PeerMetrics
) -> Meetings:
    return Meetings(
        p2p=p2p,
        door=door_of(reachability.own if 0 in ports_of(host_maddrs) else host_maddrs),
        relay_bytes_per_s=relay_mbps * 1e6 / 8,
        own_addresses=lambda: reachability.own,
        metrics=metrics,
    )


async def _join(p2p: GuardedP2P, initial_peers: Sequence[str], validator: SignedRecordValidator) -> DHTNode:
    """Start a node of the DHT over a libp2p client.

    Raises:
        UserError: the initial peers do not let it in
        Exception: it did not start; hivemind raises errors of many types
    """
    try:
        with anyio.fail_after(START_TIMEOUT_S):
            node = await KeepingNode.create(
                p2p=p2p,
                initial_peers=list(initial_peers) or None,
                record_validator=validator,
                authorizer=PassBearer(p2p.passes),
                wait_timeout=FIRST_CALL_TIMEOUT_S,
                # This node asks for the latest records: what others or its earlier searches have found may be older.
                cache_nearest=0,
                cache_on_store=False,
                reuse_get_requests=False,
            )
            node.protocol.wait_timeout = CALL_TIMEOUT_S
            keep_records(node, validator)
            return node
    except Exception:
        if refusal := await refusal_of(p2p, [check_peer_address(address) for address in initial_peers]):
            raise UserError(refusal) from None
        raise


async def _in_time(shut_down: Callable[[], Awaitable[None]]) -> None:
    """Shut something down, also when the caller is cancelled, and give it up if that takes too long."""
    with anyio.move_on_after(SHUTDOWN_S, shield=True):
        await shut_down()


async def _checked(initial_peers: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """The initial peers to dial, their addresses and one's own checked."""
    for address in initial_peers:
        check_peer_address(address)
    for address in own:
        check_multiaddress(address)
    return (len(initial_peers) > 1 and await listening(initial_peers)) or initial_peers
