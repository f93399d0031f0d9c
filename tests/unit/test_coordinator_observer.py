"""Observers of a live run: each takes one place of an invite, however often it looks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from coordinator.config_files import load_manifest
from coordinator.watch import observer
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host import identities
from swarm_peer.runtime.network.bootstrap import Entrance
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import EndRecord

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what this user's programs keep, whose locks hold within one process as well."""
    held: list[str] = []

    def locked(folder: Path, name: str) -> IO[str] | None:
        if name in held:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        held.append(name)
        lock = StringIO()
        lock.close = lambda: held.remove(name)  # type: ignore[method-assign]
        return lock

    @asynccontextmanager
    async def open_node(identity_path: Path, entrance: Entrance, host_maddrs: Sequence[str]) -> AsyncIterator[Any]:
        yield SimpleNamespace(identity=Identity.load_or_create(identity_path), dial_by=lambda *_: None)

    async def find_manifest(*_: object) -> tuple[str, RunManifest]:
        return "a run", SimpleNamespace(hash="hash", limits=None)  # type: ignore[return-value]

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(identities, "locked", locked)
    monkeypatch.setattr(observer, "open_node", open_node)
    monkeypatch.setattr(observer, "find_manifest", find_manifest)
    monkeypatch.setattr(observer, "observer_directory", lambda *_: None)
    return tmp_path / "swarm"


async def _look(run: observer.LiveRun) -> str:
    return run.dht.identity.peer_id


def test_observers_that_look_one_after_the_other_take_one_place(state: Path) -> None:
    seen = {observer._observe(Entrance(), None, _look) for _ in range(3)}
    assert seen == {Identity.from_file(state / "observer-0").peer_id}


async def test_observers_at_once_have_identities_of_their_own(state: Path) -> None:
    async with observer.observer_node(Entrance()) as first:
        async with observer.observer_node(Entrance()) as second:
            assert first.identity.peer_id != second.identity.peer_id
        async with observer.observer_node(Entrance()) as third:
            assert third.identity.peer_id == second.identity.peer_id
    assert sorted(os.listdir(state)) == ["observer-0", "observer-1"]


async def test_a_node_that_is_to_be_forgotten_keeps_nothing(state: Path) -> None:
    async with observer.temporary_node(Entrance()) as node:
        assert node.identity.peer_id
    assert not os.path.exists(state)  # noqa: ASYNC240


def test_an_observer_whose_kept_identity_cannot_be_read_takes_another(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.mkdir(parents=True)
    (state / "observer-0").touch()
    assert observer._observe(Entrance(), None, _look)
    assert "identity_not_kept" in caplog.text
    assert (state / "observer-0").read_bytes() == b""


@pytest.mark.parametrize("is_over", [True, False])
async def test_who_looks_at_a_run_whose_peers_have_gone_learns_whether_it_is_over(is_over: bool) -> None:
    """Else it would seem to be at its beginning."""

    class Dht:
        async def fetch(self, _: str, kind: type, subject: str | None) -> dict[str, Any]:
            return {"run": EndRecord(begun=1, reason="all is done")} if kind is EndRecord and is_over else {}

        async def fetch_coordination(self, _: str) -> dict[Any, Any]:
            return {}

    async def refresh(stages: range) -> SwarmView:
        return SwarmView(len(stages))

    run: Any = SimpleNamespace(
        run_id="run",
        manifest=load_manifest(CONFIGS / "demo.yaml"),
        dht=Dht(),
        directory=SimpleNamespace(refresh=refresh),
    )
    if is_over:
        with pytest.raises(UserError, match="the run is over: all is done"):
            await observer.look_once(run)
    else:
        assert (await observer.look_once(run)).shown_step == 0
