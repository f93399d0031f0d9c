"""Options of a coordinator's node. Imports nothing heavy: the command line is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


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

    host_maddrs: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = ("/ip4/0.0.0.0/tcp/31337",)
    announce_maddrs: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = ()
    initial_peers: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="")] = ()
    identity_path: Path | None = None
    address_file: Path | None = None
    metrics_port: int | None = None
