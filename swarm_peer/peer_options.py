"""The options of one peer (PeerOptions), and the headings of all options. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from pydantic import ByteSize, Field, field_validator

from swarm_peer.addresses import EVERYWHERE
from swarm_peer.owner_options import OwnerOptions
from swarm_peer.settings import PEER_NAME, Name, Settings

# The largest machines have fewer cores. With many more, OpenMP ends the process.
MAX_COMPUTE_THREADS = 4096
# The headings of --help, in their order.
RUN, NETWORK, CHECKPOINTS, MACHINE, LOGS = (
    Parameter(group=Group.create_ordered(heading))
    for heading in ("The run", "Network", "Checkpoints", "This machine", "Logs and metrics")
)
# Options that take several addresses one after the other.
Addresses = Annotated[tuple[str, ...], Parameter(consume_multiple=1, negative="")]


class PeerOptions(OwnerOptions, Settings):
    """How one peer takes part; each field is an option of swarm-peer."""

    initial_peers: Annotated[Addresses, RUN] = Field(min_length=1)
    """Addresses of any peers of the run, as the coordinator prints them, or an invite; @FILE for a file of them."""
    stage: Annotated[str, RUN] = "auto"
    """Pipeline stage to serve: a number, or auto for the neediest one."""
    run_id: Annotated[str | None, RUN] = None
    """Which run to join, where the addresses lead to several (the coordinator's key)."""
    data_dir: Annotated[Path | None, RUN] = None
    """Folder that the run may read local data files from; none if not given."""
    host_maddrs: Annotated[Addresses, NETWORK] = EVERYWHERE
    """Addresses to listen on, as IP:PORT or multiaddresses; without a port, the first free one from 31338 on."""
    announce_maddrs: Annotated[Addresses, NETWORK] = ()
    """Addresses that other peers dial, as HOST, HOST:PORT or multiaddresses, if they differ (port forwarding)."""
    map_port: Annotated[bool, NETWORK] = True
    """Whether to ask this machine's router to forward the port (UPnP, NAT-PMP)."""
    relay_mbps: Annotated[float, NETWORK] = Field(8.0, ge=0)
    """Megabits a second to carry between members that do not reach each other; 0 for none."""
    name: Annotated[str | None, RUN] = Field(None, max_length=32, pattern=PEER_NAME)
    """Name by which people recognise the peer: letters, digits and . _ @ + -"""
    identity_path: Annotated[Path | None, NETWORK] = None
    """File of the private key, created if it is missing; if not given, one of this user's, which no other peer uses."""
    device: Annotated[str, MACHINE] = "auto"
    """cpu, cuda:N, cuda for a GPU that no other peer of this user has, or auto for one if there are GPUs."""
    max_memory: Annotated[ByteSize | None, MACHINE] = None
    """Memory that training may use, in bytes or such as 8GiB; all of the device's memory if not given."""
    threads: Annotated[int | None, MACHINE] = Field(None, ge=1, le=MAX_COMPUTE_THREADS)
    """CPU threads that torch computes with; torch's own choice if not given."""
    cache_dir: Annotated[Path | None, MACHINE] = None
    """Folder where datasets and tokenizers are cached; Hugging Face's own if not given."""
    cache_size: Annotated[ByteSize, MACHINE] = Field(ByteSize(100 * 10**9), gt=0)
    """Most room for weights that members have given, in bytes or such as 50GB; those used longest ago go first."""
    grace_s: Annotated[float, MACHINE] = Field(20.0, gt=0)
    """Seconds to finish and hand over its work when told to leave. It may take half as long again and ten seconds more
    until it is gone: for the 30 s of spot instances of Google and Azure, give 12."""
    preemption_notice: Annotated[Literal["none", "aws", "gcp", "azure"], MACHINE] = "none"
    """Cloud provider; the peer leaves when it gives notice that it takes this spot instance away."""
    metrics_port: Annotated[int | None, LOGS] = Field(None, ge=0, le=65535)
    """TCP port for Prometheus metrics; 0 for any free port; no metrics if not given."""
    metrics_host: Annotated[Name, LOGS] = "127.0.0.1"
    """Address that the metrics port listens on; 0.0.0.0 shows the metrics to everybody who reaches this machine."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LOGS] = "info"
    """Least severe log line to print."""

    @field_validator("stage")
    @classmethod
    def _stage_is_number_or_auto(cls, value: str) -> str:
        if value != "auto" and not value.isdecimal():
            raise ValueError(f"expected a number or auto, got {value!r}")
        return value

    @field_validator("data_dir")
    @classmethod
    def _data_dir_is_there(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_dir():
            raise ValueError(f"there is no folder {value}: correct the path, or leave it out")
        return value
