"""This peer's part in agreement: the protocol's core, with a clock, keys and the transport.

Owns when the core is asked, and how its messages travel. Must not know what microbatches, weights or states are: the
parts that do work with the core's members.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakValueDictionary

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, InvalidMessage, PeerUnreachable
from swarm_peer.protocol.core import Core
from swarm_peer.protocol.epochs import Certified, Place, Restart, Rules, rank_of
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.messages import Body, Commit, Cutting, Fetch, Message, News, Sent, Timing, Wanted, WantRoot
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.statements import EpochId, Seat, Sign
from swarm_peer.protocol.work import RoundContext
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import Clock, RandomSource
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.transport import Handler, Reply, Transport
from swarm_peer.wire import messages as wire
from swarm_peer.wire.agreement import MAX_SIGNED, Statements
from swarm_peer.wire.frames import MAX_TENSORS
from swarm_peer.wire.identity import Identity

if TYPE_CHECKING:  # coordinators' commands that only look at a run need no models
    from swarm_peer.model.resolved import ResolvedManifest

log = logging.getLogger(__name__)

# The core is asked at least so often whether something is due.
TICK_S = 0.25
CALL_TIMEOUT_S = 5.0
# In one call, as many as a frame has tensors: a frame of more is refused, and all in it is lost.
MAX_MESSAGES = MAX_TENSORS
# Signed statements in the messages of one call: two of the largest that there are.
MAX_SIGNED_IN_CALL = 2 * MAX_SIGNED
# Signatures that are checked before others have their turn: some 10 ms.
CHECKED_AT_ONCE = 100
# Messages that wait to be sent to one peer. All are repeated until they have their effect, so some may go.
MAX_QUEUED = 64
# In place of an epoch, before a newcomer has heard of any.
NO_EPOCH = EpochId(0, Seat("", 0, ""), 0)


# How long the core waits.
TIMING = Timing()
# In lifetimes of an announcement: see Timing.key_s.
KEY_DECIDES_AFTER = 2
# Without snapshots of all stages, the run begins anew if it has made at most this many snapshot intervals of updates.
BEGIN_ANEW_INTERVALS = 2
# Members begin an average, and tell of its result, within so long besides averaging.round_timeout_s.
AVERAGE_MARGIN_S = 10.0
# A leader may need so long besides one average before it is found stuck.
STUCK_MARGIN_S = 20.0


class AgreementContext(Protocol):
    """The surroundings of a process that agrees: a PeerContext, or that of a coordinator."""

    @property
    def run_id(self) -> str:
        """The run's public key."""

    @property
    def resolved(self) -> ResolvedManifest:
        """The run's manifest."""

    @property
    def identity(self) -> Identity:
        """The key of this process, whose public half is its peer id."""

    @property
    def clock(self) -> Clock:
        """Where time comes from."""

    @property
    def random(self) -> RandomSource:
        """Where chance comes from."""

    @property
    def changed(self) -> Condition:
        """Notified whenever something has changed that a part of this process may wait for."""


class Ticket(NamedTuple):
    """By what a peer was invited.

    Attributes:
        own: this peer's
        is_of: whether a seat was invited by the ticket that it names
    """

    own: str
    is_of: Callable[[Seat], bool]


# In a run that is open to everybody, nobody has a ticket, so peers vote.
OPEN = Ticket("", lambda seat: not seat.ticket)


def ticket_of(passes: PassChecker, peer_id: str) -> Ticket:
    """By what this peer was invited, and how it knows the tickets of others."""
    if passes.is_open:
        return OPEN
    own = passes.own_ticket(peer_id)

    def is_of(seat: Seat) -> bool:
        return seat.ticket == own if seat.peer == peer_id else passes.came_by(seat.peer, seat.ticket)

    return Ticket(own, is_of)


class Agreement:
    """This peer's part in agreement. Belongs to the event loop's thread.

    Attributes:
        core: the protocol's, which other parts ask, and tell what they have done; they `look` afterwards
        statements: signs as this peer
    """

    def __init__(
        self,
        *,
        context: AgreementContext,
        transport: Transport,
        life: int,
        first: Sequence[Certified],
        ticket: Ticket = OPEN,
        acquaintances: Callable[[], Iterable[str]] = tuple,
        sign_as_key: Sign | None = None,
    ):
        """Make the part of one life of this peer.

        Args:
            life: later ones of this peer are larger
            first: epochs that follow one another, from one that the run key has signed
            acquaintances: ids of peers of the run, from wherever
            sign_as_key: signs with the run key; None if this process does not hold it
        """
        manifest = context.resolved.manifest
        rules, rounds = rules_of(manifest), rounds_of(manifest)
        timing = timing_of(manifest)
        self.statements = Statements(context.run_id, context.identity)
        self._context = context
        self._transport = transport
        self._acquaintances = acquaintances
        self._queued: dict[str, dict[object, Message]] = {}
        self._delivering: set[str] = set()  # those to whom a task sends what is queued: one task each
        self._turns = WeakValueDictionary[str, anyio.Lock]()  # by peer, for as long as one of its calls is read
        self._tasks: TaskGroup | None = None
        self._due = anyio.Event()
        membership = Membership(
            me=Seat(context.identity.peer_id, life, ticket.own),
            first=first[0],
            rules=rules,
            timing=timing,
            random=context.random.stream("agreement"),
            sign=self.statements.sign,
            sign_as_key=sign_as_key,
            has_ticket=ticket.is_of,
        )
        membership.learn(first[1:])
        self.core = Core(
            membership=membership,
            context=RoundContext(
                num_stages=rounds.num_stages,
                batch=rounds.batch,
                unit=rounds.unit,
                most=rounds.most,
                lag=rounds.lag,
                averages=rounds.averages,
                is_rooted=rounds.is_rooted,
                fills=lambda close: rounds.fills(close, membership.epoch_of),
                believed=lambda counts: rounds.believed(counts, membership.epoch_of),
                epoch_of=membership.epoch_of,
                sign=self.statements.sign,
                timing=timing,
                last_step=rounds.last_step,
            ),
        )

    @property
    def changed(self) -> Condition:
        """Notified whenever the core may have come further."""
        return self._context.changed

    @property
    def calls(self) -> dict[type[wire.Body], Handler]:
        """The calls that this part answers."""
        return {wire.AgreeCall: self.handle}

    async def run(self) -> None:
        """Take part, until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            for peer in self._queued:
                self._start_delivering(peer)
            while True:
                self._due = anyio.Event()
                self.core.membership.acquaintances = tuple(self._acquaintances())
                self._send(self.core.tick(self._context.clock.monotonic_s()))
                self._context.changed.notify()
                with anyio.move_on_after(TICK_S):
                    await self._due.wait()

    def ask_for_log(self, stage: int) -> None:
        """Ask the seats of a stage for its log, and its leader for the root of a coming state."""
        core = self.core
        wanted = Message(core.membership.me, core.epoch.id, WantRoot(stage))
        self._send((seat.peer, wanted) for seat in core.epoch.roster(stage) if seat != core.membership.me)

    def announce_by_key(self, places: Iterable[Place], restart: Restart, least_term: int = 0) -> None:
        """Have the run go on with these places from a restart, in a term that the run key begins."""
        self._send(self.core.membership.announce_by_key(places, restart, least_term))
        self.look()

    def say_by_key(self, word: str, least_term: int = 0) -> None:
        """Tell all seats a word, in a term that the run key begins."""
        self._send(self.core.membership.say_by_key(word, least_term))
        self.look()

    async def told(self) -> None:
        """Wait until all messages have been sent, or have failed."""
        await self._context.changed.wait_for(lambda: not self._queued and not self._delivering)

    def look(self) -> None:
        """Have the core look soon at what has changed."""
        self._due.set()

    async def handle(self, caller: str, call: wire.AgreeCall, tensors: Sequence[memoryview]) -> Reply:
        """Take messages of another peer. The reply has answers to them.

        Raises:
            InvalidMessage: one is none, or another peer's
        """
        answers = await self._receive(caller, tensors)
        return Reply(tensors=[memoryview(self.statements.encode(message)) for message in answers[:MAX_MESSAGES]])

    async def _receive(self, sender: str, tensors: Sequence[memoryview]) -> list[Message]:
        """Take the messages of a call, or of a reply. Returns the answers to their sender.

        Raises:
            InvalidMessage: one is none, or another peer's
        """
        answers = list[Message]()
        # One call of each peer at a time: else one that sends many takes all of the event loop's time.
        async with self._turns.setdefault(sender, anyio.Lock()):
            reading = _Reading(self.statements, sender)
            for data in tensors[:MAX_MESSAGES]:
                message = await reading.read(data)
                sent = self.core.receive(self._context.clock.monotonic_s(), message)
                self._context.changed.notify()
                self.look()
                self._send([(peer, each) for peer, each in sent if peer != sender])
                answers += [each for peer, each in sent if peer == sender]
        return answers

    # --- sending

    def _send(self, sent: Iterable[Sent]) -> None:
        for peer, message in sent:
            if peer == self.core.membership.me.peer:
                continue  # an earlier life of this peer has a place yet
            queue = self._queued.setdefault(peer, {})
            # A later message about the same thing takes the place of an earlier one.
            queue.pop(subject := _subject(message.body), None)
            queue[subject] = message
            if len(queue) > MAX_QUEUED:
                del queue[next(iter(queue))]
            self._start_delivering(peer)

    def _start_delivering(self, peer: str) -> None:
        if self._tasks is not None and not self._tasks.cancel_scope.cancel_called and peer not in self._delivering:
            self._delivering.add(peer)
            self._tasks.start_soon(self._deliver, peer)

    async def _deliver(self, peer: str) -> None:
        """Send what waits for a peer, one call after the other."""
        call = wire.AgreeCall(manifest=self._context.resolved.hash)
        while queue := self._queued.get(peer):
            taken = [queue.pop(subject) for subject in list(queue)[:MAX_MESSAGES]]
            if not queue:
                del self._queued[peer]
            data = [memoryview(self.statements.encode(message)) for message in taken]
            try:
                reply = await self._transport.call(peer, call, data, timeout_s=CALL_TIMEOUT_S)
                self._send([(peer, each) for each in await self._receive(peer, reply.tensors)])
            except CallError as error:  # whatever has had no effect is sent again
                log.debug("messages_lost peer=%s count=%d reason=%s", peer, len(taken), error)
                if isinstance(error, PeerUnreachable):
                    self.core.membership.suspect(peer)
        self._delivering.discard(peer)
        self._context.changed.notify()


@dataclass
class _Reading:
    """Reads the messages of one call, or of one reply, and lets others have their turn between slices of that work.

    Attributes:
        left: signed statements that they may still have
    """

    statements: Statements
    sender: str
    left: int = MAX_SIGNED_IN_CALL

    async def read(self, data: memoryview) -> Message:
        """Read the next message; signatures, which cost most, are checked last.

        Raises:
            InvalidMessage: it is none, or another peer's, or there are too many statements
        """
        await anyio.lowlevel.checkpoint()
        message, signed = self.statements.read(Message, bytes(data))
        if message.sender.peer != self.sender:
            raise InvalidMessage(f"a message of {message.sender.peer[:60]} from {self.sender}")
        self.left -= len(signed)
        if self.left < 0:
            raise InvalidMessage(f"more than {MAX_SIGNED_IN_CALL} signed statements in one call")
        for number, each in enumerate(signed, start=1):
            self.statements.check(each)
            if number % CHECKED_AT_ONCE == 0:
                await anyio.lowlevel.checkpoint()
        return message


def rounds_of(manifest: RunManifest) -> RoundRules:
    """How a run's rounds go."""
    averaging, data = manifest.averaging, manifest.data
    return RoundRules(
        num_stages=manifest.stages.count,
        batch=manifest.training.global_batch_size,
        unit=manifest.training.microbatch_size,
        targets=data.sequence_length if data.has_targets else 1,
        lag=averaging.rounds_ahead,
        period=averaging.steps_per_average,
        roots_every=(averaging.compare_weights_every, manifest.recovery.snapshot_every),
        last_step=manifest.training.steps,
    )


def rules_of(manifest: RunManifest) -> Rules:
    """The part of a run's manifest that its epochs depend on."""
    few = BEGIN_ANEW_INTERVALS * manifest.recovery.snapshot_every
    return Rules(manifest.stages.count, few, manifest.averaging.steps_per_average)


def timing_of(manifest: RunManifest) -> Timing:
    """How long the core waits in a run: longer than an average may take there."""
    average_s = max(TIMING.average_s, manifest.averaging.round_timeout_s + AVERAGE_MARGIN_S)
    stuck_s = max(TIMING.stuck_s, average_s + STUCK_MARGIN_S)
    key_s = KEY_DECIDES_AFTER * manifest.limits.announcement_s
    return replace(TIMING, average_s=average_s, stuck_s=stuck_s, key_s=key_s)


def _subject(body: Body) -> object:
    """A name of the thing that a message is about: of two such messages the later one alone is of use."""
    match body:
        case Wanted(wish):
            return type(wish.body), wish.body.author, getattr(wish.body, "stage", None)
        case Cutting(cut):
            return Cutting, cut.stage
        case Commit(committed):
            return Commit, committed.entry.cut.stage, committed.entry.cut.round
    return type(body), getattr(body, "stage", None), getattr(body, "round", None)


async def find_epochs(
    transport: Transport, statements: Statements, manifest: str, peers: Iterable[str], run_timeout_s: float
) -> list[Certified]:
    """Ask peers of the run for its newest epochs, from one that the run key has signed.

    Returns:
        the newest of them, in their order; none if nobody tells
    """
    newest: list[Certified] = []

    async def ask(peer: str) -> None:
        nonlocal newest
        message = Message(Seat(transport.peer_id, 0, ""), NO_EPOCH, Fetch())
        call = wire.AgreeCall(manifest=manifest)
        try:
            reply = await transport.call(peer, call, [memoryview(statements.encode(message))], timeout_s=CALL_TIMEOUT_S)
            reading = _Reading(statements, peer)
            told = [(await reading.read(data)).body for data in reply.tensors[:MAX_MESSAGES]]
        except CallError as error:
            log.info("epochs_not_told peer=%s reason=%s", peer, error)
            return
        for body in told:
            chain = _sound(body.epochs) if isinstance(body, News) else []
            if chain and (not newest or rank_of(chain) > rank_of(newest)):
                newest = chain

    with anyio.move_on_after(run_timeout_s):
        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(ask, peer)
    return newest


def _sound(epochs: Sequence[Certified]) -> list[Certified]:
    """Epochs from the first one that the run key has signed, as far as each is certified by the one before."""
    chain: list[Certified] = []
    for each in epochs:
        if each.is_of_key or (chain and each.follows(chain[-1].epoch)):
            chain.append(each)
        elif chain:
            break
    return chain
