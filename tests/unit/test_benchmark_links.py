"""The forwarder of the box of links: packets, time and chance come from the test, so nothing needs a namespace."""

import random
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from links import QUEUE_S, REDRAW_S, Forwarder, LinkOptions

SIZE = 1000


class Box:
    """Machines whose TUN devices are sockets."""

    def __init__(self, num_machines=3, **links):
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(num_machines)]
        self.machines = [inside for inside, _ in pairs]
        self._outside = [outside for _, outside in pairs]
        for one in (*self.machines, *self._outside):
            one.setblocking(False)
        tuns = [outside.fileno() for outside in self._outside]
        self.forwarder = Forwarder(tuns, LinkOptions(**links), random.Random(0))

    def send(self, sender, receiver, now, content=b"", size=SIZE):
        header = b"\x45" + bytes(15) + bytes([11, 77, 0, receiver + 1])
        self.machines[sender].send(header + content.ljust(size - len(header), b"."))
        self.forwarder.read(sender, now)

    def arrivals(self, receiver, until):
        """When packets arrive at a machine, with their content."""
        found, now = [], 0.0
        while now is not None and now <= until:
            following = self.forwarder.deliver(now)
            try:
                while True:
                    found.append((round(now, 6), self.machines[receiver].recv(2 * SIZE)[20:].rstrip(b".")))
            except BlockingIOError:
                pass
            now = following
        return found

    def close(self):
        for one in (*self.machines, *self._outside):
            one.close()


@pytest.fixture
def make_box():
    boxes = []

    def make(*args, **links):
        boxes.append(Box(*args, **links))
        return boxes[-1]

    yield make
    for box in boxes:
        box.close()


def test_a_packet_arrives_after_the_latency_at_its_receiver_alone(make_box):
    box = make_box(latency_s=0.1)
    box.send(0, 1, now=1.0, content=b"hello")
    assert box.arrivals(1, until=1.0999) == []
    assert box.arrivals(2, until=1.0999) == []
    assert box.arrivals(1, until=1.2) == [(1.1, b"hello")]
    assert box.forwarder.sent_bytes == [SIZE, 0, 0]


def test_all_that_a_machine_sends_shares_its_link_and_so_does_all_that_it_receives(make_box):
    box = make_box(bytes_per_s=10 * SIZE)
    box.send(0, 1, now=0.0)
    box.send(0, 2, now=0.0)
    # The first one leaves for 0.1 s and arrives for 0.1 s; the second one waits for the sender's link.
    assert [when for when, _ in box.arrivals(1, until=0.25)] == [0.2]
    assert [when for when, _ in box.arrivals(2, until=0.35)] == [0.3]
    box.send(0, 2, now=1.0)
    box.send(1, 2, now=1.0)
    assert [when for when, _ in box.arrivals(2, until=2.0)] == [1.2, 1.3]


def test_a_link_sends_and_receives_at_the_same_time(make_box):
    box = make_box(bytes_per_s=10 * SIZE)
    box.send(0, 1, now=0.0)
    box.send(1, 0, now=0.0)
    assert len(box.arrivals(0, until=0.2)) == 1
    assert len(box.arrivals(1, until=0.2)) == 1


def test_packets_of_a_pair_stay_in_order_whatever_the_jitter(make_box):
    box = make_box(latency_s=0.1, jitter_s=0.1)
    contents = [str(number).encode() for number in range(100)]
    for number, content in enumerate(contents):
        box.send(0, 1, now=number * REDRAW_S, content=content)
    arrived = box.arrivals(1, until=100.0)
    assert [content for _, content in arrived] == contents
    delays = [when - number * REDRAW_S for number, (when, _) in enumerate(arrived)]
    assert 0 <= min(delays) < 0.05
    assert 0.15 < max(delays) < 0.2 + REDRAW_S


def test_a_full_queue_drops_what_comes(make_box):
    box = make_box(bytes_per_s=10 * SIZE)
    for _ in range(20):
        box.send(0, 1, now=0.0)
    kept = 1 + int(QUEUE_S / 0.1)
    assert box.forwarder.dropped == 20 - kept
    assert len(box.arrivals(1, until=10.0)) == kept


def test_what_is_for_nobody_in_the_box_goes_nowhere(make_box):
    box = make_box(2)
    box.send(0, 7, now=0.0)
    box.machines[0].send(b"\x60" + bytes(60))  # IPv6
    box.machines[0].send(b"\x45" + bytes(15) + bytes([192, 168, 0, 2]) + bytes(20))
    box.forwarder.read(0, 0.0)
    assert box.arrivals(1, until=10.0) == []
    assert box.forwarder.sent_bytes == [0, 0]
