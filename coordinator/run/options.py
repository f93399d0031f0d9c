"""Options of a coordinator. Imports nothing heavy: the command line is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm_peer.config import Addresses


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Where a coordinator listens, which peers it joins, and where it makes itself known; options of `serve`.

    Attributes:
        host_maddrs: Multiaddresses to listen on.
        announce_maddrs: Multiaddresses that peers shall dial, where they differ.
        initial_peers: Peers of this run, to carry on with it from another machine.
        identity_path: The run's key, made if missing; OUTPUT/identity if not given. Its holder directs the run.
        address_file: File to write this coordinator's addresses to.
        metrics_port: Port for Prometheus; 0 takes a free one; none if not given.
    """

    host_maddrs: Addresses = ("/ip4/0.0.0.0/tcp/31337",)
    announce_maddrs: Addresses = ()
    initial_peers: Addresses = ()
    identity_path: Path | None = None
    address_file: Path | None = None
    metrics_port: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Where a run's checkpoints go, and which one it goes on from.

    Attributes:
        checkpoints: Folder or URL (such as s3://bucket/run) of checkpoints; OUTPUT/checkpoints if not given.
        checkpoint_every: Optimizer steps between them, a multiple of recovery.snapshot_every (the default); 0 for none.
        keep_checkpoints: How many of them are kept.
        resume: Checkpoint folder or URL to go on from: its newest good one, or one of them.
    """

    checkpoints: str | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3
    resume: str | None = None


@dataclass(frozen=True, kw_only=True)
class LocalCheckpointOptions(CheckpointOptions):
    """As of any run, but without checkpoints if nothing is said."""

    checkpoint_every: int | None = 0
