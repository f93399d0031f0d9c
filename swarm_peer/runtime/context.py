"""The context of a peer, which all its parts share: the run, the identity, and the ways to the machine.

Time, chance, threads and files are reached through the context alone, so that a test can run a whole peer on a clock
that jumps, with numbers drawn from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from swarm_peer.peer_options import PeerOptions
from swarm_peer.runtime.condition import Condition
from swarm_peer.runtime.host.metrics import PeerMetrics
from swarm_peer.wire.identity import Identity

# Bytes that leave a machine for each byte of a call: what libp2p adds to encrypt and to share a connection (frames of
# yamux, messages of Noise), and the headers of TCP and IP in packets of 1500 bytes (benchmarks/capped_link.py).
BYTES_PER_BYTE = 1.06

if TYPE_CHECKING:  # observers read clocks and have no models
    from swarm_peer.model.resolved import ResolvedManifest

Result = TypeVar("Result")


class Clock(Protocol):
    """Where time comes from. Any thread may ask."""

    def monotonic_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970, as far as this machine knows."""
        ...


class RandomSource(Protocol):
    """Where chance comes from."""

    def stream(self, purpose: str) -> random.Random:
        """A generator for one purpose, which no other purpose draws from."""
        ...

    def token(self, num_bytes: int) -> bytes:
        """Bytes that nobody can guess."""
        ...


class Threads(Protocol):
    """Where work goes that would hold up the event loop."""

    async def run(self, function: Callable[..., Result], *args: object, abandon_on_cancel: bool = False) -> Result:
        """Run a function in a worker thread and return its result.

        Args:
            abandon_on_cancel: when the caller is cancelled, do not wait until the function returns; nor does the end of
                the process wait for it
        """
        ...

    def start(self, target: Callable[[], None], name: str) -> Callable[[float], None]:
        """Start a thread for good. Returns what waits for its end, at most for so many seconds."""
        ...


class Storage(Protocol):
    """This peer's files: a flat folder of names. May block."""

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file that appears whole or not at all."""
        ...

    def map(self, name: str) -> npt.NDArray[np.uint8]:
        """A file's bytes, mapped into memory, read-only."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...


@dataclass(frozen=True, kw_only=True)
class PeerContext:
    """The shared surroundings of a peer's parts. Startup makes it once, before the parts; nobody changes it.

    Attributes:
        run_id: the run's public key, by which it is found in the DHT
        resolved: the run's manifest, with its hash, model config and stages
        identity: this peer's key, whose public half is its id
        too_large: the stages that this peer's device has no memory for
        changed: notified whenever something has changed that a part of this peer may wait for
    """

    run_id: str
    resolved: ResolvedManifest
    identity: Identity
    options: PeerOptions
    clock: Clock
    random: RandomSource
    threads: Threads
    storage: Storage
    metrics: PeerMetrics
    changed: Condition
    too_large: tuple[int, ...] = ()

    @property
    def lent_bytes_per_s(self) -> tuple[float, float]:
        """Bytes of calls that this peer's owner lets it send and receive in a second; 0 for any number."""
        options = self.options
        up, down = ((mbps or 0.0) * 1e6 / 8 for mbps in (options.max_upload_mbps, options.max_download_mbps))
        return up / BYTES_PER_BYTE, down / BYTES_PER_BYTE
