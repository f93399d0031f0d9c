"""How much of a lossy link do TCP and QUIC carry between two daemons of libp2p, and what CPU time do they take?

Two machines in a box of links (links.py), each with a daemon as hivemind starts it. One sends a stream of zeros to the
other for some seconds, over a connection by TCP and by QUIC in turn. Counted are the bytes that have arrived in the
second half of that time, when the congestion window has grown; the CPU time is both daemons', for each megabyte. Needs
root and iproute2.

    python benchmarks/transports.py --mbit 50 --latency-ms 50 --loss 0 0.001 0.01
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr
from links import LinkOptions, Machine, box, enter_namespace

PORT = 31338
FORMS = {"tcp": "/ip4/{}/tcp/31338", "quic": "/ip4/{}/udp/31338/quic-v1"}
PIECE = bytes(1 << 16)


async def node(ip: str) -> None:
    """Be one machine: serve a sink, and answer the questions that the parent writes, one JSON line each."""
    p2p = await P2P.create(
        host_maddrs=[form.format(ip) for form in FORMS.values()], auto_nat=False, nat_port_map=False, use_relay=False
    )
    received = 0

    async def sink(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        while piece := await reader.read(len(PIECE)):
            received += len(piece)
        writer.close()

    async def send(writer: asyncio.StreamWriter, seconds: float) -> None:
        with anyio.fail_after(seconds):
            while True:
                writer.write(PIECE)
                await writer.drain()

    await p2p.add_binary_stream_handler("sink", sink)
    print(json.dumps(p2p.peer_id.to_base58()), flush=True)
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    daemon = psutil.Process(p2p._child.pid)
    while line := await questions.readline():
        match json.loads(line):
            case ["connect", peer, address]:
                await p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(address)])
            case ["send", peer, seconds]:
                _, _, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(peer), "sink")
                try:
                    await send(writer, seconds)
                except TimeoutError:
                    writer.close()
        times = daemon.cpu_times()
        print(json.dumps([received, times.user + times.system]), flush=True)
    await p2p.shutdown()


class Node:
    """A machine of the box with its daemon, as the measurement sees it."""

    def __init__(self, machine: Machine):
        self.ip = machine.ip
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--node", machine.namespace, machine.ip],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.peer_id = self.answer()

    def ask(self, *question: Any) -> None:
        """Ask something; `answer` waits for its end."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The node's next answer."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


async def measure(form: str, options: LinkOptions, seconds: float, seed: int) -> tuple[float, float]:
    """Send by one transport.

    Returns:
        bytes a second in the second half of the time, CPU seconds of both daemons for each megabyte
    """
    with box(2, options, seed) as network:
        sender, receiver = map(Node, network.machines)
        try:
            sender.ask("connect", receiver.peer_id, FORMS[form].format(receiver.ip))
            _, cpu_s = sender.answer()
            sender.ask("send", receiver.peer_id, seconds)
            counts = []
            for _ in range(2):
                await asyncio.sleep(seconds / 2)
                receiver.ask("count")
                counts.append(receiver.answer())
            (half, _), (whole, receiver_cpu_s) = counts
            _, sender_cpu_s = sender.answer()
            return (whole - half) / (seconds / 2), (sender_cpu_s - cpu_s + receiver_cpu_s) / (whole / 1e6)
        finally:
            sender.close()
            receiver.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=50.0)
    parser.add_argument("--latency-ms", type=float, default=50.0, help="one way")
    parser.add_argument("--jitter-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, nargs="+", default=[0.0, 0.001, 0.01])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--node", nargs=2, metavar=("NAMESPACE", "IP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        enter_namespace(options.node[0])
        asyncio.run(node(options.node[1]))
        return
    print(f"{options.mbit:g} Mb/s, {options.latency_ms:g} +- {options.jitter_ms:g} ms one way; medians")
    for loss in options.loss:
        links = LinkOptions(options.latency_ms / 1e3, options.jitter_ms / 1e3, options.mbit * 1e6 / 8, loss)
        found: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
        for seed in range(options.repetitions):
            for form in FORMS:
                found[form].append(asyncio.run(measure(form, links, options.seconds, seed)))
        for form, results in found.items():
            rates = sorted(rate * 8 / 1e6 for rate, _ in results)
            cpu = statistics.median(cpu for _, cpu in results)
            print(
                f"loss {loss:.1%} {form:4}: {statistics.median(rates):6.2f} Mb/s ({rates[0]:.2f} to {rates[-1]:.2f}), "
                f"{cpu * 1e3:.1f} CPU ms/MB",
                flush=True,
            )


if __name__ == "__main__":
    if not Path("/dev/net/tun").exists():
        sys.exit("transports.py needs /dev/net/tun")
    main()
