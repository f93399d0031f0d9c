"""What can somebody without an invite do to a run? Records to store, idle streams and calls of all kinds, side by side.

A swarm of 2 stages x 2 peers with a tiny model and devices that sleep, as processes over real libp2p on loopback. The
stranger is a process of its own, which knows the peers' addresses and their pipeline's tensors, and has no pass. It

* asks each node to store records, ten in a request, and to answer pings and searches, at a stated rate;
* opens streams of the swarm's protocol, under several identities, and leaves them idle;
* opens others on which it shows a pass that it has made itself, and sends calls.

The coordinator serves no streams of this protocol, so those are opened at the peers. `held_at_once` is how many were
open at the end of the opening, `held_at_end` how many at the end of the phase.

Phases without it and with it follow each other. `rate` is samples per second with it over those without it; `memory_mb`
is how much more all peers, their daemons and the coordinator hold at the end of an attack than before it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))

import anyio
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from processes import adopt_orphans, descendants
from simulation_check import counted
from swarm import LiveSwarm, SwarmStopped, forked_peer, run_swarm, tiny_manifest

from swarm_peer.config import RunManifest
from swarm_peer.runtime.network.record_validator import key_id_of
from swarm_peer.wire.frames import Frame, FrameType
from swarm_peer.wire.messages import PROTOCOL, Call
from swarm_peer.wire.records import end_key, progress_key, stage_key

PEERS_BY_STAGE = (2, 2)
SAMPLE_S = 0.5
RECORDS_PER_REQUEST = 10
WARM_UP_STEPS = 3
# Each call's frame carries a tensor of so many bytes.
CALL_BYTES = 4096


FIGURES = ("requests", "refused", "stored", "idle_streams", "held_at_once", "held_at_end", "calls", "answered")


class Stranger:
    """Attacks the nodes at some addresses until it is ended; prints what it has done."""

    def __init__(
        self,
        addresses: list[str],
        manifest_hash: str,
        *,
        records: int,
        streams: int,
        identities: int,
        seconds: float,
    ):
        self._addresses = addresses
        self._keys = [stage_key(manifest_hash, 0), progress_key(manifest_hash), end_key(addresses[0].split("/")[-1])]
        self._records = records
        self._streams = streams
        self._identities = identities
        self._seconds = seconds
        self._held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.done = dict.fromkeys(FIGURES, 0)

    async def run(self) -> None:
        """Attack."""
        # hivemind's own client, as anybody has it.
        clients = [
            await P2P.create(initial_peers=self._addresses, nat_port_map=False, auto_nat=False)
            for _ in range(self._identities)
        ]
        callees = [PeerID.from_base58(address.rpartition("/")[2]) for address in self._addresses]
        try:
            with anyio.move_on_after(self._seconds):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._store, clients[0], callees)
                    tasks.start_soon(self._idle, clients, callees)
                    tasks.start_soon(self._call, clients[0], callees)
        finally:
            self.done["held_at_end"] = self._num_held()
            print(json.dumps(self.done))
            with anyio.CancelScope(shield=True):
                for client in clients:
                    await client.shutdown()

    async def _store(self, p2p: P2P, callees: list[PeerID]) -> None:
        requests = self._records // RECORDS_PER_REQUEST
        for number in range(requests):
            request = dht_pb2.StoreRequest(
                keys=[key_id_of(random.choice(self._keys)) for _ in range(RECORDS_PER_REQUEST)],
                subkeys=[MSGPackSerializer.dumps(f"stranger{number}.{i}") for i in range(RECORDS_PER_REQUEST)],
                values=[MSGPackSerializer.dumps([random.randbytes(600), b""]) for _ in range(RECORDS_PER_REQUEST)],
                expiration_time=[get_dht_time() + 60] * RECORDS_PER_REQUEST,
                in_cache=[False] * RECORDS_PER_REQUEST,
            )
            request.auth.client_access_token.public_key = random.randbytes(400)
            self.done["requests"] += 1
            try:
                stub = DHTProtocol.get_stub(p2p, callees[number % len(callees)])
                self.done["stored"] += sum((await stub.rpc_store(request)).store_ok)
            except Exception:  # hivemind raises errors of many types
                self.done["refused"] += 1
            await anyio.sleep(self._seconds / requests / 2)

    async def _idle(self, clients: list[P2P], callees: list[PeerID]) -> None:
        """Open streams until there are enough. A peer that refuses one is asked no more under that identity."""
        pairs = list(itertools.product(clients, callees))
        while pairs and self.done["idle_streams"] < self._streams:
            client, callee = pair = pairs.pop(0)
            with suppress(Exception):
                _, reader, writer = await client.call_binary_stream_handler(callee, PROTOCOL)
                self._held.append((reader, writer))
                self.done["idle_streams"] += 1
                pairs.append(pair)
        self.done["held_at_once"] = self._num_held()
        await anyio.sleep_forever()

    def _num_held(self) -> int:
        return sum(not reader.at_eof() for reader, _ in self._held)

    async def _call(self, p2p: P2P, callees: list[PeerID]) -> None:
        ops = operations(Call)
        for number in itertools.count():
            with suppress(Exception), anyio.move_on_after(2.0):
                _, reader, writer = await p2p.call_binary_stream_handler(callees[number % len(callees)], PROTOCOL)
                hello = Frame(FrameType.HELLO, 0, "", {"pass": random.randbytes(400), "revocations": b""})
                body = {"round_number": 1, "stage": 1, "num_samples": 8}
                tensor = (memoryview(random.randbytes(CALL_BYTES)),)
                call = Frame(FrameType.CALL, 0, random.choice(ops), body, tensor)
                writer.write(hello.head() + call.head() + bytes(tensor[0]))
                self.done["calls"] += 1
                answer = await reader.read()
                self.done["answered"] += bool(answer) and b"not_admitted" not in answer
                writer.close()
            await anyio.sleep(0.02)


def operations(kind: type[Call]) -> list[str]:
    """The operations of a call, and of all that derive from it."""
    own = [kind.model_fields["op"].default] if "op" in kind.model_fields else []
    return own + [op for derived in kind.__subclasses__() for op in operations(derived)]


def memory_bytes(pids: Sequence[int]) -> int:
    """Memory of some processes, with the pages that they share counted once."""
    total = 0
    for pid in pids:
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return total


class StrangerMeasurement:
    """The script: phases without and with a stranger."""

    def __init__(self, *, pairs: int, seconds: float, **numbers: int):
        self._pairs = pairs
        self._seconds = seconds
        self._options = ["--seconds", str(seconds)]
        for name, number in numbers.items():
            self._options += [f"--{name}", str(number)]
        self.phases: list[dict[str, Any]] = []

    async def __call__(self, swarm: LiveSwarm) -> None:
        for stage, count in enumerate(PEERS_BY_STAGE):
            for number in range(count):
                swarm.start(stage, f"{stage}.{number}", f"slow:1:{SAMPLE_S}")
        await swarm.until(lambda: swarm.optimizer_step >= WARM_UP_STEPS, "the warm-up", 300)
        for _ in range(self._pairs):
            await self._phase(swarm, None)
            await self._phase(swarm, [*swarm.dht.addresses, *swarm.service._directory.addresses()])
        raise SwarmStopped

    async def _phase(self, swarm: LiveSwarm, addresses: list[str] | None) -> None:
        phase: dict[str, Any] = {"begun": time.time(), "attacked": addresses is not None}
        pids = [os.getpid(), *descendants()]
        before = memory_bytes(pids)
        if addresses is None:
            await anyio.sleep(self._seconds)
        else:
            attack = [sys.executable, __file__, "--attack", *addresses, "--manifest", swarm.service.manifest.hash]
            async with await anyio.open_process([*attack, *self._options], stderr=None) as process:
                await anyio.sleep(self._seconds)
                phase["ended"] = time.time()
                phase["memory_mb"] = (memory_bytes(pids) - before) / 2**20
                assert process.stdout is not None
                phase["stranger"] = json.loads(b"".join([part async for part in process.stdout]).splitlines()[-1])
        phase.setdefault("ended", time.time())
        self.phases.append(phase)


def summarise(folder: Path, phases: list[dict[str, Any]]) -> dict[str, Any]:
    """Samples per second of the phases, and what the stranger has reached."""
    gradients = [gradient for entries in counted(folder).values() for gradient in entries]

    def rate(phase: dict[str, Any]) -> float:
        inside = [size for moment, size in gradients if phase["begun"] <= moment < phase["ended"]]
        return float(sum(inside) / (phase["ended"] - phase["begun"]))

    quiet = mean(rate(phase) for phase in phases if not phase["attacked"])
    attacked = mean(rate(phase) for phase in phases if phase["attacked"])
    return {
        "samples_per_s": [round(quiet, 2), round(attacked, 2)],
        "rate": round(attacked / quiet, 3),
        "by_phase": [round(rate(phase), 2) for phase in phases],
        "memory_mb": [round(phase["memory_mb"]) for phase in phases if phase["attacked"]],
        "stranger": [phase["stranger"] for phase in phases if phase["attacked"]],
    }


def make_manifest() -> RunManifest:
    """A run by invitation whose devices sleep."""
    training = {"steps": 1_000_000, "global_batch_size": 48, "microbatch_size": 2, "validation_every": 0}
    manifest: RunManifest = tiny_manifest(
        name="strangers",
        training=training,
        recovery={"snapshot_every": 1000},
        limits={"announcement_s": 30},  # as runs have it by default; tests have less
    )
    return manifest


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="phases without it, each followed by one with it")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--records", type=int, default=10_000, help="that it wants stored in a phase")
    parser.add_argument("--streams", type=int, default=600, help="that it leaves idle")
    parser.add_argument("--identities", type=int, default=8, help="under which it opens them")
    parser.add_argument("--attack", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--manifest", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = {name: getattr(options, name) for name in ("records", "streams", "identities")}
    if options.attack:
        anyio.run(Stranger(options.attack, options.manifest, **numbers, seconds=options.seconds).run)
        return
    measurement = StrangerMeasurement(pairs=options.pairs, seconds=options.seconds, **numbers)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="swarm-") as name:
        timeout_s = 400 + 3 * options.pairs * options.seconds
        run_swarm(
            make_manifest(), [0] * len(PEERS_BY_STAGE), Path(name), timeout_s, script=measurement, launch=forked_peer
        )
        print(json.dumps(summarise(Path(name), measurement.phases)))


if __name__ == "__main__":
    main()
