"""The names of a checkpoint's states, by which peers ask for them (docs/protocol.md, 'Roots').

A state that peers gave as a snapshot carries the entry that names it. Where a checkpoint is of another run, whose
statements prove nothing in this one, each state gets an entry of its own: it names the state's root as any other does,
and the run key answers for it as it signs the epoch that begins with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.checkpoints.folder import Checkpoint, CheckpointDamaged
from swarm_peer.errors import InvalidMessage
from swarm_peer.protocol.log import Close, Committed, Cut, Entry
from swarm_peer.protocol.statements import Snapshot, hash_of
from swarm_peer.runtime.network.agreement import NO_EPOCH
from swarm_peer.runtime.state.index import StageState
from swarm_peer.runtime.state.named_snapshots import NamedState
from swarm_peer.runtime.state.roots import root_of
from swarm_peer.wire.agreement import Statements


def entries_of(entries: Sequence[bytes], round_number: int, statements: Statements) -> list[Committed]:
    """By stage, the entries of this run that name states; none if some state has none, or they do not fit together.

    Checks signatures: call it from a worker thread.

    Args:
        entries: as the states carry them
        round_number: that begins with these states
    """
    try:
        found = [statements.decode(Committed, entry) for entry in entries]
    except InvalidMessage:
        return []
    cuts = [committed.entry.cut for committed in found]
    fit = [cut.stage for cut in cuts] == list(range(len(cuts))) and all(cut.root for cut in cuts)
    return found if fit and {(cut.round, cut.base) for cut in cuts} == {(round_number, cuts[0].base)} else []


def names_of(optimizer_step: int, entries: Sequence[Committed]) -> frozenset[Snapshot]:
    """The names that entries give to states of an optimizer step."""
    return frozenset(
        Snapshot(optimizer_step, each.entry.cut.stage, each.entry.hash, hash_of(each.entry.cut.base))
        for each in entries
    )


def load_named(checkpoint: Checkpoint, stage: int, known: Committed | None, statements: Statements) -> NamedState:
    """The state of a stage with the entry that names it. Takes seconds per gigabyte: call it from a worker thread.

    Args:
        known: the entry that `entries_of` has found; None if the state is to get one of its own

    Raises:
        CheckpointDamaged: its file has changed since, or is not what the entry names
    """
    state = checkpoint.load_stage(stage)
    root = root_of(state.tensors, state.ledger)
    if known is None:
        known = _own_entry(stage, state, root)
    cut = known.entry.cut
    if (cut.round, cut.parent, cut.root) != (state.round_number, state.history_hash, root):
        raise CheckpointDamaged(checkpoint.path, f"the state of stage {stage} is not what its entry names")
    return NamedState(known, replace(state, entry=statements.encode(known)))


def _own_entry(stage: int, state: StageState, root: str) -> Committed:
    """An entry that nobody has agreed on, always the same one for a state."""
    cut = Cut(
        stage=stage,
        round=state.round_number,
        epoch=NO_EPOCH,
        attempt=0,
        parent=state.history_hash,
        root=root,
        base=(),
        averages=False,
        parts=(),
    )
    return Committed(Entry(cut, ""), (), Close(state.round_number, ()))
