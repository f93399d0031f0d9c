import contextlib
from dataclasses import replace
from types import SimpleNamespace

import anyio
import pytest
import torch
from contexts import MovedClock, make_context
from tiny_models import LENGTH, LLAMA

from swarm_peer.config import RunManifest
from swarm_peer.errors import HubFailed, UserError
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.policy.trouble import Complaint, Trouble
from swarm_peer.policy.view import UNDECIDED, PeerState, PeerView, SwarmView
from swarm_peer.runtime import peer as peers
from swarm_peer.runtime import replica as replica_module
from swarm_peer.runtime import startup
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.data.prefetch import HUB_PATIENCE_S
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.lifecycle import Lifecycle
from swarm_peer.runtime.peer import Peer
from swarm_peer.runtime.replica import Replica
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


STEP = SimpleNamespace(round_number=7, optimizer_step=7)


async def test_who_cannot_read_its_data_leaves_as_upon_a_signal():
    """So what it has computed is handed over; the error ends the process after that."""
    error = UserError("cannot read the data")

    async def nothing(*_):
        pass

    async def sleep(*_):
        await anyio.sleep_forever()

    replica = object.__new__(Replica)
    launcher = SimpleNamespace(run=nothing, failure=error)
    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, clock=MovedClock())
    peer._lifecycle, peer._failure = Lifecycle(peer._context.clock), None
    await replica._launch(launcher, peer._cannot_read)
    assert peer._lifecycle.stop.is_set()
    assert peer._lifecycle.has_ended

    peer._transport, peer._dispatcher = SimpleNamespace(serve=nothing), None
    peer._directory, peer._members = SimpleNamespace(drop=None), SimpleNamespace(known=None)
    peer._dht = SimpleNamespace(watch=sleep)
    peer._device_thread = SimpleNamespace(stop=lambda: None, watch=sleep)
    peer._owner, peer._find_epochs = None, nothing
    for watch in ("_watch_event_loop", "_leave_on_notice", "_look_for_end", "_look_for_revocations", "_keep_dialling"):
        setattr(peer, watch, sleep)
    with pytest.raises(UserError, match="cannot read the data"), first_error():
        await peer.run(0, anyio.Event())


async def nothing(*_):
    pass


def between_two_stays(monkeypatch, open_replica):
    """A peer that has left its stage for stage 0, with nothing prepared."""

    async def run(function, *args):
        pass

    monkeypatch.setattr(peers.Replica, "open", open_replica)
    peer = object.__new__(Peer)
    peer._context = SimpleNamespace(threads=SimpleNamespace(run=run), clock=MovedClock())
    peer._counted, peer._moved_from = None, 1
    peer._device = None
    peer._lifecycle = Lifecycle(MovedClock())
    for state in (PeerState.SERVING, PeerState.DRAINING, PeerState.LEFT):
        peer._lifecycle.enter(state)
    return peer, None, SimpleNamespace(take_prepared=lambda: None)


async def test_a_peer_that_has_left_its_stage_waits_for_the_hub(monkeypatch):
    answers = [HubFailed("503"), HubFailed("503"), "replica"]

    async def open_replica(parts, stage, counted):
        if isinstance(answer := answers.pop(0), HubFailed):
            raise answer
        return answer

    monkeypatch.setattr(peers, "HUB_PAUSE_S", 0.0)
    peer, *moves = between_two_stays(monkeypatch, open_replica)
    await peer._begin_stay(*moves, 0)
    assert (peer._replica, peer._lifecycle.state, answers) == ("replica", PeerState.JOINING, [])


@pytest.mark.parametrize("hub", ["hangs", "fails"])
async def test_a_peer_ends_though_the_hub_does_not_answer(monkeypatch, hub):
    asked = anyio.Event()

    async def open_replica(parts, stage, counted):
        asked.set()
        if hub == "fails":
            raise HubFailed("503")
        await anyio.sleep_forever()

    peer, *moves = between_two_stays(monkeypatch, open_replica)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(peer._begin_stay, *moves, 0)
        await asked.wait()
        peer._lifecycle.end()
    assert peer._replica is None


async def test_what_is_counted_is_handed_over_though_a_microbatch_inside_does_not_end(monkeypatch):
    """A later peer has just died, perhaps. The microbatch fails before, so that it is in no gradient that is given."""
    monkeypatch.setattr(replica_module, "DRAINING_SHARE", 0.0)
    steps = []

    async def run(priority, job):
        job()

    async def give():
        steps.append("hand over")

    async def give_up_place(next_stage):
        pass

    rounds = RoundBook(Condition())
    rounds.begin(StepState(round_number=7))
    context = make_context(MANIFEST, options=OPTIONS.model_copy(update={"grace_s": 60.0}), clock=MovedClock())
    replica = object.__new__(Replica)
    replica._placing = anyio.CancelScope()
    replica._peer = SimpleNamespace(context=context, transport=SimpleNamespace(answered=nothing))
    replica._give_work, replica._give_up_place = give, give_up_place
    replica.parts = SimpleNamespace(
        core=SimpleNamespace(
            rounds=rounds,
            admission=SimpleNamespace(
                leave=lambda: None,
                drained=anyio.sleep_forever,
                give_up_inside=lambda: steps.append("end the wait"),
            ),
            executor=SimpleNamespace(stop_waiting=lambda: None, give_up=lambda: steps.append("give up")),
            device_thread=SimpleNamespace(run=run),
        ),
        launcher=None,
    )
    await replica.leave(lambda: None)
    assert steps == ["give up", "end the wait", "hand over"]
    assert rounds.step.phase is Phase.LEFT


@pytest.mark.parametrize("hangs", ["driver", "mate"])
async def test_work_that_nobody_has_taken_in_time_is_lost_unless_an_entry_holds_it(monkeypatch, hangs):
    """The peer may only move: it has to say so."""
    told, work = [], ["in an entry", "in none"]

    async def leave():
        return await anyio.sleep_forever() if hangs == "driver" else work

    async def give(held, mates, enough):
        await anyio.sleep_forever()

    entry = SimpleNamespace(entry=SimpleNamespace(cut=SimpleNamespace(brings=["in an entry"])))
    member = SimpleNamespace(log=SimpleNamespace(committed=[entry]), to_hand_over=lambda: work)
    monkeypatch.setattr(Replica, "is_finished", False)
    replica = object.__new__(Replica)
    replica.stage, replica.stage_mates = 0, list
    core = SimpleNamespace(members={0: member})
    replica._peer = SimpleNamespace(context=make_context(MANIFEST), agreement=SimpleNamespace(core=core))
    replica.parts = SimpleNamespace(
        driver=SimpleNamespace(leave=leave),
        giving=SimpleNamespace(give=give),
        reports=SimpleNamespace(lose=told.extend),
    )
    with anyio.move_on_after(0.01) as grace:
        await replica._give_work()
    assert grace.cancelled_caught
    assert told == ["in none"]


@pytest.mark.parametrize(
    ("prepared", "next_stages", "wished"),
    [
        ({0}, [0], [{0}]),
        (set(), [0], [set()]),  # it takes the state over later
        (set(), [None], [set()]),
        ({0}, [0, None], [{0}, set()]),  # it is told to end meanwhile
    ],
)
async def test_who_moves_asks_for_its_next_place_as_it_gives_up_its_own(prepared, next_stages, wished):
    membership = SimpleNamespace(desired=frozenset({1}), stages=frozenset({1}), prepared=frozenset(prepared))
    seen, told = [], []

    def agree():
        seen.append(set(membership.desired))
        membership.stages, membership.prepared = membership.desired, frozenset()
        if len(next_stages) > 1:
            next_stages.pop(0)

    async def all_told():
        told.append(set(membership.stages))

    replica = object.__new__(Replica)
    agreement = SimpleNamespace(
        core=SimpleNamespace(membership=membership), changed=Condition(), look=agree, told=all_told
    )
    metrics = SimpleNamespace(run_is_over=False)
    replica._peer = SimpleNamespace(agreement=agreement, context=SimpleNamespace(metrics=metrics))
    with anyio.fail_after(5):
        await replica._give_up_place(lambda: next_stages[0])
    assert seen == wished
    assert told == [wished[-1]]


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
    kept_fresh = contextlib.asynccontextmanager(kept_as_it_is)
    peer._directory = SimpleNamespace(announce=nothing, view=SwarmView(2, ()), kept_fresh=kept_fresh)
    peer._lifecycle = Lifecycle(peer._context.clock)
    if serves:
        peer._lifecycle.enter(PeerState.SERVING)
    peer._lifecycle.end()
    peer._manifest, peer._left_alone = MANIFEST, ""
    await peer._leave(leaving(mates, nothing))
    assert ("leaves_alone stage=1: nobody else serves stage 1, so the run waits" in caplog.text) == is_told
    assert bool(peer._left_alone) == is_told, "its owner hears of it, too"


async def kept_as_it_is(stages):
    yield


async def test_who_leaves_sees_who_has_come_to_serve_meanwhile(caplog):
    """The mate that it waits for was joining as it began to leave; only a look at the DHT says that it serves."""

    async def nothing(*_):
        pass

    peer = object.__new__(Peer)
    peer._context = make_context(MANIFEST, options=OPTIONS, clock=MovedClock())
    peer._options, peer._metrics, peer._me = OPTIONS, peer._context.metrics, "me"
    mate = PeerView(peer_id="mate", stage=1, state=PeerState.JOINING, round_number=0, samples_per_s=1.0, queue=0)
    directory = SimpleNamespace(announce=nothing, view=SwarmView(2, (mate,)))
    looked = []

    @contextlib.asynccontextmanager
    async def kept_fresh(stages):
        looked.append(list(stages))
        directory.view = SwarmView(2, (replace(mate, state=PeerState.SERVING),))
        peer._context.changed.notify()
        yield

    directory.kept_fresh, peer._directory = kept_fresh, directory
    peer._lifecycle = Lifecycle(peer._context.clock)
    peer._lifecycle.enter(PeerState.SERVING)
    peer._lifecycle.end()
    replica = leaving([], nothing)
    replica.stage_mates = lambda: [each.peer_id for each in directory.view.serving(1)]
    with anyio.fail_after(OPTIONS.grace_s / 4):
        await peer._leave(replica)
    assert looked == [[1]]
    assert "leaves_alone" not in caplog.text


def leaving(mates, nothing):
    return SimpleNamespace(
        stage=1,
        step=STEP,
        stage_mates=lambda: mates,
        leave=nothing,
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
        relays=(),
        passes=None,
        store=store,
        dial_by=lambda addresses_of, can_be_dialled, has_left: None,
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
    peer._mover = SimpleNamespace(movable=True, moving_to=1, unreached=("b",))
    peer._dht = SimpleNamespace(is_reachable=None, addresses=(), relays=())
    peer._replica, peer._moved_from, peer._waits, peer._opens = None, UNDECIDED, None, UNDECIDED
    assert (peer._describe().too_large, peer._describe().moving_to) == ((0,), 1)
    assert peer._describe().unreached == ("b",)


async def test_a_hub_that_fails_for_an_hour_ends_a_peer_that_waits_for_it(monkeypatch):
    async def open_replica(parts, stage, counted):
        peer._context.clock.passed_s += HUB_PATIENCE_S / 2
        raise HubFailed("there is no such data set")

    monkeypatch.setattr(peers, "HUB_PAUSE_S", 0.0)
    peer, *moves = between_two_stays(monkeypatch, open_replica)
    with pytest.raises(HubFailed):
        await peer._begin_stay(*moves, 0)


@pytest.mark.parametrize(("state", "is_told"), [(PeerState.SERVING, True), (PeerState.JOINING, False)])
def test_a_replica_announces_the_worst_of_its_troubles(state, is_told):
    """While the peer joins, the note says what it waits for to serve at all."""

    def of(trouble):
        return SimpleNamespace(complaint=lambda: trouble and Complaint(trouble, 5.0, trouble.value))

    replica = object.__new__(Replica)
    replica.stage = 0
    me = SimpleNamespace(life=7)
    agreement = SimpleNamespace(core=SimpleNamespace(membership=SimpleNamespace(me=me)))
    replica._peer = SimpleNamespace(agreement=agreement, neighbours=tuple)
    core = SimpleNamespace(
        admission=SimpleNamespace(admitted=0, held=0),
        speed=SimpleNamespace(samples_per_s=1.0, device_samples_per_s=1.0, is_limited=False),
        time=SimpleNamespace(shares=lambda: None),
        rounds=SimpleNamespace(step=StepState()),
    )
    parts = {"core": core, "sources": SimpleNamespace(bytes_per_s=0.0), "keeper": of(Trouble.NO_SNAPSHOTS)}
    replica.parts = SimpleNamespace(**parts, driver=of(None), updates=of(None), launcher=of(Trouble.DIVERGED))
    told = replica.describe(PeerView(peer_id="a", stage=UNDECIDED, state=state, note="waits"))
    expected = (Trouble.DIVERGED, 5.0, "diverged") if is_told else (None, None, "waits")
    assert (told.trouble, told.trouble_since_s, told.note, told.incarnation) == (*expected, 7)
    replica.parts = SimpleNamespace(**parts, driver=of(None), updates=of(Trouble.NO_UPDATES), launcher=None)
    if is_told:
        assert replica.describe(PeerView(peer_id="a", stage=1, state=state)).trouble is Trouble.NO_UPDATES
    replica.parts = SimpleNamespace(**parts, driver=of(Trouble.NO_STATE), updates=of(None), launcher=None)
    told = replica.describe(PeerView(peer_id="a", stage=1, state=state, note="waits"))
    expected = {PeerState.SERVING: (Trouble.NO_STATE, "no_state"), PeerState.JOINING: (None, "no_state")}
    assert (told.trouble, told.note) == expected.get(state, (None, "waits")), "also where it has yet to begin"
