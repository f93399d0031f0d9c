"""Which run a coordinator finds where it starts, and whether it may resume it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from coordinator.checkpoints.store import CheckpointStore
from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run import serve
from coordinator.run.address_files import KnownPeers
from coordinator.run.coordinator_options import NodeOptions
from coordinator.run.events import RunEvents
from coordinator.run.run_files import note_end
from coordinator.run.run_options import RunOptions, lock_folder
from coordinator.watch.journal import Journal, has_ended, read_events
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.host.ports import PortTaken
from swarm_peer.runtime.network.guarded_p2p import NobodyAnswers
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import ManifestRecord

HOLDS_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
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
    async with serve._open_where_it_was(tmp_path, opened, can_begin=True) as dht:
        assert dht.addresses == ([PEER] if answers else ())
    assert tried[0] == [PEER]
    if not answers:
        with pytest.raises(
            UserError, match=r"has begun \(metrics.jsonl\), nobody answers at .* --resume, if there is one elsewhere"
        ):
            async with serve._open_where_it_was(tmp_path, opened, can_begin=False):
                pass


@pytest.mark.parametrize("is_known", [True, False])
async def test_the_port_of_the_node_that_found_nobody_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    monkeypatch.setattr(serve, "PORT_PAUSES_S", (0.0, 0.0))
    tries: list[Sequence[str]] = []

    @asynccontextmanager
    async def open_own(addresses: Sequence[str]) -> AsyncIterator[SimpleNamespace]:
        tries.append(addresses)
        if addresses:
            raise NobodyAnswers("no initial peer answers")
        if len(tries) < 4:
            raise PortTaken("cannot listen on /ip4/127.0.0.1/tcp/42001")
        yield SimpleNamespace()

    if is_known:
        KnownPeers(tmp_path).keep([PEER])
    opened: Any = open_own
    with nullcontext() if is_known else pytest.raises(PortTaken):
        async with serve._open_where_it_was(tmp_path, opened, can_begin=True):
            pass
    assert len(tries) == (4 if is_known else 1), "another program keeps it"


async def test_who_has_stopped_a_run_before_its_first_step_learns_how_to_begin_it_anew(tmp_path: Path) -> None:
    @asynccontextmanager
    async def open_own(addresses: Sequence[str]) -> AsyncIterator[SimpleNamespace]:
        if addresses:
            raise NobodyAnswers("no initial peer answers")
        yield SimpleNamespace()

    known = KnownPeers(tmp_path)
    known.keep([PEER])
    (tmp_path / "metrics.jsonl").touch()
    opened: Any = open_own
    with pytest.raises(UserError, match=f"begin anew once {tmp_path / 'peers'} is removed"):
        async with serve._open_where_it_was(tmp_path, opened, can_begin=False):
            pass
    (tmp_path / "peers").unlink()
    async with serve._open_where_it_was(tmp_path, opened, can_begin=False):
        pass


@pytest.mark.parametrize(
    ("is_under_way", "is_resumed", "is_standby"),
    [(False, False, False), (True, False, False), (False, True, False), (True, False, True)],
)
async def test_no_run_begins_anew_with_the_checkpoints_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_under_way: bool, is_resumed: bool, is_standby: bool
) -> None:
    """A coordinator that is started again, or a standby, goes on with the store of the run that it finds."""
    served: list[object] = []

    async def serve_on(*_: Any) -> None:
        served.append(1)

    @asynccontextmanager
    async def open_node(*_: Any, **__: Any) -> AsyncIterator[Dht]:
        # Newcomers that wait for a checkpoint are peers of the run as well.
        yield Dht(*[PeerState.JOINING] * is_under_way)

    monkeypatch.setattr(serve, "open_node", open_node)
    monkeypatch.setattr(serve, "_serve_on", serve_on)
    store = CheckpointStore(str(tmp_path / "checkpoints"))

    async def join() -> None:
        plan = CheckpointPlan(store, 10, resume=object() if is_resumed else None)  # type: ignore[arg-type]
        options = RunOptions(output=tmp_path, plan=plan, standby=is_standby)
        resolved: Any = SimpleNamespace(manifest=MANIFEST)
        addresses = [PEER] if is_standby else []
        await serve._join_and_serve(resolved, NodeOptions(), options, addresses, tmp_path / "identity", ())

    await join()
    (tmp_path / "checkpoints" / "step-00000200").mkdir(parents=True)
    if is_under_way or is_resumed:
        await join()
        assert len(served) == 2
    else:
        with pytest.raises(UserError, match="has checkpoints of an earlier run, and this run begins anew"):
            await join()
        assert len(served) == 1


async def test_the_terminal_goes_on_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def tell(*_: Any) -> None:
        raise OSError(ENOSPC, "No space left on device")

    def make_service(*_: Any, events: RunEvents, **__: Any) -> Any:
        return SimpleNamespace(events=events, lasting_peers=SimpleNamespace(addresses=()))

    async def look(service: Any, options: RunOptions) -> None:
        service.events.on_update("watch")

    monkeypatch.setattr(
        serve, "LiveView", lambda _: nullcontext(SimpleNamespace(print=None, update=seen.append, tell=None))
    )
    monkeypatch.setattr(serve, "WayIn", lambda **_: SimpleNamespace(tell=tell))
    monkeypatch.setattr(serve, "RunService", make_service)
    monkeypatch.setattr(serve, "_serve", look)
    node: Any = SimpleNamespace(addresses=())
    resolved: Any = SimpleNamespace(manifest=MANIFEST)
    key = Identity.generate()
    options = RunOptions(output=tmp_path)
    with pytest.raises(OSError, match="No space left"):
        await serve._serve_on(node, key, resolved, NodeOptions(), options, ())
    assert seen == ["watch"]
    assert options.promises.unkept() == [f"{serve.NOT_TOLD} ([Errno 28] No space left on device)"]


async def test_a_run_under_other_settings_is_told_by_them() -> None:
    """Whoever starts a coordinator again forgets a `--set` easily."""

    class Served(Dht):
        async def fetch(self, *_: Any) -> dict[str, Any]:
            return {"run": ManifestRecord(manifest=MANIFEST.canonical_json().decode())}

    other = MANIFEST.model_copy(update={"training": MANIFEST.training.model_copy(update={"steps": 7}), "seed": 9})
    steps = MANIFEST.training.steps
    with pytest.raises(
        UserError, match=rf"other settings \(seed is .* there and 9 here, training.steps is {steps} there"
    ):
        await serve._check_known_run(Served(), "run", other, False, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stages", "is_begun", "is_resumed", "told"),
    [
        ((0, 1), True, False, "The run's peers train on; the same command coordinates them again. If they are all "),
        ((0, 1), True, True, "The run's peers train on; the same command without --resume coordinates them again."),
        ((1,), True, False, "The run's peers wait for a peer of stage 0; the same command coordinates them again."),
        ((), True, False, "The run has no peers; WAY BACK."),
        ((), False, False, "The run has no peers; the same command begins it."),
        (
            (0,),
            False,
            False,
            "The run's peers wait for a peer of stage 1; the same command coordinates them again. If they are all gone "
            "by then, the same command begins it, once OUTPUT/peers is removed.",
        ),
    ],
)
def test_who_stops_a_coordinator_learns_what_now(
    tmp_path: Path, stages: Sequence[int], is_begun: bool, is_resumed: bool, told: str
) -> None:
    if is_begun:
        (tmp_path / "metrics.jsonl").write_text("{}\n")
    if stages:
        (tmp_path / "peers").touch()
    peers = tuple(PeerView(peer_id=f"p{stage}", stage=stage, state=PeerState.SERVING) for stage in stages)
    service: Any = SimpleNamespace(watch=SimpleNamespace(view=SwarmView(2, peers)))
    plan = CheckpointPlan(None, resume=object() if is_resumed else None)  # type: ignore[arg-type]
    options = RunOptions(output=tmp_path, plan=plan)
    what_now = serve._what_now(service, options, "WAY BACK.", is_saved=False)
    assert what_now.startswith(told.replace("OUTPUT", str(tmp_path)))
    assert what_now.endswith("WAY BACK.") is is_begun


LOST = "what was trained is lost, since there is no checkpoint yet: the same command with another --output begins anew."


@pytest.mark.parametrize(
    ("found", "resumed", "standby", "told"),
    [
        (50, None, False, "the same command with --resume memory://run goes on from optimizer step 50."),
        (50, 20, False, "the same command with --resume memory://run goes on from optimizer step 50."),
        (None, 20, False, "the same command with --resume step-20 goes on from optimizer step 20."),
        (None, None, False, LOST),
        (
            UserError("no answer"),
            None,
            False,
            "--resume memory://run goes on from its last checkpoint, if there is one.",
        ),
        (
            50,
            None,
            True,
            "the same command, without --standby and --initial-peers, and with --resume memory://run goes ",
        ),
        (None, None, True, "another coordinator may have a checkpoint in its own OUTPUT: this one has written none."),
    ],
)
async def test_the_way_back_is_a_command_that_works(
    tmp_path: Path, found: Any, resumed: int | None, standby: bool, told: str
) -> None:
    def newest(manifest: RunManifest) -> Any:
        assert manifest is MANIFEST
        if isinstance(found, UserError):
            raise found
        return None if found is None else SimpleNamespace(optimizer_step=found)

    store: Any = SimpleNamespace(url="memory://run", newest=newest)
    resume: Any = None if resumed is None else SimpleNamespace(optimizer_step=resumed, address=f"step-{resumed}")
    options = RunOptions(output=tmp_path, plan=CheckpointPlan(store, resume=resume), standby=standby)
    assert told in await serve._way_back(MANIFEST, options)


async def test_a_run_that_writes_no_checkpoints_has_none(tmp_path: Path) -> None:
    assert await serve._way_back(MANIFEST, RunOptions(output=tmp_path, plan=CheckpointPlan(None))) == LOST


@pytest.mark.parametrize(("made", "is_behind"), [(60, False), (120, True)])
async def test_who_has_ended_a_run_learns_where_a_newer_checkpoint_may_be(
    made: int, is_behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A standby that acted for a while has written those of that time into its own folder."""

    async def run() -> bool:
        return False

    service: Any = SimpleNamespace(
        run=run, ended="its operator has ended it", manifest=MANIFEST, watch=SimpleNamespace(optimizer_step=made)
    )
    newest = SimpleNamespace(optimizer_step=50, address="CHECKPOINT")
    store: Any = SimpleNamespace(newest=lambda _: newest)
    await serve._serve(service, RunOptions(output=Path("run"), plan=CheckpointPlan(store, every=50)))
    said = capsys.readouterr().out
    assert f"Go on from optimizer step 50 of {made} with the same command and --resume CHECKPOINT\n" in said
    assert ("may have a newer one in its own OUTPUT" in said) is is_behind
    await serve._serve(service, RunOptions(output=Path("run"), plan=CheckpointPlan(store, every=50), standby=True))
    assert "same command, without --standby and --initial-peers, and with --resume CHECK" in capsys.readouterr().out


def test_a_run_that_is_ended_without_a_coordinator_is_over_in_its_folder(tmp_path: Path) -> None:
    note_end(tmp_path)
    assert not has_ended(tmp_path), "no run is of this folder"
    Journal(tmp_path).tell("started", "The run has begun.", 1.0)
    lock_folder(tmp_path).close()
    # Another process, since one may lock again what it has locked itself.
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_LOCK, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as coordinator:
        assert coordinator.stdout is not None
        assert coordinator.stdout.readline() == b"locked\n"
        note_end(tmp_path)
        assert not has_ended(tmp_path), "the coordinator that lives writes it down"
        coordinator.communicate()
    for _ in range(2):
        note_end(tmp_path)
    assert [event["text"] for event in read_events(tmp_path)][1:] == ["The run has ended: its operator has ended it."]


async def test_a_coordinator_that_is_stopped_leaves_what_is_under_way_to_the_next_one(tmp_path: Path) -> None:
    options = RunOptions(output=tmp_path)
    options.promises.checkpoint_due(50, "its peers still write")

    class Service:
        manifest = MANIFEST
        watch = SimpleNamespace(view=SwarmView(2))

        async def run(self) -> bool:
            await anyio.wait_all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep_forever()
            return False

    with anyio.fail_after(20):
        await serve._serve(Service(), options)  # type: ignore[arg-type]
    assert options.promises.unkept() == []
