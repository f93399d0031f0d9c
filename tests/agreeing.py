"""Peers that agree over a network without wires, with the work of their stages left to the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from contexts import make_context, unparsed
from memory_transport import MemoryNetwork, MemoryTransport

from swarm_peer.config import AveragingSection
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.protocol.epochs import COORDINATORS, Certified, Epoch, Place
from swarm_peer.protocol.log import Log
from swarm_peer.protocol.messages import Timing
from swarm_peer.protocol.statements import EpochId, KeySigned, Seat
from swarm_peer.runtime.context import PeerContext
from swarm_peer.runtime.network import agreement
from swarm_peer.runtime.network.agreement import Agreement
from swarm_peer.runtime.network.dispatcher import CallDispatcher
from swarm_peer.wire.agreement import Statements
from swarm_peer.wire.identity import Identity

HASH = "m" * 32
RUN = Identity.generate()
BATCH = 8


def quickly(monkeypatch):
    """Nobody waits for long."""
    waits = {"propose_s": 0.01, "retry_s": 0.1, "resend_s": 0.05, "alive_s": 0.1, "status_s": 0.1, "silent_s": 0.5}
    monkeypatch.setattr(agreement, "TIMING", Timing(**waits, probe_s=0.3, ready_s=5.0))
    monkeypatch.setattr(agreement, "TICK_S", 0.02)


@dataclass(eq=False)
class Agreeing:
    """One peer that agrees with others."""

    identity: Identity
    context: PeerContext
    agreement: Agreement
    transport: MemoryTransport
    calls: CallDispatcher
    scope: anyio.CancelScope | None = None

    @property
    def changed(self):
        return self.context.changed

    @property
    def core(self):
        return self.agreement.core

    def stage(self, stage):
        return self.core.members[stage]

    def log(self, stage):
        return self.stage(stage).log

    def prepare(self, others, take=lambda other, state: True):
        """Take over the state of a stage-mate before joining it."""
        for stage in self.core.membership.desired - self.core.membership.stages - {COORDINATORS}:
            for other in others:
                mate = other.core.members.get(stage)
                if mate is not None and not mate.is_behind and mate.reign and take(other, mate.state):
                    log = Log(stage, mate.log.restart, mate.log.committed)
                    ledger = mate.ledger.copy() if mate.ledger is not None else None
                    self.core.prepare(stage, log, mate.state, other.core.membership.known.chain, ledger)
                    break


Work = Callable[[Agreeing, list[Agreeing]], Awaitable[None]]


def certified_first(coordinator: Identity) -> Certified:
    seat = Seat(coordinator.peer_id, 1, "")
    epoch = Epoch(EpochId(1, seat, 0), (Place(COORDINATORS, seat),))
    return Certified(epoch, (Statements(RUN.peer_id, RUN).sign(KeySigned(epoch.hash)),))


class Swarm:
    """A coordinator with the run key, and members of stages, each with somebody who does what its core asks for."""

    def __init__(self, network, tasks, work: Work, resolved: ResolvedManifest):
        self.resolved = resolved
        self.network = network
        self.tasks = tasks
        self.work = work
        self.members: list[Agreeing] = []
        self.coordinator = self.add(Identity.generate(), COORDINATORS, has_key=True)

    def add(self, identity, *stages, has_key=False, life=1, ticket=agreement.OPEN):
        context = make_context(self.resolved, identity=identity, run_id=RUN.peer_id)
        transport = self.network.transport(identity.peer_id)
        part = Agreement(
            context=context,
            transport=transport,
            life=life,
            first=[certified_first(self.members[0].identity if self.members else identity)],
            ticket=ticket,
            acquaintances=lambda: [each.identity.peer_id for each in self.members],
            sign_as_key=Statements(RUN.peer_id, RUN).sign if has_key else None,
        )
        part.core.membership.desired = frozenset(stages)
        calls = CallDispatcher(manifest_hash=self.resolved.hash, calls=part.calls)
        member = Agreeing(identity, context, part, transport, calls)
        self.members.append(member)
        self.tasks.start_soon(self._run, member)
        return member

    async def _run(self, member):
        await member.transport.serve(member.calls)
        async with anyio.create_task_group() as tasks:
            member.scope = tasks.cancel_scope
            tasks.start_soon(member.agreement.run)
            tasks.start_soon(self.work, member, self.members)

    def kill(self, member):
        """A peer is gone."""
        self.network.kill(member.identity.peer_id)
        member.scope.cancel()


@asynccontextmanager
async def swarm(work: Work, resolved: ResolvedManifest | None = None, **averaging: object) -> AsyncIterator[Swarm]:
    if resolved is None:
        resolved = unparsed(HASH, global_batch_size=BATCH)
        training = resolved.manifest.training.model_copy(update={"steps": 10**6})
        changes = {"averaging": AveragingSection.model_validate(averaging), "training": training}
        resolved = replace(resolved, manifest=resolved.manifest.model_copy(update=changes))
    async with MemoryNetwork() as network, anyio.create_task_group() as tasks:
        yield Swarm(network, tasks, work, resolved)
        tasks.cancel_scope.cancel()


async def until(members, condition, seconds=20):
    with anyio.fail_after(seconds):
        for member in members:
            await member.changed.wait_for(lambda member=member: condition(member))
