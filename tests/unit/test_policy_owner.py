import pytest

from swarm_peer.policy.owner import (
    BUSY_AFTER_S,
    FREE_AFTER_S,
    RESERVED_SHARE,
    Hours,
    OwnerPolicy,
    Pause,
    Reason,
    Seen,
)

HOUR_S = 3600


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-7", (22, 23.99, 0, 6.99), (7, 12, 21.99)),
        ("8:30-17", (8.5, 12, 16.99), (8.49, 17, 0)),
        ("0-24", (), ()),
        ("0-8", (0, 7.99), (8, 23)),
        ("20-24", (20, 23.99), (0, 19.99)),
        ("24-6", (0, 5), (6, 23)),
    ],
)
def test_hours_are_part_of_a_day_also_over_midnight(text, inside, outside):
    if not inside:
        with pytest.raises(ValueError, match="no part of a day"):
            Hours.parse(text)
        return
    hours = Hours.parse(text)
    assert all(hours.include(hour * HOUR_S) for hour in inside)
    assert not any(hours.include(hour * HOUR_S) for hour in outside)


@pytest.mark.parametrize("text", ["22", "25-7", "22-7-9", "7:60-9", "a-b", "", "22 - 7", "24:30-7", "-1-5", "7-7"])
def test_what_are_no_hours_is_refused(text):
    with pytest.raises(ValueError, match=r"two times of the day|no part of a day"):
        Hours.parse(text)


def test_without_rules_a_peer_serves_until_its_owner_says_otherwise():
    policy = OwnerPolicy()
    assert policy.decide(0.0, Seen()) is None
    assert policy.decide(1.0, Seen(is_told_to_pause=True)) == Pause(Reason.COMMAND, "paused by its owner")
    assert policy.decide(2.0, Seen(sent_bytes=1e15)) is None


def test_outside_of_its_hours_it_says_until_when():
    policy = OwnerPolicy(hours=Hours.parse("22-7:30"))
    assert policy.decide(0.0, Seen(second=12 * HOUR_S)) == Pause(Reason.HOURS, "paused until 22:00 (hours)")
    assert policy.decide(1.0, Seen(second=22 * HOUR_S)) is None
    assert policy.decide(2.0, Seen(second=7 * HOUR_S)) is None
    assert policy.decide(3.0, Seen(second=7.5 * HOUR_S)) is not None


def test_it_leaves_before_the_limit_and_comes_back_on_the_next_day():
    policy = OwnerPolicy(max_sent_bytes_per_day=100e6)
    most = (1 - RESERVED_SHARE) * 100e6
    assert policy.decide(0.0, Seen(day="a", sent_bytes=most - 11, leaving_bytes=10)) is None
    spent = policy.decide(1.0, Seen(day="a", sent_bytes=most - 10, leaving_bytes=10))
    assert spent == Pause(Reason.DAILY_LIMIT, "paused until 00:00 (its 0.1 GB of today are sent)")
    # It has left, so nothing more is to be sent; that it came near the limit stays true.
    assert policy.decide(2.0, Seen(day="a", sent_bytes=most - 5)) == spent
    assert policy.decide(3.0, Seen(day="b", sent_bytes=0)) is None


def test_a_new_process_knows_that_the_day_is_spent():
    policy = OwnerPolicy(max_sent_bytes_per_day=100e6, spent_day="a")
    assert policy.decide(0.0, Seen(day="a")).reason is Reason.DAILY_LIMIT
    assert policy.decide(1.0, Seen(day="b")) is None
    assert OwnerPolicy(spent_day="a").decide(0.0, Seen(day="a")) is None, "the limit was taken away"


@pytest.mark.parametrize(("hours", "back"), [("22-7", "00:00"), ("9-17", "09:00")])
def test_after_the_limit_it_comes_back_within_its_hours(hours, back):
    policy = OwnerPolicy(hours=Hours.parse(hours), max_sent_bytes_per_day=1e9)
    assert f"until {back} " in policy.decide(0.0, Seen(day="a", second=10 * HOUR_S, sent_bytes=1e9)).words


def test_a_machine_is_in_use_after_a_while_and_free_after_a_longer_one():
    policy = OwnerPolicy()
    use = Seen(use="the GPU is in use")
    assert policy.decide(0.0, use) is None
    assert policy.decide(1.0, Seen()) is None
    assert policy.decide(2.0, use) is None
    assert policy.decide(2.0 + BUSY_AFTER_S - 0.1, use) is None, "it was free in between"
    in_use = Pause(Reason.BUSY, "paused: the GPU is in use")
    assert policy.decide(2.0 + BUSY_AFTER_S, use) == in_use
    assert policy.decide(10.0, Seen()) == in_use
    assert policy.decide(10.0 + FREE_AFTER_S - 0.1, Seen()) == in_use
    assert policy.decide(10.0 + FREE_AFTER_S - 0.05, use) == in_use
    assert policy.decide(11.0 + FREE_AFTER_S, Seen()) == in_use, "it counts from the last use"
    assert policy.decide(11.0 + 2 * FREE_AFTER_S, Seen()) is None


def test_the_owners_word_stands_before_all_else():
    policy = OwnerPolicy(hours=Hours.parse("22-7"), max_sent_bytes_per_day=1.0)
    seen = Seen(is_told_to_pause=True, second=12 * HOUR_S, sent_bytes=5.0, use="x")
    assert policy.decide(0.0, seen).reason is Reason.COMMAND
