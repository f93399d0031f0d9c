import asyncio
import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from contexts import MovedClock, make_context
from tiny_models import LENGTH, LLAMA

from swarm_peer.config import PeerOptions, RunManifest
from swarm_peer.errors import CallError, NotServing, UserError
from swarm_peer.policy.view import PeerState
from swarm_peer.runtime import peer as peers
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.peer import Peer

MANIFEST = RunManifest.model_validate(
    {
        "name": "test",
        "model": {"config": LLAMA},
        "stages": {"count": 2},
        "data": {"sequence_length": LENGTH, "dataset": "text", "files": ["/data/corpus.txt"]},
        "training": {"steps": 10, "global_batch_size": 6, "microbatch_size": 3},
        "optimizer": {"learning_rate": 0.1},
    }
)
OPTIONS = PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1",))


class Mover(Peer):
    """A peer that serves stage 1, of which the test says what checks, downloads and others do."""

    def __init__(self, check=None, prepare=None, stays=False):
        self._context = make_context(MANIFEST, options=OPTIONS)
        self._options = OPTIONS
        self._lifecycle = Lifecycle(MovedClock(now=1.0))
        self._lifecycle.enter(PeerState.SERVING)
        self._directory = SimpleNamespace(announce=self._announce)
        self._parts = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self._movable, self._prepared = True, None
        self._check, self._prepare_error, self._stays = check, prepare, stays
        self.announced = []
        self.replica = SimpleNamespace(stage=1)

    async def _announce(self):
        self.announced.append((self._lifecycle.state, self._lifecycle.note))

    def _check_move(self, stage):
        if self._check:
            raise self._check

    async def _prepare(self, replica, stage):
        assert self._lifecycle.state is PeerState.SERVING, "nothing is drained before the next stage is there"
        if self._prepare_error:
            raise self._prepare_error
        return "the next replica"

    async def _may_leave(self, replica):
        return not self._stays


async def test_a_stage_that_this_machine_cannot_serve_is_refused_before_anything_is_drained():
    mover = Mover(check=UserError("no memory"))
    assert not await mover._move(mover.replica, 0)
    assert mover.announced == [(PeerState.SERVING, "cannot serve stage 0: no memory")], "the coordinator learns why"
    assert not mover._movable
    assert not mover._lifecycle.stop.is_set()


async def test_a_download_that_fails_leaves_the_peer_where_it_is():
    mover = Mover(prepare=CallError("nobody gave it"))
    assert not await mover._move(mover.replica, 0)
    assert (mover._lifecycle.state, mover._movable, mover._prepared) == (PeerState.SERVING, True, None)
    assert not mover._lifecycle.stop.is_set(), "it may be asked again"


@pytest.mark.parametrize("fails", ["open", "join"])
async def test_a_device_that_turns_out_too_small_for_both_stages_costs_the_present_one_nothing(monkeypatch, fails):
    """What has room is a guess, and others may use the device, too."""

    def run_out():
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def open_replica(parts, stage, counted):
        async def join(donors):
            run_out()

        if fails == "open":
            run_out()
        return SimpleNamespace(parts=SimpleNamespace(step_loop=SimpleNamespace(join=join)), stage_mates=lambda: ["m"])

    async def look(stages):
        return SimpleNamespace(serving=lambda stage: ["m"])

    monkeypatch.setattr(peers, "has_room_beside", lambda *args: True)
    monkeypatch.setattr(peers.StageReplica, "open", open_replica)
    mover = Mover()
    mover._directory.refresh_surely, mover._counted = look, None
    assert await Peer._prepare(mover, mover.replica, 0) is None, "it closes the present one first"
    assert mover._lifecycle.state is PeerState.SERVING


async def test_the_last_peer_of_a_stage_stays_and_gives_up_what_it_has_prepared():
    mover = Mover(stays=True)
    assert not await mover._move(mover.replica, 0)
    assert mover._prepared is None
    assert not mover._lifecycle.stop.is_set()


class Prepared:
    """A replica of another stage, whose parts know each other."""

    def __init__(self):
        self.part = SimpleNamespace(replica=self)


@pytest.mark.parametrize("prepare_fails", [True, False])
@pytest.mark.parametrize("moves_when", ["told", "needed"])
async def test_what_was_prepared_in_vain_is_out_of_memory_before_the_peer_looks_again(
    monkeypatch, prepare_fails, moves_when
):
    """The collector may come much later, and until then the weights of two stages leave the device no room."""
    prepared, seen = [], []

    class Failing(Mover):
        async def _prepare(self, replica, stage):
            replica = Prepared()
            prepared.append(weakref.ref(replica))
            if prepare_fails:
                raise CallError("its last donor has gone")
            return replica

    async def next_stage():
        seen.append([replica() for replica in prepared])
        if len(seen) == 2:
            raise CallError("enough")
        return 0

    async def wait_for_assignment(**_):
        return SimpleNamespace(to_stage=await next_stage(), reason="")

    monkeypatch.setattr(peers, "wait_for_assignment", wait_for_assignment)
    monkeypatch.setattr(peers.log, "disabled", True)  # pytest keeps what is logged, and so the error with its frames
    mover = Failing(stays=True)
    mover._me, mover._newest_term = "me", None
    mover.replica.parts = SimpleNamespace(recovery=SimpleNamespace(watch_stages=next_stage))
    wait = mover._obey if moves_when == "told" else mover._move_when_needed
    gc.disable()
    try:
        with pytest.raises(CallError, match="enough"):
            await wait(mover.replica)
    finally:
        gc.enable()
    assert seen == [[], [None]]


async def test_a_peer_moves_with_what_it_has_prepared():
    mover = Mover()
    assert await mover._move(mover.replica, 0)
    assert (mover._prepared, mover._lifecycle.next_stage) == ("the next replica", 0)
    assert mover._lifecycle.stop.is_set()


async def test_a_peer_that_is_told_to_end_during_a_move_does_not_drain_again():
    mover = Mover()
    mover._lifecycle.end()
    mover._lifecycle.enter(PeerState.DRAINING)
    mover._lifecycle.enter(PeerState.LEFT)
    assert not await Peer._may_leave(mover, mover.replica)
    assert mover._lifecycle.state is PeerState.LEFT


async def test_data_that_may_not_be_read_is_found_before_a_move():
    mover = Mover()
    with pytest.raises(UserError, match="--data-dir"):
        await asyncio.to_thread(Peer._check_move, mover, 0)
    Peer._check_move(mover, 1)


async def test_a_peer_that_was_left_behind_does_not_wait_for_ever_for_others_that_were_not(monkeypatch):
    """Who left it behind may have died since, and its stage-mates hold the only state that is left."""
    monkeypatch.setattr(peers, "JOIN_PAUSE_S", 0.0)
    clock, asked = MovedClock(now=1.0), []

    async def nothing(*_):
        pass

    class Replica(SimpleNamespace):
        def stage_mates(self):
            return ["mate"]

        async def join(self, min_round):
            asked.append(min_round)
            if min_round > 7:
                clock.now += 100.0
                raise NotServing("this peer is in round 7, not in 8")

    mover = Mover()
    mover._context = replace(mover._context, clock=clock)
    mover._manifest = MANIFEST
    mover._directory = SimpleNamespace(announce=nothing, refresh_surely=nothing)
    replica = Replica(stage=1, step=SimpleNamespace(round_number=7))
    mover._join_anew(replica, NotServing("the run has gone back without it"))
    await mover._join(replica)
    held_out = math.ceil(peers.LEFT_BEHIND_PATIENCE * MANIFEST.limits.announcement_s / 100.0)
    assert asked == [8] * held_out + [0]
