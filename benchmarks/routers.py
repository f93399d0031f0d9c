"""Which pairs of routers let two machines reach each other, by which way, after how long, and how fast?

For each pair of kinds (tests/integration/networks.py), two machines are each behind a router of its own, and one public
member beside them knows both. Each runs a node as a peer has it, and the first one looks for a way to the second. Then
it sends for some seconds. Printed is a table: the way, the seconds until there is one, and megabits a second over it,
beside those to the public machine. The links of namespaces are as fast as the machine: compare ways, not numbers. Needs
root, ip and iptables; and miniupnpd and nft for routers that forward ports when asked.

    python benchmarks/routers.py --kinds full symmetric
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "integration"))

from networks import KINDS, PREFIX, internet
from programs import Processes

from coordinator.watch.observer import open_node
from swarm_peer.runtime.network.bootstrap import Entrance

PORT = 31338
# A carried connection has so long to give way to a direct one.
IMPROVE_S = 25.0
PIECE = bytes(1 << 16)
# A router that forwards ports when asked gives each connection another port as well: the hardest one.
UPNP = "upnp"


async def node(folder: Path, relay_mbps: float, initial_peers: tuple[str, ...]) -> None:
    """Be one machine: answer the questions that the parent writes, one JSON line each."""
    known: dict[str, list[str]] = {}
    dialable: dict[str, bool] = {}
    async with open_node(
        folder / "identity",
        Entrance(initial_peers),
        (f"/ip4/0.0.0.0/tcp/{PORT}",),
        map_port=True,
        relay_mbps=relay_mbps,
    ) as dht:
        dht.dial_by(lambda peer: known.get(peer, []), lambda peer: dialable.get(peer), lambda peer: False)

        async def sink(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            num_bytes = 0
            while not (piece := await reader.read(len(PIECE))).endswith(b"?"):
                num_bytes += len(piece)
            writer.write(num_bytes.to_bytes(8, "big"))
            await reader.read()
            writer.close()

        await dht.p2p.add_binary_stream_handler("sink", sink)
        questions = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
        print(json.dumps([dht.identity.peer_id, dht.addresses]), flush=True)
        while line := await questions.readline():
            answer: Any = None
            match json.loads(line):
                case ["know", peer, addresses, is_dialable]:
                    known[peer], dialable[peer] = addresses, is_dialable
                case ["told"]:
                    answer = [dht.is_reachable, dht.addresses]
                case ["connect", peer]:
                    begun_s = time.monotonic()
                    await dht.p2p.dial(peer)
                    took_s, connections = time.monotonic() - begun_s, (await dht.p2p.connections()).get(peer, [])
                    await anyio.sleep(1.0)  # a relay is known once the daemon has made sure who is there
                    answer = [took_s, connections, dht.relay_to(peer)]
                case ["improve", peer, seconds]:
                    begun_s = time.monotonic()
                    with anyio.move_on_after(seconds):
                        while dht.relay_to(peer) or peer not in await dht.p2p.connections():  # noqa: ASYNC110
                            await anyio.sleep(0.1)
                        answer = time.monotonic() - begun_s
                case ["send", peer, seconds]:
                    begun_s = time.monotonic()
                    reader, writer = await dht.p2p.open_stream(peer, "sink")
                    with anyio.move_on_after(seconds):
                        while True:
                            writer.write(PIECE)
                            await writer.drain()
                    writer.write(b"?")
                    num_bytes = int.from_bytes(await reader.readexactly(8), "big")
                    writer.close()
                    answer = num_bytes * 8 / 1e6 / (time.monotonic() - begun_s)
            print(json.dumps(answer), flush=True)


class Node:
    """A machine with a node, as the measurement sees it."""

    def __init__(self, machine: str, folder: Path, relay_mbps: float, initial_peers: tuple[str, ...] = ()):
        folder.mkdir()
        command = [sys.executable, __file__, "--node", str(folder), str(relay_mbps), *initial_peers]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", PREFIX + machine, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.peer_id, self.addresses = self._answer()

    def ask(self, *question: Any) -> Any:
        """Ask something, and wait for the answer."""
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def measure(kinds: tuple[str, str], relay_mbps: float, seconds: float, folder: Path) -> str:
    """Try one pair; returns its row of the table."""
    nodes: list[Node] = []
    processes = Processes(folder)
    with internet() as network:
        network.add_public("public")
        try:
            nodes.append(Node("public", folder / "public", relay_mbps))
            there = tuple(nodes[0].addresses)
            for name, kind in zip(("ann", "bob"), kinds, strict=True):
                network.add_home(name, "symmetric" if kind == UPNP else kind)
                if kind == UPNP:
                    network.start_upnp(name, processes, folder)
                nodes.append(Node(name, folder / name, relay_mbps, there))
            _, ann, bob = nodes
            # Peers announce themselves; here the parent tells, once they have been told by others.
            until_s = time.monotonic() + (60 if UPNP in kinds else 20)
            while time.monotonic() < until_s and None in (told := [each.ask("told")[0] for each in (ann, bob)]):
                time.sleep(0.5)
            while UPNP in kinds and time.monotonic() < until_s and True not in told:
                time.sleep(0.5)
                told = [each.ask("told")[0] for each in (ann, bob)]
            for one, other in ((ann, bob), (bob, ann)):
                is_dialable, addresses = other.ask("told")
                one.ask("know", other.peer_id, addresses, is_dialable)
            took_s, connections, relay = ann.ask("connect", bob.peer_id)
            direct = ann.ask("send", nodes[0].peer_id, seconds)
            if not connections:
                return f"| {kinds[0]} | {kinds[1]} | none | | | {direct:.0f} |"
            way = "carried" if relay else "direct"
            if relay and (waited_s := ann.ask("improve", bob.peer_id, IMPROVE_S)) is not None:
                way += f", then direct after {waited_s + 1:.0f} s"
            rate = ann.ask("send", bob.peer_id, seconds)
            return f"| {kinds[0]} | {kinds[1]} | {way} | {took_s:.2f} | {rate:.0f} | {direct:.0f} |"
        finally:
            for each in reversed(nodes):
                each.close()
            processes.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, UPNP], choices=[*KINDS, UPNP])
    parser.add_argument("--relay-mbps", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--node", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        folder, relay_mbps, *initial_peers = options.node
        asyncio.run(node(Path(folder), float(relay_mbps), tuple(initial_peers)))
        return
    print("| one router | the other | way | seconds | Mb/s | Mb/s to the public machine |\n|---|---|---|---|---|---|")
    for kinds in itertools.combinations_with_replacement(options.kinds, 2):
        with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
            print(measure(kinds, options.relay_mbps, options.seconds, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
