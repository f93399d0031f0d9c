"""More defects: in what is counted, kept and told. An import registers them in planted.py.

Somebody looked for what the invariants of 2026-11-26 would not see, and thought of these: work that is lost and
reported, or excused, or that no invariant looked at.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import swarm_peer.policy.recovery as recovery_policy
import swarm_peer.runtime.state.recovery as recovery_module
from planted import _all, _wrapped, defect
from swarm_peer.model.delayed_strategy import DelayedStrategy
from swarm_peer.policy.data.sample_ledger import MAX_WINDOWS
from swarm_peer.policy.progress_counter import ProgressCounter
from swarm_peer.runtime.data.leases import SliceLeases
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.state.snapshot_keeper import SnapshotKeeper
from swarm_peer.runtime.step.ahead import AveragingAhead
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.runtime.step.step_loop import StepLoop

import swarm_peer.policy.leadership as leadership_module
import swarm_peer.runtime.mover as mover_module
from coordinator.checkpoints.writer import CheckpointWriter
from coordinator.run.service import RunService
from swarm_peer.errors import NotServing
from swarm_peer.model.clipping import Clipper
from swarm_peer.model.periodic_strategy import PeriodicStrategy
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.data.ranges import ranges_of
from swarm_peer.policy.view import UNDECIDED, PeerState
from swarm_peer.runtime.data.launcher import MicrobatchLauncher
from swarm_peer.runtime.data.slices import SliceWindows
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.network.transport import Reply
from swarm_peer.runtime.stage.rounds import ReplicaRound
from swarm_peer.runtime.stage.stage_server import StageServer
from swarm_peer.runtime.state.state_server import StateServer
from swarm_peer.wire.messages import VoteReply

# --- samples


@defect
def finite_gradients_discarded() -> Any:
    """Gradients that are finite are thrown away, and reported lost: the check is the wrong way round."""

    def discard_if_not_finite(trainer: Any) -> int:
        is_finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in trainer.trained.values())
        return int(trainer.discard_gradients()) if is_finite else 0

    return patch.object(StageTrainer, "discard_if_not_finite", discard_if_not_finite)


@defect
def accumulator_emptied_too_early() -> Any:
    """The accumulator is emptied just before the means of what it holds are made, at all stages."""

    def contributions(original: Any, loop: Any) -> Any:
        loop._trainer.discard_gradients()
        return original(loop)

    return _wrapped(StepLoop, "_contributions", contributions)


@defect
def batch_closed_by_claims() -> Any:
    """A round is over when its global batch has been claimed, not when it has counted: most get nothing of it."""

    async def wait_until_over(original: Any, book: Any, round_number: int) -> None:
        def is_over() -> bool:
            claimed = sum(count.claimed for _, count in book.counter.counts(round_number))
            return bool(claimed >= book.counter.global_batch_size or book.newest_round_seen > round_number)

        await book._context.changed.wait_for(is_over)

    return _wrapped(ProgressBook, "wait_until_over", wait_until_over)


@defect
def others_taken_for_silent() -> Any:
    """All other peers of stage 0 pass for silent: each claims the whole global batch, and updates are of several."""
    return patch.object(ProgressBook, "active", lambda book, peers, patience_s: set())


@defect
def stale_microbatch_dropped() -> Any:
    """A microbatch that a closed round has refused is dropped, as if others read its samples now."""

    def take_waiting(original: Any, launcher: Any, present: Any) -> Any:
        batch = original(launcher, present)
        if batch.claimed not in (None, present):
            batch.generation = -1  # the launcher leaves out those of other generations
        return batch

    return _wrapped(MicrobatchLauncher, "_take_waiting", take_waiting)


@defect
def resumed_slice_misnamed() -> Any:
    """Who takes over a slice reads it from its first window on, under the names of the windows that are left."""

    def init(original: Any, windows: Any, open_windows: Any, left: Any) -> None:
        original(windows, open_windows, left)
        windows._next = left.next_window if left.next_window < MAX_WINDOWS else 0

    return _wrapped(SliceWindows, "__init__", init)


@defect
def rewind_keeps_open_round() -> Any:
    """After a rewind, the samples that the open round had counted pass for counted: nobody reads them again."""

    def begin(original: Any, leases: Any, round_number: int, timeline: Any, ledger: Any, held: Any = ()) -> None:
        is_rewind = leases._ledger is not None and timeline.first_round != leases._timeline_first_round
        counted = list(leases._progress.counter.ranges_from(leases._ended + 1))
        original(leases, round_number, timeline, ledger, held)
        if is_rewind:
            ledger.note(counted)

    return _wrapped(SliceLeases, "begin", begin)


@defect
def present_round_read_again() -> Any:
    """Who leases a slice reads what has counted of it in the present round, which no ledger has yet, once more."""
    return patch.object(ProgressCounter, "ranges_from", lambda counter, round_number: iter(()))


@defect
def brings_the_last_rounds_alone() -> Any:
    """At the end of a period, a peer names the samples of its last two rounds, and not those of earlier ones."""

    def go_on_from(present: ReplicaRound, before: ReplicaRound) -> None:
        present.earlier, present.taken_over = ranges_of(before.names), before.taken_over

    return patch.object(ReplicaRound, "go_on_from", go_on_from)


# --- modes of averaging


@defect
def complete_state_has_next_ledger() -> Any:
    """Where updates are delayed, a snapshot's ledger has the round that ends, whose gradient nothing of it holds."""

    async def retain_update(
        original: Any, server: Any, gradients: Any, history_hash: str, ledger: bytes, **options: Any
    ) -> None:
        server.next_ledger = ledger
        await original(server, gradients, history_hash, ledger, **options)

    async def keep_complete(original: Any, server: Any) -> None:
        await original(server)
        if server._complete is not None:
            step, state = server._complete
            server._complete = step, replace(state, ledger=server.next_ledger)

    return _all(
        _wrapped(StateServer, "retain_update", retain_update), _wrapped(StateServer, "keep_complete", keep_complete)
    )


@defect
def replica_keeps_its_weights() -> Any:
    """After the outer step, a replica goes on from its own weights: its difference has the period's work once more."""

    def end_round(original: Any, strategy: Any, averages: Any) -> Any:
        with patch.object(strategy.trainee, "set_weights", lambda weights: None):
            return original(strategy, averages)

    return _wrapped(PeriodicStrategy, "end_round", end_round)


@defect
def trial_clipped_the_other_way() -> Any:
    """A replica's own update is clipped by how its gradient compares to the mean, where it should be the inverse."""

    def clip(original: Any, clipper: Any, parameters: Any, norm: Any, *, is_trial: bool) -> None:
        mean_by_own = clipper._mean_by_own
        if is_trial:
            clipper._mean_by_own = 1 / mean_by_own
        original(clipper, parameters, norm, is_trial=is_trial)
        if is_trial:
            clipper._mean_by_own = mean_by_own

    return _wrapped(Clipper, "clip", clip)


@defect
def last_gradient_left_out() -> Any:
    """Where updates are delayed, the last round but one is taken for the last: its gradient updates nothing."""

    def is_last_round(strategy: Any) -> bool:
        return bool(strategy.trainee.optimizer_step + 2 >= strategy.trainee.manifest.training.steps)

    return patch.object(DelayedStrategy, "_is_last_round", property(is_last_round))


@defect
def ahead_weighed_by_the_round_before() -> Any:
    """An average ahead is weighted by the samples that its members bring to the round that ends, not to the next."""

    async def settle(original: Any, group: Any, ending: Any, gradients: Any, agreed: Any) -> Any:
        group.ahead.agreed = agreed
        return await original(group, ending, gradients, agreed)

    def begin(original: Any, ahead: Any, round_number: int, gradients: Any, shares: Any) -> None:
        original(ahead, round_number, gradients, {peer: ahead.agreed[peer].samples for peer in shares})

    return _all(_wrapped(StageGroup, "_settle", settle), _wrapped(AveragingAhead, "begin", begin))


# --- coordinators and snapshots


@defect
def no_checkpoint_fits() -> Any:
    """A coordinator looks for the line of the round that a checkpoint begins, not of the one before: none ever fits."""

    def is_of_run(original: Any, service: Any, files: Any, optimizer_step: int, round_number: int) -> Any:
        return original(service, files, optimizer_step, round_number + 1)

    return _wrapped(RunService, "_is_of_run", is_of_run)


@defect
def own_stage_guarded() -> Any:
    """A peer copies the snapshots of its own stage, and not those of the next one."""

    def init(original: Any, keeper: Any, **parts: Any) -> None:
        original(keeper, **parts)
        keeper._next_stage = parts["stage"]

    return _wrapped(SnapshotKeeper, "__init__", init)


@defect
def term_is_the_clock() -> Any:
    """A term's number is the time alone: after a coordinator whose clock was ahead, nobody takes over for an hour."""

    def first_of(*values: Any, **options: Any) -> Any:
        return values[0] if len(values) > 1 else builtins.max(*values, **options)

    return patch.object(leadership_module, "max", first_of, create=True)


# --- rounds, states and moves


@defect
def replay_loss_not_told() -> Any:
    """A peer that applies the updates that stage-mates made without it does not report its own work as lost."""

    async def replay(original: Any, loop: Any, donors: Any, **options: Any) -> Any:
        with patch.object(loop.reports, "lose", lambda *args, **options: None):
            return await original(loop, donors, **options)

    return _wrapped(StepLoop, "_replay", replay)


@defect
def takeover_loss_not_told() -> Any:
    """A peer that takes over a state does not report what it had accumulated, or held back, as lost."""

    async def take_over(original: Any, loop: Any, state: Any, **options: Any) -> None:
        with patch.object(loop.reports, "lose", lambda *args, **options: None):
            await original(loop, state, **options)

    return _wrapped(StepLoop, "_take_over", take_over)


@defect
def counts_not_with_the_gradient() -> Any:
    """Who takes over a leaving peer's gradient does not take in the counts that come with it."""

    async def commit_once(original: Any, handover: Any, caller: str, call: Any) -> None:
        await original(handover, caller, call.model_copy(update={"counts": ()}))

    return _wrapped(GradientHandover, "_commit_once", commit_once)


@defect
def old_vote_given() -> Any:
    """Who is asked for its vote on a try gives the one that it has, be it on an earlier try."""

    async def handle_vote(original: Any, group: Any, caller: str, call: Any, tensors: Sequence[memoryview]) -> Any:
        asked = group._rounds.find(call.round_number)
        if asked is None or asked.vote is None:
            return await original(group, caller, call, tensors)
        return Reply(VoteReply.model_validate(asdict(asked.vote)).model_dump())

    return _wrapped(StageGroup, "handle_vote", handle_vote)


@defect
def timeline_not_compared() -> Any:
    """A microbatch of another timeline gets in where the round has the same number."""
    return patch.object(StageServer, "_check_timeline", lambda server, microbatch, entered: None)


@defect
def looks_before_it_announces() -> Any:
    """A peer that moves looks first whether others serve its stage, and announces that it drains after that."""

    async def may_leave(mover: Any, replica: Any) -> bool:
        if mover._lifecycle.stop.is_set():
            return False
        await mover._directory.refresh_surely([replica.stage])
        if not replica.stage_mates() or mover._lifecycle.stop.is_set():
            mover.moving_to = UNDECIDED
            return False
        mover._lifecycle.enter(PeerState.DRAINING)
        await mover._directory.announce()
        return True

    return patch.object(Mover, "_may_leave", may_leave)


@defect
def no_checkpoint_saved() -> Any:
    """The coordinator saves no checkpoint."""

    async def save(original: Any, writer: Any, transport: Any, optimizer_step: int) -> None:
        """Forget that it is due."""

    return _wrapped(CheckpointWriter, "_save", save)


@defect
def no_handover() -> Any:
    """Who leaves is taken for a stranger by its stage-mates: they add no gradient to their own."""

    def check_mate(handover: Any, caller: str) -> None:
        raise NotServing("no announcement of this peer has been seen here yet")

    return patch.object(GradientHandover, "_check_mate", check_mate)


@defect
def oldest_snapshots_taken() -> Any:
    """A run goes back to the oldest snapshots that there are of all stages, and not to the newest ones."""
    choose = recovery_policy.choose_rewind

    def choose_oldest(snapshots: Any, num_stages: int, lost_stage: int, newest: int, from_scratch: int) -> Any:
        for step in sorted({ref.optimizer_step for held in snapshots.values() for ref in held}):
            if step <= newest:
                rewind = choose(snapshots, num_stages, lost_stage, step, -1)
                if rewind.optimizer_step is not None:
                    return rewind
        return choose(snapshots, num_stages, lost_stage, newest, from_scratch)

    return patch.object(recovery_module, "choose_rewind", choose_oldest)


@defect
def order_of_an_earlier_stay() -> Any:
    """A peer that has come back to a stage obeys an order that was for its stay before."""

    async def wait(original: Any, *, since: int, **options: Any) -> Any:
        return await original(since=0, **options)

    return _wrapped(mover_module, "wait_for_assignment", wait)


@defect
def lineage_stays_at_replay() -> Any:
    """Who applies an update that others made without it keeps the lineage of the weights before."""

    def begin_anew(original: Any, loop: Any, ledger: Any, number: int, *about: Any) -> None:
        *others, lineage = about
        is_replay = number == loop.step.round_number + 1 and lineage == loop.step.next_lineage
        original(loop, ledger, number, *others, loop.step.lineage if is_replay else lineage)

    return _wrapped(StepLoop, "_begin_anew", begin_anew)


@defect
def update_has_ledger_before() -> Any:
    """An update is given away with the ledger of the weights before it."""

    async def retain_update(original: Any, server: Any, gradients: Any, digest: str, _: bytes, **options: Any) -> None:
        await original(server, gradients, digest, server.step.ledger, **options)

    return _wrapped(StateServer, "retain_update", retain_update)
