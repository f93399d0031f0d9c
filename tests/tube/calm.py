"""What must hold once faults have ceased, and the peers that are left have come together and gone on with the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from hosts import Host
from invariants import Invariants, members_of
from records import Place
from small import is_small

from coordinator.checkpoints.store import CheckpointStore
from swarm_peer.errors import UserError
from swarm_peer.model.costs import SNAPSHOTS_KEPT
from swarm_peer.protocol.epochs import KEPT_EPOCHS
from swarm_peer.protocol.log import KEPT_ENTRIES
from swarm_peer.protocol.member import Member

# Updates of a stage whose samples are looked at: where stage-mates average periodically, one of these is of a period.
NUM_UPDATES = 5
# Rounds from when all peers are together; after so many, all keep snapshots.
ROUNDS_TOGETHER = 3 * NUM_UPDATES + 1
ROUNDS_TO_LEARN = 2 * NUM_UPDATES
# A peer takes half as long to copy a state, and a coordinator to fetch all, unless faults have left them or links slow.
# Where peers keep snapshots for less, a state may be gone before all of it has come.
COPY_S, FETCH_S = 8.0, 15.0
# Rounds of which anything may be kept: what lies between two entries, and the updates for stage-mates.
MOST_KEPT = 8
# A coordinator that is asked for them keeps more epochs than other seats, by those since the last one of the key.
MOST_EPOCHS = 4 * KEPT_EPOCHS


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
    watch.check_shares()
    _check_sizes(watch)
    for host in peers:
        _check_memory(watch, host)
    if kept_s >= COPY_S and not any(host.storage.has_failed for host in peers):
        _check_restorable(watch, peers)
    _check_checkpoints(watch, stores, kept_s)


def check_lost(watch: Invariants, since: Collection[Place], lost: Mapping[str, int], hurried: Collection[str]) -> None:
    """While all are together, no sample gets lost, unless stage-mates had to go on without somebody.

    Args:
        since: the heads of all stages then
        lost: what each host had reported by then
        hurried: hosts that have moved since, and had no time to give what they held
    """
    if _has_left_out(watch, since):
        return
    more = watch.records.samples_lost.copy()
    more.subtract(lost)
    if found := {host: num for host, num in more.items() if num and host not in hurried}:
        watch.tube.violation(f"samples get lost though all are together: {found}")


def _has_left_out(watch: Invariants, since: Collection[Place]) -> bool:
    """Whether some cut since then has left a seat out that had a place."""
    for place in watch.ends.values():
        for entry in watch.records.line(place):
            if (place[0], entry.hash) in since:
                break
            if len(entry.cut.parts) < watch.records.roster_sizes.get((place[0], entry.hash), 0):
                return True
    return False


def _check_sizes(watch: Invariants) -> None:
    """The last updates of each stage hold about as many samples as a global batch each.

    Where a cut has left a seat out, what that holds is lost, and told.
    """
    wanted = NUM_UPDATES * watch.manifest.training.global_batch_size
    for place in sorted(watch.ends.values()):
        entries = list(islice(watch.records.line(place), NUM_UPDATES))
        sizes = [watch.records.size(watch.records.ids_of(place[0], entry)) for entry in entries]
        left_out = any(
            len(entry.cut.parts) < watch.records.roster_sizes.get((place[0], entry.hash), 0) for entry in entries
        )
        least, most = watch.sizes
        least = 0 if left_out else least
        if len(sizes) == NUM_UPDATES and not least * wanted <= sum(sizes) <= most * wanted:
            watch.tube.violation(f"long after faults have ceased, updates of stage {place[0]} hold {sizes} samples")


def _check_memory(watch: Invariants, host: Host) -> None:
    """Nobody keeps more and more of what is over."""
    replica = None if host.peer is None else host.peer._replica
    if replica is None or host.agreement is None:
        return
    driver, core = replica.parts.driver, host.agreement.core
    kept = {
        "gradients": len(driver.gradients.names) / 2,
        "updates": len(driver.updates) - KEPT_ENTRIES,
        "ledgers": len(driver._ledgers),
        "results of cuts": len(driver._results),
        "closes and cuts": len(core._known_s),
    }
    for member in core.members.values():
        kept["open rounds"] = len(member.work.open)
        kept["guests"] = len(member.work.guests)
        kept["contributions to tell of"] = len(member.work.lost)
        kept["entries"] = len(member.log.committed) - KEPT_ENTRIES
    known = core.membership.known
    kept["epochs"] = (len(known.chain) + known.num_past) / MOST_EPOCHS * MOST_KEPT
    if found := {what: num for what, num in kept.items() if num > MOST_KEPT}:
        watch.tube.violation(f"{host} keeps {found}")


def _check_restorable(watch: Invariants, peers: Sequence[Host]) -> None:
    """If a stage were lost now, the run would go back by few updates: all stages have snapshots of the same step."""
    members = [member for host in peers for member in members_of(host).values() if member.reign is not None]
    if not members:
        return
    oldest = min(member.log.optimizer_step for member in members)
    newest = newest_of_all(watch, peers)
    every = watch.manifest.recovery.snapshot_every
    if newest is None or newest < oldest - 2 * every - 1:
        text = f"the peers are at step {oldest}, and their newest snapshots of all stages are of {newest}"
        watch.tube.violation(text)


def newest_of_all(watch: Invariants, hosts: Sequence[Host]) -> int | None:
    """The newest optimizer step of which some hosts offer snapshots of all stages; None if there is none."""
    stages: dict[tuple[int, str], set[int]] = {}
    for host in hosts:
        for name in host.agreement.core.membership.holds[2] if host.agreement is not None else ():
            stages.setdefault((name.optimizer_step, name.base), set()).add(name.stage)
    num_stages = watch.manifest.stages.count
    return max((step for (step, _), held in stages.items() if len(held) == num_stages), default=None)


def furthest_of(members: Sequence[Member]) -> int:
    """The furthest optimizer step of some peers' logs."""
    return max((member.log.optimizer_step for member in members), default=0)


def _check_checkpoints(watch: Invariants, stores: Sequence[tuple[Host, CheckpointStore]], kept_s: float) -> None:
    """A coordinator that acts has saved one of the last checkpoints that were due, if peers could keep snapshots."""
    # In small pieces a state takes far longer.
    if kept_s < FETCH_S or is_small(watch.tube.schedule.seed):
        return
    if any(host.storage.has_failed for host in watch.tube.peers()):
        return
    place = watch.ends[0]
    steps = watch.step_at(place)
    for coordinator, store in stores:
        if not has_checkpoint(watch, store, place, steps - ROUNDS_TOGETHER):
            watch.tube.violation(f"{coordinator} acts, and has no checkpoint of late: {steps} steps")


def has_checkpoint(watch: Invariants, store: CheckpointStore, place: Place, least: int = 0) -> bool:
    """Whether there is a checkpoint on the way to a place, of that optimizer step or a later one."""
    on_the_way = {
        (watch.step_at((place[0], entry.hash)), entry.cut.round + 1)
        for entry in watch.records.line(place)
        if watch.step_at((place[0], entry.hash)) >= least
    }
    try:
        return store.newest_that(lambda *checkpoint: checkpoint in on_the_way, watch.manifest) is not None
    except UserError:
        return False
