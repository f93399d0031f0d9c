"""What does an averaging round cost the event loop of a member? Seconds, CPU seconds, and how late timers fire.

Each member is a process of its own, with the averager, transport and libp2p daemon that peers have, over loopback. Its
compute thread is idle. A task sleeps for TIMER_S again and again and notes how much later it wakes up: first while
nothing happens, then during averaging rounds. Then the same processes average as many values, and as many bytes, by
torch's all-reduce over gloo. The machine has to be quiet: what other programs take counts, too.

With `--mbps`, which needs Linux, root and iproute2, two members have a network namespace each, and a link of that rate
in each direction between them (the kernel's token bucket).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import anyio
import torch
from hivemind.p2p import P2P
from links import enter_namespace
from torch import distributed
from torch._C._distributed_c10d import FileStore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from contexts import dispatcher, make_context, unparsed

from swarm_peer.codecs import find_codec
from swarm_peer.config import AveragingSection
from swarm_peer.runtime.host.machine import SystemClock
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import run_loop, spare_imports
from swarm_peer.runtime.network.p2p_transport import P2PTransport
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.step.averaging import GradientAverager

HASH = "m" * 32
TIMER_S = 0.005
# Layers of a large model have some millions of values each.
TENSOR_VALUES = 4_000_000
MAX_PAYLOAD_BYTES = 2**24


@dataclass(frozen=True)
class Setting:
    """A measurement.

    Attributes:
        idle_s: how long timers are watched while nothing happens
    """

    members: int
    parameters: int
    rounds: int
    all_reduce: str
    compression: str
    idle_s: float
    mbps: float

    def shapes(self) -> list[torch.Size]:
        """Shapes of the gradients."""
        full, rest = divmod(self.parameters, TENSOR_VALUES)
        return [torch.Size((size,)) for size in [TENSOR_VALUES] * full + [rest] * (rest > 0)]


@dataclass
class Measured:
    """The figures of one member. Lateness is in seconds."""

    idle: list[float] = field(default_factory=list)
    in_rounds: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    round_cpu_s: list[float] = field(default_factory=list)
    gloo_values_s: list[float] = field(default_factory=list)
    gloo_bytes_s: list[float] = field(default_factory=list)


async def watch_timers(late_s: list[float]) -> None:
    """Note how late a timer fires, again and again, until cancelled."""
    while True:
        due = time.perf_counter() + TIMER_S
        await anyio.sleep(TIMER_S)
        late_s.append(time.perf_counter() - due)


@contextmanager
def linked(mbps: float) -> Iterator[None]:
    """Two network namespaces with a link between them, while the context is open; none for a rate of 0."""
    if not mbps:
        yield
        return
    names = [Path(place_of(number)[0]).name for number in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        for number, name in enumerate(names):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{place_of(number)[1]}/24", "dev", "link0")
            _ip("-n", name, "link", "set", "link0", "up")
            limit = f"rate {mbps}mbit burst 256k latency 100ms"
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "link0", "root", "tbf", *limit.split())
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def place_of(number: int) -> tuple[str, str]:
    """The network namespace of a member that has one, and its address in there."""
    return f"/run/netns/averaging{number}", f"10.77.0.{number + 1}"


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def member(setting: Setting, number: int, parent: Connection, earlier: Sequence[str]) -> None:
    """One member's process."""
    torch.set_num_threads(1)
    namespace, host = place_of(number)
    if setting.mbps:
        enter_namespace(namespace)
    measured = Measured()
    spare_imports()
    run_loop(_take_part, setting, host if setting.mbps else "127.0.0.1", measured, parent, earlier)
    os.environ["GLOO_SOCKET_IFNAME"] = "link0" if setting.mbps else "lo"
    store = FileStore(parent.recv(), setting.members)
    distributed.init_process_group("gloo", store=store, rank=number, world_size=setting.members)
    num_bytes = find_codec(setting.compression).num_bytes(setting.parameters)
    for into, num_values in ((measured.gloo_values_s, setting.parameters), (measured.gloo_bytes_s, num_bytes // 4)):
        values = torch.zeros(num_values)
        distributed.all_reduce(values)
        for _ in range(setting.rounds):
            distributed.barrier()
            begun = time.perf_counter()
            distributed.all_reduce(values)
            into.append(time.perf_counter() - begun)
    distributed.destroy_process_group()
    parent.send(measured)


async def _take_part(
    setting: Setting, host: str, measured: Measured, parent: Connection, earlier: Sequence[str]
) -> None:
    async with _averager(setting, host, parent, earlier) as (averager, me):
        everybody = await anyio.to_thread.run_sync(parent.recv)
        shares = {peer_id: 1 + number for number, peer_id in enumerate(everybody)}
        generator = torch.Generator().manual_seed(everybody.index(me))
        gradients = [torch.randn(shape, generator=generator) for shape in setting.shapes()]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_timers, measured.idle)
            await anyio.sleep(setting.idle_s)
            tasks.cancel_scope.cancel()
        for round_number in range(-1, setting.rounds):  # the first one warms up
            parent.send("ready")
            await anyio.to_thread.run_sync(parent.recv)
            begun, cpu_s, late_s = time.perf_counter(), time.process_time(), list[float]()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch_timers, late_s)
                averages = await averager.average(str(round_number), gradients, shares)
                tasks.cancel_scope.cancel()
            assert all(bool(average.any()) for average in averages)
            if round_number >= 0:
                measured.in_rounds += late_s
                measured.round_s.append(time.perf_counter() - begun)
                measured.round_cpu_s.append(time.process_time() - cpu_s)
        parent.send("averaged")
        await anyio.to_thread.run_sync(parent.recv)  # the others may not have their last averages yet


@asynccontextmanager
async def _averager(
    setting: Setting, host: str, parent: Connection, earlier: Sequence[str]
) -> AsyncIterator[tuple[GradientAverager, str]]:
    """An averager over libp2p that has told the parent who and where it is."""
    p2p = await P2P.create(
        initial_peers=list(earlier) or None,
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        startup_timeout=30,
    )
    averaging = {"all_reduce": setting.all_reduce, "compression": setting.compression, "round_timeout_s": 300}
    section = AveragingSection.model_validate(averaging)
    resolved = unparsed(HASH)
    resolved = replace(resolved, manifest=resolved.manifest.model_copy(update={"averaging": section}))
    everybody = PassChecker(None, clock=SystemClock())
    try:
        async with P2PTransport.open(
            p2p, passes=everybody, max_payload_bytes=MAX_PAYLOAD_BYTES, metrics=PeerMetrics()
        ) as transport:
            averager = GradientAverager(
                context=make_context(resolved), stage=0, shapes=setting.shapes(), transport=transport
            )
            await transport.serve(dispatcher(HASH, 0, averager.calls))
            parent.send((transport.peer_id, [str(address) for address in await p2p.get_visible_maddrs()]))
            yield averager, transport.peer_id
    finally:
        await p2p.shutdown()


def measure(setting: Setting) -> list[Measured]:
    """Start the members one by one, have them average, and collect what they have measured."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[Any] = []
    ids: list[str] = []
    addresses: list[str] = []
    for number in range(setting.members):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=member, args=(setting, number, theirs, tuple(addresses)))
        process.start()
        theirs.close()  # so that a member that dies ends this program, too
        peer_id, visible = ours.recv()
        pipes.append(ours)
        processes.append(process)
        ids.append(peer_id)
        addresses += visible
    for pipe in pipes:
        pipe.send(ids)
    for _ in range(setting.rounds + 1):
        for pipe in pipes:
            pipe.recv()  # it is ready
        for pipe in pipes:
            pipe.send("go")
    for pipe in pipes:
        pipe.recv()  # it has all its averages
    with tempfile.TemporaryDirectory() as folder:
        for pipe in pipes:
            pipe.send("done")
            pipe.send(f"{folder}/store")
        found: list[Measured] = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return found


def main() -> None:
    """Parse the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=80e6, help="values that each member brings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compression", default="none", help="codec of the parts and averages")
    parser.add_argument("--all-reduce", default="streamed", choices=["hivemind", "streamed"])
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--mbps", type=float, default=0.0, help="rate of the link between two members; 0 for loopback")
    options = parser.parse_args()
    setting = Setting(
        members=options.members,
        parameters=int(options.parameters),
        rounds=options.rounds,
        all_reduce=options.all_reduce,
        compression=options.compression,
        idle_s=options.idle_s,
        mbps=options.mbps,
    )
    with linked(setting.mbps):
        found = measure(setting)
    round_s = [s for each in found for s in each.round_s]
    print(f"a round: {mean(round_s):.2f} s, best {min(round_s):.2f} s, ", end="")
    print(f"{mean(s for each in found for s in each.round_cpu_s):.2f} CPU s a member, without its daemon")
    share = (setting.members - 1) / setting.members
    sent_bytes = 2 * share * find_codec(setting.compression).num_bytes(setting.parameters)
    print(f"{sent_bytes / 1e6:.0f} MB each way", end="")
    if setting.mbps:
        print(f": {sent_bytes * 8e-6 / mean(round_s) / setting.mbps:.2f} of the link", end="")
    for name, gloo_s in (
        ("as many values in fp32", [s for each in found for s in each.gloo_values_s]),
        ("as many bytes", [s for each in found for s in each.gloo_bytes_s]),
    ):
        print(f"; gloo, {name}: {mean(gloo_s):.2f} s, best {min(gloo_s):.2f} s", end="")
    print()
    print("| timers, ms late | median | 99 % | most | number |")
    print("|---|---|---|---|---|")
    for name in ("idle", "in_rounds"):
        late_ms = [1000 * late_s for each in found for late_s in getattr(each, name)]
        print(f"| {name} | {median(late_ms):.1f} | {quantiles(late_ms, n=100)[98]:.1f} | ", end="")
        print(f"{max(late_ms):.1f} | {len(late_ms)} |")


if __name__ == "__main__":
    main()
