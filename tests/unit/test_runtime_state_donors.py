"""Which states a donor gives away, and for how long it holds them."""

import asyncio
import hashlib

import anyio
import anyio.from_thread
import pytest
import torch
from state_donors import CHUNK_BYTES, HASH, STAGE, assert_equal, assert_state_of
from state_donors import clock as clock
from state_donors import world as world

from swarm_peer.errors import CallError, InvalidMessage, NotServing
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.runtime.stage.device_thread import Priority
from swarm_peer.runtime.state import state_server
from swarm_peer.runtime.state.chunks import CHUNKS_IN_FLIGHT
from swarm_peer.runtime.state.state_server import LEASE_S, MAX_ROUNDS_BEHIND, MAX_STATES_HELD, RETAIN_S
from swarm_peer.wire.messages import StateChunkCall, StateEntry


async def test_donors_of_the_same_state_make_the_same_index(world):
    a, b, c = await world.donor("a"), await world.donor("b"), await world.donor("c", fill=2)
    names = [(await world.index_of(donor))[0] for donor in (a, b, c)]
    assert names[0] == names[1] != names[2]


async def test_the_index_names_what_it_holds(world):
    donor = await world.donor("a", round_number=20, timeline=Timeline(18, 5, 5))
    _, index = await world.index_of(donor)
    data = donor.trainer.state()["weight"].numpy().tobytes()
    hashes = tuple(hashlib.sha256(data[start : start + CHUNK_BYTES]).digest() for start in range(0, 140, CHUNK_BYTES))
    assert index.entries[0] == StateEntry(name="weight", dtype="float32", shape=(5, 7), chunks=hashes)
    assert (index.stage, index.kind, index.round_number, index.history_hash) == (
        STAGE,
        "state",
        20,
        "history_hash of 1.0",
    )
    assert (index.timeline_first_round, index.timeline_first_optimizer_step, index.ledger) == (18, 5, b"ledger")


async def test_a_download_that_began_before_an_optimizer_step_is_not_torn_by_it(world):
    donor = await world.donor("a", fill=1.0)
    before = donor.trainer.state()
    fault = world.network.fault(op="state_chunk", skip=3, before=anyio.Event())
    fetching = asyncio.ensure_future(world.fetch(donor))
    await fault.struck.wait()
    await donor.goes_on(fill=5.0)
    newer = await world.fetch(donor, min_round=4)
    assert_state_of(newer, donor)
    fault.before.set()
    state = await fetching
    assert (state.round_number, state.history_hash) == (3, "history_hash of 1.0")
    assert_equal(state.tensors, before)


async def test_a_state_is_kept_for_as_long_as_peers_download_it(world, clock):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0)
    for fill in range(5):
        clock.passed_s += RETAIN_S - 1
        await donor.goes_on(fill)
        donor.donor.server._drop_expired()
        await world.call(donor, chunk)
    clock.passed_s += RETAIN_S + 1
    donor.donor.server._drop_expired()
    with pytest.raises(NotServing, match="this is not kept here any more"):
        await world.call(donor, chunk)
    assert donor.donor.server.stored == {}


async def test_states_that_nobody_uses_do_not_pile_up(world, clock):
    donor = await world.donor("a")
    for fill in range(20):
        await donor.goes_on(fill)
        await world.fetch(donor)
        clock.passed_s += RETAIN_S / 2
        assert len(donor.donor.server._held()) <= MAX_STATES_HELD


async def test_few_states_are_held_however_often_they_are_asked_for(world):
    donor = await world.donor("a")
    used, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=used, entry=0, chunk=0)
    for fill in range(40):
        await donor.goes_on(fill)
        _, index = await world.index_of(donor, min_round=donor.round_number)
        assert index.round_number == donor.round_number
        assert len(donor.donor.server._held()) <= MAX_STATES_HELD
        await world.call(donor, chunk)
    assert used in donor.donor.server._held(), "the one that somebody downloads is not the one that goes"


async def test_a_newcomer_that_can_catch_up_from_a_held_state_takes_none_away(world):
    donor = await world.donor("a")
    names = []
    for fill in range(MAX_STATES_HELD):
        names.append((await world.index_of(donor))[0])
        await donor.goes_on(fill)
    newest = donor.round_number - 1
    for fill in range(MAX_ROUNDS_BEHIND - 1):
        await donor.goes_on(fill)
    name, index = await world.index_of(donor)
    assert (name, index.round_number) == (names[-1], newest)
    for round_number in range(newest, donor.round_number):
        await world.fetch(donor, kind="update", min_round=round_number)
    assert (await world.index_of(donor, min_round=newest + 1))[1].round_number == donor.round_number
    donor.enter(
        donor.round_number + 4, Timeline(donor.round_number + 4, donor.trainer.optimizer_step, donor.round_number)
    )
    assert (await world.index_of(donor))[1].round_number == donor.round_number, (
        "no state of the timeline before is of use"
    )


async def test_a_state_of_another_history_is_not_given_for_the_newest_of_the_same_round(world):
    """A peer that catches up may take over other weights in the round that it is in."""
    donor = await world.donor("a")
    _, before = await world.index_of(donor)
    donor.trainer.fill = 2.0
    donor.enter(donor.round_number, donor.donor.current.timeline)
    _, index = await world.index_of(donor)
    assert (index.round_number, index.history_hash) == (before.round_number, donor.history_hash())


async def test_weights_that_lack_an_update_are_those_of_the_round_that_began_with_them(world, monkeypatch):
    monkeypatch.setattr(state_server, "WAIT_FOR_ROUND_S", 0.0)
    donor = await world.donor("a")
    name, index = await world.index_of(donor)
    donor.donor.enter(4, donor.history_hash(), FIRST_TIMELINE, b"ledger", lag=1)
    assert await world.index_of(donor) == (name, index), "they are the same"
    with pytest.raises(NotServing, match="the weights of round 3, not those of 4"):
        await world.index_of(donor, min_round=4)
    donor.donor.kept[3] = "history_hash of 2.0", [torch.zeros(1)]
    donor.trainer.optimizer_step, donor.trainer.fill = 4, 2.0
    donor.donor.enter(5, donor.history_hash(), FIRST_TIMELINE, b"ledger", lag=1)
    assert (await world.index_of(donor, min_round=4))[1].round_number == 4
    donor.donor.kept[4] = "history_hash of 3.0", [torch.zeros(1)]
    donor.trainer.optimizer_step, donor.trainer.fill = 5, 3.0
    donor.donor.enter(6, donor.history_hash(), FIRST_TIMELINE, b"ledger", lag=1)
    assert (await world.index_of(donor))[1].round_number == 4, "a newcomer can have the update since"
    del donor.donor.kept[4]
    assert (await world.index_of(donor))[1].round_number == 5


async def test_a_state_that_is_too_old_to_be_caught_up_with_makes_room(world):
    donor = await world.donor("a")
    for fill in range(MAX_STATES_HELD):
        await world.index_of(donor)
        await donor.goes_on(fill)
    for fill in range(MAX_ROUNDS_BEHIND):
        await donor.goes_on(fill)
    assert (await world.index_of(donor))[1].round_number == donor.round_number
    assert len(donor.donor.server._held()) == MAX_STATES_HELD


async def test_a_peer_whose_state_had_to_make_room_downloads_the_next_one(world):
    donor = await world.donor("a")
    fault = world.network.fault(op="state_chunk", times=CHUNKS_IN_FLIGHT, before=anyio.Event())
    fetching = asyncio.ensure_future(world.fetch(donor))
    await fault.struck.wait()
    for fill in range(MAX_STATES_HELD):
        await donor.goes_on(fill)
        await world.index_of(donor, min_round=donor.round_number)
    fault.before.set()
    with pytest.raises(CallError, match="not kept here any more"):
        await fetching
    assert_state_of(await world.fetch(donor), donor)


async def test_a_state_serves_all_peers_that_ask_in_a_round(world, monkeypatch):
    donor = await world.donor("a")
    taken = []
    state = donor.trainer.state
    monkeypatch.setattr(donor.trainer, "state", lambda: taken.append(1) or state())
    states = await asyncio.gather(*(world.fetch(donor) for _ in range(3)))
    assert taken == [1]
    for given in states:
        assert_state_of(given, donor)


async def test_a_donor_waits_for_the_round_that_is_asked_for(world):
    donor = await world.donor("a")
    fetching = asyncio.ensure_future(world.fetch(donor, min_round=4))
    await anyio.wait_all_tasks_blocked()
    assert not fetching.done()
    await donor.goes_on(fill=2.0)
    assert_state_of(await fetching, donor)


async def test_a_donor_without_the_state_says_so(world, monkeypatch):
    monkeypatch.setattr(state_server, "WAIT_FOR_ROUND_S", 0.0)
    donor = await world.donor("a")
    with pytest.raises(CallError, match="this peer has the weights of round 3, not those of 9"):
        await world.fetch(donor, min_round=9)
    with pytest.raises(CallError, match=r"this peer serves stages \[1\], not 0"):
        await world.fetch(donor, stage=0)
    donor.donor.forget_state()
    with pytest.raises(CallError, match="this peer has the weights of round 0, not those of 0"):
        await world.fetch(donor)


@pytest.mark.parametrize(("entry", "chunk"), [(6, 0), (2**13 - 1, 0), (0, 9), (0, 2**15 - 1), (5, 0)])
async def test_chunks_that_there_are_not_are_refused(world, entry, chunk):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    with pytest.raises(InvalidMessage, match=f"chunk {chunk} of tensor {entry} of 6"):
        await world.call(donor, StateChunkCall(manifest=HASH, index=name, entry=entry, chunk=chunk))
    reply = await world.call(donor, StateChunkCall(manifest=HASH, index=name, entry=0, chunk=8))
    assert [tensor.nbytes for tensor in reply.tensors] == [140 - 8 * CHUNK_BYTES], "the last one is shorter"


async def test_a_state_that_is_ahead_of_its_history_hash_is_not_given_away(world):
    """Between the update of the weights and the entry into the next round the two do not belong together."""
    donor = await world.donor("a")
    donor.trainer.optimizer_step, donor.trainer.fill = 4, 5.0  # updated in the device thread
    fetching = asyncio.ensure_future(world.fetch(donor))
    for _ in range(5):
        await donor.device_thread.run(Priority.EVALUATE, lambda: None)
        await anyio.wait_all_tasks_blocked()
    assert world.network.num_calls("state_chunk") == 0
    donor.enter(4, FIRST_TIMELINE)
    assert_state_of(await fetching, donor)


async def test_a_state_is_not_held_for_ever_whatever_is_asked_of_it(world, clock):
    donor = await world.donor("a")
    name, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0)
    for fill in range(int(2 * LEASE_S / RETAIN_S) - 1):
        await world.call(donor, chunk)
        clock.passed_s += RETAIN_S / 2
        await donor.goes_on(fill)
        donor.donor.server._drop_expired()
    await world.call(donor, chunk)
    clock.passed_s += RETAIN_S / 2 + 1
    donor.donor.server._drop_expired()
    with pytest.raises(NotServing, match="this is not kept here any more"):
        await world.call(donor, chunk)
    assert donor.donor.server.stored == {}


async def test_a_large_state_is_held_for_as_long_as_its_download_takes(world, clock, monkeypatch):
    donor = await world.donor("a")
    num_bytes = sum(tensor.nbytes for tensor in donor.trainer.state().values())
    monkeypatch.setattr(state_server, "SLOWEST_BYTES_PER_S", num_bytes / (3 * LEASE_S))
    name, _ = await world.index_of(donor)
    chunk = StateChunkCall(manifest=HASH, index=name, entry=0, chunk=0)
    for _ in range(int(6 * LEASE_S / RETAIN_S) - 1):
        await world.call(donor, chunk)
        clock.passed_s += RETAIN_S / 2
        donor.donor.server._drop_expired()
    await world.call(donor, chunk)
    clock.passed_s += RETAIN_S / 2 + 1
    donor.donor.server._drop_expired()
    assert name not in donor.donor.server.stored


async def test_a_state_is_dropped_in_the_middle_of_a_long_round(world, clock, monkeypatch):
    monkeypatch.setattr(state_server, "EXPIRY_POLL_S", 0.0)
    donor = await world.donor("a")
    await world.fetch(donor)
    await donor.goes_on(2.0)
    assert donor.donor.server.stored
    clock.passed_s += RETAIN_S + 1
    expiring = asyncio.ensure_future(donor.donor.server.run())
    while donor.donor.server.stored:  # noqa: ASYNC110
        await asyncio.sleep(0)
    expiring.cancel()
