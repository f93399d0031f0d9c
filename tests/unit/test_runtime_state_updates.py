"""Updates are given to those that catch up, and make their state the donor's."""

import asyncio
import threading

import anyio
import anyio.from_thread
import pytest
import torch
from state_donors import HASH, STAGE, assert_equal
from state_donors import clock as clock
from state_donors import world as world

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer, max_state_bytes
from swarm_peer.policy.timeline import FIRST_TIMELINE
from swarm_peer.runtime.state import state_server
from swarm_peer.runtime.state.state_server import RETAIN_S
from swarm_peer.runtime.state.stored import make_stored
from swarm_peer.wire.messages import StateChunkCall


async def test_an_update_is_given_for_as_long_as_it_is_kept(world):
    donor = await world.donor("a")
    await donor.goes_on(2.0)
    update = await world.fetch(donor, kind="update", min_round=3)
    assert (update.round_number, update.history_hash, update.ledger) == (3, "history_hash of 2.0", b"")
    assert_equal(update.tensors, {"00000": torch.full((5, 7), 2.0)})
    await world.fetch(donor, kind="update", min_round=3)
    assert len(donor.donor.server.stored) == 1, "it is hashed once"
    del donor.donor.kept[3]
    with pytest.raises(CallError, match="the update of round 3 is not kept here"):
        await world.fetch(donor, kind="update", min_round=3)
    await donor.goes_on(3.0)
    await world.fetch(donor, kind="update", min_round=4)
    assert [stored.index.round_number for stored in donor.donor.server.stored.values()] == [4], "it made room"


async def test_strangers_get_nothing_that_takes_memory(world):
    donor = await world.donor("a")
    await world.fetch(donor)
    await donor.goes_on(2.0)
    donor.donor.strangers.add("me")
    held = set(donor.donor.server.stored)
    for wanted in ({}, {"min_round": 4}, {"kind": "update", "min_round": 3}):
        with pytest.raises(CallError, match="this peer knows of no place of yours in the run"):
            await world.fetch(donor, **wanted)
    assert set(donor.donor.server.stored) == held


async def test_no_update_waits_until_a_state_is_hashed(world, monkeypatch):
    """A newcomer that has its state would ask in vain, and download it anew."""
    donor, may_hash = await world.donor("a"), threading.Event()
    await donor.goes_on(2.0)

    def slowly(stage, kind, state):
        assert kind == "update" or may_hash.wait(10)
        return make_stored(stage, kind, state)

    monkeypatch.setattr(state_server, "make_stored", slowly)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.fetch, donor)
        await anyio.wait_all_tasks_blocked()
        assert (await world.fetch(donor, kind="update", min_round=3)).history_hash == "history_hash of 2.0"
        may_hash.set()


async def test_who_waits_for_a_state_holds_up_nobody_who_needs_an_update(world):
    """The round may not be over before the other one has caught up."""
    donor = await world.donor("a")
    await donor.goes_on(2.0)
    donor.trainer.optimizer_step += 1  # an update is being applied
    waiting = asyncio.ensure_future(world.fetch(donor))
    await anyio.wait_all_tasks_blocked()
    assert (await world.fetch(donor, kind="update", min_round=3)).history_hash == "history_hash of 2.0"
    assert not waiting.done()
    donor.trainer.optimizer_step -= 1
    await donor.goes_on(3.0)
    assert (await waiting).history_hash == "history_hash of 3.0"


async def test_an_update_is_there_for_a_second_newcomer_too(world, clock):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    await donor.goes_on(2.0)
    await world.fetch(donor, kind="update", min_round=3)
    for _ in range(3):  # one whose download takes long
        clock.passed_s += RETAIN_S / 2
        await world.call(donor, StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0))
        await donor.goes_on(3.0)
    assert (await world.fetch(donor, kind="update", min_round=3)).round_number == 3


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
async def test_replayed_updates_make_the_donors_state_bit_by_bit(world, name):
    config = {
        "model_type": "gpt2", "vocab_size": 17, "n_positions": 6, "n_embd": 8, "n_layer": 2, "n_head": 2,
        "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    manifest = RunManifest.model_validate(
        {
            "name": "tiny",
            "model": {"config": config},
            "stages": {"count": 2},
            "data": {"sequence_length": 6},
            "training": {"steps": 10, "global_batch_size": 8, "microbatch_size": 2},
            "optimizer": {"name": name, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 2},
        }
    )
    spec = ResolvedManifest.of(manifest).specs[STAGE]
    donor = await world.donor("a", round_number=0)
    trainer, newcomer = (
        StageTrainer(ResolvedManifest.of(manifest), spec),
        StageTrainer(ResolvedManifest.of(manifest), spec),
    )
    donor.trainer = donor.donor.core.trainer = trainer
    donor.donor.enter(0, "l", FIRST_TIMELINE, b"")
    random_ = torch.Generator().manual_seed(0)

    async def end_round():
        gradients = [torch.randn(p.shape, generator=random_) for p in trainer.module.parameters()]
        donor.donor.kept[donor.round_number] = f"entry {donor.round_number}", gradients
        trainer.apply(gradients)
        donor.donor.enter(donor.round_number + 1, "l", FIRST_TIMELINE, b"")

    await end_round()
    limit = max_state_bytes(ResolvedManifest.of(manifest), STAGE)
    state = await world.fetch(donor, max_bytes=limit)
    for _ in range(3):
        await end_round()
    newcomer.load_state(state.tensors, state.optimizer_step)
    for round_number in range(state.round_number, donor.round_number):
        update = await world.fetch(donor, max_bytes=limit, kind="update", min_round=round_number)
        newcomer.apply(list(update.tensors.values()))
    assert newcomer.optimizer_step == trainer.optimizer_step == 4
    assert_equal(newcomer.state(), trainer.state())
