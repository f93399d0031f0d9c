"""What a seat tells of its rounds fits its records, whatever other seats have told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from contexts import MovedClock, make_context, unparsed

from swarm_peer.policy.data.ranges import WindowRange
from swarm_peer.protocol.epochs import BEGINNING
from swarm_peer.protocol.log import Close, Committed, Contribution, Cut, Done, Entry, Name, Part
from swarm_peer.protocol.statements import EpochId, Seat, Signed
from swarm_peer.protocol.work import Work
from swarm_peer.runtime.stage.executor import StageExecutor
from swarm_peer.runtime.stage.round_work import RoundWork
from swarm_peer.runtime.step.round_reports import RoundReports
from swarm_peer.wire.fields import MAX_SAMPLES

SEATS = Seat("honest", 1, ""), Seat("hostile", 1, "")
ID = EpochId(1, SEATS[0], 0)
TARGETS = 512  # of a sample


def reports_of(stage=0):
    context = make_context(unparsed("m" * 32), clock=MovedClock(now=1.0))
    reports = RoundReports(
        context=context, stage=stage, result=lambda: None, samples_of=lambda weight: weight // TARGETS
    )
    return reports, context.metrics


def committed(*, loss_sum=0.0, samples=4, weight=4, ranges=(), number=5):
    """An entry of an honest seat, whose loss is 2, and of one that tells what it likes, in its count and its part."""
    done = Done(SEATS[0], ID, number, 0, 4, (), weight=4, loss_sum=8.0)
    lie = Done(SEATS[1], ID, number, 0, samples, (), weight=weight, loss_sum=loss_sum)
    names = [Name(seat, number) for seat in SEATS]
    good = Contribution(names[0], 4, (WindowRange(0, 0, 0, 4),), (), 8.0)
    parts = Part(SEATS[0], (good,)), Part(SEATS[1], (Contribution(names[1], weight, ranges, (), loss_sum),))
    cut = Cut(stage=0, round=number, epoch=ID, attempt=0, parent="", root="", base=(), averages=True, parts=parts)
    return Committed(Entry(cut, ""), (), Close(number, (Signed(done, b""), Signed(lie, b""))))


READ = (WindowRange(0, 1, 0, 4),)


@pytest.mark.parametrize(
    ("lie", "samples", "loss"),
    [
        ({"loss_sum": 8.0, "ranges": READ}, 8, 2.0),
        ({"loss_sum": 16.0, "ranges": READ, "samples": 2}, 8, 3.0),  # more than was counted as the round was closed
        ({"loss_sum": 1.7e308, "ranges": READ}, 8, 2.0),
        ({"loss_sum": 8.0}, 4, 2.0),
        ({"loss_sum": 8.0, "weight": -1, "ranges": READ}, 8, 2.0),
        ({"loss_sum": 8.0, "ranges": (WindowRange(0, 1, 1000, 0),)}, 0, 2.0),
        ({"loss_sum": 1e33, "ranges": (WindowRange(0, 1, 0, 2**61),), "weight": 1}, MAX_SAMPLES - 1, 1e15),
    ],
)
def test_nothing_that_another_seat_tells_keeps_a_round_from_being_reported(lie, samples, loss):
    reports, _ = reports_of()
    reports.ended(committed(**lie), BEGINNING)
    (report,) = reports.finished
    assert (report.samples, report.loss) == (samples, loss)


@pytest.mark.parametrize(
    ("lie", "loss"),
    [
        ({"loss_sum": 16.0}, 3.0),
        ({"loss_sum": 1.7e308}, 2.0),
        ({"loss_sum": -1e300, "samples": 2**62}, 2.0),
        ({"loss_sum": 1e33, "samples": 2**62, "weight": 1}, 1e15),
        ({"loss_sum": 8.0, "weight": -1}, 2.0),
    ],
)
def test_other_stages_know_the_losses_of_what_was_counted(lie, loss):
    reports, metrics = reports_of(stage=1)
    reports.ended(committed(**lie), BEGINNING)
    assert not reports.finished, "stage 0 reports"
    assert metrics.loss._value.get() == loss


def test_a_round_beyond_all_records_is_not_reported():
    reports, _ = reports_of()
    reports.ended(committed(number=2**61), BEGINNING)
    assert not reports.finished


@pytest.mark.parametrize("ranges", [(WindowRange(0, 0, 0, 4),), ()])
def test_samples_that_a_device_loses_are_counted_once_and_as_samples(caplog, ranges):
    """Stages after the first know their targets alone."""
    reports, metrics = reports_of(stage=0 if ranges else 1)
    work = Work(SEATS[0], SimpleNamespace(averages=lambda number: True, decided_in=lambda number: number, lag=0))
    work.round(5)
    work.computed(5, ("a", "b"), weight=4 * TARGETS, samples=ranges)
    member = SimpleNamespace(work=work)
    executor = object.__new__(StageExecutor)
    executor._trainer, executor._metrics = SimpleNamespace(discard_gradients=lambda: None), metrics
    agreement = SimpleNamespace(core=SimpleNamespace(members={0: member}))
    executor._work = RoundWork(agreement=agreement, stage=0)
    executor.lose(SimpleNamespace(number=5, forget_counted=lambda: None), 4, RuntimeError("out of memory"))
    assert work.open[5].is_void
    assert "samples_lost samples=4 round=5 reason=out of memory" in caplog.text
    work.void(5)  # as the driver does then
    reports.lose(work.lost)
    assert metrics.lost_samples._value.get() == 4
