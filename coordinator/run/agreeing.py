"""The coordinator's part in agreement: it begins the run's epochs, since it holds the run key, and votes on later ones.

Owns the file of the newest epochs in the run's folder: a coordinator that is started again goes on from it where nobody
of the run answers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import anyio

from coordinator.run.context import CoordinatorContext
from swarm_peer.errors import CallError, InvalidMessage, UserError
from swarm_peer.files import replace_file
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.protocol.epochs import BEGINNING, COORDINATORS, Certified, Epoch, Place, Restart
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.statements import EpochId, KeySigned, Seat
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import Clock, RandomSource, Threads
from swarm_peer.runtime.network.agreement import OPEN, Agreement, Ticket, find_epochs, rules_of, ticket_of
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.directory import Directory
from swarm_peer.runtime.network.transport import Transport
from swarm_peer.wire.agreement import MAX_MESSAGE_BYTES, Statements
from swarm_peer.wire.identity import Identity

log = logging.getLogger(__name__)

# In the run's folder.
EPOCHS = "epochs"
# For all peers together to tell the newest epoch.
FIND_S = 10.0
# Between tries to hear of the run's epochs, and between looks for peers that may know of newer ones.
LOOK_S = 5.0

# Finds the ids of peers and coordinators of the run. Raises CallError.
FindOthers = Callable[[], Awaitable[Iterable[str]]]


@dataclass(frozen=True, kw_only=True)
class KeyContext:
    """A coordinator's surroundings in agreement.

    Attributes:
        identity: of this process
        run_key: the run's
        ticket: by what this process was invited
        changed: notified whenever the agreement may have come further
    """

    resolved: ResolvedManifest
    identity: Identity
    run_key: Identity
    clock: Clock
    random: RandomSource
    threads: Threads
    changed: Condition
    ticket: Ticket = OPEN

    @classmethod
    def of(
        cls, resolved: ResolvedManifest, dht: SwarmDHT, run_key: Identity, context: CoordinatorContext
    ) -> KeyContext:
        """The surroundings of the coordinator with this node of the DHT."""
        return cls(
            resolved=resolved,
            identity=dht.identity,
            run_key=run_key,
            clock=context.clock,
            random=context.random,
            threads=context.threads,
            changed=Condition(),
            ticket=ticket_of(dht.passes, dht.identity.peer_id),
        )

    @property
    def run_id(self) -> str:
        """The run's public key."""
        return self.run_key.peer_id


def others_in(dht: SwarmDHT, directory: Directory, run_id: str) -> FindOthers:
    """Finds the coordinators of a run and the peers in view."""

    async def find() -> set[str]:
        coordinators = {term.coordinator for term in await dht.fetch_coordination(run_id)}
        return coordinators | {peer.peer_id for peer in directory.view.peers}

    return find


class Kept(NamedTuple):
    """A coordinator's note of the run's epochs.

    Attributes:
        beginning: where the run was begun or resumed
        chain: epochs that follow one another, from one that the run key has signed
    """

    beginning: Restart
    chain: tuple[Certified, ...]

    @property
    def newest(self) -> Epoch:
        """The newest of the epochs."""
        return self.chain[-1].epoch


class EpochsFile:
    """The file of a run's newest epochs in its folder. Any thread may use it."""

    def __init__(self, output: Path, run_id: str):
        self._path = output / EPOCHS
        self._statements = Statements(run_id, Identity.generate())  # it signs nothing here

    def read(self) -> Kept | None:
        """The note that was written last; None if there is none, if it is another run's, or if the file is damaged.

        Raises:
            UserError: it cannot be read
        """
        try:
            data = self._path.read_bytes()[: MAX_MESSAGE_BYTES + 1]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read {self._path}, the epochs of the run: {error}") from error
        try:
            beginning, chain = self._statements.decode(tuple[Restart, tuple[Certified, ...]], data)
        except InvalidMessage as error:
            log.warning("epochs_not_read path=%s reason=%s", self._path, error)
            return None
        follow = all(later.is_of_key or later.follows(each.epoch) for each, later in pairwise(chain))
        is_sound = bool(chain) and chain[0].is_of_key and follow
        return Kept(beginning, chain) if is_sound else None

    @property
    def is_of_begun_run(self) -> bool:
        """Whether there is a note, and some stage had begun by then. Raises UserError as `read` does."""
        kept = self.read()
        return kept is not None and bool(kept.newest.begun)

    def write(self, kept: Kept) -> None:
        """Replace what was written before, at once.

        Raises:
            OSError: the disk does not take it
        """
        data = self._statements.encode(kept[:])
        if len(data) > MAX_MESSAGE_BYTES:
            # Those before the newest one that the key has signed prove nothing more about it.
            first = max(index for index, each in enumerate(kept.chain) if each.is_of_key)
            data = self._statements.encode((kept.beginning, kept.chain[first:]))
        replace_file(self._path, data)


class Start(NamedTuple):
    """How a coordinator comes into its run.

    Attributes:
        is_under_way: the run has begun, so that there are epochs, and none is made before somebody has told them
        has_trained: it has made optimizer steps
        resume: it begins anew there, or in a later round
    """

    is_under_way: bool = False
    has_trained: bool = False
    resume: Restart | None = None


class _Come(NamedTuple):
    """The epochs that a coordinator begins with, and its life, which is later than its earlier ones."""

    known: Kept
    life: int


class Agreeing:
    """This coordinator's part in agreement. Belongs to the event loop's thread. Made by `open`.

    Attributes:
        agreement: the part that every peer has
        beginning: where the run was begun or resumed, as far as this coordinator knows
    """

    def __init__(self, *, context: KeyContext, transport: Transport, file: EpochsFile, come: _Come, others: FindOthers):
        self.beginning = come.known.beginning
        self._context = context
        self._file = file
        self._find_others = others
        self._acquaintances: list[str] = []
        self.agreement = Agreement(
            context=context,
            transport=transport,
            life=come.life,
            first=come.known.chain,
            ticket=context.ticket,
            acquaintances=lambda: self._acquaintances,
            sign_as_key=Statements(context.run_id, context.run_key).sign,
        )
        self.membership.desired = frozenset({COORDINATORS})

    @classmethod
    async def open(
        cls,
        *,
        context: KeyContext,
        transport: Transport,
        output: Path,
        find_others: FindOthers,
        start: Start,
    ) -> Agreeing:
        """Find the run's epochs, or begin them.

        Args:
            output: the run's folder
            find_others: finds those who may know of epochs

        Raises:
            UserError: the file of epochs cannot be read
        """
        file = EpochsFile(output, context.run_id)
        kept = await context.threads.run(file.read)
        if kept is not None and start.has_trained and not kept.newest.begun:
            kept = None  # of before any peer had come: who did come knows epochs that are newer
        known, is_alone = await _find(context, transport, kept, find_others, start)
        come = _come(context, known, start, is_alone=is_alone)
        agreeing = cls(context=context, transport=transport, file=file, come=come, others=find_others)
        await agreeing._keep()  # before anybody hears of it
        return agreeing

    @property
    def membership(self) -> Membership:
        """This coordinator's part in the run's epochs."""
        return self.agreement.core.membership

    @property
    def begun_s(self) -> int:
        """Unix seconds at which the run was begun or resumed, roughly."""
        return self.membership.epoch.id.term

    def go_on_from(self, restart: Restart) -> None:
        """Have the run go on from a restart, by the run key; all keep their places."""
        term = int(self._context.clock.unix_s())
        self.agreement.announce_by_key(self.membership.epoch.places, restart, least_term=term)
        self.beginning = self.membership.epoch.restart

    def say(self, word: str) -> None:
        """Tell all peers a word, by the run key."""
        self.agreement.say_by_key(word, least_term=int(self._context.clock.unix_s()))

    async def run(self) -> None:
        """Take part, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.agreement.run)
            tasks.start_soon(self._follow)
            tasks.start_soon(self._look)

    async def _follow(self) -> None:
        """Write each epoch down."""
        while True:
            epoch = self.membership.epoch
            await self._context.changed.wait_for(partial(self._is_past, epoch))
            newest = self.membership.epoch
            log.info("epoch_begun term=%d number=%d seats=%d", newest.id.term, newest.id.number, len(newest.seats))
            first = self.membership.epoch_of(newest.id._replace(number=0)) or newest
            if newest.id.term != epoch.id.term and first.restart != epoch.restart:
                self.beginning = first.restart  # the run was resumed, or has gone back, by the run key
            await self._keep()

    def _is_past(self, epoch: Epoch) -> bool:
        return self.membership.epoch is not epoch

    async def _look(self) -> None:
        """Look for peers that may know of other epochs."""
        while True:
            with suppress(CallError):  # the DHT has logged it
                self._acquaintances = sorted(set(await self._find_others()) - {self._context.identity.peer_id})
            await anyio.sleep(LOOK_S)

    async def _keep(self) -> None:
        kept = Kept(self.beginning, self.membership.known.chain)
        try:
            await self._context.threads.run(self._file.write, kept)
        except OSError as error:
            log.warning("epochs_not_kept reason=%s", error)


async def _find(
    context: KeyContext, transport: Transport, kept: Kept | None, find_others: FindOthers, start: Start
) -> tuple[Kept | None, bool]:
    """Ask those who may know of epochs.

    Returns:
        the newest ones, or those that were kept; and whether nobody is there who could know any
    """
    statements, manifest = Statements(context.run_id, context.identity), context.resolved.hash
    has_warned = False
    while True:
        others: set[str] | None = None
        with suppress(CallError):  # the DHT has logged it
            others = set(await find_others()) - {context.identity.peer_id}
        told = await find_epochs(transport, statements, manifest, others, FIND_S) if others else []
        if told and (kept is None or told[-1].epoch.id > kept.newest.id):
            restart = told[-1].epoch.restart
            is_same = kept is not None and restart == kept.newest.restart
            kept = Kept(kept.beginning if kept is not None and is_same else restart, tuple(told))
        may_begin = start.resume is not None or (others is not None and not start.is_under_way)
        if kept is not None or may_begin:
            return kept, not others
        if not has_warned:
            log.warning("epochs_not_told reason=the run is under way, and nobody who knows its epochs answers")
        has_warned = True
        await anyio.sleep(LOOK_S)


def _come(context: KeyContext, known: Kept | None, start: Start, *, is_alone: bool) -> _Come:
    """The epochs that a coordinator begins with: those that are known, or one that it makes with the run key."""
    peer_id, now_s = context.identity.peer_id, context.clock.unix_s()
    seats = known.newest.seats if known is not None else ()
    life = max(int(1000 * now_s), *(seat.life + 1 for seat in seats if seat.peer == peer_id), 0)
    if known is not None and start.resume is None:
        # Of its own earlier lives alone there is nobody left who could vote.
        if any(seat.peer != peer_id for seat in seats) or (start.has_trained and not is_alone):
            return _Come(known, life)
        newest = known.newest
        made = _made(context, life, newest.id.term + 1, newest.restart, newest.begun, newest.word)
        return _Come(Kept(known.beginning, (made,)), life)
    after_term, restart = 0, start.resume or BEGINNING
    if known is not None:
        after_term, latest = known.newest.id.term, known.newest.restart
        if restart.first_round <= latest.first_round:
            rules = rules_of(context.resolved.manifest)
            restart = rules.restart(latest.first_round, restart.optimizer_step, restart.entries)
    made = _made(context, life, max(int(now_s), after_term + 1), restart)
    return _Come(Kept(made.epoch.restart, (made,)), life)


def _made(
    context: KeyContext, life: int, term: int, restart: Restart, begun: tuple[int, ...] = (), word: str = ""
) -> Certified:
    """The first epoch of a term, in which this coordinator is alone."""
    me = Seat(context.identity.peer_id, life, context.ticket.own)
    new_id = EpochId(term, me, 0)
    if restart.epoch is None and restart != BEGINNING:
        restart = restart._replace(epoch=new_id)
    epoch = Epoch(new_id, (Place(COORDINATORS, me),), restart, begun, word)
    return Certified(epoch, (Statements(context.run_id, context.run_key).sign(KeySigned(epoch.hash)),))
