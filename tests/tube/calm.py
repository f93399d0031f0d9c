"""What must hold once faults have ceased, and the peers that are left have come together and gone on with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from going_back import newest_of_all
from hosts import Host
from invariants import Invariants, Place
from small import is_small

from coordinator.checkpoints.store import CheckpointStore
from swarm_peer.errors import UserError
from swarm_peer.policy.data.ranges import SampleId, ranges_of
from swarm_peer.policy.recovery import SNAPSHOTS_KEPT
from swarm_peer.policy.step_state import Phase
from swarm_peer.runtime.replica import StageReplica

# Updates of a stage whose samples are looked at: where stage-mates average periodically, one of these is of a period.
NUM_UPDATES = 5
# Rounds from when all peers are together. Where parts of a stage come together late, each round holds little until the
# one behind has made up for the other, and so does the period in which it has; and after so many, all keep snapshots.
ROUNDS_TOGETHER = 3 * NUM_UPDATES + 1
ROUNDS_TO_LEARN = 2 * NUM_UPDATES
# A peer takes half as long to copy a state, and a coordinator to fetch all, unless faults have left them or links slow.
# Where peers keep snapshots for less, a state may be gone before all of it has come.
COPY_S, FETCH_S = 8.0, 15.0
# What they may hold, by what they should: a peer that is the first in a round may launch more than its share.
LEAST, MOST = 0.8, 1.6
# By so many rounds, or fewer, the ledger of a state is ahead of the updates that have led to it.
ROUNDS_AHEAD = {"synchronous": 0, "delayed": 1, "periodic": NUM_UPDATES}


class Accounts(NamedTuple):
    """What hosts have reported of samples that no update will hold, or that two hold."""

    lost: int
    repeated: int

    @classmethod
    def of(cls, hosts: Iterable[Host]) -> Accounts:
        known = [host.metrics for host in hosts]
        return cls(
            sum(int(each.lost_samples._value.get()) for each in known),
            sum(int(each.repeated_samples._value.get()) for each in known),
        )


def check_accounts(watch: Invariants, begun: Mapping[Host, Accounts], hurried: Collection[Host]) -> None:
    """While all are together, no sample gets lost, and none counts twice.

    After halves of stage 0 have gone on without each other, one gives its updates up, and reports their samples lost.
    Who has heard that they have counted takes them for repeated if another peer, that has not heard, reads their slice.

    Args:
        begun: what each had reported before
        hurried: those that have moved since, and had no time to hand over what they held
    """
    looked_at = [host for host in begun if host not in hurried]
    before = Accounts(sum(begun[host].lost for host in looked_at), sum(begun[host].repeated for host in looked_at))
    now = Accounts.of(looked_at)
    repeated = now.repeated - before.repeated
    if now.lost != before.lost or repeated > _num_read_again(watch) * len(watch.tube.peers()):
        watch.tube.violation(f"samples get lost, or count twice, though all are together: {before} became {now}")


def _num_read_again(watch: Invariants) -> int:
    """The samples of the last updates of stage 0 that count once, and that updates which were given up held, too."""
    if 0 not in watch.records.ends:
        return 0
    end = watch.records.ends[0]
    on_the_way = {place for place, _ in watch.line(end)}
    given_up = {name for place, ids in watch.forked().items() if place not in on_the_way for name in watch.names(ids)}
    counts = Counter(name for _, ids in watch.history(end) for name in watch.names(ids))
    newest = {name for _, ids in islice(watch.history(end), ROUNDS_TOGETHER) for name in watch.names(ids)}
    return sum(counts[name] == 1 for name in newest & given_up)


def check_calm(
    watch: Invariants, peers: Sequence[Host], stores: Sequence[tuple[Host, CheckpointStore]], round_s: float
) -> None:
    """Look at what the peers and coordinators have done since faults ceased.

    Args:
        peers: those that are left
        stores: where each coordinator that has acted since they are together saves checkpoints
        round_s: how long each of the last rounds took, in the mean
    """
    kept_s = SNAPSHOTS_KEPT * watch.manifest.recovery.snapshot_every * round_s
    watch.check_snapshots()
    watch.check_shares()
    replicas = [(host, host.peer._replica) for host in peers if host.peer is not None]
    serving = [(host, replica) for host, replica in replicas if replica is not None]
    _check_sizes(watch)
    if kept_s >= COPY_S:
        _check_copies(watch, serving)
        _check_restorable(watch, serving)
    _check_checkpoints(watch, stores, kept_s)
    of_first = [(host, replica) for host, replica in serving if replica.stage == 0]
    rounds = [replica.step.round_number for _, replica in of_first if replica.step.phase in (Phase.OPEN, Phase.ENDING)]
    for host, replica in of_first:
        _check_ledger(watch, host, replica, min([replica.step.round_number, *rounds]))


def _check_sizes(watch: Invariants) -> None:
    """The last updates of each stage hold about as many samples as a global batch each.

    While stage-mates do without a peer that has held them up time and again, its share is lost, as it reports.
    """
    wanted = NUM_UPDATES * watch.manifest.training.global_batch_size
    for stage, place in sorted(watch.records.ends.items()):
        updates = list(islice(watch.history(place), NUM_UPDATES))
        sizes = [watch.size(ids) for _, ids in updates]
        did_without = any((stage, number - 1) in watch.records.without for number, _ in updates)
        least = 0 if did_without else LEAST * wanted
        if len(sizes) == NUM_UPDATES and not least <= sum(sizes) <= MOST * wanted:
            watch.tube.violation(f"long after faults have ceased, updates of stage {stage} hold {sizes} samples")


def _check_copies(watch: Invariants, replicas: Sequence[tuple[Host, StageReplica]]) -> None:
    """Who has taken snapshots of its own stage for a while keeps one of the next stage, too."""
    num_stages, least = watch.manifest.stages.count, 3 * watch.manifest.recovery.snapshot_every
    for host, replica in replicas:
        assert host.peer is not None
        settled = watch.records.settled[(host.name, replica.stage, replica.step.timeline.first_round)]
        next_stage = (replica.stage + 1) % num_stages
        stages = {ref.stage for ref, _ in host.peer._parts.snapshots.snapshots()}
        if settled >= least and not host.storage.has_failed and not {replica.stage, next_stage} <= stages:
            watch.tube.violation(
                f"{host} has settled {settled} rounds of stage {replica.stage} in a row, and keeps snapshots of "
                f"stages {sorted(stages)}"
            )


def _check_restorable(watch: Invariants, replicas: Sequence[tuple[Host, StageReplica]]) -> None:
    """If a stage were lost now, the run would go back by few updates: all stages have snapshots of the same step."""
    # Who is just moving has no weights, and is at no step.
    steps = [replica.step for _, replica in replicas if replica.step.phase is not Phase.EMPTY]
    if not steps or any(host.storage.has_failed for host, _ in replicas):
        return
    oldest = min(steps, key=lambda step: step.optimizer_step)
    every, num_stages = watch.manifest.recovery.snapshot_every, watch.manifest.stages.count
    newest = newest_of_all([host for host, _ in replicas], oldest.timeline, num_stages)
    if newest is None or newest < oldest.optimizer_step - 2 * every - 1:
        watch.tube.violation(
            f"the peers are at step {oldest.optimizer_step}, and their newest snapshots of all stages are of {newest}"
        )


def _check_checkpoints(watch: Invariants, stores: Sequence[tuple[Host, CheckpointStore]], kept_s: float) -> None:
    """A coordinator that acts has saved one of the last checkpoints that were due, if peers could keep snapshots."""
    # In small pieces a state takes far longer.
    if kept_s < FETCH_S or is_small(watch.tube.schedule.seed):
        return
    if any(host.storage.has_failed for host in watch.tube.peers()):
        return
    end = max(watch.records.ends.values())
    steps = watch.records.beginnings[end].optimizer_step
    for coordinator, store in stores:
        if not has_checkpoint(watch, store, end, steps - ROUNDS_TOGETHER):
            watch.tube.violation(f"{coordinator} acts, and has no checkpoint of late: {steps} steps")


def _check_ledger(watch: Invariants, host: Host, replica: StageReplica, oldest: int) -> None:
    """The samples of a ledger are those in the updates, but for what was lost or is on its way.

    Args:
        oldest: the round of the stage's last peer, which may have yet to tell what it has lost in it
    """
    step, leases = replica.step, replica.parts.step_loop._leases
    place = (0, step.timeline.first_round, step.round_number, step.history_hash)
    if leases is None or leases._ledger is None or place not in watch.records.beginnings:
        return
    ledger = leases._ledger
    in_updates = {name for _, ids in watch.history(place) for name in watch.names(ids)}
    if lacking := ledger.lacking(ranges_of(in_updates)):
        watch.tube.violation(f"{host} would read {len(lacking)} samples again that updates hold, such as {lacking[:2]}")
    drawn = set(watch.names(watch.records.microbatches))
    counted = drawn.difference(ledger.lacking(ranges_of(drawn)))
    lost = counted - in_updates - set(_under_way(watch, place, oldest))
    told = watch.records.told_lost[0] + watch.records.told_lost[None] + watch.gone_back_in_vain(0)
    died = watch.records.died[0]
    if len(lost) > told + died:
        watch.tube.violation(
            f"{host} takes {len(lost)} samples for counted that no update holds, such as {sorted(lost)[:2]}; "
            f"{told} were reported lost, and peers of stage 0 held {died} as they died"
        )


def _under_way(watch: Invariants, place: Place, oldest: int) -> Iterator[SampleId]:
    """The samples of the newest rounds; and those that peers brought before they died or left, which nobody reports."""
    _, first_round, _, _ = place
    newest = oldest - ROUNDS_AHEAD[watch.manifest.averaging.mode]
    yield from watch.names(watch.brought_by_gone(0))
    for key, ids in watch.records.brought.items():
        if key[:2] == (0, first_round) and key[2] >= newest:
            yield from watch.names(ids)


def helps(watch: Invariants, coordinator: Host, store: CheckpointStore) -> bool:
    """Whether a coordinator has a checkpoint of the run, from which a lost stage could go on."""
    if not (coordinator.is_alive and watch.records.beginnings):
        return False
    return has_checkpoint(watch, store, max(watch.records.beginnings, key=lambda place: (place[1], place[2])))


def has_checkpoint(watch: Invariants, store: CheckpointStore, place: Place, least: int = 0) -> bool:
    """Whether there is a checkpoint on the way to a place, of that optimizer step or a later one."""
    on_the_way = {
        (begun.optimizer_step, begun.timeline.creation_round(number))
        for (_, _, number, _), begun in watch.line(place)
        if begun.optimizer_step >= least
    }
    try:
        return store.newest_that(lambda *checkpoint: checkpoint in on_the_way, watch.manifest) is not None
    except UserError:
        return False
