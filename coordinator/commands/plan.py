"""`plan`: predicts how a run would do with certain peers."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from coordinator.commands.console import open_console
from coordinator.commands.shared_options import Config, Count, Json, NotNegative, Overrides, Positive
from coordinator.config_files import load_manifest
from swarm_peer.errors import UserError
from swarm_peer.initial_peers import check_initial_peers
from swarm_peer.logs import configure_logging
from swarm_peer.peer_options import RUN, Addresses

# Headings of --help.
PEERS, LIVE_PEERS = (
    Parameter(group=Group.create_ordered(heading)) for heading in ("Peers", "Or the peers of a live run")
)


def plan(
    config: Config | None = None,
    /,
    *,
    set_: Overrides = (),
    stages: Annotated[Count | None, RUN, Positive] = None,
    tokens: Annotated[Count | None, RUN, Positive] = None,
    peers: Annotated[Path | None, PEERS] = None,
    dollars_per_hour: Annotated[float | None, PEERS, NotNegative] = None,
    dollars_per_gb: Annotated[float | None, PEERS, NotNegative] = None,
    initial_peers: Annotated[Addresses, LIVE_PEERS] = (),
    run_id: Annotated[str | None, LIVE_PEERS] = None,
    upload_mbps: Annotated[float, LIVE_PEERS, Positive] = inf,
    download_mbps: Annotated[float, LIVE_PEERS, Positive] = inf,
    latency_ms: Annotated[float, LIVE_PEERS, NotNegative] = 0.0,
    memory_gb: Annotated[float, LIVE_PEERS, Positive] = inf,
    json_: Json = False,
) -> None:
    """Predict what a run would do with certain peers: how many stages, who serves which, tokens/s, days, price.

    Args:
        stages: Number of stages to plan for; if not given the fastest, or that of the live run.
        tokens: Tokens to train on, such as 300B or 300e9; those of the configuration if not given.
        peers: YAML file that describes peers, or one that comes with Swarm: volunteers, spot-t4 or six-24gb.
        dollars_per_hour: Price of an hour of each peer in dollars, whatever the file says.
        dollars_per_gb: Price of each gigabyte that a peer sends in dollars, whatever the file says.
        initial_peers: Addresses of any peers of a live run, to plan with its peers at the speed that they measured.
        run_id: Which live run, where the addresses lead to several.
        upload_mbps: What each of their links sends, as sold, in megabits per second; no limit if not given.
        download_mbps: What each of their links receives, in megabits per second; no limit if not given.
        latency_ms: Round trip between them, in milliseconds.
        memory_gb: Memory that training may use of those that announce none, in gigabytes; no limit if not given.
    """
    configure_logging("warning")
    links = {"--upload-mbps": upload_mbps, "--download-mbps": download_mbps, "--latency-ms": latency_ms}
    _check_sources(config, peers, initial_peers, set_, {"--run-id": run_id, **links, "--memory-gb": memory_gb})
    manifest = load_manifest(config, set_) if config is not None else None

    from coordinator.planning.live_peers import LivePeers, live_groups, read_live_run, with_prices
    from coordinator.planning.peers_file import load_peers
    from coordinator.planning.plan import make_report
    from coordinator.planning.plan_report import print_report

    groups = []
    if initial_peers:
        live_manifest, view = read_live_run(initial_peers, run_id)
        if manifest is None:
            manifest, stages = live_manifest, stages or live_manifest.stages.count
        assumed = LivePeers.of(memory_gb, upload_mbps, download_mbps, latency_ms)
        groups += live_groups(live_manifest, view, assumed)
    assert manifest is not None
    if peers is not None:
        groups += load_peers(peers, manifest.model.precision)
    report = make_report(manifest, with_prices(groups, dollars_per_hour, dollars_per_gb), stages, tokens)
    if json_:
        print(json.dumps(report))
    else:
        print_report(report, open_console())


def _check_sources(
    config: Path | None,
    peers: Path | None,
    initial_peers: tuple[str, ...],
    overrides: tuple[str, ...],
    of_live_run: dict[str, str | float | None],
) -> None:
    check_initial_peers(initial_peers)
    if config is None and not initial_peers:
        raise UserError("plan needs a run's YAML file, or --initial-peers ADDRESS of a live run")
    if config is None and overrides:
        raise UserError(f"--set {overrides[0]}: it overrides a run's YAML file; name that, too")
    if peers is None and not initial_peers:
        raise UserError("plan needs peers: describe them with --peers FILE, or name a live run with --initial-peers")
    given = [option for option, value in of_live_run.items() if value not in (None, inf, 0.0)]
    if given and not initial_peers:
        raise UserError(
            f"{given[0]} is about the peers of a live run: name that run with --initial-peers, or leave {given[0]} "
            f"out; the file of --peers describes its own"
        )
