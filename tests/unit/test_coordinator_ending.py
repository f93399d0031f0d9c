"""Who hears that a run is over, how long its coordinator waits, and in which folder it may be told again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from coordinator.checkpoints.writer import CheckpointPlan
from coordinator.run.run_options import RunOptions
from coordinator.watch import ending
from coordinator.watch.ending import Farewell, see_off
from coordinator.watch.journal import Journal
from coordinator.watch.run_file import MODEL
from swarm_peer.config import RunManifest
from swarm_peer.errors import CallError, UserError
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.records import EndRecord, TimelineRecord

MANIFEST = RunManifest.model_validate(
    {
        "name": "over",
        "model": {"config": {"model_type": "gpt2"}},
        "stages": {"count": 1},
        "data": {"sequence_length": 8},
        "training": {"steps": 30, "global_batch_size": 2, "microbatch_size": 2},
        "optimizer": {"learning_rate": 0.1},
    }
)
# Shorter than a run may have it.
QUICK = MANIFEST.model_copy(update={"limits": MANIFEST.limits.model_copy(update={"announcement_s": 0.1})})
KEY = Identity.generate()

SERVING, DRAINING = PeerState.SERVING, PeerState.DRAINING


class Swarm:
    """A DHT and a directory: its answers come one look after the other, and the last one stays.

    Args:
        takes: whether each look's record of the end is stored
        peers: the peers of each look, or None for no answer
        num_seen: peers that were seen before
    """

    def __init__(self, takes: Sequence[bool], peers: Sequence[Sequence[PeerState] | None], num_seen: int = 1):
        self._takes, self._peers = list(takes), list(peers)
        self.told: list[EndRecord] = []
        self.num_answers, self.answers = 0, True
        self.view = SwarmView(1, tuple(PeerView(peer_id=str(n), stage=0, state=SERVING) for n in range(num_seen)))

    async def fetch(self, *_: Any) -> dict[str, TimelineRecord]:
        return {KEY.peer_id: TimelineRecord(first_round=0, first_optimizer_step=0, begun=77)}

    async def store(self, key: str, record: EndRecord, *_: Any, **__: Any) -> bool:
        self.told.append(record)
        self.num_answers += self.answers
        return self._next(self._takes)

    async def refresh(self, stages: Sequence[int]) -> SwarmView:
        states = self._next(self._peers)
        if states is None:
            raise CallError("no answer")
        return SwarmView(1, tuple(PeerView(peer_id=str(n), stage=0, state=state) for n, state in enumerate(states)))

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"ENDING_S": 0.3, "END_POLL_S": 0.01, "NOBODY_S": 0.03}.items():
        monkeypatch.setattr(ending, name, seconds)


async def end(swarm: Swarm, **options: Any) -> Farewell:
    fake: Any = swarm
    return await see_off(fake, fake, QUICK, KEY, "all is done", begun_s=1, **options)


async def test_everybody_is_told_until_nobody_is_left() -> None:
    left: list[int] = []
    swarm = Swarm([False, False, True], [[SERVING, SERVING], [SERVING, DRAINING], [DRAINING]])
    assert await end(swarm, on_left=left.append) == Farewell(True, 0)
    assert left == [2, 1, 0]
    assert len(swarm.told) > 3, "who stores it may leave"
    assert {(record.reason, record.begun) for record in swarm.told} == {("all is done", 77)}


async def test_one_that_moves_is_not_gone() -> None:
    swarm = Swarm([True], [[SERVING], [], [SERVING], [SERVING], []])
    assert await end(swarm) == Farewell(True, 0)
    assert len(swarm.told) > 5


async def test_standbys_have_time_to_hear_it() -> None:
    began_s = anyio.current_time()
    assert await end(Swarm([True], [[]]), least_s=0.2) == Farewell(True, 0)
    assert anyio.current_time() - began_s >= 0.2


async def test_who_does_not_go_or_is_not_told_is_not_waited_for_for_ever() -> None:
    assert await end(Swarm([True], [[SERVING]])) == Farewell(True, 1)
    assert await end(Swarm([False], [[]])) == Farewell(False, 0)


@pytest.mark.parametrize("num_seen", [0, 1])
async def test_where_no_other_node_has_answered_nobody_is_told_but_where_there_is_nobody(num_seen: int) -> None:
    """One's own node stores the record, and sees nobody."""
    cut_off = Swarm([True], [[]], num_seen)
    cut_off.answers = False
    assert await end(cut_off) == Farewell(num_seen == 0, 0)


async def test_where_no_node_answers_any_more_all_have_gone() -> None:
    assert await end(Swarm([True], [[SERVING], None])) == Farewell(True, 0)


def folder_of(path: Path, optimizer_step: int) -> Path:
    (path / MODEL).mkdir()
    step = {"optimizer_step": optimizer_step, "round": 40, "samples": 8}
    line = step | {"loss": 1.0, "seconds": 1.0, "tokens_per_s": 1.0}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return path


def test_a_coordinator_that_was_killed_as_it_had_saved_the_model_goes_on(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, optimizer_step=30)
    RunOptions(output=folder, resume=True).check_output(MANIFEST)
    for begins_anew in (
        RunOptions(output=folder),
        RunOptions(output=folder, resume=True, plan=CheckpointPlan(None, 5, resume=object())),  # type: ignore[arg-type]
    ):
        with pytest.raises(UserError, match="is there already: name another --output"):
            begins_anew.check_output(MANIFEST)


def test_a_coordinator_that_has_not_seen_the_last_steps_goes_on_as_well(tmp_path: Path) -> None:
    """It saw that most peers were there, and has no line of them."""
    folder = folder_of(tmp_path, optimizer_step=29)
    journal = Journal(folder)
    journal.begin(lifetime_s=30.0, now_s=1.0)
    journal.tell("ended", "The run has made all its steps.", 2.0)
    journal.tell("coordinator", "A coordinator begins to write this journal again.", 3.0)
    RunOptions(output=folder, resume=True).check_output(MANIFEST)


def test_a_model_of_other_steps_is_not_taken_for_this_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is there already: .* move it away to train its run further"):
        RunOptions(output=folder_of(tmp_path, optimizer_step=29), resume=True).check_output(MANIFEST)
