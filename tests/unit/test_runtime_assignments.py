"""The assignments that a peer follows, and the end of the run."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest

from swarm_peer.errors import CallError
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.network import assignments
from swarm_peer.runtime.network.assignments import NewestTerm, find_end, wait_for_assignment, wait_for_end
from swarm_peer.wire.records import Assignment, CoordinationRecord, EndRecord, TimelineRecord

ASSIGNMENT = Assignment(peer="me", announced=10, from_stage=0, to_stage=1, reason="stage 1 is slow")


@dataclass
class World:
    said: dict[Term, CoordinationRecord] = field(default_factory=dict)
    mates: list[PeerView] = field(default_factory=lambda: [PeerView(peer_id="mate", stage=0, state=PeerState.SERVING)])
    since: int = 10
    serial: int = 10
    looks: int = 0
    hidden_after: int = 100  # looks after which the newest term is not found any more
    newest_term: NewestTerm = field(default_factory=NewestTerm)

    async def fetch(self) -> dict[Term, CoordinationRecord]:
        self.looks += 1
        newest = max(self.said, default=None)
        return {term: said for term, said in self.said.items() if term != newest or self.looks <= self.hidden_after}

    def assign(self, *given: Assignment, term: int = 1, by: str = "leader") -> None:
        self.said[Term(term, by)] = CoordinationRecord(warrant=b"", beat=0, assignments=given)

    async def wait(self) -> Assignment:
        view = SwarmView(2, (PeerView(peer_id="me", stage=0, state=PeerState.SERVING), *self.mates))
        return await wait_for_assignment(
            me="me",
            stage=0,
            fetch=self.fetch,
            newest_term=self.newest_term,
            view=lambda: view,
            since=self.since,
            serial=lambda: self.serial,
        )

    async def is_refused(self) -> bool:
        async with anyio.create_task_group() as tasks:
            done: list[Assignment] = []

            async def wait() -> None:
                done.append(await self.wait())

            tasks.start_soon(wait)
            while self.looks < 4 and not done:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        return not done


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(assignments, "POLL_S", 0.0)
    return World()


async def test_the_runs_assignment_is_followed(world: World) -> None:
    world.assign(ASSIGNMENT.model_copy(update={"peer": "another"}), ASSIGNMENT)
    assert await world.wait() == ASSIGNMENT


async def test_an_assignment_upon_the_first_announcement_of_a_stay_is_followed(world: World) -> None:
    """The peer may have announced itself again before it listened."""
    world.serial = 15
    world.assign(ASSIGNMENT)
    assert await world.wait() == ASSIGNMENT


@pytest.mark.parametrize("newer", [Term(2, "another"), Term(1, "stronger")])
async def test_an_older_term_is_over(world: World, newer: Term) -> None:
    world.assign(ASSIGNMENT, term=1, by="leader")
    world.assign(term=newer.number, by=newer.coordinator)
    assert await world.is_refused()


async def test_a_newer_term_is_remembered_where_it_cannot_be_found_any_more(world: World) -> None:
    world.assign(ASSIGNMENT, term=1)
    world.assign(term=2)
    world.hidden_after = 1
    assert await world.is_refused()


async def test_a_newer_term_is_remembered_after_a_move(world: World) -> None:
    world.assign(ASSIGNMENT, term=2)
    await world.wait()
    world.said.clear()
    world.assign(ASSIGNMENT, term=1)
    world.looks = 0
    assert await world.is_refused()


async def test_the_newest_term_is_obeyed(world: World) -> None:
    world.assign(ASSIGNMENT.model_copy(update={"to_stage": 0}), term=1)
    world.assign(ASSIGNMENT, term=2, by="another")
    assert await world.wait() == ASSIGNMENT


@pytest.mark.parametrize(
    "change",
    [
        {"peer": "another"},
        {"from_stage": 1},
        {"to_stage": 0},
        {"to_stage": 2},
        {"announced": 9},  # of its life before
        {"announced": 11},  # of no announcement yet
    ],
)
async def test_what_does_not_mean_this_peer_as_it_is(world: World, change: dict[str, object]) -> None:
    world.assign(ASSIGNMENT.model_copy(update=change))
    assert await world.is_refused()


async def test_the_last_peer_of_a_stage_stays(world: World) -> None:
    world.assign(ASSIGNMENT)
    world.mates = [
        PeerView(peer_id="mate", stage=0, state=PeerState.JOINING),
        PeerView(peer_id="other", stage=1, state=PeerState.SERVING),
    ]
    assert await world.is_refused()


class Board:
    """A DHT that holds what a run's key has said."""

    def __init__(self, *records):
        self._records = {type(record): record for record in records}

    async def fetch(self, key, record_type, run):
        assert run == "run"
        return {"run": self._records[record_type]} if record_type in self._records else {}


@pytest.mark.parametrize(
    ("records", "is_over"),
    [
        ((), False),
        ((TimelineRecord(first_round=0, first_optimizer_step=0, begun=7),), False),
        ((TimelineRecord(first_round=0, first_optimizer_step=0, begun=7), EndRecord(reason="x", begun=7)), True),
        ((EndRecord(reason="x", begun=7),), True),
        ((TimelineRecord(first_round=9, first_optimizer_step=5, begun=8), EndRecord(reason="x", begun=7)), False),
    ],
    ids=["nothing", "alive", "ended", "ended, and its timeline forgotten", "gone on from a checkpoint since"],
)
async def test_a_run_is_over_when_its_key_says_so_and_has_not_begun_anew(records, is_over):
    assert (await find_end(Board(*records), "run") is not None) == is_over


@pytest.mark.parametrize(
    ("is_due", "pause_s"),
    [(False, assignments.LOOK_FOR_END_S), (True, assignments.LOOK_FOR_DUE_END_S)],
    ids=["early", "due"],
)
async def test_a_peer_that_has_done_all_steps_looks_for_the_end_more_often(monkeypatch, is_due, pause_s):
    board, pauses = Board(), []

    async def sleep(seconds):
        pauses.append(seconds)
        board._records[EndRecord] = EndRecord(reason="all steps are done", begun=7)

    monkeypatch.setattr(assignments.anyio, "sleep", sleep)
    assert await wait_for_end(board, "run", lambda: is_due) == "all steps are done"
    assert pauses == [pause_s]


async def test_a_peer_without_an_answer_looks_for_the_end_again_soon(monkeypatch):
    class Silent:
        async def fetch(self, key, record_type, run):
            raise CallError("no answer")

    class Paused(Exception):
        pass

    async def sleep(seconds):
        raise Paused(seconds)

    monkeypatch.setattr(assignments.anyio, "sleep", sleep)
    with pytest.raises(Paused, match=f"^{assignments.LOOK_FOR_DUE_END_S}$"):
        await wait_for_end(Silent(), "run", lambda: False)
