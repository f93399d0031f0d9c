"""A run of made-up peers that keep snapshots, for tests of the writer of its checkpoints."""

import dataclasses
import random
from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest
from checkpoint_worlds import manifest_of, state_of
from given_states import Gullible
from memory_transport import MemoryNetwork

from coordinator.checkpoints import writer as checkpointing
from coordinator.checkpoints.store import CheckpointStore
from coordinator.checkpoints.writer import CheckpointPlan, CheckpointWriter, Duty
from coordinator.watch.promises import Promises
from swarm_peer.errors import InvalidMessage
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.policy.timeline import FIRST_TIMELINE
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.log import Close, Committed, Cut, Entry
from swarm_peer.runtime.host.machine import FolderStorage, SystemClock, SystemThreads
from swarm_peer.runtime.network.agreement import NO_EPOCH
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.state.named_snapshots import NamedSnapshots, NamedState
from swarm_peer.runtime.state.stored import write_stored


async def is_member(caller):
    return True


class Names:
    """Believes a state that carries an entry."""

    def __init__(self):
        self.offered = []

    async def check(self, stage, state):
        if state.entry != entry_of(stage, state.round_number):
            raise InvalidMessage("not what the entry names")

    async def check_together(self, states):
        if len({state.round_number for state in states}) != 1:
            raise InvalidMessage("they do not fit together")

    async def saved(self, states):
        self.offered.append(states[0].optimizer_step)
        return 4, 30


def entry_of(stage, round_number):
    return f"the entry of stage {stage} that ends round {round_number}".encode()


def named(stage, state):
    """A state with an entry that names it."""
    cut = Cut(
        stage=stage,
        round=state.round_number,
        epoch=NO_EPOCH,
        attempt=0,
        parent=state.history_hash,
        root="root",
        base=(),
        averages=False,
        parts=(),
    )
    return NamedState(Committed(Entry(cut, ""), (), Close(state.round_number, ())), state)


class Run:
    """Peers that keep snapshots of a run that has made 60 updates and waits there."""

    def __init__(self, folder):
        self.folder = folder
        self.network = MemoryNetwork()
        self.peers = []
        self.manifest = manifest_of(
            model={"config": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "tie_word_embeddings": False}},
            recovery={"snapshot_every": 10},
            training={"steps": 1000, "global_batch_size": 2, "microbatch_size": 2},
        )
        self.store = CheckpointStore(str(folder / "checkpoints"))
        self.saved = []
        self.work = []
        self.names = Names()
        self.told = []
        self.promises = Promises()
        self.begun_at = 0
        self.acts = True
        self.receiver = Gullible(ResolvedManifest.of(self.manifest), SystemThreads())
        self.watch = SimpleNamespace(
            optimizer_step=60,
            last_step=self.manifest.training.steps,
            created_at_round=lambda optimizer_step: 60,
            observe_checkpoint=self.saved.append,
            observe_work=lambda samples, weight: self.work.append((samples, weight)),
        )

    async def add(self, peer_id, stage, round_number, timeline=FIRST_TIMELINE, tensors=None, own=False):
        """Add a peer that keeps a snapshot.

        Args:
            own: its replica is in that state, which no entry names
        """
        entry = b"" if own else entry_of(stage, round_number)
        state = dataclasses.replace(state_of(stage, round_number), timeline=timeline, entry=entry)
        if tensors is not None:
            state = dataclasses.replace(state, tensors=tensors)
        storage = FolderStorage(self.folder / peer_id)
        store = NamedSnapshots(
            clock=SystemClock(),
            threads=SystemThreads(),
            storage=storage,
            is_member=is_member,
            restart=lambda: BEGINNING,
        )
        if own:
            stored = write_stored(storage, "own", stage, state)

            async def find(call):
                return stored

            store.sources[stage] = SimpleNamespace(find=find, stored={stored.key: stored})
        else:
            await store.keep(named(stage, state))
        await self.network.transport(peer_id).serve(CallDispatcher(manifest_hash=self.manifest.hash, calls=store.calls))
        self.peers.append(
            PeerView(peer_id=peer_id, stage=stage, state=PeerState.SERVING, round_number=60, optimizer_step=60)
        )
        return state

    async def refresh(self, stages):
        return self.view

    @property
    def view(self):
        return SwarmView(2, tuple(self.peers))

    def writer(self, every=10):
        plan = CheckpointPlan(self.store, every)
        writer = CheckpointWriter(
            ResolvedManifest.of(self.manifest),
            plan,
            watch=self.watch,
            directory=self,
            threads=SystemThreads(),
            rng=random.Random(0),
            duty=Duty(
                acts=lambda: self.acts,
                is_led_by_other=lambda: not self.acts,
                begun_at=self.begun_at,
                tell=self.told.append,
                promises=self.promises,
            ),
            names=self.names,
        )
        writer._receiver = self.receiver
        return writer

    def reach(self, optimizer_step, first_round=0):
        """Go on, or back, to a step; the steps' rounds have numbers that are higher by `first_round`."""
        self.watch.optimizer_step = optimizer_step
        self.watch.created_at_round = lambda step: step + first_round if 0 < step <= optimizer_step else None

    @asynccontextmanager
    async def written(self, monkeypatch, every):
        """A writer is at work; gives a function that waits until it has seen where the run is."""
        monkeypatch.setattr(checkpointing, "SNAPSHOT_RETRY_S", 0.001)
        writer = self.writer(every)

        async def looks():
            await anyio.sleep(0.02)
            await writer.finish()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run, self.network.transport("coordinator"))
            yield looks
            await looks()
            tasks.cancel_scope.cancel()

    async def save(self):
        await self.writer()._save(self.network.transport("coordinator"), 60)


@pytest.fixture
async def run(tmp_path):
    run = Run(tmp_path)
    async with run.network:
        yield run
