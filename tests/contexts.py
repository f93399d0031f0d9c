"""Contexts for tests of a peer's parts: real threads and files, and a clock that a test may move."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PretrainedConfig

from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.peer_options import PeerOptions
from swarm_peer.policy.step_state import Phase, StepState
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.context import Clock, PeerContext
from swarm_peer.runtime.host.machine import FolderStorage, SystemClock, SystemRandom, SystemThreads
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.runtime.network.transport import Handler
from swarm_peer.runtime.stage.rounds import RoundBook
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.messages import Body


@dataclass
class MovedClock:
    """The machine's clock, moved on by `passed_s`; or one that stands at `now`, if that is given."""

    now: float | None = None
    passed_s: float = 0.0

    def monotonic_s(self) -> float:
        return time.monotonic() + self.passed_s if self.now is None else self.now

    def unix_s(self) -> float:
        return self.monotonic_s()


@dataclass
class ReadClock:
    """A clock that shows what a function returns."""

    read: Callable[[], float]

    def monotonic_s(self) -> float:
        return self.read()

    def unix_s(self) -> float:
        return self.read()


@dataclass
class FixedRandom:
    """Streams that all begin alike, as a test wants them."""

    seed: object = 0

    def stream(self, purpose: str) -> random.Random:
        return random.Random(self.seed)  # type: ignore[arg-type]

    def token(self, num_bytes: int) -> bytes:
        return SystemRandom("").token(num_bytes)


def unparsed(manifest_hash: str, *, global_batch_size: int = 8, announcement_s: float = 30.0) -> ResolvedManifest:
    """A manifest of which only these matter; its model cannot be built."""
    manifest = RunManifest.model_validate(
        {
            "name": "tiny",
            "model": {"config": {}},
            "stages": {"count": 2},
            "data": {"sequence_length": 6},
            "training": {"steps": 10, "global_batch_size": global_batch_size, "microbatch_size": 1},
            "optimizer": {"learning_rate": 0.1},
            "limits": {"announcement_s": announcement_s},
        }
    )
    return ResolvedManifest(manifest, manifest_hash, PretrainedConfig(), ())


def begin_round(rounds: RoundBook, round_number: int, phase: Phase = Phase.OPEN, **step: object) -> None:
    """Begin a round, as the workplace does it."""
    rounds.begin(StepState(round_number=round_number, **step))  # type: ignore[arg-type]
    rounds.enter(phase)


def dispatcher(manifest_hash: str, stage: int, calls: Mapping[type[Body], Handler]) -> CallDispatcher:
    """The dispatcher of a peer with one replica."""
    made = CallDispatcher(manifest_hash=manifest_hash)
    made.add(stage, calls)
    return made


def make_context(
    resolved: ResolvedManifest | RunManifest,
    *,
    identity: Identity | None = None,
    clock: Clock | None = None,
    folder: Path | None = None,
    **changes: object,
) -> PeerContext:
    """A context of a run; what is not given is made."""
    context = PeerContext(
        run_id="the run's key",
        resolved=ResolvedManifest.of(resolved) if isinstance(resolved, RunManifest) else resolved,
        identity=identity or Identity.generate(),
        options=PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1",)),
        clock=clock or SystemClock(),
        random=FixedRandom(),
        threads=SystemThreads(),
        storage=FolderStorage(folder or Path(tempfile.gettempdir()) / "swarm-tests-that-store-nothing"),
        metrics=PeerMetrics(),
        changed=Condition(),
    )
    return replace(context, **changes)  # type: ignore[arg-type]
