"""What a coordinator reaches the machine and the network through, as peers do through their context."""

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
