"""Which run a coordinator finds where it starts, and whether it may resume it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.run import serve
from coordinator.run.addresses import KnownPeers
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.network.dht import NobodyAnswers

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWArW69Zs4SPYveMkQdidfyRUAGVyXFVRuwNQqVn964mfZ"
MANIFEST = RunManifest.model_validate(
    {
        "name": "test",
        "model": {"config": {"model_type": "gpt2"}},
        "stages": {"count": 2},
        "data": {"sequence_length": 12},
        "training": {"steps": 30, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.01},
    }
)


class Dht:
    """Has no record; its peers are in the states that a test says."""

    def __init__(self, *states: PeerState):
        self.view = SwarmView(2, tuple(PeerView(peer_id=state, stage=0, state=state) for state in states))

    async def fetch(self, *_: Any) -> dict[str, Any]:
        return {}

    async def refresh(self, stages: Sequence[int]) -> SwarmView:
        return self.view


@pytest.fixture(autouse=True)
def observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "observer_directory", lambda manifest, dht: dht)


async def check(*states: PeerState, resume: bool = False, must_be_known: bool = False) -> None:
    await serve._check_known_run(Dht(*states), "run", MANIFEST, resume, must_be_known)  # type: ignore[arg-type]


async def test_a_run_whose_peers_serve_is_not_resumed() -> None:
    with pytest.raises(UserError, match="run run is alive: its peers hold newer states than a checkpoint"):
        await check(PeerState.JOINING, PeerState.SERVING, resume=True)
    with pytest.raises(UserError, match="leave --resume out"):
        await check(PeerState.DRAINING, resume=True)


async def test_newcomers_that_wait_for_a_checkpoint_are_no_reason_not_to_resume() -> None:
    await check(resume=True)
    await check(PeerState.JOINING, resume=True)
    await check(PeerState.JOINING, must_be_known=True)
    with pytest.raises(UserError, match="no run run is under way there"):
        await check(must_be_known=True)


@pytest.mark.parametrize("answers", [True, False])
async def test_who_resumes_looks_for_living_peers_first(tmp_path: Path, answers: bool) -> None:
    """In an empty DHT of its own, every run would seem to be gone."""
    tried: list[list[str]] = []

    @asynccontextmanager
    async def open_own(addresses: Sequence[str]) -> AsyncIterator[SimpleNamespace]:
        tried.append(list(addresses))
        if addresses and not answers:
            raise NobodyAnswers("no initial peer answers")
        yield SimpleNamespace(addresses=addresses)

    KnownPeers(tmp_path).keep([PEER])
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    opened: Any = open_own
    async with serve._open_where_it_was(tmp_path, opened, is_resumed=True) as dht:
        assert dht.addresses == ([PEER] if answers else ())
    assert tried[0] == [PEER]
    if not answers:
        with pytest.raises(UserError, match="nobody answers at the 1 addresses"):
            async with serve._open_where_it_was(tmp_path, opened, is_resumed=False):
                pass
