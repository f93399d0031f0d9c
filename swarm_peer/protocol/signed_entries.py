"""Entries that the members of a stage have signed already, as a new leader learns them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarm_peer.protocol.log import Close, Committed, Entry, Have, Log, Pass
from swarm_peer.protocol.messages import Status
from swarm_peer.protocol.statements import Seat, Signed
from swarm_peer.protocol.work import RoundContext


def signed_entries(
    log: Log, statuses: Collection[Status], closes: Iterable[Close], context: RoundContext
) -> list[Committed]:
    """Entries that follow from what members have signed for cuts of the round after a log.

    Args:
        closes: that this seat knows, besides those of the statuses
    """
    said = [pair for status in statuses for pair in status.said]
    next_, cuts = (log.next_round, log.head), {cut.hash: cut for cut, _ in said}
    cuts = {name: cut for name, cut in cuts.items() if (cut.round, cut.parent) == next_}
    signed: dict[tuple[str, str | None], dict[Seat, Signed[Have] | Signed[Pass]]] = {}
    for _, each in said:
        body, cut = each.body, cuts.get(each.body.cut)
        origin = context.epoch_of(cut.epoch) if cut is not None else None
        if origin is not None and body.author in origin.roster(log.stage):
            digest = body.digest if isinstance(body, Have) else None
            signed.setdefault((body.cut, digest), {})[body.author] = each
    entries = [(Entry(cuts[cut], digest), have) for (cut, digest), have in signed.items() if digest is not None]
    if not entries:
        return []
    # Any that fills the batch shows that the round was over, of whichever heads.
    known = [*closes, *(close for status in statuses for close in status.closes)]
    close = next((each for each in known if each.round == log.next_round and context.may_close(each, log)), None)
    if close is None:
        return []
    agree = {cut: each for (cut, digest), each in signed.items() if digest is None}
    found = [
        Committed(entry, tuple({**agree.get(entry.cut.hash, {}), **have}.values()), close) for entry, have in entries
    ]
    return [each for each in found if context.is_agreed(each)]
