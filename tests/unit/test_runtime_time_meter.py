"""How a peer says where its time goes."""

from contexts import MovedClock

from swarm_peer.policy.step_state import Phase
from swarm_peer.policy.view import TimeShares
from swarm_peer.runtime.stage.time_meter import WINDOW_S, TimeMeter


class Device:
    """A clock and a device: `compute` and `idle` let time pass."""

    def __init__(self):
        self.clock = MovedClock(now=100.0)
        self.busy_s = 0.0
        self.meter = TimeMeter(clock=self.clock, busy_s=lambda: self.busy_s)

    def idle(self, seconds):
        self.clock.now += seconds

    def compute(self, seconds):
        self.clock.now += seconds
        self.busy_s += seconds


def test_no_time_has_no_shares():
    assert Device().meter.shares() is None


def test_idle_time_is_told_by_the_phase_that_it_falls_into():
    device = Device()
    device.idle(2)  # it joins
    device.meter.enter(Phase.CATCHING_UP)
    device.compute(1)
    device.idle(1)
    device.meter.enter(Phase.OPEN)
    device.compute(8)
    device.idle(4)
    device.meter.enter(Phase.ENDING)
    device.compute(1)
    device.idle(3)
    assert device.meter.shares() == TimeShares(computing=50, ending=15, joining=15)
    assert device.meter.shares().waiting == 20
    assert device.meter.shares() == TimeShares(50, 15, 15), "to ask changes nothing"


def test_old_times_are_forgotten():
    device = Device()
    for _ in range(10):
        device.meter.enter(Phase.OPEN)
        device.idle(WINDOW_S / 10)
    for _ in range(12):
        device.meter.enter(Phase.OPEN)
        device.compute(WINDOW_S / 10)
    assert device.meter.shares() == TimeShares(computing=100)


def test_a_round_that_is_longer_than_the_window_counts_from_its_beginning():
    device = Device()
    device.idle(10 * WINDOW_S)
    device.meter.enter(Phase.OPEN)
    device.compute(3 * WINDOW_S)
    device.idle(WINDOW_S)
    assert device.meter.shares() == TimeShares(computing=21, joining=71)
    device.meter.enter(Phase.ENDING)
    assert device.meter.shares() == TimeShares(computing=75)


def test_many_short_rounds_take_no_memory():
    device = Device()
    for _ in range(10_000):
        device.meter.enter(Phase.OPEN)
        device.compute(0.01)
        device.meter.enter(Phase.ENDING)
        device.idle(0.01)
    assert device.meter.shares() in (TimeShares(50, 50), TimeShares(49, 49), TimeShares(50, 49), TimeShares(49, 50))
    assert len(device.meter._marks) <= WINDOW_S + 2
