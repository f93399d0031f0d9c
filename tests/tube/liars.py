"""One member of a swarm that lies, a class for each kind of lie. To add a kind, write one more.

A liar is a real peer with a ticket of its own. Its core is honest; what it sends is changed on the way out, or it says
something more, all of it signed with its own key. Where a lie is about work or states and not about words, a method of
the real classes is another one on the liar's host alone. Each lie that is told is counted. `HonestInvariants` says what
must hold all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import torch
from hosts import RUN_KEY, Host, identity_of
from loop import HOST, OUTSIDE
from wrapping import around

from swarm_peer.policy.data.ranges import WindowRange, merge_ranges
from swarm_peer.protocol.core import Core
from swarm_peer.protocol.epochs import Certified, Restart
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import (
    Blamed,
    Close,
    Committed,
    Contribution,
    Entry,
    Have,
    Name,
    Part,
    Pass,
    Receipt,
)
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.messages import (
    Begin,
    Blame,
    Body,
    Commit,
    Counted,
    Cutting,
    Entries,
    Evidence,
    Granted,
    Head,
    Message,
    Missing,
    News,
    Ready,
    Said,
    Sent,
    Status,
    Wanted,
)
from swarm_peer.protocol.statements import Accepted, Ballot, Offer, Seat, Signed, Silent, Snapshot, Stuck
from swarm_peer.protocol.work import Work
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.network.agreement import Agreement, ticket_of
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.runtime.state.stored import StoredState, make_stored, read_stored

if TYPE_CHECKING:
    from tube import Tube

# In place of a kind of lie: nobody lies.
HONEST = "honest"
# Pause between two lies that answer nothing.
EVERY_S = 1.0
# A leader that does nothing is deposed after a minute and a half (docs/security.md, 'Hold up rounds').
DEPOSED_S = 110.0
# Identities that one ticket brings. A hundred take the machine that runs the tube too long.
IDENTITIES = 30

LIES: dict[str, type[Liar]] = {}


def lie(kind: type[Liar]) -> type[Liar]:
    """Register a kind of lie: FalseCounts is `false_counts`."""
    name = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).lstrip("_")
    LIES[name] = kind
    return kind


class Liar:
    """One member that lies.

    Attributes:
        stage: that it serves; None for any
        leads: whether it leads its stage as it begins; None for either
        price_s: how long the others may lose pace, if it has led: to be rid of a leader that does nothing takes so long
        unearned: samples of a round that may be believed though nobody has computed them
        told: how many lies it has told
    """

    stage: int | None = None
    leads: bool | None = None
    unearned = 0

    def __init__(self, tube: Tube):
        self.tube = tube
        self.rng = tube.world.rng("lie")
        self.told = 0
        self.price_s = 0.0
        self.host: Host
        self._next_s = 0.0

    @staticmethod
    def owner_of(name: str, lie: str) -> str:
        """The peer whose ticket a peer has come by: its own, or that of the liar that has brought it."""
        if lie == "false_receipts" and name == PARTNERS[1]:
            return PARTNERS[0]
        return name.partition("-")[0]

    # --- who lies

    def begin(self) -> bool:
        """Choose who lies; False if there is nobody yet who can."""
        able = [host for host in self.tube.peers() if not self.tube.may_fail(host) and self._is_able(host)]
        if not able:
            return False
        self.host = self.rng.choice(able)
        self.tube.world.liars.append(self.host)
        self.tube.world.note("lies from now on", self.host, type(self).__name__)
        return True

    def _is_able(self, host: Host) -> bool:
        if host.agreement is None:
            return False
        core = host.agreement.core
        for stage, member in core.members.items():
            has_place = member.reign is not None and not member.is_behind and self.stage in (None, stage)
            if has_place and self.leads in (None, stage in core.leaders) and not member.log.is_empty:
                return True
        return False

    @contextmanager
    def lying(self) -> Iterator[None]:
        """While the context is open, it lies."""

        def tick(call: Any, core: Core, now_s: float) -> list[Sent]:
            self.price_s = DEPOSED_S if core.leaders else self.price_s
            sent = self._changed(core, call(now_s))
            if now_s >= self._next_s:
                self._next_s = now_s + EVERY_S
                for peer, body in self.more(core):
                    self.tell()
                    sent.append((peer, Message(core.membership.me, core.epoch.id, body)))
            return sent

        def receive(call: Any, core: Core, now_s: float, message: Message) -> list[Sent]:
            return self._changed(core, call(now_s, message))

        with ExitStack() as stack:
            self.replace(stack, Core, "tick", tick)
            self.replace(stack, Core, "receive", receive)
            self.work(stack)
            yield

    def replace(self, stack: ExitStack, owner: type, name: str, call: Callable[..., Any]) -> None:
        """Have `call(original, *args)` run in place of a method, on the liar's host alone."""

        def only_here(original: Any, *args: Any, **options: Any) -> Any:
            return (call if HOST.get() is self.host else _as_it_is)(original, *args, **options)

        stack.enter_context(around(owner, name, only_here))

    def _changed(self, core: Core, sent: list[Sent]) -> list[Sent]:
        changed: list[Sent] = []
        for peer, message in sent:
            bodies = list(self.change(core, peer, message.body))
            if bodies != [message.body]:
                self.tell()
            changed += [(peer, replace(message, body=body)) for body in bodies]
        return changed

    def tell(self) -> None:
        """Count a lie."""
        self.told += 1

    # --- what a kind of lie says

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """What it sends to a peer in place of this."""
        return (body,)

    def more(self, core: Core) -> Iterable[tuple[str, Body]]:
        """What it says besides, and to whom."""
        return ()

    def work(self, stack: ExitStack) -> None:
        """Replace methods of the real classes by others."""

    # --- what lies are made of

    def sign(self, body: Any) -> Signed[Any]:
        """A statement, signed by the liar."""
        agreement = self.host.agreement
        assert agreement is not None
        return agreement.statements.sign(body)

    def others(self, core: Core) -> list[Seat]:
        """All other seats of the run."""
        return [seat for seat in core.epoch.seats if seat != core.membership.me]

    def mates(self, core: Core, stage: int) -> list[Seat]:
        """The other seats of a stage."""
        return [seat for seat in core.epoch.roster(stage) if seat != core.membership.me]

    def made_up(self, core: Core, member: Member) -> Committed:
        """An entry that it alone has signed, after the newest one, and computed from heads that nobody has."""
        newest, me = member.log.committed[-1], core.membership.me
        number, batch = newest.entry.cut.round + 1, member._context.batch
        part = Part(me, (Contribution(Name(me, number), 8 * batch, (), ()),))
        cut = replace(
            newest.entry.cut,
            round=number,
            epoch=core.epoch.id,
            parent=newest.entry.hash,
            parts=(part,),
            base=tuple(f"made up {stage}" for stage in range(len(newest.entry.cut.base))),
        )
        have = self.sign(Have(me, cut.epoch, cut.hash, "mine"))
        return Committed(Entry(cut, "mine"), (have,), Close(number, newest.close.counts))


def _as_it_is(original: Any, _: Any, *args: Any, **options: Any) -> Any:
    return original(*args, **options)


# --- counts


@lie
class FalseCounts(Liar):
    """It has had eight batches of each round computed, and has receipts for no more than it has done."""

    stage = 0

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        me, batch = core.membership.me, self.tube.resolved.manifest.training.global_batch_size
        if isinstance(body, Counted):
            yield replace(body, done=self.sign(replace(body.done.body, samples=8 * batch)))
            yield Close(body.done.body.round, (self.sign(replace(body.done.body, samples=8 * batch)),))
        elif isinstance(body, Close):
            own = [self.sign(replace(each.body, samples=8 * batch)) for each in body.counts if each.body.author == me]
            yield replace(body, counts=tuple(own) or body.counts)
        else:
            yield body


# With one ticket: at stages 0 and 1.
PARTNERS = ("p4", "p5")


@lie
class FalseReceipts(Liar):
    """The same, and a peer of its owner in the next stage has signed for all of it."""

    stage = 0
    unearned = 3  # the part of that stage that the owner's peer is

    def begin(self) -> bool:
        """See Liar: the two have come by one ticket."""
        hosts = [self.tube.world.host(name) for name in PARTNERS]
        if not all(host.is_alive and self._has_place(host) for host in hosts):
            return False
        self.host = hosts[0]
        self.tube.world.liars += hosts
        return True

    @staticmethod
    def _has_place(host: Host) -> bool:
        return host.agreement is not None and bool(host.agreement.core.members)

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        partner = self.tube.world.liars[1]
        if not isinstance(body, Counted) or not body.done.body.base or partner.agreement is None:
            yield body
            return
        done, author = body.done.body, partner.seat
        batch = self.tube.resolved.manifest.training.global_batch_size
        receipt = partner.agreement.statements.sign(
            Receipt(author, core.epoch.id, core.membership.me, done.round, 8 * batch, done.base)  # type: ignore[arg-type]
        )
        others = tuple(each for each in done.receipts if each.body.author != author)
        yield replace(body, done=self.sign(replace(done, samples=8 * batch, receipts=(*others, receipt))))


@lie
class Ghosts(Liar):
    """Seats that were never invited have computed batches for it, and have given it their work."""

    stage: int | None = 0

    def ghosts(self, core: Core) -> list[Seat]:
        """Seats of identities that nobody knows, with tickets that are none."""
        names = (f"ghost {number}" for number in range(8))
        return [Seat(identity_of(name).peer_id, 1, identity_of(f"{name}'s ticket").peer_id) for name in names]

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        if not isinstance(body, Counted):
            yield body
            return
        done, epoch, receipts = body.done.body, core.epoch.id, list[Signed[Receipt]]()
        batch, ghosts = self.tube.resolved.manifest.training.global_batch_size, self.ghosts(core)
        for number, ghost in enumerate(ghosts):
            receipt = Receipt(ghost, epoch, core.membership.me, done.round, batch, done.base)
            receipts.append(_statements_of(self.host, f"ghost {number}").sign(receipt))
        told = self.sign(replace(done, samples=8 * batch, receipts=(*done.receipts, *receipts)))
        yield Counted(told, body.wants, (*body.guests, *(Name(ghost, done.round) for ghost in ghosts)))


@lie
class GhostWork(Ghosts):
    """It brings contributions in the names of seats that were never invited, of the most weight that one may have."""

    stage = None

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar: work is changed where it is brought."""
        return (body,)

    def work(self, stack: ExitStack) -> None:
        """See Liar: it holds a gradient for each, so that it can average what it brings."""

        def brings(call: Any, work: Work, number: int) -> tuple[Contribution, ...]:
            found: tuple[Contribution, ...] = call(number)
            own, replica = work.own(number), None if self.host.peer is None else self.host.peer._replica
            if own is None or replica is None or own.name not in replica.parts.driver.gradients.names:
                return found
            gradients = replica.parts.driver.gradients
            means, _ = gradients.get(own.name)
            agreement = self.host.agreement
            assert agreement is not None
            for ghost in self.ghosts(agreement.core):
                contribution = Contribution(Name(ghost, own.name.round), work._context.most.weight, (), own.base)
                gradients.put(contribution.name, means, contribution.weight)
                found = (*found, contribution)
            self.tell()
            return found

        self.replace(stack, Work, "brings", brings)


def _statements_of(host: Host, name: str) -> Any:
    """Signs as an identity that follows from a name."""
    assert host.agreement is not None
    return type(host.agreement.statements)(RUN_KEY.peer_id, identity_of(name))


# --- rewinds


@lie
class Rewinds(Liar):
    """Entries are lost, others are silent, leaders stuck, and the run has begun anew: it tells all of that to all."""

    def more(self, core: Core) -> Iterable[tuple[str, Body]]:
        """See Liar."""
        me, epoch = core.membership.me, core.epoch
        wishes: list[Any] = [
            Silent(me, epoch.id, frozenset(self.others(core))),
            Offer(me, epoch.id, 1 << 20, 1 << 20, frozenset(self._snapshots(core))),
        ]
        for stage, member in core.members.items():
            if member.log.is_empty or member.reign is None:
                continue
            made = self.made_up(core, member)
            log = (*member.log.committed[-3:], made)
            if (leader := epoch.leader(stage)) not in (None, me):
                wishes.append(Stuck(me, epoch.id, stage, leader))
            for seat in self.others(core):
                yield seat.peer, Evidence(made)
                yield seat.peer, Head(stage, (made,))
            for seat in self.mates(core, stage):
                yield seat.peer, Entries(stage, member.reign, log, made)
                yield seat.peer, Entries(stage, epoch.id, member.log.committed[-1:], made)
                yield seat.peer, Status(stage, log, made.entry.hash, (made.close,), (), ())
        restart = Restart(epoch.restart.first_round + 1000, 0)
        for anew in (replace(epoch, id=epoch.id.next(), restart=restart), replace(epoch, id=epoch.id._replace(term=9))):
            vote = self.sign(Accepted(me, epoch.id, Ballot(1, me), anew.hash))
            for seat in self.others(core):
                yield seat.peer, News((Certified(anew, (vote,)),))
        for seat in self.others(core):
            yield seat.peer, Missing(frozenset(self.others(core)))
            for wish in wishes:
                yield seat.peer, Wanted(self.sign(wish))

    def _snapshots(self, core: Core) -> Iterable[Snapshot]:
        for stage in range(core.membership.rules.num_stages):
            yield Snapshot(1 << 20, stage, "made up", "made up")


# --- rounds and attempts


@lie
class RoundFurther(Liar):
    """It is some rounds further than the others, and its stage is as well."""

    def more(self, core: Core) -> Iterable[tuple[str, Body]]:
        """See Liar."""
        me = core.membership.me
        for stage, member in core.members.items():
            if member.log.is_empty or member.reign is None:
                continue
            number = member.log.next_round + self.rng.choice([1, 2, 50, 1 << 30])
            made, part = self.made_up(core, member), Part(me, (Contribution(Name(me, number), 1, (), ()),))
            have = self.sign(Have(me, core.epoch.id, "a later cut", "mine"))
            for seat in self.others(core):
                yield seat.peer, Ready(stage, number, made.entry.hash, "", part)
                yield seat.peer, Said(stage, have)
                yield seat.peer, Begin(stage, number, made.entry.cut.base, True)
                yield seat.peer, Close(number, made.close.counts)
                yield seat.peer, Head(stage, (made,))
                yield seat.peer, Commit(made)
                yield seat.peer, Status(stage, (made,), made.entry.hash, (made.close,), (), ())


@lie
class LastTry(Liar):
    """It has the result of a later attempt, and others have failed in it; as a leader, it makes later attempts."""

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        me = core.membership.me
        if isinstance(body, Said) and isinstance(body.statement.body, Have):
            cut = f"attempt {self.rng.randrange(9)}"
            yield Said(body.stage, self.sign(replace(body.statement.body, cut=cut)))
            blamed = tuple(self.mates(core, body.stage))
            yield Blame(body.stage, self.sign(Blamed(me, core.epoch.id, cut, blamed)))
        elif isinstance(body, Cutting):
            yield Cutting(replace(body.cut, attempt=body.cut.attempt + self.rng.choice([0, 3, 9])))
        else:
            yield body


@lie
class BlamesAll(Liar):
    """It has no result of any attempt, and all others are to blame."""

    leads = False

    def blamed(self, core: Core, stage: int) -> tuple[Seat, ...]:
        """Whom it blames."""
        return tuple(self.mates(core, stage))

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        if isinstance(body, Said) and isinstance(body.statement.body, Have):
            said = body.statement.body
            yield Blame(body.stage, self.sign(Blamed(said.author, said.epoch, said.cut, self.blamed(core, body.stage))))
        else:
            yield body


@lie
class BlamesOne(BlamesAll):
    """It has no result of any attempt, and always the same honest mate is to blame."""

    def blamed(self, core: Core, stage: int) -> tuple[Seat, ...]:
        """See BlamesAll."""
        return tuple(self.mates(core, stage)[-1:])


# --- samples


class NamesSamples(Liar):
    """It names samples that it has not read."""

    stage = 0

    def named(self, member: Member, number: int) -> list[WindowRange]:
        """These samples."""
        raise NotImplementedError

    def work(self, stack: ExitStack) -> None:
        """See Liar."""
        chosen: dict[int, list[WindowRange]] = {}

        def own(call: Any, work: Work, number: int) -> Contribution | None:
            found: Contribution | None = call(number)
            core = None if self.host.agreement is None else self.host.agreement.core
            if found is None or core is None or (member := core.members.get(0)) is None or member.work is not work:
                return found
            present = work.open.get(number)
            if present is None or not (present.is_drained or number in member.closes):
                return found
            if number not in chosen:
                chosen[number] = self.named(member, number)
                self.tell()
            return found._replace(samples=merge_ranges([*found.samples, *chosen[number]]))

        self.replace(stack, Work, "own", own)


@lie
class NamesUnread(NamesSamples):
    """In each round it names samples that nobody has read, or that have counted before."""

    def named(self, member: Member, number: int) -> list[WindowRange]:
        """See NamesSamples."""
        cuts = [committed.entry.cut for committed in member.log.committed[-4:]]
        before = [item for cut in cuts for item in cut.samples]
        if before and self.rng.random() < 0.5:
            return [self.rng.choice(before)]
        start = self.rng.randrange(100, 200)
        return [WindowRange(0, self.rng.randrange(64), start, start + 4)]


@lie
class NamesThoseOfMates(NamesSamples):
    """In each round it names the samples that its stage-mates read in that round."""

    def named(self, member: Member, number: int) -> list[WindowRange]:
        """See NamesSamples: they go on in the slices that they had begun."""
        cuts = [committed.entry.cut for committed in member.log.committed[-4:]]
        read = {
            item.slice_id: item.end
            for cut in cuts
            for each in cut.brings
            if each.name.seat != member.me
            for item in each.samples
        }
        return [WindowRange(*slice_id, end, end + 4) for slice_id, end in sorted(read.items())]


# --- states


class Poisons(Liar):
    """It gives other weights than its own."""

    def __init__(self, tube: Tube):
        super().__init__(tube)
        self._poisoned: dict[bytes, StoredState] = {}

    def poisoned(self, stored: StoredState) -> StoredState:
        """The same state with other weights, and with hashes that match them."""
        self.tell()
        if stored.key not in self._poisoned:
            state = read_stored(stored)
            assert state is not None
            tensors = {
                name: tensor + 1.0 if tensor.dtype == torch.float32 else tensor
                for name, tensor in state.tensors.items()
            }
            made = make_stored(stored.index.stage, stored.index.kind, replace(state, tensors=tensors))
            self._poisoned[stored.key] = made
        return self._poisoned[stored.key]


@lie
class PoisonedStates(Poisons):
    """It gives newcomers, and mates that lack updates, other weights and updates than it has."""

    leads = True  # its newest state is asked for first

    def work(self, stack: ExitStack) -> None:
        """See Liar."""

        async def find(call: Any, server: StateServer, asked: Any) -> StoredState:
            made = self.poisoned(await call(asked))
            return server._remember(made)

        self.replace(stack, StateServer, "find", find)


@lie
class PoisonedSnapshots(Poisons):
    """It gives the coordinator, and those that keep copies, snapshots with other weights."""

    def work(self, stack: ExitStack) -> None:
        """See Liar."""

        def find(call: Any, snapshots: NamedSnapshots, asked: Any) -> StoredState:
            made, source = self.poisoned(call(asked)), next(iter(snapshots.sources.values()))
            return source._remember(made)  # type: ignore[attr-defined,no-any-return]

        self.replace(stack, NamedSnapshots, "_find_asked", find)


# --- many identities


@lie
class Identities(Liar):
    """It brings many identities by its ticket at once, which take places in its stage and are never ready."""

    pause_s = 0.0

    def work(self, stack: ExitStack) -> None:
        """See Liar."""
        stage = next(iter(self._core.members))
        for number in range(IDENTITIES):
            self.tube.world.loop.call_later(
                number * self.pause_s, functools.partial(self._bring, number, stage), context=OUTSIDE
            )

    @property
    def _core(self) -> Core:
        assert self.host.agreement is not None
        return self.host.agreement.core

    def _bring(self, number: int, stage: int) -> None:
        if self.host.is_alive:
            host = self.tube._make_host(f"{self.host.name}-{number}", 1.0, 0.0)
            self.tube.world.liars.append(host)
            host.start(functools.partial(self._live, host, stage))

    async def _live(self, host: Host, stage: int) -> None:
        """Take a place, answer whoever asks for a sign of life, and do nothing else."""
        host.join_dht()
        transport, resolved = host.open_transport(), self.tube.resolved
        context: Any = _Surroundings(host, resolved)
        agreement = Agreement(
            context=context,
            transport=transport,
            life=int(host.clock.unix_s() * 1000),
            first=self._core.membership.known.chain,
            ticket=ticket_of(host.passes, host.peer_id),
        )
        host.own_agreement = agreement
        await transport.serve(CallDispatcher(manifest_hash=resolved.hash, calls=agreement.calls))
        membership = agreement.core.membership
        membership.desired = membership.prepared = frozenset({stage})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agreement.run)
            while self.host.is_alive:
                await anyio.sleep(0.5)
                membership.prepared |= {stage} - membership.stages
                for member in agreement.core.members.values():
                    self.told += member.state != member.log.head
                    member.state = member.log.head  # so it is no newcomer that lacks much
            tasks.cancel_scope.cancel()


@lie
class IdentitiesInTurn(Identities):
    """It brings a new identity every eight seconds: each has kept nobody waiting before."""

    pause_s = 8.0


class _Surroundings:
    """What an identity without a replica agrees in."""

    def __init__(self, host: Host, resolved: Any):
        self.run_id, self.resolved, self.identity = RUN_KEY.peer_id, resolved, host.identity
        self.clock, self.random, self.changed = host.clock, host.random, Condition()


# --- leaders


@lie
class CutsOneOut(Liar):
    """As a leader, it leaves one honest member out of all cuts."""

    leads = True

    def work(self, stack: ExitStack) -> None:
        """See Liar."""

        def cut(call: Any, leader: Leader, now_s: float, epoch: Any, base: Any, seats: Any, *rest: Any) -> None:
            kept = self.kept(leader, epoch, list(seats))
            if kept != list(seats):
                self.tell()
            call(now_s, epoch, base, kept, *rest)

        self.replace(stack, Leader, "_cut", cut)

    def kept(self, leader: Leader, epoch: Any, seats: list[Seat]) -> list[Seat]:
        """The seats that it does not leave out."""
        victim = next(seat for seat in epoch.roster(leader._member.stage) if seat != leader._member.me)
        return [seat for seat in seats if seat != victim]


@lie
class CutsAllOut(CutsOneOut):
    """As a leader, it leaves everybody else out of all cuts."""

    def kept(self, leader: Leader, epoch: Any, seats: list[Seat]) -> list[Seat]:
        """See CutsOneOut."""
        return [seat for seat in seats if seat == leader._member.me] or seats


@lie
class TwoCuts(Liar):
    """As a leader, it tells each member another cut of the same attempt."""

    leads = True

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        if not isinstance(body, Cutting):
            yield body
            return
        seats = [part.seat.peer for part in body.cut.parts]
        left = next((seat for seat in seats if seat not in (peer, core.membership.me.peer)), None)
        yield Cutting(replace(body.cut, parts=tuple(part for part in body.cut.parts if part.seat.peer != left)))


@lie
class TwoCloses(Liar):
    """As a leader, it says that a round is over by other counts to each, and before it is."""

    stage = 0
    leads = True

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        if not isinstance(body, Close):
            yield body
            return
        counts = list(body.counts)
        self.rng.shuffle(counts)
        yield Close(body.round, tuple(counts[: self.rng.randint(1, len(counts))]))
        yield Close(body.round + 1, tuple(counts))


@lie
class GrantsNothing(Liar):
    """As a leader of stage 0, it lets nobody else read or launch anything."""

    stage = 0
    leads = True

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        return () if isinstance(body, Granted) else (body,)


@lie
class CutsNothing(Liar):
    """As a leader, it makes no cuts."""

    leads = True

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        return () if isinstance(body, Cutting) else (body,)


@lie
class FewStatements(Liar):
    """As a leader, it commits each cut as soon as it has made it, with a result of its own that it alone has signed."""

    leads = True

    def change(self, core: Core, peer: str, body: Body) -> Iterable[Body]:
        """See Liar."""
        yield body
        if not isinstance(body, Cutting) or (member := core.members.get(body.cut.stage)) is None:
            return
        me, cut = core.membership.me, body.cut
        statements = (
            self.sign(Have(me, cut.epoch, cut.hash, "mine")),
            *(self.sign(Pass(me, cut.epoch, cut.hash)) for _ in cut.seats),
        )
        if (close := member.closes.get(cut.round)) is not None:
            yield Commit(Committed(Entry(cut, "mine"), statements, close))
