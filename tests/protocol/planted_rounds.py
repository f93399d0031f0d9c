"""Mistakes in rounds that schedules have to find: each replaces one method of the core."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from swarm_peer.policy.data.ledger import Ledger
from swarm_peer.protocol.grants import Grants
from swarm_peer.protocol.leader import Leader
from swarm_peer.protocol.log import Cut, Log, Name, Part
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.round_rules import RoundRules
from swarm_peer.protocol.work import Work


def cuts_take_names_twice(self: Leader, seats: Any, base: Any) -> Any:
    """Two members bring the same guest."""
    ready = self.round.ready
    parts = (ready[seat].part for seat in seats)
    return tuple(p._replace(brings=tuple(each for each in p.brings if each.base in ((), base))) for p in parts)


_part_of = Member.part_of
_parts = Leader._parts


def computes_from_any_base(self: Work, number: int, base: Any, **given: Any) -> bool:
    """Microbatches of one round may come from several bases."""
    present = self.open.get(number)
    return present is not None and _computed(self, number, present.computed.base or base, **given)


_computed = Work.computed


def other_bases_count(self: Leader, seats: Any, base: Any) -> Any:
    """What was computed from another base than the round's is in its cut all the same."""
    before = self.round.ready
    try:
        self.round.ready = {seat: _of_base(ready, base) for seat, ready in before.items()}
        return _parts(self, seats, base)
    finally:
        self.round.ready = before


def _of_base(ready: Any, base: Any) -> Any:
    brings = tuple(each._replace(base=base) for each in ready.part.brings)
    return replace(ready, part=ready.part._replace(brings=brings))


def cuts_repeat_samples(self: Leader, seats: Any, base: Any) -> Any:
    """Samples that have counted before count again."""
    with patch.object(Ledger, "repeats", lambda self, samples: False):
        return _parts(self, seats, base)


def members_see_no_repeats(self: Any, ledger: Any) -> bool:
    """A member is in a cut that holds a sample twice."""
    return False


def grants_name_slices_twice(self: Grants, ledger: Any) -> Any:
    """Two seats are granted the same slice."""
    return list(itertools.islice(ledger.unfinished(ledger.current_pass), 4))


def grants_forget_who_left(self: Grants, roster: Any, ledger: Any, next_round: int, decided_in: int) -> None:
    """What a seat has read that left just now is granted anew before it is decided."""
    _follow(self, roster, ledger, next_round, next_round - 1)


_follow = Grants.follow


def members_mind_no_base(self: Member, cut: Any, mine: Any, present: Any) -> bool:
    """A member is in a cut that its own base is not of."""
    return True


def statements_of_any_cut_count(self: Leader, sender: Any, statement: Any) -> Any:
    """A result of an earlier attempt counts for a later one."""
    if self.is_synced and self.round.attempt is not None:
        self.round.attempt.said[sender] = statement


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
    self.log, self.state, self.ledger, self.reign = Log(self.stage, restart), "", None, None
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
    return part._replace(brings=tuple(each._replace(name=Name(each.name.seat, 0)) for each in part.brings))


MISTAKES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    each.__name__: (owner, method, each)
    for owner, method, each in (
        (Leader, "_parts", cuts_take_names_twice),
        (Work, "computed", computes_from_any_base),
        (Leader, "_parts", other_bases_count),
        (Leader, "_parts", cuts_repeat_samples),
        (Cut, "is_repeating", members_see_no_repeats),
        (Grants, "_free", grants_name_slices_twice),
        (Grants, "follow", grants_forget_who_left),
        (Member, "_is_sound", members_mind_no_base),
        (Leader, "take_said", statements_of_any_cut_count),
        (Leader, "_sync", leaders_do_not_ask),
        (Member, "take_entries", members_take_any_log),
        (Member, "begin_anew", stays_after_a_restart),
        (Member, "look_whether_lost", nothing_is_lost),
        (RoundRules, "fills", closes_at_any_count),
        (Member, "part_of", names_lack_their_round),
    )
}


# Schedules and walks that find them, alone or two together: most rules are held by two parts, by the leader that makes
# a cut and by the members that are asked to be in it. Not found in 700 walks: other_bases_count with
# members_mind_no_base, computes_from_any_base (such work is left out or void), leaders_do_not_ask with
# members_take_any_log, statements_of_any_cut_count (an agreement names its cut), stays_after_a_restart (rounds go on
# counting).
FOUND_BY: dict[tuple[str, ...], int] = {
    ("cuts_take_names_twice",): 16,
    ("cuts_repeat_samples",): 16,
    ("grants_name_slices_twice",): 1,
    ("closes_at_any_count",): 0,
    ("names_lack_their_round",): 0,
}
FOUND_BY_WALKS: dict[tuple[str, ...], int] = {
    ("nothing_is_lost",): 122,
    ("cuts_repeat_samples", "members_see_no_repeats"): 57,
    ("cuts_take_names_twice", "members_see_no_repeats"): 57,
}


@contextmanager
def planted(*names: str) -> Iterator[None]:
    """While the context is open, the core makes these mistakes."""
    with ExitStack() as stack:
        for name in names:
            owner, method, mistake = MISTAKES[name]
            stack.enter_context(patch.object(owner, method, mistake))
        yield


__all__ = ["MISTAKES", "planted"]
