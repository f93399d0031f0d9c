"""A wide area network in a box: machines that are network namespaces, with one link each. Linux, and root, only.

Each machine has an address in a namespace of its own, and its only way out is a TUN device. One process, the forwarder,
reads the packets of all of them. A packet waits for its sender's link, then travels, then waits for its receiver's
link; a link sends and receives at the same time, each at its bandwidth. TCP is the kernel's, with packets of an
ordinary size, so slow start, acknowledgements and retransmissions are as they are on a wide area network. All machines
have CUBIC, as nearly every system has unless its owner changes it, whatever this one has.

* delay: each pair of machines draws it anew every REDRAW_S, uniformly from latency -+ jitter, for each direction.
  Packets of a pair stay in order.
* loss: a link whose queue is QUEUE_S long drops what comes then, as a router does. Others are lost as `loss` says.

Their addresses are such as machines of the internet have, so that programs do what they do there. Nothing but these
namespaces is ever reached: they have no other interface.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

PACKET_BYTES = 1500
REDRAW_S = 0.1
# A round trip of the links that are measured most, as buffers of routers are commonly laid out.
QUEUE_S = 0.2
MOST_MACHINES = 250
# Packets read of one machine before the others get their turn.
PACKETS_IN_TURN = 64
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How all links are.

    Attributes:
        latency_s: one way
        jitter_s: the most by which the delay differs from the latency
        bytes_per_s: in each direction of each link; 0 for no limit
        loss: share of all packets that are lost on their way, each by itself
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0


def enter_namespace(path: str) -> None:
    """Have this thread, and what it starts from now on, live in a network namespace.

    Raises:
        OSError: there is none, or this process is not root's
    """
    with open(path) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", path)


@dataclass(frozen=True)
class Machine:
    """One machine of the network.

    Attributes:
        namespace: the file that names its network namespace
    """

    number: int
    namespace: str

    @property
    def ip(self) -> str:
        """Its address."""
        return f"11.77.0.{self.number + 1}"


class Box:
    """A running network, as the process sees it that made it."""

    def __init__(self, machines: list[Machine], forwarder: subprocess.Popen[str]):
        self.machines = machines
        self._forwarder = forwarder

    def sent_bytes(self) -> list[int]:
        """How many bytes each machine has sent so far, with the headers of TCP and IP."""
        assert self._forwarder.stdin is not None
        assert self._forwarder.stdout is not None
        self._forwarder.stdin.write("bytes\n")
        self._forwarder.stdin.flush()
        return list(json.loads(self._forwarder.stdout.readline()))


@contextmanager
def box(num_machines: int, options: LinkOptions, seed: int = 0) -> Iterator[Box]:
    """Make a network of so many machines; it is gone afterwards."""
    assert num_machines <= MOST_MACHINES
    names = [f"swarm-wan-{os.getpid()}-{number}" for number in range(num_machines)]
    machines = [Machine(number, f"/run/netns/{name}") for number, name in enumerate(names)]
    made = []
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            made.append(name)
        arguments = json.dumps({"machines": [asdict(machine) for machine in machines], "links": asdict(options)})
        forwarder = subprocess.Popen(
            [sys.executable, str(Path(__file__)), arguments, "--seed", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert forwarder.stdout is not None
            if forwarder.stdout.readline() != "ready\n":
                raise RuntimeError("the forwarder did not start")
            yield Box(machines, forwarder)
        finally:
            forwarder.kill()
            forwarder.wait()
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=True)


def _open_tun(machine: Machine) -> int:
    enter_namespace(machine.namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"wan", _IFF_TUN | _IFF_NO_PI))
    commands = (
        f"address add {machine.ip}/24 dev wan\nlink set wan mtu {PACKET_BYTES} up\nlink set lo up\n"
        f"route replace 11.77.0.0/24 dev wan src {machine.ip} congctl cubic\n"
    )
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    return tun


class Forwarder:
    """Carries packets between TUN devices.

    Args:
        tuns: the device of each machine
    """

    def __init__(self, tuns: list[int], options: LinkOptions, rng: random.Random):
        self.sent_bytes = [0] * len(tuns)
        self.dropped = 0
        self._tuns = tuns
        self._options = options
        self._rng = rng
        self._up_free = [0.0] * len(tuns)  # when each link has sent what is queued
        self._down_free = [0.0] * len(tuns)
        self._paths: dict[tuple[int, int], list[float]] = {}  # delay, when it was drawn, last arrival
        # When, the order among equals, whether it has reached its receiver's link, to whom, the packet.
        self._under_way: list[tuple[float, int, bool, int, bytes]] = []
        self._number = 0

    def read(self, sender: int, now: float) -> None:
        """Take the packets that a machine sends."""
        for _ in range(PACKETS_IN_TURN):
            try:
                packet = os.read(self._tuns[sender], PACKET_BYTES)
            except BlockingIOError:
                return
            # IPv4 alone, to a machine that is there: byte 19 is the last of the receiver's address.
            if packet[0] >> 4 != 4 or not 1 <= packet[19] <= len(self._tuns) or packet[16:19] != b"\x0b\x4d\x00":
                continue
            self.sent_bytes[sender] += len(packet)
            left = self._through(self._up_free, sender, now, len(packet))
            if left is not None and not (self._options.loss and self._rng.random() < self._options.loss):
                receiver = packet[19] - 1
                self._put(self._arrival(sender, receiver, left), False, receiver, packet)

    def deliver(self, now: float) -> float | None:
        """Hand over the packets whose time has come; returns when the next one comes."""
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            when, _, is_through, receiver, packet = heapq.heappop(under_way)
            if self._options.bytes_per_s and not is_through:
                through = self._through(self._down_free, receiver, when, len(packet))
                if through is not None:
                    self._put(through, True, receiver, packet)
                continue
            try:
                os.write(self._tuns[receiver], packet)
            except OSError:  # the machine's queue is full, or its device is down
                self.dropped += 1
        return under_way[0][0] if under_way else None

    def _through(self, free: list[float], machine: int, when: float, num_bytes: int) -> float | None:
        """When a packet has passed one direction of a link; None if it is dropped."""
        if not self._options.bytes_per_s:
            return when
        begin = max(when, free[machine])
        if begin > when + QUEUE_S:
            self.dropped += 1
            return None
        free[machine] = begin + num_bytes / self._options.bytes_per_s
        return free[machine]

    def _arrival(self, sender: int, receiver: int, left: float) -> float:
        path = self._paths.setdefault((sender, receiver), [0.0, -REDRAW_S, 0.0])
        if left >= path[1] + REDRAW_S:
            jitter_s = self._options.jitter_s
            path[0], path[1] = max(0.0, self._options.latency_s + self._rng.uniform(-jitter_s, jitter_s)), left
        path[2] = max(path[2], left + path[0])
        return path[2]

    def _put(self, when: float, is_through: bool, receiver: int, packet: bytes) -> None:
        self._number += 1
        heapq.heappush(self._under_way, (when, self._number, is_through, receiver, packet))


def forward(machines: list[Machine], options: LinkOptions, seed: int) -> None:
    """Carry packets until the parent closes its end of standard input."""
    tuns = [_open_tun(machine) for machine in machines]
    forwarder = Forwarder(tuns, options, random.Random(seed))
    poll = select.epoll()
    for tun in (*tuns, sys.stdin.fileno()):
        poll.register(tun, select.EPOLLIN)
    numbers = {tun: number for number, tun in enumerate(tuns)}
    print("ready", flush=True)
    following: float | None = None
    while True:
        timeout_s = -1 if following is None else max(0.0, following - time.monotonic())
        for file, _ in poll.poll(timeout_s):
            if file in numbers:
                forwarder.read(numbers[file], time.monotonic())
            elif sys.stdin.readline():
                print(json.dumps(forwarder.sent_bytes), flush=True)
            else:
                return
        following = forwarder.deliver(time.monotonic())


def main() -> None:
    """The forwarder's command line; `box` starts it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", help="machines and links, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    arguments = json.loads(options.arguments)
    forward([Machine(**machine) for machine in arguments["machines"]], LinkOptions(**arguments["links"]), options.seed)


if __name__ == "__main__":
    main()
