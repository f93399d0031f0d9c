"""A run without faults but those that a test brings: links of 20 ms that lose nothing."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from random import Random

from cluster import Cluster, Process

from swarm_peer.protocol.core import Core
from swarm_peer.protocol.epochs import COORDINATORS
from swarm_peer.protocol.messages import Message, Sent, Timing
from swarm_peer.protocol.round_rules import RoundRules

LINK_S = 0.02
TICK_S = 0.25


class Quiet(Cluster):
    """Peers, and a coordinator with the run key, that compute as rounds need it."""

    def __init__(self, rounds: RoundRules):
        super().__init__(Random(1), rounds, Timing(), num_slices=10_000)
        self.driver.fails = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.add("coordinator", {COORDINATORS}, has_key=True)

    def add(self, peer: str, stages: Iterable[int], *, ticket: str = "all", has_key: bool = False) -> Process:
        """Start a process; the first one makes the first epoch."""
        process = self.processes[peer] = Process(peer, ticket, frozenset(stages), has_key)
        if len(self.processes) == 1:
            self.begin(peer, ticket)
        self.start(process)
        self._at(TICK_S * self.random.random(), lambda: self._tick(process))
        return process

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time_s, next(self._numbers), action))

    def _tick(self, process: Process) -> None:
        self._at(self.now_s + TICK_S, lambda: self._tick(process))
        if process.core is not None:
            self.tick(process)

    def send(self, process: Process, sent: list[Sent]) -> None:
        """Put messages on their way, each once."""
        for target, message in sent:
            self._at(self.now_s + LINK_S, lambda t=target, m=message: self._arrives(self.processes[t], m))

    def _arrives(self, process: Process, message: Message) -> None:
        if process.core is not None:
            self.receive(process, message)

    def run_until(self, end_s: float, stops: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, until something is so at the latest."""
        while self._queue[0][0] < end_s and not stops():
            self.now_s, _, action = heapq.heappop(self._queue)
            action()

    @property
    def cores(self) -> list[Core]:
        """Of all processes that are alive."""
        return [each.core for each in self.processes.values() if each.core is not None]

    def next_round(self, stage: int = 0) -> int:
        """The round that a stage works at."""
        return max(core.members[stage].log.next_round for core in self.cores if stage in core.members)
