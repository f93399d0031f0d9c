"""Ways to nodes that cannot be dialled: a third node has both dial each other, or carries their connection.

Nodes behind routers keep connections to those that can be dialled. Such a node helps two others, A and B:

* To meet: A asks the helper for B. The helper tells B where it sees A, and answers A with where it sees B. Both dial.
  If one of the two can be dialled after all, the other's dial arrives.
* To relay, where that fails. Each end makes its stream to the helper look like a connection of TCP to its own daemon,
  and the daemons connect through it as through any other: who they are is proven end to end, and the relay cannot read
  what it carries.
* To punch: two whose connection is carried, or that nobody carries, meet again and begin a connection at the same
  moment. Each one's packets open its own router for those of the other ("hole punching", as libp2p's DCUtR does it). It
  fails where both routers give each connection a port of its own.

libp2p's own relays are off: they carry for everybody who asks. A helper helps members of the run alone, which show
their passes, and relays at the rate that its owner allows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from typing import Any

import anyio
from anyio.abc import TaskGroup

from swarm_peer.errors import CallError, CallTimeout, NoRoom, PeerUnreachable
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.carrying import Ends, Rate, carry
from swarm_peer.runtime.network.frame_stream import on_network
from swarm_peer.runtime.network.guarded_p2p import GuardedP2P, StreamHandler
from swarm_peer.runtime.network.own_pipes import CONNECT_S, LOOK_S, Carrier, OwnPipes
from swarm_peer.runtime.network.peer_addresses import is_dialable, is_loopback, is_public
from swarm_peer.runtime.network.places_held import Places
from swarm_peer.runtime.network.punching import punch
from swarm_peer.runtime.network.short_messages import receive, send, taken
from swarm_peer.wire.help import MAX_ADDRESSES, HelpAnswer, HelpRequest

log = logging.getLogger(__name__)

HELPER = "/swarm/help/1"
HELPED = "/swarm/helped/1"
# Nodes that are asked to help one after the other, and how long one may take.
MOST_HELPERS = 3
HELP_TIMEOUT_S = 3.0
# Of these, those by which the two try to meet.
MOST_MEETINGS = 2
# For both ends to dial each other: a few round trips of the furthest peers. A first call waits for it.
PUNCH_S = 2.0
# A node without a way is looked for again after so long, and each time later.
AGAIN_S = (15.0, 30.0, 60.0, 120.0)
# Between looks whether a node that is reached through a relay can be dialled by now.
IMPROVE_S = 10.0
# A direct way that was not there is looked for again after so long: each time, calls under way are made again.
BETTER_AGAIN_S = 900.0
# A node that is out of reach may just leave: its last announcement is found within so long.
GOODBYE_HEARD_S = 5.0
# Streams of others whose first message has not been read: anybody can open some.
MOST_UNREAD = 32
MOST_UNREAD_EACH = 2
# Wishes of others to meet that this node sees to at a time, those of one of them, and what it carries in the same way.
MOST_MET = 80
MOST_MET_EACH = 8
MOST_RELAYED = 40
MOST_RELAYED_EACH = 8
# Nodes that want to reach this one, by the word of helpers. Anybody may pass on the pass of another one, so that places
# are held by both together.
MOST_TOLD = 128
MOST_TOLD_EACH = 4


def seen_at(connections: Sequence[str]) -> tuple[str, ...]:
    """Where a node is seen that has such connections to this one; nowhere, if they come through a relay."""
    plain = [address.partition("/p2p/")[0] for address in connections if not is_loopback(address)]
    return tuple(dict.fromkeys(plain))[:MAX_ADDRESSES]


class Meetings:
    """Finds ways to nodes that cannot be dialled, and helps others to theirs. Belongs to one GuardedP2P.

    Attributes:
        carriers: how this node's connection to a node is carried, by node
    """

    def __init__(
        self,
        *,
        p2p: GuardedP2P,
        door: tuple[str, int] | None,
        relay_bytes_per_s: float,
        own_addresses: Callable[[], Sequence[str]],
        metrics: PeerMetrics,
    ):
        """Make what knows nobody yet.

        Args:
            door: host and port at which this node's daemon accepts connections of TCP from this machine, if known
            relay_bytes_per_s: that this node carries for others; 0 for none
            own_addresses: where this machine may be dialled, as far as it knows
        """
        self._p2p = p2p
        self._pipes = OwnPipes(p2p, door)
        self._relay_bytes_per_s = relay_bytes_per_s
        self._own_addresses = own_addresses
        self._rng = random.Random(p2p.peer_id.to_base58())
        self._me = p2p.peer_id.to_base58()
        self._tasks: TaskGroup | None = None
        self._searches: dict[str, anyio.Event] = {}
        self._failures: Counter[str] = Counter()
        self._not_before_s: dict[str, float] = {}
        # When a node was dialled, or a connection begun from both ends, in the place of a carried one.
        self._dialled_s: dict[str, float] = {}
        self._punched_s: dict[str, float] = {}
        self._unread = Places(MOST_UNREAD, MOST_UNREAD_EACH)
        self._met = Places(MOST_MET, MOST_MET_EACH)
        self._relays = Places(MOST_RELAYED, MOST_RELAYED_EACH)
        self._told = Places(MOST_TOLD, MOST_TOLD_EACH)
        self._relayed = Rate(relay_bytes_per_s or 1.0, self._count)
        self._metrics = metrics
        self.carriers = self._pipes.carriers

    async def run(self) -> None:
        """Help others, and look for the ways that `reach` asks for, until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = self._pipes.tasks = tasks
            self._p2p.reach = self.reach
            await self._p2p.handle_streams(HELPER, self._in_own_task(self._help))
            await self._p2p.handle_streams(HELPED, self._in_own_task(self._be_reached))
            while True:
                await anyio.sleep(IMPROVE_S)
                self._forget()
                await self._improve()

    def _forget(self) -> None:
        """Forget what was tried in vain with nodes that announce themselves no more."""
        known: tuple[dict[str, Any], ...] = (self._failures, self._not_before_s, self._dialled_s, self._punched_s)
        for each in known:
            for name in [name for name in each if not self._p2p.announced(name)]:
                del each[name]

    async def _improve(self) -> None:
        """Give up relays to nodes that can be dialled by now: the daemon dials nobody to whom it is connected.

        Calls that are under way there fail, as if the relay had gone, and are made again.
        """
        now_s = anyio.current_time()
        try:
            connections = await self._p2p.connections()
        except PeerUnreachable:
            return
        for name, carrier in list(self.carriers.items()):
            if seen_at(connections.get(name, ())):
                continue  # there is a direct way as well
            # Some routers are open to those alone who told the node that its port is open.
            is_dialled = bool(self._p2p.can_be_dialled(name))
            tried_s = self._dialled_s if is_dialled else self._punched_s
            if now_s < tried_s.get(name, -math.inf) + BETTER_AGAIN_S or not (is_dialled or self._me < name):
                continue  # of the two that punch, one begins
            tried_s[name] = now_s
            try:
                if is_dialled:
                    log.info("way_changes peer=%s from=through %s to=direct", name, carrier.helper)
                    with on_network(CONNECT_S, errors=(Exception,)):
                        await self._p2p.disconnect(name)
                        await self._p2p.dial(name)
                else:
                    await self._punch_by(carrier.helper, name)
            except CallError as error:
                log.debug("way_not_changed peer=%s reason=%s", name, error)
            except Exception:  # a defect, or no descriptor is free: that must not end the ways of others
                self._metrics.handler_defects.inc()
                log.exception("way_not_changed peer=%s", name)

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
                    self._metrics.handler_defects.inc()
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
        assert self._tasks is not None
        try:
            try:
                how = await self._find(name, addresses)
            except CallError as error:
                # Two that look for each other must not pause in step.
                pause_s = AGAIN_S[min(self._failures[name], len(AGAIN_S) - 1)] * self._rng.uniform(0.7, 1.3)
                self._failures[name] += 1
                self._not_before_s[name] = anyio.current_time() + pause_s
                level = logging.WARNING if self._failures[name] == len(AGAIN_S) else logging.INFO
                self._tasks.start_soon(self._tell_no_way, name, level, pause_s, str(error))
            except Exception:  # a defect, or no descriptor is free: that must not end the ways of others
                self._metrics.handler_defects.inc()
                log.exception("search_failed peer=%s", name)
                self._not_before_s[name] = anyio.current_time() + AGAIN_S[-1]
            else:
                self._not_before_s.pop(name, None)
                del self._failures[name]
                log.info("way_found peer=%s way=%s", name, how)
        finally:
            del self._searches[name]
            search.set()

    async def _tell_no_way(self, name: str, level: int, pause_s: float, reason: str) -> None:
        """Say that there is no way to a node, unless it has only gone: its goodbye is heard some seconds later."""
        await anyio.sleep(GOODBYE_HEARD_S)
        if not self._p2p.has_left(name):
            log.log(
                level,
                "no_way peer=%s again_s=%.0f reason=%s: unless that peer has just left, forward the port of this "
                "machine's router or of that one's, or have a member that both reach carry their connection "
                "(--relay-mbps)",
                name,
                pause_s,
                reason,
            )

    async def _find(self, name: str, addresses: Sequence[str]) -> str:
        """Connect to a node by the best way that there is; returns which one, in words.

        Raises:
            CallError: there is none
        """
        helpers = await self._helpers(name)
        reasons = []
        for helper in helpers[:MOST_MEETINGS]:
            try:
                met = await self._ask_to_meet(helper, name)
                log.debug("meeting peer=%s addresses=%s", name, " ".join(met))
                await self._connect(name, [*addresses, *met], PUNCH_S)
                return "direct"
            except CallError as error:
                reasons.append(f"{helper[-8:]}: {error}")
        if not helpers:
            await self._connect(name, addresses, PUNCH_S)
            return "direct"
        log.debug("not_met peer=%s reasons=%s", name, "; ".join(reasons))
        for helper in reversed(helpers):  # one that has told wrong addresses comes last
            try:
                await self._connect_through(helper, name)
                return f"through {helper}"
            except CallError as error:
                reasons.append(f"{helper[-8:]} as a relay: {error}")
        try:
            await self._meet(name, await self._ask_to_meet(helpers[0], name))
            return "direct, from both ends"
        except CallError as error:
            raise PeerUnreachable("; ".join([*reasons, f"from both ends: {error}"])) from error

    async def _helpers(self, name: str) -> list[str]:
        """Members to ask for help: those that can be dialled first, then initial peers, such as the coordinator."""
        connected = [peer for peer, at in (await self._p2p.connections()).items() if seen_at(at) and peer != name]
        self._rng.shuffle(connected)
        dialable = [peer for peer in connected if self._p2p.announced(peer) and self._p2p.can_be_dialled(peer)]
        initial = [peer for peer in connected if peer in self._p2p.initial and peer not in dialable]
        return [*dialable, *initial][:MOST_HELPERS]

    async def _punch_by(self, helper: str, name: str) -> None:
        """Have a carried connection give way to one that both ends begin.

        Raises:
            CallError: the helper does not help, or nothing has come of it
        """
        await self._punch(name, await self._ask_to_meet(helper, name))

    async def _meet(self, name: str, addresses: Sequence[str]) -> None:
        """Connect to a node that does the same now: the daemons dial each other, and then both ends begin a connection.

        Raises:
            CallError: nothing has come of it
        """
        try:
            await self._connect(name, addresses, PUNCH_S)
        except CallTimeout:
            await self._punch(name, addresses)
            with on_network(CONNECT_S):
                while not await self._is_connected(name):  # noqa: ASYNC110
                    await anyio.sleep(LOOK_S)

    async def _punch(self, name: str, addresses: Sequence[str]) -> None:
        """Connect to a node by a connection that both ends begin now, in the place of a carried one; see punching.py.

        Raises:
            CallError: nothing has come of it
        """
        assert self._tasks is not None
        if self._pipes.door is None:
            raise PeerUnreachable("this node does not know where it listens itself")
        own = list(self._own_addresses())
        others = [each for each in addresses if is_public(each) and is_dialable(each, own)]
        try:
            with anyio.fail_after(PUNCH_S):
                ends = await punch(self._pipes.door[1], others)
        except TimeoutError:
            raise CallTimeout("nobody has answered") from None
        try:
            if self._me > name:  # of the two, one begins
                self._tasks.start_soon(self._pipes.accept, name, await self._pipes.knock(), ends, None)
                return
            if (carrier := self.carriers.get(name)) is not None:
                log.info("way_changes peer=%s from=through %s to=direct, from both ends", name, carrier.helper)
                with on_network(CONNECT_S, errors=(Exception,)):
                    await self._p2p.disconnect(name)
            await self._pipes.dial(name, ends, None)
        except BaseException:
            ends.writer.close()
            raise

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
                while not await self._is_connected(name):  # noqa: ASYNC110
                    await anyio.sleep(LOOK_S)
                tasks.cancel_scope.cancel()
                return
        raise CallTimeout(f"dialled in vain: {reason}")

    async def _is_connected(self, name: str) -> bool:
        with suppress(PeerUnreachable):
            return name in await self._p2p.connections()
        return False

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
        answer, ends = await self._ask(helper, HELPER, HelpRequest(self._p2p.passes.own_pass, True, name))
        await self._pipes.dial(name, ends, Carrier(helper, answer.bytes_per_s))

    def _own_plain(self) -> tuple[str, ...]:
        plain = [
            each for each in self._own_addresses() if each.startswith(("/ip4/", "/ip6/")) and not is_loopback(each)
        ]
        return tuple(plain[:MAX_ADDRESSES])

    # --- to help

    def _count(self, num_bytes: int) -> None:
        if not self._p2p.may_carry():
            raise PeerUnreachable("its owner has it carry nothing any more")
        self._metrics.carried_bytes.inc(num_bytes)
        self._p2p.carried(num_bytes)

    async def _read(self, peer_id: str, ends: Ends) -> HelpRequest:
        with self._unread.hold(peer_id), on_network(HELP_TIMEOUT_S, is_closing=ends.writer.is_closing):
            return HelpRequest.parse(await receive(ends.reader, "help"))

    async def _help(self, peer_id: str, seen: str, ends: Ends) -> None:
        """Be the helper of a node: pass its wish on to the node that is to be reached."""
        request = await self._read(peer_id, ends)
        # Before a place is taken, which strangers could hold.
        shown = self._p2p.passes.check(peer_id, request.shown)
        ticket = shown.ticket.key if shown is not None else ""
        try:
            if request.is_relay and not (self._relay_bytes_per_s and self._p2p.may_carry()):
                raise NoRoom("its owner has it relay nothing")
            with (self._relays if request.is_relay else self._met).hold(peer_id, ticket):
                at = seen_at((await self._p2p.connections()).get(request.other, ()))
                if not at:
                    raise PeerUnreachable("this node has no connection of its own to it")
                where = (*seen_at([seen]), *request.addresses)[:MAX_ADDRESSES]
                share = int(self._relay_bytes_per_s / max(1, self._relays.num_held))
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
        request = await self._read(helper, ends)
        passes = self._p2p.passes
        passes.check(helper, request.shown)
        passes.check_told(request.other, request.other_shown)
        try:
            with self._told.hold((helper, request.other)):
                if request.is_relay:
                    await self._be_relayed(request.other, Carrier(helper, request.bytes_per_s), ends)
                else:
                    await self._answer(ends, HelpAnswer(shown=passes.own_pass, addresses=self._own_plain()))
                    if request.other in self.carriers:
                        await self._punch(request.other, request.addresses)
                    else:
                        await self._meet(request.other, request.addresses)
        except NoRoom as error:
            await self._refuse(ends, error)
            raise

    async def _be_relayed(self, other: str, carrier: Carrier, ends: Ends) -> None:
        # Both may look for each other at once, and one connection is enough.
        if other in self._searches and self._me < other:
            raise NoRoom("this node is about to reach the other one itself")
        daemon = await self._pipes.knock()
        with closing(daemon.writer):
            await self._answer(ends, HelpAnswer(shown=self._p2p.passes.own_pass))
            await self._pipes.accept(other, daemon, ends, carrier)

    async def _refuse(self, ends: Ends, error: CallError) -> None:
        await self._answer(ends, HelpAnswer(refusal=str(error)[:200]))
        await taken(ends.reader)

    async def _answer(self, ends: Ends, answer: HelpAnswer) -> None:
        with on_network(HELP_TIMEOUT_S, is_closing=ends.writer.is_closing):
            await send(ends.writer, answer.values())
