"""Each microbatch on its way through the stages and back: devices, links, windows, routing.

The flow level says which peers serve which stage, join, move and leave. Here a microbatch travels as it does live: in
nested calls. A callee that leaves takes its calls with it, and the caller tries another peer. With a global batch,
the simulation goes by rounds: when the batch is full, nothing is in flight any more, and after averaging all windows
fill again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Generator
from contextlib import ExitStack
from typing import Any

import simpy

from coordinator.simulator.compared_routing import Routing
from coordinator.simulator.flow import FlowSwarm
from coordinator.simulator.network import Links, Network
from coordinator.simulator.options import MicrobatchOptions
from swarm_peer.policy.in_flight_window import InFlightWindow
from swarm_peer.policy.view import Life, PeerState, PeerView

# Of a microbatch's compute; the backward pass is twice the forward pass.
FORWARD_SHARE = 1 / 3
BACKWARD_PRIORITY, FORWARD_PRIORITY = 0, 1
# How often new stage-0 peers are looked for.
STAGE_LOOK_S = 1.0
# A caller's pause when all peers were busy or failed, doubled each time, with jitter: as live.
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0

Steps = Generator[simpy.Event, Any, bool]


class _Device:
    """A device that does one thing at a time, backward passes before forward passes."""

    def __init__(self, env: simpy.Environment, serves: int, author: Life):
        self.resource = simpy.PriorityResource(env)
        self.serves = serves
        self.author = author  # its samples at stage 0 count under this life; as live, it is another one after a return
        self.queued = 0  # microbatches, those on their way to it included
        self.held = 0
        self.busy_s = 0.0


class Rounds:
    """The progress of the run by rounds. All know at once what is granted and counted; live, that takes a call.

    Attributes:
        changed: event of the next moment at which more peers may launch; a new one each time
        num_done: finished rounds
    """

    def __init__(self, env: simpy.Environment, global_batch: int | None, averaging_s: float):
        self._env = env
        self._global_batch = global_batch
        self._averaging_s = averaging_s
        self._claimed: Counter[Life] = Counter()
        self._counted: Counter[Life] = Counter()
        self._ending = False
        self.changed = env.event()
        self.num_done = 0

    def may_launch(self, live: Collection[Life]) -> bool:
        """Whether a microbatch of the batch is left to launch."""
        if self._global_batch is None:
            return True
        # Others launch what a peer that is gone has not finished.
        taken = sum((self._claimed if life in live else self._counted)[life] for life in self._claimed)
        return not self._ending and taken < self._global_batch

    def claim(self, author: Life) -> None:
        """Note that an author has launched a microbatch."""
        self._claimed[author] += 1

    def count(self, author: Life) -> None:
        """Note that the gradient of a microbatch has come back to its author."""
        self._counted[author] += 1
        if self._global_batch is not None and not self._ending and self._counted.total() >= self._global_batch:
            self._ending = True
            self._env.process(self._end())

    def _end(self) -> Generator[simpy.Event, Any, None]:
        # Claims never exceed the global batch, so after its last gradient nothing that counts is in flight.
        yield self._env.timeout(self._averaging_s)
        self.num_done += 1
        self._claimed.clear()
        self._counted.clear()
        self._ending = False
        self.notify()

    def notify(self) -> None:
        """Have all that wait for `changed` look again."""
        changed, self.changed = self.changed, self._env.event()
        changed.succeed()


class MicrobatchSwarm:
    """One simulation of every microbatch, on top of the flow level."""

    def __init__(self, flow: FlowSwarm, network: Network, options: MicrobatchOptions, *, seed: int):
        self._flow = flow
        self._env = flow.env
        self._links = Links(flow.env, network)
        self._options = options
        self._seed = seed
        self._devices: dict[str, _Device] = {}
        self._routers: dict[tuple[str, int], tuple[tuple[int, int] | None, Routing]] = {}
        self._serving: list[list[PeerView]] = []
        self._seen = -1
        self._rng = random.Random(f"backoff {seed}")
        self.rounds = Rounds(self._env, options.global_batch, options.averaging_s)
        self._num_devices = 0
        self.completed: list[float] = []  # moments
        self.round_trips_s: list[float] = []
        self.num_retries = 0
        self.num_busy = 0

    def run(self, until_s: float) -> None:
        """Simulate until a moment."""
        self._flow.start()
        self._env.process(self._watch_first_stage())
        self._env.run(until=until_s)

    def busy_s(self) -> float:
        """Seconds that all devices have computed, summed."""
        return sum(device.busy_s for device in self._devices.values())

    def _refresh_serving(self) -> list[list[PeerView]]:
        if self._seen != self._flow.version:
            view = self._flow.view()
            self._serving = [list(view.serving(stage)) for stage in range(view.num_stages)]
            for stage, peers in enumerate(self._serving):
                for peer in peers:
                    if (device := self._devices.get(peer.peer_id)) is None or device.serves != stage:
                        self._num_devices += 1
                        author = Life(peer.peer_id, self._num_devices)
                        self._devices[peer.peer_id] = _Device(self._env, stage, author)
            self._seen = self._flow.version
            self.rounds.notify()  # the claims of a departed peer are free
        return self._serving

    def _watch_first_stage(self) -> Generator[simpy.Event, Any, None]:
        sources: set[_Device] = set()
        while True:
            for peer in self._refresh_serving()[0]:
                device = self._devices[peer.peer_id]
                if device not in sources:
                    sources.add(device)
                    self._env.process(self._launch(peer.peer_id, device))
            yield self._env.timeout(STAGE_LOOK_S)

    def _launch(self, peer_id: str, device: _Device) -> Generator[simpy.Event, Any, None]:
        window = InFlightWindow(self._options.window_limit)
        flying: set[simpy.Process] = set()
        while self._is_here(peer_id, device):
            size = self._options.window or window.size()
            steps = self._options.global_batch is not None
            live = [self._devices[peer.peer_id].author for peer in self._refresh_serving()[0]] if steps else []
            while len(flying) < size and self.rounds.may_launch(live):
                self.rounds.claim(device.author)
                flying.add(self._env.process(self._trip(peer_id, device, window)))
            finished = yield simpy.AnyOf(self._env, [*flying, self.rounds.changed])
            flying -= set(finished.events)

    def _trip(self, peer_id: str, device: _Device, window: InFlightWindow) -> Steps:
        """One microbatch, from the start of its forward pass at stage 0 to the end of its backward pass there."""
        launched_s = self._env.now
        if not (yield from self._compute(peer_id, device, FORWARD_SHARE)):
            return False
        sent_s = self._env.now
        if len(self._serving) > 1:
            yield from self._call(peer_id, 1)
        self.round_trips_s.append(self._env.now - sent_s)
        if not (yield from self._compute(peer_id, device, 1 - FORWARD_SHARE)):
            return False
        machine = self._flow.machines.get(peer_id)
        if machine is not None:
            # As live: all of its time that this device did not compute on it, the wait for this device included.
            compute_s = self._flow.params.stage_costs[0] / machine.work_per_s
            window.observe(max(self._env.now - launched_s - compute_s, 0.0), compute_s, self._env.now)
        self.completed.append(self._env.now)
        self.rounds.count(device.author)
        return True

    def _call(self, caller: str, stage: int) -> Steps:
        """Call a stage, and return when one of its peers has done the work, however many peers that takes."""
        avoid: set[str] = set()
        backoff_s = FIRST_BACKOFF_S
        sent: set[Life] = set()
        with ExitStack() as until_done:
            while True:
                router = self._router(caller, stage)
                callee = router.choose(avoid)
                if callee is None:
                    avoid.clear()
                    yield self._env.timeout(backoff_s * (0.5 + self._rng.random()))
                    backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                    continue
                if callee in sent:  # it is outstanding there once, however often it is tried
                    router.done(callee)
                else:
                    sent.add(callee)
                    until_done.callback(router.done, callee)
                if (yield from self._serve(caller, callee.peer_id, stage)):
                    return True
                avoid.add(callee.peer_id)

    def _serve(self, caller: str, callee: str, stage: int) -> Steps:
        device = self._devices[callee]
        device.queued += 1
        try:
            yield from self._links.transfer(caller, callee, self._options.activation_bytes)
            if self._options.capacity is not None and device.held >= self._options.capacity:
                self.num_busy += 1
                yield from self._links.transfer(callee, caller, 0.0)
                return False
            device.held += 1
            try:
                done = yield from self._hold(callee, device, stage)
            finally:
                device.held -= 1
        finally:
            device.queued -= 1
        if not done:
            self.num_retries += 1
            return False
        yield from self._links.transfer(callee, caller, self._options.activation_bytes)
        return True

    def _hold(self, callee: str, device: _Device, stage: int) -> Steps:
        if not (yield from self._compute(callee, device, FORWARD_SHARE)):
            return False
        if stage + 1 < len(self._serving):
            yield from self._call(callee, stage + 1)
        return (yield from self._compute(callee, device, 1 - FORWARD_SHARE))

    def _compute(self, peer_id: str, device: _Device, share: float) -> Steps:
        priority = FORWARD_PRIORITY if share == FORWARD_SHARE else BACKWARD_PRIORITY
        with device.resource.request(priority=priority) as turn:
            yield turn
            machine = self._flow.machines.get(peer_id)
            if machine is None or not self._is_here(peer_id, device):
                return False
            seconds = share * self._flow.params.stage_costs[device.serves] / machine.work_per_s
            yield self._env.timeout(seconds)
            device.busy_s += seconds
        return self._is_here(peer_id, device)

    def _is_here(self, peer_id: str, device: _Device) -> bool:
        if peer_id not in self._flow.machines:
            return False
        peer = self._flow.peers[peer_id]
        return peer.state is PeerState.SERVING and peer.stage == device.serves

    def _router(self, caller: str, stage: int) -> Routing:
        peers = self._refresh_serving()[stage]
        seen, router = self._routers.get((caller, stage), (None, None))
        if router is None:
            rng = random.Random(f"routing {self._seed} {caller} {stage}")
            router = Routing(self._options.routing, rng, self._expected_s)
        now = self._seen, self.rounds.num_done
        if seen != now:
            without_way = self._flow.without_way(caller)
            reached = [peer for peer in peers if peer.peer_id not in without_way]
            router.update(reached, caller, self._serving[stage - 1], self.rounds.num_done)
            self._routers[caller, stage] = (now, router)
        return router

    def _expected_s(self, peer: PeerView) -> float:
        return (self._devices[peer.peer_id].queued + 1) / max(peer.samples_per_s, 1e-9)
