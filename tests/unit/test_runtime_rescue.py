"""A stage that has lost all its peers is seen, and the peer that is chosen moves there."""

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import pytest
from contexts import ReadClock, make_context

from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import max_state_bytes
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.state import rescue
from swarm_peer.runtime.state.rescue import JOINER_BYTES_PER_S, JOINER_PATIENCE, RESCUE_PATIENCE, watch_stages

pytestmark = pytest.mark.anyio

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
    }
)  # fmt: skip


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


class Swarm:
    """What the DHT tells of peers, the same to all."""

    def __init__(self, clock):
        self.peers = {}
        self.looks = 0
        self.max_age_s = None
        self._clock = clock

    def add(self, name, stage, state=PeerState.SERVING):
        self.peers[name] = PeerView(peer_id=name, stage=stage, state=state, movable=True, samples_per_s=1.0)

    def change(self, name, **changes):
        self.peers[name] = replace(self.peers[name], **changes)

    async def look(self, stages, max_age_s=0.0):
        self.looks += 1
        self.max_age_s = max_age_s
        return SwarmView(3, tuple(self.peers.values()))

    async def watch(self, name, stage="auto"):
        identity = SimpleNamespace(peer_id=name)
        options = PeerOptions(initial_peers=("x",), stage=stage)
        context = make_context(MANIFEST, identity=identity, clock=ReadClock(self._clock.monotonic), options=options)
        return await watch_stages(context, self.look)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rescue, "anyio", SimpleNamespace(sleep=clock.sleep))
    return clock


@pytest.fixture
def swarm(clock):
    return Swarm(clock)


async def until(condition):
    while not condition():
        await anyio.lowlevel.checkpoint()


async def test_the_chosen_peer_moves_to_a_stage_that_stays_empty(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        swarm.add(name, stage)
    swarm.change("b", samples_per_s=0.5)
    assert await swarm.watch("b") == 1
    assert clock.now >= 100.0 + RESCUE_PATIENCE * MANIFEST.limits.announcement_s
    assert swarm.max_age_s == MANIFEST.limits.announcement_s / 4, "what was looked up since its last look is not again"


async def test_nobody_moves_as_long_as_a_stage_comes_back_in_time(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2), ("d", 1)):
        swarm.add(name, stage)
    began = clock.now

    def come_and_go():
        round_ = int((clock.now - began) / (MANIFEST.limits.announcement_s / 4))
        swarm.change("d", state=PeerState.SERVING if round_ % 4 == 0 else PeerState.DRAINING)

    clock.slept = come_and_go
    watching = asyncio.ensure_future(swarm.watch("a"))
    await until(lambda: swarm.looks > 50)
    assert not watching.done()
    watching.cancel()


async def test_a_joiner_that_never_serves_the_lost_stage_is_not_waited_for(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        swarm.add(name, stage)
    swarm.add("d", 1, PeerState.JOINING)
    began = clock.now
    assert await swarm.watch("a") == 1
    patience_s = JOINER_PATIENCE * MANIFEST.limits.announcement_s
    download_s = max_state_bytes(ResolvedManifest.of(MANIFEST), 1) / JOINER_BYTES_PER_S
    assert patience_s + download_s <= clock.now - began < 1.1 * patience_s + download_s


async def test_each_peer_that_joins_a_lost_stage_has_its_time(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        swarm.add(name, stage)
    lifetime_s = MANIFEST.limits.announcement_s
    began = clock.now

    def come_and_go():
        """Another one, each time the one before has nearly used up its time."""
        swarm.peers.pop("d", None)
        swarm.peers.pop("e", None)
        number = int((clock.now - began) / ((JOINER_PATIENCE - 1) * lifetime_s))
        swarm.add("de"[number % 2], 1, PeerState.JOINING)

    clock.slept = come_and_go
    watching = asyncio.ensure_future(swarm.watch("a"))
    await until(lambda: clock.now > began + 4 * JOINER_PATIENCE * lifetime_s)
    assert not watching.done()
    watching.cancel()


async def test_a_peer_that_is_not_chosen_stays(swarm, clock):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        swarm.add(name, stage)
    swarm.change("a", movable=False)  # its owner wants it where it is
    watching = [asyncio.ensure_future(swarm.watch(name)) for name in "ac"]
    await until(lambda: swarm.looks > 50)
    assert not any(task.done() for task in watching)
    for task in watching:
        task.cancel()
    assert await swarm.watch("b") == 1


@pytest.mark.parametrize(
    ("optimizer_step", "own_stage", "told"),
    [
        (0, "auto", (logging.INFO, "stage 1 has no peer yet: start another one with the same line")),
        (0, "0", (logging.INFO, "stage 1 has no peer yet: start another one with --stage 1")),
        (7, "auto", (logging.WARNING, "no peer may move to stage 1: none is free, or each is the last of its stage")),
    ],
)
async def test_the_first_peer_of_a_run_is_told_to_wait_for_others(
    swarm, clock, caplog, optimizer_step, own_stage, told
):
    swarm.add("a", 0)
    swarm.add("c", 2)
    swarm.change("a", optimizer_step=optimizer_step)
    with caplog.at_level("INFO", logger=rescue.__name__):
        watching = asyncio.ensure_future(swarm.watch("a", own_stage))
        await until(lambda: swarm.looks > 50)
        watching.cancel()
    (record,) = caplog.records
    assert record.levelno == told[0]
    assert record.getMessage() == f"stage_empty stage=1 reason={told[1]}"


async def test_who_takes_an_empty_stage_over_is_named(swarm, clock, caplog):
    for name, stage in (("a", 0), ("b", 0), ("c", 2)):
        swarm.add(name, stage)
    swarm.change("c", optimizer_step=7)
    await swarm.watch("a")
    assert [record.getMessage() for record in caplog.records] == [
        "stage_empty stage=1 mover=a reason=it is the slowest of the 2 peers of the fullest stage"
    ]
