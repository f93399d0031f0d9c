import math
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import patch

import anyio
import pytest
import torch
from contexts import MovedClock, make_context
from tiny_models import LENGTH, LLAMA

from swarm_peer.config import PeerOptions, RunManifest
from swarm_peer.errors import HubFailed, NotServing, OtherTimeline, UserError
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.timeline import FIRST_TIMELINE
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView
from swarm_peer.runtime import peer as peers
from swarm_peer.runtime import startup
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.data.prefetch import HUB_PATIENCE_S
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.replica import StageReplica
from swarm_peer.runtime.stage.rounds import RoundBook

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


STEP = SimpleNamespace(round_number=7, timeline=FIRST_TIMELINE)


@pytest.mark.parametrize(
    ("error", "terms"),
    [(NotServing("the run has gone back without it"), (8, None)), (OtherTimeline("most go on"), (0, FIRST_TIMELINE))],
)
async def test_a_peer_that_was_left_behind_does_not_wait_for_ever_for_others_that_were_not(monkeypatch, error, terms):
    """Who left it behind may have died since, and its stage-mates hold the only state that is left."""
    monkeypatch.setattr(peers, "JOIN_PAUSE_S", 0.0)
    clock, asked = MovedClock(now=1.0), []

    async def nothing(*_):
        pass

    class Replica(SimpleNamespace):
        def stage_mates(self):
            return ["mate"]

        async def join(self, min_round=0, shunned=None):
            asked.append((min_round, shunned))
            if asked[-1] == terms:
                clock.now += 100.0
                raise NotServing("this peer is in round 7, not in 8")

    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, clock=clock)
    peer._manifest = MANIFEST
    peer._directory = SimpleNamespace(announce=nothing, refresh_surely=nothing)
    peer._lifecycle = Lifecycle(clock)
    replica = Replica(stage=1, step=STEP)
    peer._join_anew(replica, error)
    peer._join_anew(replica, NotServing("a download has failed as this peer leaves"))  # changes nothing
    await peer._join(replica)
    held_out = math.ceil(peers.LEFT_BEHIND_PATIENCE * MANIFEST.limits.announcement_s / 100.0)
    assert asked == [terms] * held_out + [(0, None)]


async def test_a_peer_stays_in_the_view_of_others_while_it_joins():
    """A large state takes many lifetimes of an announcement over a slow link. Others would come in its place."""
    told = []

    class Told(SimpleNamespace):
        """Notes the calls of all that it is asked for."""

        def __getattr__(self, name):
            async def note(*_, **__):
                told.append(name)

            return note

        @asynccontextmanager
        async def kept_fresh(self, stages):
            told.append(f"[{list(stages)}")
            yield
            told.append("]")

    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, clock=MovedClock())
    peer._manifest, peer._options = MANIFEST, OPTIONS
    peer._directory, peer._mover = Told(serial=4), Told()
    peer._lifecycle = Lifecycle(peer._context.clock)
    peer._holds_out_until_s, peer._min_round, peer._shunned = 0.0, 0, None
    step = SimpleNamespace(round_number=7, optimizer_step=7)
    await peer._work(Told(has_weights=False, stage=1, stages_of_interest=(1,), step=step))
    joining, serving = told.index("[[0, 1]"), told.index("[[1]")
    assert joining < told.index("join") < serving < told.index("catch_up") < told.index("serve")
    assert told[0] == "announce", "before it looks for others"
    assert told[-1] == "]"


@pytest.mark.parametrize(
    ("error", "may_end_round"),
    [(NotServing("the run has gone on without it"), True), (OtherTimeline("most go on"), False)],
)
async def test_who_leaves_a_timeline_ends_no_round_with_the_stage_mates_on_it(error, may_end_round):
    told, left = [], []

    async def nothing(*_):
        pass

    async def wait_until_left(rounds, admission):
        raise error

    async def leave(**terms):
        told.append(terms)

    replica = object.__new__(StageReplica)
    replica.leaves_timeline = False
    replica._peer = SimpleNamespace(
        context=make_context(MANIFEST, options=OPTIONS, clock=MovedClock()), transport=SimpleNamespace(answered=nothing)
    )
    replica.parts = SimpleNamespace(
        core=SimpleNamespace(
            rounds=SimpleNamespace(step=SimpleNamespace(phase=Phase.LEFT)),
            admission=SimpleNamespace(leave=lambda: None, drained=nothing),
            executor=SimpleNamespace(stop_waiting=lambda: None),
        ),
        launcher=None,
        timeline_watch=SimpleNamespace(wait_until_left=wait_until_left),
        step_loop=SimpleNamespace(leave=leave),
    )
    await replica._follow_run(left.append)
    await replica.leave()
    assert left == [error]
    assert told == [{"may_end_round": may_end_round}]


async def test_who_cannot_read_its_data_leaves_as_upon_a_signal():
    """So what it has computed is handed over; the error ends the process after that."""
    error = UserError("cannot read the data")

    async def nothing(*_):
        pass

    async def sleep(*_):
        await anyio.sleep_forever()

    replica = object.__new__(StageReplica)
    launcher = SimpleNamespace(run=nothing, failure=error)
    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, clock=MovedClock())
    peer._lifecycle, peer._failure = Lifecycle(peer._context.clock), None
    await replica._launch(launcher, peer._cannot_read)
    assert peer._lifecycle.stop.is_set()
    assert peer._lifecycle.has_ended

    async def stay(replica):
        return None

    peer._transport = SimpleNamespace(serve=nothing)
    peer._parts = SimpleNamespace(dispatcher=None)
    peer._directory, peer._members = SimpleNamespace(drop=None), SimpleNamespace(known=None)
    peer._dht = SimpleNamespace(watch=sleep)
    peer._device_thread = SimpleNamespace(stop=lambda: None, watch=sleep)
    peer._counted = None
    for watch in ("_watch_event_loop", "_leave_on_notice", "_look_for_end", "_look_for_revocations", "_keep_dialling"):
        setattr(peer, watch, sleep)
    peer._stay = stay
    with (
        patch.object(peers.StageReplica, "open", nothing),
        pytest.raises(UserError, match="cannot read the data"),
        first_error(),
    ):
        await peer.run(0, anyio.Event())


async def nothing(*_):
    pass


def leaving_replica(phase, leave, give_up, drained=nothing, give_up_inside=lambda: None):
    """A replica that has little time to leave; what else it does is up to the test."""

    async def run(priority, job):
        return job()

    rounds = RoundBook(Condition())
    rounds.begin(StepState(round_number=7))
    rounds.enter(phase)
    context = make_context(MANIFEST, options=OPTIONS.model_copy(update={"grace_s": 0.01}), clock=MovedClock())
    replica = object.__new__(StageReplica)
    replica.leaves_timeline = False
    replica._trainer = SimpleNamespace(strategy=SimpleNamespace(pending_samples=3))
    replica._peer = SimpleNamespace(context=context, transport=SimpleNamespace(answered=nothing))
    replica.parts = SimpleNamespace(
        core=SimpleNamespace(
            rounds=rounds,
            admission=SimpleNamespace(leave=lambda: None, drained=drained, give_up_inside=give_up_inside),
            executor=SimpleNamespace(stop_waiting=lambda: None, give_up=give_up),
            device_thread=SimpleNamespace(run=run),
        ),
        launcher=None,
        step_loop=SimpleNamespace(leave=leave),
    )
    return replica


async def test_what_nobody_has_taken_in_time_is_reported_once_it_can_get_into_no_average():
    """A stage-mate that asks whether this peer is ready learns first that it has left."""
    phases = []

    async def leave(**terms):
        await anyio.sleep_forever()

    def give_up():
        phases.append(replica.step.phase)
        return 3

    replica = leaving_replica(Phase.ENDING, leave, give_up)
    await replica.leave()
    assert phases == [Phase.LEFT]
    assert replica._peer.context.metrics.lost_samples._value.get() == 3


def between_two_stays(monkeypatch, open_replica):
    """A peer that has left its stage for stage 0, with nothing prepared."""

    async def run(function, *args):
        pass

    monkeypatch.setattr(peers.StageReplica, "open", open_replica)
    peer = object.__new__(Peer)
    peer._context = SimpleNamespace(threads=SimpleNamespace(run=run), clock=MovedClock())
    peer._counted, peer._moved_from = None, 1
    peer._mover, peer._parts = SimpleNamespace(take_prepared=lambda: None), SimpleNamespace(device=None)
    peer._lifecycle = Lifecycle(MovedClock())
    for state in (PeerState.SERVING, PeerState.DRAINING, PeerState.LEFT):
        peer._lifecycle.enter(state)
    return peer


async def test_a_peer_that_has_left_its_stage_waits_for_the_hub(monkeypatch):
    answers = [HubFailed("503"), HubFailed("503"), "replica"]

    async def open_replica(parts, stage, counted):
        if isinstance(answer := answers.pop(0), HubFailed):
            raise answer
        return answer

    monkeypatch.setattr(peers, "HUB_PAUSE_S", 0.0)
    peer = between_two_stays(monkeypatch, open_replica)
    await peer._begin_stay(0)
    assert (peer._replica, peer._lifecycle.state, answers) == ("replica", PeerState.JOINING, [])


@pytest.mark.parametrize("hub", ["hangs", "fails"])
async def test_a_peer_ends_though_the_hub_does_not_answer(monkeypatch, hub):
    asked = anyio.Event()

    async def open_replica(parts, stage, counted):
        asked.set()
        if hub == "fails":
            raise HubFailed("503")
        await anyio.sleep_forever()

    peer = between_two_stays(monkeypatch, open_replica)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer._begin_stay, 0)
        await asked.wait()
        peer._lifecycle.end()
    assert peer._replica is None


async def test_what_is_counted_is_handed_over_though_a_microbatch_inside_does_not_end():
    """A later peer has just died, perhaps. The microbatch fails before, so that it is in no gradient that is given."""
    steps = []

    async def leave(**terms):
        steps.append("hand over")

    replica = leaving_replica(
        Phase.OPEN,
        leave,
        give_up=lambda: steps.append("give up"),
        drained=anyio.sleep_forever,
        give_up_inside=lambda: steps.append("end the wait"),
    )
    await replica.leave()
    assert steps == ["give up", "end the wait", "hand over"]


@pytest.mark.parametrize(
    ("mates", "run_is_over", "serves", "is_told"),
    [([], False, True, True), (["mate"], False, True, False), ([], True, True, False), ([], False, False, False)],
)
async def test_who_leaves_its_stage_without_peers_is_told_what_comes_of_it(caplog, mates, run_is_over, serves, is_told):
    async def nothing(*_):
        pass

    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, clock=MovedClock())
    peer._options, peer._metrics, peer._me = OPTIONS, peer._context.metrics, "me"
    peer._metrics.run_is_over = run_is_over
    peer._directory = SimpleNamespace(announce=nothing, view=SwarmView(2, ()))
    peer._lifecycle = Lifecycle(peer._context.clock)
    if serves:
        peer._lifecycle.enter(PeerState.SERVING)
    peer._lifecycle.end()
    replica, left = leaving(mates, nothing), []
    peer._parts = SimpleNamespace(own_work={1: SimpleNamespace(leave=lambda: left.append(1))})
    await peer._leave(replica)
    assert ("leaves_alone stage=1" in caplog.text) == is_told
    assert left == [1]


async def test_who_was_left_behind_has_not_left_its_work_with_stage_mates():
    """When it comes back, it may have lost what it brought to updates that they have not made."""

    async def nothing(*_):
        pass

    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, clock=MovedClock())
    peer._options, peer._manifest, peer._me = OPTIONS, MANIFEST, "me"
    peer._directory = SimpleNamespace(announce=nothing, view=SwarmView(2, ()))
    peer._lifecycle = Lifecycle(peer._context.clock)
    peer._lifecycle.enter(PeerState.SERVING)
    replica, left = leaving(["mate"], nothing), []
    peer._parts = SimpleNamespace(own_work={1: SimpleNamespace(leave=lambda: left.append(1))})
    peer._join_anew(replica, NotServing("stage-mates went on without this peer"))
    await peer._leave(replica)
    assert left == []


def leaving(mates, nothing):
    return SimpleNamespace(
        stage=1,
        step=STEP,
        leaves_timeline=False,
        is_left_behind=False,
        stage_mates=lambda: mates,
        leave=nothing,
        say_goodbye=nothing,
    )


@pytest.mark.parametrize(
    ("device", "in_words"), [("cpu", "cpu"), ("cuda:1", "Tesla T4"), ("cuda:2", "NVIDIA Quadro " + 50 * "X")]
)
async def test_a_peer_tells_what_it_computes_on_and_what_is_too_large_for_it_before_it_has_a_stage(
    monkeypatch, device, in_words
):
    monkeypatch.setattr(startup, "CHOOSING_S", 0.0)
    names = {1: "Tesla T4", 2: "NVIDIA Quadro " + 99 * "X"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    stored = []

    async def store(key, record, *_):
        stored.append(record)

    async def fetch(*_):
        return {}

    context = make_context(MANIFEST, options=OPTIONS, too_large=(0,))
    dht = SimpleNamespace(identity=context.identity, addresses=(), store=store, fetch=fetch)
    assert await startup.choose_first_stage(context, dht, torch.device(device)) == 1
    assert [(record.stage, record.too_large, record.device) for record in stored] == [(UNDECIDED, (0,), in_words)]


async def test_a_peer_with_a_stage_tells_its_gpu_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    context, stored = make_context(MANIFEST, options=OPTIONS), []

    async def store(key, record, *_):
        stored.append(record)

    dht = SimpleNamespace(
        identity=context.identity,
        addresses=(),
        is_reachable=None,
        passes=None,
        store=store,
        dial_by=lambda addresses_of: None,
    )
    peer = Peer(
        context=context, dht=dht, transport=None, device=torch.device("cuda:0"), device_thread=SimpleNamespace()
    )
    await peer._directory.announce()
    assert [record.device for record in stored] == ["Tesla T4"]


async def test_a_peer_tells_where_it_moves_to_and_what_is_too_large_for_it():
    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, too_large=(0,))
    peer._lifecycle, peer._options, peer._me = Lifecycle(MovedClock(now=1.0)), OPTIONS, "me"
    peer._mover = SimpleNamespace(movable=True, moving_to=1)
    peer._dht = SimpleNamespace(is_reachable=None, addresses=())
    peer._replica, peer._moved_from = None, UNDECIDED
    assert (peer._describe().too_large, peer._describe().moving_to) == ((0,), 1)


async def test_a_hub_that_fails_for_an_hour_ends_a_peer_that_waits_for_it(monkeypatch):
    async def open_replica(parts, stage, counted):
        peer._context.clock.passed_s += HUB_PATIENCE_S / 2
        raise HubFailed("there is no such data set")

    monkeypatch.setattr(peers, "HUB_PAUSE_S", 0.0)
    peer = between_two_stays(monkeypatch, open_replica)
    with pytest.raises(HubFailed):
        await peer._begin_stay(0)


@pytest.mark.parametrize(("state", "is_told"), [(PeerState.SERVING, True), (PeerState.JOINING, False)])
def test_a_replica_announces_the_worst_of_its_troubles(state, is_told):
    """While the peer joins, the note says what it waits for to serve at all."""

    def of(trouble):
        return SimpleNamespace(complaint=lambda: trouble and Complaint(trouble, 5.0, trouble.value))

    replica = object.__new__(StageReplica)
    replica.stage, replica.incarnation = 0, 7
    core = SimpleNamespace(
        admission=SimpleNamespace(admitted=0, held=0),
        speed=SimpleNamespace(samples_per_s=1.0),
        time=SimpleNamespace(shares=lambda: None),
        rounds=SimpleNamespace(step=StepState()),
    )
    loop = of(Trouble.NO_MATES)
    loop.download_bytes_per_s = 0.0
    replica.parts = SimpleNamespace(core=core, step_loop=loop, snapshot_keeper=of(None), launcher=of(Trouble.DIVERGED))
    told = replica.describe(PeerView(peer_id="a", stage=UNDECIDED, state=state, note="waits"))
    expected = (Trouble.DIVERGED, 5.0, "diverged") if is_told else (None, None, "waits")
    assert (told.trouble, told.trouble_since_s, told.note) == expected
    replica.parts = SimpleNamespace(core=core, step_loop=loop, snapshot_keeper=of(None), launcher=None)
    if is_told:
        assert replica.describe(PeerView(peer_id="a", stage=1, state=state)).trouble is Trouble.NO_MATES
