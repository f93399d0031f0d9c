"""A checkpoint is made of what peers give, is tried again where that fails, and holds nobody's lies."""

import logging
from types import SimpleNamespace
from unittest.mock import patch

import anyio
import pytest
import torch
from checkpoint_runs import entry_of
from checkpoint_runs import run as run
from checkpoint_worlds import assert_same
from given_states import Gullible

from coordinator.checkpoints import writer as checkpointing
from coordinator.checkpoints.state_receiver import StateReceiver
from coordinator.checkpoints.writer import CheckpointWriter
from swarm_peer.errors import NoRoom, UserError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.runtime.host.machine import SystemThreads


async def test_a_checkpoint_is_made_of_the_snapshots_that_entries_name(run):
    states = [await run.add("a", 0, 60), await run.add("b", 1, 60)]
    await run.save()
    assert run.saved == [60], "the watch is told"
    assert run.names.offered == [60], "and whoever offers it"
    assert run.receiver.num_allocated == 2, "they may be larger than the memory here"
    checkpoint = run.store.newest(run.manifest)
    assert (checkpoint.optimizer_step, checkpoint.round_number) == (60, 60)
    assert checkpoint.entries == (entry_of(0, 60), entry_of(1, 60))
    for stage, state in enumerate(states):
        assert_same(checkpoint.load_stage(stage), state)


async def test_the_last_steps_checkpoint_is_waited_for(run, monkeypatch):
    """The run stands still there, and a peer may still be making its last update. No entry names these weights."""
    run.watch.last_step = 60
    await run.add("a", 0, 60, own=True)

    async def sleep(seconds):
        await run.add("b", 1, 60, own=True)

    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert run.saved == [60]
    assert run.names.offered == []


async def test_while_a_stage_is_waited_for_others_are_not_fetched_again_and_again(run, monkeypatch):
    states = [await run.add("a", 0, 60, FIRST_TIMELINE)]

    async def sleep(seconds):
        sleep.count += 1
        if sleep.count == 5:
            states.append(await run.add("b", 1, 60, FIRST_TIMELINE))

    sleep.count = 0
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert run.saved == [60]
    of_first, of_last = [run.network.num_calls("state_chunk", peer) for peer in "ab"]
    assert of_first == 2 * of_last > 0, "once before it is known that another one lacks, and once with that"
    for stage, state in enumerate(states):
        assert_same(run.store.newest().load_stage(stage), state)


@pytest.mark.parametrize("change", [{"acts": False}, {"created_at_round": lambda step: 70}])
async def test_a_checkpoint_that_others_have_to_write_or_of_a_round_that_is_given_up_is_not_tried_again(
    run, monkeypatch, change
):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    tries = []

    def fail(*args):
        tries.append(args)
        raise UserError("no network")

    async def sleep(seconds):
        run.acts = change.get("acts", True)
        run.watch.created_at_round = change.get("created_at_round", run.watch.created_at_round)
        run.watch.optimizer_step += 4

    monkeypatch.setattr(run.store, "save", fail)
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert (len(tries), run.saved) == (1, [])
    missed = "The checkpoint of optimizer step 60 was missed: the run went on too soon."
    assert run.told == ([missed] if run.acts else []), "the coordinator that acts says so"


@pytest.mark.parametrize("num_failures", [2, 9])
async def test_a_checkpoint_fails_soon_where_there_is_no_room(run, monkeypatch, num_failures):
    """Each try may download states in vain; and who offers the first one may lie about its size."""
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    failures, pauses = [NoRoom("the disk is full")] * num_failures, []

    class Receiver(Gullible):
        async def allocate(self, stage, sizes):
            if stage == 1 and failures:
                raise failures.pop()
            return await super().allocate(stage, sizes)

    async def sleep(seconds):
        pauses.append(seconds)

    run.receiver = Receiver(run.receiver._resolved, SystemThreads())
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert pauses == list(checkpointing.SAVE_PAUSES_S[:num_failures])
    assert bool(run.promises.unkept()) == (num_failures == 9), "what is late is kept"
    text = "is saved." if num_failures == 2 else "could not be saved: the disk is full."
    assert run.told == [f"The checkpoint of optimizer step 60 {text}"]
    assert run.receiver.num_allocated == (3 if num_failures == 2 else 1), "the stage without room is asked for first"


@pytest.mark.parametrize("num_failures", [2, 9])
async def test_a_checkpoint_is_written_again_if_the_disk_fails_for_a_moment(run, monkeypatch, num_failures):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    save, failures, pauses = run.store.save, [UserError("no network")] * num_failures, []

    def fail_first(*args):
        if failures:
            raise failures.pop()
        return save(*args)

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(run.store, "save", fail_first)
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert pauses == list(checkpointing.SAVE_PAUSES_S[:num_failures])
    assert run.told == [
        "The checkpoint of optimizer step 60 is saved."
        if num_failures == 2
        else "The checkpoint of optimizer step 60 could not be saved: no network."
    ]


@pytest.mark.parametrize("is_due", [True, False])
async def test_nothing_is_saved_if_another_coordinator_may_act_when_the_states_have_come(run, monkeypatch, is_due):
    monkeypatch.setattr(checkpointing, "SAVE_PAUSES_S", (0.001, 0.001))
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    fetch_all = CheckpointWriter._fetch_all

    async def fetch_slowly(*args):
        states = await fetch_all(*args)
        run.acts, run.watch.optimizer_step = is_due, 60 if is_due else 80  # it gives up when the next one is due
        return states

    with patch.object(CheckpointWriter, "_fetch_all", fetch_slowly):
        await run.save()
    assert (run.store.newest() is not None) is is_due


async def test_states_that_have_come_are_kept_while_it_is_not_known_who_acts(run, monkeypatch):
    for name, stage in (("a", 0), ("b", 1)):
        await run.add(name, stage, 60)
    fetch, fetched, pauses = CheckpointWriter._fetch, [], []

    async def fetch_last(writer, transport, stage, weights):
        fetched.append(stage)
        run.acts = False  # the look at the DHT has become old
        return await fetch(writer, transport, stage, weights)

    async def sleep(seconds):
        pauses.append(seconds)
        run.acts = len(pauses) == 2

    monkeypatch.setattr(CheckpointWriter, "_fetch", fetch_last)
    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert (fetched, run.saved, pauses) == ([0, 1], [60], list(checkpointing.SAVE_PAUSES_S[:2]))


async def test_who_gives_a_state_of_other_updates_is_not_believed(run, monkeypatch):
    """Nor does the coordinator end of it: it waits until somebody gives the right one."""
    await run.add("a", 0, 60)
    await run.add("liar", 1, 77, Timeline(77, 60, 60))
    expected = []

    async def sleep(seconds):
        expected.append(await run.add("b", 1, 60, FIRST_TIMELINE))

    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    [state] = expected
    assert_same(run.store.newest().load_stage(1), state)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda state: {}, "the state lacks"),
        (lambda state: state | {"__metadata__": torch.ones(2)}, "the state has 1 tensors that this stage lacks"),
        (lambda state: state | {name: value + torch.nan for name, value in list(state.items())[:1]}, "not finite"),
    ],
)
async def test_a_checkpoint_is_made_of_states_that_peers_would_take_over(run, monkeypatch, caplog, damage, reason):
    """One peer gives another one, and is not the only one that has any."""
    caplog.set_level(logging.INFO)
    resolved = ResolvedManifest.of(run.manifest)
    run.receiver = StateReceiver(resolved, SystemThreads())
    tensors = [StageTrainer(resolved, spec, blank=True).state() for spec in resolved.specs]
    await run.add("a", 0, 60, tensors=tensors[0])
    await run.add("liar", 1, 60, tensors=damage(tensors[1]))

    async def sleep(seconds):
        assert not run.saved
        await run.add("b", 1, 60, tensors=tensors[1])

    monkeypatch.setattr(
        checkpointing, "anyio", SimpleNamespace(sleep=sleep, to_thread=anyio.to_thread, Lock=anyio.Lock)
    )
    await run.save()
    assert reason in caplog.text
    loaded = run.store.newest().load_stage(1).tensors
    assert loaded.keys() == tensors[1].keys()
    assert all(bool(tensor.isfinite().all()) for tensor in loaded.values())
