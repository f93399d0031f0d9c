"""The kinds of faults, each a function. To add a kind, write one more: its name is the kind's, its weight how often.

A fault chooses its victims when it strikes, by a generator of its own: which other faults there are does not matter.
Each tells `tube.struck` when it has struck; one that finds no victim does nothing.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from network import Tampering

from swarm_peer.policy.owner import Pause, Reason
from swarm_peer.policy.view import PeerState

if TYPE_CHECKING:
    from hosts import Host
    from tube import Tube

Strike = Callable[["Tube", random.Random], Awaitable[None]]

KINDS: dict[str, tuple[Strike, float]] = {}
# Calls whose replies are lost, delayed or garbled, and which come twice.
OPS = [
    "microbatch",
    "microbatch",
    "agree",
    "agree",
    "agree",
    "average_part",
    "average_part",
    "give",
    "state_index",
    "state_chunk",
    None,
]


def kind(weight: float) -> Callable[[Strike], Strike]:
    """Register a kind of fault, which is drawn in proportion to its weight."""

    def register(strike: Strike) -> Strike:
        KINDS[strike.__name__] = strike, weight
        return strike

    return register


@kind(3.0)
async def kill(tube: Tube, rng: random.Random) -> None:
    """SIGKILL of a peer; somebody else, or the same peer, comes some time later."""
    if victim := tube.expendable(rng):
        tube.struck("kill", victim)
        victim.die()
        await tube.come_back(victim, rng)


async def _in_call(tube: Tube, rng: random.Random) -> Host | None:
    """An expendable peer in the middle of a call; None if the next callee is not expendable."""
    op, after = rng.choice(OPS), rng.randrange(12)
    victim = await tube.next_callee(op)
    for _ in range(after):
        await anyio.lowlevel.checkpoint()
    return victim if victim in tube.expendables() else None


@kind(2.0)
async def kill_in_call(tube: Tube, rng: random.Random) -> None:
    """SIGKILL in the middle of a call, some steps of the event loop after it has come."""
    if victim := await _in_call(tube, rng):
        tube.struck("kill_in_call", victim)
        victim.die()
        await tube.come_back(victim, rng)


@kind(0.7)
async def empty_stage(tube: Tube, rng: random.Random) -> None:
    """A stage loses all its peers, nearly at once."""
    stage = rng.randrange(tube.num_stages)
    victims = [host for host in tube.peers() if tube.stage_of(host) == stage]
    if victims and len(tube.peers()) - len(victims) >= tube.num_stages:
        for victim in victims:
            tube.struck("empty_stage", victim)
            tube.gone(victim)
            victim.die()
            await anyio.sleep(rng.choice([0.0, 0.01, 1.0]))
        for victim in victims:
            await tube.come_back(victim, rng)


@kind(0.2)
async def power_cut(tube: Tube, rng: random.Random) -> None:
    """All peers die at the same moment, and standbys, perhaps; they come back one after the other, with empty disks."""
    peers, standbys = tube.peers(), [host for host in tube.coordinators()[1:] if rng.random() < 0.5]
    tube.struck("power_cut", *peers, *standbys)
    for victim in [*peers, *standbys]:
        tube.gone(victim)
        victim.die()
    await anyio.sleep(rng.choice([0.3, 2.0, 10.0, 25.0]))
    for victim in peers:
        tube.start_again(victim, rng)
        await anyio.sleep(rng.choice([0.0, 0.0, 0.5, 5.0]))
    for victim in standbys:
        tube.start_coordinator_again(victim)


@kind(0.7)
async def flap(tube: Tube, rng: random.Random) -> None:
    """A peer dies and is there again within a second, three times in a row."""
    victim = tube.expendable(rng)
    for _ in range(3):
        if victim is None or victim not in tube.expendables():
            return
        tube.struck("flap", victim)
        tube.gone(victim)
        victim.die()
        await anyio.sleep(rng.choice([0.01, 0.2, 1.0]))
        victim = tube.start_again(victim, rng)
        await anyio.sleep(rng.choice([0.2, 1.0, 4.0, 12.0]))


@kind(2.0)
async def sigterm(tube: Tube, rng: random.Random) -> None:
    """A peer is told to leave, and has to be gone soon."""
    if victim := tube.expendable(rng):
        tube.struck("sigterm", victim)
        tube.gone(victim)
        victim.ended.set()
        await anyio.sleep(rng.choice([5.0, 15.0, 40.0]))
        if victim.is_alive and not victim.has_ended:
            victim.die()
        await tube.come_back(victim, rng)


@kind(1.0)
async def pause(tube: Tube, rng: random.Random) -> None:
    """A peer's owner has it pause for a while, perhaps again before it is back."""
    victim, times = tube.expendable(rng), rng.choice([1, 1, 2])
    for _ in range(times):
        if victim is None or victim not in tube.expendables() or victim.parts is None:
            return
        tube.struck("pause", victim)
        tube.gone(victim)
        assert victim.peer is not None
        victim.do(victim.peer._obey_owner, Pause(Reason.COMMAND, "paused by its owner"))
        try:
            await anyio.sleep(rng.choice([0.0, 0.2, 3.0, 12.0, 40.0]))
        finally:  # also where the faults are cut off
            if victim.is_alive and not victim.has_ended:
                tube.gone(victim)
                victim.do(victim.peer._obey_owner, None)
        await anyio.sleep(rng.choice([0.0, 0.2, 1.0, 5.0]))


@kind(1.0)
async def revoke(tube: Tube, rng: random.Random) -> None:
    """The operator revokes a peer, which hears of it at another moment than others do; another comes in its place."""
    if victim := tube.expendable(rng):
        tube.struck("revoke", victim)
        tube.gone(victim)
        tube.revoke(victim)
        await anyio.sleep(rng.choice([3.0, 10.0, 30.0]))
        if len(tube.peers()) < tube.most_peers:
            tube.start_peer(rng)


@kind(1.0)
async def leave_in_doubt(tube: Tube, rng: random.Random) -> None:
    """A peer is told to leave, and does not learn whether another has taken its gradient."""
    if victim := tube.expendable(rng):
        tube.struck("leave_in_doubt", victim)
        await _tamper(tube, rng, "lose", rng.randint(1, 2), op="give")
        tube.gone(victim)
        victim.ended.set()
        await tube.come_back(victim, rng)


@kind(1.5)
async def join(tube: Tube, rng: random.Random) -> None:
    """One peer more."""
    if len(tube.peers()) < tube.most_peers:
        tube.struck("join", tube.start_peer(rng))


@kind(1.0)
async def stall(tube: Tube, rng: random.Random) -> None:
    """A host is halted for a while, and goes on."""
    if victim := tube.any_host(rng):
        tube.struck("stall", victim)
        await tube.stall(victim, rng.choice([0.5, 3.0, 10.0, 25.0]))


@kind(1.5)
async def stall_in_call(tube: Tube, rng: random.Random) -> None:
    """A peer is halted in the middle of a call, some steps of the event loop after it has come; perhaps for good."""
    if victim := await _in_call(tube, rng):
        tube.struck("stall_in_call", victim)
        await tube.stall(victim, rng.choice([2.0, 7.0, 12.0, 20.0]))
        if rng.random() < 0.5 and victim in tube.expendables():
            victim.die()
            await tube.come_back(victim, rng)


@kind(0.7)
async def stall_in_average(tube: Tube, rng: random.Random) -> None:
    """A member is halted in an averaging round until others have given its averages up, and dies before it votes."""
    victim, after = await tube.next_callee("average_part"), rng.randrange(12)
    for _ in range(after):
        await anyio.lowlevel.checkpoint()
    if victim in tube.expendables():
        tube.struck("stall_in_average", victim)
        await tube.stall(victim, rng.uniform(8.0, 14.0))
        if victim in tube.expendables():
            victim.die()
            await tube.come_back(victim, rng)


@kind(0.5)
async def stall_stage(tube: Tube, rng: random.Random) -> None:
    """All peers of a stage are halted, until others may have taken the stage over."""
    stage, seconds = rng.randrange(tube.num_stages), rng.choice([10.0, 20.0, 40.0])
    async with anyio.create_task_group() as tasks:
        for victim in tube.peers():
            if tube.stage_of(victim) == stage:
                tube.struck("stall_stage", victim)
                tasks.start_soon(tube.stall, victim, seconds)


@kind(1.0)
async def slow(tube: Tube, rng: random.Random) -> None:
    """A device is many times slower for a while."""
    if victim := tube.any_peer(rng):
        tube.struck("slow", victim)
        factor = rng.choice([4.0, 10.0])
        victim.device.seconds_per_sample *= factor
        victim.device.step_s *= factor
        try:
            await anyio.sleep(rng.uniform(5.0, 40.0))
        finally:
            victim.device.seconds_per_sample /= factor
            victim.device.step_s /= factor


@kind(1.5)
async def partition(tube: Tube, rng: random.Random) -> None:
    """Some hosts are cut off from the others, perhaps in one direction alone, and the cut heals.

    One in three cuts through all stages: then both parts may train, if each has a peer of every stage.
    """
    hosts = tube.world.alive()
    if len(hosts) < 2:
        return
    inside = rng.sample(hosts, rng.randint(1, max(1, len(hosts) // 2)))
    if cuts_stages := rng.random() < 1 / 3:
        inside = sorted(rng.sample(hosts, len(hosts)), key=lambda host: tube.stage_of(host) or 0)[::2]
    outside = [host for host in hosts if host not in inside]
    direction = rng.choice(["both", "out", "in"])
    pairs = [(a, b) for a in inside for b in outside] if direction != "in" else []
    pairs += [(b, a) for a in inside for b in outside] if direction != "out" else []
    tube.struck("partition", *inside, direction)
    seconds = rng.choice([1.0, 5.0, 15.0, 40.0, 90.0] if cuts_stages else [1.0, 5.0, 15.0, 40.0])
    latest_s = rng.choice([0.0, 0.5 * seconds])
    await tube.block(pairs, seconds, lambda: rng.uniform(0.0, latest_s))


@kind(1.0)
async def cut_link(tube: Tube, rng: random.Random) -> None:
    """Two hosts do not reach each other, though all others reach both."""
    hosts = tube.world.alive()
    if len(hosts) >= 2:
        a, b = rng.sample(hosts, 2)
        tube.struck("cut_link", a, b)
        seconds = rng.choice([2.0, 10.0, 30.0])
        await tube.block([(a, b), (b, a)], seconds, lambda: rng.uniform(0.0, 0.5 * seconds))


@kind(0.5)
async def no_way(tube: Tube, rng: random.Random) -> None:
    """Two peers, mostly of one stage, have no way to each other for so long that one of them gives its place up."""
    if not (a := tube.any_peer(rng)):
        return
    others = [host for host in tube.peers() if host is not a]
    mates = [host for host in others if tube.stage_of(host) == tube.stage_of(a)]
    if others:
        b = rng.choice(mates if mates and rng.random() < 0.7 else others)
        tube.struck("no_way", a, b)
        await tube.block([(a, b), (b, a)], rng.choice([40.0, 90.0]))


@kind(1.0)
async def lag(tube: Tube, rng: random.Random) -> None:
    """What a host sends, or what it is sent, takes seconds longer for a while, to one other or to all."""
    if not (victim := tube.any_host(rng)):
        return
    others = [host for host in tube.world.alive() if host is not victim]
    if others and rng.random() < 0.5:
        others = [rng.choice(others)]
    direction, more_s = rng.choice(["out", "in"]), rng.choice([0.5, 1.5, 3.0])
    pairs = [(victim, other) if direction == "out" else (other, victim) for other in others]
    links = [tube.world.network.link(source, target) for source, target in pairs]
    seconds = rng.choice([5.0, 15.0, 40.0])
    tube.struck("lag", victim, direction, len(links), more_s)
    tube.out_of_sight(victim, seconds)
    for link in links:
        link.latency_s += more_s
    try:
        await anyio.sleep(seconds)
    finally:
        for link in links:
            link.latency_s -= more_s


@kind(2.0)
async def lose_connection(tube: Tube, rng: random.Random) -> None:
    """A connection breaks, with all calls on it, perhaps in both directions; the callee may see that later."""
    connections = [known for known in tube.world.network.open_connections() if known.is_up and known.calls]
    if connections:
        broken = rng.choice(connections)
        tube.struck("lose_connection", broken.caller, broken.callee)
        seen_after_s = rng.choice([0.0, 0.0, 0.5, 5.0, 40.0])
        both = [broken, tube.world.network.opposite(broken)] if rng.random() < 0.5 else [broken]
        for connection in filter(None, both):
            tube.world.network.cut(connection, "connection lost", seen_after_s)


async def _tamper(tube: Tube, rng: random.Random, name: str, times: int, op: str | None = "") -> None:
    # Counted when it strikes.
    tube.world.network.tampering.append(
        Tampering(
            kind=name,
            op=rng.choice(OPS) if op == "" else op,
            to=None,
            times=times,
            seconds=rng.choice([0.05, 0.5, 4.0, 12.0]),
            rng=rng,
        )
    )


@kind(2.5)
async def lose(tube: Tube, rng: random.Random) -> None:
    """Replies are lost, with their connections: the callee has done what it was asked for."""
    await _tamper(tube, rng, "lose", rng.randint(1, 4))


@kind(1.5)
async def delay(tube: Tube, rng: random.Random) -> None:
    """Replies come late, perhaps after their callers have given them up."""
    await _tamper(tube, rng, "delay", rng.randint(1, 4))


@kind(1.0)
async def repeat(tube: Tube, rng: random.Random) -> None:
    """Calls come twice."""
    await _tamper(tube, rng, "repeat", rng.randint(1, 4))


@kind(1.0)
async def garbage(tube: Tube, rng: random.Random) -> None:
    """Replies that can be told to be none."""
    await _tamper(tube, rng, "garbage", rng.randint(1, 3))


@kind(0.7)
async def full_disk(tube: Tube, rng: random.Random) -> None:
    """A peer's disk is full for a while."""
    if victim := tube.any_peer(rng):
        tube.struck("full_disk", victim)
        victim.storage.is_full = True
        await anyio.sleep(rng.uniform(5.0, 40.0))
        victim.storage.is_full = False


@kind(0.5)
async def damage_files(tube: Tube, rng: random.Random) -> None:
    """A snapshot of a peer, or each that it has, reads with a wrong bit from now on."""
    if holders := [host for host in tube.peers() if host.storage.files]:
        victim = rng.choice(holders)
        tube.struck("damage_files", victim)
        victim.storage.has_failed = True
        names = sorted(victim.storage.files)
        for name in names if rng.random() < 0.5 else [rng.choice(names)]:
            data = victim.storage.files[name]
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


@kind(0.7)
async def slow_threads(tube: Tube, rng: random.Random) -> None:
    """A machine swaps, or its disk is slow: what a host does in threads takes seconds, for a while."""
    if victim := tube.any_host(rng):
        tube.struck("slow_threads", victim)
        seconds = rng.uniform(5.0, 40.0)
        tube.out_of_sight(victim, seconds)
        victim.threads.longer_s = rng.choice([0.2, 1.0, 4.0, 12.0])
        await anyio.sleep(seconds)
        victim.threads.longer_s = 0.0


@kind(0.7)
async def unlisted(tube: Tube, rng: random.Random) -> None:
    """The DHT takes nothing from a host, or gives it nothing, for a while in which its calls go well."""
    if (victim := tube.any_host(rng)) and victim.node is not None:
        failing = rng.choice([{"store"}, {"store"}, {"get"}, {"store", "get"}])
        seconds = rng.choice([10.0, 30.0, 60.0, 90.0])
        tube.struck("unlisted", victim, *sorted(failing))
        tube.out_of_sight(victim, seconds)
        victim.node.failing |= failing
        await anyio.sleep(seconds)
        victim.node.failing -= failing


@kind(0.7)
async def shut_in(tube: Tube, rng: random.Random) -> None:
    """Nobody can connect to a host any more, and connections to it break; its own calls to others go well."""
    if victim := tube.any_host(rng):
        seconds = rng.choice([5.0, 15.0, 40.0, 90.0])
        tube.struck("shut_in", victim)
        tube.out_of_sight(victim, seconds)
        victim.refuses = True
        for connection in list(tube.world.network.open_connections()):
            if connection.callee is victim:
                tube.world.network.cut(connection, "connection reset")
        await anyio.sleep(seconds)
        victim.refuses = False


@kind(0.4)
async def silent_store(tube: Tube, rng: random.Random) -> None:
    """The stores of checkpoints answer a part of the requests alone, for a while."""
    tube.struck("silent_store")
    share = rng.choice([0.05, 0.3, 0.9])
    for _, store in tube.stores:
        store.unanswered = share
    await anyio.sleep(rng.uniform(5.0, 40.0))
    for _, store in tube.stores:
        store.unanswered = 0.0


@kind(1.0)
async def kill_coordinator(tube: Tube, rng: random.Random) -> None:
    """SIGKILL of a coordinator; it is started again later."""
    alive = tube.coordinators()
    if alive:
        victim = rng.choice(alive)
        tube.struck("kill_coordinator", victim)
        victim.die()
        await anyio.sleep(rng.uniform(1.0, 40.0))
        tube.start_coordinator_again(victim)


@kind(0.5)
async def decay(tube: Tube, rng: random.Random) -> None:
    """The operator has the decay begin: a run of few steps ends by it, and one of many goes on for long."""
    if tube.resolved.manifest.averaging.mode != "delayed" and tube.coordinators():
        steps = rng.choice([5, 10]) if tube.schedule.finishes else 400
        tube.struck("decay", steps)
        tube.ask_for_decay(steps)


@kind(1.0)
async def out_of_memory(tube: Tube, rng: random.Random) -> None:
    """A device has too little memory for the next passes, perhaps after it has added a gradient."""
    if victim := tube.any_peer(rng):
        victim.device.short_of_memory += rng.choice([1, 2, 5])


@kind(1.5)
async def order(tube: Tube, rng: random.Random) -> None:
    """The coordinator that acts orders a peer to another stage for no reason, be it the last one of its own."""
    victim, coordinators = tube.any_peer(rng), tube.coordinators()
    stage = None if victim is None else tube.stage_of(victim)
    if victim is not None and stage is not None and tube.num_stages > 1 and coordinators:
        to_stage = rng.choice([other for other in range(tube.num_stages) if other != stage])
        for coordinator in coordinators:
            coordinator.order(victim, to_stage)
        tube.struck("order", victim, to_stage)


@kind(0.7)
async def split_coordinators(tube: Tube, rng: random.Random) -> None:
    """Coordinators are cut off from each other, each with some of the peers, until both order peers about."""
    coordinators, peers = tube.coordinators(), tube.peers()
    if len(coordinators) < 2:
        return
    inside = [rng.choice(coordinators), *(peer for peer in peers if rng.random() < 0.5)]
    outside = [host for host in tube.world.alive() if host not in inside]
    tube.struck("split_coordinators", *inside)
    cut_s = rng.uniform(15.0, 40.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tube.block, [pair for a in inside for b in outside for pair in [(a, b), (b, a)]], cut_s)
        await anyio.sleep(cut_s - rng.uniform(0.5, 8.0))
        for coordinator in coordinators:
            for victim in peers:
                if victim.is_alive and rng.random() < 0.5:
                    coordinator.order(victim, rng.randrange(tube.num_stages))


@kind(0.7)
async def skew_clock(tube: Tube, rng: random.Random) -> None:
    """A host's clock is set wrong, as a rule by more than the run tolerates, and set right again."""
    if victim := tube.any_host(rng):
        skew_s, seconds = rng.choice([-3600.0, -60.0, 25.0, 60.0, 3000.0, 3600.0]), rng.uniform(3.0, 40.0)
        tube.struck("skew_clock", victim)
        tube.out_of_sight(victim, seconds)
        victim.clock.skew_s += skew_s
        await anyio.sleep(seconds)
        victim.clock.skew_s -= skew_s


@kind(0.15)
async def end_run(tube: Tube, rng: random.Random) -> None:
    """The operator ends the run in the middle of all this."""
    tube.struck("end_run")
    tube.tell_end()


@kind(0.5)
async def fail_checkpoints(tube: Tube, rng: random.Random) -> None:
    """Checkpoints cannot be written for a while, or each that is written stays half-written."""
    tube.struck("fail_checkpoints")
    tube.checkpoint_failure = rng.choice(["full", "torn"])
    await anyio.sleep(rng.uniform(5.0, 30.0))
    tube.checkpoint_failure = None


@kind(0.5)
async def stranger(tube: Tube, rng: random.Random) -> None:
    """Somebody who has announced nothing sends microbatches and asks for states, in vain."""
    tube.struck("stranger")
    await tube.visit_as_stranger(rng.uniform(5.0, 30.0))


@kind(0.7)
async def unheeded(tube: Tube, rng: random.Random) -> None:
    """What a host is told of rounds and epochs is lost for a while, or what it answers; all else goes well."""
    if victim := tube.any_host(rng):
        name = rng.choice(["lose", "delay"])
        tampering = Tampering(
            kind=name, op="agree", to=victim.name, times=10**6, seconds=8.0, rng=rng, is_one_fault=True
        )
        tube.struck("unheeded", victim, name)
        seconds = rng.choice([5.0, 15.0, 40.0])
        tube.out_of_sight(victim, seconds)
        tube.world.network.tampering.append(tampering)
        await anyio.sleep(seconds)
        tampering.times = 0


def serving(host: Host) -> bool:
    """Whether a peer says that it serves a stage."""
    return host.peer is not None and host.peer._lifecycle.state is PeerState.SERVING


def may_stay(host: Host) -> bool:
    """Whether a peer serves, or drains and has still to look whether others do: it stays if nobody does."""
    if host.peer is None:
        return False
    lifecycle = host.peer._lifecycle
    return serving(host) or (lifecycle.state is PeerState.DRAINING and not lifecycle.stop.is_set())
