"""What a peer exchanges with its neighbours, as it counts that."""

import pytest

from swarm_peer.runtime.network.exchanged import MAX_COUNTED, PERIOD_S, ExchangedRecord


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def record(clock):
    return ExchangedRecord(clock)


def test_the_busiest_come_first_with_their_fastest_round_trip(record, clock):
    record.called("a", 0.3, 1000)
    record.called("a", 0.1, 0)
    record.called("b", 0.2, 5000)
    record.answered("a", 2000)
    clock.now_s += 10
    assert record.busiest(2) == (("b", 0.2, 500.0), ("a", 0.1, 300.0))
    assert record.busiest(1) == (("b", 0.2, 500.0),)


def test_who_has_answered_nothing_is_no_neighbour(record, clock):
    record.answered("caller", 1000)
    clock.now_s += 1
    assert record.busiest(5) == ()


def test_the_last_one_or_two_periods_count(record, clock):
    record.called("a", 0.1, 3000)
    clock.now_s += PERIOD_S
    record.called("a", 0.4, 0)
    clock.now_s += PERIOD_S / 2
    [found] = record.busiest(5)
    assert (found.round_trip_s, found.bytes_per_s) == (0.1, pytest.approx(3000 / (1.5 * PERIOD_S)))
    clock.now_s += PERIOD_S / 2
    [found] = record.busiest(5)
    assert found.round_trip_s == 0.4, "the first call is too long ago"
    clock.now_s += 2 * PERIOD_S
    assert record.busiest(5) == ()


def test_no_more_are_counted_than_there_is_room_for(record, clock):
    for number in range(MAX_COUNTED + 5):
        record.called(str(number), 0.1, 1)
    record.called("0", 0.05, 1)
    clock.now_s += 1
    assert len(record.busiest(2 * MAX_COUNTED)) == MAX_COUNTED
    assert record.busiest(1)[0].peer_id == "0"
