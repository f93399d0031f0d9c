"""All stages' states at one round, of a run that does not wait for whoever downloads it."""

import anyio
import pytest
import torch
from given_states import Gullible
from memory_transport import MemoryNetwork

from coordinator.checkpoints import fetching
from coordinator.checkpoints.fetching import aim, fetch_states
from coordinator.checkpoints.state_receiver import StateReceiver
from swarm_peer.config import RunManifest
from swarm_peer.errors import NoRoom, NotServing, SwarmError
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.run_progress import MAX_ROUNDS_AHEAD
from swarm_peer.policy.timeline import Timeline
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.host.machine import SystemThreads
from swarm_peer.runtime.network.transport import Reply, check_body, pack_fields
from swarm_peer.runtime.state.index import StageState, make_index
from swarm_peer.wire.messages import StateChunkCall, StateIndexCall

MANIFEST = RunManifest.model_validate(
    {
        "name": "test",
        "model": {
            "config": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 3, "tie_word_embeddings": False}
        },
        "stages": {"count": 3},
        "data": {"sequence_length": 12},
        "training": {"steps": 1000, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.01},
    }
)


class Peer:
    """Serves one stage. Its step moves on by `hurry` with each state that it gives; it waits for a step to come."""

    def __init__(self, stage, round_number, hurry=0):
        self.stage, self.round_number, self.hurry = stage, round_number, hurry
        self.asked = []  # the steps that it was asked for

    def state(self):
        tensors = {f"weight{self.stage}": torch.full((3,), float(self.round_number))}
        return StageState(
            round_number=self.round_number, history_hash="x", tensors=tensors, timeline=Timeline(10, 4, 4)
        )

    async def __call__(self, caller, op, body, tensors):
        if op == "state_chunk":
            call = check_body(StateChunkCall, body)
            return Reply(tensors=(self.parts[call.entry],))
        call = check_body(StateIndexCall, body)
        assert (call.of_stage, call.kind) == (self.stage, "state")
        self.asked.append(call.min_round)
        self.round_number = max(self.round_number, call.min_round)
        index, self.parts = make_index(self.stage, "state", self.state())
        self.round_number += self.hurry
        return Reply(tensors=(memoryview(pack_fields(index)),))


class Directory:
    """What a Directory shows; what peers announce is a while ago."""

    def __init__(self, peers, announced):
        self.peers, self.announced = peers, announced

    async def refresh(self, stages):
        known = [
            PeerView(
                peer_id=f"peer{peer.stage}",
                stage=peer.stage,
                state=PeerState.SERVING,
                round_number=self.announced,
                optimizer_step=self.announced - 6,
            )
            for peer in self.peers
        ]
        return SwarmView(MANIFEST.stages.count, tuple(known))


async def fetch(peers, announced=20, min_round=0, receiver=None):
    resolved = ResolvedManifest.of(MANIFEST)
    receiver = receiver or Gullible(resolved, SystemThreads())
    network = MemoryNetwork()
    async with network:
        for peer in peers:
            await network.transport(f"peer{peer.stage}").serve(peer)
        return await fetch_states(network.transport("me"), Directory(peers, announced), resolved, receiver, min_round)


def assert_states_of(states, round_number):
    assert [state.round_number for state in states] == [round_number] * 3
    for stage, state in enumerate(states):
        assert torch.equal(state.tensors[f"weight{stage}"], torch.full((3,), float(round_number)))


async def test_a_state_that_does_not_fit_its_stage_is_none(no_pauses, monkeypatch):
    """Whoever saved it would have no model."""
    monkeypatch.setattr(fetching, "STAGE_TRIES", 2)
    receiver = StateReceiver(ResolvedManifest.of(MANIFEST), SystemThreads())
    with pytest.raises(SwarmError, match=r"no peer of stage \d gave its state of round 20"):
        await fetch([Peer(stage, 20) for stage in range(3)], receiver=receiver)


async def test_a_model_for_which_there_is_no_room_is_not_asked_for_again():
    class Full(Gullible):
        async def allocate(self, stage, sizes):
            raise NoRoom("the disk is full")

    peers = [Peer(stage, 20) for stage in range(3)]
    with pytest.raises(NoRoom, match="the disk is full"):
        await fetch(peers, receiver=Full(ResolvedManifest.of(MANIFEST), SystemThreads()))
    assert all(len(peer.asked) <= 1 for peer in peers)


@pytest.fixture
def no_pauses(monkeypatch):
    async def sleep(_):
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(fetching.anyio, "sleep", sleep)


async def test_stages_at_one_step_are_asked_once():
    peers = [Peer(stage, round_number=20) for stage in range(3)]
    receiver = Gullible(ResolvedManifest.of(MANIFEST), SystemThreads())
    assert_states_of(await fetch(peers, receiver=receiver), 20)
    assert receiver.num_allocated == 3, "they may be larger than the memory here"
    assert [peer.asked for peer in peers] == [[20]] * 3


async def test_what_is_announced_may_be_old():
    peers = [Peer(stage, round_number=30) for stage in range(3)]
    assert_states_of(await fetch(peers, announced=20), 30)
    assert [peer.asked for peer in peers] == [[20]] * 3


async def test_a_stage_that_was_a_step_behind_is_asked_again():
    peers = [Peer(0, round_number=21), Peer(1, round_number=20), Peer(2, round_number=21)]
    assert_states_of(await fetch(peers), 21)
    assert [peer.asked for peer in peers] == [[20], [20, 21], [20]]


async def test_no_older_state_than_wanted():
    assert_states_of(await fetch([Peer(stage, round_number=20) for stage in range(3)], min_round=25), 25)


@pytest.mark.parametrize("hurries", [(1, 2, 3), (5, 0, 9), (30, 20, 25)])
async def test_a_fast_run_is_met_at_a_step_that_has_not_begun(hurries):
    peers = [Peer(stage, round_number=40 + hurry, hurry=hurry) for stage, hurry in enumerate(hurries)]
    states = await fetch(peers, announced=20)
    assert_states_of(states, states[0].round_number)
    assert states[0].round_number > 40


async def test_a_run_that_is_too_fast_is_told(monkeypatch):
    monkeypatch.setattr(fetching, "MODEL_TRIES", 3)
    peers = [Peer(stage, round_number=100 * stage, hurry=1000 + stage) for stage in range(3)]
    with pytest.raises(SwarmError, match=r"gave no states of one round in 3 tries: try again"):
        await fetch(peers)


async def test_a_stage_without_peers_is_named(no_pauses):
    with pytest.raises(SwarmError, match=r"no peer of stage 1 gave its state of round 20: see the log"):
        await fetch([Peer(0, round_number=20), Peer(2, round_number=20)])


async def test_a_peer_that_is_not_ready_is_asked_again(no_pauses):
    class Late(Peer):
        refusals = 3

        async def __call__(self, *call):
            if self.refusals:
                self.refusals -= 1
                raise NotServing("joining")
            return await super().__call__(*call)

    assert_states_of(await fetch([Peer(0, round_number=20), Late(1, round_number=20), Peer(2, round_number=20)]), 20)


@pytest.mark.parametrize(
    ("announced", "margin", "expected"),
    [
        ([], 0, 0),
        ([(20, 14)], 0, 20),
        ([(20, 14), (22, 16), (21, 15)], 3, 24),  # what the middle one says
        ([(20, 14), (5000, 5000)], 3, 23),
        ([(1006, 1000)], 3, 1006),  # the run is over
        ([(1004, 998)], 3, 1006),  # and here in two steps
    ],
)
def test_what_is_aimed_at_is_within_the_run(announced, margin, expected):
    peers = [
        PeerView(peer_id=f"p{i}", stage=0, state=PeerState.SERVING, round_number=round_number, optimizer_step=n)
        for i, (round_number, n) in enumerate(announced)
    ]
    peers.append(PeerView(peer_id="joiner", stage=0, state=PeerState.JOINING, round_number=5000))
    assert aim(SwarmView(3, tuple(peers)), [], 1000, margin) == expected


def test_who_lies_about_its_step_is_not_waited_for():
    peers = [
        PeerView(peer_id=f"p{stage}", stage=stage, state=PeerState.SERVING, round_number=20, optimizer_step=14)
        for stage in range(3)
    ]
    for round_number in (0, 5000, 2**40 - 1):
        liar = PeerView(peer_id="liar", stage=1, state=PeerState.SERVING, round_number=round_number)
        assert aim(SwarmView(3, (*peers, liar)), [], 1000, 3) == 23


def test_what_is_aimed_at_can_be_asked_for():
    view = SwarmView(1, (PeerView(peer_id="p", stage=0, state=PeerState.SERVING, round_number=2**40 - 1),))
    StateIndexCall(manifest=MANIFEST.hash, of_stage=0, min_round=aim(view, [], 1000, 3))


def test_a_state_that_is_far_ahead_of_the_run_is_not_aimed_at():
    view = SwarmView(3, (PeerView(peer_id="p", stage=0, state=PeerState.SERVING, round_number=20, optimizer_step=14),))
    states = [StageState(round_number, "x", {}, Timeline(10, 4, 4)) for round_number in (30, 20 + MAX_ROUNDS_AHEAD + 1)]
    assert aim(view, states, 1000, 0) == 30


def test_what_was_given_is_aimed_beyond():
    view = SwarmView(3, (PeerView(peer_id="p", stage=0, state=PeerState.SERVING, round_number=20, optimizer_step=14),))
    states = [
        StageState(round_number=round_number, history_hash="x", tensors={}, timeline=Timeline(10, 4, 4))
        for round_number in (30, 31)
    ]
    assert aim(view, states, 1000, 3) == 34
