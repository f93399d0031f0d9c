"""A run whose weights have diverged ends, and names its last good checkpoint, or goes back to that once."""

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import anyio
import pytest
import torch
from memory_transport import MemoryNetwork
from test_coordinator_service import MANIFEST, PEER, RESOLVED, Board

from coordinator.checkpoints.folder import CheckpointDamaged
from coordinator.checkpoints.resumed import find_resumed
from coordinator.checkpoints.state_receiver import StateReceiver
from coordinator.checkpoints.store import CheckpointStore, find_checkpoint
from coordinator.checkpoints.writer import NO_CHECKPOINTS, CheckpointPlan
from coordinator.run import serve, service
from coordinator.run.agreed_run import AgreedRun, Surroundings
from coordinator.run.baseline import Baseline, train
from coordinator.run.context import CoordinatorContext
from coordinator.run.divergence import DIVERGED, Diverged
from coordinator.run.run_options import RunOptions
from coordinator.run.service import RunService
from coordinator.watch.metrics_file import METRICS, metrics_line
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage, SwarmError, UserError
from swarm_peer.model.export import NotFiniteWeights, export_model
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.run_progress import MAX_ROUNDS_AHEAD
from swarm_peer.policy.standstill import DIVERGED_S, NO_UPDATES_S
from swarm_peer.policy.timeline import FIRST_TIMELINE, Timeline
from swarm_peer.policy.trouble import Trouble
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.state.index import StageState
from swarm_peer.wire.messages import StateIndexCall
from swarm_peer.wire.records import timeline_key

LONG = MANIFEST.model_copy(update={"training": MANIFEST.training.model_copy(update={"steps": 50})})
SICK = replace(PEER, peer_id="12D3KooWabcdefgh", name="anna", note="the loss is not finite", round_number=4)


def line(step, unix_s=0.0):
    made = metrics_line(
        optimizer_step=step, round_number=step - 1, loss=1.0, samples=2, seconds=1.0, sequence_length=8, peers=[1]
    )
    return json.dumps(made | {"time": unix_s})


class Run:
    """A run that has made four optimizer steps, with checkpoints of some of them."""

    def __init__(self, folder, *, saved=(), store=True, on_divergence="end", times=(0.0, 0.0, 0.0, 0.0)):
        self.folder = folder
        self.store = CheckpointStore(str(folder / "checkpoints"), keep=9)
        for step in saved:
            self.store.save(step, LONG, [StageState(step, "h", {"weight": torch.full((2,), float(step))})])
        (folder / METRICS).write_text("".join(f"{line(at + 1, unix_s)}\n" for at, unix_s in enumerate(times)))
        plan = CheckpointPlan(self.store, 1) if store else NO_CHECKPOINTS
        self.board = Board(folder, {})
        options = RunOptions(output=folder, resume=True, plan=plan, on_divergence=on_divergence)
        self.service = RunService(ResolvedManifest.of(LONG), self.board, options)
        self.files = self.service._open_files()
        self.service.watch.recall(self.files.lines_since(0))
        self.network = MemoryNetwork()
        self.agreed = None

    def see(self, trouble=Trouble.DIVERGED, since_s=100.0, now_s=100.0 + DIVERGED_S, **about):
        peer = replace(SICK, trouble=trouble, trouble_since_s=since_s, **about)
        self.service.watch.observe(SwarmView(1, (peer,)), {}, now_s - DIVERGED_S)
        self.service.watch.observe(SwarmView(1, (peer,)), {}, now_s)

    async def agree(self):
        """The run's epochs begin."""

        async def nobody():
            return ()

        scratch = self.folder / "scratch"
        scratch.mkdir()
        around = Surroundings(
            resolved=self.service.resolved,
            dht=self.board,
            run_key=self.board.identity,
            context=CoordinatorContext(),
            options=self.service._options,
            scratch=scratch,
            find_others=nobody,
        )
        transport = self.network.transport("coordinator")
        self.agreed = await AgreedRun.open(around, transport, is_under_way=False, last_round=-1)
        await transport.serve(self.agreed.dispatcher)

    async def look(self):
        if self.agreed is None:
            await self.agree()
        await self.service._look_for_divergence(self.agreed, self.files)


@pytest.fixture
def make_run(tmp_path):
    (tmp_path / "run").mkdir()
    made = []

    def make(**options):
        made.append(Run(tmp_path / "run", **options))
        return made[-1]

    yield make
    for run in made:
        run.files.close()


async def test_it_ends_and_names_the_last_checkpoint_from_which_the_run_went_on(make_run):
    """The newest one is of the weights that broke it, finite as they are."""
    run = make_run(saved=(2, 3, 4))
    run.see()
    with pytest.raises(Diverged) as ended:
        await run.look()
    assert ended.value.reason == "its weights have diverged after optimizer step 4"
    text = str(ended.value)
    assert "anna (…abcdefgh) says: the loss is not finite" in text
    assert "its last good checkpoint is of optimizer step 3" in text
    assert f"--resume {run.folder.absolute()}/checkpoints/step-00000003" in text
    assert not ended.value.is_told


async def test_nobody_goes_on_from_the_checkpoint_of_broken_weights(make_run):
    run = make_run(saved=(3, 4))
    run.see()
    with pytest.raises(Diverged):
        await run.look()
    assert find_checkpoint(str(run.folder)).optimizer_step == 3
    with pytest.raises(CheckpointDamaged, match="these weights have diverged"):
        find_checkpoint(str(run.folder / "checkpoints" / "step-00000004"))


@pytest.mark.parametrize("options", [{"saved": (4,)}, {"store": False}, {}], ids=["broken", "none wanted", "none"])
async def test_it_says_so_where_there_is_no_good_checkpoint(make_run, options):
    run = make_run(**options)
    run.see()
    with pytest.raises(Diverged, match="there is no good checkpoint of it: begin it anew"):
        await run.look()


async def test_a_run_that_was_resumed_and_broke_has_what_it_was_resumed_from(make_run, tmp_path):
    run = make_run(store=False)
    other = CheckpointStore(str(tmp_path / "other"))
    other.save(3, LONG, [StageState(3, "h", {"weight": torch.ones(2)})])
    timeline = Timeline(53, 3, 53)
    service.note_resumed(run.folder, other.newest(), timeline)
    run.service._beginning.timeline = timeline
    run.see()
    with pytest.raises(Diverged, match=r"last good checkpoint is of optimizer step 3: .*other/checkpoint|other/step"):
        await run.look()


async def test_a_store_that_does_not_answer_has_no_good_checkpoint(make_run, monkeypatch, caplog):
    run = make_run(saved=(3,))

    def fail(*_):
        raise UserError("no network")

    monkeypatch.setattr(run.store, "newest_that", fail)
    run.see()
    with pytest.raises(Diverged, match="there is no good checkpoint"):
        await run.look()
    assert "checkpoints_not_seen reason=no network" in caplog.text


@pytest.mark.parametrize("trouble", [Trouble.FAILING, None])
async def test_other_trouble_ends_nothing(make_run, trouble):
    run = make_run(saved=(3,))
    run.see(trouble, None if trouble is None else 0.0)
    await run.look()


async def test_weights_without_updates_are_good_as_of_before(make_run):
    """The run makes steps, and checkpoints, all the same."""
    now_s = run_clock_s = 1000.0
    run = make_run(saved=(1, 2, 3, 4), times=(1.0, 2.0, 3e9, 4e9))
    run.service._context = replace(run.service._context, clock=SimpleNamespace(unix_s=lambda: 2e9))
    run.files._clock = run.service._context.clock
    run.see(Trouble.NO_UPDATES, since_s=now_s - NO_UPDATES_S, now_s=run_clock_s)
    with pytest.raises(Diverged, match="of optimizer step 1: go on from it"):
        await run.look()
    assert find_checkpoint(str(run.folder)).optimizer_step == 4, "what they hold is no worse than before"


# --- going back -------------------------------------------------------------------------------------------------------


async def test_it_goes_back_once(make_run):
    """The peers find an epoch of a new term, which the run's key has signed, and the checkpoint's states."""
    run = make_run(saved=(2, 3, 4), on_divergence="rewind")
    run.see()
    before_s = run.service.begun_s
    await run.look()
    published = run.board.held[timeline_key(run.board.identity.peer_id)]
    timeline = published.timeline()
    assert timeline.first_optimizer_step == 3
    assert timeline.first_round > SICK.round_number + MAX_ROUNDS_AHEAD, "no peer can be there"
    assert published.begun > before_s, "other coordinators believe it"
    assert find_resumed(run.folder, timeline).optimizer_step == 3, "a coordinator that comes back gives it again"
    restart = run.agreed._agreeing.membership.epoch.restart
    assert (restart.first_round, restart.optimizer_step) == (timeline.first_round, 3)
    async with run.network as network:
        call = StateIndexCall(manifest=LONG.hash, of_stage=0, entry=restart.entries[0])
        reply = await network.transport("peer").call("coordinator", call, timeout_s=5.0)
    assert len(reply.tensors) == 1
    assert [event["kind"] for event in run.service.journal.newest][-1] == "rewound"
    run.see(now_s=200.0)
    await run.look()  # its peers have yet to hear of it
    run.see(since_s=150.0, now_s=200.0)
    with pytest.raises(Diverged):
        await run.look()


@pytest.mark.parametrize(
    ("rounds", "seconds", "ends"), [(1, 30.0, True), (0, 30.0, False), (0, 2 * NO_UPDATES_S, True)]
)
async def test_weights_that_diverge_again_at_once_end_the_run(make_run, rounds, seconds, ends):
    """No peer has announced in between that its microbatches come through."""
    run = make_run(saved=(2, 3, 4), on_divergence="rewind")
    run.see()
    await run.look()
    first_round = run.service._beginning.timeline.first_round
    run.see(now_s=100.0 + DIVERGED_S + seconds, round_number=first_round + rounds)
    if ends:
        with pytest.raises(Diverged):
            await run.look()
    else:
        await run.look()


async def test_what_was_given_for_a_lost_stage_is_given_no_more(make_run):
    """Peers that go back must not begin with it."""
    run = make_run(saved=(2, 3, 4), on_divergence="rewind")
    newest = run.store.newest()
    await run.agree()
    await run.agreed._giver.give(newest)
    run.see()
    await run.look()
    assert [name.optimizer_step for name in run.agreed._giver.snapshots.names] == [3]


async def test_it_ends_where_there_is_nothing_to_go_back_to(make_run):
    run = make_run(saved=(4,), on_divergence="rewind")
    run.see()
    with pytest.raises(Diverged, match="no good checkpoint"):
        await run.look()


async def test_it_ends_where_the_states_do_not_fit_on_the_disk(make_run, monkeypatch):
    run = make_run(saved=(3, 4), on_divergence="rewind")

    async def full(*_):
        raise UserError("the states do not fit: make room")

    await run.agree()
    monkeypatch.setattr(run.agreed, "resume", full)
    run.see()
    with pytest.raises(Diverged, match=r"and it cannot go back, since the states do not fit: make room\); its last"):
        await run.look()


def test_going_back_needs_checkpoints(tmp_path):
    with pytest.raises(UserError, match="add --checkpoint-every"):
        RunOptions(output=tmp_path, on_divergence="rewind").check_divergence()
    RunOptions(output=tmp_path).check_divergence()
    plan = CheckpointPlan(CheckpointStore(str(tmp_path)), 5)
    RunOptions(output=tmp_path, on_divergence="rewind", plan=plan).check_divergence()


# --- how a coordinator ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_told", [False, True])
async def test_the_peers_are_told_unless_another_coordinator_has_told_them(tmp_path, capsys, is_told):
    ends = []

    class Service:
        async def run(self):
            raise Diverged(4, "nothing is finite", "begin anew", is_told=is_told)

        async def end(self, reason):
            ends.append(reason)

    with pytest.raises(BaseException) as ended:  # noqa: PT011 (a group of task groups)
        await serve._serve(Service(), RunOptions(output=tmp_path))
    assert isinstance(ended.value.exceptions[0], Diverged)
    assert ends == ([] if is_told else ["its weights have diverged after optimizer step 4"])
    assert ("The run ends: its weights have diverged" in capsys.readouterr().out) is not is_told


async def test_a_coordinator_that_hears_of_the_end_fails_as_well(make_run):
    run = make_run(saved=(2, 3, 4))
    run.see()
    failure = await run.service._divergence.failure(FIRST_TIMELINE, run.service._fits(run.files))
    assert failure.is_told
    assert failure.reason.startswith(DIVERGED)
    assert "optimizer step 3" in str(failure)
    assert len(failure.reason) < 200, "a record has room for it"


async def test_a_model_of_weights_that_are_not_finite_is_not_saved(make_run, monkeypatch):
    run = make_run(saved=(2, 3, 4))
    run.see(None, None)

    async def fetch_states(transport, directory, resolved, receiver, min_round, rng):
        receiver.has_met_broken = True
        raise SwarmError("no donor gave the state")

    monkeypatch.setattr(service, "fetch_states", fetch_states)
    with pytest.raises(Diverged, match=r"after its last step are not finite\); its last good checkpoint is"):
        await run.service._export(None, run.files)


async def test_a_receiver_knows_broken_weights_from_other_faults():
    spec = RESOLVED.specs[0]
    good = StageTrainer(RESOLVED, spec, blank=True).state()
    receiver = StateReceiver(RESOLVED, SystemThreads())
    await receiver.check(0, StageState(1, "h", good))
    with pytest.raises(InvalidMessage):
        await receiver.check(0, StageState(1, "h", dict(list(good.items())[1:])))
    assert not receiver.has_met_broken
    name = next(iter(good))
    with pytest.raises(InvalidMessage):
        await receiver.check(0, StageState(1, "h", good | {name: good[name] + torch.nan}))
    assert receiver.has_met_broken


def test_no_model_of_weights_that_are_not_finite_is_written(tmp_path):
    weights = StageTrainer(RESOLVED, RESOLVED.specs[0], blank=True).state()
    name = next(iter(weights))
    with pytest.raises(NotFiniteWeights, match=f"{name} holds values that are not finite"):
        export_model(RESOLVED, weights | {name: weights[name] + torch.inf}, tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- the baseline -----------------------------------------------------------------------------------------------------


def baseline(tmp_path, **optimizer):
    (tmp_path / "text.txt").write_text("\n\n".join(f"paragraph {number} of some text" * 9 for number in range(60)))
    data = {"dataset": "text", "files": [str(tmp_path / "text.txt")], "tokenizer": "bytes", "sequence_length": 8}
    fields = MANIFEST.model_dump() | {"data": data, "optimizer": {"learning_rate": 0.1} | optimizer}
    fields["model"]["config"] |= {"vocab_size": 256}
    fields["training"] |= {"steps": 9, "max_grad_norm": None, "validation_every": 0}
    return Baseline(ResolvedManifest.of(RunManifest.model_validate(fields)))


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(torch.nan, "the loss is nan"), (0.0, "no gradient of the last 3 steps is finite")],
    ids=["weights", "gradients"],
)
def test_a_baseline_that_diverges_ends_with_a_line(tmp_path, monkeypatch, broken, reason):
    reference = baseline(tmp_path)
    lines = train(reference)
    assert next(lines)["optimizer_step"] == 1
    weight = next(reference.trainers[0].module.parameters())
    if broken:
        with torch.no_grad():
            weight.fill_(broken)
    else:
        weight.register_hook(lambda gradient: gradient + torch.nan)
    with pytest.raises(SwarmError, match=f"the weights have diverged: at optimizer step .*{reason}"):
        list(lines)


async def test_a_run_ends_by_itself_once_its_weights_have_diverged(make_run, monkeypatch):
    """The whole of a coordinator's loop: it ends, and writes that down."""
    run = make_run(saved=(3,))
    run.files.close()
    monkeypatch.setattr(service, "RUN_LOOK_S", 0.001)
    coordination = SimpleNamespace(acts=True, newest=None, term=None)

    async def begin(*_):
        run.service.watch.recall(run.files.lines_since(0))
        return coordination

    async def look(files, _):
        run.see()

    async def agree(*_):
        await run.agree()
        return run.agreed

    monkeypatch.setattr(run.service, "_begin", begin)
    monkeypatch.setattr(run.service, "_agree", agree)
    monkeypatch.setattr(run.service, "_look_at_run", look)
    monkeypatch.setattr(run.board, "keep_run", lambda *_: None, raising=False)
    monkeypatch.setattr(run.board, "watch", anyio.sleep_forever, raising=False)
    async with MemoryNetwork() as network:
        transport = network.transport("coordinator")
        opened = SimpleNamespace(open_transport=lambda *_: opened_as(transport))
        run.service._context = replace(run.service._context, open_transport=opened.open_transport)
        with pytest.raises(Diverged, match="optimizer step 3"), anyio.fail_after(20):
            await run.service.run()
    assert run.service.ended == "its weights have diverged after optimizer step 4"
    assert [event["kind"] for event in run.service.journal.newest][-1] == "ended"


def opened_as(transport):
    class Opened:
        async def __aenter__(self):
            return transport

        async def __aexit__(self, *_):
            pass

    return Opened()


def test_files_know_how_far_the_run_was_at_a_time(make_run):
    run = make_run(times=(10.0, 20.0, 30.0, 40.0))
    run.files._clock = SimpleNamespace(unix_s=lambda: 45.0)
    assert [run.files.optimizer_step_at(ago_s) for ago_s in (0.0, 5.0, 6.0, 25.0, 100.0)] == [4, 4, 3, 2, 0]
    with closing(run.files):
        pass
