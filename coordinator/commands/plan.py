"""`plan`: predicts how a run would do with certain peers."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Annotated

from coordinator.commands.options import Json, NotNegative, Overrides, Positive
from swarm_peer.cli import configure_logging
from swarm_peer.config import Addresses, load_manifest
from swarm_peer.errors import UserError


def plan(
    config: Path | None = None,
    *,
    peers: Path | None = None,
    initial_peers: Addresses = (),
    run_id: str | None = None,
    stages: Annotated[int | None, Positive] = None,
    tokens: Annotated[int | None, Positive] = None,
    dollars_per_hour: Annotated[float | None, NotNegative] = None,
    dollars_per_gb: Annotated[float | None, NotNegative] = None,
    upload_mbps: Annotated[float, Positive] = inf,
    download_mbps: Annotated[float, Positive] = inf,
    latency_ms: Annotated[float, NotNegative] = 0.0,
    memory_gb: Annotated[float, Positive] = inf,
    set_: Overrides = (),
    json_: Json = False,
) -> None:
    """Predict what a run would do with certain peers: how many stages, who serves which, tokens/s, days, price.

    Args:
        config: The run's YAML file; with --initial-peers, the live run's manifest if not given.
        peers: YAML file that describes peers, such as configs/peers/volunteers.yaml.
        initial_peers: Addresses of any peers of a live run, to plan with its peers at the speed that they measured.
        run_id: Which live run, where the addresses lead to several.
        stages: Number of stages to plan for; if not given the fastest, or that of the live run.
        tokens: To train on; those of the configuration if not given.
        dollars_per_hour: Price of each peer, whatever the file says.
        dollars_per_gb: Price of each gigabyte that a peer sends, whatever the file says.
        upload_mbps: What each peer of the live run sends, megabits per second.
        download_mbps: What each peer of the live run receives.
        latency_ms: Round trip between peers of the live run.
        memory_gb: Memory of each peer of the live run that training may use.
    """
    configure_logging("warning")
    _check_sources(config, peers, initial_peers, set_)
    manifest = load_manifest(config, set_) if config is not None else None

    from rich.console import Console

    from coordinator.planning.live_peers import LivePeers, live_groups, read_live_run, with_prices
    from coordinator.planning.peers_file import load_peers
    from coordinator.planning.plan import make_report
    from coordinator.planning.plan_report import print_report

    groups = []
    if initial_peers:
        live_manifest, view = read_live_run(initial_peers, run_id)
        if manifest is None:
            manifest, stages = live_manifest, stages or live_manifest.stages.count
        assumed = LivePeers(memory_gb * 1e9, upload_mbps * 1e6 / 8, download_mbps * 1e6 / 8, latency_ms / 1e3)
        groups += live_groups(live_manifest, view, assumed)
    assert manifest is not None
    if peers is not None:
        groups += load_peers(peers, manifest.model.precision)
    groups = with_prices(groups, dollars_per_hour, dollars_per_gb)
    report = make_report(manifest, groups, stages, tokens)
    if json_:
        print(json.dumps(report))
    else:
        print_report(report, Console())


def _check_sources(
    config: Path | None, peers: Path | None, initial_peers: tuple[str, ...], overrides: tuple[str, ...]
) -> None:
    if config is None and not initial_peers:
        raise UserError("plan needs a run's YAML file, or --initial-peers ADDRESS of a live run")
    if config is None and overrides:
        raise UserError(f"--set {overrides[0]}: it overrides a run's YAML file; name that, too")
    if peers is None and not initial_peers:
        raise UserError("plan needs peers: describe them with --peers FILE, or name a live run with --initial-peers")
