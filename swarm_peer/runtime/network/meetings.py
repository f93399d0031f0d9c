"""Ways to nodes that cannot be dialled: a third node has both dial each other, or carries their connection.

Nodes behind routers keep connections to those that can be dialled. Such a node helps two others, A and B:

* To meet: A asks the helper for B. The helper tells B where it sees A, and answers A with where it sees B. Both dial:
  what one sends opens its own router for what comes from the other ("hole punching", as libp2p's DCUtR does it). By
  QUIC that needs no common moment. If one of the two can be dialled after all, the other's dial arrives.
* To relay, where that fails, as it does where both routers give each connection a port of its own. Each end makes its
  stream to the helper look like a connection of TCP to its own daemon, and the daemons connect through it as through
  any other: who they are is proven end to end, and the relay cannot read what it carries.

libp2p's own relays are off: they carry for everybody who asks. A helper helps members of the run alone, which show
their passes, and relays at the rate that its owner allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from swarm_peer.errors import CallError, CallTimeout, NoRoom, PeerUnreachable
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.carrying import Ends, Rate, carry
from swarm_peer.runtime.network.frame_stream import on_network
from swarm_peer.runtime.network.guarded_p2p import GuardedP2P, StreamHandler
from swarm_peer.runtime.network.peer_addresses import by_quic, by_tcp, is_dialable, is_loopback
from swarm_peer.runtime.network.short_messages import receive, send, taken
from swarm_peer.wire.help import MAX_ADDRESSES, HelpAnswer, HelpRequest

log = logging.getLogger(__name__)

HELPER = "/swarm/help/1"
HELPED = "/swarm/helped/1"
# Nodes that are asked to help one after the other, and how long one may take.
MOST_HELPERS = 3
HELP_TIMEOUT_S = 5.0
# For both ends to dial each other: a few round trips of the furthest peers. A first call waits for it.
PUNCH_S = 3.0
# Between looks whether a node has connected that is being dialled.
LOOK_S = 0.05
# Over a relay, or by an address that has answered before.
CONNECT_S = 8.0
# A node without a way is looked for again after so long, and each time later.
AGAIN_S = (15.0, 30.0, 60.0, 120.0)
# Between looks whether a node that is reached through a relay can be dialled by now.
IMPROVE_S = 10.0
# A direct way that was not there is looked for again after so long: each time, calls under way are made again.
BETTER_AGAIN_S = 900.0
# Wishes that this node sees to at a time, and those of one other.
MOST_HELPED = 64
MOST_HELPED_EACH = 8
MOST_RELAYED = 32


def seen_at(connections: Sequence[str]) -> tuple[str, ...]:
    """Where a node is seen that has such connections to this one; nowhere, if they come through a relay.

    It listens by QUIC and by TCP at the same port, and most routers keep the number.
    """
    plain = [address.partition("/p2p/")[0] for address in connections if not is_loopback(address)]
    both = [each for address in plain for each in (by_quic(address), by_tcp(address))]
    return tuple(dict.fromkeys(both))[:MAX_ADDRESSES]


@dataclass(frozen=True, slots=True)
class Carrier:
    """A helper that carries a connection of this node.

    Attributes:
        bytes_per_s: that the connection has of what the helper carries; as of its beginning
    """

    helper: str
    bytes_per_s: float


class Meetings:
    """Finds ways to nodes that cannot be dialled, and helps others to theirs. Belongs to one GuardedP2P.

    Attributes:
        carriers: how this node's connection to a node is carried, by node
    """

    def __init__(
        self,
        *,
        p2p: GuardedP2P,
        door: tuple[str, int],
        relay_bytes_per_s: float,
        own_addresses: Callable[[], Sequence[str]],
        metrics: PeerMetrics,
    ):
        """Make what knows nobody yet.

        Args:
            door: host and port at which this node's daemon accepts connections of TCP from this machine
            relay_bytes_per_s: that this node carries for others; 0 for none
            own_addresses: where this machine may be dialled, as far as it knows
        """
        self._p2p = p2p
        self._door = door
        self._relay_bytes_per_s = relay_bytes_per_s
        self._own_addresses = own_addresses
        self._rng = random.Random(p2p.peer_id.to_base58())
        self._me = p2p.peer_id.to_base58()
        self._tasks: TaskGroup | None = None
        self._searches: dict[str, anyio.Event] = {}
        self._failures: Counter[str] = Counter()
        self._not_before_s: dict[str, float] = {}
        self._improved_s: dict[str, float] = {}
        self._helped: Counter[str] = Counter()
        self._num_relayed = 0
        self._relayed = Rate(relay_bytes_per_s or 1.0, self._count)
        self._metrics = metrics
        self.carriers: dict[str, Carrier] = {}

    async def run(self) -> None:
        """Help others, and look for the ways that `reach` asks for, until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self._p2p.reach = self.reach
            await self._p2p.handle_streams(HELPER, self._in_own_task(self._help))
            await self._p2p.handle_streams(HELPED, self._in_own_task(self._be_reached))
            while True:
                await anyio.sleep(IMPROVE_S)
                await self._improve()

    async def _improve(self) -> None:
        """Give up relays to nodes that can be dialled by now: the daemon dials nobody to whom it is connected.

        Calls that are under way there fail, as if the relay had gone, and are made again.
        """
        now_s = anyio.current_time()
        for name, carrier in list(self.carriers.items()):
            # Some routers are open to those alone who told the node that its port is open.
            if self._p2p.can_be_dialled(name) and now_s >= self._improved_s.get(name, -math.inf) + BETTER_AGAIN_S:
                self._improved_s[name] = now_s
                log.info("way_changes peer=%s from=through %s to=direct", name, carrier.helper)
                try:
                    with on_network(CONNECT_S, errors=(Exception,)):
                        await self._p2p.disconnect(name)
                        await self._p2p.dial(name)
                except PeerUnreachable as error:
                    log.debug("way_not_changed peer=%s reason=%s", name, error)

    def _in_own_task(self, serve: Callable[[str, str, Ends], Awaitable[None]]) -> StreamHandler:
        """A handler whose work ends with `run`."""

        def handle(peer_id: str, seen: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert self._tasks is not None
            self._tasks.start_soon(answer, peer_id, seen, Ends(reader, writer))

        async def answer(peer_id: str, seen: str, ends: Ends) -> None:
            with closing(ends.writer):
                try:
                    await serve(peer_id, seen, ends)
                except CallError as error:
                    log.debug("not_helped peer=%s reason=%s", peer_id, error)
                except Exception:  # a defect of this program must not end the ways of others
                    log.exception("help_failed peer=%s", peer_id)

        return handle

    # --- to find a way

    async def reach(self, name: str, addresses: Sequence[str]) -> None:
        """Connect to a node that cannot be dialled, if there is a way.

        Args:
            addresses: where to dial it beside where others see it: it may be next door
        """
        assert self._tasks is not None
        if anyio.current_time() < self._not_before_s.get(name, 0.0):
            return
        search = self._searches.get(name)
        if search is None:
            # In a task of its own: who waits for it may give up before, and come back for the connection.
            search = self._searches[name] = anyio.Event()
            self._tasks.start_soon(self._search, name, addresses, search)
        await search.wait()

    async def _search(self, name: str, addresses: Sequence[str], search: anyio.Event) -> None:
        try:
            try:
                how = await self._find(name, addresses)
            except CallError as error:
                pause_s = AGAIN_S[min(self._failures[name], len(AGAIN_S) - 1)]
                self._failures[name] += 1
                self._not_before_s[name] = anyio.current_time() + pause_s
                # Such a peer may only have gone: its announcement lasts some seconds longer.
                log.log(
                    logging.WARNING if self._failures[name] == len(AGAIN_S) else logging.INFO,
                    "no_way peer=%s again_s=%.0f reason=%s: forward the port of this machine's router or of that "
                    "one's, or have a member that both reach carry their connection (--relay-mbps)",
                    name,
                    pause_s,
                    error,
                )
            else:
                del self._failures[name]
                log.info("way_found peer=%s way=%s", name, how)
        finally:
            del self._searches[name]
            search.set()

    async def _find(self, name: str, addresses: Sequence[str]) -> str:
        """Connect to a node by the best way that there is; returns which one, in words.

        Raises:
            CallError: there is none
        """
        helpers = await self._helpers(name)
        reasons = []
        for helper in helpers:
            try:
                met = await self._ask_to_meet(helper, name)
                log.debug("meeting peer=%s addresses=%s", name, " ".join(met))
                await self._connect(name, [*addresses, *met], PUNCH_S)
                return "direct"
            except PeerUnreachable as error:
                reasons.append(f"{helper[-8:]}: {error}")
            except CallTimeout as error:  # the ends have dialled in vain, and would again
                reasons.append(f"{helper[-8:]}: {error}")
                break
        if not helpers:
            await self._connect(name, addresses, PUNCH_S)
            return "direct"
        log.debug("not_met peer=%s reasons=%s", name, "; ".join(reasons))
        for helper in helpers:
            try:
                await self._connect_through(helper, name)
                return f"through {helper}"
            except CallError as error:
                reasons.append(f"{helper[-8:]} as a relay: {error}")
        raise PeerUnreachable("; ".join(reasons))

    async def _helpers(self, name: str) -> list[str]:
        """Nodes to ask for help: those that can be dialled first, then those of whom that is not known."""
        connected = [peer for peer, at in (await self._p2p.connections()).items() if seen_at(at) and peer != name]
        self._rng.shuffle(connected)
        known = {peer: self._p2p.can_be_dialled(peer) for peer in connected}
        chosen = [peer for peer in connected if known[peer]] + [peer for peer in connected if known[peer] is None]
        return chosen[:MOST_HELPERS]

    async def _connect(self, name: str, addresses: Sequence[str], timeout_s: float) -> None:
        """Have the daemon dial a node, which may dial this one meanwhile; returns once they are connected.

        Raises:
            PeerUnreachable: there is nothing to dial
            CallTimeout: nobody has answered
        """
        own = list(self._own_addresses())
        dialled = [address for address in dict.fromkeys(addresses) if is_dialable(address, own)]
        if not dialled:
            raise PeerUnreachable("no address to dial")
        reason = "no answer"
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as tasks:

                async def dial() -> None:
                    nonlocal reason
                    try:
                        await self._p2p.connect(name, dialled)
                    except Exception as error:  # hivemind's client raises errors of many types
                        reason = f"{error!r:.200}"

                tasks.start_soon(dial)
                # The daemon's dial does not end by the other's, and it tells of no connection.
                while name not in await self._p2p.connections():  # noqa: ASYNC110
                    await anyio.sleep(LOOK_S)
                tasks.cancel_scope.cancel()
                return
        raise CallTimeout(f"dialled in vain: {reason}")

    async def _ask(self, helper: str, protocol: str, request: HelpRequest) -> tuple[HelpAnswer, Ends]:
        """Ask something of a connected node. The caller closes the stream.

        Raises:
            CallError: it does not do it
        """
        # hivemind's client raises errors of many types.
        with on_network(HELP_TIMEOUT_S, errors=(Exception,)):
            reader, writer = await self._p2p.open_stream(helper, protocol)
        try:
            with on_network(HELP_TIMEOUT_S, is_closing=writer.is_closing):
                await send(writer, request.values())
                return HelpAnswer.parse(await receive(reader, "help")), Ends(reader, writer)
        except BaseException:
            writer.close()
            raise

    async def _ask_to_meet(self, helper: str, name: str) -> tuple[str, ...]:
        request = HelpRequest(self._p2p.passes.own_pass, False, name, addresses=self._own_plain())
        answer, ends = await self._ask(helper, HELPER, request)
        ends.writer.close()
        return answer.addresses

    async def _connect_through(self, helper: str, name: str) -> None:
        """Connect to a node over a stream that a helper carries.

        Raises:
            CallError: the helper does not, or the node does not answer there
        """
        assert self._tasks is not None
        answer, ends = await self._ask(helper, HELPER, HelpRequest(self._p2p.passes.own_pass, True, name))
        carrier = Carrier(helper, answer.bytes_per_s)
        is_taken = False

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal is_taken
            assert self._tasks is not None
            if is_taken:  # by the daemon, which is the only one that has been told of this port
                writer.close()
                return
            is_taken = True
            self._tasks.start_soon(self._carry_own, name, carrier, Ends(reader, writer), ends)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            port = server.sockets[0].getsockname()[1]
            with on_network(CONNECT_S, errors=(Exception,)):
                await self._p2p.connect(name, [f"/ip4/127.0.0.1/tcp/{port}"])
        finally:
            server.close()
            if not is_taken:
                ends.writer.close()

    async def _carry_own(self, name: str, carrier: Carrier, daemon: Ends, ends: Ends) -> None:
        """Carry this node's own connection to a node between its daemon and the helper, until it ends."""
        self.carriers[name] = carrier
        try:
            await carry(daemon, ends)
        finally:
            self.carriers.pop(name, None)
            log.info("way_ended peer=%s way=through %s", name, carrier.helper)

    def _own_plain(self) -> tuple[str, ...]:
        return tuple(address for address in self._own_addresses() if not is_loopback(address))[:MAX_ADDRESSES]

    # --- to help

    def _count(self, num_bytes: int) -> None:
        self._metrics.carried_bytes.inc(num_bytes)
        self._p2p.carried(num_bytes)

    @contextmanager
    def _place(self, peer_id: str) -> Iterator[None]:
        """Hold one of the places that there are for a node, and for all."""
        if self._helped.total() >= MOST_HELPED or self._helped[peer_id] >= MOST_HELPED_EACH:
            raise NoRoom("this node helps too many others already")
        self._helped[peer_id] += 1
        try:
            yield
        finally:
            self._helped[peer_id] -= 1
            self._helped += Counter()  # drops those without any

    @contextmanager
    def _relay_place(self) -> Iterator[None]:
        if not self._relay_bytes_per_s:
            raise NoRoom("its owner has it relay nothing")
        if self._num_relayed >= MOST_RELAYED:
            raise NoRoom("this node relays for too many others already")
        self._num_relayed += 1
        try:
            yield
        finally:
            self._num_relayed -= 1

    async def _help(self, peer_id: str, seen: str, ends: Ends) -> None:
        """Be the helper of a node: pass its wish on to the node that is to be reached."""
        with on_network(HELP_TIMEOUT_S, is_closing=ends.writer.is_closing):
            request = HelpRequest.parse(await receive(ends.reader, "help"))
        self._p2p.passes.check(peer_id, request.shown)  # before a place is taken, which strangers could hold
        try:
            with self._place(peer_id), self._relay_place() if request.is_relay else nullcontext():
                at = seen_at((await self._p2p.connections()).get(request.other, ()))
                if not at:
                    raise PeerUnreachable("this node has no connection of its own to it")
                where = (*seen_at([seen]), *request.addresses)[:MAX_ADDRESSES]
                share = int(self._relay_bytes_per_s / max(1, self._num_relayed))
                passed_on = HelpRequest(
                    self._p2p.passes.own_pass, request.is_relay, peer_id, request.shown, where, share
                )
                answer, other = await self._ask(request.other, HELPED, passed_on)
                with closing(other.writer):
                    self._p2p.passes.check(request.other, answer.shown)
                    await self._answer(
                        ends, HelpAnswer(addresses=(*at, *answer.addresses)[:MAX_ADDRESSES], bytes_per_s=share)
                    )
                    if request.is_relay:
                        await carry(ends, other, self._relayed)
                    else:
                        await taken(ends.reader)
        except CallError as error:
            await self._refuse(ends, error)
            raise

    async def _be_reached(self, helper: str, seen: str, ends: Ends) -> None:
        """Be the node that another one wants to reach, by a helper's word."""
        del seen
        with on_network(HELP_TIMEOUT_S, is_closing=ends.writer.is_closing):
            request = HelpRequest.parse(await receive(ends.reader, "help"))
        passes = self._p2p.passes
        passes.check(helper, request.shown)
        passes.check(request.other, request.other_shown)
        try:
            with self._place(helper):
                if request.is_relay:
                    await self._be_relayed(request.other, Carrier(helper, request.bytes_per_s), ends)
                else:
                    await self._answer(ends, HelpAnswer(shown=passes.own_pass, addresses=self._own_plain()))
                    await self._connect(request.other, request.addresses, PUNCH_S)
        except NoRoom as error:
            await self._refuse(ends, error)
            raise

    async def _be_relayed(self, other: str, carrier: Carrier, ends: Ends) -> None:
        # Both may look for each other at once, and one connection is enough.
        if other in self._searches and self._me < other:
            raise NoRoom("this node is about to reach the other one itself")
        with on_network(HELP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*self._door)
        with closing(writer):
            await self._answer(ends, HelpAnswer(shown=self._p2p.passes.own_pass))
            await self._carry_own(other, carrier, Ends(reader, writer), ends)

    async def _refuse(self, ends: Ends, error: CallError) -> None:
        await self._answer(ends, HelpAnswer(refusal=str(error)[:200]))
        await taken(ends.reader)

    async def _answer(self, ends: Ends, answer: HelpAnswer) -> None:
        with on_network(HELP_TIMEOUT_S, is_closing=ends.writer.is_closing):
            await send(ends.writer, answer.values())
