import asyncio
import sys
import threading
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial, reduce
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest
import torch
from contexts import ReadClock, dispatcher, make_context
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from given_states import GivenStates
from memory_transport import MemoryNetwork

from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, CallTimeout, InvalidMessage, NotServing, OtherTimeline, PeerUnreachable
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer, max_state_bytes
from swarm_peer.policy import recovery as policy
from swarm_peer.policy.data.ranges import SampleId, WindowRange
from swarm_peer.policy.data.sample_ledger import SampleLedger
from swarm_peer.policy.lineage import extend_lineage
from swarm_peer.policy.recovery import FIRST_TIMELINE, MIN_ROUNDS_LEFT, SnapshotRef, Timeline
from swarm_peer.policy.run_progress import MAX_ROUND, MAX_ROUNDS_AHEAD
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.policy.voting import Verdict
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.host.machine import FolderStorage
from swarm_peer.runtime.network.gossip import Gossip
from swarm_peer.runtime.network.progress import ProgressBook
from swarm_peer.runtime.network.swarm_access import SwarmAccess
from swarm_peer.runtime.network.transport import Reply, check_body
from swarm_peer.runtime.replica import StageReplica
from swarm_peer.runtime.stage.admission import RoundAdmission
from swarm_peer.runtime.stage.device_thread import DeviceThread
from swarm_peer.runtime.stage.microbatch_capacity import Capacity
from swarm_peer.runtime.stage.replica_core import ReplicaCore
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.runtime.state import joining, recovery, rescue, timeline_watch
from swarm_peer.runtime.state.index import StageState, digest_weights, extend_history
from swarm_peer.runtime.state.own_work import OwnWork
from swarm_peer.runtime.state.recovery import (
    CHECKPOINT_PATIENCE,
    HOLDER_PATIENCE,
    INTERVALS_FROM_SCRATCH,
    RIVAL_PATIENCE,
    ROUNDS_BETWEEN_TIMELINES,
    UNREACHED_PATIENCE,
    Recovery,
)
from swarm_peer.runtime.state.rescue import JOINER_BYTES_PER_S, JOINER_PATIENCE, RESCUE_PATIENCE, watch_stages
from swarm_peer.runtime.state.snapshot_keeper import GUARD_TRIES, SnapshotKeeper
from swarm_peer.runtime.state.timeline_watch import TimelineWatch
from swarm_peer.runtime.step import contribution, rewinds
from swarm_peer.runtime.step import step_loop as steps
from swarm_peer.runtime.step.barrier import Barrier
from swarm_peer.runtime.step.outcome import Settlement
from swarm_peer.runtime.step.rewinds import MAX_ROUNDS_OF_REWIND
from swarm_peer.runtime.step.round_reports import num_read_again
from swarm_peer.runtime.step.settlement import StageGroup
from swarm_peer.runtime.step.step_loop import StepLoop
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.ledger_codec import MAX_LEDGER_BYTES
from swarm_peer.wire.messages import ListSnapshotsCall, ListSnapshotsReply, RewindCall, RewindReply, StateIndexCall
from swarm_peer.wire.records import TimelineRecord

EVERY = 10
MANIFEST = RunManifest.model_validate(
    {
        "name": "tiny",
        "model": {
            "config": {
                "model_type": "gpt2", "vocab_size": 17, "n_positions": 6, "n_embd": 8, "n_layer": 3, "n_head": 2,
                "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
            }
        },
        "stages": {"count": 3},
        "data": {"sequence_length": 6},
        "training": {"steps": 1000, "global_batch_size": 8, "microbatch_size": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
        "averaging": {"compare_weights_every": 2},
        "recovery": {"snapshot_every": EVERY},
    }
)  # fmt: skip
RUN_ID = "the run's key"
NEWER = Timeline(45, 40, 40)


def weights(stage, optimizer_step):
    return {"weight": torch.full((4,), 1000.0 * stage + optimizer_step)}


async def find_coordinators():
    return [RUN_ID]


class FakeTrainer:
    def __init__(self, stage, optimizer_step):
        self.stage, self.optimizer_step = stage, optimizer_step
        self.spec = SimpleNamespace(index=stage)

    @property
    def weights_version(self):
        return self.optimizer_step

    def state(self):
        return weights(self.stage, self.optimizer_step)


class Peer:
    """A peer with a donor and its recovery; its rounds are what a test says."""

    def __init__(
        self, swarm, peer_id, stage, round_number=0, timeline=FIRST_TIMELINE, state=PeerState.SERVING, store=None
    ):
        self.peer_id, self.stage, self.state = peer_id, stage, state
        self.speed, self.movable = 1.0, True
        self.trainer = FakeTrainer(stage, 0)
        context = self.context = make_context(MANIFEST, clock=swarm.clock, folder=swarm.folder / peer_id)
        self.changed = context.changed
        self.device_thread = DeviceThread(clock=context.clock, threads=context.threads, metrics=context.metrics)
        self.transport = swarm.network.transport(peer_id)
        self.donor = GivenStates(context, self.trainer, self.device_thread, store)
        self.told = []  # rewinds
        self.denies = None  # why it would not go back
        self.enter(round_number, timeline)
        access = self.access = SimpleNamespace(
            transport=self.transport,
            view=swarm.view,
            look=swarm.look,
            coordinators=find_coordinators,
            beginning=swarm.beginning,
        )
        self.recovery = Recovery(
            context=context,
            stage=stage,
            swarm=access,
            snapshots=self.donor.store,
            unreached=swarm.unreached,
            furthest=lambda: swarm.furthest,
        )
        self.timeline_watch = TimelineWatch(context=context, stage=stage, swarm=access)
        self.keeper = SnapshotKeeper(
            context=context, stage=stage, swarm=access, state_server=self.donor.server, snapshots=self.donor.store
        )

    def enter(self, round_number, timeline=None):
        timeline = self.donor.current.timeline if timeline is None else timeline
        self.trainer.optimizer_step = timeline.optimizer_step_at(round_number)
        self.donor.enter(round_number, f"history_hash of {self.trainer.optimizer_step}", timeline, b"")

    async def store_snapshot(self, *snapshots):
        """Keep snapshots of (stage, updates): of this peer's timeline, or of the run's first one before that."""
        for stage, optimizer_step in snapshots:
            own = self.donor.current.timeline
            timeline = own if optimizer_step > own.first_optimizer_step else FIRST_TIMELINE
            round_number = optimizer_step - timeline.first_optimizer_step + timeline.first_round
            state = StageState(
                round_number, f"history_hash of {optimizer_step}", weights(stage, optimizer_step), timeline
            )
            await self.donor.store_snapshot(stage, state)

    @property
    def snapshots(self):
        """Stage and updates of its snapshots."""
        return sorted((known.stage, known.optimizer_step) for known, _ in self.donor.snapshots())

    def view(self):
        current = self.donor.current
        round_number, optimizer_step = current.round_number, current.optimizer_step
        return PeerView(
            peer_id=self.peer_id,
            stage=self.stage,
            state=self.state,
            round_number=round_number,
            samples_per_s=self.speed,
            queue=0,
            optimizer_step=optimizer_step,
            movable=self.movable,
        )

    async def __call__(self, caller, op, body, tensors):
        if op == "rewind":
            call = check_body(RewindCall, body)
            if call.asks_only:
                if self.denies is not None:
                    raise NotServing(self.denies)
                return Reply(RewindReply(round_number=self.donor.current.round_number).model_dump())
            self.told.append(
                (caller, call.lost_stage, Timeline(call.first_round, call.first_optimizer_step, call.created_at_round))
            )
            return Reply(RewindReply(round_number=self.donor.current.round_number).model_dump())
        [(call, handle)] = [(call, handle) for call, handle in self.donor.calls.items() if op_of(call) == op]
        return await handle(caller, check_body(call, body), tensors)


def op_of(call):
    return call.model_fields["op"].default


class Swarm:
    def __init__(self, folder):
        self.folder = folder
        self.clock = ReadClock(time.monotonic)
        self.network = MemoryNetwork()
        self.peers = {}
        self.made = []  # also those that were removed, or whose id another one has taken
        self.dropped = set()
        self.timeline = FIRST_TIMELINE
        self.furthest = self.reached = 0, 0
        self.looks = 0
        self.max_age_s = 0.0  # of the last look

    async def add(self, peer_id, stage, round_number=0, **options):
        peer = self.peers[peer_id] = Peer(self, peer_id, stage, round_number, **options)
        self.made.append(peer)
        await peer.transport.serve(peer)
        return peer

    async def newcomer(self, stage=1, peer_id="n", store=None):
        """A peer that finds nobody in its stage; with the snapshots of a peer that has moved there."""
        return await self.add(peer_id, stage, state=PeerState.JOINING, store=store)

    def view(self):
        return SwarmView(3, tuple(peer.view() for name, peer in self.peers.items() if name not in self.dropped))

    def unreached(self):
        return [self.peers[name].view() for name in self.dropped]

    async def look(self, stages, max_age_s=0.0):
        self.looks += 1
        self.max_age_s = max_age_s
        return SwarmView(3, tuple(peer for peer in self.view().peers if peer.stage in stages))

    async def beginning(self):
        return TimelineRecord(
            first_round=self.timeline.first_round,
            first_optimizer_step=self.timeline.first_optimizer_step,
            begun=1,
            reached_round=self.reached[0],
            reached_optimizer_step=self.reached[1],
        )


@pytest.fixture
async def swarm(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "PAUSE_S", 0.0)
    monkeypatch.setattr(recovery, "timeline_offset", lambda state, serving: 0)
    swarm = Swarm(tmp_path)
    async with swarm.network:
        yield swarm
    for peer in swarm.made:
        peer.device_thread.stop()


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def taken(fetch):
    """The state that is taken over first."""
    states = []

    async def take(state):
        states.append(state)

    await fetch(take)
    [state] = states
    return state


async def assert_state(fetch, stage, optimizer_step):
    assert_weights(await taken(fetch), stage, optimizer_step)


def assert_weights(state, stage, optimizer_step):
    assert torch.equal(state.tensors["weight"], weights(stage, optimizer_step)["weight"])
    assert state.optimizer_step == optimizer_step


# --- whether the run goes on without this peer ---------------------------------------------------------------------


class Watching:
    """A peer of stage 1 that stands in a round when a caller names a later one, and then avoids it."""

    def __init__(self, swarm, peer):
        self.swarm, self.peer, self.rounds = swarm, peer, peer.donor.rounds
        self.rounds.enter(Phase.OPEN)
        self.admission = RoundAdmission(capacity=Capacity(1), rounds=self.rounds, changed=peer.changed)
        self.admission.saw_round(self.rounds.step.round_number + 1)

    def meet_another(self):
        """Meet a stage-mate of another timeline, in the midst of work."""
        self.admission.saw_other_timeline()
        self.rounds.enter(Phase.ENDING)

    async def see(self, looks=2):
        """What it finds out by so many looks; None if it stays as it is."""
        found, before = [], self.swarm.looks

        async def watch():
            try:
                found.append(await self.peer.timeline_watch.wait_until_left(self.rounds, self.admission))
            except CallError as error:
                found.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            with anyio.fail_after(10.0):
                while not found and self.swarm.looks < before + looks:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        if found and isinstance(found[0], CallError):
            raise found[0]
        return found[0] if found else None


@pytest.fixture
async def watching(swarm, monkeypatch, request):
    limits = MANIFEST.limits.model_copy(update={"announcement_s": 0.01})
    peer = await swarm.add("b", 1, round_number=47, timeline=getattr(request, "param", FIRST_TIMELINE))
    monkeypatch.setattr(peer.timeline_watch, "_manifest", MANIFEST.model_copy(update={"limits": limits}))
    return Watching(swarm, peer)


async def test_a_peer_that_was_not_told_goes_back_with_the_others(swarm, watching):
    for peer_id, stage in (("a", 0), ("c", 2)):
        await swarm.add(peer_id, stage, round_number=53, timeline=Timeline(51, 40, 40))
    assert await watching.see() == Timeline(51, 40, 40)


async def test_a_peer_whose_part_of_the_run_went_on_elsewhere_joins_anew(swarm, watching):
    """The run was cut in two, and both parts went on. Rounds never go back, and those of the other part are used up."""
    for peer_id, stage in (("a", 0), ("m", 1), ("c", 2)):
        await swarm.add(peer_id, stage, round_number=46, timeline=Timeline(45, 40, 40))
    with pytest.raises(OtherTimeline, match="the run has gone back to 40 updates without it"):
        await watching.see()


@pytest.mark.parametrize("watching", [FIRST_TIMELINE, Timeline(46, 40, 40)], indirect=True)
@pytest.mark.parametrize("reaches_all_in_the_end", [True, False])
async def test_who_is_stuck_leaves_no_timeline_on_the_word_of_a_few_soon(
    swarm, watching, monkeypatch, reaches_all_in_the_end
):
    monkeypatch.setattr(timeline_watch, "MOST_UNSURE_LOOKS", 1000)
    for peer_id, stage in (("a", 0), ("m", 1), ("d", 1), ("c", 2)):
        own = watching.rounds.step.timeline
        timeline = FIRST_TIMELINE if own > FIRST_TIMELINE else NEWER
        await swarm.add(peer_id, stage, round_number=60, timeline=timeline)
    fault = swarm.network.fault(op="list_snapshots", to="c", fail=PeerUnreachable("gone"), times=1000)
    assert await watching.see(looks=4) is None
    if reaches_all_in_the_end:
        fault.times = 0
    else:
        monkeypatch.setattr(timeline_watch, "MOST_UNSURE_LOOKS", 2)
    with pytest.raises(OtherTimeline):
        await watching.see(looks=4)


@pytest.mark.parametrize("watching", [Timeline(46, 40, 40)], indirect=True)
async def test_a_peer_whose_timeline_a_stage_has_overtaken_joins_anew(swarm, watching):
    """A peer that was cut off has begun the timeline. Those in the same round or a later one cannot go back to it."""
    for peer_id, stage, round_number in (("a", 0, 60), ("c", 2, 59)):
        await swarm.add(peer_id, stage, round_number=round_number)
    with pytest.raises(CallError, match="stage 0 has passed round 46 without having heard"):
        await watching.see()


@pytest.mark.parametrize("watching", [Timeline(46, 40, 40)], indirect=True)
async def test_a_peer_whose_timeline_most_of_each_stage_may_follow_stays(swarm, watching):
    for peer_id, stage, round_number in (("a", 0, 60), ("d", 0, 45), ("c", 2, 45), ("m", 1, 60)):
        await swarm.add(peer_id, stage, round_number=round_number)
    assert await watching.see() is None


@pytest.mark.parametrize("watching", [Timeline(46, 0, 0)], indirect=True)
@pytest.mark.parametrize(
    ("others", "leaves"),
    [
        ([("m", 1, 46, FIRST_TIMELINE)], True),
        ([("m", 1, 45, FIRST_TIMELINE)], True),
        ([("m", 1, 46, FIRST_TIMELINE), ("c", 2, 45, FIRST_TIMELINE)], False),  # which can still come
        (
            [
                ("m", 1, 46, FIRST_TIMELINE),
                ("c", 2, 46, FIRST_TIMELINE),
                ("d", 2, 46, Timeline(46, 0, 0)),
                ("o", 2, 9, FIRST_TIMELINE),
            ],
            True,  # though a straggler can still come
        ),
        ([("m", 1, 46, FIRST_TIMELINE), ("d", 1, 46, FIRST_TIMELINE), ("o", 1, 46, Timeline(46, 0, 0))], True),
        ([("m", 1, 46, FIRST_TIMELINE), ("c", 2, 46, Timeline(46, 0, 0)), ("o", 2, 46, FIRST_TIMELINE)], True),
        ([("m", 1, 46, FIRST_TIMELINE), ("c", 2, 46, Timeline(46, 0, 0))], False),  # which the run is on
    ],
)
async def test_who_has_begun_anew_alone_joins_a_mate_that_goes_on_though_it_never_meets_it(
    swarm, watching, others, leaves
):
    """Another stage is lost, so that nobody sends anything: neither would go back to where the other is."""
    for peer_id, stage, round_number, timeline in others:
        await swarm.add(peer_id, stage, round_number=round_number, timeline=timeline)
    if leaves:
        with pytest.raises(OtherTimeline, match="no stage goes back to 0 updates"):
            await watching.see()
    else:
        assert await watching.see() is None


@pytest.mark.parametrize("mate", [(47, FIRST_TIMELINE), (60, Timeline(60, 46, 46))], ids=["as far", "elsewhere"])
async def test_a_stage_that_the_run_has_left_behind_notices(swarm, watching, mate):
    """The stage-mate that was further has died, and nobody of the round that this peer is in is left.

    A newcomer that could not reach this peer may have begun the stage anew. The others do not follow it while this peer
    serves.
    """
    for peer_id, stage, round_number, timeline in (
        ("a", 0, 48, FIRST_TIMELINE),
        ("c", 2, 49, FIRST_TIMELINE),
        ("m", 1, *mate),
    ):
        await swarm.add(peer_id, stage, round_number=round_number, timeline=timeline)
    with pytest.raises(CallError, match="the run has made 49 updates, this stage 47"):
        await watching.see()


@pytest.mark.parametrize(
    "others",
    [
        [("a", 0, 47), ("c", 2, 47)],  # nobody is further: the callers lie
        [("a", 0, 49), ("c", 2, 49), ("m", 1, 49)],  # a stage-mate is, and gives its state
        [],
    ],
)
async def test_a_peer_that_is_not_left_behind_stays(swarm, watching, others):
    for peer_id, stage, round_number in others:
        await swarm.add(peer_id, stage, round_number=round_number)
    assert await watching.see() is None


@pytest.mark.parametrize(
    ("watching", "others", "outcome"),
    [
        pytest.param(FIRST_TIMELINE, [("a", 0, 53, Timeline(51, 40, 40))], Timeline(51, 40, 40), id="goes back"),
        pytest.param(
            FIRST_TIMELINE, [("a", 0, 46, NEWER), ("m", 1, 46, NEWER)], "gone back to 40 updates", id="has passed it"
        ),
        pytest.param(FIRST_TIMELINE, [("a", 0, 46, NEWER)], None, id="its stage has"),
        pytest.param(
            FIRST_TIMELINE,
            [("a", 0, 500, FIRST_TIMELINE), ("m", 1, 46, NEWER), ("o", 1, 46, NEWER)],
            None,
            id="another stage has",
        ),
        pytest.param(
            NEWER, [("a", 0, 30, FIRST_TIMELINE), ("m", 1, 30, FIRST_TIMELINE)], "no stage goes back", id="went alone"
        ),
        pytest.param(NEWER, [("a", 0, 46, NEWER), ("m", 1, 30, FIRST_TIMELINE)], None, id="a stage is on it"),
        pytest.param(FIRST_TIMELINE, [("a", 0, 47, FIRST_TIMELINE), ("m", 1, 46, NEWER)], None, id="one mate is"),
    ],
    indirect=["watching"],
)
async def test_who_meets_another_timeline_finds_out_which_one_the_run_is_on(swarm, watching, others, outcome):
    """In the midst of its work, which each of two parts goes on with."""
    for peer_id, stage, round_number, timeline in others:
        await swarm.add(peer_id, stage, round_number=round_number, timeline=timeline)
    watching.admission.forget_later_rounds()
    assert await watching.see(looks=0) is None, "nobody has been met"
    watching.meet_another()
    if isinstance(outcome, str):
        with pytest.raises(OtherTimeline, match=outcome):
            await watching.see()
    else:
        assert await watching.see() == outcome
    assert not watching.admission.met_other_timeline


async def test_what_was_found_out_about_a_timeline_that_has_been_left_does_not_count(swarm, watching):
    await swarm.add("a", 0, round_number=53, timeline=Timeline(51, 40, 40))

    async def look(stages, **_):
        swarm.looks += 1
        watching.peer.enter(60, Timeline(60, 40, 40))  # the peer goes back meanwhile
        return swarm.view()

    watching.admission.forget_later_rounds()
    watching.peer.timeline_watch._swarm.look = look
    watching.meet_another()
    assert await watching.see() is None


async def test_what_two_looks_do_not_agree_on_is_looked_at_again(swarm, watching):
    """Peers of both timelines may die or leave between: then all of both would leave them at once."""
    for peer_id in "am":
        await swarm.add(peer_id, "am".index(peer_id), round_number=9)
    watching.admission.forget_later_rounds()
    watching.peer.enter(47, NEWER)
    watching.rounds.enter(Phase.OPEN)
    look = swarm.look

    async def look_and_change(stages, **_):
        view = await look(stages)
        swarm.peers["m"].enter(46, NEWER if swarm.looks % 2 else FIRST_TIMELINE)
        return view

    watching.peer.timeline_watch._swarm.look = look_and_change
    watching.meet_another()
    assert await watching.see(looks=4) is None
    watching.peer.timeline_watch._swarm.look = look
    swarm.peers["m"].enter(9, FIRST_TIMELINE)
    watching.meet_another()
    with pytest.raises(OtherTimeline):
        await watching.see()


@pytest.mark.parametrize("watching", [NEWER], indirect=True)
@pytest.mark.parametrize("silent", ["dac", "c"])
async def test_no_timeline_is_left_on_the_word_of_a_few(swarm, watching, silent):
    """Answers get lost as long as a cut heals."""
    for peer_id, stage in (("a", 0), ("m", 1), ("d", 0), ("c", 2)):
        await swarm.add(peer_id, stage, round_number=9)
    watching.admission.forget_later_rounds()
    faults = [
        swarm.network.fault(op="list_snapshots", to=peer, fail=PeerUnreachable("gone"), times=1000) for peer in silent
    ]
    watching.meet_another()
    assert await watching.see(looks=4) is None
    for fault in faults:
        fault.times = 0
    watching.meet_another()
    with pytest.raises(OtherTimeline):
        await watching.see()


@pytest.mark.parametrize(
    ("donors", "shunned", "left"),
    [
        ("am", NEWER, (["a"], FIRST_TIMELINE)),
        ("m", NEWER, ([], None)),
        ("x", NEWER, ([], None)),
        ("x", None, (["x"], None)),
        ("m", None, (["m"], NEWER)),
        ("am", None, (["m"], NEWER)),
        ("amo", None, (["a", "o"], FIRST_TIMELINE)),
    ],
)
async def test_a_state_is_taken_of_mates_on_the_runs_timeline(swarm, watching, donors, shunned, left):
    """And of none that are on the timeline which this peer has left."""
    for peer_id, timeline in (("a", FIRST_TIMELINE), ("m", NEWER), ("o", FIRST_TIMELINE)):
        if peer_id in donors:
            await swarm.add(peer_id, 1, round_number=53, timeline=timeline)
    del swarm.peers["b"]  # this peer serves no more
    if donors == "am":
        await swarm.add("z", 0, round_number=53, timeline=NEWER)
    assert await watching.peer.timeline_watch.choose_donors(list(donors), shunned) == left


async def test_a_round_that_is_ending_is_not_left_behind(swarm, watching):
    for peer_id, stage in (("a", 0), ("c", 2)):
        await swarm.add(peer_id, stage, round_number=49)
    watching.rounds.enter(Phase.ENDING)
    assert await watching.see() is None


# --- where to begin ---------------------------------------------------------------------------------------------------


async def test_a_fresh_run_begins_with_its_initial_weights(swarm):
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert (start.timeline, start.fetch, start.rewound) == (FIRST_TIMELINE, None, False)
    assert start.reason == "nothing was computed since the run's beginning"


@pytest.mark.parametrize("seen", [(2 * INTERVALS_FROM_SCRATCH * EVERY, 2 * INTERVALS_FROM_SCRATCH * EVERY), (7, 7)])
@pytest.mark.parametrize("teller", ["furthest", "reached"])
async def test_who_has_heard_of_later_rounds_does_not_take_the_run_for_new(swarm, seen, teller):
    """The peers that it, or a coordinator, has heard of may only be out of its reach."""
    setattr(swarm, teller, seen)
    peer = await swarm.newcomer()
    if seen[1] > INTERVALS_FROM_SCRATCH * EVERY:
        with pytest.raises(CallError, match="no snapshot of stage 1 exists"):
            await peer.recovery.find_start()
    else:
        start = await peer.recovery.find_start()
        assert start.timeline == Timeline(seen[0] + ROUNDS_BETWEEN_TIMELINES, 0, 0)


async def test_others_that_have_not_computed_anything_either_change_nothing(swarm):
    await swarm.add("a", 0)
    await swarm.add("b", 2)
    peer, _rival = await swarm.newcomer(), await swarm.newcomer(peer_id="m")
    start = await peer.recovery.find_start()
    assert (start.timeline, start.fetch, start.rewound) == (FIRST_TIMELINE, None, False)


async def test_a_peer_that_has_moved_begins_with_the_snapshots_that_it_brings_along(swarm):
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=47)
        await peer.store_snapshot((stage, 20), (stage, 40))
    before = await swarm.add("b", 0, round_number=47)
    await before.store_snapshot((1, 20), (1, 40))
    del swarm.peers["b"]
    peer = await swarm.newcomer(store=before.donor.store)
    start = await peer.recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(51, 40, 40), True)
    await assert_state(start.fetch, 1, 40)


async def all_have_moved(swarm, *kept):
    """Nobody serves any more: all peers have started anew, and have their snapshots along."""
    for peer_id, snapshots in zip("ac", kept, strict=True):
        peer = await swarm.add(peer_id, {"a": 0, "c": 2}[peer_id], round_number=47, state=PeerState.JOINING)
        await peer.store_snapshot(*snapshots)
        peer.donor.forget_state()


async def test_where_nobody_serves_any_more_the_snapshots_tell_where_the_run_was(swarm):
    await all_have_moved(swarm, [(0, 40), (1, 40)], [(2, 40), (1, 20)])
    with pytest.raises(CallError, match="peer a is taking stage 0 over"):
        await (await swarm.newcomer()).recovery.find_start()
    start = await (await swarm.newcomer(peer_id="A")).recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(40 + 4 * EVERY + ROUNDS_BETWEEN_TIMELINES, 40, 40), True)
    await assert_state(start.fetch, 1, 40)


async def test_where_nobody_serves_any_more_and_a_snapshot_is_missing_the_run_does_not_begin_anew(swarm):
    await all_have_moved(swarm, [(0, 40), (1, 40)], [(1, 20)])
    with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
        await (await swarm.newcomer(peer_id="A")).recovery.find_start()


async def newcomer_to_a_lost_stage(swarm):
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=47)
        await peer.store_snapshot((0, 40), (1, 40), (2, 40))
    return await swarm.newcomer()


async def test_a_stage_mate_that_could_not_be_reached_is_waited_for(swarm, monkeypatch):
    newcomer = await newcomer_to_a_lost_stage(swarm)
    await swarm.add("b", 1, round_number=47)
    swarm.dropped = {"b"}
    now = 1000.0
    swarm.clock.read = lambda: now
    with pytest.raises(CallError, match="peer b cannot be reached"):
        await newcomer.recovery.find_start()
    now += 0.99 * UNREACHED_PATIENCE * MANIFEST.limits.announcement_s
    with pytest.raises(CallError, match="peer b cannot be reached"):
        await newcomer.recovery.find_start()
    now += 0.02 * UNREACHED_PATIENCE * MANIFEST.limits.announcement_s
    start = await newcomer.recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(51, 40, 40), True), (
        "not for ever: nobody else may reach it, too"
    )


@pytest.mark.parametrize(("denying", "takes_over"), [("", True), ("a", True), ("ac", False), ("acd", False)])
async def test_a_stage_is_taken_over_only_if_most_others_have_lost_it_too(swarm, denying, takes_over):
    """This peer may be cut off from stage-mates that the others see."""
    newcomer = await newcomer_to_a_lost_stage(swarm)
    await swarm.add("d", 2, round_number=47)
    for peer_id in denying:
        swarm.peers[peer_id].denies = "stage 1 has not lost its peers"
    if takes_over:
        assert (await newcomer.recovery.find_start()).timeline == Timeline(51, 40, 40)
    else:
        with pytest.raises(CallError, match="of 3 peers would not go back: stage 1 has not lost its peers"):
            await newcomer.recovery.find_start()
    assert not any(peer.told for peer in swarm.peers.values()), "nobody has gone back yet"


async def test_a_stage_begins_on_no_timeline_that_another_one_has_passed(swarm):
    """A part of the run that was cut off had gone back to 40 updates, while this part computed on."""
    await swarm.add("a", 0, round_number=46, timeline=NEWER)
    passed = await swarm.add("c", 2, round_number=500)
    await passed.store_snapshot((0, 480), (1, 480), (2, 480))
    start = await (await swarm.newcomer()).recovery.find_start()
    assert start.timeline == Timeline(500 + ROUNDS_BETWEEN_TIMELINES, 480, 480), "the newer one gave these weights up"


async def test_a_snapshot_that_nobody_gives_is_passed_over_after_a_while(swarm):
    """Those who claim it may be liars, or have copied it from one that has gone since."""
    now = 100.0
    swarm.clock.read = lambda: now
    first, last = [await swarm.add(peer_id, stage, round_number=47) for peer_id, stage in (("a", 0), ("c", 2))]
    for optimizer_step in (30, 40):
        await first.store_snapshot((0, optimizer_step), (1, optimizer_step))
        await last.store_snapshot((2, optimizer_step), (1, optimizer_step))
    peer, asked = await swarm.newcomer(), []

    async def refuse(state):
        asked.append(state.optimizer_step)
        raise InvalidMessage("does not fit")

    patience_s = HOLDER_PATIENCE * MANIFEST.limits.announcement_s
    for seconds in (0.0, patience_s - 1, 1.0, 0.0, 0.0, patience_s, 0.0):
        now += seconds
        start = await peer.recovery.find_start()
        with pytest.raises(CallError, match="no donor gave the state of stage 1"):
            await start.fetch(refuse)
    assert asked == [40, 40, 40, 30, 40, 40, 30], "the newest again, when no other is left"
    assert start.reason == "all stages' snapshots of 30 updates exist, and nobody gives that of 40"


async def test_the_first_state_of_a_timeline_that_nobody_gives_is_passed_over(swarm):
    """Two stages were lost, and one of them has begun again; the only copy of the other one's state does not fit."""
    now = 100.0
    swarm.clock.read = lambda: now
    timeline = Timeline(51, 40, 40)
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=51, timeline=timeline)
        await peer.store_snapshot(*((number, step) for number in range(3) for step in (30, 40)))
    newcomer = await swarm.newcomer()
    for _ in range(2):
        start = await newcomer.recovery.find_start()
        assert (start.timeline, start.rewound) == (timeline, False)
        with pytest.raises(CallError, match="no donor gave the state of stage 1"):
            await start.fetch(refuse)
        now += HOLDER_PATIENCE * MANIFEST.limits.announcement_s
    start = await newcomer.recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(51 + ROUNDS_BETWEEN_TIMELINES, 30, 30), True)


async def test_a_state_that_was_not_given_once_long_ago_is_asked_for_again(swarm):
    """Its holder was busy; then this peer waited for another one, which has begun the timeline with it."""
    now = 1000.0
    swarm.clock.read = lambda: now
    holder = await swarm.add("z", 0, state=PeerState.JOINING)
    await holder.store_snapshot(*((stage, step) for stage in range(3) for step in (30, 40)))
    holder.donor.forget_state()
    newcomer = await swarm.newcomer(1, "n")
    start = await newcomer.recovery.find_start()
    with pytest.raises(CallError, match="no donor gave the state of stage 1"):
        await start.fetch(refuse)
    other = await swarm.newcomer(2, "M")
    with pytest.raises(CallError, match="peer M is taking stage 2 over"):
        await newcomer.recovery.find_start()
    begun = (await other.recovery.find_start()).timeline
    now += HOLDER_PATIENCE * MANIFEST.limits.announcement_s + 1
    other.state = PeerState.SERVING
    other.enter(begun.first_round, begun)
    start = await newcomer.recovery.find_start()
    assert (start.timeline, start.rewound) == (begun, False)
    await assert_state(start.fetch, 1, 40)


async def test_snapshots_of_a_round_that_has_not_been_are_left(swarm):
    """All would refuse a timeline that began with them, and nobody could take the stage over."""
    await lost_stage(swarm)
    liar = swarm.peers["z"] = Peer(swarm, "z", 0, state=PeerState.JOINING)
    reply = ListSnapshotsReply(
        round_number=10**9,
        timeline_first_round=10**9,
        timeline_first_optimizer_step=0,
        timeline_created_at_round=10**9,
        snapshots=tuple((stage, 10**9, 33) for stage in range(3)),
    )

    async def lie(caller, op, body, tensors):
        return Reply(reply.model_dump())

    await liar.transport.serve(lie)
    start = await (await swarm.newcomer()).recovery.find_start()
    assert start.timeline == Timeline(34 + ROUNDS_BETWEEN_TIMELINES, 30, 30)


async def test_a_refusal_without_a_reason_is_a_refusal(swarm):
    newcomer = await newcomer_to_a_lost_stage(swarm)
    for peer_id in "ac":
        swarm.peers[peer_id].denies = ""
    with pytest.raises(CallError, match="2 of 2 peers would not go back"):
        await newcomer.recovery.find_start()


async def test_a_run_does_not_begin_anew_because_nobody_could_be_reached(swarm):
    newcomer = await newcomer_to_a_lost_stage(swarm)
    swarm.dropped = {"a", "c"}
    with pytest.raises(CallError, match="peer a cannot be reached"):
        await newcomer.recovery.find_start()
    swarm.dropped = {"a"}
    start = await newcomer.recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(51, 40, 40), True), "one of them is enough"


async def test_snapshots_that_it_brings_along_from_a_timeline_that_was_given_up_are_left(swarm):
    timeline = Timeline(60, 30, 30)
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=72, timeline=timeline)
        await peer.store_snapshot((stage, 20), (stage, 40))
    before = await swarm.add("b", 0, round_number=47)
    await before.store_snapshot((1, 20), (1, 40))
    del swarm.peers["b"]
    start = await (await swarm.newcomer(store=before.donor.store)).recovery.find_start()
    await assert_state(start.fetch, 1, 20)


async def test_a_timeline_whose_first_state_is_lost_is_given_up(swarm):
    """The stage's peers have died before others had copied the snapshot that the timeline begins with."""
    timeline = Timeline(60, 30, 30)
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=60, timeline=timeline)
        await peer.store_snapshot((0, 20), (1, 20), (2, 20))
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(64, 20, 20), True)
    await assert_state(start.fetch, 1, 20)


async def test_a_run_goes_on_from_the_coordinators_checkpoint(swarm):
    swarm.timeline = Timeline(34, 30, created_at_round=34)
    coordinator = await swarm.add(RUN_ID, -1)
    coordinator.enter(34, swarm.timeline)
    for stage in range(2):
        await coordinator.donor.store_snapshot(
            stage, StageState(34, "history_hash of 30", weights(stage, 30), swarm.timeline)
        )
    coordinator.state = PeerState.DRAINING  # it is no peer of any stage
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert (start.timeline, start.rewound) == (swarm.timeline, False)
    await assert_state(start.fetch, 1, 30)


@pytest.mark.parametrize("reached", [(0, 0), (33, 33)])
async def test_a_run_is_resumed_though_peers_of_before_still_serve(swarm, reached):
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=33)
        await peer.store_snapshot((0, 30), (1, 30), (2, 30))
    swarm.timeline, swarm.reached = Timeline(37, 30, created_at_round=37), reached
    await give_checkpoint(swarm, 30, created_at_round=37)
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (swarm.timeline, False)
    await assert_state(start.fetch, 1, 30)


async def test_a_coordinator_that_does_not_give_the_checkpoint_is_waited_for(swarm):
    swarm.timeline = Timeline(34, 30, created_at_round=34)
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    with pytest.raises(CallError, match="no donor gave the state of stage 1: there is none"):
        await taken(start.fetch)


async def test_a_run_that_went_on_from_a_checkpoint_does_not_begin_without_it(swarm):
    """What the checkpoint holds was computed in another run, and is not in the few updates of this one."""
    swarm.timeline = Timeline(34, EVERY + 2, created_at_round=34)
    for stage, peer_id in ((0, "a"), (2, "c")):
        await swarm.add(peer_id, stage, round_number=37, timeline=swarm.timeline)
    peer = await swarm.newcomer()
    with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
        await peer.recovery.find_start()


async def give_checkpoint(swarm, optimizer_step, created_at_round=None, stages=range(3)):
    """Have the coordinator give a checkpoint, as it does while a stage has no peers."""
    coordinator = await swarm.add(RUN_ID, -1)
    del swarm.peers[RUN_ID]  # it is no peer
    coordinator.donor.forget_state()
    first_round = optimizer_step if created_at_round is None else created_at_round
    timeline = Timeline(first_round, optimizer_step, first_round)
    for stage in stages:
        state = StageState(first_round, f"history_hash of {optimizer_step}", weights(stage, optimizer_step), timeline)
        await coordinator.donor.store_snapshot(stage, state)
    return coordinator


@pytest.mark.parametrize("reached", [(47, 45), (0, 0)])
async def test_where_all_peers_and_their_snapshots_are_gone_the_run_goes_on_from_a_checkpoint(swarm, reached):
    """Also if the record of how far the run has come was lost with them."""
    swarm.reached = reached
    await give_checkpoint(swarm, 40)
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(max(reached[0], 40) + 4, 40, 40), True)
    await assert_state(start.fetch, 1, 40)


async def test_where_the_copies_of_a_lost_stage_are_gone_it_begins_with_a_checkpoint(swarm):
    for stage, peer_id in ((0, "a"), (2, "c")):
        await (await swarm.add(peer_id, stage, round_number=47)).store_snapshot((stage, 40))
    await give_checkpoint(swarm, 40)
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(47 + ROUNDS_BETWEEN_TIMELINES, 40, 40), True)
    await assert_state(start.fetch, 1, 40)


@pytest.mark.parametrize("reached", [(47, 45), (41, 41), (47, 39), (0, 0)])
async def test_where_only_peers_that_were_cut_off_are_left_the_run_goes_forward_to_a_checkpoint(swarm, reached):
    """The run has come to it, by word of the run key; its snapshots from before are gone."""
    for stage, peer_id in ((0, "a"), (2, "c")):
        await swarm.add(peer_id, stage, round_number=33)
    await give_checkpoint(swarm, 40)
    swarm.reached = reached
    finding = (await swarm.newcomer()).recovery.find_start()
    if min(reached) < 40:
        with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
            await finding
        return
    start = await finding
    assert (start.timeline, start.rewound) == (Timeline(reached[0] + ROUNDS_BETWEEN_TIMELINES, 40, 40), True)
    await assert_state(start.fetch, 1, 40)


async def add_cut_off(swarm):
    """Peers of all stages but one, in round 33, which keep what they would go back to."""
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=33)
        await peer.store_snapshot((0, 30), (1, 30), (2, 30))


async def test_peers_that_were_cut_off_go_forward_rather_than_back(swarm):
    await add_cut_off(swarm)
    swarm.reached = 5000, 4990
    newcomer = await swarm.newcomer()
    with pytest.raises(CallError, match="the run has made 4990 updates, and a coordinator may give a checkpoint"):
        await newcomer.recovery.find_start()
    await give_checkpoint(swarm, 4000)
    start = await newcomer.recovery.find_start()
    assert start.timeline == Timeline(5000 + ROUNDS_BETWEEN_TIMELINES, 4000, 4000)


async def test_peers_that_were_cut_off_go_back_where_no_checkpoint_comes(swarm):
    """Be it that no coordinator gives one, or that nobody can download what it gives."""
    now = 1000.0
    swarm.clock.read = lambda: now
    await add_cut_off(swarm)
    swarm.reached = 5000, 4990
    back = Timeline(33 + ROUNDS_BETWEEN_TIMELINES, 30, 30)
    newcomer = await swarm.newcomer()
    with pytest.raises(CallError, match="a coordinator may give a checkpoint"):
        await newcomer.recovery.find_start()
    now += CHECKPOINT_PATIENCE * MANIFEST.limits.announcement_s + 1.0
    assert (await newcomer.recovery.find_start()).timeline == back
    await give_checkpoint(swarm, 4000)
    for _ in range(2):
        start = await newcomer.recovery.find_start()
        assert start.timeline == Timeline(5000 + ROUNDS_BETWEEN_TIMELINES, 4000, 4000)
        with pytest.raises(CallError, match="no donor gave the state of stage 1"):
            await start.fetch(refuse)
        now += HOLDER_PATIENCE * MANIFEST.limits.announcement_s
    start = await newcomer.recovery.find_start()
    assert start.timeline == back
    with pytest.raises(CallError, match="no donor gave the state of stage 1"):
        await start.fetch(refuse)
    start = await newcomer.recovery.find_start()
    assert start.timeline.first_optimizer_step == 4000, "it is tried again where the way back fails, too"


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "gives a newer one"])
async def test_where_a_long_download_of_a_checkpoint_fails_it_is_waited_for_again(swarm, is_silent):
    now = 1000.0
    swarm.clock.read = lambda: now
    await add_cut_off(swarm)
    swarm.reached = 5000, 4990
    newcomer = await swarm.newcomer()
    with pytest.raises(CallError, match="a coordinator may give a checkpoint"):
        await newcomer.recovery.find_start()
    coordinator = await give_checkpoint(swarm, 4000)
    start = await newcomer.recovery.find_start()
    now += 20 * CHECKPOINT_PATIENCE * MANIFEST.limits.announcement_s
    if is_silent:
        swarm.network.fault(to=RUN_ID, fail=PeerUnreachable("its line is down"), times=100)
    else:  # of which it gives the first stage so far
        for stage in (1, 2):
            coordinator.donor.forget(SnapshotRef(stage, 4000, 4000))
    with pytest.raises(CallError, match="no donor gave the state of stage 1"):
        await taken(start.fetch)
    with pytest.raises(CallError, match="a coordinator may give a checkpoint"):
        await newcomer.recovery.find_start()


async def refuse(state):
    raise InvalidMessage("it does not fit")


@pytest.mark.parametrize("checkpoint", [34, 40])
async def test_peers_from_before_a_run_was_resumed_do_not_undo_that(swarm, checkpoint):
    """All that had begun with the checkpoint, or come further, are gone."""
    swarm.timeline = Timeline(34, 30, created_at_round=34)
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=27)
        await peer.store_snapshot((0, 20), (1, 20), (2, 20))
    swarm.reached = 45, 41
    newcomer = await swarm.newcomer()
    with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
        await newcomer.recovery.find_start()
    await give_checkpoint(swarm, checkpoint - 4, created_at_round=checkpoint)
    start = await newcomer.recovery.find_start()
    assert start.timeline == Timeline(45 + ROUNDS_BETWEEN_TIMELINES, checkpoint - 4, checkpoint)


async def test_a_run_begins_anew_above_all_rounds_that_it_has_been_in(swarm):
    for stage, peer_id in ((0, "a"), (2, "c")):
        await swarm.add(peer_id, stage, round_number=3)
    swarm.reached = 18, 2 * EVERY
    start = await (await swarm.newcomer()).recovery.find_start()
    assert start.timeline == Timeline(18 + ROUNDS_BETWEEN_TIMELINES, 0, 0)


async def test_a_run_waits_for_a_newer_checkpoint_than_the_one_that_it_was_resumed_from(swarm):
    """All peers are gone, and its coordinator gives that one for as long as it lives."""
    swarm.timeline = Timeline(34, 30, created_at_round=34)
    swarm.reached = 5000, 4990
    await give_checkpoint(swarm, 30, created_at_round=34)
    newcomer = await swarm.newcomer()
    with pytest.raises(CallError, match="the run has made 4990 updates, and a coordinator may give a checkpoint"):
        await newcomer.recovery.find_start()


async def test_a_checkpoint_that_is_being_given_is_waited_for(swarm):
    """The stages of a large model come one after the other; but not for ever."""
    now = 1000.0
    swarm.clock.read = lambda: now
    await add_cut_off(swarm)
    swarm.reached = 41, 41
    await give_checkpoint(swarm, 40, stages=[0])
    newcomer = await swarm.newcomer()
    with pytest.raises(CallError, match="the run has made 41 updates, and a coordinator may give a checkpoint"):
        await newcomer.recovery.find_start()
    now += CHECKPOINT_PATIENCE * MANIFEST.limits.announcement_s + 1.0
    assert (await newcomer.recovery.find_start()).timeline == Timeline(33 + ROUNDS_BETWEEN_TIMELINES, 30, 30)


@pytest.mark.parametrize("round_number", [0, 5])
async def test_peers_that_have_hardly_begun_do_not_begin_a_run_anew_that_has_come_far(swarm, round_number):
    for stage, peer_id in ((0, "a"), (2, "c")):
        await swarm.add(peer_id, stage, round_number=round_number)
    swarm.reached = 5000, 4990
    newcomer = await swarm.newcomer()
    with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
        await newcomer.recovery.find_start()
    await give_checkpoint(swarm, 4000)
    start = await newcomer.recovery.find_start()
    assert start.timeline == Timeline(5000 + ROUNDS_BETWEEN_TIMELINES, 4000, 4000)


async def test_peers_whose_snapshots_are_from_after_where_they_stand_are_not_followed(swarm):
    for stage, peer_id in ((0, "a"), (2, "c")):
        peer = await swarm.add(peer_id, stage, round_number=33)
        await peer.store_snapshot((0, 40), (1, 40), (2, 40))
    swarm.reached = 47, 45
    with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
        await (await swarm.newcomer()).recovery.find_start()


async def test_a_checkpoint_of_weights_that_the_run_has_given_up_is_not_taken(swarm):
    for stage, peer_id in ((0, "a"), (2, "c")):
        await (await swarm.add(peer_id, stage, round_number=50, timeline=NEWER)).store_snapshot((stage, 40))
    await give_checkpoint(swarm, 44)
    with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
        await (await swarm.newcomer()).recovery.find_start()


async def test_newer_snapshots_that_peers_have_left_are_preferred_to_a_checkpoint(swarm):
    await all_have_moved(swarm, [(0, 40), (1, 40)], [(2, 40), (1, 20)])
    await give_checkpoint(swarm, 30)
    start = await (await swarm.newcomer(peer_id="A")).recovery.find_start()
    assert start.timeline == Timeline(40 + 4 * EVERY + ROUNDS_BETWEEN_TIMELINES, 40, 40)


async def lost_stage(swarm, round_number=34, timeline=FIRST_TIMELINE):
    """Stage 1 has lost its peers; the peers of the others hold snapshots, one of them of stage 1."""
    first = await swarm.add("a", 0, round_number, timeline=timeline)
    last = await swarm.add("b", 2, round_number - 1, timeline=timeline)
    await first.store_snapshot((0, 20), (0, 30), (1, 20), (1, 30))
    await last.store_snapshot((2, 20), (2, 30))
    return first, last


async def test_a_lost_stage_goes_on_from_the_newest_snapshot(swarm):
    await lost_stage(swarm)
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(34 + ROUNDS_BETWEEN_TIMELINES, 30, 30), True)
    assert start.reason == "all stages' snapshots of 30 updates exist"
    await assert_state(start.fetch, 1, 30)


async def test_a_snapshot_that_not_all_stages_have_is_passed_over(swarm):
    await lost_stage(swarm)
    swarm.peers["b"].donor.forget(SnapshotRef(2, 30, 30))
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert start.timeline == Timeline(34 + ROUNDS_BETWEEN_TIMELINES, 20, 20)
    await assert_state(start.fetch, 1, 20)


async def test_a_timeline_begins_where_no_other_one_does(swarm, monkeypatch):
    asked = []
    monkeypatch.setattr(recovery, "timeline_offset", lambda state, serving: asked.append((state, set(serving))) or 7)
    await lost_stage(swarm)
    start = await (await swarm.newcomer()).recovery.find_start()
    assert start.timeline == Timeline(34 + ROUNDS_BETWEEN_TIMELINES + 7, 30, 30)
    assert asked == [(SnapshotRef(1, 30, 30), {"a", "b"})]


async def test_who_finds_another_state_to_begin_with_begins_another_timeline(swarm, monkeypatch):
    """Nobody serves. A coordinator begins to give a checkpoint while the first one downloads an older state."""
    monkeypatch.setattr(recovery, "timeline_offset", policy.timeline_offset)  # the real one
    now = 1000.0
    swarm.clock.read = lambda: now
    swarm.reached = 47, 47
    joining = await swarm.add("a", 0, round_number=47, state=PeerState.JOINING)
    await joining.store_snapshot((0, 30), (1, 30), (2, 30))
    joining.donor.forget_state()
    first, second = await swarm.newcomer(1, "M"), await swarm.newcomer(2, "N")
    downloaded = (await first.recovery.find_start()).timeline
    with pytest.raises(CallError, match="peer M is taking stage 1 over"):
        await second.recovery.find_start()
    await give_checkpoint(swarm, 40)
    now += RIVAL_PATIENCE * MANIFEST.limits.announcement_s + 1
    found = (await second.recovery.find_start()).timeline
    assert (downloaded.first_optimizer_step, found.first_optimizer_step) == (30, 40)
    assert downloaded.first_round != found.first_round, "microbatches name a timeline by its first round"


async def test_a_run_that_went_back_before_goes_back_again(swarm):
    await lost_stage(swarm, round_number=130, timeline=Timeline(116, 18, 18))
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert start.timeline == Timeline(130 + ROUNDS_BETWEEN_TIMELINES, 30, created_at_round=128)


async def test_a_stage_that_is_lost_right_after_a_rewind_begins_there(swarm):
    """Nothing was computed since: nobody else has to go back once more."""
    await lost_stage(swarm, round_number=39, timeline=Timeline(39, 30, 30))
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(39, 30, 30), False)
    await assert_state(start.fetch, 1, 30)


async def test_snapshots_of_a_timeline_that_was_given_up_do_not_count(swarm):
    """A peer that has not gone back yet still has them, and others have made as many updates anew."""
    first = await swarm.add("a", 0, round_number=60, timeline=Timeline(36, 10, 10))  # 34 updates
    last = await swarm.add("b", 2, round_number=60, timeline=Timeline(36, 10, 10))
    late = await swarm.add("c", 0, round_number=33)  # on the timeline before, which had 33 updates
    await late.store_snapshot((0, 10), (0, 20), (1, 10))
    await first.store_snapshot((0, 10), (1, 10), (1, 20))
    await last.store_snapshot((2, 10), (2, 20))
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert start.timeline.first_optimizer_step == 10, "of 20 updates, stage 0's snapshot is of the other timeline"


async def test_after_two_rewinds_snapshots_of_the_first_timeline_are_told_from_those_of_the_second(swarm):
    """The second rewind went less far back than the first, and one peer has missed the first."""
    second, third = Timeline(34, 10, 10), Timeline(62, 20, 44)
    late = await swarm.add("a", 0, round_number=33)
    await late.store_snapshot((0, 10), (0, 20))
    first = await swarm.add("b", 0, round_number=44, timeline=second)
    last = await swarm.add("c", 2, round_number=44, timeline=second)
    await first.store_snapshot((0, 10), (1, 10), (0, 20), (1, 20))
    await last.store_snapshot((2, 10), (2, 20))
    for peer in (first, last):
        peer.enter(62, third)
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert start.timeline == third
    assert (await taken(start.fetch)).created_at_round == 44
    assert await late.donor.load_snapshot(SnapshotRef(0, 44, 20)) is None
    late.enter(62, third)
    wanted = SnapshotRef(0, third.created_at_round, third.first_optimizer_step)
    state = await taken(partial(late.recovery._take, wanted, ["b"]))
    assert state.created_at_round == 44, "not its own one of as many updates"


async def test_a_young_run_begins_anew(swarm):
    newest = INTERVALS_FROM_SCRATCH * EVERY
    await swarm.add("a", 0, newest)
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    assert (start.timeline, start.fetch, start.rewound) == (
        Timeline(newest + ROUNDS_BETWEEN_TIMELINES, 0, 0),
        None,
        True,
    )
    assert start.reason == f"the run has made {newest} updates only and begins anew"
    swarm.peers["a"].enter(newest + 1)
    with pytest.raises(CallError, match="no snapshot of stage 1 exists that all other stages have too"):
        await peer.recovery.find_start()


async def test_when_nothing_is_left_the_reason_says_what_is_missing(swarm):
    first, _ = await lost_stage(swarm)
    for optimizer_step in (20, 30):
        first.donor.forget(SnapshotRef(1, optimizer_step, optimizer_step))
    peer = await swarm.newcomer()
    missing = "there are: of 30 updates, stages 0, 2; of 20 updates, stages 0, 2"
    with pytest.raises(CallError, match=f"no snapshot of stage 1 exists that all other stages have too; {missing}"):
        await peer.recovery.find_start()


async def test_peers_that_cannot_be_reached_are_waited_for(swarm):
    """They may have made any number of updates: this is no fresh run."""
    await lost_stage(swarm)
    for name in "ab":
        swarm.network.kill(name)
    peer = await swarm.newcomer()
    with pytest.raises(CallError, match="none of the 2 serving peers can be reached"):
        await peer.recovery.find_start()


async def test_a_peer_that_does_not_answer_is_done_without(swarm):
    await lost_stage(swarm)
    silent = await swarm.add("c", 0, round_number=34)
    fault = swarm.network.fault(op="list_snapshots", to="c", fail=PeerUnreachable("gone"))
    liar = await swarm.add("d", 2, round_number=34)
    lie = swarm.network.fault(op="list_snapshots", to="d", tamper=lambda reply: Reply({"round_number": -1}))
    peer = await swarm.newcomer()
    assert (await peer.recovery.find_start()).timeline.first_optimizer_step == 30
    assert fault.fired == lie.fired == 1
    assert silent.snapshots == liar.snapshots == []


@pytest.mark.parametrize(
    ("round_number", "timeline"),
    [(2**40 - 2, FIRST_TIMELINE), (2**40 - 1, Timeline(2**40 - 1, 0, 0)), (34 + MAX_ROUNDS_AHEAD + 1, FIRST_TIMELINE)],
)
async def test_a_peer_that_claims_a_round_that_the_run_cannot_be_in_is_not_believed(swarm, round_number, timeline):
    await lost_stage(swarm)
    await swarm.add("liar", 2, round_number, timeline=timeline)
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(34 + ROUNDS_BETWEEN_TIMELINES, 30, 30), True)
    await assert_state(start.fetch, 1, 30)


async def test_a_timeline_that_stage_mates_deny_is_not_believed(swarm):
    """The run goes back all the same; its rounds are numbered from above the lie."""
    await lost_stage(swarm)
    await swarm.add("liar", 2, 400, timeline=Timeline(400, 0, 0))
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(400 + ROUNDS_BETWEEN_TIMELINES, 30, 30), True)


async def test_where_one_word_stands_against_another_the_numbers_stay_possible(swarm):
    first = await swarm.add("a", 0, 15)
    await first.store_snapshot(*((stage, 10) for stage in range(3)))
    liar = await swarm.add("liar", 2, 2**40 - 2)
    peer = await swarm.newcomer()
    assert (await peer.recovery.find_start()).timeline == Timeline(15 + ROUNDS_BETWEEN_TIMELINES, 10, 10)
    liar.enter(MAX_ROUND - MIN_ROUNDS_LEFT)
    start = await peer.recovery.find_start()
    assert start.timeline == Timeline(MAX_ROUND - MIN_ROUNDS_LEFT + ROUNDS_BETWEEN_TIMELINES, 10, 10)
    await peer.recovery.have_all_go_back(start.timeline, lambda: True)
    assert first.told == [("n", 1, start.timeline)]
    for name in ("a", "liar"):
        swarm.peers[name].enter(2**40 - 1, FIRST_TIMELINE)
    with pytest.raises(CallError, match="the 2 serving peers claim to be in rounds that cannot be"):
        await peer.recovery.find_start()


async def test_a_rewind_that_has_begun_is_followed(swarm):
    """One peer has taken stage 2 over and tells the others, when stage 1 is lost as well."""
    rewound = Timeline(38, 30, 30)
    for name in "ab":
        await swarm.add(name, 0, round_number=34)
    taker = await swarm.add("c", 2, round_number=38, timeline=rewound)
    await taker.store_snapshot((1, 30))
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (rewound, False)
    await assert_state(start.fetch, 1, 30)


async def test_a_rewind_whose_author_is_gone_before_most_have_followed_is_done_anew(swarm):
    """A peer that has followed holds snapshots of the timeline that most peers are on."""
    for name in "ab":
        peer = await swarm.add(name, 0, round_number=34)
        await peer.store_snapshot((0, 30))
    last = [await swarm.add(name, 2, round_number=34) for name in "cde"]
    for peer in last:
        await peer.store_snapshot((1, 30), (2, 30)) if peer is last[0] else await peer.store_snapshot((2, 30))
    last[0].enter(38, Timeline(38, 30, 30))
    start = await (await swarm.newcomer()).recovery.find_start()
    assert (start.timeline, start.rewound) == (Timeline(38 + ROUNDS_BETWEEN_TIMELINES, 30, 30), True)
    await assert_state(start.fetch, 1, 30)


async def test_a_peer_that_never_takes_the_stage_over_is_not_waited_for(swarm, monkeypatch):
    time = SimpleNamespace(now=100.0)
    swarm.clock.read = lambda: time.now
    await lost_stage(swarm)
    peer, rival = await swarm.newcomer(), await swarm.newcomer(peer_id="m")
    patience_s = RIVAL_PATIENCE * MANIFEST.limits.announcement_s
    for passed_s in (0.0, patience_s - 1):
        time.now = 100.0 + passed_s
        with pytest.raises(CallError, match="peer m is taking stage 1 over"):
            await peer.recovery.find_start()
    time.now = 100.0 + patience_s
    assert (await peer.recovery.find_start()).rewound
    rival.state = PeerState.DRAINING
    assert (await peer.recovery.find_start()).rewound
    rival.state = PeerState.JOINING
    with pytest.raises(CallError, match="peer m is taking stage 1 over"):
        await peer.recovery.find_start()


async def test_of_two_that_take_a_stage_over_one_waits(swarm):
    await lost_stage(swarm)
    late, first = await swarm.newcomer(peer_id="z"), await swarm.newcomer(peer_id="m")
    with pytest.raises(CallError, match="peer m is taking stage 1 over"):
        await late.recovery.find_start()
    assert (await first.recovery.find_start()).rewound
    first.stage = 2
    assert (await late.recovery.find_start()).rewound, "of another stage, it is no rival"


async def test_a_holder_that_dies_is_replaced(swarm):
    _, last = await lost_stage(swarm)
    await last.store_snapshot((1, 30))
    swarm.network.fault(op="state_index", to="a", fail=PeerUnreachable("gone"))
    peer = await swarm.newcomer()
    start = await peer.recovery.find_start()
    await assert_state(start.fetch, 1, 30)
    swarm.network.fault(op="state_index", times=2, fail=PeerUnreachable("gone"))
    with pytest.raises(CallError, match="no donor gave the state of stage 1"):
        await taken(start.fetch)


# --- have all go back -------------------------------------------------------------------------------------------------

TARGET = Timeline(38, 30, 30)


async def test_all_peers_of_other_stages_are_told(swarm):
    first, last = await lost_stage(swarm)
    ahead, mate = await swarm.add("c", 2, round_number=40), await swarm.add("m", 1, round_number=20)
    peer = await swarm.newcomer()
    await peer.recovery.have_all_go_back(TARGET, lambda: True)
    assert first.told == last.told == [("n", 1, TARGET)]
    assert ahead.told == mate.told == []


async def test_a_peer_that_refuses_is_told_again(swarm):
    first, last = await lost_stage(swarm)
    fault = swarm.network.fault(op="rewind", to="a", times=3, fail=NotServing("it has not lost its peers"))
    lie = swarm.network.fault(op="rewind", to="b", tamper=lambda reply: Reply({}))
    peer = await swarm.newcomer()
    await peer.recovery.have_all_go_back(TARGET, lambda: True)
    assert (fault.fired, lie.fired) == (3, 1)
    assert first.told == [("n", 1, TARGET)]
    assert last.told == 2 * [("n", 1, TARGET)], "its reply was none"


async def test_who_follows_another_timeline_tells_nobody_of_its_own(swarm):
    """Another peer has taken the stage over as well."""
    first, _ = await lost_stage(swarm)
    peer = await swarm.newcomer()
    await peer.recovery.have_all_go_back(TARGET, lambda: False)
    assert first.told == []
    swarm.network.fault(op="rewind", times=1000, fail=NotServing("it has not lost its peers"))
    is_there = iter([True, True, False])
    await peer.recovery.have_all_go_back(TARGET, lambda: next(is_there))
    assert swarm.network.num_calls("rewind", "a") == 2


async def test_it_ends_when_those_that_are_behind_are_gone(swarm):
    await lost_stage(swarm)
    swarm.network.fault(op="rewind", times=1000, fail=PeerUnreachable("gone"))
    peer = await swarm.newcomer()
    telling = asyncio.ensure_future(peer.recovery.have_all_go_back(TARGET, lambda: True))
    await until(lambda: swarm.network.num_calls("rewind", "a") > 3)
    assert not telling.done()
    swarm.peers["a"].enter(TARGET.first_round, TARGET)  # of a stage-mate's doing
    del swarm.peers["b"]
    await telling


async def test_a_peer_that_appears_later_is_told_too(swarm):
    first, _ = await lost_stage(swarm)
    fault = swarm.network.fault(op="rewind", to="b", before=anyio.Event())
    peer = await swarm.newcomer()
    telling = asyncio.ensure_future(peer.recovery.have_all_go_back(TARGET, lambda: True))
    await fault.struck.wait()
    late = await swarm.add("c", 0, round_number=33)
    fault.before.set()
    await telling
    assert late.told == first.told == [("n", 1, TARGET)]


# --- snapshots --------------------------------------------------------------------------------------------------------


async def test_peers_keep_their_own_snapshot_and_one_of_the_next_stage(swarm):
    peers = [await swarm.add("abc"[stage], stage, round_number=9) for stage in range(3)]
    running = [asyncio.ensure_future(peer.keeper.run()) for peer in peers]
    await anyio.wait_all_tasks_blocked()
    assert [peer.snapshots for peer in peers] == [[], [], []]
    for peer in peers:
        peer.enter(10)
    await until(lambda: all(len(peer.snapshots) == 2 for peer in peers))
    assert [peer.snapshots for peer in peers] == [[(0, 10), (1, 10)], [(1, 10), (2, 10)], [(0, 10), (2, 10)]]
    for peer in peers:
        for known in peer.donor._snapshots:
            assert_weights(await peer.donor.load_snapshot(known), known.stage, known.optimizer_step)
    for round_number in range(11, 21):
        for peer in peers:
            peer.enter(round_number)
    await until(lambda: all(len(peer.snapshots) == 4 for peer in peers))
    for task in running:
        task.cancel()


async def test_no_snapshot_is_taken_of_the_initial_weights(swarm):
    peer = await swarm.add("a", 0)
    assert not peer.keeper._snapshot_is_due()
    peer.donor.forget_state()
    assert not peer.keeper._snapshot_is_due()


async def test_a_run_may_do_without_snapshots(swarm, monkeypatch):
    peer = await swarm.add("a", 0, round_number=10)
    section = MANIFEST.recovery.model_copy(update={"snapshot_every": 0})
    monkeypatch.setattr(peer.keeper, "_manifest", MANIFEST.model_copy(update={"recovery": section}))
    await peer.keeper.run()
    assert peer.snapshots == []


async def test_a_snapshot_that_was_missed_is_done_without(swarm):
    peer = await swarm.add("a", 0, round_number=10)
    peer.trainer.optimizer_step = 11  # the next update is applied already
    running = asyncio.ensure_future(peer.keeper.run())
    await until(lambda: peer.keeper._last_due is not None)
    peer.enter(11)
    await anyio.wait_all_tasks_blocked()
    assert not running.done()
    peer.enter(20)
    await until(lambda: peer.snapshots)
    assert peer.snapshots == [(0, 20)]
    running.cancel()


async def test_the_next_stages_snapshot_is_asked_for_until_it_is_there(swarm):
    peer, following = await swarm.add("a", 0, round_number=10), await swarm.add("b", 1, round_number=9)
    running = asyncio.ensure_future(peer.keeper.run())
    await until(lambda: swarm.network.num_calls("state_index", "b") == 2)
    await following.store_snapshot((1, 10))
    await until(lambda: len(peer.snapshots) == 2)
    assert peer.snapshots == [(0, 10), (1, 10)]
    running.cancel()


async def test_a_snapshot_of_the_next_stage_is_asked_for_until_the_next_one_is_due(swarm, monkeypatch, caplog):
    monkeypatch.setattr("swarm_peer.runtime.state.snapshot_keeper.GUARD_PAUSE_S", 0.0001)
    peer = await swarm.add("a", 0, round_number=10)
    following = await swarm.add("b", 1, round_number=9)
    running = asyncio.ensure_future(peer.keeper.run())
    await until(lambda: swarm.network.num_calls("state_index", "b") > 2 * GUARD_TRIES)
    assert caplog.text.count("snapshot_not_there stage=1 optimizer_step=10") == 1
    peer.enter(20)
    await until(lambda: (0, 20) in peer.snapshots)
    await following.store_snapshot((1, 20))
    await until(lambda: (1, 20) in peer.snapshots)
    assert peer.snapshots == [(0, 10), (0, 20), (1, 20)]
    running.cancel()


async def test_after_a_rewind_a_snapshot_of_the_same_optimizer_step_is_kept_anew(swarm):
    peer = await swarm.add("a", 0, round_number=20)
    running = asyncio.ensure_future(peer.keeper.run())
    await until(lambda: peer.snapshots == [(0, 20)])
    peer.enter(30, Timeline(30, 10, 10))
    assert peer.snapshots == []
    peer.enter(40)
    await until(lambda: peer.snapshots == [(0, 20)])
    assert await peer.donor.load_snapshot(SnapshotRef(0, 20, 20)) is None
    assert (await peer.donor.load_snapshot(SnapshotRef(0, 40, 20))).optimizer_step == 20
    running.cancel()


# --- who moves --------------------------------------------------------------------------------------------------------


class Clock:
    """Sleeps end at once, and time passes only in them."""

    def __init__(self):
        self.now = 100.0
        self.slept = lambda: None

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds
        self.slept()
        await anyio.lowlevel.checkpoint()


@pytest.fixture
def clock(monkeypatch, swarm):
    clock = Clock()
    swarm.clock.read = clock.monotonic
    monkeypatch.setattr(rescue, "anyio", SimpleNamespace(sleep=clock.sleep))
    return clock


def watch(peer):
    return watch_stages(peer.context, peer.access.look)


async def test_the_chosen_peer_moves_to_a_stage_that_stays_empty(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        await swarm.add(name, stage)
    swarm.peers["b"].speed = 0.5
    assert await watch(swarm.peers["b"]) == 1
    assert clock.now >= 100.0 + RESCUE_PATIENCE * MANIFEST.limits.announcement_s
    assert swarm.max_age_s == MANIFEST.limits.announcement_s / 4, "what was looked up since its last look is not again"


async def test_nobody_moves_as_long_as_a_stage_comes_back_in_time(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2), ("d", 1)):
        await swarm.add(name, stage)
    began = clock.now

    def come_and_go():
        round_ = int((clock.now - began) / (MANIFEST.limits.announcement_s / 4))
        swarm.peers["d"].state = PeerState.SERVING if round_ % 4 == 0 else PeerState.DRAINING

    clock.slept = come_and_go
    watching = asyncio.ensure_future(watch(swarm.peers["a"]))
    await until(lambda: swarm.looks > 50)
    assert not watching.done()
    watching.cancel()


async def test_a_joiner_that_never_serves_the_lost_stage_is_not_waited_for(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        await swarm.add(name, stage)
    await swarm.newcomer(peer_id="d")
    began = clock.now
    assert await watch(swarm.peers["a"]) == 1
    patience_s = JOINER_PATIENCE * MANIFEST.limits.announcement_s
    download_s = max_state_bytes(ResolvedManifest.of(MANIFEST), 1) / JOINER_BYTES_PER_S
    assert patience_s + download_s <= clock.now - began < 1.1 * patience_s + download_s


async def test_each_peer_that_joins_a_lost_stage_has_its_time(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        await swarm.add(name, stage)
    lifetime_s = MANIFEST.limits.announcement_s
    began = clock.now

    def come_and_go():
        """Another one, each time the one before has nearly used up its time."""
        swarm.peers.pop("d", None)
        swarm.peers.pop("e", None)
        number = int((clock.now - began) / ((JOINER_PATIENCE - 1) * lifetime_s))
        swarm.peers["de"[number % 2]] = joiners["de"[number % 2]]

    joiners = {name: await swarm.newcomer(peer_id=name) for name in "de"}
    clock.slept = come_and_go
    watching = asyncio.ensure_future(watch(swarm.peers["a"]))
    await until(lambda: clock.now > began + 4 * JOINER_PATIENCE * lifetime_s)
    assert not watching.done()
    watching.cancel()


async def test_a_peer_that_is_not_chosen_stays(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        await swarm.add(name, stage)
    swarm.peers["a"].movable = False  # its owner wants it where it is
    watching = [asyncio.ensure_future(watch(swarm.peers[name])) for name in "ac"]
    await until(lambda: swarm.looks > 50)
    assert not any(task.done() for task in watching)
    for task in watching:
        task.cancel()
    assert await watch(swarm.peers["b"]) == 1


# --- going back -------------------------------------------------------------------------------------------------------


class AveragerOfEqualGradients:
    async def average(self, gradients, **averaging_round):
        return gradients


class Follower:
    """A peer of stage 0 with a trainer, and a step loop that never comes to a round's end by itself."""

    reached = 0, 0

    async def beginning(self):
        reached_round, reached_step = self.reached
        return TimelineRecord(
            first_round=0,
            first_optimizer_step=0,
            begun=1,
            reached_round=reached_round,
            reached_optimizer_step=reached_step,
        )

    def contribution(self):
        return contribution._contribution(self.trainer, self.metrics, self.steps._updates, self.steps.step.round_number)

    def __init__(self, folder, name="f", network=None):
        self.network = network or MemoryNetwork()
        identity = Identity(Ed25519PrivateKey.from_private_bytes(name.encode() * 32))
        self.peer_id = identity.peer_id
        self.peers = [
            PeerView(peer_id="n", stage=1, state=PeerState.SERVING, round_number=38),
            PeerView(peer_id="c", stage=2, state=PeerState.SERVING, round_number=34),
        ]
        self.looked = []
        context = make_context(MANIFEST, identity=identity, folder=folder)
        self.metrics = context.metrics
        self.trainer = StageTrainer(context.resolved, context.resolved.specs[0], blank=True)
        self.device_thread = DeviceThread(clock=context.clock, threads=context.threads, metrics=self.metrics)
        self.donor = GivenStates(context, self.trainer, self.device_thread)
        self.rounds = self.donor.rounds
        self.admission = RoundAdmission(capacity=Capacity(8), rounds=self.rounds, changed=context.changed)
        transport = self.transport = self.network.transport(self.peer_id)
        progress = ProgressBook(
            context=context,
            incarnation=1,
            is_author=lambda author: False,
            on_stranger=lambda author: None,
            step=lambda: self.rounds.step,
        )
        barrier = Barrier(
            context=context,
            stage=0,
            rounds=self.rounds,
            transport=transport,
            progress=progress,
            view=self.view,
            on_other_timeline=self.admission.saw_other_timeline,
        )
        group = StageGroup(
            context=context,
            stage=0,
            rounds=self.rounds,
            transport=transport,
            averager=AveragerOfEqualGradients(),
            barrier=barrier,
            digest_weights=self.digest_weights,
            device=torch.device("cpu"),
        )
        gossip = Gossip(
            manifest_hash=MANIFEST.hash,
            transport=transport,
            progress=progress,
            welcome=barrier.welcome,
            drop=lambda peer, serial: None,
        )
        self.barrier = barrier
        self.calls = barrier.calls | group.calls | gossip.calls
        core = ReplicaCore(
            trainer=self.trainer,
            capacity=Capacity(8),
            device_thread=self.device_thread,
            speed=None,
            rounds=self.rounds,
            admission=self.admission,
            executor=None,
            time=None,
        )
        self.steps = StepLoop(
            context=context,
            core=core,
            swarm=SwarmAccess(
                transport=transport,
                progress=progress,
                gossip=gossip,
                view=self.view,
                look=self.look,
                coordinators=find_coordinators,
                beginning=self.beginning,
            ),
            group=group,
            state_server=self.donor.server,
            own_work=OwnWork(
                averaging=context.resolved.manifest.averaging, metrics=self.metrics, snapshots=self.donor.store
            ),
            handover=None,
            leases=None,
        )

    def view(self):
        return SwarmView(
            3,
            (
                PeerView(
                    peer_id=self.peer_id, stage=0, state=PeerState.SERVING, round_number=self.steps.step.round_number
                ),
                *self.peers,
            ),
        )

    async def look(self, stages, max_age_s=0.0):
        self.looked.append(list(stages))
        return self.view()

    async def answer(self):
        answers = dispatcher(MANIFEST.hash, 0, self.calls | self.steps.rewinds.calls)
        answers.add(None, self.donor.store.calls)
        await self.transport.serve(answers)

    async def digest_weights(self):
        return digest_weights(self.trainer.strategy.shared_weights())

    async def has_made(self, optimizer_step):
        """Begin, and take a snapshot of these updates."""
        await self.steps.begin(FIRST_TIMELINE, None)
        for _ in range(optimizer_step):
            gradients = [torch.ones_like(parameter) for parameter in self.trainer.module.parameters()]
            self.trainer.apply(gradients)
        self.steps._begin_round(optimizer_step, f"history_hash of {optimizer_step}", FIRST_TIMELINE, b"ledger", b"")
        self.rounds.enter(Phase.OPEN)

    async def rewind(
        self, caller="n", lost_stage=1, round_number=38, optimizer_step=2, asks_only=False, created_at_round=None
    ):
        call = RewindCall(
            manifest=MANIFEST.hash,
            asks_only=asks_only,
            lost_stage=lost_stage,
            first_round=round_number,
            first_optimizer_step=optimizer_step,
            created_at_round=optimizer_step if created_at_round is None else created_at_round,
        )
        reply = await self.steps.rewinds.handle(caller, call, ())
        return check_body(RewindReply, reply.body).round_number

    @property
    def target(self):
        return self.steps.rewinds.target


class NotedLeases:
    """Leases for which nothing is a ledger but an empty one. They note when they begin."""

    def __init__(self, follower):
        self.follower, self.begun = follower, []

    async def read_ledger(self, data):
        if data:
            raise InvalidMessage("no ledger")
        return SampleLedger(1)

    def begin(self, round_number, timeline, ledger, held):
        self.held = held
        asyncio.get_running_loop().call_soon(lambda: self.begun.append(self.follower.steps.step.round_number))


@pytest.fixture
async def follower(tmp_path):
    follower = Follower(tmp_path)
    async with follower.network:
        await follower.has_made(3)
        yield follower
    follower.device_thread.stop()


async def test_a_peer_that_has_taken_over_a_lost_stage_is_obeyed(follower):
    assert await follower.rewind() == 3
    assert follower.target == Timeline(38, 2, 2)
    assert follower.looked == [[1]]
    assert await follower.rewind() == 3
    assert follower.looked == [[1]], "told again, there is nothing to look for"


async def test_a_question_rewinds_nothing_and_is_answered_like_a_rewind(follower):
    assert await follower.rewind(asks_only=True) == 3
    assert follower.target is None
    with pytest.raises(NotServing, match="only a peer that has taken over another stage"):
        await follower.rewind(caller="stranger", asks_only=True)
    with pytest.raises(NotServing, match="the run is in round 3 already"):
        await follower.rewind(round_number=3, asks_only=True)
    follower.peers.append(PeerView(peer_id="m", stage=1, state=PeerState.SERVING, round_number=3))
    with pytest.raises(NotServing, match="stage 1 has not lost its peers"):
        await follower.rewind(asks_only=True)


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        ({"caller": "c"}, NotServing, "only a peer that has taken over another stage rewinds the run"),
        ({"caller": "stranger"}, NotServing, "only a peer that has taken over another stage"),
        ({"caller": "me", "lost_stage": 0}, NotServing, "only a peer that has taken over another stage"),
        ({"caller": "n", "lost_stage": 0}, NotServing, "only a peer that has taken over another stage"),
        ({"round_number": 2**40 - 1}, InvalidMessage, f"the run is in round 3 and cannot go on in {2**40 - 1}"),
        ({"round_number": 3 + MAX_ROUNDS_OF_REWIND + 1}, InvalidMessage, "the run is in round 3 and cannot go on in"),
        ({"optimizer_step": 4}, InvalidMessage, "the run has made 3 updates and cannot go back to"),
        ({"created_at_round": 39}, InvalidMessage, "cannot go back to"),
        ({"created_at_round": 1}, InvalidMessage, "cannot go back to"),
    ],
)
async def test_liars_rewind_nothing(follower, call, error, reason):
    if call.get("caller") == "me":
        follower.peers.append(PeerView(peer_id="me", stage=0, state=PeerState.SERVING, round_number=38))
    with pytest.raises(error, match=reason):
        await follower.rewind(**call)
    assert follower.target is None


@pytest.mark.parametrize(("reached", "is_obeyed"), [((9, 5), True), ((9, 4), True), ((9, 3), False), ((3, 9), False)])
async def test_a_peer_that_was_cut_off_goes_forward_to_where_the_run_has_been(follower, reached, is_obeyed):
    follower.reached = reached
    with suppress(InvalidMessage):
        await follower.rewind(optimizer_step=4)
    assert follower.target == (Timeline(38, 4, 4) if is_obeyed else None)


async def test_however_far_a_peer_is_behind_it_goes_forward(follower):
    follower.reached = 5000, 4990
    await follower.rewind(optimizer_step=4000, round_number=5004)
    assert follower.target == Timeline(5004, 4000, 4000)


async def test_no_peer_goes_forward_while_the_dht_does_not_tell_where_the_run_has_been(follower, monkeypatch):
    async def no_answer():
        raise CallTimeout("no answer")

    monkeypatch.setattr(follower.steps.rewinds, "_beginning", no_answer)
    with pytest.raises(InvalidMessage, match="the run has made 3 updates and cannot go back to"):
        await follower.rewind(optimizer_step=4)


async def test_a_stage_that_is_not_lost_rewinds_nothing(follower):
    follower.peers.append(PeerView(peer_id="m", stage=1, state=PeerState.SERVING, round_number=3))
    with pytest.raises(NotServing, match="stage 1 has not lost its peers: 1 others serve it"):
        await follower.rewind()
    assert follower.target is None
    ahead = PeerView(peer_id="m", stage=1, state=PeerState.SERVING, round_number=39, optimizer_step=30)
    follower.peers[-1] = ahead
    with pytest.raises(NotServing, match="stage 1 has not lost its peers: 1 others serve it"):
        await follower.rewind()
    follower.peers[-1] = replace(ahead, optimizer_step=3)  # it has joined the rewound stage
    await follower.rewind()
    assert follower.target == Timeline(38, 2, 2)


async def test_rounds_that_are_over_are_no_news(follower):
    assert await follower.rewind(caller="stranger", round_number=3) == 3
    assert follower.target is None


async def test_a_rewind_that_is_told_twice_at_once_is_one(follower):
    """What the peer has launched since the first one would be launched anew in the same round."""
    looked, look = asyncio.Event(), follower.look

    async def look_slowly(stages, max_age_s=0.0):
        await looked.wait()
        return await look(stages)

    follower.steps.rewinds._look = look_slowly
    again = asyncio.ensure_future(follower.rewind(optimizer_step=0))
    await anyio.wait_all_tasks_blocked()
    follower.steps.rewinds._look = look
    await follower.rewind(optimizer_step=0)
    await follower.steps._rewind()
    looked.set()
    assert await again == 38
    assert follower.target is None


async def test_who_is_told_to_go_back_to_more_updates_than_it_has_made_looks_where_the_run_is(follower):
    """It may have begun the run anew while it was cut off from all others."""
    with pytest.raises(InvalidMessage, match="the run has made 3 updates"):
        await follower.rewind(optimizer_step=4)
    assert follower.admission.is_behind


async def test_of_two_rewinds_the_newer_one_counts(follower):
    await follower.rewind()
    await follower.rewind(round_number=42, optimizer_step=1)
    await follower.rewind(round_number=40, optimizer_step=0)
    assert follower.target == Timeline(42, 1, 1)


def state_of(trainer):
    return {name: value.clone() for name, value in trainer.state().items()}


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


async def test_a_peer_begins_with_the_initial_weights(tmp_path):
    follower = Follower(tmp_path)
    await follower.steps.begin(FIRST_TIMELINE, None)
    assert_equal(
        follower.trainer.state(),
        StageTrainer(ResolvedManifest.of(MANIFEST), ResolvedManifest.of(MANIFEST).specs[0]).state(),
    )
    follower.device_thread.stop()


async def test_a_peer_goes_back_to_its_snapshot(follower):
    expected = state_of(follower.trainer)
    assert await follower.donor.take_snapshot(3)
    follower.trainer.apply([torch.ones_like(parameter) for parameter in follower.trainer.module.parameters()])
    follower.steps._begin_round(4, "history_hash of 4", FIRST_TIMELINE, b"", b"")
    running = asyncio.ensure_future(follower.steps.run())
    await follower.rewind(optimizer_step=3)
    await until(lambda: follower.steps.step.round_number == 38 and follower.admission.is_open)
    assert (follower.steps.step.optimizer_step, follower.steps.step.timeline, follower.trainer.optimizer_step) == (
        3,
        Timeline(38, 3, 3),
        3,
    )
    assert (follower.steps.step.round_number, follower.steps.step.history_hash) == (38, "history_hash of 3")
    assert (follower.donor.current.round_number, follower.donor.current.ledger) == (38, b"ledger")
    assert_equal(follower.trainer.state(), expected)
    assert follower.target is None
    assert follower.metrics.rewinds._value.get() == 1
    assert not running.done()
    running.cancel()


async def test_a_snapshot_that_does_not_fit_is_passed_over(follower, tmp_path, caplog):
    """Neither one that this peer copied from a liar keeps it from its stage, nor one that a liar offers."""
    good = StageState(3, "history_hash of 3", state_of(follower.trainer), FIRST_TIMELINE)
    lies = replace(good, tensors={name: value[:1] for name, value in good.tensors.items()}), replace(good, ledger=b"no")
    holders = [Follower(tmp_path / name, name, follower.network) for name in "abc"]
    for holder, state in zip(holders, (*lies, good), strict=True):
        await holder.answer()
        await holder.donor.store_snapshot(0, state)
    follower.peers = [PeerView(peer_id=h.peer_id, stage=1, state=PeerState.SERVING, round_number=3) for h in holders]
    leases = follower.steps._leases = NotedLeases(follower)
    await follower.donor.store_snapshot(0, lies[0])
    for first_round in range(38, 46):  # the holders are asked in any order
        target = Timeline(first_round, 3, 3)
        await follower.steps.begin(target, partial(follower.steps._downloads.take_snapshot_of, target))
        assert_equal(follower.trainer.state(), good.tensors)
        assert (follower.steps.step.round_number, follower.steps.step.ledger) == (first_round, b"")
        assert not follower.donor.snapshots()
    assert caplog.text.count("snapshot_refused stage=0 optimizer_step=3") == 1
    await anyio.lowlevel.checkpoint()
    assert leases.begun == [*range(38, 46)], "once for each, and at one moment with the round"


async def test_a_peer_goes_back_to_the_initial_weights(follower):
    initial = StageTrainer(ResolvedManifest.of(MANIFEST), ResolvedManifest.of(MANIFEST).specs[0])
    running = asyncio.ensure_future(follower.steps.run())
    await follower.rewind(optimizer_step=0)
    await until(lambda: follower.steps.step.round_number == 38 and follower.admission.is_open)
    assert (follower.steps.step.optimizer_step, follower.trainer.optimizer_step) == (0, 0)
    assert_equal(follower.trainer.module.state_dict(), initial.module.state_dict())
    running.cancel()


async def test_who_joins_as_its_mates_go_back_goes_with_them(follower, monkeypatch):
    asked = []

    async def fetch(transport, donors, call, *, timeline, take, **options):
        asked.append((list(donors), call.min_round, timeline))
        await take(StageState(46, "history_hash of 41", state_of(follower.trainer), NEWER))

    async def choose():
        return ["c"], NEWER

    monkeypatch.setattr(joining, "fetch_state", fetch)
    await follower.steps.catch_up(["a", "c"], choose)
    assert asked == [(["c"], 0, NEWER)], "and asks nobody else"
    assert follower.steps.step.timeline == NEWER
    assert follower.steps.step.phase is Phase.OPEN


async def test_a_state_of_a_round_that_the_run_cannot_be_in_is_not_asked_for(follower, monkeypatch):
    """Most peers say where it is; later tries go by what they say then."""
    monkeypatch.setattr(joining, "RETRY_PAUSE_S", 0.0)
    follower.peers = [
        PeerView(peer_id=name, stage=0, state=PeerState.SERVING, round_number=100 + number)
        for number, name in enumerate("ab")
    ]
    follower.peers += [
        PeerView(peer_id="liar", stage=0, state=PeerState.SERVING, round_number=MAX_ROUND),
        PeerView(peer_id="j", stage=1, state=PeerState.JOINING),
    ]
    asked = []

    async def fetch(transport, donors, call, *, max_round, take, **options):
        asked.append((sorted(donors), max_round))
        if len(asked) == 1:
            follower.peers.append(PeerView(peer_id="c", stage=2, state=PeerState.SERVING, round_number=110))
            raise NotServing("not yet")
        await take(StageState(111, "history_hash of 111", state_of(follower.trainer), FIRST_TIMELINE))

    monkeypatch.setattr(joining, "fetch_state", fetch)
    await follower.steps._catch_up_by_state(["a"], min_round=4)
    assert asked == [(["a"], 101 + MAX_ROUNDS_AHEAD), (["a", "b", "liar"], 101 + MAX_ROUNDS_AHEAD)]
    assert follower.looked == [[0, 1, 2]]
    assert follower.steps.step.round_number == 111


@pytest.mark.parametrize(("round_number", "patience_s", "tries"), [(4, 0.0, 1), (4, 60.0, 3), (5, 0.0, 3)])
async def test_a_state_that_nobody_has_any_more_is_not_waited_for(
    follower, monkeypatch, round_number, patience_s, tries
):
    """The stage-mate that went on has gone, and those that are left wait for its state, too."""
    monkeypatch.setattr(joining, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(follower.steps._downloads, "_patience_s", patience_s)
    follower.peers.append(PeerView(peer_id="b", stage=0, state=PeerState.SERVING, round_number=round_number))
    asked = []

    async def fetch(transport, donors, call, **options):
        asked.append(call.min_round)
        raise NotServing("not in that round")

    monkeypatch.setattr(joining, "fetch_state", fetch)
    with pytest.raises(NotServing):
        await follower.steps._catch_up_by_state(["c"], min_round=5, tries=3)
    assert len(asked) == tries


async def test_a_state_that_does_not_load_is_asked_for_again(follower, monkeypatch):
    monkeypatch.setattr(joining, "RETRY_PAUSE_S", 0.0)
    good = state_of(follower.trainer)
    offers = [dict(list(good.items())[1:]), good]

    async def fetch(transport, donors, call, *, take, **options):
        await take(StageState(7, "history_hash of 7", offers.pop(0), FIRST_TIMELINE))

    monkeypatch.setattr(joining, "fetch_state", fetch)
    await follower.steps._catch_up_by_state(["a"], min_round=4)
    assert (offers, follower.steps.step.round_number) == ([], 7)
    offers.append({})
    with pytest.raises(InvalidMessage, match="the state lacks"):
        await follower.steps._catch_up_by_state(["a"], min_round=4, tries=1)
    assert follower.steps.step.round_number == 7, "nothing has changed"


class Split:
    """A follower that has made three updates more since stage-mates could not reach it: of 2, 3 and 4 samples."""

    def __init__(self, follower):
        self.follower, self.steps = follower, follower.steps
        self.step, self.hashes = follower.steps.step.optimizer_step, []

    async def go_on(self):
        for samples in (2, 3, 4):
            self.hashes.append(self.steps.step.history_hash)
            self.steps._rounds.current.samples = samples
            gradients = [torch.ones_like(parameter) for parameter in self.follower.trainer.module.parameters()]
            history_hash = extend_history(self.hashes[-1], gradients)
            await self.steps._commit(Settlement(Verdict.COMMIT, gradients, history_hash, samples))
        self.hashes.append(self.steps.step.history_hash)
        for step in (self.step + 1, self.step + 3):
            await self.follower.donor.store_snapshot(1, StageState(step, "x", {}, FIRST_TIMELINE))

    def lineage(self, num_common, length):
        """Of stage-mates with so many of the same updates, who have made `length` since."""
        theirs = (self.hashes[: num_common + 1] + [f"other {number}" for number in range(length)])[:length]
        return reduce(extend_lineage, theirs, b"")

    async def take_over(self, round_number, lineage, timeline=FIRST_TIMELINE, history_hash="theirs"):
        state = StageState(round_number, history_hash, state_of(self.follower.trainer), timeline, lineage=lineage)
        await self.steps._take_over(state)

    @property
    def lost(self):
        return self.follower.metrics.lost_samples._value.get()

    @property
    def snapshots(self):
        return [ref.optimizer_step - self.step for ref, _ in self.follower.donor.store.snapshots()]


@pytest.fixture
async def split(follower):
    split = Split(follower)
    await split.go_on()
    return split


@pytest.mark.parametrize(
    ("num_common", "lost", "snapshots"), [(0, 9, []), (1, 7, [1]), (2, 4, [1]), (3, 0, [1, 3]), (-1, 9, [])]
)
async def test_what_a_peer_brought_to_updates_that_its_stage_mates_did_not_make_is_lost(
    split, num_common, lost, snapshots
):
    lineage = split.lineage(num_common, 9)
    await split.take_over(split.step + 9, lineage)
    assert (split.lost, split.snapshots) == (lost, snapshots)
    assert split.steps.step.lineage == lineage
    await split.take_over(split.step + 20, split.lineage(-1, 20))
    assert split.lost == 9, "nothing is lost twice"


async def test_of_what_a_peer_did_that_was_cut_off_for_very_long_nobody_knows_what_is_lost(split, caplog):
    forward = Timeline(split.step + 5004, split.step + 4000, split.step + 4000)
    await split.take_over(forward.first_round, split.lineage(-1, 4000), forward)
    assert "samples_may_be_lost samples=9 " in caplog.text
    assert (split.lost, split.snapshots) == (0, []), "the run has other ones of these steps"


async def test_of_a_peer_that_has_left_its_stage_properly_nothing_may_be_lost(split, caplog):
    """It comes back after long."""
    split.steps._own_work.leave()
    await split.take_over(split.step + 4000, split.lineage(-1, 4000))
    assert (split.lost, "samples_may_be_lost" in caplog.text) == (0, False)


async def test_what_a_peer_brings_to_an_update_that_a_rewind_finds_under_way_is_lost_too(split, monkeypatch):
    """The run goes forward to a checkpoint, since all that had come further are gone."""
    trainer, is_changing, may_end = split.follower.trainer, threading.Event(), threading.Event()
    apply = trainer.apply

    def slowly(gradients):
        is_changing.set()
        may_end.wait(10)
        return apply(gradients)

    monkeypatch.setattr(trainer, "apply", slowly)
    gradients = [torch.ones_like(parameter) for parameter in trainer.module.parameters()]
    trainer.num_samples = split.steps._rounds.current.samples = 5
    settlement = Settlement(Verdict.COMMIT, gradients, extend_history(split.hashes[-1], gradients), 5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(split.steps._commit, settlement)
        await anyio.to_thread.run_sync(is_changing.wait, 10)
        tasks.cancel_scope.cancel()
        may_end.set()
    forward = Timeline(split.step + 90, split.step + 20, split.step + 80)
    await split.take_over(forward.first_round, split.lineage(0, 20), forward)
    assert split.lost == 2 + 3 + 4 + 5


@pytest.mark.parametrize(("num_common", "snapshots"), [(0, []), (1, []), (2, [1]), (3, [1, 3])])
async def test_where_updates_are_delayed_the_snapshot_of_the_last_common_step_is_of_no_use(
    split, num_common, snapshots
):
    """It holds the average that ends its round, too, and the two parts of the run have made different ones."""
    averaging = MANIFEST.averaging.model_copy(update={"mode": "delayed"})
    split.steps._own_work._averaging = averaging
    await split.take_over(split.step + 9, split.lineage(num_common, 9))
    assert split.snapshots == snapshots


async def test_nothing_is_lost_where_stage_mates_are_too_far_to_know(split):
    await split.take_over(split.step + 9, b"")
    assert (split.lost, split.snapshots) == (0, [1, 3])


@pytest.mark.parametrize(("num_common", "lost"), [(2, 0), (1, 3), (0, 5)])
async def test_what_a_rewind_takes_back_is_read_again_and_what_came_before_is_not(split, num_common, lost):
    """The run goes back to after the second update, of which there may be two."""
    timeline = Timeline(50, split.step + 2, split.step + 2)
    end = split.hashes[2] if num_common == 2 else "theirs"
    await split.take_over(50, split.lineage(num_common, 2), timeline, end)
    assert split.lost == lost
    await split.take_over(53, split.lineage(num_common, 5), timeline)
    assert split.lost == lost


async def test_what_was_brought_to_a_newer_timeline_is_lost_where_stage_mates_go_on_with_the_older_one(split):
    split.steps._own_work.stand_at(replace(split.steps.step, timeline=Timeline(split.step, split.step, split.step)))
    await split.take_over(split.step + 9, split.lineage(1, 9))
    assert split.lost == 7


@pytest.mark.parametrize(("ahead", "errors"), [(1, 1), (0, 0), (-1, 0)])
async def test_the_work_of_an_open_round_is_read_again_if_the_run_goes_back_to_before_it(
    follower, caplog, ahead, errors
):
    """Stage-mates may have ended the round without this peer, and made later updates that the run goes back to."""
    number = follower.steps.step.round_number + ahead
    follower.trainer.num_samples = 6
    state = state_of(follower.trainer)
    await follower.steps._take_over(StageState(50, "theirs", state, Timeline(50, number, number)))
    assert lost(follower) == 6
    assert caplog.text.count("samples_lost") == errors


@pytest.mark.parametrize(("created_at", "again"), [(8, 6), (9, 4), (10, 0)])
def test_work_of_the_round_before_is_not_read_again_if_the_run_goes_back_to_this_very_round(created_at, again):
    """The ledger that the run goes on with has its samples, be they in the average or not."""
    step = StepState(round_number=9)
    assert num_read_again(6, step, Timeline(50, created_at, created_at), held_back=2) == again
    assert num_read_again(6, step, step.timeline, held_back=2) == 0


async def test_who_begins_anew_has_nothing_to_lose(split):
    await split.steps.begin(Timeline(50, 0, 0), None)
    await split.take_over(60, split.lineage(-1, 10), Timeline(50, 0, 0))
    assert split.lost == 0


async def test_who_joins_its_stage_anew_finds_out_what_it_has_lost(split):
    split.steps._rounds = RoundBook(Condition())  # as that of another replica
    await split.take_over(split.step + 9, split.lineage(1, 9))
    assert split.lost == 7


class Return(Split):
    """A follower that comes back to its stage, and is given the state of before the last two updates that it made."""

    async def come_back(self):
        await self.go_on()
        lineage = self.lineage(1, 1)
        await self.take_over(self.step + 1, lineage, history_hash=self.hashes[1])

    async def commit(self, history_hash, samples):
        """Make an update with the stage-mates."""
        self.steps._rounds.current.samples = samples
        gradients = [torch.ones_like(parameter) for parameter in self.follower.trainer.module.parameters()]
        await self.steps._commit(Settlement(Verdict.COMMIT, gradients, history_hash, samples))

    def make_update(self, history_hash):
        """Make an update of stage-mates."""
        step = self.steps.step
        self.steps._begin_round(step.round_number + 1, history_hash, step.timeline, b"", step.next_lineage)


@pytest.fixture
async def returned(follower):
    returned = Return(follower)
    await returned.come_back()
    return returned


async def test_who_comes_back_with_an_older_state_has_lost_nothing_if_it_makes_the_same_updates(returned):
    for history_hash in returned.hashes[2:]:
        assert (returned.lost, returned.snapshots) == (0, [1, 3])
        returned.make_update(history_hash)
    returned.make_update("theirs")
    assert (returned.lost, returned.snapshots) == (0, [1, 3])
    await returned.take_over(returned.step + 9, returned.lineage(2, 9))
    assert returned.lost == 4, "what it brought to the last of the three is not forgotten"


async def test_who_comes_back_has_lost_what_the_stage_has_made_other_updates_for(returned):
    returned.make_update(returned.hashes[2])
    returned.make_update("theirs")
    assert (returned.lost, returned.snapshots) == (4, [1])
    returned.make_update("theirs, too")
    assert returned.lost == 4, "nothing is lost twice"


@pytest.mark.parametrize("mode", ["synchronous", "delayed"])
async def test_who_comes_back_and_makes_an_update_anew_has_lost_what_it_brought_to_the_first(returned, mode):
    """Where updates are delayed, the snapshot of the step holds the new average."""
    returned.steps._own_work._averaging = MANIFEST.averaging.model_copy(update={"mode": mode})
    await returned.commit("another", 10)
    assert (returned.lost, returned.snapshots) == (7, [1])
    await returned.take_over(returned.step + 9, returned.lineage(1, 9))
    assert returned.lost == 17, "that of the second is lost now"


async def test_who_comes_back_and_makes_the_very_update_again_has_lost_nothing(returned):
    """Where updates are delayed, a state may hold the average that the next one is made of."""
    for history_hash in returned.hashes[2:]:
        await returned.commit(history_hash, 10)
        assert (returned.lost, returned.snapshots) == (0, [1, 3])
    await returned.take_over(returned.step + 9, returned.lineage(0, 9))
    assert returned.lost == 9, "what it brought to the first ones"


async def test_where_updates_are_delayed_the_snapshot_with_another_average_is_of_no_use_to_who_comes_back(returned):
    returned.steps._own_work._averaging = MANIFEST.averaging.model_copy(update={"mode": "delayed"})
    returned.make_update("theirs")
    assert (returned.lost, returned.snapshots) == (7, [])


async def test_where_the_run_goes_back_who_has_come_back_has_lost_what_came_before(returned):
    timeline = Timeline(50, returned.step + 2, returned.step + 2)
    await returned.take_over(50, returned.lineage(1, 2), timeline)
    assert returned.lost == 3, "what came later is read again"


async def test_a_snapshot_that_is_being_written_as_its_part_is_given_up_is_dropped(split):
    store, release = split.follower.donor.store, anyio.Event()
    run = store._threads.run

    async def slow(work, *args):
        stored = await run(work, *args)
        await release.wait()
        return stored

    store._threads = SimpleNamespace(run=slow)
    storing = [
        asyncio.ensure_future(store.store_snapshot(2, StageState(split.step + after, "x", {}, FIRST_TIMELINE)))
        for after in (1, 3)
    ]
    await asyncio.sleep(0)
    store.give_up(split.step + 2, split.step + EVERY)
    store.give_up(split.step + 9, split.step + 10)
    release.set()
    await asyncio.gather(*storing)
    assert [(ref.stage, ref.optimizer_step - split.step) for ref, _ in store.snapshots()] == [(1, 1), (2, 1)]


async def test_later_snapshots_that_a_peer_has_taken_elsewhere_stay(split):
    """It has been in another stage, and the run has gone back twice meanwhile."""
    store, later = split.follower.donor.store, split.step + 30
    await store.store_snapshot(2, StageState(later, "x", {}, FIRST_TIMELINE))
    await split.take_over(split.step + 40, split.lineage(1, 40), Timeline(split.step + 30, later, later))
    assert split.snapshots == [1, 30], "those of its own part go"


@pytest.mark.parametrize("optimizer_step", [2, 4])
async def test_coordinators_are_asked_for_the_state_that_a_timeline_begins_with(follower, monkeypatch, optimizer_step):
    """If the run goes forward, they are asked first: no peer should have that state."""
    asked, running = [], asyncio.ensure_future(follower.steps.run())

    async def fetch(transport, donors, call, **options):
        asked.extend(donors)
        raise NotServing("nobody has it")

    monkeypatch.setattr(joining, "fetch_state", fetch)
    follower.reached = 9, 5
    await follower.rewind(optimizer_step=optimizer_step)
    with pytest.raises(NotServing):
        await running
    anybody = ["c", "n", RUN_ID]
    assert asked == (anybody if optimizer_step == 2 else [RUN_ID, *anybody])


async def test_in_rounds_without_an_average_nothing_is_brought(follower, monkeypatch):
    """What was computed in them is brought with the next average."""
    averaging = MANIFEST.averaging.model_copy(update={"mode": "periodic", "inner_steps": 2})
    monkeypatch.setattr(follower.steps, "_manifest", MANIFEST.model_copy(update={"averaging": averaging}))
    monkeypatch.setattr(follower.steps._own_work, "_averaging", averaging)
    split = Split(follower)
    await split.go_on()
    await split.take_over(split.step + 9, split.lineage(0, 9))
    brought = [
        samples
        for number, samples in enumerate((2, 3, 4))
        if averaging.averages_at(split.step + number, begins_timeline=False)
    ]
    assert 0 < len(brought) < 3
    assert split.lost == sum(brought)


async def test_an_update_under_another_type_is_not_replayed(follower, monkeypatch):
    gradients = [torch.ones_like(parameter) for parameter in follower.trainer.module.parameters()]
    history_hash = extend_history(follower.steps.step.history_hash, gradients)
    offers = [[gradient.view(torch.int32) for gradient in gradients], gradients]

    async def fetch(transport, donors, call, **options):
        if call.min_round != 3:
            raise NotServing("there is none")
        tensors = {str(number): gradient for number, gradient in enumerate(offers.pop(0))}
        return StageState(3, history_hash, tensors, FIRST_TIMELINE, b"")

    monkeypatch.setattr(joining, "fetch_state", fetch)
    before, lineage = state_of(follower.trainer), follower.steps.step.next_lineage
    assert not await follower.steps._replay(["m"])
    assert_equal(state_of(follower.trainer), before)
    assert await follower.steps._replay(["m"])
    assert (follower.steps.step.round_number, follower.trainer.optimizer_step) == (4, 4)
    assert follower.steps.step.lineage == lineage


def offer_updates(follower, monkeypatch, ledger=b""):
    """Have a stage-mate offer updates without end, as a liar can: each continues the history that came before."""
    gradients = [torch.ones_like(parameter) for parameter in follower.trainer.module.parameters()]
    tensors = {str(number): gradient for number, gradient in enumerate(gradients)}

    async def fetch(transport, donors, call, **options):
        history_hash = extend_history(follower.steps.step.history_hash, gradients)
        return StageState(call.min_round, history_hash, tensors, FIRST_TIMELINE, ledger)

    monkeypatch.setattr(joining, "fetch_state", fetch)


async def test_a_newcomer_asks_for_no_update_of_the_round_that_its_stage_mates_are_in(follower, monkeypatch):
    """While they vote on it, the answer waits; and one of them may wait for the newcomer before it votes."""
    offer_updates(follower, monkeypatch)
    follower.peers = [PeerView(peer_id="n", stage=1, state=PeerState.SERVING, round_number=9)]

    async def greet(stage, peers):
        return 5

    async def choose():
        return ["m"], FIRST_TIMELINE

    follower.steps._gossip.greet = greet
    await follower.steps.catch_up(["m"], choose)
    assert (follower.steps.step.round_number, follower.steps.step.phase) == (5, Phase.OPEN)


async def test_no_more_updates_are_replayed_than_the_run_can_have_made(follower, monkeypatch):
    offer_updates(follower, monkeypatch)
    monkeypatch.setattr(joining, "last_credible_round", lambda rounds: max(rounds) + 2)
    assert follower.steps.step.round_number == 3
    follower.peers = [PeerView(peer_id="n", stage=1, state=PeerState.SERVING, round_number=4)]
    assert await follower.steps._replay(["m"])
    assert follower.steps.step.round_number == 6
    assert not await follower.steps._replay(["m"])


async def test_an_update_with_a_ledger_that_is_none_is_not_replayed(follower, monkeypatch):
    """Another stage-mate's state is taken instead."""
    offer_updates(follower, monkeypatch, ledger=b"none")
    follower.steps._leases = NotedLeases(follower)
    before = state_of(follower.trainer)
    assert not await follower.steps._replay(["m"])
    assert_equal(state_of(follower.trainer), before)
    assert follower.steps.step.round_number == 3


async def test_work_that_is_lost_since_others_went_on_is_reported(follower, caplog):
    for timeline, num_lines in ((FIRST_TIMELINE, 1), (Timeline(50, 4, 4), 1)):
        follower.trainer.num_samples = 5
        round_number = timeline.first_round or 9
        state = StageState(round_number, "theirs", state_of(follower.trainer), timeline, b"")
        await follower.steps._take_over(state)
        assert caplog.text.count("samples_lost samples=5 ") == num_lines, "what a rewind takes back is read again"
    assert lost(follower) == 10


@pytest.mark.parametrize("is_update", [False, True])
async def test_work_that_is_lost_as_the_run_goes_back_is_reported(follower, monkeypatch, is_update):
    """The rewind ends what takes the state or update over, and not the device's job."""
    changing, may_end = threading.Event(), threading.Event()

    def slowly(change, *args, **options):
        changing.set()
        may_end.wait(10)
        return change(*args, **options)

    for name in ("load_state", "apply"):
        monkeypatch.setattr(follower.trainer, name, partial(slowly, getattr(follower.trainer, name)))
    follower.trainer.num_samples = 5
    tensors = {str(number): torch.ones_like(each) for number, each in enumerate(follower.trainer.module.parameters())}

    async def update_after(donors, step):
        await anyio.lowlevel.checkpoint()
        return StageState(4, "theirs", tensors, FIRST_TIMELINE, b"")

    monkeypatch.setattr(follower.steps._downloads, "update_after", update_after)
    state = StageState(9, "theirs", state_of(follower.trainer), FIRST_TIMELINE, b"")
    taking = follower.steps._replay(["a"]) if is_update else follower.steps._take_over(state)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: taking)
        await until(changing.is_set)
        tasks.cancel_scope.cancel()
        may_end.set()
    assert lost(follower) == 5
    assert follower.steps.step.round_number == (4 if is_update else 9)


async def test_a_peer_that_cannot_keep_snapshots_complains(swarm, monkeypatch):
    """Checkpoints are made of them."""
    peer = await swarm.add("a", 1)
    write = FolderStorage.write

    def full(storage, name, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderStorage, "write", full)
    await peer.keeper.take_snapshot(peer.donor.current.round_number)
    complaint = peer.keeper.complaint()
    assert complaint.trouble is Trouble.NO_SNAPSHOTS
    assert "No space left on device: make room" in complaint.words
    monkeypatch.setattr(FolderStorage, "write", write)
    await peer.keeper.take_snapshot(peer.donor.current.round_number)
    assert peer.keeper.complaint() is None


async def test_a_full_disk_costs_a_snapshot_and_nothing_else(follower, monkeypatch, caplog):
    def write(storage, name, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderStorage, "write", write)
    assert await follower.donor.take_snapshot(3)
    assert not follower.donor.snapshots()
    assert "snapshot_not_stored stage=0 optimizer_step=3" in caplog.text


async def test_a_ledger_that_is_too_long_for_an_index_costs_a_snapshot_and_nothing_else(follower, caplog):
    """One member of stage 0 may count so many scattered samples."""
    ledger = bytes(MAX_LEDGER_BYTES + 1)
    follower.steps._begin_round(4, "history_hash of 4", FIRST_TIMELINE, ledger, b"")
    follower.trainer.optimizer_step = 4
    assert await follower.donor.take_snapshot(4)
    assert not follower.donor.snapshots()
    assert "snapshot_not_stored stage=0 optimizer_step=4" in caplog.text


async def test_the_list_of_snapshots_says_where_a_peer_stands(follower):
    assert await follower.donor.take_snapshot(3)
    reply = await follower.donor.handle_list_snapshots("x", ListSnapshotsCall(manifest=MANIFEST.hash), ())
    assert check_body(ListSnapshotsReply, reply.body) == ListSnapshotsReply(
        round_number=3,
        timeline_first_round=0,
        timeline_first_optimizer_step=0,
        timeline_created_at_round=0,
        snapshots=((0, 3, 3),),
    )


async def test_a_snapshot_of_another_optimizer_step_is_not_gone_back_to(follower):
    """The run was cut in two, and both parts have gone through rounds of the same numbers."""
    tensors, other_part = state_of(follower.trainer), Timeline(12, 8, 8)
    await follower.donor.store_snapshot(0, StageState(16, "history_hash of 12", tensors, other_part))
    assert [known for known, _ in follower.donor.snapshots()] == [SnapshotRef(0, 16, 12)]
    with pytest.raises(CallError, match="no donor gave the state of stage 0"):
        await taken(partial(follower.steps._downloads.take_snapshot_of, Timeline(30, 16, 16)))
    state = await taken(partial(follower.steps._downloads.take_snapshot_of, Timeline(30, 12, 16)))
    assert state.optimizer_step == 12


async def test_a_newer_rewind_during_a_rewind_is_not_lost(follower):
    running = asyncio.ensure_future(follower.steps.run())
    begin = follower.steps.begin

    async def slow(target, fetch):
        if target.first_round == 38:
            await follower.rewind(round_number=42, optimizer_step=0)
        await begin(target, fetch)

    follower.steps.begin = slow
    await follower.rewind(optimizer_step=0)
    await until(lambda: follower.steps.step.round_number == 42 and follower.admission.is_open)
    running.cancel()


async def test_a_newer_rewind_counts_though_the_older_ones_snapshot_is_gone(follower):
    running = asyncio.ensure_future(follower.steps.run())

    async def is_gone(target, take, is_further):
        await follower.rewind(round_number=42, optimizer_step=0)
        raise NotServing("its only holder has died")

    follower.steps._downloads.take_snapshot_of = is_gone
    await follower.rewind(optimizer_step=2)
    await until(lambda: follower.steps.step.round_number == 42 and follower.admission.is_open)
    assert follower.target is None
    assert not running.done()
    running.cancel()


async def test_a_peer_that_reaches_later_rounds_as_it_is_told_to_go_back_goes_on(follower, monkeypatch):
    """A stage-mate that has gone back already gave it its state."""
    taken = asyncio.get_running_loop().create_future()

    async def end(ending):
        follower.rounds.enter(Phase.ENDING)
        await taken
        follower.steps._begin_round(38, "new timeline", Timeline(38, 0, 0), b"", b"")

    monkeypatch.setattr(follower.steps, "_end", end)
    follower.steps._progress.saw_round(4)
    running = asyncio.ensure_future(follower.steps.run())
    await anyio.wait_all_tasks_blocked()
    follower.steps.rewinds.go_back(Timeline(38, 0, 0))
    taken.set_result(None)
    await anyio.wait_all_tasks_blocked()
    assert not running.done()
    assert (follower.steps.step.history_hash, follower.admission.is_open) == ("new timeline", True)
    running.cancel()


async def test_a_rewind_that_a_joiner_has_behind_it_is_dropped(follower):
    await follower.rewind(optimizer_step=0)
    follower.steps._begin_round(45, "new timeline", Timeline(38, 0, 0), b"", b"")
    assert follower.target is None


async def test_a_peer_that_is_left_behind_by_its_stage_mates_notices(follower, monkeypatch):
    monkeypatch.setattr(steps, "BEHIND_S", 0.0)
    asked = []

    async def greet(stage, peers):
        asked.append(list(peers))
        return follower.steps.step.round_number + 3

    follower.steps._gossip.greet = greet
    looking = asyncio.ensure_future(follower.steps._look_when_behind())
    with pytest.raises(NotServing):
        async with follower.admission.enter(follower.steps.step.round_number + 7):
            pass
    await until(lambda: asked)
    await follower.steps._progress.wait_until_over(follower.steps.step.round_number)
    assert follower.admission._newest_asked == 0, "one lie has one question for its answer"
    looking.cancel()


async def test_a_peer_that_its_stage_mates_have_left_behind_does_not_wait_to_end_the_round_with_them(follower):
    asked = []

    async def hand_over(on_gone, *, may_end_round):
        asked.append(may_end_round)
        return not may_end_round  # the stage-mates are in a later round

    async def nobody_gives_its_state():
        raise NotServing("nobody gives its state")

    follower.steps._handover = SimpleNamespace(hand_over=hand_over)
    leaving = asyncio.ensure_future(follower.steps.leave())
    await until(lambda: asked)
    assert not leaving.done(), "the round may end yet"
    follower.steps._run_rounds = nobody_gives_its_state
    with pytest.raises(NotServing):
        await follower.steps.run()
    await until(leaving.done)
    assert asked == [True, False]


async def test_who_leaves_as_the_run_goes_back_hands_nothing_over_and_does_not_come_back(follower):
    """All samples that it holds are read again."""
    asked = []

    async def hand_over(on_gone, *, may_end_round):
        asked.append(may_end_round)
        return True

    follower.steps._handover = SimpleNamespace(hand_over=hand_over)
    running = asyncio.ensure_future(follower.steps.run())
    follower.trainer.num_samples = 5
    follower.admission.leave()
    async with follower.steps._ending:  # as while a round ends, until the rewind cancels that
        leaving = asyncio.ensure_future(follower.steps.leave())
        await anyio.wait_all_tasks_blocked()
        await follower.rewind(optimizer_step=3)
        await anyio.wait_all_tasks_blocked()
    await leaving
    await anyio.wait_all_tasks_blocked()
    assert (asked, follower.steps.step.phase, follower.steps.step.round_number) == ([], Phase.LEFT, 3)
    assert follower.target is None
    assert (lost(follower), follower.metrics.rewinds._value.get()) == (5, 0)
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize(
    ("trouble", "first_round", "goes_back"),
    [(Trouble.DIVERGED, 40, True), (Trouble.NO_UPDATES, 40, True), (Trouble.DIVERGED, 3, False)]
    + [(each, 40, False) for each in (None, Trouble.FAILING, Trouble.NO_DATA)],
)
async def test_a_replica_begins_anew_where_the_runs_key_says_so_and_the_weights_are_broken(
    follower, monkeypatch, trouble, first_round, goes_back
):
    """Peers of any stage may have found that."""
    monkeypatch.setattr(rewinds, "LOOK_S", 0.001)
    asked = []

    async def beginning():
        asked.append(1)
        if len(asked) == 1:
            raise CallError("the DHT does not answer")
        return TimelineRecord(first_round=first_round, first_optimizer_step=3, begun=9)

    monkeypatch.setattr(follower.steps.rewinds, "_beginning", beginning)
    since_s = None if trouble is None else 1.0
    follower.peers[0] = replace(follower.peers[0], trouble=trouble, trouble_since_s=since_s)
    timeline = Timeline(40, 3, 40)
    with anyio.move_on_after(5.0 if goes_back else 0.05):
        assert await follower.steps.rewinds.wait_for_beginning() == timeline
    assert follower.steps.rewinds.target == (timeline if goes_back else None)
    assert bool(asked) == (trouble is not None and trouble.is_of_weights), "nobody asks at other times"


@pytest.mark.parametrize("is_first", [True, False])
async def test_peers_of_stage_0_alone_look_for_another_beginning(monkeypatch, is_first):
    begun = []

    async def forever(*_):
        await anyio.sleep_forever()

    async def note(replica):
        begun.append(1)

    for name in ("_follow_run", "_launch", "_publish_progress"):
        monkeypatch.setattr(StageReplica, name, forever)
    monkeypatch.setattr(StageReplica, "_begin_anew_with_run", note)
    replica, runs = object.__new__(StageReplica), SimpleNamespace(run=forever)
    replica.parts = SimpleNamespace(
        snapshot_keeper=runs, state_server=runs, step_loop=runs, launcher="launcher" if is_first else None
    )
    with anyio.move_on_after(0.02):
        await replica.serve(None, None, None)
    assert begun == [1] * is_first


async def test_all_of_stage_0_go_back_and_take_the_others_along(monkeypatch):
    told, timeline = [], Timeline(40, 3, 40)
    step = SimpleNamespace(timeline=FIRST_TIMELINE)

    async def wait_for_beginning():
        if told:
            await anyio.sleep_forever()
        return timeline

    async def have_all_go_back(target, is_there):
        told.append((target, is_there()))

    replica = object.__new__(StageReplica)
    changed = Condition()
    replica._peer = SimpleNamespace(context=SimpleNamespace(changed=changed))
    replica.parts = SimpleNamespace(
        step_loop=SimpleNamespace(rewinds=SimpleNamespace(wait_for_beginning=wait_for_beginning)),
        recovery=SimpleNamespace(have_all_go_back=have_all_go_back),
        core=SimpleNamespace(rounds=SimpleNamespace(step=step)),
    )
    following = asyncio.ensure_future(replica._begin_anew_with_run())
    await anyio.wait_all_tasks_blocked()
    assert told == [], "it is not there itself"
    step.timeline = timeline
    changed.notify()
    await anyio.wait_all_tasks_blocked()
    assert told == [(timeline, True)]
    following.cancel()


async def test_a_gradient_that_is_not_finite_is_kept_from_the_mean_of_the_stage(follower):
    trainer = follower.trainer
    for parameter in trainer.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.num_samples = 6
    gradients, samples = follower.contribution()
    assert samples == 6
    assert all(bool(gradient.any()) for gradient in gradients)
    assert lost(follower) == 0
    next(trainer.module.parameters()).grad.view(-1)[0] = float("nan")
    gradients, samples = follower.contribution()
    assert samples == 0
    assert not any(bool(gradient.any()) for gradient in gradients)
    assert lost(follower) == 6


async def test_a_stage_whose_gradients_are_never_finite_complains(follower):
    """Its rounds go on, and its weights stay as they are."""
    for number in range(4):
        assert (follower.steps._updates.complaint() is not None) == (number == 3)
        next(follower.trainer.module.parameters()).grad = torch.full_like(
            next(follower.trainer.module.parameters()), float("nan")
        )
        follower.trainer.num_samples = 6
        gradients, samples = follower.contribution()
        await follower.steps._commit(Settlement(Verdict.COMMIT, gradients, "h", samples))
    before = follower.steps._updates
    missed = before._num_missed
    follower.trainer.num_samples = 6
    await follower.steps._commit(Settlement(Verdict.COMMIT, [torch.ones_like(each) for each in gradients], "h", 6))
    assert before.complaint() is None
    before._num_missed = missed
    await follower.steps.begin(Timeline(40, 0, 0), None)
    assert before.complaint() is None, "these are others' weights"


async def test_a_difference_that_is_not_finite_is_kept_from_the_mean_of_the_stage(tmp_path, monkeypatch):
    averaging = MANIFEST.averaging.model_copy(update={"mode": "periodic", "inner_steps": 2})
    monkeypatch.setattr(sys.modules[__name__], "MANIFEST", MANIFEST.model_copy(update={"averaging": averaging}))
    follower = Follower(tmp_path)
    async with follower.network:
        await follower.steps.begin(FIRST_TIMELINE, None)
        trainer = follower.trainer
        shared = [tensor.clone() for tensor in trainer.strategy.shared_weights()]
        for _ in range(2):
            trainer.num_samples = 6
            for parameter in trainer.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            with torch.no_grad():
                next(trainer.module.parameters()).view(-1)[0] = float("nan")  # the device's memory has failed
            differences, samples = follower.contribution()
            trainer.apply(differences)
        assert samples == 0
        assert lost(follower) == 12
        assert trainer.strategy.pending_samples == 0
        assert all(torch.equal(*pair) for pair in zip(trainer.module.parameters(), shared, strict=True))
    follower.device_thread.stop()


def lost(follower):
    return follower.steps._metrics.lost_samples._value.get()


# --- comparing weights ------------------------------------------------------------------------------------------------


class Mates:
    """Followers in one stage that end rounds together, each with the same gradient."""

    def __init__(self, folder):
        self.folder, self.network, self.members = folder, MemoryNetwork(), []

    async def add(self, name):
        member = Follower(self.folder / name, name, self.network)
        await member.answer()
        self.members.append(member)
        for present in self.members:
            present.peers = [
                PeerView(peer_id=other.peer_id, stage=0, state=PeerState.SERVING)
                for other in self.members
                if other is not present
            ]
        return member

    async def end_round(self, *members):
        for member in members:
            for parameter in member.trainer.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            member.trainer.num_samples = 1
        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(member.steps._end, member.rounds.current)
        for member in members:
            member.rounds.enter(Phase.OPEN)


@asynccontextmanager
async def begun_mates(folder):
    mates = Mates(folder)
    async with mates.network:
        for name in "abc":
            member = await mates.add(name)
            await member.steps.begin(FIRST_TIMELINE, None)
            member.rounds.enter(Phase.OPEN)
        yield mates
    for member in mates.members:
        member.device_thread.stop()


@pytest.fixture
async def mates(tmp_path):
    async with begun_mates(tmp_path) as mates:
        yield mates


@pytest.fixture
def delayed(monkeypatch):
    """Have updates be delayed by a round."""
    averaging = MANIFEST.averaging.model_copy(update={"mode": "delayed"})
    monkeypatch.setattr(sys.modules[__name__], "MANIFEST", MANIFEST.model_copy(update={"averaging": averaging}))


@pytest.fixture
def periodic(monkeypatch):
    """Have updates be averaged every other round."""
    averaging = MANIFEST.averaging.model_copy(update={"mode": "periodic", "inner_steps": 2})
    monkeypatch.setattr(sys.modules[__name__], "MANIFEST", MANIFEST.model_copy(update={"averaging": averaging}))


@pytest.fixture
async def delayed_mates(delayed, tmp_path):
    async for mates in averaging_ahead(tmp_path):
        yield mates


@pytest.fixture(params=["delayed", "periodic"])
async def mates_of_another_mode(request, tmp_path):
    request.getfixturevalue(request.param)
    async for mates in averaging_ahead(tmp_path):
        yield mates


async def averaging_ahead(folder):
    async with begun_mates(folder) as mates:
        running = [asyncio.ensure_future(member.steps._group.ahead.run()) for member in mates.members]
        await anyio.wait_all_tasks_blocked()
        yield mates
        for task in running:
            task.cancel()


def miscompute(member):
    """Have a peer's weights differ in one value, as if its device had rounded otherwise."""
    with torch.no_grad():
        next(member.trainer.strategy.weights()).view(-1)[0].add_(1e-3)


def num_resyncs(member, cause):
    return member.metrics.resyncs.labels(cause)._value.get()


def assert_alike(members, round_number):
    first = members[0]
    for member in members:
        assert (member.steps.step.round_number, member.trainer.optimizer_step) == (round_number, round_number)
        assert member.steps.step.history_hash == first.steps.step.history_hash
        assert_equal(state_of(member.trainer), state_of(first.trainer))


async def test_who_computed_other_weights_from_the_same_updates_takes_over_those_of_the_others(mates, caplog):
    odd = mates.members[-1]
    await mates.end_round(*mates.members)
    miscompute(odd)
    await mates.end_round(*mates.members)
    assert [member.steps.step.round_number for member in mates.members] == [2, 2, 2]
    assert [num_resyncs(member, "other_weights") for member in mates.members] == [0, 0, 0], "not compared yet"
    await mates.end_round(*mates.members)
    assert [num_resyncs(member, "other_weights") for member in mates.members] == [0, 0, 1]
    assert_alike(mates.members, 3)
    assert "weights_differ round=2" in caplog.text
    for _ in range(2):
        await mates.end_round(*mates.members)
    assert_alike(mates.members, 5)
    assert [num_resyncs(member, "other_weights") for member in mates.members] == [0, 0, 1], "they agree again"


async def test_a_peer_that_computes_otherwise_costs_itself_a_download_at_each_comparison(mates):
    *others, odd = mates.members
    for _ in range(6):
        await mates.end_round(*mates.members)
        miscompute(odd)
    assert [num_resyncs(member, "other_weights") for member in mates.members] == [0, 0, 2]
    assert [num_resyncs(member, "left_behind") for member in mates.members] == [0, 0, 0]
    assert {member.steps.step.round_number for member in mates.members} == {6}
    assert_alike(others, 6)


async def test_what_members_bring_to_a_period_is_told_where_two_bring_the_same(periodic, tmp_path):
    """In a round that they ended without each other, both have read it."""
    async with begun_mates(tmp_path) as mates:
        for number, member in enumerate(mates.members):
            member.rounds.current.names += [SampleId(0, 7, 0), SampleId(0, number, 0)][: 2 if number else 1]
        await mates.end_round(*mates.members)
        for number, member in enumerate(mates.members):
            member.rounds.current.names.append(SampleId(0, number, 1))
        await mates.end_round(*mates.members)
        by_id = sorted(mates.members, key=lambda member: member.peer_id)
        assert [member.metrics.repeated_samples._value.get() for member in by_id] == [0, 1, 1]
        assert {member.rounds.current.held for member in mates.members} == {()}, "the average has ended the period"


async def test_whose_round_has_ended_without_it_says_what_it_keeps_of_it(follower, monkeypatch):
    offer_updates(follower, monkeypatch)
    monkeypatch.setattr(joining, "last_credible_round", max)
    monkeypatch.setattr(type(follower.trainer.strategy), "holds_period", True)
    follower.peers = [PeerView(peer_id="n", stage=1, state=PeerState.SERVING, round_number=4)]
    follower.steps._leases = NotedLeases(follower)
    follower.rounds.current.earlier = (WindowRange(0, 1, 0, 2),)
    follower.rounds.current.names.append(SampleId(0, 1, 5))
    follower.rounds.current.taken_over = (WindowRange(0, 2, 0, 1),)
    held = (WindowRange(0, 1, 0, 2), WindowRange(0, 1, 5, 6), WindowRange(0, 2, 0, 1))
    assert await follower.steps._replay(["m"])
    assert follower.rounds.current.held == follower.steps._leases.held == held


async def test_who_computed_other_weights_does_not_go_on_from_them_with_the_next_update(delayed_mates):
    mates = delayed_mates
    *others, odd = mates.members
    for member in others:  # they keep updates for whoever downloads it
        await member.donor.server.find(StateIndexCall(manifest=MANIFEST.hash, of_stage=0, min_round=0))
    ask = odd.steps._downloads.update_after

    async def ask_late(donors, step):
        await until(lambda: others[0].steps.step.round_number > step.round_number)
        return await ask(donors, step)

    odd.steps._downloads.update_after = ask_late
    for _ in range(2):
        await mates.end_round(*mates.members)
    miscompute(odd)
    await mates.end_round(*mates.members)
    assert [num_resyncs(member, "other_weights") for member in mates.members] == [0, 0, 1]
    assert_alike(mates.members, 3)


async def test_after_a_rewind_a_peer_that_waited_for_another_average_takes_over_what_the_others_hold(delayed_mates):
    """Before the rewind, it had gone on without them."""
    mates = delayed_mates
    *others, odd = mates.members
    for _ in range(2):
        await mates.end_round(*mates.members)
    for member in mates.members:
        state, step = member.trainer.state(), member.steps.step
        for name in state:
            if name.startswith("round/expected"):
                state[name] = torch.full_like(state[name], 2.0 if member is odd else 1.0)
        snapshot = StageState(2, step.history_hash, state, FIRST_TIMELINE, b"")
        await member.donor.store_snapshot(0, snapshot)
        await member.steps.begin(
            Timeline(8, 2, 2), partial(member.steps._downloads.take_snapshot_of, Timeline(8, 2, 2))
        )
        member.rounds.enter(Phase.OPEN)
    await mates.end_round(*mates.members)
    assert odd.steps.step.history_hash != others[0].steps.step.history_hash
    await mates.end_round(*mates.members)
    assert [num_resyncs(member, "left_behind") for member in mates.members] == [0, 0, 1]
    for member in mates.members:
        assert (member.steps.step.round_number, member.trainer.optimizer_step) == (10, 4)
        assert_equal(state_of(member.trainer), state_of(others[0].trainer))


async def test_a_peer_that_missed_rounds_tells_of_the_samples_that_came_too_late(delayed, tmp_path, monkeypatch):
    follower = Follower(tmp_path)
    async with follower.network:
        await follower.steps.begin(FIRST_TIMELINE, None)
        averages = [torch.zeros_like(parameter) for parameter in follower.trainer.module.parameters()]
        history_hash, offers = follower.steps.step.history_hash, {}
        for round_number in range(3):
            history_hash = extend_history(history_hash, averages)
            tensors = {str(number): gradient for number, gradient in enumerate(averages)}
            offers[round_number] = StageState(round_number, history_hash, tensors, FIRST_TIMELINE, b"")
            averages = [torch.ones_like(parameter) for parameter in follower.trainer.module.parameters()]

        async def fetch(transport, donors, call, **options):
            if call.min_round not in offers:
                raise NotServing("there is none")
            return offers.pop(call.min_round)

        monkeypatch.setattr(joining, "fetch_state", fetch)
        follower.trainer.num_samples = 6
        follower.contribution()
        later = {round_number: offers.pop(round_number) for round_number in (1, 2)}
        assert await follower.steps._replay(["m"])
        assert (lost(follower), follower.trainer.strategy.pending_samples) == (0, 6), "it may end the next round"
        offers |= later
        assert await follower.steps._replay(["m"])
        assert (lost(follower), follower.trainer.strategy.pending_samples) == (6, 0)
        assert follower.steps.step.round_number == 3
    follower.device_thread.stop()


async def test_equal_weights_cost_no_download(mates):
    for _ in range(5):
        await mates.end_round(*mates.members)
    assert_alike(mates.members, 5)
    assert mates.network.num_calls("state_index") == 0


async def test_a_newcomer_has_the_weights_that_are_compared_and_replays_updates_over_a_comparison(mates):
    present = list(mates.members)
    for _ in range(2):
        await mates.end_round(*present)
    newcomer = await mates.add("d")
    await newcomer.steps.join([member.peer_id for member in present])
    for member in present:
        member.peers = [peer for peer in member.peers if peer.peer_id != newcomer.peer_id]  # it has not greeted yet
    await mates.end_round(*present)
    await mates.end_round(*present)
    assert newcomer.steps.step.round_number == 2
    assert await newcomer.steps._replay([member.peer_id for member in present])
    assert_alike(mates.members, 4)
    for member in present:
        member.peers.append(PeerView(peer_id=newcomer.peer_id, stage=0, state=PeerState.SERVING))
    newcomer.rounds.enter(Phase.OPEN)
    await mates.end_round(*mates.members)
    assert_alike(mates.members, 5)
    assert num_resyncs(newcomer, "other_weights") == 0


async def test_a_stage_mate_whose_state_does_not_load_keeps_no_newcomer_out(mates):
    """Its device is broken, or it lies; and it is a round ahead of the others."""
    present = list(mates.members)
    await mates.end_round(*present)
    broken = present[1]
    next(broken.trainer.strategy.weights()).fill_(torch.nan)
    broken.steps._begin_round(2, "history_hash of its own", FIRST_TIMELINE, b"", b"")
    newcomer = await mates.add("d")
    await newcomer.steps.join([member.peer_id for member in present])
    assert_alike([present[0], newcomer, present[2]], 1)
    assert newcomer.steps.download_bytes_per_s > 0


async def test_a_newcomer_that_replays_to_other_weights_downloads_at_the_next_comparison(mates):
    present = list(mates.members)
    await mates.end_round(*present)
    newcomer = await mates.add("d")
    await newcomer.steps.join([member.peer_id for member in present])
    for member in present:
        member.peers.pop()
    await mates.end_round(*present)
    assert await newcomer.steps._replay([member.peer_id for member in present])
    miscompute(newcomer)
    for member in present:
        member.peers.append(PeerView(peer_id=newcomer.peer_id, stage=0, state=PeerState.SERVING))
    newcomer.rounds.enter(Phase.OPEN)
    await mates.end_round(*mates.members)
    assert_alike(mates.members, 3)
    assert [num_resyncs(member, "other_weights") for member in mates.members] == [0, 0, 0, 1]


# --- catching up after having been left behind ------------------------------------------------------------------------


async def hold_up(mates, odd):
    """Have a peer miss a round, for which its stage-mates waited in vain: they wait for it no more."""
    others = [member for member in mates.members if member is not odd]
    was_late(odd, others)
    await mates.end_round(*others)
    return others


def was_late(odd, others):
    for member in others:
        member.barrier._mates.was_late(odd.peer_id, odd.steps.step.round_number)


def slow_down(odd, mates, others, monkeypatch):
    """Have a peer's stage-mates end a round while it downloads a state. Returns the rounds of the states."""
    downloaded, take_over = [], odd.steps._take_over

    async def take_late(state, **options):
        downloaded.append(state.round_number)
        await until(lambda: all(member.steps.step.round_number == state.round_number for member in others))
        was_late(odd, others)
        await mates.end_round(*others)
        await take_over(state, **options)

    monkeypatch.setattr(odd.steps, "_take_over", take_late)
    return downloaded


async def end_alone(odd):
    """Have a peer end a round that is over at its stage-mates."""
    with anyio.fail_after(20.0):
        await odd.steps._end(odd.rounds.current)
    odd.rounds.enter(Phase.OPEN)


async def test_a_peer_whose_download_outlasts_a_round_is_with_its_stage_mates_after_one(mates, monkeypatch):
    odd = mates.members[-1]
    for _ in range(2):
        await mates.end_round(*mates.members)
    others = await hold_up(mates, odd)
    downloaded = slow_down(odd, mates, others, monkeypatch)
    await end_alone(odd)
    assert downloaded == [3]
    assert_alike(mates.members, 4)
    for round_number in (5, 6, 7):
        await mates.end_round(*mates.members)
        assert_alike(mates.members, round_number)
    assert downloaded == [3]
    for member in others:
        assert not member.barrier._mates.is_left_out(odd.peer_id), "they average with it again"


async def test_in_the_other_modes_a_download_that_outlasts_a_round_is_caught_up_from_too(
    mates_of_another_mode, monkeypatch
):
    mates = mates_of_another_mode
    odd = mates.members[-1]
    for _ in range(2):
        await mates.end_round(*mates.members)
    others = await hold_up(mates, odd)
    await mates.end_round(*others)  # an average ends this round or the one before, and nobody has kept it
    downloaded = slow_down(odd, mates, others, monkeypatch)
    while not downloaded:  # a round without an average is gone through first
        await end_alone(odd)
    assert downloaded == [4]
    for round_number in (5, 6, 7, 8, 9):
        for member in mates.members:
            assert member.steps.step.round_number == round_number
            assert member.steps.step.history_hash == odd.steps.step.history_hash
            assert await member.digest_weights() == await odd.digest_weights()
        await mates.end_round(*mates.members)
    assert downloaded == [4]
    for member in others:
        assert not member.barrier._mates.is_left_out(odd.peer_id)


async def test_a_peer_that_is_left_behind_again_after_a_download_takes_the_update_and_no_state(mates, monkeypatch):
    """It came out as its stage-mates were averaging without it."""
    odd = mates.members[-1]
    others = await hold_up(mates, odd)
    downloaded = slow_down(odd, mates, others, monkeypatch)
    await end_alone(odd)
    for round_number in (3, 4):
        await mates.end_round(*others)
        odd.trainer.num_samples = 2
        await end_alone(odd)
        assert_alike(mates.members, round_number)
    assert downloaded == [1]
    assert num_resyncs(odd, "left_behind") == 1
    assert lost(odd) == 4, "the stage-mates made these updates without it"


async def test_who_computed_other_weights_catches_up_from_those_of_the_others(mates, monkeypatch):
    *others, odd = mates.members
    for _ in range(2):
        await mates.end_round(*mates.members)
    miscompute(odd)
    downloaded = slow_down(odd, mates, others, monkeypatch)
    await mates.end_round(*mates.members)
    assert downloaded == [3]
    assert num_resyncs(odd, "other_weights") == 1
    assert_alike(mates.members, 4)


@pytest.mark.parametrize("greeted", ["stalls", "knows it not"])
async def test_a_stage_mate_that_does_not_return_a_greeting_keeps_nobody_behind(mates, monkeypatch, greeted):
    monkeypatch.setattr(steps, "GREETING_S", 0.1)
    odd = mates.members[-1]
    others = await hold_up(mates, odd)
    slow_down(odd, mates, others, monkeypatch)
    stalled = {"before": anyio.Event()} if greeted == "stalls" else {"fail": NotServing("not seen")}
    fault = mates.network.fault(op="greet", to=others[0].peer_id, times=10**6, **stalled)
    await end_alone(odd)
    assert fault.fired
    assert_alike(mates.members, 2)


async def test_a_peer_follows_stage_mates_that_say_they_are_ahead_and_give_no_update_a_few_times(mates, monkeypatch):
    odd = mates.members[-1]
    others = await hold_up(mates, odd)
    downloaded = slow_down(odd, mates, others, monkeypatch)
    refused = mates.network.fault(op="state_index", skip=2 + 2, times=10**6, fail=NotServing("not kept here any more"))
    await end_alone(odd)
    assert refused.fired
    assert (downloaded, odd.steps.step.round_number) == ([1], 1)
    assert mates.network.num_calls("greet") <= len(others) * steps.CATCH_UP_TRIES
    refused.times = 0
    await end_alone(odd)
    assert_alike(mates.members, 2)
    assert downloaded == [1], "an update did"
