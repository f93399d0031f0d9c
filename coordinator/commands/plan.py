"""`plan`: predicts how a run would do with certain peers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from coordinator.commands.options import Addresses, Flat, Json, Overrides
from swarm_peer.cli import configure_logging
from swarm_peer.config import load_manifest
from swarm_peer.errors import UserError

if TYPE_CHECKING:
    from coordinator.planning.live_peers import LivePeers


@dataclass(frozen=True, kw_only=True)
class LivePeerOptions:
    """Assumptions on a live run's peers, as an operator types them.

    Attributes:
        upload_mbps: What each peer of the live run sends, megabits per second.
        download_mbps: What each peer of the live run receives.
        latency_ms: Round trip between peers of the live run.
        memory_gb: Memory of each peer of the live run that training may use.
    """

    upload_mbps: float | None = None
    download_mbps: float | None = None
    latency_ms: float = 0.0
    memory_gb: float | None = None

    def in_base_units(self) -> LivePeers:
        """The same in bytes and seconds; unlimited where nothing is said."""
        from coordinator.planning.live_peers import LivePeers

        return LivePeers(
            memory_bytes=self.memory_gb * 1e9 if self.memory_gb else float("inf"),
            upload_bytes_per_s=self.upload_mbps * 1e6 / 8 if self.upload_mbps else float("inf"),
            download_bytes_per_s=self.download_mbps * 1e6 / 8 if self.download_mbps else float("inf"),
            latency_s=self.latency_ms / 1e3,
        )


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """Prices that count instead of those of the file.

    Attributes:
        dollars_per_hour: Price of each peer, whatever the file says.
        dollars_per_gb: Price of each gigabyte that a peer sends, whatever the file says.
    """

    dollars_per_hour: float | None = None
    dollars_per_gb: float | None = None


def plan(
    config: Path | None = None,
    *,
    peers: Path | None = None,
    initial_peers: Addresses = (),
    run_id: str | None = None,
    stages: int | None = None,
    tokens: int | None = None,
    prices: Annotated[PriceOptions, Flat] = PriceOptions(),
    live: Annotated[LivePeerOptions, Flat] = LivePeerOptions(),
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
    """
    configure_logging("warning")
    if config is None and not initial_peers:
        raise UserError("plan needs a run's YAML file, or --initial-peers ADDRESS of a live run")
    if config is None and set_:
        raise UserError(f"--set {set_[0]}: it overrides a run's YAML file; name that, too")
    if peers is None and not initial_peers:
        raise UserError("plan needs peers: describe them with --peers FILE, or name a live run with --initial-peers")
    _check_numbers({"--stages": stages, "--tokens": tokens}, live, prices)
    manifest = load_manifest(config, set_) if config is not None else None

    from coordinator.planning.live_peers import live_groups, read_live_run, with_prices
    from coordinator.planning.peers_file import load_peers
    from coordinator.planning.plan import make_report, resolve_config

    groups = []
    if initial_peers:
        live_manifest, view = read_live_run(initial_peers, run_id)
        if manifest is None:
            manifest, stages = live_manifest, stages or live_manifest.stages.count
        groups += live_groups(live_manifest, view, live.in_base_units())
    assert manifest is not None
    if peers is not None:
        groups += load_peers(peers, manifest.model.precision)
    groups = with_prices(groups, prices.dollars_per_hour, prices.dollars_per_gb)
    report = make_report(resolve_config(manifest), groups, stages, tokens)
    if json_:
        print(json.dumps(report))
        return
    from rich.console import Console

    from coordinator.planning.plan_report import print_report

    print_report(report, Console())


def _check_numbers(counts: Mapping[str, int | None], live: LivePeerOptions, prices: PriceOptions) -> None:
    positive: dict[str, float | None] = {
        **counts,
        "--upload-mbps": live.upload_mbps,
        "--download-mbps": live.download_mbps,
        "--memory-gb": live.memory_gb,
    }
    for option, number in positive.items():
        if number is not None and not number > 0:
            raise UserError(f"{option} {number}: expected more than 0")
    not_negative = {
        "--dollars-per-hour": prices.dollars_per_hour,
        "--dollars-per-gb": prices.dollars_per_gb,
        "--latency-ms": live.latency_ms,
    }
    for option, number in not_negative.items():
        if number is not None and not number >= 0:
            raise UserError(f"{option} {number}: expected 0 or more")
