"""Members that lie: each kind changes what one member sends, in statements of its own, and in messages of anybody's.

A liar cannot sign as another seat. It has one ticket of at least three in each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from checks import Violation
from cluster import Process
from world import World

from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.epochs import COORDINATORS
from swarm_peer.protocol.log import Close, Committed, Contribution, Cut, Entry, Have, Name, Part, Pass
from swarm_peer.protocol.messages import (
    Begin,
    Blame,
    Commit,
    Counted,
    Cutting,
    Entries,
    Granted,
    Head,
    Message,
    Missing,
    Prepare,
    Ready,
    Said,
    Sent,
    Status,
    Wanted,
)
from swarm_peer.protocol.statements import Ballot, Seat, Signed, Silent, Stuck

FAR = 1 << 20


class Liar:
    """What one member sends, changed.

    Args:
        world: that it lives in
    """

    def __init__(self, world: World, process: Process):
        self.world = world
        self.process = process

    @property
    def me(self) -> Seat:
        """Its seat."""
        assert self.process.core is not None
        return self.process.core.membership.me

    def sign(self, body: Any) -> Signed[Any]:
        """Sign a statement as itself."""
        return Signed(body, self.me.peer.encode())

    def sent(self, message: Message) -> list[Message]:
        """What it sends in place of a message."""
        body = self.change(message.body)
        return [message if body is message.body else replace(message, body=body)]

    def change(self, body: Any) -> Any:
        """What stands in a message in place of this."""
        return body

    def own_entry(self, committed: Committed) -> Committed:
        """An entry of its own making after a true one, which it alone has signed."""
        cut = committed.entry.cut
        name = Name(self.me, cut.round + 1)
        part = Part(self.me, (Contribution(name, FAR, (), ()),))
        made = replace(cut, round=cut.round + 1, parent=committed.entry.hash, parts=(part,), root="mine")
        have = self.sign(Have(self.me, made.epoch, made.hash, "mine"))
        return Committed(Entry(made, "mine"), (have,), Close(made.round, committed.close.counts))


class FalseCounts(Liar):
    """It has had a million samples computed, of each round."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        if isinstance(body, Counted):
            return replace(body, done=self.sign(replace(body.done.body, samples=FAR)))
        if isinstance(body, Close):
            counts = [self.sign(replace(each.body, samples=FAR)) for each in body.counts if each.body.author == self.me]
            return Close(body.round, tuple(counts) or body.counts)
        return body


class FalseReceipts(Liar):
    """It has computed a million samples for everybody who asks."""

    def change(self, body: Any) -> Any:
        """See Liar: the receipts are changed where they are made."""
        assert self.process.core is not None
        for member in self.process.core.members.values():
            for present in member.work.open.values():
                present.computed.callers = dict.fromkeys(present.computed.callers, FAR)
        return body


class EndsRounds(Liar):
    """It tells everybody that the round is over, and of an entry that it alone has signed."""

    def sent(self, message: Message) -> list[Message]:
        """See Liar."""
        assert self.process.core is not None
        lies: list[Message] = []
        for member in self.process.core.members.values():
            counts = tuple(
                self.sign(replace(d.body, samples=FAR)) for d in _counts_of(message) if d.body.author == self.me
            )
            lies.append(replace(message, body=Close(member.log.next_round, counts)))
            if member.log.committed:
                own = self.own_entry(member.log.committed[-1])
                reign = member.reign or message.epoch
                lies += [
                    replace(message, body=body)
                    for body in (
                        Commit(own),
                        Entries(member.stage, reign, (*member.log.committed, own), None),
                        Head(member.stage, (own,)),
                        Status(member.stage, (own,), own.entry.hash, (own.close,), (), ()),
                    )
                ]
        return [message, *lies] if self.world.random.random() < 0.3 else [message]


class OtherResults(Liar):
    """It has another result than the others, and another state."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        if isinstance(body, Said) and isinstance(body.statement.body, Have):
            return Said(body.stage, self.sign(replace(body.statement.body, digest="mine")))
        if isinstance(body, Ready):
            return replace(body, root="mine" if body.root else "")
        return body


class Blames(Liar):
    """It has no result, and the others are to blame."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        from swarm_peer.protocol.log import Blamed

        if isinstance(body, Said) and isinstance(body.statement.body, Have):
            assert self.process.core is not None
            others = [s for s in self.process.core.epoch.roster(body.stage) if s != self.me]
            said = body.statement.body
            return Blame(body.stage, self.sign(Blamed(self.me, said.epoch, said.cut, tuple(others))))
        return body


class SaysNothing(Liar):
    """It is ready, and then says nothing of the result."""

    def sent(self, message: Message) -> list[Message]:
        """See Liar."""
        return [] if isinstance(message.body, Said) else [message]


class Accuses(Liar):
    """Everybody else is silent, and its leader is stuck."""

    def sent(self, message: Message) -> list[Message]:
        """See Liar."""
        assert self.process.core is not None
        epoch = self.process.core.epoch
        others = frozenset(seat for seat in epoch.seats if seat != self.me)
        lies: list[Any] = [Missing(others), Wanted(self.sign(Silent(self.me, epoch.id, others)))]
        for stage in self.process.core.members:
            if (leader := epoch.leader(stage)) not in (None, self.me):
                lies.append(Wanted(self.sign(Stuck(self.me, epoch.id, stage, leader))))
        return [message, *(replace(message, body=body) for body in lies)]


class LeadsAlone(Liar):
    """As a leader, it cuts its rounds of itself alone, and tells that others agree."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        if isinstance(body, Cutting):
            own = tuple(part for part in body.cut.parts if part.seat == self.me)
            return Cutting(replace(body.cut, parts=own))
        if isinstance(body, Commit):
            cut = body.committed.entry.cut
            made = replace(cut, parts=tuple(part for part in cut.parts if part.seat == self.me))
            have = self.sign(Have(self.me, made.epoch, made.hash, body.committed.entry.digest))
            agree = tuple(self.sign(Pass(self.me, made.epoch, made.hash)) for seat in cut.seats if seat != self.me)
            return Commit(Committed(Entry(made, body.committed.entry.digest), (have, *agree), body.committed.close))
        return body


class LeadsNowhere(Liar):
    """As a leader, it makes no cuts, and grants nothing."""

    def sent(self, message: Message) -> list[Message]:
        """See Liar."""
        return [] if isinstance(message.body, Cutting | Granted | Commit) else [message]


class FalseBases(Liar):
    """As a leader, it says that the round begins from other heads, and that its stage has another."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        if isinstance(body, Begin):
            return replace(body, base=tuple("mine" for _ in body.base))
        if isinstance(body, Cutting):
            return Cutting(replace(body.cut, base=tuple("mine" for _ in body.cut.base)))
        if isinstance(body, Head) and body.committed:
            return Head(body.stage, (*body.committed[:-1], self.own_entry(body.committed[-1])))
        return body


class GrantsAll(Liar):
    """As a leader, it grants everybody the same slices, and more samples than the batch has."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        if isinstance(body, Granted):
            return Granted(replace(body.grant, up_to=FAR))
        return body


class CutsTwice(Liar):
    """As a leader, it tells each member of another cut with the same number."""

    def sent(self, message: Message) -> list[Message]:
        """See Liar."""
        if isinstance(message.body, Cutting):
            cut: Cut = message.body.cut
            parts = tuple(each for each in cut.parts if self.world.random.random() < 0.7) or cut.parts
            return [replace(message, body=Cutting(replace(cut, parts=parts)))]
        return [message]


class HugeNumbers(Liar):
    """Whatever it counts, asks for, brings or numbers is beyond all reason."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        huge = 1 << 61
        if isinstance(body, Counted):
            wants = replace(body.wants, samples=huge, claimed=huge, slices=huge)
            return replace(body, done=self.sign(replace(body.done.body, samples=huge)), wants=wants)
        if isinstance(body, Prepare):
            return Prepare(Ballot(huge, body.ballot.proposer))
        if isinstance(body, Ready):
            brings = (
                Contribution(Name(self.me, body.round), huge, (), ()),
                Contribution(Name(self.me, 0), 1, (), ()),
                Contribution(Name(self.me._replace(life=99), body.round), 1, (WindowRange(0, 0, 0, huge),), ()),
            )
            return replace(body, part=Part(self.me, (*body.part.brings, *brings)))
        return body


class FalseReigns(Liar):
    """As a leader, it leads since an epoch that is to come, or one that is long over."""

    def change(self, body: Any) -> Any:
        """See Liar."""
        if isinstance(body, Entries):
            number = self.world.random.choice((0, 1 << 30))
            return replace(body, reign=body.reign._replace(number=number))
        return body


KINDS: tuple[type[Liar], ...] = (
    HugeNumbers,
    FalseReigns,
    FalseCounts,
    FalseReceipts,
    EndsRounds,
    OtherResults,
    Blames,
    SaysNothing,
    Accuses,
    LeadsAlone,
    LeadsNowhere,
    FalseBases,
    GrantsAll,
    CutsTwice,
)


def _counts_of(message: Message) -> list[Any]:
    body = message.body
    return [body.done] if isinstance(body, Counted) else list(body.counts) if isinstance(body, Close) else []


class WorldWithLiar(World):
    """A schedule with a liar, in a swarm of at least three tickets a stage."""

    def __init__(self, seed: int, kind: Callable[[World, Process], Liar], num_faults: int = 3):
        self._liar: Liar | None = None
        super().__init__(seed, num_faults=num_faults)
        # A leader now and then, a member otherwise; of any stage.
        peers = [peer for peer in sorted(self.processes) if not self.processes[peer].has_key]
        random = Random(f"{seed}")
        oldest = [peer for peer in peers if peer.endswith("0")]
        self._liar = kind(self, self.processes[random.choice(oldest if random.random() < 0.5 else peers)])

    def _add_processes(self) -> None:
        self._add("c0", "operator", frozenset({COORDINATORS}), has_key=True)
        for stage in range(self.rules.num_stages):
            for number in range(self.random.choice((3, 4))):
                self._add(f"p{stage}{number}", f"t{stage}{number}", frozenset({stage}))

    def send(self, process: Process, sent: list[Sent]) -> None:
        """See World: what the liar sends is changed."""
        liar = self._liar
        if liar is not None and process is liar.process and process.core is not None:
            sent = [(target, message) for target, each in sent for message in liar.sent(each)]
        super().send(process, sent)


def run(seed: int, kind: type[Liar], num_faults: int = 3) -> WorldWithLiar:
    """Run one schedule with a liar of this kind.

    Raises:
        Violation: an invariant is broken
    """
    world = WorldWithLiar(seed, kind, num_faults)
    world.run()
    return world


__all__ = ["KINDS", "Liar", "Violation", "run"]
