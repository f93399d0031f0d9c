"""Of several coordinators one acts, another takes over when it falls silent, and never two move one peer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm_peer.policy.leadership import BEATS_PER_LEASE, Leadership, Role, Term

LEASE_S = 8.0


@dataclass
class Board:
    """The last beat that each coordinator has published, as the DHT keeps it under the coordinator's id."""

    said: dict[str, tuple[Term, int]] = field(default_factory=dict)

    def beats(self) -> dict[Term, int]:
        return dict(self.said.values())


class Coordinator:
    def __init__(self, name: str, board: Board, now_s: float, waits: bool = True):
        self.board = board
        self.name = name
        self.leadership = Leadership(me=name, lease_s=LEASE_S, now_s=now_s, waits=waits)
        self.unix_s = 0
        self.role = Role(None, False, None, "")

    def look(self, now_s: float) -> Role:
        self.role = self.leadership.look(self.board.beats(), now_s, self.unix_s)
        if self.role.beat is not None:
            assert self.role.term is not None
            assert self.role.term.coordinator == self.name
            self.board.said[self.name] = (self.role.term, self.role.beat)
        return self.role

    def looks(self, begin_s: float, end_s: float) -> None:
        now_s = begin_s
        while now_s < end_s:
            self.look(now_s)
            now_s += 1.0


def test_the_first_one_acts_soon_and_says_so_ever_again() -> None:
    first = Coordinator("a", Board(), 0.0, waits=False)
    assert not first.look(0.0).acts, "another one's claim may be on its way"
    assert first.look(1.0).reason
    assert first.look(LEASE_S / BEATS_PER_LEASE).acts
    first.looks(3.0, 60.0)
    assert first.role == Role(Term(1, "a"), True, first.role.beat, "")
    assert first.board.said["a"][1] == 60 / (LEASE_S / BEATS_PER_LEASE) - 1


def test_a_waiting_coordinator_takes_over_when_the_beat_has_stood_still_for_a_lease() -> None:
    board = Board()
    first, standby = Coordinator("a", board, 0.0, waits=False), Coordinator("b", board, 0.0)
    for second in range(40):
        first.look(second)
        assert standby.look(second).term == Term(1, "a")
        assert not standby.role.acts
        assert standby.role.beat is None
    assert "coordinator a acts in term 1" in standby.role.reason
    last_heard = standby.leadership._heard_s
    standby.looks(40.0, last_heard + LEASE_S)
    assert standby.role.term == Term(1, "a")
    standby.looks(last_heard + LEASE_S, last_heard + 2 * LEASE_S)
    assert standby.role.acts
    assert standby.role.term == Term(2, "b")


def test_the_standby_of_nobody_begins_after_a_lease() -> None:
    standby = Coordinator("b", Board(), 100.0)
    standby.looks(100.0, 108.0)
    assert standby.role.term is None
    assert "is waited for" in standby.role.reason
    standby.looks(108.0, 112.0)
    assert standby.role.acts


def test_one_that_was_halted_finds_out_before_it_acts() -> None:
    board = Board()
    first, standby = Coordinator("a", board, 0.0, waits=False), Coordinator("b", board, 0.0)
    first.looks(0.0, 10.0)
    standby.looks(0.0, 40.0)
    assert standby.role.acts
    assert not first.look(40.0).acts
    assert first.role.term == Term(2, "b")
    assert first.role.beat is None
    # And the other way round.
    first.looks(40.0, 80.0)
    assert first.role.term == Term(3, "a")


def test_one_whose_beat_does_not_come_back_does_not_act() -> None:
    first = Coordinator("a", Board(), 0.0, waits=False)
    first.looks(0.0, 10.0)
    assert first.role.acts
    first.board = Board()  # its network is gone
    for second in range(10, 40):
        first.board.said.clear()
        first.look(second)
    assert not first.role.acts
    assert "does not come back" in first.role.reason


def test_a_restarted_one_waits_for_its_own_former_life_and_goes_on_counting() -> None:
    board = Board()
    Coordinator("a", board, 0.0, waits=False).looks(0.0, 20.0)
    again = Coordinator("a", board, 1000.0, waits=False)  # another machine, another clock
    again.looks(1000.0, 1000.0 + LEASE_S)
    assert not again.role.acts
    again.looks(1000.0 + LEASE_S, 1004.0 + LEASE_S)
    assert again.role.acts
    assert again.role.term == Term(2, "a")


def test_a_term_is_newer_than_one_that_was_not_heard_of() -> None:
    first, again = (Coordinator("a", Board(), 0.0, waits=False) for _ in range(2))
    first.unix_s, again.unix_s = 1_700_000_000, 1_700_000_060
    first.looks(0.0, 4.0)
    again.looks(60.0, 64.0)
    assert again.role.acts
    assert again.role.term == Term(1_700_000_060, "a")
    assert first.role.term is not None
    assert first.role.term < again.role.term


def test_whose_clock_is_behind_counts_on_from_what_it_has_heard() -> None:
    board = Board()
    first, behind = Coordinator("a", board, 0.0, waits=False), Coordinator("b", board, 0.0)
    first.unix_s, behind.unix_s = 1_700_000_000, 1_600_000_000
    first.looks(0.0, 4.0)
    behind.looks(4.0, 20.0)
    assert behind.role.acts
    assert behind.role.term == Term(1_700_000_001, "b")


def test_one_of_the_same_identity_is_left_alone() -> None:
    board = Board()
    first, twin = Coordinator("a", board, 0.0, waits=False), Coordinator("a", board, 0.0, waits=False)
    for second in range(40):
        first.look(second)
        if second >= 3:
            assert not twin.look(second).acts
    assert first.role.acts


@given(
    st.integers(2, 4).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.lists(
                # Of each second: who looks, and in which of two parts of the network each one is.
                st.tuples(st.sets(st.integers(0, count - 1)), st.integers(0, 2**count - 1), st.integers(1, 12)),
                max_size=25,
            ),
        )
    )
)
# A coordinator that took over in one part of the network crosses into the other part, where the former one acts.
@example((3, [({0}, 0, 1), ({0, 1}, 0, 3), ({0, 1}, 2, 8), ({0, 1}, 4, 1)]))
def test_in_one_part_of_a_network_two_never_act_at_once(
    given_: tuple[int, list[tuple[set[int], int, int]]],
) -> None:
    """Coordinators are halted and parted at will; a halted coordinator does not act by a look that is old."""
    count, periods = given_
    boards = Board(), Board()
    coordinators = [Coordinator(f"c{index}", boards[0], 0.0, waits=bool(index)) for index in range(count)]
    now_s = 0.0
    for awake, parting, seconds in periods:
        for _ in range(seconds):
            now_s += 1.0
            for index, coordinator in enumerate(coordinators):
                coordinator.board = boards[parting >> index & 1]
            if not parting:  # the parts of the network have found each other again
                newest = boards[0].said | boards[1].said
                for name in newest:
                    newest[name] = max(board.said[name] for board in boards if name in board.said)
                boards[0].said = newest
                boards[1].said = dict(newest)
            for index in sorted(awake):
                coordinators[index].look(now_s)
            for board in boards:
                acting = [c for i, c in enumerate(coordinators) if i in awake and c.board is board and c.role.acts]
                assert len(acting) <= 1
    for coordinator in coordinators:
        coordinator.board = boards[0]
    # Left alone with all of them, the run gets one that acts.
    for _ in range(int(4 * LEASE_S)):
        now_s += 1.0
        for coordinator in coordinators:
            coordinator.look(now_s)
    assert sum(coordinator.role.acts for coordinator in coordinators) == 1


@pytest.mark.parametrize("later", [Term(2, "a"), Term(1, "b")])
def test_terms_are_ordered(later: Term) -> None:
    assert later > Term(1, "a")


def test_a_coordinator_that_is_started_again_knows_its_own_term() -> None:
    board = Board()
    Coordinator("a", board, 0.0, waits=False).looks(0.0, 20.0)
    again = Coordinator("a", board, 20.0, waits=False)
    assert "term 1 of this coordinator's last life is not over yet" in again.look(20.0).reason
    again.looks(21.0, 20.0 + 2 * LEASE_S)
    assert (again.role.term, again.role.acts) == (Term(2, "a"), True)
