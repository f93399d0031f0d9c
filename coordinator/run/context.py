"""The clock, chance, threads and network of a coordinator, as PeerContext holds them for a peer."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from coordinator.checkpoints.fetching import open_transport
from swarm_peer.runtime.context import Clock, RandomSource, Threads
from swarm_peer.runtime.host.machine import SystemClock, SystemRandom, SystemThreads
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.runtime.network.dht import SwarmDHT
from swarm_peer.runtime.network.transport import Transport


@dataclass(frozen=True, kw_only=True)
class CoordinatorContext:
    """The ways of a coordinator to its surroundings; by default, those of this machine.

    Attributes:
        open_transport: opens a transport for downloading states, on the node of a DHT
    """

    clock: Clock = field(default_factory=SystemClock)
    random: RandomSource = field(default_factory=lambda: SystemRandom(os.urandom(16).hex()))
    threads: Threads = field(default_factory=SystemThreads)
    open_transport: Callable[[SwarmDHT, PeerMetrics], AbstractAsyncContextManager[Transport]] = open_transport
