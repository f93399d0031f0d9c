"""hivemind's DHT calls in a run by invitation: each carries its caller's pass, and no node answers one without.

libp2p has made sure of the caller's id, so the pass needs no further signature. Without this, a stranger's ping would
put it into routing tables, and so into the way of records.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import anyio
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto import dht_pb2
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.multiaddr import Multiaddr

from swarm_peer.errors import CallError, InvalidMessage, NotAdmitted, UserError
from swarm_peer.runtime.host.pacing import pace_connections
from swarm_peer.runtime.host.processes import in_own_session
from swarm_peer.runtime.host.scratch import is_usable
from swarm_peer.runtime.network.frame_stream import on_network
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.peer_addresses import is_dialable, resolved
from swarm_peer.wire.frames import Frame, FrameType
from swarm_peer.wire.identity import is_peer_id
from swarm_peer.wire.messages import PROTOCOL

log = logging.getLogger(__name__)

# Takes a peer's id, the address that it is connected from, and its stream.
StreamHandler = Callable[[str, str, asyncio.StreamReader, asyncio.StreamWriter], None]

# hivemind has the daemon's sockets here, whatever TMPDIR says.
SOCKETS = "/tmp"
# To connect to the initial peers. An address that does not answer takes all of it.
FIRST_TIMEOUT_S = 10.0
# To connect at announced addresses. A caller's time is a little longer, for what libp2p itself knows of the peer.
DIAL_TIMEOUT_S = 8.0
# Without others' help, if there are others.
DIRECT_TIMEOUT_S = 3.0
# For what is written last on a stream to arrive.
FAREWELL_S = 2.0
# To ask all initial peers why they do not answer.
REFUSAL_TIMEOUT_S = 5.0
# The daemon relays for everybody who asks by these, whatever its options say (tried: -relay=0, -relayService=0,
# -relayMaxReservations=0), unless somebody else answers them.
RELAY_PROTOCOLS = ("/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop")
# Keys in one request. A search asks for one or a few. A node that meets another one sends it all that it stores.
MOST_KEYS = {dht_pb2.FindRequest: 16, dht_pb2.StoreRequest: 512}


def _refuse(peer: str, seen: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


class _PendingCalls(dict[Any, "asyncio.Future[bytes]"]):
    """hivemind's unary calls that wait for an answer; those that were given up are not among them."""

    def __contains__(self, call_id: object) -> bool:
        # A call whose time is over is given up a moment before hivemind takes it out. Its answer would end the task
        # that reads all answers, and all requests of others: this node would be silent for good.
        call = self.get(call_id)
        return call is not None and not call.done()


class GuardedP2P(P2P):  # type: ignore[misc]
    """A libp2p client whose unary handlers answer members of the run alone. Set `passes` before any is added.

    Ctrl+C in a terminal does not reach its daemon, which its process needs to leave the run and then stops by itself.
    The daemon's connections are paced.
    """

    passes: PassChecker
    # The addresses that a peer announces, and whether others can dial it by its own account.
    announced: Callable[[str], Sequence[str]] = staticmethod(lambda peer_id: ())
    can_be_dialled: Callable[[str], bool | None] = staticmethod(lambda peer_id: None)
    has_left: Callable[[str], bool] = staticmethod(lambda peer_id: False)
    # Told of bytes that this node has carried for others.
    carried: Callable[[int], None] = staticmethod(lambda num_bytes: None)
    # Whether the machine's owner has this node carry for others now.
    may_carry: Callable[[], bool] = staticmethod(lambda: True)
    # The ids of the peers that this node's operator has named, to join by.
    initial: frozenset[str] = frozenset()
    # Finds ways to those that cannot be dialled, by their id and the addresses that they announce.
    reach: Callable[[str, Sequence[str]], Awaitable[None]] | None = None
    _pacing: asyncio.Task[None] | None = None

    @classmethod
    async def create(cls, *args: Any, **options: Any) -> GuardedP2P:
        """Start a daemon, and connect to it; see hivemind's P2P.

        Raises:
            UserError: the daemon's sockets have no place
        """
        if not is_usable(SOCKETS):
            raise UserError(
                f"{SOCKETS} cannot be written to, and libp2p's daemon keeps its sockets there: allow it (in a "
                f"read-only container, mount a tmpfs there)"
            )
        p2p: GuardedP2P = await super().create(*args, **options)
        p2p._client.control._pending_calls = _PendingCalls()
        p2p._pacing = asyncio.create_task(pace_connections(p2p._child.pid))
        for protocol in RELAY_PROTOCOLS:
            await p2p.handle_streams(protocol, _refuse)
        return p2p

    async def shutdown(self) -> None:
        """End the daemon; see hivemind's P2P."""
        if self._pacing is not None:  # hivemind's `create` calls this, too, where the daemon does not start in time
            self._pacing.cancel()
        await super().shutdown()

    @staticmethod
    def _make_process_args(*args: Any, **options: Any) -> list[str]:
        """The daemon's command, in a session of its own."""
        return in_own_session(P2P._make_process_args(*args, **options))

    async def call_binary_stream_handler(self, peer_id: PeerID, handler_name: str) -> Any:
        """Open a stream to a peer; see hivemind's P2P."""
        await self.dial(peer_id.to_base58())
        return await super().call_binary_stream_handler(peer_id, handler_name)

    async def open_stream(self, peer: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to a peer that is connected; raises errors of many types, as do the next three."""
        _, reader, writer = await super().call_binary_stream_handler(PeerID.from_base58(peer), protocol)
        return reader, writer

    async def handle_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Have the streams of a protocol answered, each with the address that its peer is connected from."""

        async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handler(info.peer_id.to_base58(), str(info.addr), reader, writer)

        await self.add_binary_stream_handler(protocol, handle)

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Have the daemon dial a peer, and return at once if it is connected."""
        await self._client.connect(PeerID.from_base58(peer), list(map(Multiaddr, addresses)))

    async def disconnect(self, peer: str) -> None:
        """End all connections to a peer."""
        await self._client.disconnect(PeerID.from_base58(peer))

    async def connect_first(self, initial_peers: Sequence[str]) -> None:
        """Connect to all initial peers that answer.

        Raises:
            NobodyAnswers: none does
        """
        found = [address.rpartition("/p2p/") for each in initial_peers for address in await resolved(each)]
        reasons = []

        async def connect(peer_id: str) -> None:
            try:
                with anyio.fail_after(FIRST_TIMEOUT_S):
                    await self.connect(peer_id, [address for address, _, its in found if its == peer_id])
            except Exception as error:  # hivemind's client raises errors of many types
                reasons.append(f"{error!r:.200}")

        peer_ids = {peer_id for _, _, peer_id in found}
        self.initial = frozenset(peer_ids)
        async with anyio.create_task_group() as tasks:
            for peer_id in peer_ids:
                tasks.start_soon(connect, peer_id)
        if initial_peers and len(reasons) == len(peer_ids):
            raise nobody_answers(initial_peers)

    async def connections(self) -> dict[str, list[str]]:
        """The peers that the daemon is connected to, each with the addresses at the other end.

        Raises:
            PeerUnreachable: the daemon does not answer
        """
        with on_network(DIAL_TIMEOUT_S, errors=(Exception,)):
            return {info.peer_id.to_base58(): list(map(str, info.addrs)) for info in await self.list_peers()}

    async def dial(self, name: str) -> None:
        """Connect to a peer where it announces itself: libp2p may have heard of no address, or of an old one.

        One that cannot be dialled there is looked for with the help of others. A failure says nothing. The peer may be
        known elsewhere, or have dialled this node.
        """
        if not (announced := self.announced(name)):
            return
        try:
            with anyio.fail_after(DIAL_TIMEOUT_S):
                # Resolved here, and not by libp2p: a name may lead to this machine.
                found = [each.rpartition("/p2p/")[0] for address in announced for each in await resolved(address)]
                own = list(map(str, self._visible_maddrs))
                addresses = [address for address in found if is_dialable(address, own)]
                if self.reach is None or self.can_be_dialled(name) is not False:
                    try:
                        # Some routers are open to those alone whom the peer has called, such as who tried its port.
                        with anyio.fail_after(DIAL_TIMEOUT_S if self.reach is None else DIRECT_TIMEOUT_S):
                            await self.connect(name, addresses)
                    except Exception:
                        if self.reach is None:
                            raise
                        await self.reach(name, ())
                elif name not in await self.connections():
                    await self.reach(name, addresses)
        except Exception as error:  # hivemind's client raises errors of many types
            log.debug("not_dialled peer=%s addresses=%s reason=%r", name, " ".join(announced), error)

    async def tell_revocations(self, peer_id: str) -> None:
        """Tell a peer what the run's operator has revoked.

        A peer that was revoked is refused by all who know of it, the DHT's nodes included, so it may not find the list
        by itself. A failure says nothing.
        """
        shown = {"pass": self.passes.own_pass, "revocations": self.passes.revocations}
        try:
            with on_network(DIAL_TIMEOUT_S, errors=(Exception,)):  # as of any call of hivemind's client
                _, reader, writer = await self.call_binary_stream_handler(PeerID.from_base58(peer_id), PROTOCOL)
                with closing(writer):
                    writer.write(Frame(FrameType.HELLO, 0, "", shown).head())
                    # To close at once would reset the stream, with the list that is still on its way.
                    with anyio.move_on_after(FAREWELL_S):
                        await reader.read(1)
        except CallError as error:
            log.debug("revocations_not_told peer=%s reason=%s", peer_id, error)

    async def add_protobuf_handler(
        self, name: str, handler: Callable[..., Any], input_protobuf_type: Any, **options: Any
    ) -> None:
        """Add a handler; see hivemind's P2P."""

        async def answer(request: Any, context: P2PContext) -> Any:
            # hivemind sends the caller the repr of the exception.
            self.passes.check(context.remote_id.to_base58(), request.auth.client_access_token.public_key)
            check_size(request)
            return await handler(request, context)

        await super().add_protobuf_handler(name, answer, input_protobuf_type, **options)


def check_size(request: Any) -> None:
    """Check that a request to the DHT names few keys: an answer has all records of each key, as often as it is named.

    Raises:
        InvalidMessage: it names too many
    """
    most = MOST_KEYS.get(type(request))
    if most is not None and len(request.keys) > most:
        raise InvalidMessage(f"a request for {len(request.keys)} keys; at most {most} go")


async def refusal_of(p2p: GuardedP2P, peer_ids: Sequence[str]) -> str | None:
    """Why some peers do not let this one take part; None if they do, or do not answer in time."""
    request = dht_pb2.PingRequest()
    request.auth.client_access_token.public_key = p2p.passes.own_pass
    with anyio.move_on_after(REFUSAL_TIMEOUT_S):
        for peer_id in peer_ids:
            try:
                stub = super(DHTProtocol, DHTProtocol).get_stub(p2p, PeerID.from_base58(peer_id))
                await stub.rpc_ping(request)
            except Exception as error:  # hivemind and its daemon raise errors of many types
                # hivemind sends the repr of what `answer` has raised.
                if refused := re.search(rf"{NotAdmitted.__name__}\(['\"]([ -~]{{1,300}})['\"]\)", str(error)):
                    return refused[1]
    return None


def check_multiaddress(address: str) -> None:
    """Raise UserError if an address is no multiaddress."""
    try:
        Multiaddr(address)
    except Exception as error:  # the library raises many types
        raise UserError(
            f"{address!r} is no multiaddress ({' '.join(str(error).split()):.80}): expected one such as "
            f"/ip4/1.2.3.4/tcp/31337"
        ) from error


def check_peer_address(address: str) -> str:
    """Return the peer id at the end of an initial peer's address.

    Raises:
        UserError: the address is malformed, or does not end in a peer id
    """
    check_multiaddress(address)
    peer_id = address.rpartition("/p2p/")[2]
    if not is_peer_id(peer_id):
        raise UserError(
            f"initial peer {address!r} does not end in /p2p/ and an id (12D3Koo...): copy the whole line that the "
            f"coordinator prints"
        )
    return peer_id


class PassBearer(AuthorizerBase):  # type: ignore[misc]
    """Puts this node's pass into each request that hivemind's DHT sends."""

    def __init__(self, passes: PassChecker):
        self._passes = passes

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """Add the pass."""
        request.auth.client_access_token.public_key = self._passes.own_pass

    async def validate_request(self, request: Any) -> bool:
        """GuardedP2P has looked at the pass already: it knows who calls."""
        return True

    async def sign_response(self, response: Any, request: Any) -> None:
        """A response needs no pass: the routing table holds members alone."""

    async def validate_response(self, response: Any, request: Any) -> bool:
        """See sign_response."""
        return True


class NobodyAnswers(UserError):
    """None of the initial peers answers."""


def nobody_answers(initial_peers: Sequence[str], details: str = "") -> NobodyAnswers:
    """Say in words that a node did not start, since no initial peer answers."""
    return NobodyAnswers(
        f"no initial peer answers; tried {', '.join(initial_peers)}: check that the run is not over, that one of "
        f"them runs, that the address and its port are right, and that no firewall is between. Any peer's address "
        f"will do, beside an invite if there is one (in the last peer_started or addresses_changed line of its log)"
        f"{details}"
    )


def explain_start_failure(error: Exception, initial_peers: Sequence[str]) -> UserError:
    """Say in words why a node did not start; NobodyAnswers if the initial peers did not let it join."""
    text = " ".join(str(error).split()) or type(error).__name__
    if initial_peers:
        return nobody_answers(initial_peers, f" ({text[-160:]})")
    return UserError(f"the libp2p daemon did not start: {text[-300:]}")
