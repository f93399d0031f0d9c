"""A host of the simulated world: a process with an identity, which may die at any moment."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dht import TubeNode
from loop import HOST, NumberedTask
from machine import EPOCH_S, TubeClock, TubeDevice, TubeRandom, TubeStorage, TubeThreads
from network import TubeTransport

from swarm_peer.errors import UserError
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.host.processes import first_error
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.pass_checker import PassChecker
from swarm_peer.runtime.network.reachability import Ways
from swarm_peer.wire.identity import Identity
from swarm_peer.wire.passes import Invite, TicketRecord
from swarm_peer.wire.records import Assignment, seal

if TYPE_CHECKING:
    from world import World

    from coordinator.run.coordination import Coordination
    from coordinator.run.service import RunService
    from swarm_peer.protocol.statements import EpochId, Seat
    from swarm_peer.runtime.assembly import PeerParts
    from swarm_peer.runtime.network.agreement import Agreement
    from swarm_peer.runtime.peer import Peer

# The tasks of a dead host must have ended after this time.
BURIAL_S = 120.0


def identity_of(name: str) -> Identity:
    """The identity that follows from a name."""
    return Identity(Ed25519PrivateKey.from_private_bytes(random.Random(f"identity {name}").randbytes(32)))


RUN_KEY = identity_of("run")


def invite_of(name: str) -> Invite:
    """The invite whose ticket has a key that follows from a name."""
    key = identity_of(name)
    ticket = TicketRecord(key=key.peer_id, label="everybody", expires=int(EPOCH_S) + 24 * 3600, at_once=1000)
    return Invite(RUN_KEY.peer_id, (), seal(ticket, RUN_KEY.peer_id, RUN_KEY), key)


INVITE = invite_of("ticket")


class Host:
    """One life of one process.

    Attributes:
        name: unique among all lives
        stage: that its peer was told to serve, or "auto"
        grace_s: that it has to leave
        is_stalled: it is halted: none of its tasks and timers goes on, and nothing of the world reaches it
        set_aside: what has been due since then; when it goes on, all of that is
        refuses: nobody can connect to it, and it can connect to others
        orders: what the schedule has this coordinator order, besides its rebalancer's own decisions
        own_agreement: of a host that runs neither a peer nor a coordinator
    """

    def __init__(
        self,
        world: World,
        name: str,
        identity: Identity,
        *,
        skew_s: float = 0.0,
        seconds_per_sample: float,
        invite: Invite = INVITE,
    ):
        self.world = world
        self.name = name
        self.identity = identity
        self.peer_id = identity.peer_id
        self.is_alive = True
        self.is_stalled = False
        self.set_aside: list[asyncio.Handle] = []
        self.refuses = False
        self.has_ended = False
        self.ended = anyio.Event()  # set to have it leave, as SIGTERM does
        self.died_s = 0.0
        self.skew_s = skew_s
        self.clock = TubeClock(world.loop, skew_s)
        self.passes = PassChecker(invite.run_id, clock=self.clock, own_pass=invite.pass_for(self.peer_id))
        self.random = TubeRandom(f"{world.seed} {name}")
        self.threads = TubeThreads(self)
        self.storage = TubeStorage()
        self.device = TubeDevice(self, seconds_per_sample)
        self.metrics = PeerMetrics()
        self.transport: TubeTransport | None = None
        self.node: TubeNode | None = None
        self.peer: Peer | None = None
        self.stage = "auto"
        self.grace_s = 0.0
        self.service: RunService | None = None
        self.own_agreement: Agreement | None = None
        self.coordination: Coordination | None = None
        self.orders: list[Assignment] = []
        self._context = contextvars.copy_context()
        self._context.run(HOST.set, self)
        self._main: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def parts(self) -> PeerParts | None:
        """What the replicas of its peer share; None before that knows the run's epochs."""
        return None if self.peer is None or self.peer._mover is None else self.peer._mover._parts

    @property
    def agreement(self) -> Agreement | None:
        """Its peer's or coordinator's part in agreement; None before that knows the run's epochs."""
        if self.own_agreement is not None:
            return self.own_agreement
        if self.service is not None:
            return None if self.service._agreed is None else self.service._agreed._agreeing.agreement
        return None if self.parts is None else self.parts.agreement

    @property
    def seat(self) -> Seat | None:
        """Its seat's name."""
        return None if self.agreement is None else self.agreement.core.membership.me

    @property
    def epoch_id(self) -> EpochId | None:
        """The newest epoch that it knows."""
        return None if self.agreement is None else self.agreement.core.epoch.id

    def rng(self, purpose: str) -> random.Random:
        return self.world.rng(f"{self.name} {purpose}")

    def join_dht(self) -> SwarmDHT:
        """Become a node of the DHT."""
        self.node = TubeNode(self.world, self)
        self.world.network.by_peer_id[self.peer_id] = self
        address = "/ip4/10.0.0.1/tcp/1"
        return SwarmDHT(
            node=self.node,
            identity=self.identity,
            metrics=self.metrics,
            ways=lambda: Ways((address,)),
            clock=self.clock,
            places=self.node.places,
            passes=self.passes,
        )

    def open_transport(self) -> TubeTransport:
        self.transport = TubeTransport(self.world.network, self)
        return self.transport

    def do(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function as this host."""
        self._context.copy().run(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine as this host."""
        create_task = partial(self.world.loop.create_task, coroutine, name=f"{self.name} {name}")
        return self._context.copy().run(create_task)

    def start(self, program: Callable[[], Awaitable[None]]) -> None:
        """Run the program of the process; its end is the end of the process."""

        async def run() -> None:
            try:
                with first_error():
                    await program()
                self.world.note("exit", self.name)
            except UserError as error:  # it could not take part, and says why
                self.world.note("refused", self.name)
                self.world.log.append(f"{self.name}: {error}")
            except BaseException as error:
                if self.is_alive:
                    self.world.violation(f"{self.name} ended with {error!r}", error)
                raise
            finally:
                if self.is_alive:
                    self.has_ended = True
                    self.die()

        self._main = self.spawn(run(), "main")

    def order(self, victim: Host, to_stage: int) -> None:
        """Have this coordinator order a peer to another stage as soon as it acts."""
        if victim.peer is not None and victim.peer._replica is not None:
            order = Assignment(
                peer=victim.peer_id,
                announced=victim.peer._directory.serial,
                from_stage=victim.peer._replica.stage,
                to_stage=to_stage,
                reason="a fault",
            )
            self.orders.append(order)

    def halt(self) -> None:
        """Halt the process, as SIGSTOP does, or a host that pauses its virtual machine."""
        self.is_stalled = True
        self.world.loop.halt(True)

    def go_on(self) -> None:
        """Have the process go on: all its timers that were due fire at once, and what it waited for has come."""
        if self.is_stalled:
            self.is_stalled = False
            self.world.loop.go_on(self.set_aside)
            self.set_aside.clear()
            self.world.loop.halt(any(host.is_stalled for host in self.world.hosts))
            self.world.network.release()

    def tasks(self) -> list[NumberedTask]:
        return [task for task in self.world.loop.tasks if task.host is self]

    def die(self) -> None:
        """Cut it off from network, DHT, disk and device first, then end its tasks."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.go_on()  # no further than to the cancellation below
        self.died_s = self.world.loop.time()
        self.world.network.died(self)
        self.device.die()
        for task in self.tasks():
            if task is not asyncio.current_task():
                task.cancel()
        self.world.loop.call_later(BURIAL_S, self._check_burial)

    def _check_burial(self) -> None:
        if left := self.tasks():
            self.world.violation(f"{self.name} is dead and has tasks left: {left!r:.500}")
