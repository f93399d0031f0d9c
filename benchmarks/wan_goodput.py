"""Measures what libp2p carries over the links of a box, in and out at once: the bandwidth that stage-mates have.

It is less than the links': TCP and both headers take their part, and libp2p's yamux sends the news that a reader has
room again behind the data that waits to be sent. So each end of a connection that is full in both directions waits for
the other one. A machine in the middle exchanges all that it can with all others, as stage-mates do. Connections are
paced, as those of peers are; before the end of 2026-11-25 they were not, and pipelines were predicted with two others.

On a machine of the box: `wan_goodput.py NAMESPACE IP NEIGHBOURS` prints where it listens,
`wan_goodput.py NAMESPACE IP 1 ADDRESS` connects to that, and each prints the bytes per second that have arrived there.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from links import LinkOptions, Machine, box, enter_namespace

from swarm_peer.runtime.host.pacing import pace_connections

PROTOCOL = "/swarm/goodput/1"
PIECE = bytes(1 << 18)
# For windows to grow to what they come to.
WARM_UP_S = 10.0
MEASURED_S = 20.0
TIMEOUT_S = 90.0


def carried_bytes_per_s(links: LinkOptions, num_neighbours: int) -> float:
    """Measure what the link of the machine in the middle carries each way, the mean of both, in half a minute.

    Raises:
        subprocess.TimeoutExpired: the machines did not connect, or one of them ended; its traceback says why
    """
    with box(1 + num_neighbours, links) as network:
        ends = [_start(network.machines[0], num_neighbours)]
        try:
            assert ends[0].stdout is not None
            address = ends[0].stdout.readline().strip()
            ends += [_start(machine, 1, address) for machine in network.machines[1:]]
            return sum(float(end.communicate(timeout=TIMEOUT_S)[0]) for end in ends) / 2
        finally:
            for end in ends:
                end.kill()


def _start(machine: Machine, num_connections: int, *address: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), machine.namespace, machine.ip, str(num_connections), *address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


class End:
    """One end of some connections. It sends all that it can on each, and counts what arrives."""

    def __init__(self, num_connections: int):
        self.received = 0
        self._num_connections = num_connections
        self._num_connected = 0
        self._all_connected = asyncio.Event()

    async def exchange(self, _: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Fill a stream both ways, until the other end leaves."""
        self._num_connected += 1
        if self._num_connected == self._num_connections:
            self._all_connected.set()

        async def send() -> None:
            with suppress(OSError):
                while True:
                    writer.write(PIECE)
                    await writer.drain()

        async def receive() -> None:
            with suppress(OSError):
                while data := await reader.read(len(PIECE)):
                    self.received += len(data)

        await asyncio.gather(send(), receive())

    async def measure(self) -> float:
        """Wait for the connections, and measure what arrives; in bytes per second."""
        await self._all_connected.wait()
        await asyncio.sleep(WARM_UP_S)
        before, begun = self.received, time.monotonic()
        await asyncio.sleep(MEASURED_S)
        return (self.received - before) / (time.monotonic() - begun)


async def run_end(ip: str, num_connections: int, address: str | None) -> None:
    """Listen for the others, or connect to the one in the middle, and print what arrives."""
    end = End(num_connections)
    p2p = await P2P.create(initial_peers=[address] if address else [], host_maddrs=[f"/ip4/{ip}/tcp/0"])
    pacing = asyncio.create_task(pace_connections(p2p._child.pid))  # as peers do
    if address is None:
        await p2p.add_binary_stream_handler(PROTOCOL, end.exchange)
        print((await p2p.get_visible_maddrs())[0], flush=True)
        found = await end.measure()
        await asyncio.sleep(2)  # the others have begun, and end, a moment later
    else:
        middle = PeerID.from_base58(address.rpartition("/")[2])
        info, reader, writer = await p2p.call_binary_stream_handler(middle, PROTOCOL)
        exchanging = asyncio.create_task(end.exchange(info, reader, writer))
        found = await end.measure()
        exchanging.cancel()
    print(found, flush=True)
    pacing.cancel()
    await p2p.shutdown()


def main() -> None:
    """The command line."""
    namespace, ip, num_connections, *address = sys.argv[1:]
    enter_namespace(namespace)
    asyncio.run(run_end(ip, int(num_connections), address[0] if address else None))


if __name__ == "__main__":
    main()
