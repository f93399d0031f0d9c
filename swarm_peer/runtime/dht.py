"""Signed records in hivemind's DHT: its process, its deadlines, and the check that every node makes on storing."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
from hivemind.dht import DHT, DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.multiaddr import Multiaddr

from swarm_peer.errors import CallError, InvalidMessage, SwarmError, UserError
from swarm_peer.policy.leadership import Term
from swarm_peer.runtime.metrics import PeerMetrics
from swarm_peer.runtime.processes import die_with_parent, prepare_to_fork
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

# A request that takes longer has lost its DHT process or its network.
REQUEST_TIMEOUT_S = 10.0
# libp2p's own start takes half a second; dialling an address that does not answer, as long as it is allowed to.
START_TIMEOUT_S = 15.0
# Of several initial peers, those that do not accept a connection in this time are not dialled.
CONNECT_TIMEOUT_S = 3.0
MOST_CONNECTING = 32
# What libp2p says first, unasked.
GREETING = b"\x13/multistream/1.0.0\n"
# What lasts longest is a day; an hour for clocks that differ.
LONGEST_LIFETIME_S = 25 * 3600.0


class NobodyAnswers(UserError):
    """None of the initial peers does."""


class SignedRecordValidator(RecordValidatorBase):
    """Has nothing stored but signed records under their authors' ids. Runs in every node that stores or fetches.

    Anything else would be in their way: a plain value replaces all records of its key, and what expires later is not
    replaced by what expires sooner.
    """

    def validate(self, record: DHTRecord) -> bool:
        try:
            author, envelope = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
            kind, _, _ = open_envelope(envelope, author, _place(record.key, record.expiration_time))
        except Exception:  # in hivemind's process, where whatever is raised ends the request for all records of the key
            return False
        lasts_s = record.expiration_time - get_dht_time()
        return kind in STORED_KINDS and len(envelope) <= MAX_STORED_BYTES and lasts_s <= LONGEST_LIFETIME_S


def _place(key: bytes, expiration: float) -> bytes:
    return key + struct.pack(">d", expiration)


class _DHTProcess(DHT):
    def start(self) -> None:
        prepare_to_fork()
        super().start()

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        super().run()


class SwarmDHT:
    """This process's DHT node. Start it in the main thread, before the event loop and before CUDA (it forks)."""

    def __init__(self, node: DHT, identity: Identity, metrics: PeerMetrics):
        self.node = node
        self.identity = identity
        self._metrics = metrics
        self._addresses: list[str] = []

    @classmethod
    def start(
        cls,
        *,
        initial_peers: Sequence[str],
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str],
        identity: Identity,
        identity_path: Path,
        metrics: PeerMetrics,
    ) -> SwarmDHT:
        """Start a node and join the DHT of `initial_peers`, or begin a new one if there are none.

        Raises:
            UserError: an address is malformed, nobody answers, or a port is taken
        """
        for address in initial_peers:
            check_peer_address(address)
        for address in (*host_maddrs, *announce_maddrs):
            _check_multiaddress(address)
        for address in host_maddrs:
            _check_port_is_free(address)
        if len(initial_peers) > 1:
            initial_peers = _listening(initial_peers) or initial_peers
        node = _DHTProcess(
            initial_peers=list(initial_peers) or None,
            start=False,
            host_maddrs=list(host_maddrs),
            announce_maddrs=list(announce_maddrs) or None,
            identity_path=str(identity_path),
            check_if_identity_free=False,
            record_validators=[SignedRecordValidator()],
            # No traffic that nobody asked for: port mapping and NAT probing are the operator's choice.
            nat_port_map=False,
            auto_nat=False,
            startup_timeout=START_TIMEOUT_S,
        )
        try:
            node.run_in_background(await_ready=True, timeout=START_TIMEOUT_S + 2)
        except Exception as error:  # hivemind raises whatever its child process met
            node.kill()
            raise _explain_start_failure(error, initial_peers) from error
        return cls(node, identity, metrics)

    def addresses(self) -> list[str]:
        """Where this node listens. The first call waits for its process, and belongs before the event loop."""
        if not self._addresses:
            self._addresses = [str(address) for address in self.node.get_visible_maddrs()]
        return self._addresses

    async def p2p(self) -> P2P:
        return await self.node.replicate_p2p()

    async def connections(self) -> list[str]:
        """Addresses that this node is connected to. Of those who dialled this one, nobody may listen there."""
        peers: list[Any] = []
        with anyio.move_on_after(REQUEST_TIMEOUT_S):
            peers = await (await self.p2p()).list_peers()
        # Peers of swarms have ids of Ed25519 keys; other programs that know hivemind may have connected as well.
        known = [(peer.peer_id.to_base58(), address) for peer in peers for address in peer.addrs]
        return [f"{address}/p2p/{peer_id}" for peer_id, address in known if is_peer_id(peer_id)]

    async def store(
        self, key: str, record: Record, run: str, lifetime_s: float, signer: Identity | None = None
    ) -> bool:
        """Sign a record and store it under its author's id. Failures are counted and reported, not raised.

        Raises:
            UserError: it is too large
        """
        signer = signer or self.identity
        expiration = get_dht_time() + lifetime_s
        envelope = seal(record, run, signer, _place(DHTID.generate(source=key).to_bytes(), expiration))
        if len(envelope) > MAX_STORED_BYTES:
            raise UserError(f"the {record.kind} has {len(envelope)} bytes: at most {MAX_STORED_BYTES} fit into the DHT")
        future = self.node.store(
            key, subkey=signer.peer_id, value=envelope, expiration_time=expiration, return_future=True
        )
        try:
            return bool(await self._request("store", key, future))
        except CallError:
            return False

    async def fetch(self, key: str, record_type: type[AnyRecord], run: str | None) -> dict[str, AnyRecord]:
        """All valid records under a key, by author. Invalid ones are dropped and counted.

        Args:
            run: the run that the records must be of; None where each must be of its author's own run

        Raises:
            CallError: the DHT does not answer; that is no news of what is there
        """
        found = await self._request("fetch", key, self.node.get(key, latest=True, return_future=True))
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
        """What coordinators say that the run key has let act. What others say in their place is dropped and counted.

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

    async def _request(self, name: str, key: str, future: Any) -> Any:
        try:
            with anyio.fail_after(REQUEST_TIMEOUT_S):
                return await future
        except TimeoutError:
            reason = f"no answer within {REQUEST_TIMEOUT_S:.0f} s"
        except asyncio.CancelledError:
            raise
        except Exception as error:  # hivemind passes on whatever its process met
            reason = repr(error)
        self._metrics.dht_failures.labels(name).inc()
        log.warning("dht_%s_failed key=%s reason=%s", name, key, reason)
        raise CallError(f"the DHT does not say what stands under {key}: {reason:.200}")

    async def watch(self) -> None:
        """Return only by raising, when the DHT process or its daemon has died: nothing works without it."""
        await anyio.wait_readable(self.node.sentinel)
        raise SwarmError("the DHT process has died: start the peer again (out of memory? see the kernel's log)")

    def shutdown(self) -> None:
        self.node.shutdown()
        self.node.join(timeout=1.0)


def _check_multiaddress(address: str) -> Multiaddr:
    try:
        return Multiaddr(address)
    except Exception as error:  # the library raises many types
        raise UserError(
            f"{address!r} is no multiaddress ({' '.join(str(error).split()):.80}): expected one such as "
            f"/ip4/1.2.3.4/tcp/31337"
        ) from error


def _check_port_is_free(address: str) -> None:
    """libp2p's daemon says nothing of a port that is taken, and is waited for in vain."""
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


def _listening(addresses: Sequence[str]) -> list[str]:
    """Those where libp2p is; it dials one after the other, and gives each that is mute five seconds."""
    with ThreadPoolExecutor(min(len(addresses), MOST_CONNECTING)) as pool:
        return [address for address, accepts in zip(addresses, pool.map(_accepts, addresses), strict=True) if accepts]


def _accepts(address: str) -> bool:
    """As far as can be told: of what is not plain TCP, nothing."""
    match address.split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, "p2p", _]:
            try:
                with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S) as connection:
                    return connection.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
            except (OSError, UnicodeError):  # nobody listens, or that is no name
                return False
    return True


def is_tcp_address(address: str, peer_id: str) -> bool:
    """Whether it has the form of one of that peer: libp2p's daemon does not start if one of many has another."""
    host = "/(ip4|ip6|dns[46]?)/[0-9A-Za-z.:-]{1,253}"
    return re.fullmatch(rf"{host}/tcp/[0-9]{{1,5}}/p2p/{re.escape(peer_id)}", address) is not None


def is_loopback(address: str) -> bool:
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def check_peer_address(address: str) -> str:
    """Return the peer id at the end of an initial peer's address.

    Raises:
        UserError
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
