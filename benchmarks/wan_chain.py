"""What does a chain of machines carry of messages, over plain TCP and over libp2p? A pipeline without a swarm.

The first machine keeps some messages under way. Each machine passes them on to the next one, the last one sends them
back, and so they come to the first one again, which sends new ones: as activations go one way through a pipeline, and
gradients the other. A machine between two others sends and receives twice as much as those at the ends.

Each line is a way to send them, with the share of its link that each machine receives. Ways are TRANSPORT, or
TRANSPORT/paced (swarm_peer/runtime/host/pacing.py); they alternate.

    python benchmarks/wan_chain.py --ways tcp tcp/paced libp2p libp2p/paced --repeat 2
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from hivemind.p2p import P2P, PeerID
from links import LinkOptions, Machine, box, enter_namespace
from wan_report import commit, machine

from swarm_peer.runtime.host.pacing import pace_connections

PROTOCOL = "/swarm/chain/1"
WARM_UP_S = 15.0
MEASURED_S = 40.0

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Link:
    """One machine of the chain: passes on what comes, and counts it."""

    def __init__(self, message_bytes: int, num_started: int):
        self.received = 0
        self._message_bytes = message_bytes
        self._num_started = num_started
        self._onwards: asyncio.Queue[bytes] = asyncio.Queue()
        self._back: asyncio.Queue[bytes] = asyncio.Queue()
        self._next: Stream | None = None

    async def start(self, following: Stream) -> None:
        """Send messages to the next machine, as many as there shall be, or those that come."""
        self._next = following
        for _ in range(self._num_started):
            self._onwards.put_nowait(bytes(self._message_bytes))
        returned = self._onwards if self._num_started else self._back
        await asyncio.gather(self._read(following[0], returned), self._write(self._onwards, following[1]))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take messages from the machine before."""
        onwards = self._back if self._next is None else self._onwards
        await asyncio.gather(self._read(reader, onwards), self._write(self._back, writer))

    async def _read(self, reader: asyncio.StreamReader, to: asyncio.Queue[bytes]) -> None:
        while True:
            to.put_nowait(await reader.readexactly(self._message_bytes))
            self.received += self._message_bytes

    async def _write(self, waiting: asyncio.Queue[bytes], writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(await waiting.get())
            await writer.drain()


async def listen(transport: str, ip: str, following: str, serve: Serve) -> tuple[str, Stream | None, int]:
    """Listen for the machine before, and connect to the next one.

    Returns:
        the own address, the stream to the next machine, and the process that has the sockets
    """
    if transport == "tcp":
        server = await asyncio.start_server(serve, ip, 0)
        stream = await asyncio.open_connection(*following.split(":")) if following else None
        return f"{ip}:{server.sockets[0].getsockname()[1]}", stream, os.getpid()
    p2p = await P2P.create(initial_peers=[following] if following else [], host_maddrs=[f"/ip4/{ip}/tcp/0"])
    await p2p.add_binary_stream_handler(PROTOCOL, lambda _, reader, writer: serve(reader, writer))
    stream = None
    if following:
        peer_id = PeerID.from_base58(following.rpartition("/")[2])
        _, *ends = await p2p.call_binary_stream_handler(peer_id, PROTOCOL)
        stream = ends[0], ends[1]
    return str((await p2p.get_visible_maddrs())[0]), stream, p2p._child.pid


async def run_machine(way: str, ip: str, message_bytes: int, num_started: int, following: str) -> None:
    """Be one machine of the chain: print where it listens, and then what it receives, in bytes per second."""
    transport, _, paced = way.partition("/")
    link = Link(message_bytes, num_started)
    address, stream, pid = await listen(transport, ip, following, link.serve)
    works = [] if stream is None else [asyncio.create_task(link.start(stream))]
    if paced:
        works.append(asyncio.create_task(pace_connections(pid)))
    print(address, flush=True)
    await asyncio.sleep(WARM_UP_S)
    before, begun = link.received, time.monotonic()
    await asyncio.sleep(MEASURED_S)
    print((link.received - before) / (time.monotonic() - begun), flush=True)
    await asyncio.gather(*works)  # until it is killed: the others have begun a moment later


def carried_shares(way: str, links: LinkOptions, num_machines: int, message_bytes: int, in_flight: int) -> list[float]:
    """Measure a chain for a minute. Returns the share of its link that each machine receives."""
    with box(num_machines, links) as network:
        running: list[subprocess.Popen[str]] = []
        address = ""
        try:
            for number in reversed(range(num_machines)):
                num_started = 0 if number else in_flight
                running.append(_start(network.machines[number], way, message_bytes, num_started, address))
                address = _line(running[-1])
            return [float(_line(process)) / links.bytes_per_s for process in reversed(running)]
        finally:
            for process in running:
                process.kill()
                process.wait()


def _start(on: Machine, way: str, message_bytes: int, num_started: int, following: str) -> subprocess.Popen[str]:
    words = [
        str(Path(__file__)),
        "--machine",
        on.namespace,
        way,
        on.ip,
        str(message_bytes),
        str(num_started),
        following,
    ]
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return line.strip()
    raise RuntimeError("a machine of the chain has ended: its traceback says why")


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--machine"]:
        namespace, way, ip, message_bytes, num_started, following = sys.argv[2:]
        enter_namespace(namespace)
        asyncio.run(run_machine(way, ip, int(message_bytes), int(num_started), following))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["tcp", "tcp/paced", "libp2p", "libp2p/paced"])
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--message-bytes", type=int, default=133_000)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--bytes-per-s", type=float, default=710e3)
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    print(f"{machine()}, commit {commit()}, {vars(options)}", flush=True)
    links = LinkOptions(latency_s=0.1, jitter_s=0.05, bytes_per_s=options.bytes_per_s)
    for _ in range(options.repeat):
        for way in options.ways:
            shares = carried_shares(way, links, options.machines, options.message_bytes, options.in_flight)
            print(f"{way}: {' '.join(f'{share:.2f}' for share in shares)}", flush=True)


if __name__ == "__main__":
    main()
