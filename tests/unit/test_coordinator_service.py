"""What the coordinator of a run does when the run's peers or its DHT do not give what they should."""

import asyncio
from types import SimpleNamespace

import anyio
import pytest

from coordinator.run import beginning, service
from coordinator.run.beginning import Beginning
from coordinator.run.events import RunEvents
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from coordinator.watch.ending import Farewell
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, NoRoom, SwarmError
from swarm_peer.model.export import NotWritten
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.policy.view import PeerState, PeerView
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.state.index import StageState
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import Assignment, TimelineRecord, timeline_key

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 2,
    "tie_word_embeddings": False,
}
MANIFEST = RunManifest.model_validate(
    {
        "name": "served",
        "model": {"config": CONFIG},
        "stages": {"count": 1},
        "data": {"sequence_length": 8},
        "training": {"steps": 3, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
)

RESOLVED = ResolvedManifest.of(MANIFEST)
PEER = PeerView(peer_id="a", stage=0, state=PeerState.SERVING, round_number=0, samples_per_s=1.0, queue=0)


class FakeDHT:
    passes = PassChecker(None, clock=SystemClock())
    metrics = PeerMetrics()
    addresses = ()

    def __init__(self, folder):
        self.identity = Identity.load_or_create(folder / "identity")

    async def fetch(self, *_):
        raise CallError("no answer")

    def dial_by(self, announced, can_be_dialled, has_left):
        pass


LINES = ["a line of metrics.jsonl"]
FILES = SimpleNamespace(lines_since=lambda first_round: LINES)


async def test_the_end_is_only_where_the_stages_are_there(tmp_path, monkeypatch):
    """Stage 0 may tell of steps that have not been; and peers may be gone just then."""
    saved = []
    given = [SwarmError("no peer of stage 0"), StageState(9, "x", {}, Timeline(7, 0, 0)), StageState(3, "x", {})]

    async def fetch_states(transport, directory, manifest, check, min_round, rng):
        state = given.pop(0)
        if isinstance(state, SwarmError):
            raise state
        return [state]

    monkeypatch.setattr(service, "fetch_states", fetch_states)

    def export_states(manifest, states, *_, training):
        saved.append(states[0].optimizer_step)
        assert (training.optimizer_step, list(training.lines), training.num_peers) == (3, LINES, 2)
        return "there is no such folder"

    monkeypatch.setattr(service, "export_states", export_states)
    options = RunOptions(output=tmp_path)
    run = RunService(RESOLVED, FakeDHT(tmp_path), options)
    run.contributions.given = dict.fromkeys("ab")
    assert [await run._export(None, FILES) for _ in range(3)] == [False, False, True]
    assert saved == [3]
    assert options.promises.unkept() == [f"{service.NO_TOKENIZER} (there is no such folder)"]


async def test_a_model_that_the_disk_does_not_take_is_tried_again(tmp_path, monkeypatch, caplog):
    async def fetch_states(*_):
        return [StageState(3, "x", {})]

    def full(*_, training):
        raise NotWritten("model: cannot be written (disk full)")

    monkeypatch.setattr(service, "NOT_WRITTEN_PAUSE_S", 0.0)
    monkeypatch.setattr(service, "fetch_states", fetch_states)
    monkeypatch.setattr(service, "export_states", full)
    run = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path))
    assert not await run._export(None, FILES)
    assert "model_not_saved reason=model: cannot be written (disk full)" in caplog.text


@pytest.mark.parametrize(("error", "pause_s"), [(NoRoom("the disk is full"), 30.0), (SwarmError("no peer"), 0)])
async def test_a_model_for_which_there_is_no_room_is_not_asked_for_again_at_once(tmp_path, monkeypatch, error, pause_s):
    """There may be room for some of its stages, which peers would send each time."""
    pauses = []

    async def fetch_states(*_):
        raise error

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(service, "fetch_states", fetch_states)
    monkeypatch.setattr(service.anyio, "sleep", sleep)
    run = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path))
    assert not await run._export(None, None)
    assert pauses == [pause_s]


async def test_a_look_without_an_answer_ends_nothing(tmp_path):
    run = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path))
    assert await run._observe() is None
    with anyio.move_on_after(0.05) as scope:
        await run._look_for_end()
    assert scope.cancelled_caught, "asked again"
    assert run.ended is None


class Board(FakeDHT):
    """A DHT that holds the newest record under each key."""

    def __init__(self, folder, held):
        super().__init__(folder)
        self.held = held

    async def fetch(self, key, record_type, run):
        return {run: self.held[key]} if key in self.held else {}

    async def store(self, key, record, run, lifetime_s, signer=None):
        self.held[key] = record
        return True

    async def learn_revocations(self, run_id):
        pass


async def published(run):
    """Have a coordinator publish what it knows."""
    with pytest.MonkeyPatch.context() as patches, anyio.move_on_after(0.1):
        patches.setattr(beginning, "LOOK_S", 0.001)
        await run._keep_published()


async def test_how_far_the_run_has_come_is_published_and_outlives_a_coordinator(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "PUBLISH_RUN_S", 0.01)
    board = Board(tmp_path, {})
    key = timeline_key(board.identity.peer_id)
    run = RunService(RESOLVED, board, RunOptions(output=tmp_path))
    await published(run)
    assert board.held[key].reached() == (0, 0)
    run.watch.lines.append({"round": 52, "optimizer_step": 41})
    await published(run)
    assert board.held[key].reached() == (53, 41)
    restarted = RunService(RESOLVED, board, RunOptions(output=tmp_path))
    await restarted._beginning.find()
    await published(restarted)
    assert board.held[key].reached() == (53, 41)


@pytest.mark.parametrize(("is_told", "left", "complaint"), [(True, 0, ""), (True, 2, "2 peers"), (False, 0, "the DHT")])
async def test_an_operator_learns_that_peers_may_not_have_heard_of_the_end(
    tmp_path, monkeypatch, caplog, is_told, left, complaint
):
    async def see_off(*_, **__):
        return Farewell(is_told, left)

    monkeypatch.setattr(service, "see_off", see_off)
    options = RunOptions(output=tmp_path)
    await RunService(RESOLVED, FakeDHT(tmp_path), options).end()
    assert ("run_not_ended" in caplog.text) == bool(complaint)
    assert complaint in caplog.text
    told = [f"not all peers know that the run is over ({complaint}"] if complaint else []
    assert [line[: len(told[0])] for line in options.promises.unkept()] == told


def beginning_of(folder, known):
    return Beginning(Board(folder, {} if known is None else {timeline_key("run"): known}), "run", 500)


async def test_a_beginning_changes_with_the_epoch_of_a_run_that_is_resumed_and_with_no_later_term(tmp_path):
    """The end of a run that names its beginning holds until it is resumed."""
    known = TimelineRecord(
        first_round=0, first_optimizer_step=0, begun=100, reached_round=53, reached_optimizer_step=41
    )
    beginning = beginning_of(tmp_path, known)
    await beginning.find()
    assert beginning.record() == known
    beginning.follow(FIRST_TIMELINE, 150)
    assert beginning.record() == known
    beginning.follow(Timeline(60, 40, 60), 700)
    assert beginning.record() == TimelineRecord(first_round=60, first_optimizer_step=40, begun=700)
    await beginning.learn()
    assert beginning.record().reached() == (0, 0), "that was before"


async def test_how_far_a_run_has_come_does_not_fall_with_what_one_coordinator_sees(tmp_path):
    """A coordinator that knows nothing else would begin it anew."""
    known = TimelineRecord(
        first_round=0, first_optimizer_step=0, begun=100, reached_round=53, reached_optimizer_step=41
    )
    beginning = beginning_of(tmp_path, known)
    await beginning.find()
    beginning.see(5, 5)
    assert beginning.record() == known
    late = beginning_of(tmp_path, known)
    late.see(5, 5)
    await late.learn()
    assert late.record().reached() == (53, 41)


async def test_what_was_before_a_run_was_resumed_has_not_been_reached(tmp_path):
    """A coordinator still sees the peers where they were."""
    beginning = beginning_of(tmp_path, None)
    await beginning.find()
    beginning.see(5, 4)
    beginning.follow(Timeline(20, 3, 20), 1000)
    for round_number in (5, 20):
        beginning.see(round_number, 4)
        assert beginning.record().reached() == (0, 0)
    beginning.see(22, 5)
    assert beginning.record().reached() == (22, 5)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_the_end_of_a_run_waits_for_the_last_checkpoint_but_not_for_ever(tmp_path, monkeypatch, is_slow):
    monkeypatch.setattr(service, "LAST_CHECKPOINT_S", 0.05 if is_slow else 60.0)
    may_finish, written = anyio.Event(), []

    async def finish():
        await may_finish.wait()
        written.append("checkpoint")

    ending = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path))
    ending._writer = SimpleNamespace(finish=finish)
    finishing = asyncio.ensure_future(ending._finish_checkpoint())
    await anyio.wait_all_tasks_blocked()
    assert not finishing.done()
    if not is_slow:
        may_finish.set()
    with anyio.fail_after(5):
        await finishing
    assert written == ([] if is_slow else ["checkpoint"])


class Coordination:
    """Says what is ordered in a term of one's own."""

    def __init__(self):
        self.acts, self.term, self.inherited = True, Term(5, "me"), ()
        self.said = None

    async def assign(self, assignments, reason):
        self.said = assignments


async def test_orders_stand_for_as_long_as_the_term_is_ones_own(tmp_path, monkeypatch):
    """A look that takes too long, and another coordinator that takes over."""
    order = Assignment(peer="p", announced=3, from_stage=0, to_stage=1, reason="")
    made = []

    class Rebalancer:
        def __init__(self, manifest, options, begun_s, inherited):
            self.inherited, self.orders, self.policy = inherited, (), SimpleNamespace(reason="", num_moves=0)
            made.append(self)

        def look(self, *_):
            pass

        def assignments(self):
            return self.orders

    monkeypatch.setattr(service, "Rebalancer", Rebalancer)
    run, coordination = RunService(RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path)), Coordination()
    await run._rebalance(coordination)
    made[0].orders = (order,)
    for acts in (True, False, True):
        coordination.acts = acts
        await run._rebalance(coordination)
        assert coordination.said == (order,)
    assert len(made) == 1
    coordination.term, coordination.inherited = Term(7, "me"), (order,)
    await run._rebalance(coordination)
    assert [rebalancer.inherited for rebalancer in made] == [(), (order,)]
    assert coordination.said == ()


async def test_no_look_ends_a_coordinator(tmp_path, monkeypatch):
    """A defect that what peers announce brings to light would end each standby as well."""
    watches = []
    run = RunService(
        RESOLVED, FakeDHT(tmp_path), RunOptions(output=tmp_path), events=RunEvents(on_update=watches.append)
    )
    run._directory.addresses = list
    coordination = Coordination()
    coordination.newest = None

    def fail(*_):
        raise IndexError("list index out of range")

    async def fail_soon(*_):
        fail()

    monkeypatch.setattr(run, "_observe", fail_soon)
    monkeypatch.setattr(run, "_rebalance", fail_soon)
    await run._look_at_run(None, coordination)
    assert watches == [run.watch], "what comes after a failure is done"
    monkeypatch.setattr(run.metrics, "update", fail)
    await run._look_at_run(None, coordination)
    counted = {work: run.metrics.look_defects.labels(work)._value.get() for work in ("observe", "rebalance", "show")}
    assert counted == {"observe": 2, "rebalance": 2, "show": 1}

    async def fill_disk(*_):
        raise OSError(28, "No space left on device", "members.json")

    monkeypatch.setattr(run, "_rebalance", fill_disk)
    await run._look_at_run(None, coordination)
    assert run.metrics.look_defects.labels("rebalance")._value.get() == 2, "no defect of this program"
    assert run.metrics.looks_incomplete.labels("rebalance")._value.get() == 1

    async def end(*_):
        raise SwarmError("libp2p's daemon has died")

    monkeypatch.setattr(run, "_rebalance", end)
    with pytest.raises(SwarmError, match="daemon"):
        await run._look_at_run(None, coordination)
