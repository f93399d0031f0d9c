"""Options of a coordinator. Imports nothing heavy: the command line is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from swarm_peer.addresses import EVERYWHERE
from swarm_peer.peer_options import CHECKPOINTS, LOGS, NETWORK, Addresses

# How a run goes on whose weights have diverged.
OnDivergence = Literal["end", "rewind"]


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Where a coordinator listens, which peers it joins, and where it makes itself known; options of `serve`.

    Attributes:
        host_maddrs: Addresses to listen on, as IP:PORT or multiaddresses; by default the first free port from 31337.
        announce_maddrs: Addresses that peers shall dial, as HOST, HOST:PORT or multiaddresses, where they differ.
        map_port: Whether to ask this machine's router to forward the port (UPnP, NAT-PMP).
        relay_mbps: Megabits a second to carry between members that do not reach each other; 0 for none.
        initial_peers: Addresses of peers of this run, to carry on with it from another machine.
        identity_path: The run's key, made if missing; OUTPUT/identity if not given. Its holder directs the run.
        address_file: File to write an invite to, for peers that read it with --initial-peers @FILE. It is a secret.
        metrics_port: TCP port for Prometheus metrics; 0 for any free port; no metrics if not given.
        metrics_host: Address that this port listens on; 0.0.0.0 shows the metrics to everybody who reaches the machine.
    """

    host_maddrs: Annotated[Addresses, NETWORK] = EVERYWHERE
    announce_maddrs: Annotated[Addresses, NETWORK] = ()
    map_port: Annotated[bool, NETWORK] = True
    relay_mbps: Annotated[float, NETWORK, Parameter(validator=Number(gte=0))] = 8.0
    initial_peers: Annotated[Addresses, NETWORK] = ()
    identity_path: Annotated[Path | None, NETWORK] = None
    address_file: Annotated[Path | None, NETWORK] = None
    metrics_port: Annotated[int | None, LOGS, Parameter(validator=Number(gte=0, lte=65535))] = None
    metrics_host: Annotated[str, LOGS] = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where a run's checkpoints go, and which one it goes on from.

    Attributes:
        checkpoints: Folder or URL (such as s3://bucket/run) of checkpoints; OUTPUT/checkpoints if not given.
        checkpoint_every: Optimizer steps between them, a multiple of recovery.snapshot_every (the default); 0 for none.
        keep_checkpoints: How many of them are kept; 3 if not given.
        resume: Checkpoint folder or URL to go on from: its newest good one, or one of them.
    """

    checkpoints: Annotated[str | None, CHECKPOINTS] = None
    checkpoint_every: Annotated[int | None, CHECKPOINTS, Parameter(validator=Number(gte=0))] = None
    keep_checkpoints: Annotated[int | None, CHECKPOINTS, Parameter(validator=Number(gte=1))] = None
    resume: Annotated[str | None, CHECKPOINTS] = None
