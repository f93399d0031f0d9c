"""Defects that are planted into the real code, one at a time, to see whether the tube notices them.

To add a defect, write one more function: it returns what patches the mistake in, and its docstring says what is wrong.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from adapters import ADAPTED
from loop import HOST
from outcome import Outcome, run_schedule
from schedule import Schedule, numbered

import coordinator.checkpoints.folder as folder_module
import coordinator.checkpoints.store as store_module
import swarm_peer.model.training as training_module
import swarm_peer.protocol.epochs as epochs_module
import swarm_peer.protocol.leader as leader_module
import swarm_peer.runtime.mover as mover_module
import swarm_peer.runtime.state.chunks as chunks_module
import swarm_peer.runtime.step.averaging as averaging_module
from coordinator.checkpoints.writer import CheckpointWriter
from swarm_peer.codecs.feedback import ErrorFeedback, Try
from swarm_peer.errors import InvalidMessage, RoundClosed
from swarm_peer.policy.view import PeerState
from swarm_peer.protocol.epochs import Epoch
from swarm_peer.protocol.log import Cut
from swarm_peer.protocol.member import Member
from swarm_peer.protocol.membership import Membership
from swarm_peer.protocol.work import Work
from swarm_peer.runtime.data.granted_slices import GrantedSlices
from swarm_peer.runtime.data.launcher import BatchLauncher
from swarm_peer.runtime.data.prefetch import SamplePool
from swarm_peer.runtime.mover import Mover
from swarm_peer.runtime.replica import Replica
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.round_work import RoundWork
from swarm_peer.runtime.state.snapshots import SnapshotKeeper
from swarm_peer.runtime.state.states import StageSources
from swarm_peer.runtime.step.all_reduce import AllReduce, Brought
from swarm_peer.runtime.step.cut_averager import CutAverager
from swarm_peer.runtime.step.driver import RoundDriver
from swarm_peer.runtime.step.round_reports import RoundReports
from swarm_peer.runtime.step.workplace import StageWorkplace

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


async def _nothing(*_: Any, **__: Any) -> None:
    pass


# --- samples and gradients


@defect
def losses_not_told() -> Any:
    """Work that no entry holds is forgotten, and nobody is told."""
    return patch.object(RoundReports, "lose", lambda reports, lost: lost.clear())


@defect
def gone_callers_not_counted() -> Any:
    """A microbatch whose caller goes while its gradient is added does not count, and the gradient has it."""

    async def add(
        original: Any, executor: Any, entered: Any, microbatch: Any, passed: Any, behind: Any, caller: str
    ) -> Any:
        is_new = microbatch.id not in entered.counted
        done = await executor._device_thread.run(
            Priority.BACKWARD,
            lambda: executor._backward(entered, microbatch, passed, behind),
            microbatch.num_samples,
            executor._speed,
        )
        return executor._counted(entered, microbatch, behind, done, caller, passed.graph if is_new else None)

    return _wrapped(StageExecutor, "_add", add)


@defect
def accumulator_not_emptied() -> Any:
    """A round begins with whatever the accumulator holds."""
    return patch.object(StageWorkplace, "discard", _nothing)


@defect
def round_does_not_wait() -> Any:
    """A round ends with microbatches inside."""
    return patch.object(RoundAdmission, "drained", _nothing)


@defect
def heads_not_compared() -> Any:
    """Microbatches of any heads are added."""

    def admits(original: Any, work: Any, number: int, base: Any) -> bool:
        present = work.open.get(number)
        if present is None:
            return False
        present.computed.base = present.computed.base or base
        return True

    return _all(_wrapped(Work, "admits", admits), patch.object(RoundWork, "admit", lambda *_: None))


@defect
def repeated_microbatch_counted() -> Any:
    """A microbatch that a peer has counted, and whose reply was lost, is computed and counted again."""

    def counted(original: Any, executor: Any, entered: Any, microbatch_id: bytes) -> Any:
        entered.counted.pop(microbatch_id, None)

    return _wrapped(StageExecutor, "counted_reply", counted)


@defect
def guests_left_out() -> Any:
    """What others have given a member is in the cut, and not in what it brings."""

    async def mean(original: Any, workplace: Any, contributions: Any) -> Any:
        own = [each for each in contributions if each[1]][:1]
        means, _ = await original(workplace, own)
        return means, sum(weight for _, weight in contributions)

    return _wrapped(StageWorkplace, "mean", mean)


@defect
def shares_not_weighed() -> Any:
    """The averages are means over peers, and not over samples."""

    def make(brought: Brought, **options: Any) -> AllReduce:
        weights = dict.fromkeys(brought.weights, 1.0)
        return AllReduce(brought=replace(brought, weights=weights, total=float(len(weights))), **options)

    return patch.object(averaging_module, "AllReduce", make)


@defect
def partial_average_applied() -> Any:
    """If a member does not average its parts in time, the others keep theirs and call the round done."""

    def fail(original: Any, averaging_round: Any, reason: str, member: str | None = None) -> None:
        if "in time" not in reason:
            original(averaging_round, reason, member)
            return
        averaging_round._num_left = 0
        averaging_round._changed.notify()

    return _wrapped(AllReduce, "fail", fail)


# --- what averages of few bits leave over (`--mode feedback`)


@defect
def leftover_kept_over_going_back() -> Any:
    """What averages have left over stays as the run goes back, or another log takes the place of a seat's own."""

    def begin(averager: Any, restart: Any) -> None:
        averager._restart = restart

    return patch.object(CutAverager, "begin", begin)


@defect
def leftover_brought_twice() -> Any:
    """What a seat has brought to an average is left over once more, beside what that average loses."""

    def bring(original: Any, tried: Any, values: Any, weight: int) -> None:
        original(tried, values, weight)
        if tried.before is not None:
            tried.after.add_(tried.before)

    return _wrapped(Try, "bring", bring)


@defect
def failed_try_settled() -> Any:
    """What a try leaves over is the seat's as soon as it has begun, also if the try fails or its cut is no entry."""

    def begin_try(original: Any, feedback: Any, *about: Any) -> Any:
        begun = original(feedback, *about)
        feedback._leftover = begun.after
        return begun

    return _wrapped(ErrorFeedback, "begin_try", begin_try)


@defect
def sum_in_another_order() -> Any:
    """One member adds what the others bring in another order than they do."""

    def mean(original: Any, averaging_round: Any, *about: Any) -> Any:
        weights = averaging_round._weights
        if averaging_round._me != min(weights):
            return original(averaging_round, *about)
        with patch.object(averaging_round, "_weights", dict(reversed(weights.items()))):
            return original(averaging_round, *about)

    return _wrapped(AllReduce, "_mean", mean)


# --- slices


@defect
def ends_told_early() -> Any:
    """The end of a slice is told while windows of it are in flight."""

    def ends(slices: Any) -> Any:
        slices._note_ends()
        return tuple(each.end for each in slices._held.values() if each.end is not None)

    return patch.object(GrantedSlices, "_ends", ends)


@defect
def slice_ends_early() -> Any:
    """A peer that has come to the end of a slice tells of an end that is some windows before it."""

    def take_ends(original: Any, pool: Any) -> Any:
        return [end._replace(start=end.end // 2, end=end.end // 2) for end in original(pool)]

    return _wrapped(SamplePool, "take_ends", take_ends)


@defect
def samples_survive_going_back() -> Any:
    """Samples that were drawn before the run went back are launched after it."""

    return _wrapped(BatchLauncher, "_is_void", lambda original, launcher, batch: False)


@defect
def void_samples_counted() -> Any:
    """A microbatch that came too late is dropped, as if it had counted."""

    def take_back(original: Any, slices: Any, present: Any, samples: Any, **about: Any) -> bool:
        original(slices, present, samples, **about)
        return True

    return _wrapped(GrantedSlices, "counted", take_back)


@defect
def stale_microbatch_dropped() -> Any:
    """A microbatch whose round has closed is dropped, as if others read its samples."""

    async def compute(original: Any, launcher: Any, batch: Any, entered: Any) -> None:
        try:
            await original(launcher, batch, entered)
        except RoundClosed:
            """It counts as done."""

    return _wrapped(BatchLauncher, "_compute", compute)


# --- weights


@defect
def update_not_applied() -> Any:
    """A seat that takes an update over notes it, and keeps its weights."""

    async def apply(original: Any, driver: Any) -> None:
        entry = driver._due(driver.member).entry
        if driver.member.me in entry.cut.seats:
            await original(driver)
        else:
            with patch.object(driver._workplace, "apply", _nothing):
                await original(driver)

    return _wrapped(RoundDriver, "_apply", apply)


@defect
def momentum_not_loaded() -> Any:
    """A peer that takes over a state begins with an optimizer's state of zeros."""

    async def load(original: Any, sources: Any, state: Any, *about: Any) -> None:
        weights = set(sources._trainer.trained)
        tensors = {
            name: tensor if name in weights else torch.zeros_like(tensor) for name, tensor in state.tensors.items()
        }
        await original(sources, replace(state, tensors=tensors), *about)

    return _wrapped(StageSources, "_load", load)


@defect
def first_adapters_kept() -> Any:
    """A peer that takes over a state keeps the adapters that its stage has begun with (`--mode adapters`)."""

    async def load(original: Any, sources: Any, state: Any, *about: Any) -> None:
        first = {name: value for name, value in sources._trainer.state().items() if ADAPTED in name}
        own = {name: value for name, value in first.items() if name in sources._trainer.trained}
        await original(sources, replace(state, tensors={**state.tensors, **own}), *about)

    return _wrapped(StageSources, "_load", load)


@defect
def base_is_not_quantised() -> Any:
    """A peer that has room for it keeps the base as it was published (`--mode adapters`)."""

    def keeper(original: Any, precision: Any, layers: str) -> Any:
        host = HOST.get(None)
        has_room = host is not None and host.rng("room for the base").random() < 0.5
        return original("bf16" if has_room else precision, layers)

    return _wrapped(training_module, "keeper", keeper)


@defect
def older_state_loaded() -> Any:
    """A state that was asked for before a peer got its place is loaded while it computes with other weights."""
    return patch.object(StageSources, "_check_turn", lambda sources, turn: None)


@defect
def chunk_not_checked() -> Any:
    """A downloaded chunk is taken without a look at its hash."""

    async def fetch(original: Any, transport: Any, donor: Any, chunk: Any, call: Any) -> memoryview:
        reply = await donor.call(transport, call)
        if len(reply.tensors) != 1 or len(reply.tensors[0]) != chunk.size:
            raise InvalidMessage(f"a chunk of {chunk.size} bytes was asked for")
        data: memoryview = reply.tensors[0]
        return data

    return _wrapped(chunks_module, "_fetch", fetch)


@defect
def ledger_not_copied() -> Any:
    """The ledger that is kept with an entry goes on with later ones."""

    def note(driver: Any, member: Any) -> None:
        if member.ledger is not None and member.state:
            driver._ledgers.setdefault(member.state, member.ledger)

    return patch.object(RoundDriver, "_note_ledger", note)


@defect
def lost_state_is_waited_for() -> Any:
    """A seat that is alone without the state of its stage waits for somebody who gives it."""
    return patch.object(RoundDriver, "_note_lack", lambda driver, error: None)


# --- snapshots and checkpoints


@defect
def no_snapshots() -> Any:
    """No peer keeps a snapshot."""
    return patch.object(SnapshotKeeper, "take", lambda keeper, state, root: None)


@defect
def next_stage_not_guarded() -> Any:
    """No peer copies snapshots of the next stage."""
    return patch.object(SnapshotKeeper, "_run_guarding", _nothing)


@defect
def no_checkpoint_saved() -> Any:
    """The coordinator saves no checkpoint."""

    async def save(original: Any, writer: Any, transport: Any, optimizer_step: int) -> None:
        """Forget that it is due."""

    return _wrapped(CheckpointWriter, "_save", save)


@defect
def half_checkpoint_good() -> Any:
    """A checkpoint counts as good without a look at the sizes and hashes of its files."""

    def open_unchecked(original: Any, files: Any, folder: str, *args: Any) -> Any:
        path = f"{folder}/{folder_module.CONTENTS}"
        try:
            contents = folder_module.Contents.model_validate_json(files.read(path, folder_module.MAX_JSON_BYTES))
        except (ValueError, OSError):  # there is none, or the disk fails just now
            return original(files, folder, *args)
        with patch.object(files, "describe", lambda path: contents.files[path.rpartition("/")[2]]):
            return original(files, folder, *args)

    return _wrapped(store_module, "open_checkpoint", open_unchecked)


# --- agreement


@defect
def silent_seats_stay() -> Any:
    """No voter finds anybody silent."""
    return patch.object(Membership, "_silent", lambda membership: frozenset())


@defect
def key_never_decides() -> Any:
    """Whoever has the run key makes no epoch where most voters are gone."""
    return patch.object(Membership, "_look_whether_the_key_decides", lambda membership: None)


@defect
def leases_never_lapse() -> Any:
    """A leader goes on though it hears of no voter."""
    return patch.object(Membership, "has_lease", lambda membership, now_s: True)


@defect
def statements_not_heard() -> Any:
    """A new leader does not commit what its members have signed for the round that its predecessor had cut."""
    return patch.object(leader_module, "signed_entries", lambda *_: [])


@defect
def younger_life_is_ignored() -> Any:
    """The places of an earlier life of a peer stay when it has come back."""

    def seats(original: Any, epoch: Any, wishes: Any, joins: Any, silent: Any) -> Any:
        return original(epoch, wishes, (), silent)

    return _wrapped(epochs_module, "_without_the_gone", seats)


@defect
def cut_may_repeat() -> Any:
    """Members agree to cuts that hold samples which have counted before, and leaders make them."""
    return _all(
        patch.object(Cut, "is_repeating", lambda cut, ledger: False),
        patch("swarm_peer.protocol.leader.repeats", lambda samples, ledger: False),
        patch("swarm_peer.protocol.log.repeats", lambda samples, ledger: False),
    )


@defect
def lost_entries_not_noticed() -> Any:
    """A stage goes on though another one has computed from entries that it lacks."""
    return patch.object(Member, "look_whether_lost", lambda member, evidence: False)


@defect
def voids_ignored() -> Any:
    """What was computed from other heads stays in the accumulator."""
    return patch.object(Member, "voiding", property(lambda member: None))


@defect
def leavers_keep_their_place() -> Any:
    """Who leaves does not say so: the others wait until it is silent."""
    return patch.object(Replica, "_give_up_place", _nothing)


@defect
def no_handover() -> Any:
    """Who leaves gives its work to nobody."""

    async def give(original: Any, replica: Any) -> None:
        replica.parts.reports.lose(await replica.parts.driver.leave())

    return _wrapped(Replica, "_give_work", give)


@defect
def roster_is_backwards() -> Any:
    """The youngest seat of a stage leads it, so that each newcomer takes the lead."""
    return patch.object(Epoch, "leader", lambda epoch, stage: next(reversed(epoch.roster(stage)), None))


# --- moves


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
