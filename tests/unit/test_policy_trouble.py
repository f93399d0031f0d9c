"""When a peer is in trouble, by its own account of launches and updates."""

import pytest

from swarm_peer.policy.trouble import (
    BATCHES_OF_DIVERGED,
    BATCHES_REMEMBERED,
    IDLE_S,
    UPDATES_MISSED,
    Complaint,
    LaunchRecord,
    Trouble,
    UpdateRecord,
    worst,
)


def fail(record, batch, now_s, *, is_finite=False, reason="the loss is not finite"):
    launch = record.begin(now_s)
    record.failed(batch, reason, now_s + 1, is_finite=is_finite)
    record.end(launch)


def test_a_peer_of_which_every_microbatch_fails_says_so_with_the_newest_cause():
    record = LaunchRecord()
    assert record.complaint(0.0) is None
    fail(record, "a", 0.0, is_finite=True, reason="unreachable: b")
    fail(record, "b", 2.0, is_finite=True, reason="timeout: c")
    assert record.complaint(4.0) == Complaint(Trouble.FAILING, 1.0, "every microbatch fails: timeout: c")
    record.forget()
    assert record.complaint(4.0) is None, "one has come through"


def test_what_is_under_way_may_come_through_however_long_it_takes():
    """A run whose microbatches take ten minutes does not stand still since one has failed at once."""
    record = LaunchRecord()
    slow = record.begin(0.0)
    fail(record, "b", 5.0)
    assert record.complaint(600.0) is None
    record.failed("a", "timeout", 600.0, is_finite=True)
    record.end(slow)
    assert record.complaint(600.0).trouble is Trouble.FAILING
    assert record.complaint(600.0).since_s == 6.0


def test_a_later_launch_is_no_hope():
    record = LaunchRecord()
    fail(record, "a", 0.0)
    record.begin(2.0)
    assert record.complaint(500.0) is not None


def test_a_peer_that_launches_nothing_any_more_has_no_trouble():
    """Others have filled the global batch."""
    record = LaunchRecord()
    fail(record, "a", 0.0)
    assert record.complaint(1.0 + IDLE_S) is not None
    assert record.complaint(1.1 + IDLE_S) is None
    record.begin(100.0)
    assert record.complaint(100.0) is not None, "it goes on to fail"


def test_weights_are_to_blame_once_several_batches_are_not_finite():
    """One odd batch is launched twenty times, which may take longer than anybody waits."""
    record = LaunchRecord()
    for number in range(BATCHES_OF_DIVERGED - 1):
        for again in range(20):
            fail(record, number, 20.0 * number + again)
    assert record.complaint(100.0 - 50.0).trouble is Trouble.FAILING
    fail(record, "one more", 50.0)
    assert record.complaint(52.0).trouble is Trouble.DIVERGED


def test_another_failure_is_forgotten_in_time():
    record = LaunchRecord()
    fail(record, "unlucky", 0.0, is_finite=True)
    for number in range(BATCHES_REMEMBERED):
        assert record.complaint(1.0 * number) is None or record.complaint(number).trouble is Trouble.FAILING
        fail(record, number, 1.0 * number)
    assert record.complaint(BATCHES_REMEMBERED).trouble is Trouble.DIVERGED
    fail(record, 3, 9.0, is_finite=True)
    assert record.complaint(10.0).trouble is Trouble.FAILING


def test_updates_that_are_left_out_are_told_of():
    record = UpdateRecord()
    for number in range(UPDATES_MISSED):
        assert record.complaint() is None
        record.not_finite()
        record.end_round(10.0 * number, is_skipped=True)
    complaint = record.complaint()
    assert (complaint.trouble, complaint.since_s) == (Trouble.NO_UPDATES, 0.0)
    assert "3 updates" in complaint.words
    record.end_round(99.0, is_skipped=True)
    assert record.complaint() == complaint, "it had nothing to bring itself"
    record.not_finite()
    record.end_round(100.0, is_skipped=False)
    assert record.complaint() is None, "a stage-mate's was finite"


def test_updates_of_weights_that_were_given_up_do_not_count():
    record = UpdateRecord()
    for _ in range(UPDATES_MISSED):
        record.not_finite()
        record.end_round(0.0, is_skipped=True)
    record.begin()
    assert record.complaint() is None
    for _ in range(UPDATES_MISSED):
        record.end_round(0.0, is_skipped=True)
    assert record.complaint() is None, "all samples were lost, and finite"


@pytest.mark.parametrize("first", list(Trouble))
def test_the_worst_is_announced(first):
    order = list(Trouble)
    rest = [Complaint(trouble, 0.0, "") for trouble in reversed(order[order.index(first) :])]
    assert worst([None, *rest]).trouble is first
    assert worst([None, None]) is None
