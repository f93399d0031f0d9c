import asyncio
import gc
import weakref
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest
import torch
from contexts import MovedClock, make_context
from tiny_models import LENGTH, LLAMA

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, HubFailed, NotServing, UserError
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.view import UNDECIDED, PeerState
from swarm_peer.runtime import mover as movers
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.mover import MOST_HUB_FAILURES, Mover
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


class ScriptedMover(Mover):
    """The mover of a peer that serves stage 1, of which the test says what checks, downloads and others do."""

    def __init__(self, check=None, prepare=None, base=None, stays=False):
        lifecycle = Lifecycle(MovedClock(now=1.0))
        lifecycle.enter(PeerState.SERVING)
        parts = SimpleNamespace(
            context=make_context(MANIFEST, options=OPTIONS),
            directory=SimpleNamespace(announce=self._announce, refresh_surely=None),
            device=SimpleNamespace(type="cpu"),
            base=SimpleNamespace(manifest=self._manifest, source=self._have_base),
            ways=SimpleNamespace(explain=self._reach),
            agreement=SimpleNamespace(core=SimpleNamespace(forget_prepared=self._forget)),
        )
        super().__init__(parts=parts, lifecycle=lifecycle, counted=None)
        self._check_error, self._prepare_error, self._base_error, self._stays = check, prepare, base, stays
        self.announced, self.forgotten = [], []
        self.replica = SimpleNamespace(stage=1)

    def _forget(self, stage):
        self.forgotten.append(stage)

    async def _announce(self):
        self.announced.append((self._lifecycle.state, self._lifecycle.note))

    async def _manifest(self):
        return None

    async def _reach(self, stage):
        return ""

    async def _have_base(self, stage, waits):
        assert not waits, "a peer that serves stays where it is"
        if self._base_error:
            raise self._base_error

    def _check(self, stage, manifest):
        if self._check_error:
            raise self._check_error

    async def _prepare(self, replica, stage):
        assert self._lifecycle.state is PeerState.SERVING, "nothing is drained before the next stage is there"
        if self._prepare_error:
            raise self._prepare_error
        return "the next replica"

    async def _may_leave(self, replica):
        return not self._stays


async def test_a_stage_that_this_machine_cannot_serve_is_refused_before_anything_is_drained():
    mover = ScriptedMover(check=UserError("no memory"))
    assert not await mover._move(mover.replica, 0)
    assert mover.announced == [(PeerState.SERVING, "cannot serve stage 0: no memory")], "the coordinator learns why"
    assert not mover.movable
    assert not mover._lifecycle.stop.is_set()


async def test_a_hub_that_fails_now_and_then_leaves_the_peer_movable():
    mover = ScriptedMover(check=HubFailed("429"))
    for _ in range(MOST_HUB_FAILURES):
        assert not await mover._move(mover.replica, 0)
        assert (mover.movable, mover.announced) == (True, [])
    assert not await mover._move(mover.replica, 0)
    assert (mover.movable, mover.announced) == (False, [(PeerState.SERVING, "cannot serve stage 0: 429")])


async def test_a_download_that_fails_leaves_the_peer_where_it_is():
    mover = ScriptedMover(prepare=CallError("nobody gave it"))
    assert not await mover._move(mover.replica, 0)
    assert (mover._lifecycle.state, mover.movable, mover._prepared) == (PeerState.SERVING, True, None)
    assert not mover._lifecycle.stop.is_set(), "it may be asked again"


@pytest.mark.parametrize("is_served", [True, False])
async def test_nobody_leaves_its_stage_for_one_whose_base_no_member_has(is_served):
    async def look(stages):
        return SimpleNamespace(serving=lambda stage: ["m"] if is_served else [])

    mover = ScriptedMover(base=NotServing("nobody has it"))
    mover._prepare = partial(Mover._prepare, mover)
    mover._directory.refresh_surely = look
    assert not await mover._move(mover.replica, 0)
    assert (mover._lifecycle.state, mover.moving_to) == (PeerState.SERVING, UNDECIDED)
    assert not mover._lifecycle.stop.is_set()


@pytest.mark.parametrize("fails", ["open", "join"])
async def test_a_device_that_turns_out_too_small_for_both_stages_costs_the_present_one_nothing(monkeypatch, fails):
    """What has room is a guess, and others may use the device, too."""

    def run_out():
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def open_replica(parts, stage, counted):
        if fails == "open":
            run_out()
        return SimpleNamespace(parts=SimpleNamespace(sources=None))

    async def prepare(agreement, stage, sources):
        run_out()

    async def look(stages):
        return SimpleNamespace(serving=lambda stage: ["m"])

    monkeypatch.setattr(movers, "has_room_beside", lambda *args: True)
    monkeypatch.setattr(movers, "prepare", prepare)
    monkeypatch.setattr(movers.Replica, "open", open_replica)
    mover = ScriptedMover()
    mover._directory.refresh_surely = look
    assert await Mover._prepare(mover, mover.replica, 0) is None, "it closes the present one first"
    assert mover._lifecycle.state is PeerState.SERVING


async def test_the_last_peer_of_a_stage_stays_and_gives_up_what_it_has_prepared():
    mover = ScriptedMover(stays=True)
    assert not await mover._move(mover.replica, 0)
    assert mover.take_prepared() is None
    assert not mover._lifecycle.stop.is_set()


class PreparingMover(ScriptedMover):
    """It notes where it moves to, when it announces itself and when it downloads; downloads fail as they are told."""

    def __init__(self, monkeypatch, *fails, **options):
        super().__init__(**options)
        self.seen, self._fails = [], list(fails)
        self._directory.refresh_surely = self._look
        monkeypatch.setattr(movers, "has_room_beside", lambda *args: True)
        monkeypatch.setattr(movers.Replica, "open", self._open)
        monkeypatch.setattr(movers, "prepare", self._take_state)

    async def _announce(self):
        self.seen.append(("announced", self.moving_to))

    async def _look(self, stages):
        return SimpleNamespace(serving=lambda stage: ["m"])

    async def _open(self, parts, stage, counted):
        self.seen.append(("downloads", self.moving_to))
        if self._fails and (error := self._fails.pop(0)):
            raise error
        return SimpleNamespace(parts=SimpleNamespace(sources=None))

    async def _take_state(self, agreement, stage, sources):
        pass

    async def _prepare(self, replica, stage):
        return await Mover._prepare(self, replica, stage)


async def test_a_peer_announces_where_it_moves_to_until_it_is_there(monkeypatch):
    mover = PreparingMover(monkeypatch)
    assert await mover._move(mover.replica, 0)
    assert mover.seen == [("announced", 0), ("downloads", 0)]
    assert mover.moving_to == 0, "it leaves its stage"
    assert mover.take_prepared() is not None
    assert mover.moving_to == UNDECIDED


async def test_a_peer_that_closes_its_stage_first_leaves_it_for_the_next_one(monkeypatch):
    mover = PreparingMover(monkeypatch)
    monkeypatch.setattr(movers, "has_room_beside", lambda *args: False)
    assert await mover._move(mover.replica, 0)
    assert mover.seen == [], "it prepares nothing"
    assert mover.moving_to == 0
    assert mover.forgotten == [0], "a state of an earlier move that came to nothing, whose replica is gone"


async def test_a_download_that_has_failed_is_announced_no_more(monkeypatch):
    """The coordinator would wait for as long as it fails again."""
    mover = PreparingMover(monkeypatch, CallError("gone"), CallError("gone"))
    for _ in range(2):
        assert not await mover._move(mover.replica, 0)
        assert mover.moving_to == UNDECIDED
    assert mover.seen == [("announced", 0), ("downloads", 0), ("downloads", UNDECIDED)]
    assert await mover._move(mover.replica, 0)


async def test_a_move_that_is_refused_is_not_announced(monkeypatch):
    mover = PreparingMover(monkeypatch, UserError("cannot read its data"))
    assert not await mover._move(mover.replica, 0)
    assert mover.seen == [("announced", 0), ("downloads", 0), ("announced", UNDECIDED)]


async def test_who_stays_since_nobody_else_serves_its_stage_moves_nowhere(monkeypatch):
    mover = PreparingMover(monkeypatch)
    mover.replica.stage_mates = list
    mover._may_leave = partial(Mover._may_leave, mover)
    assert not await mover._move(mover.replica, 0)
    assert mover.seen[-2:] == [("announced", 0), ("announced", UNDECIDED)]
    assert mover._lifecycle.state is PeerState.SERVING


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

    class Failing(ScriptedMover):
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

    monkeypatch.setattr(movers, "wait_for_assignment", wait_for_assignment)
    monkeypatch.setattr(movers.log, "disabled", True)  # pytest keeps what is logged, and so the error with its frames
    mover = Failing(stays=True)
    monkeypatch.setattr(movers, "watch_stages", lambda *_: next_stage())
    mover.replica.parts = SimpleNamespace(swarm=None)
    wait = partial(mover.obey, since=0) if moves_when == "told" else mover.rescue
    gc.disable()
    try:
        with pytest.raises(CallError, match="enough"):
            await wait(mover.replica)
    finally:
        gc.enable()
    assert seen == [[], [None]]


async def test_a_peer_moves_with_what_it_has_prepared():
    mover = ScriptedMover()
    assert await mover._move(mover.replica, 0)
    assert (mover._prepared, mover._lifecycle.next_stage) == ("the next replica", 0)
    assert mover._lifecycle.stop.is_set()


async def test_a_peer_that_is_told_to_end_during_a_move_does_not_drain_again():
    mover = ScriptedMover()
    mover._lifecycle.end()
    mover._lifecycle.enter(PeerState.DRAINING)
    mover._lifecycle.enter(PeerState.LEFT)
    assert not await Mover._may_leave(mover, mover.replica)
    assert mover._lifecycle.state is PeerState.LEFT


async def test_a_peer_that_loses_its_place_while_it_drains_for_a_move_joins_again(monkeypatch):
    announced = []

    class Directory:
        serial, view = 1, None

        @asynccontextmanager
        async def kept_fresh(self, stages):
            yield

        async def refresh_surely(self, stages):
            await anyio.sleep_forever()  # the DHT takes its time

        async def announce(self):
            announced.append((lifecycle.state, mover.moving_to))
            await anyio.lowlevel.checkpoint()

    class LosingMover(ScriptedMover):
        async def _may_leave(self, replica):
            return await Mover._may_leave(self, replica)

    async def lost(*_):
        return 0

    mover = LosingMover()
    lifecycle, mover._directory = Lifecycle(MovedClock(now=1.0)), Directory()
    mover._lifecycle, changed = lifecycle, Condition()
    monkeypatch.setattr(movers, "watch_stages", lost)
    step = SimpleNamespace(round_number=3, optimizer_step=3)
    replica = SimpleNamespace(is_serving=True, has_place=True, stage=1, stages_of_interest=[1], step=step)
    peer = SimpleNamespace(
        _directory=mover._directory,
        _manifest=MANIFEST,
        _context=SimpleNamespace(changed=changed),
        _lifecycle=lifecycle,
        _options=SimpleNamespace(stage=1),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Peer._follow_place, peer, replica, mover)
        await anyio.wait_all_tasks_blocked()
        assert announced[-1] == (PeerState.DRAINING, 0)
        replica.has_place = replica.is_serving = False
        changed.notify()
        await anyio.wait_all_tasks_blocked()
        assert announced[-1] == (PeerState.JOINING, UNDECIDED)
        assert not lifecycle.stop.is_set()
        tasks.cancel_scope.cancel()


async def test_data_that_may_not_be_read_is_found_before_a_move():
    mover = ScriptedMover()
    with pytest.raises(UserError, match="--data-dir"):
        await asyncio.to_thread(Mover._check, mover, 0, MANIFEST)
    Mover._check(mover, 1, MANIFEST)
