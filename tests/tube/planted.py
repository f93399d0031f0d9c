"""Defects that are planted into the real code, one at a time, to see whether the tube notices them.

To add a defect, write one more function: it returns what patches the mistake in, and its docstring says what is wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio
import swarm_peer.runtime.step.barrier as barrier_module
import swarm_peer.runtime.step.settlement as settlement_module
import torch
from schedule import Schedule, numbered
from swarm_peer.model.delayed_strategy import DelayedStrategy, EagerStrategy
from swarm_peer.policy.data.sample_ledger import LeaseDecision, SampleLedger
from swarm_peer.runtime.data.leases import SliceLeases
from swarm_peer.runtime.state.own_work import OwnWork
from swarm_peer.runtime.state.recovery import Recovery
from swarm_peer.runtime.state.snapshot_store import SnapshotStore
from swarm_peer.runtime.step.barrier import Barrier
from swarm_peer.runtime.step.handover import GradientHandover
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.runtime.step.step_loop import StepLoop
from tube import Outcome, run_schedule

import coordinator.checkpoints.folder as folder_module
import coordinator.checkpoints.store as store_module
import coordinator.run.run_options as options_module
import coordinator.run.service as service_module
import swarm_peer.runtime.mover as mover_module
import swarm_peer.runtime.state.transfer as transfer_module
import swarm_peer.runtime.step.averaging as averaging_module
from coordinator.watch.ending import Farewell, end_run_for
from swarm_peer.errors import CallError, InvalidMessage
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.view import PeerState
from swarm_peer.runtime.data.launcher import MicrobatchLauncher
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.state.joining import StateDownloads
from swarm_peer.runtime.step.all_reduce import AllReduce, _ExactAllReduce

Defect = Callable[[], AbstractContextManager[Any]]

DEFECTS: dict[str, Defect] = {}


def defect(plant: Defect) -> Defect:
    """Register a defect under its function's name."""
    DEFECTS[plant.__name__] = plant
    return plant


def _wrapped(owner: Any, name: str, call: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Have `call(original, *args)` in place of a method or function."""
    original = getattr(owner, name)
    # A coroutine that nobody awaits would plant another defect than the one described.
    assert inspect.iscoroutinefunction(call) == inspect.iscoroutinefunction(original), name

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return call(original, *args, **options)

    return patch.object(owner, name, wrapped)


def _all(*patches: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for each in patches:
        stack.enter_context(each)
    return stack


# --- samples


@defect
def losses_not_told() -> Any:
    """A peer of a later stage empties its accumulator before it brings it, and tells nobody."""

    def contribution(original: Any, loop: Any) -> Any:
        if loop._stage > 0:
            loop._trainer.discard_gradients()
            loop._rounds.current.forget_counted()
        return original(loop)

    return _wrapped(StepLoop, "_contributions", contribution)


@defect
def own_part_not_told() -> Any:
    """A peer that stage-mates went on without tells of no samples but those of its present round."""
    return patch.object(OwnWork, "give_up", lambda own_work, state: None)


@defect
def other_timelines_not_looked_into() -> Any:
    """A peer that meets another timeline does not ask which one the run goes on with."""
    return patch.object(RoundAdmission, "saw_other_timeline", lambda admission: None)


@defect
def failure_counted() -> Any:
    """The launcher counts a microbatch that has failed, and launches it again."""

    async def launch_again(original: Any, launcher: Any, batch: Any, present: Any, error: CallError) -> None:
        launcher._count(present.number, batch.samples)
        await original(launcher, batch, present, error)

    return _wrapped(MicrobatchLauncher, "_launch_again", launch_again)


@defect
def failure_launched_twice() -> Any:
    """The launcher launches a microbatch that has failed twice: as it was, and as a new one of the same samples."""

    async def launch_again(original: Any, launcher: Any, batch: Any, present: Any, error: CallError) -> None:
        launcher._waiting.append(replace(batch, claimed=None, id=b""))
        await original(launcher, batch, present, error)

    return _wrapped(MicrobatchLauncher, "_launch_again", launch_again)


@defect
def name_forgotten_at_retry() -> Any:
    """A microbatch gets a new id at each launch, so that peers which have counted it do not recognise it."""

    def claim(original: Any, launcher: Any, batch: Any, present: Any) -> None:
        original(launcher, batch, present)
        batch.id = launcher._context.random.token(16)

    return _wrapped(MicrobatchLauncher, "_claim", claim)


@defect
def lease_granted_to_all() -> Any:
    """A stage-0 peer grants a slice although another peer that is alive leases it."""

    def grant(original: Any, ledger: Any, slice_id: Any, peer: str, live_peers: Any) -> LeaseDecision:
        granted: LeaseDecision = original(ledger, slice_id, peer, {peer})
        return granted

    return _wrapped(SampleLedger, "grant", grant)


@defect
def ledger_forgets_a_count() -> Any:
    """At the end of a round, the samples that this peer itself has counted do not get into its ledger."""

    def credible(original: Any, leases: Any, author: Any, ranges: Any, **options: Any) -> Any:
        return () if author == leases._progress.author else original(leases, author, ranges, **options)

    return _wrapped(SliceLeases, "_credible", credible)


@defect
def samples_survive_rewind() -> Any:
    """Samples that were drawn before a rewind are trained on after it: the generation of the leases stays."""

    def begin(original: Any, leases: Any, *args: Any) -> None:
        generation = leases.generation
        original(leases, *args)
        leases.generation = generation

    return _wrapped(SliceLeases, "begin", begin)


@defect
def repeated_microbatch_counted() -> Any:
    """A microbatch that a peer has counted, and whose reply was lost, is computed and counted again."""

    def backward(original: Any, *args: Any, **options: Any) -> Any:
        return original(*args, **options | {"counts": True})

    return _all(
        patch.object(StageExecutor, "counted_reply", lambda executor, entered, microbatch_id: None),
        _wrapped(StageTrainer, "backward", backward),
    )


# --- rounds


@defect
def past_round_admits() -> Any:
    """A peer takes in microbatches of a round that it has closed, as if they were of the present one."""

    async def reach(original: Any, admission: Any, round_number: int) -> Any:
        present = admission._rounds.current
        return present if round_number < present.number else await original(admission, round_number)

    return _wrapped(RoundAdmission, "reach", reach)


@defect
def weights_not_compared() -> Any:
    """A microbatch goes on though the weights have changed under it: neither pass looks at their version."""

    def forward(original: Any, executor: Any, entered: Any, *args: Any) -> Any:
        version = executor._trainer.weights_version
        stale = SimpleNamespace(step=SimpleNamespace(weights_version=version), number=entered.number)
        return original(executor, stale, *args)

    def backward(original: Any, trainer: Any, forward_pass: Any, *args: Any, **options: Any) -> Any:
        forward_pass._weights_version = trainer.weights_version
        return original(trainer, forward_pass, *args, **options)

    return _all(_wrapped(StageExecutor, "_forward", forward), _wrapped(StageTrainer, "backward", backward))


@defect
def barrier_does_not_wait() -> Any:
    """A peer ends the round while microbatches are inside: those counted after that are not in its gradient."""

    async def drained(admission: Any) -> None:
        return None

    return patch.object(RoundAdmission, "drained", drained)


@defect
def history_not_compared() -> Any:
    """At the barrier, a peer takes all stage-mates to hold its own weights."""

    async def gather(original: Any, barrier: Any, ending: Any, attempt: int) -> Any:
        members = await original(barrier, ending, attempt)
        own = {"history_hash": ending.step.history_hash, "weights_digest": ending.weights_digest}
        return {peer: reply.model_copy(update=own) for peer, reply in members.items()}

    return _wrapped(Barrier, "gather", gather)


@defect
def vote_skipped() -> Any:
    """Each peer commits its own result at once, without asking how the others voted."""

    async def gather_votes(group: Any, ending: Any, attempt: int, peers: set[str]) -> Any:
        return {group._me: ending.vote}

    return patch.object(StageGroup, "_gather_votes", gather_votes)


@defect
def partial_average_applied() -> Any:
    """If a member does not average its parts in time, the others keep theirs and call the round done."""

    def init(original: Any, runner: Any, *args: Any, **options: Any) -> None:
        original(runner, *args, **options)
        del runner.tensor_part_container.register_failed_reducer

    return _wrapped(_ExactAllReduce, "__init__", init)


@defect
def shares_not_weighed() -> Any:
    """The averages are means over peers, and not over samples."""

    def make(*, shares: Any, **options: Any) -> AllReduce:
        return AllReduce(shares=dict.fromkeys(shares, 1), **options)

    return patch.object(averaging_module, "AllReduce", make)


@defect
def accumulator_not_emptied() -> Any:
    """A peer's gradients of a round are still in its accumulator in the next one."""

    async def commit(original: Any, loop: Any, settlement: Any) -> None:
        kept = loop._trainer.gradient_sums()
        await original(loop, settlement)
        loop._trainer.add_gradients(*kept)

    return _wrapped(StepLoop, "_commit", commit)


@defect
def old_gradients_join() -> Any:
    """A peer that takes over a stage-mate's state keeps the gradients that it has accumulated."""

    async def take_over(original: Any, loop: Any, state: Any, **options: Any) -> None:
        kept = loop._trainer.gradient_sums()
        await original(loop, state, **options)
        loop._trainer.add_gradients(*kept)

    return _wrapped(StepLoop, "_take_over", take_over)


@defect
def gradient_handed_over_twice() -> Any:
    """The receiver of a leaving peer's gradient does not recognise a repeated commit, and adds the gradient again."""

    def init(original: Any, handover: Any, **parts: Any) -> None:
        original(handover, **parts)
        handover._committed = deque(maxlen=0)

    async def commit_once(original: Any, handover: Any, caller: str, call: Any) -> None:
        transfers = handover._rounds.current.transfers
        transfer = transfers.get(caller)
        await original(handover, caller, call)
        transfers[caller] = transfer

    return _all(_wrapped(GradientHandover, "__init__", init), _wrapped(GradientHandover, "_commit_once", commit_once))


@defect
def gradient_in_doubt_offered_again() -> Any:
    """A leaving peer offers its gradient to others though the first receiver may have added it."""

    async def commit(original: Any, handover: Any, *args: Any) -> None:
        try:
            await original(handover, *args)
        except Exception as error:
            raise error if isinstance(error, CallError) else CallError(str(error)) from error

    return _wrapped(GradientHandover, "_commit", commit)


# --- states


@defect
def serves_before_it_has_weights() -> Any:
    """A peer announces that it serves, and gets its state after that."""

    async def join(original: Any, peer: Any, replica: Any) -> Any:
        peer._lifecycle.enter(PeerState.SERVING)
        await peer._directory.announce()
        return await original(peer, replica)

    return _wrapped(Peer, "_join", join)


@defect
def momentum_not_loaded() -> Any:
    """A peer that takes over a state begins with an optimizer's state of zeros."""

    async def take_over(original: Any, loop: Any, state: Any, **options: Any) -> None:
        weights = set(loop._trainer.trained)
        tensors = {
            name: tensor if name in weights else torch.zeros_like(tensor) for name, tensor in state.tensors.items()
        }
        await original(loop, replace(state, tensors=tensors), **options)

    return _wrapped(StepLoop, "_take_over", take_over)


@defect
def update_not_applied() -> Any:
    """A newcomer enters the updates that it missed into its history, and does not apply them."""

    async def update_after(original: Any, downloads: Any, *args: Any) -> Any:
        update = await original(downloads, *args)
        return replace(update, tensors={name: torch.zeros_like(value) for name, value in update.tensors.items()})

    return _wrapped(StateDownloads, "update_after", update_after)


@defect
def chunk_not_checked() -> Any:
    """A downloaded chunk is taken without a look at its hash."""

    async def fetch_chunk(_: Any, transport: Any, donor: str, call: Any, chunk: Any, tensor_name: str) -> memoryview:
        reply = await transport.call(donor, call, timeout_s=transfer_module.CALL_TIMEOUT_S)
        if [tensor.nbytes for tensor in reply.tensors] != [chunk.size]:
            raise InvalidMessage(f"a chunk of {chunk.size} bytes was asked for")
        data: memoryview = reply.tensors[0]
        return data

    return _wrapped(transfer_module, "_fetch_chunk", fetch_chunk)


@defect
def snapshot_of_another_step() -> Any:
    """A snapshot is kept under the number of the round after its own."""

    async def store_snapshot(original: Any, store: Any, stage: int, state: Any) -> None:
        await original(store, stage, replace(state, round_number=state.round_number + 1))

    return _wrapped(SnapshotStore, "store_snapshot", store_snapshot)


@defect
def half_checkpoint_good() -> Any:
    """A checkpoint counts as good without a look at the sizes and hashes of its files."""

    def open_unchecked(original: Any, files: Any, folder: str, *args: Any) -> Any:
        path = f"{folder}/{folder_module.CONTENTS}"
        try:
            contents = folder_module.Contents.model_validate_json(files.read(path, folder_module.MAX_JSON_BYTES))
        except OSError:  # there is none, or the disk fails just now
            return original(files, folder, *args)
        with patch.object(files, "describe", lambda path: contents.files[path.rpartition("/")[2]]):
            return original(files, folder, *args)

    return _wrapped(store_module, "open_checkpoint", open_unchecked)


# --- the swarm


@defect
def older_term_obeyed() -> Any:
    """A peer obeys the orders of all coordinators, also those whose term is over."""

    async def wait(original: Any, *, fetch: Any, **options: Any) -> Any:
        async def fetch_all() -> Any:
            found = await fetch()
            if not found:
                return found
            orders = tuple(order for term in sorted(found) for order in found[term].assignments)
            newest = max(found)
            return {newest: found[newest].model_copy(update={"assignments": orders})}

        return await original(fetch=fetch_all, **options)

    return _wrapped(mover_module, "wait_for_assignment", wait)


@defect
def alone_goes_on() -> Any:
    """Who has gone on alone leaves out stage-mates that are more and behind, however fast they come."""
    return patch.object(barrier_module._Patience, "lasts", lambda patience, behind, num_ready: False)


@defect
def takeover_unasked() -> Any:
    """A peer takes a stage over without asking whether others still see peers in it."""

    async def check_loss(recovery: Any, timeline: Any) -> None:
        return None

    return patch.object(Recovery, "_check_loss", check_loss)


@defect
def last_peer_moves() -> Any:
    """A peer moves though nobody else serves its stage: neither the order nor the move is checked."""

    async def may_leave(mover: Any, replica: Any) -> bool:
        mover._lifecycle.enter(PeerState.DRAINING)
        await mover._directory.announce()
        return True

    async def wait(original: Any, *, view: Any, **options: Any) -> Any:
        somebody = SimpleNamespace(peer_id="")

        def crowded() -> Any:
            return SimpleNamespace(serving=lambda stage: [somebody], num_stages=view().num_stages)

        return await original(view=crowded, **options)

    return _all(patch.object(Mover, "_may_leave", may_leave), _wrapped(mover_module, "wait_for_assignment", wait))


# --- delayed updates: with `--mode delayed`


@defect
def held_back_gradient_lost_at_handover() -> Any:
    """The receiver of a leaving peer's gradients takes in those of the present round alone."""

    def take_in(original: Any, strategy: Any, given: Any) -> None:
        (sums, num_samples), (waiting, _) = given
        original(strategy, [(sums, num_samples), (waiting, 0)])

    return _wrapped(DelayedStrategy, "take_in", take_in)


@defect
def average_missing_in_snapshot() -> Any:
    """A snapshot is taken without the average that ends its round."""
    return patch.object(DelayedStrategy, "expect", lambda strategy, averages: None)


@defect
def other_gradients_tried_again() -> Any:
    """Where an average ahead has failed, stage-mates average other gradients than those that it was of."""

    async def average(original: Any, group: Any, ending: Any, gradients: Any, attempt: int, members: Any) -> Any:
        if attempt and group.ahead._newest is not None:
            gradients = [2 * gradient for gradient in gradients]
        return await original(group, ending, gradients, attempt, members)

    return _wrapped(StageGroup, "_average", average)


@defect
def failed_average_ahead_taken() -> Any:
    """Those for whom an average ahead has gone well take it, whatever became of it at the others."""

    def agree(original: Any, me: str, votes: Any, *, may_retry: bool) -> Any:
        return original(me, votes, may_retry=may_retry and votes[me].checksum is None)

    return _wrapped(settlement_module, "agree", agree)


@defect
def held_back_gradient_survives_a_state() -> Any:
    """A peer that takes over a state keeps the gradient that it held back, which is of other weights."""

    def load_state(original: Any, strategy: Any, entries: Any, **options: Any) -> int:
        waiting = strategy._waiting
        lost = original(strategy, entries, **options)
        strategy._waiting = waiting
        return int(lost)

    return _wrapped(DelayedStrategy, "load_state", load_state)


# --- periodic averaging: with `--mode periodic`


@defect
def brought_not_heard() -> Any:
    """Stage-mates do not note which samples the others bring to the average of a period."""
    return patch.object(SampleLedger, "note", lambda ledger, ranges: set())


# --- eager updates: with `--mode eager`


@defect
def own_update_stays() -> Any:
    """The average updates the weights that the replica's own gradient has updated already."""

    def end_round(original: Any, strategy: Any, averages: Any) -> Any:
        strategy._settled = None
        return original(strategy, averages)

    return _wrapped(EagerStrategy, "end_round", end_round)


@defect
def own_update_in_state() -> Any:
    """A state holds the weights that the replica computes with."""
    return patch.object(EagerStrategy, "weights", DelayedStrategy.weights)


@defect
def slice_ends_early() -> Any:
    """A peer that has come to the end of a slice tells of an end that is some windows before it."""

    def take_ends(original: Any, pool: Any) -> Any:
        return [end._replace(start=end.end // 2, end=end.end // 2) for end in original(pool)]

    return _wrapped(SamplePool, "take_ends", take_ends)


# --- peers


@defect
def no_snapshots() -> Any:
    """No peer keeps a snapshot."""

    async def store(store: Any, stage: int, state: Any) -> None:
        return None

    return patch.object(SnapshotStore, "store_snapshot", store)


@defect
def newcomer_hangs() -> Any:
    """A peer that joins stage-mates once the run is under way waits for ever."""

    async def join(original: Any, peer: Any, replica: Any) -> Any:
        if replica.stage_mates() and peer._context.clock.monotonic_s() > 20:
            await anyio.sleep_forever()
        return await original(peer, replica)

    return _wrapped(Peer, "_join", join)


# --- the run's end


@defect
def killed_saver_refused() -> Any:
    """A coordinator that was killed as it had saved the model is refused when it is started again."""
    return _all(
        patch.object(options_module, "last_step", lambda folder: 0),
        patch.object(options_module, "has_ended", lambda folder: False),
    )


@defect
def end_told_once() -> Any:
    """A coordinator tells the end of the run once, and leaves a short time after it."""

    async def see_off(
        dht: Any, directory: Any, manifest: Any, run_key: Any, reason: str, begun_s: int, **options: Any
    ) -> Farewell:
        is_told = await end_run_for(dht, run_key, begun_s, reason)
        await anyio.sleep(15.0)
        return Farewell(is_told, 0)

    return patch.object(service_module, "see_off", see_off)


# --- the command


def run_planted(name: str, seed: str) -> Outcome:
    """Run a seed with a defect."""
    with DEFECTS[name]():
        return run_schedule(Schedule.draw(seed))


def planted(*names: str, first: int = 0, most: int = 500, mode: str = "", often: str = "") -> None:
    """Look for the first seed that finds each planted defect, and does not fail without it.

    Args:
        names: defects; all of them by default
        first: the first seed
        most: seeds to try
        mode: as for `seeds`
        often: a kind of fault that is drawn far more often than else
    """
    if unknown := [name for name in names if name not in DEFECTS]:
        raise SystemExit(f"there is no planted defect {', '.join(unknown)}, but {', '.join(DEFECTS)}")
    sound: dict[str, str] = {}  # the first violation of each seed without a defect, or nothing
    for name in names or DEFECTS:
        tried = 0
        for seed in numbered(range(first, first + most), mode, often):
            tried += 1
            found = run_planted(name, seed).violations
            if not found:
                continue
            if seed not in sound:
                sound[seed] = "\n".join(run_schedule(Schedule.draw(seed)).violations[:1])
            if not sound[seed]:
                print(f"{name}: seed {seed} ({tried} tried): {found[0].splitlines()[0][:300]}", flush=True)
                break
            print(f"{name}: seed {seed} fails without it, too: {sound[seed].splitlines()[0][:200]}", flush=True)
        else:
            print(f"{name}: not found in {tried}", flush=True)
