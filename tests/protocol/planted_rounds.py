"""Mistakes in rounds that schedules have to find: each replaces one method of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from swarm_peer.protocol import leader
from swarm_peer.protocol.core import RoundRules
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import Log, Name, Part
from swarm_peer.protocol.member import Member


def cuts_take_names_twice(self: Leader, *args: Any) -> None:
    """Two members bring the same guest."""
    _cut(self, *args)
    if (cut := self._round.cut) is not None:
        kept = [tuple(b for b in self._round.ready[s].brings if b.base in ((), cut.base)) for s in cut.seats]
        self._round.cut = replace(cut, parts=tuple(map(Part, cut.seats, kept)))


_cut = Leader._cut
_part_of = Member.part_of


def computes_from_any_base(self: Member, number: int, samples: Any, base: Any) -> bool:
    """Microbatches of one round may come from several bases."""
    present = self.open.get(number)
    if present is None or present.is_drained:
        return False
    present.base = present.base or base
    present.samples += samples
    return True


def other_bases_count(self: Leader, *args: Any) -> None:
    """What was computed from another base than the round's is in its cut all the same."""
    _cut(self, *args)
    cut, taken, parts = self._round.cut, set[Name](), []
    for seat in cut.seats if cut is not None else ():
        brings = tuple(each for each in self._round.ready[seat].brings if each.name not in taken)
        taken |= {each.name for each in brings}
        parts.append(Part(seat, brings))
    if cut is not None:
        self._round.cut = replace(cut, parts=tuple(parts))


def members_mind_no_base(self: Member, part: Part, cut: Any) -> bool:
    """A member is in a cut that its own base is not of."""
    return True


def statements_of_any_cut_count(self: Leader, sender: Any, statement: Any) -> Any:
    """A result of an earlier attempt counts for a later one."""
    if self.is_synced and self._round.cut is not None:
        self._round.said[sender] = statement


def leaders_do_not_ask(self: Leader, now_s: float, epoch: Any) -> None:
    """A new leader takes its own log for the stage's."""
    self._follow(self._member.log)
    self.is_synced = True


def members_take_any_log(self: Member, entries: Any) -> None:
    """A member gives up entries that its new leader lacks, though nobody has gone on without them."""
    theirs = self.log_of(entries.committed)
    if theirs is not None:
        self.take_log(theirs, entries.reign)


def stays_after_a_restart(self: Member, restart: Any) -> None:
    """A member keeps what it had before the run began anew."""
    self.log, self.state, self.reign = Log(self.stage, restart), "", None
    self.closes = {}


def nothing_is_lost(self: Member, evidence: Any) -> bool:
    """A leader never finds that entries are gone."""
    return False


def closes_at_any_count(self: RoundRules, close: Any, epoch_of: Any) -> bool:
    """A round is over as soon as anything was counted."""
    return bool(close.counts)


def names_lack_their_round(self: Member, number: int) -> Part | None:
    """A contribution is named by its seat alone."""
    part = _part_of(self, number)
    if part is None:
        return None
    return Part(part.seat, tuple(each._replace(name=Name(each.name.seat, 0)) for each in part.brings))


MISTAKES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    each.__name__: (owner, method, each)
    for owner, method, each in (
        (Leader, "_cut", cuts_take_names_twice),
        (Member, "computed", computes_from_any_base),
        (Leader, "_cut", other_bases_count),
        (Member, "_is_of_base", members_mind_no_base),
        (Leader, "take_said", statements_of_any_cut_count),
        (Leader, "_sync", leaders_do_not_ask),
        (Member, "take_entries", members_take_any_log),
        (Member, "begin_anew", stays_after_a_restart),
        (Member, "look_whether_lost", nothing_is_lost),
        (RoundRules, "fills", closes_at_any_count),
        (Member, "part_of", names_lack_their_round),
    )
}


# Seeds of schedules that find them. The others were not found in 90: another rule catches each of them, too (a leader
# takes a longer log also when it comes late; an agreement names its cut; rounds go on counting after a restart), or
# too few schedules have one round computed from two bases.
FOUND_BY = {
    "cuts_take_names_twice": 5,
    "other_bases_count": 13,
    "closes_at_any_count": 0,
    "names_lack_their_round": 0,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """While the context is open, the core makes this mistake."""
    owner, method, mistake = MISTAKES[name]
    with patch.object(owner, method, mistake):
        yield


__all__ = ["MISTAKES", "leader", "planted"]
