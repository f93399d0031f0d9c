"""Does what the protocol asks of one seat in one stage: it drains, averages, applies, catches up, and opens rounds.

Owns the order in which these happen. Must not know how a microbatch is computed, an average made or a state downloaded:
a `Workplace`, an `Averager` and `Sources` do.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled
from torch import Tensor

from swarm_peer.errors import CallError, NotServing
from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.protocol.epochs import Restart
from swarm_peer.protocol.followed_log import FollowedLog
from swarm_peer.protocol.log import Committed, Contribution, Cut, Name, base_of
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.work import OpenRound
from swarm_peer.runtime.context import Clock
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.step.cut_results import Averaging, CutResults
from swarm_peer.runtime.step.driver_parts import AverageFailed, Averager, SeatWeights, Sources, Workplace
from swarm_peer.runtime.step.kept_updates import kept_updates
from swarm_peer.runtime.step.named_gradients import NamedGradients

log = logging.getLogger(__name__)

KEPT_LEDGERS = 4
# Pause after nobody gave what this seat lacks.
RETRY_PAUSE_S = 1.0
# A seat gives its place up if nobody has given it the state that it lacks for so long: all that had it may be gone, and
# the stage has to be empty for the run to go back.
PATIENCE_S = 180.0


class RoundDriver:
    """Drives the rounds of one seat in one stage. Belongs to the event loop's thread.

    Attributes:
        gradients: of the contributions that this seat can bring, by name
        updates: the averages of the newest entries, by their hashes, for stage-mates
    """

    def __init__(
        self,
        *,
        agreement: Agreement,
        stage: int,
        workplace: Workplace,
        averager: Averager,
        sources: Sources,
        clock: Clock,
        ended: Callable[[Committed], None] = lambda committed: None,
        lost: Callable[[list[Contribution]], None] = lambda lost: None,
    ):
        """Make a driver that has done nothing.

        Args:
            ended: told of each entry that was applied
            lost: given the list of contributions that no entry holds, to be told of and emptied
        """
        self.gradients = NamedGradients()
        self.updates: dict[str, list[Tensor]] = {}
        self._agreement = agreement
        self._stage = stage
        self._workplace = workplace
        self._averager = averager
        self._sources = sources
        self._changed = agreement.changed
        self._clock = clock
        self._ended = ended
        self._lost = lost
        self._tasks: TaskGroup | None = None
        self._averaging: Averaging | None = None
        self._results = CutResults()
        # The entry that the weights embody, and the restart that it is of. Where updates are delayed, a round goes on
        # with the weights that it began with, while the core has come further.
        self._weights: tuple[Restart | None, str] = (None, "")
        self._ledgers: dict[str, Ledger] = {}
        # The core's part that this driver works for: a seat that comes back has another one.
        self._served: Member | None = None
        # The log that the work in the accumulator is of: another one in its place holds none of that.
        self._followed = FollowedLog()
        self._opened: tuple[int, int] | None = None
        self._is_leaving = False
        self._complaint: Complaint | None = None
        # Since when nobody has given this seat the state that it lacks.
        self._lacks_since_s: float | None = None
        # Held during each step: what leaves takes the same work out of the accumulator.
        self._working = anyio.Lock()

    @property
    def member(self) -> Member | None:
        """The core's part of this seat; None while it has no place in the stage."""
        return self._agreement.core.members.get(self._stage)

    def complaint(self) -> Complaint | None:
        """That it waits for weights, if nobody has given them at its last try."""
        return self._complaint

    async def run(self) -> None:
        """Do what the core asks for, until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            while True:
                await self._changed.wait_for(lambda: self._next() is not None)
                async with self._working:
                    if (step := self._next()) is not None:
                        await self._try(step)
                        self._tell_lost()
                    self._agreement.look()

    async def _try(self, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step; one that needs what nobody gives is taken again after a pause."""
        try:
            await step()
            self._complaint = self._lacks_since_s = None
        except CallError as error:
            known, words = self._complaint, f"waits for weights: {error}"
            if known is None or known.words != words:
                log.warning("waiting stage=%d reason=%s", self._stage, error)
            since_s = self._clock.monotonic_s() if known is None else known.since_s
            self._complaint = Complaint(Trouble.NO_STATE, since_s, words)
            await anyio.sleep(RETRY_PAUSE_S)

    def _next(self) -> Callable[[], Awaitable[None]] | None:
        """The step that the core asks for; None if there is none."""
        member = self.member
        if self._served not in (None, member):
            return self._leave_place
        if member is None:
            return None
        if self._served is None or self._weights[0] != member.log.restart:
            return self._begin
        if self._followed.log is not member.log:
            return self._give_up
        self._collect(member)
        self._note_ledger(member)
        if member.is_behind:
            return self._catch_up
        # Before the leader has told the log, it may be further than the state that was taken over.
        if member.state == member.log.head and self._due(member) is not None:
            return self._apply
        if member.voiding is not None:
            return self._void
        if member.draining is not None:
            return self._drain
        if member.rooting is not None:
            return self._tell_root
        if member.adopting is not None:
            return self._adopt
        if self._cut_to_average() != self._averaged_cut():
            return self._average
        return self._open if self._opened != self._to_open(member) else None

    def _to_open(self, member: Member) -> tuple[int, int] | None:
        working = member.working
        if self._is_leaving or working is None:
            return None
        if member.work.is_over(member.log):
            # Nothing is trained any more, but the last weights are validated, and given to others.
            last = member.work.begins_with_head(member.log.next_round), 0
            return last if self._weights[1] == member.log.head else None
        return (working.number, working.voids) if member.known_base(working.number) == self._weights[1] else None

    def _member(self) -> Member:
        member = self.member
        assert member is not None, "nothing is done without a place"
        return member

    # --- from one entry to the next

    def _tell_lost(self) -> None:
        if self._served is not None and not self._is_leaving:
            self._served.work.lost += self._followed.take_lost()
            self._lost(self._served.work.lost)

    def keep_weights(self, former: Member) -> None:
        """Have the weights of a place that this peer has lost be those that it comes back with, if they are the newest.

        Nobody else may have them: its stage-mates may have left meanwhile, or still be behind. Those of a seat that has
        given its place up, since entries of its stage are gone, are of no use.
        """
        is_newest = former.state == former.log.head and not former.is_lost
        if is_newest and self._weights == (former.log.restart, former.state):
            self._sources.keep_weights()
            self._agreement.core.prepare(self._stage, former.log, former.state, (), former.ledger)

    async def _leave_place(self) -> None:
        self._shut()
        if (former := self._served) is not None:
            former.work.give_up(former.log.next_round)
            self._tell_lost()
            if not former.work.is_over(former.log):  # until now, averages took what earlier ones had left over
                self._averager.begin(former.log.restart)
        self._served = None

    async def _begin(self) -> None:
        """Begin where the run begins, or begins anew, or with the state that was taken over for this place."""
        member = self._member()
        restart = member.log.restart
        self._shut()
        await self._workplace.discard()
        self._results.forget()
        self._averager.begin(restart)
        self.updates.clear()
        # Those of guests that it has been given since it has this place, or since the run has gone back, stay.
        self.gradients.keep(member.work.guests)
        self._served = member
        self._followed.follow(member.log, member.me)
        if member.state:  # a newcomer has taken it over before
            self._weights = restart, member.state
            return
        self._served = None  # until it is done
        if not member.log.is_empty:
            self._weights, self._served = (restart, ""), member  # others have gone on already
            return
        ledger = await self._sources.begin(restart)
        if self.member is member and member.log.restart == restart:
            base = base_of(self._stage, restart)
            self._weights, self._served = (restart, base), member
            member.reached(base, ledger)

    async def _give_up(self) -> None:
        """Give up what was computed on a log that another one has taken the place of."""
        member = self._member()
        self._shut()
        log = member.log
        self._averager.begin(log.restart)
        for name in self.gradients.names:
            if name.seat == member.me:
                self.gradients.drop(name)
        await self._workplace.give_up()
        self._followed.follow(log, member.me)

    def _due(self, member: Member) -> Committed | None:
        """The entry whose update the weights should have next; None if the round that goes on begins with these."""
        number = member.log.next_round
        while number in member.work.open and member.work.open[number].is_drained:
            number += 1
        bases = (member.known_base(each) for each in range(number, member.log.next_round - 1, -1))
        due = next((base for base in bases if base is not None), None)
        due = member.log.head if member.work.is_over(member.log) else due
        rounds = {head: begun for begun, head in member.log.heads().items()}
        if due is None or self._weights[1] not in rounds or rounds[self._weights[1]] >= rounds[due]:
            return None
        return member.log.since(rounds[self._weights[1]])[0]

    async def _apply(self) -> None:
        """Bring the weights to the next entry, whose update this seat has."""
        member = self._member()
        committed = self._due(member)
        if committed is None:
            return
        entry, restart = committed.entry, member.log.restart
        self._shut()
        await self._workplace.apply(self.updates[entry.hash], self._agreement.core.word_at(entry.cut.epoch))
        if self._is_other(member, restart):
            return
        self._weights = restart, entry.hash
        heads = [head for _, head in sorted(member.log.heads().items())]
        self.updates = kept_updates(self.updates, heads, entry.hash)
        if entry.cut.averages:
            self.gradients.forget(entry.cut.round + 1)
        self._ended(committed)

    def _collect(self, member: Member) -> None:
        """Keep the results of cuts that have become entries, by these."""
        for entry in (committed.entry for committed in member.log.committed):
            if not entry.cut.averages:
                self.updates.setdefault(entry.hash, [])
            elif (averages := self._results.take(entry.cut)) is not None:
                self.updates[entry.hash] = averages
            self._averager.settle(entry.cut)
        self._results.forget(before=member.log.next_round)

    def _note_ledger(self, member: Member) -> None:
        """Keep the ledger as it is after this entry: it goes with the weights, which may come to the entry later."""
        if member.ledger is not None and member.state and member.state not in self._ledgers:
            self._ledgers[member.state] = member.ledger.copy()
            while len(self._ledgers) > KEPT_LEDGERS:
                del self._ledgers[next(iter(self._ledgers))]

    async def _catch_up(self) -> None:
        """Take over the updates that stage-mates have made, or a state."""
        member = self._member()
        restart, before = member.log.restart, member.state
        self._shut()
        try:
            # More may come meanwhile. A state would be older than these, where rounds are quicker than its download.
            # But the log has to hold the entry from which these weights go on.
            while self._weights[1] in member.log.heads().values() and (missing := member.log.after(member.state)):
                committed = missing[0]
                if committed.entry.cut.averages:
                    self.updates[committed.entry.hash] = await self._sources.update(committed)
                if self._is_other(member, restart):
                    return
                member.reached(committed.entry.hash)
                self._note_ledger(member)
        except CallError as error:
            log.info("update_not_given stage=%d reason=%s", self._stage, error)
        if self._is_other(member, restart):  # the weights may be those that this peer comes back with
            return
        if member.is_behind or self._weights[1] not in member.log.heads().values():
            # The entry that names the state's root is that of a round which others have yet to fill without this seat.
            self._workplace.fall_behind()
            try:
                taken = await self._sources.state()
            except CallError as error:
                self._note_lack(error)
                raise
            if self._is_other(member, restart):
                return
            member.work.void_all(member.log.next_round)
            self._weights = restart, taken.weights
            self.updates = dict(taken.updates)
            self.gradients.forget(member.log.next_round)
            member.reached(taken.state, taken.ledger)
            if taken.state == before:
                lack = NotServing("its stage-mates lack the same updates")
                self._note_lack(lack)
                raise lack

    def _note_lack(self, error: CallError) -> None:
        """Give up the place if nobody has the state any more: the run can go back once the stage is empty."""
        now_s = self._clock.monotonic_s()
        self._lacks_since_s = now_s if self._lacks_since_s is None else self._lacks_since_s
        is_alone = len(self._agreement.core.epoch.roster(self._stage)) == 1
        if is_alone or now_s > self._lacks_since_s + PATIENCE_S:
            log.error("state_lost stage=%d reason=nobody gives what this peer lacks: %s", self._stage, error)
            self._lacks_since_s = None
            self._agreement.core.resign(self._stage)

    def _is_other(self, member: Member, restart: Restart) -> bool:
        """Whether the seat has lost its place, or the run has gone back, while the device or the network was at work.

        The weights are void then.
        """
        return self.member is not member or member.log.restart != restart

    # --- within a round

    def _shut(self) -> None:
        self._workplace.close()
        self._opened = None

    async def _open(self) -> None:
        self._shut()
        member = self._member()
        if (to_open := self._to_open(member)) is None:
            return
        number = to_open[0]
        present, before = member.work.open.get(number), Name(member.me, number - 1)
        if present is None or not present.computed.base:
            # The accumulator may hold what came too late for the round before, or what was given up.
            await self._workplace.discard()
            self.gradients.drop(Name(member.me, number))
        if before in self.gradients.names:
            await self._workplace.try_own(self.gradients.get(before)[0])
        if self.member is member and self._to_open(member) == to_open:
            self._opened = to_open
            self._workplace.open(number, self._seat_weights(member))

    def _seat_weights(self, member: Member) -> SeatWeights:
        rounds = {head: number for number, head in member.log.heads().items()}
        entry = self._weights[1]
        return SeatWeights(member.log.restart, entry, rounds[entry], self._ledgers.get(entry))

    async def _void(self) -> None:
        member = self._member()
        self._shut()
        if (present := member.voiding) is not None:
            await self._empty(member, present)

    async def _empty(self, member: Member, present: OpenRound) -> None:
        """Wait until nothing of a round is inside, and give up what was computed in it, if that is void by then."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._average_meanwhile)
            await self._workplace.drain(present.number)
            tasks.cancel_scope.cancel()
        if present.is_void:
            await self._workplace.discard()
            member.voided(present.number)

    async def _drain(self) -> None:
        """Have a round end here, and hold what was computed in it."""
        member = self._member()
        self._shut()
        if (present := member.draining) is None:
            return
        await self._empty(member, present)
        await self._hold(member, present.number)
        member.drained(present.number)

    async def _hold(self, member: Member, number: int) -> None:
        """Hold what was computed in a round that nothing is added to any more."""
        own = member.work.own(number)
        if own is None or own.name in self.gradients.names:
            return
        # Also for a seat that has no time left to leave: what is taken out of the accumulator is nowhere else.
        with anyio.CancelScope(shield=True):
            means, _ = await self._workplace.contribution(number)
            if own.name.round == number:
                # By the weight that cuts know: others may bring it together with their own.
                self.gradients.put(own.name, means, own.weight)

    async def leave(self) -> list[Contribution]:
        """Let nothing in any more. Returns what stage-mates may bring in this seat's place; it is held here."""
        self._is_leaving = True
        async with self._working:
            if (member := self.member) is None:
                return []
            self._shut()
            for number, present in sorted(member.work.open.items()):
                if not present.is_drained:
                    await self._empty(member, present)
                    await self._hold(member, number)
            self._lost(member.work.lost)  # what is given later on is not
            held = member.to_hand_over()
            for contribution in held:
                if contribution.name.seat == member.me and contribution.name not in self.gradients.names:
                    # In the middle of a period, no average was due yet.
                    self.gradients.put(contribution.name, await self._workplace.difference(), contribution.weight)
            return held

    async def _tell_root(self) -> None:
        standing = self._seat_weights(member := self._member())
        member.rooted(standing.entry, await self._workplace.root(standing))

    async def _adopt(self) -> None:
        """Take over the weights of most stage-mates. Later rounds give up what they have computed from its own."""
        member = self._member()
        self._shut()
        later = [number for number, present in sorted(member.work.open.items()) if not present.is_drained]
        for number in later:
            await self._workplace.drain(number)
        if (cut := member.adopting) is None:
            return
        if not await self._sources.adopt(cut.root):
            raise NotServing("most stage-mates have weights that are far from this peer's")
        self._averager.begin(member.log.restart)
        for number in later:
            if number in member.work.open:
                member.work.void(number)
        member.adopted(cut)

    def _cut_to_average(self) -> Cut | None:
        member = self.member
        return member.averaging if member is not None else None

    def _averaged_cut(self) -> Cut | None:
        return self._averaging.cut if self._averaging is not None else None

    async def _average_meanwhile(self) -> None:
        """Have mates that try the average of a round again not wait while the next round is drained here."""
        while True:
            await self._changed.wait_for(lambda: self._cut_to_average() not in (None, self._averaged_cut()))
            await self._average()

    async def _average(self) -> None:
        """Begin to average the newest cut, and stop with any other."""
        if self._averaging is not None:
            self._averaging.scope.cancel()
            self._averaging = None
        if (cut := self._cut_to_average()) is not None and self._tasks is not None:
            self._averaging = Averaging(cut, anyio.CancelScope())
            self._tasks.start_soon(self._average_cut, self._averaging)

    async def _average_cut(self, averaging: Averaging) -> None:
        member, cut = self.member, averaging.cut
        if member is None:
            return
        with averaging.scope:
            own = next(part for part in cut.parts if part.seat == member.me)
            try:
                averages = await self._mean_of(cut, [each.name for each in own.brings])
                digest = await self._workplace.digest(averages) if cut.averages else ""
            except AverageFailed as error:
                log.warning("average_failed round=%d attempt=%d reason=%s", cut.round, cut.attempt, error)
                member.failed(cut, error.blamed)
            else:
                self._results.put(cut, averages)
                member.averaged(cut, digest)
            if self._averaging is averaging:
                self._averaging = None
            self._agreement.look()
            self._changed.notify()

    async def _mean_of(self, cut: Cut, names: Sequence[Name]) -> list[Tensor]:
        if not cut.averages:
            return []
        means, weight = await self._workplace.mean([self.gradients.get(name) for name in names])
        await checkpoint_if_cancelled()  # a thread ends whatever became of the cut meanwhile
        return await self._averager.average(cut, means, weight)
