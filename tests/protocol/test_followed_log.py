"""What a seat brought to entries that its next log has others in the place of."""

import pytest

from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.followed_log import FollowedLog
from swarm_peer.protocol.log import KEPT_ENTRIES, Close, Committed, Contribution, Cut, Entry, Log, Name, Part
from swarm_peer.protocol.statements import EpochId, Seat

ME, MATE, GUEST = (Seat(peer, 1, "") for peer in ("me", "mate", "guest"))


def brought(seat, number):
    return Contribution(Name(seat, number), 2, (), ())


def add(log, *parts):
    """Commit the next entry: each part is a seat with what it brings."""
    number = log.next_round
    cut = Cut(
        stage=1, round=number, epoch=EpochId(1, MATE, 0), attempt=0, parent=log.head, root="", base=(), averages=True,
        parts=tuple(Part(seat, brings) for seat, *brings in parts),
    )  # fmt: skip
    log.append(Committed(Entry(cut, ""), (), Close(number, ())))


def log_of(*rounds):
    log = Log(1, BEGINNING)
    for parts in rounds:
        add(log, *parts)
    return log


BOTH = (ME, brought(ME, 0)), (MATE, brought(MATE, 0))
MINE = (ME, brought(ME, 1), brought(GUEST, 1)), (MATE,)
THEIRS = ((MATE, brought(MATE, 1)),)


@pytest.fixture
def followed():
    """A seat that has followed two entries, and brought something to both."""
    followed = FollowedLog()
    followed.follow(log_of(BOTH, MINE), ME)
    assert followed.take_lost() == []
    return followed


def test_what_a_seat_brought_to_an_entry_that_others_have_another_for_is_lost_once(followed):
    followed.follow(log_of(BOTH, THEIRS), ME)
    assert followed.take_lost() == [brought(ME, 1), brought(GUEST, 1)]
    assert followed.take_lost() == []


def test_it_is_not_while_the_log_has_yet_to_come_as_far(followed):
    followed.follow(Log(1, BEGINNING), ME)
    assert followed.take_lost() == []
    log = log_of(BOTH)
    followed.follow(log, ME)
    assert followed.take_lost() == []
    add(log, *THEIRS)
    assert followed.take_lost() == [brought(ME, 1), brought(GUEST, 1)]


@pytest.mark.parametrize(
    ("what", "rounds"),
    [
        ("the same entries", (BOTH, MINE, THEIRS)),
        ("what it brought in another cut of that round", (BOTH, ((MATE, brought(ME, 1), brought(GUEST, 1)),))),
    ],
)
def test_it_is_not_if_the_next_log_holds(followed, what, rounds):
    followed.follow(log_of(*rounds), ME)
    assert followed.take_lost() == []


def test_it_is_not_told_of_entries_that_the_next_log_keeps_no_more(followed):
    followed.follow(log_of(BOTH, *[THEIRS] * (KEPT_ENTRIES + 2)), ME)
    assert followed.take_lost() == []


def test_a_run_that_goes_back_takes_the_updates_of_all_seats_back(followed):
    followed.follow(Log(1, BEGINNING._replace(first_round=5)), ME)
    followed.follow(log_of(BOTH, THEIRS), ME)
    assert followed.take_lost() == []
