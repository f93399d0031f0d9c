"""Each microbatch on its way through the stages and back: devices, links, windows, routing.

Who serves what, joins, moves and leaves is the flow level's. Here a microbatch is what it is live: nested calls, where
a callee that goes takes what it was given with it, and the caller tries another peer.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from coordinator.simulator.flow import FlowSwarm
from coordinator.simulator.network import Network
from coordinator.simulator.routing import Routing, RoutingName, make_routing
from swarm_peer.policy.view import PeerState, PeerView
from swarm_peer.policy.window import InFlightWindow

# Of a microbatch's compute; the backward pass is twice the forward pass.
FORWARD_SHARE = 1 / 3
BACKWARD_PRIORITY, FORWARD_PRIORITY = 0, 1
# How often stage 0 looks who serves it, and a caller without anyone to call.
LOOK_S = 1.0

Steps = Generator[simpy.Event, Any, bool]


@dataclass(frozen=True, slots=True)
class MicrobatchOptions:
    """Attributes:
    window: microbatches in flight per stage-0 peer; None for what the live rule makes of the round trip
    window_limit: of that rule
    activation_bytes: from one stage to the next, and as many back
    """

    routing: RoutingName = "iwrr"
    window: int | None = None
    window_limit: int = 64
    activation_bytes: float = 4e6


class _Device:
    """One thing at a time, backward before forward."""

    def __init__(self, env: simpy.Environment, serves: int):
        self.resource = simpy.PriorityResource(env)
        self.serves = serves
        self.queued = 0
        self.busy_s = 0.0


class MicrobatchSwarm:
    def __init__(self, flow: FlowSwarm, network: Network, options: MicrobatchOptions, seed: int):
        self._flow = flow
        self._env = flow.env
        self._network = network
        self._options = options
        self._seed = seed
        self._devices: dict[str, _Device] = {}
        self._routers: dict[tuple[str, int], tuple[int, Routing]] = {}
        self._serving: list[list[PeerView]] = []
        self._seen = -1
        self.completed: list[float] = []  # when
        self.round_trips_s: list[float] = []
        self.num_retries = 0

    def run(self, until_s: float) -> None:
        self._flow.start()
        self._env.process(self._watch_first_stage())
        self._env.run(until=until_s)

    def busy_s(self) -> float:
        return sum(device.busy_s for device in self._devices.values())

    def _look(self) -> list[list[PeerView]]:
        if self._seen != self._flow.version:
            view = self._flow.view()
            self._serving = [list(view.serving(stage)) for stage in range(view.num_stages)]
            for stage, peers in enumerate(self._serving):
                for peer in peers:
                    if (device := self._devices.get(peer.peer_id)) is None or device.serves != stage:
                        self._devices[peer.peer_id] = _Device(self._env, stage)
            self._seen = self._flow.version
        return self._serving

    def _watch_first_stage(self) -> Generator[simpy.Event, Any, None]:
        sources: set[int] = set()
        while True:
            for peer in self._look()[0]:
                device = self._devices[peer.peer_id]
                if id(device) not in sources:
                    sources.add(id(device))
                    self._env.process(self._launch(peer.peer_id, device))
            yield self._env.timeout(LOOK_S)

    def _launch(self, peer_id: str, device: _Device) -> Generator[simpy.Event, Any, None]:
        window = InFlightWindow(self._options.window_limit)
        flying: set[simpy.Process] = set()
        while self._is_here(peer_id, device):
            size = self._options.window or window.size()
            while len(flying) < size:
                flying.add(self._env.process(self._trip(peer_id, device, window)))
            finished = yield simpy.AnyOf(self._env, flying)
            flying -= set(finished.events)

    def _trip(self, peer_id: str, device: _Device, window: InFlightWindow) -> Steps:
        """One microbatch, from the start of its forward pass at stage 0 to the end of its backward pass there."""
        if not (yield from self._compute(peer_id, device, FORWARD_SHARE)):
            return False
        sent_s = self._env.now
        if len(self._serving) > 1:
            yield from self._call(peer_id, 1)
        round_trip_s = self._env.now - sent_s
        if not (yield from self._compute(peer_id, device, 1 - FORWARD_SHARE)):
            return False
        machine = self._flow.machine(peer_id)
        if machine is not None:
            window.observe(round_trip_s, self._flow.stage_cost(0) / machine.work_per_s, self._env.now)
        self.completed.append(self._env.now)
        self.round_trips_s.append(round_trip_s)
        return True

    def _call(self, caller: str, stage: int) -> Steps:
        """Ends when somebody has done it, however many peers that takes."""
        avoid: set[str] = set()
        while True:
            callee = self._route(caller, stage, avoid)
            if callee is None:
                avoid.clear()
                yield self._env.timeout(LOOK_S)
                continue
            if (yield from self._serve(caller, callee, stage)):
                return True
            self.num_retries += 1
            avoid.add(callee)

    def _serve(self, caller: str, callee: str, stage: int) -> Steps:
        device = self._devices[callee]
        device.queued += 1
        try:
            yield self._env.timeout(self._network.transfer_s(caller, callee, self._options.activation_bytes))
            if not (yield from self._compute(callee, device, FORWARD_SHARE)):
                return False
            if stage + 1 < len(self._serving):
                yield from self._call(callee, stage + 1)
            if not (yield from self._compute(callee, device, 1 - FORWARD_SHARE)):
                return False
        finally:
            device.queued -= 1
        yield self._env.timeout(self._network.transfer_s(callee, caller, self._options.activation_bytes))
        return True

    def _compute(self, peer_id: str, device: _Device, share: float) -> Steps:
        priority = FORWARD_PRIORITY if share == FORWARD_SHARE else BACKWARD_PRIORITY
        with device.resource.request(priority=priority) as turn:
            yield turn
            machine = self._flow.machine(peer_id)
            if machine is None or not self._is_here(peer_id, device):
                return False
            seconds = share * self._flow.stage_cost(device.serves) / machine.work_per_s
            yield self._env.timeout(seconds)
            device.busy_s += seconds
        return self._is_here(peer_id, device)

    def _is_here(self, peer_id: str, device: _Device) -> bool:
        if self._flow.machine(peer_id) is None:
            return False
        peer = self._flow.peer(peer_id)
        return peer.state is PeerState.SERVING and peer.stage == device.serves

    def _route(self, caller: str, stage: int, avoid: set[str]) -> str | None:
        peers = self._look()[stage]
        seen, router = self._routers.get((caller, stage), (-1, None))
        if router is None:
            rng = random.Random(f"routing {self._seed} {caller} {stage}")
            router = make_routing(self._options.routing, rng, self._expected_s)
        if seen != self._seen:
            router.update(peers)
            self._routers[caller, stage] = (self._seen, router)
        return router.choose(avoid)

    def _expected_s(self, peer: PeerView) -> float:
        return (self._devices[peer.peer_id].queued + 1) / max(peer.samples_per_s, 1e-9)
