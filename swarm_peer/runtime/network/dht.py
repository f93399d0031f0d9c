"""Signed records in hivemind's DHT: its node, the deadlines of requests, and the check before a record is stored."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
from hivemind.dht import DHTID
from hivemind.dht.node import DHTNode
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from swarm_peer.errors import CallError, InvalidMessage, SwarmError, UserError
from swarm_peer.policy.leadership import Term
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.wire.identity import Identity, is_peer_id
from swarm_peer.wire.records import (
    MAX_STORED_BYTES,
    STORED_KINDS,
    AnyRecord,
    CoordinationRecord,
    Record,
    coordination_key,
    open_envelope,
    seal,
    unseal,
)

log = logging.getLogger(__name__)

# If a request takes longer, the network is lost.
REQUEST_TIMEOUT_S = 10.0
# The start of libp2p itself takes half a second. To dial an address that does not answer takes all the time there is.
START_TIMEOUT_S = 15.0
# The daemon ends upon a signal, and at once as a rule.
SHUTDOWN_S = 5.0
# Pause between looks for peers that the routing table has lost, and how often each is called in vain.
REJOIN_S = 10.0
REJOIN_TRIES = 60
# Lost peers that are called. Anybody can enter a routing table, and leave it.
MOST_LOST = 32
# If there are several initial peers, those that do not accept a connection in this time are not dialled.
CONNECT_TIMEOUT_S = 3.0
# Addresses that are tried at the same time.
MOST_CONNECTING = 32
# A request asks the nodes nearest to its key, so many of them at most: each answer costs two peers a millisecond.
# hivemind keeps a record on the five nearest ones, so that some of these may be dead or not know of it yet.
NODES_ASKED = 8
# libp2p sends this first, unasked.
GREETING = b"\x13/multistream/1.0.0\n"
# The longest lifetime of a record is a day; the hour is for clocks that differ.
LONGEST_LIFETIME_S = 25 * 3600.0


class NobodyAnswers(UserError):
    """None of the initial peers answers."""


class SignedRecordValidator(RecordValidatorBase):
    """Lets a node store nothing but signed records, each under its author's id. Every node runs it.

    Any other value would be in the way of records: a plain value replaces all records of its key, and a record does not
    replace a value that expires later.
    """

    def __init__(self, clock: Clock):
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        """Whether the value is a record of a known kind, signed for this place by the author that it stands under."""
        try:
            author, envelope = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
            kind, _, _ = open_envelope(envelope, author, _place(record.key, record.expiration_time))
        except Exception:  # in hivemind any exception would end the request for all records of the key
            return False
        lasts_s = record.expiration_time - self._clock.unix_s()
        return kind in STORED_KINDS and len(envelope) <= MAX_STORED_BYTES and lasts_s <= LONGEST_LIFETIME_S


def _place(key: bytes, expiration: float) -> bytes:
    """The place of a record in the DHT, which its signature covers."""
    return key + struct.pack(">d", expiration)


class SwarmDHT:
    """This process's DHT node, and the libp2p daemon that the node shares with the transport. Made by `open`.

    Attributes:
        p2p: client of the daemon
        addresses: that this node listens on
    """

    def __init__(
        self, *, node: DHTNode, identity: Identity, metrics: PeerMetrics, addresses: Sequence[str], clock: Clock
    ):
        self.p2p: P2P = node.p2p
        self.identity = identity
        self.addresses = list(addresses)
        self._node = node
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        initial_peers: Sequence[str],
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str],
        identity: Identity,
        identity_path: Path,
        metrics: PeerMetrics,
    ) -> AsyncIterator[SwarmDHT]:
        """Start a node and join the DHT of `initial_peers`, or begin a new one if there are none.

        Raises:
            UserError: an address is malformed, no initial peer answers, or a port is taken
        """
        for address in initial_peers:
            check_peer_address(address)
        for address in (*host_maddrs, *announce_maddrs):
            _check_multiaddress(address)
        for address in host_maddrs:
            _check_port_is_free(address)
        if len(initial_peers) > 1:
            initial_peers = await _listening(initial_peers) or initial_peers
        clock = SystemClock()
        async with AsyncExitStack() as opened:
            try:
                p2p = await P2P.create(
                    initial_peers=list(initial_peers) or None,
                    host_maddrs=list(host_maddrs),
                    announce_maddrs=list(announce_maddrs) or None,
                    identity_path=str(identity_path),
                    check_if_identity_free=False,
                    # Port mapping and NAT probing are the operator's choice.
                    nat_port_map=False,
                    auto_nat=False,
                    startup_timeout=START_TIMEOUT_S,
                )
                opened.push_async_callback(_in_time, p2p.shutdown)
                with anyio.fail_after(START_TIMEOUT_S):
                    node = await DHTNode.create(
                        p2p=p2p,
                        initial_peers=list(initial_peers) or None,
                        record_validator=SignedRecordValidator(clock),
                        # This node asks for the latest records alone, so it has no use for what others have found.
                        cache_nearest=0,
                        # It would follow each store with a search for what has just been stored.
                        cache_on_store=False,
                    )
                    addresses = [str(address) for address in await p2p.get_visible_maddrs()]
            except Exception as error:  # hivemind raises errors of many types
                raise _explain_start_failure(error, initial_peers) from error
            dht = cls(node=node, identity=identity, metrics=metrics, addresses=addresses, clock=clock)
            opened.push_async_callback(_in_time, dht._close)
            dht._tasks.add(asyncio.get_running_loop().create_task(dht._rejoin()))
            yield dht

    async def _rejoin(self) -> None:
        """Call peers that the routing table has lost.

        While a node is cut off, the others forget it and it forgets them. hivemind never looks for them again, so that
        the DHT would stay split.
        """
        tries: dict[Any, int] = {}  # in vain, by peer; the peer that was in the table last is the last
        while True:
            present = set(self._node.protocol.routing_table.peer_id_to_uid)
            lost = [peer for peer, count in tries.items() if peer not in present and count < REJOIN_TRIES]
            lost = lost[-MOST_LOST:]
            tries = {peer: tries[peer] + 1 for peer in lost} | dict.fromkeys(present, 0)
            for peer in lost:
                await self._node.protocol.call_ping(peer)  # with hivemind's deadline of three seconds
            await anyio.sleep(REJOIN_S)

    async def _close(self) -> None:
        tasks = [*self._tasks, *([self._node.cache_refresh_task] if self._node.cache_refresh_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._node.shutdown()

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
            UserError: the record is too large
        """
        signer = signer or self.identity
        expiration = self._clock.unix_s() + lifetime_s
        envelope = seal(record, run, signer, _place(DHTID.generate(source=key).to_bytes(), expiration))
        if len(envelope) > MAX_STORED_BYTES:
            raise UserError(f"the {record.kind} has {len(envelope)} bytes: at most {MAX_STORED_BYTES} fit into the DHT")
        try:
            stored = self._node.store(key, envelope, expiration, subkey=signer.peer_id, beam_size=NODES_ASKED)
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
        key_id = DHTID.generate(source=key).to_bytes()
        for author, (envelope, expiration) in entries.items():
            try:
                if not isinstance(author, str):
                    raise InvalidMessage("the author is no peer id")
                records[author] = unseal(record_type, envelope, run or author, author, _place(key_id, expiration))
            except InvalidMessage as error:
                self._metrics.invalid_messages.labels("record").inc()
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
                self._metrics.invalid_messages.labels("record").inc()
                log.warning("invalid_record key=%s reason=%s", coordination_key(run_id), error)
        return found

    async def _request(self, name: str, key: str, request: Coroutine[Any, Any, Any]) -> Any:
        # In a task of its own: hivemind shares a search among all that ask for one key, so its asker must not end it.
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
        self._metrics.dht_failures.labels(name).inc()
        log.warning("dht_%s_failed key=%s reason=%s", name, key, reason)
        raise CallError(f"the DHT request {name} {key} failed: {reason:.200}")

    def _forget(self, request: asyncio.Task[Any]) -> None:
        self._tasks.discard(request)
        if not request.cancelled():
            request.exception()  # taken: its asker may have gone

    async def watch(self) -> None:
        """Wait until the libp2p daemon has died, and raise SwarmError: a peer cannot go on then."""
        await self.p2p._child.wait()
        raise SwarmError("libp2p's daemon has died: start the peer again (out of memory? see the kernel's log)")


async def _in_time(shut_down: Callable[[], Awaitable[None]]) -> None:
    """Shut something down, also when the caller is cancelled, and give it up if that takes too long."""
    with anyio.move_on_after(SHUTDOWN_S, shield=True):
        await shut_down()


def _check_multiaddress(address: str) -> Multiaddr:
    try:
        return Multiaddr(address)
    except Exception as error:  # the library raises many types
        raise UserError(
            f"{address!r} is no multiaddress ({' '.join(str(error).split()):.80}): expected one such as "
            f"/ip4/1.2.3.4/tcp/31337"
        ) from error


def _check_port_is_free(address: str) -> None:
    """Raise UserError if the port is taken: libp2p's daemon would report nothing, and never become ready."""
    match address.split("/"):
        case ["", "ip4" | "ip6" as family, host, "tcp", port, *_]:
            with socket.socket(socket.AF_INET6 if family == "ip6" else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, int(port)))
                except OSError as error:
                    raise UserError(
                        f"cannot listen on {address}: {error.strerror}; name another address or port in --host-maddrs"
                    ) from error


async def _listening(addresses: Sequence[str]) -> list[str]:
    """The addresses where libp2p listens. It would dial all of them in turn, and give each silent one five seconds."""
    listening: set[str] = set()
    room = anyio.Semaphore(MOST_CONNECTING)

    async def check(address: str) -> None:
        async with room:
            if await _accepts(address):
                listening.add(address)

    async with anyio.create_task_group() as tasks:
        for address in addresses:
            tasks.start_soon(check, address)
    return [address for address in addresses if address in listening]


async def _accepts(address: str) -> bool:
    """Whether libp2p answers at the address; True if that cannot be told, since the address is not plain TCP."""
    match address.split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, "p2p", _]:
            try:
                with anyio.fail_after(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    with closing(writer):
                        return await reader.readexactly(len(GREETING)) == GREETING
            except (OSError, EOFError, UnicodeError):  # nothing listens there, or the host is no valid name
                return False
    return True


def is_tcp_address(address: str, peer_id: str) -> bool:
    """Whether an address is one of the peer, over TCP. libp2p's daemon does not start if it is given any other form."""
    host = "/(ip4|ip6|dns[46]?)/[0-9A-Za-z.:-]{1,253}"
    return re.fullmatch(rf"{host}/tcp/[0-9]{{1,5}}/p2p/{re.escape(peer_id)}", address) is not None


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from its own machine only."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def check_peer_address(address: str) -> str:
    """Return the peer id at the end of an initial peer's address.

    Raises:
        UserError: the address is malformed, or does not end in a peer id
    """
    _check_multiaddress(address)
    peer_id = address.rpartition("/p2p/")[2]
    if not is_peer_id(peer_id):
        raise UserError(
            f"initial peer {address!r} does not end in /p2p/ and an id (12D3Koo...): copy the whole line that the "
            f"coordinator prints"
        )
    return peer_id


def _explain_start_failure(error: Exception, initial_peers: Sequence[str]) -> UserError:
    text = " ".join(str(error).split()) or type(error).__name__
    if initial_peers:
        return NobodyAnswers(
            f"no initial peer answers; tried {', '.join(initial_peers)}: check that one of them runs, that the address "
            f"and its port are right, and that no firewall is between ({text[-160:]})"
        )
    return UserError(f"the libp2p daemon did not start: {text[-300:]}")
