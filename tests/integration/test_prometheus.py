"""A real Prometheus sees a real swarm: each panel of the dashboard has values, and an alert comes and goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus import DOCKER, needs_prometheus, running_prometheus
from swarm import LiveSwarm, SwarmStopped, forked_peer, run_swarm, tiny_manifest

from coordinator.run.local_peers import Launch, Process
from swarm_peer.config import RunManifest
from swarm_peer.runtime.host.metrics import serve_metrics

pytestmark = [pytest.mark.slow, needs_prometheus]

# The longest that people wait to hear of an emptied stage.
ALERT_S = 120.0


def endless_manifest() -> RunManifest:
    training = {
        "steps": 100_000,
        "global_batch_size": 64,
        "microbatch_size": 2,
        "validation_every": 5,
        "validation_samples": 4,
    }
    return tiny_manifest(training=training, limits={"hop_timeout_s": 10})


def with_metrics(records: Path, fault: str) -> Launch:
    """Start peers that show their metrics."""
    launch = forked_peer(records, fault)

    def start(options: Sequence[str], log_file: Path, threads: int) -> Process:
        return launch([*options, "--metrics-port", "0"], log_file, threads)

    return start


def metrics_port(live: LiveSwarm) -> int:
    """Serve the coordinator's metrics, as `serve` does."""
    metrics = live.service.metrics
    return serve_metrics(metrics.registry, "127.0.0.1", 0, lambda: metrics.targets)


def panel_queries() -> list[tuple[str, str]]:
    """The queries of the dashboard's panels, each with the panel's title."""
    dashboard: dict[str, Any] = json.loads((DOCKER / "grafana/dashboards/swarm.json").read_text())
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "20s"))
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def test_every_panel_shows_something_of_a_real_swarm(tmp_path: Path) -> None:
    shown: dict[str, list[float]] = {}
    queries = panel_queries()
    assert len(queries) > 30

    async def script(live: LiveSwarm) -> None:
        with running_prometheus(tmp_path, metrics_port(live)) as prometheus:
            await live.until(lambda: prometheus.values('up{job="peer"}') == [1, 1, 1], "three peers are scraped")
            for title, query in queries:

                def has_values(query: str = query) -> bool:
                    shown[query] = prometheus.values(query)
                    return bool(shown[query])

                await live.until(has_values, f"a value of panel {title!r}: {query}", 60)
        raise SwarmStopped

    run_swarm(endless_manifest(), [2, 1], tmp_path, script=script, launch=with_metrics)
    assert shown['sum(max by (stage) (swarm_run_stage_peers{state="serving"}))'] == [3]
    assert all(0 <= share <= 1 for share in shown["avg by (activity) (swarm_run_stage_time_share)"])
    assert sum(shown["avg by (activity) (swarm_run_stage_time_share)"]) == pytest.approx(1)
    assert shown["max(swarm_run_optimizer_step)"][0] > 0
    assert len(shown['swarm_device_time_share{activity="computing"}']) == 3


def test_an_emptied_stage_is_an_alert_until_it_is_served_again(tmp_path: Path) -> None:
    async def script(live: LiveSwarm) -> None:
        with running_prometheus(tmp_path, metrics_port(live)) as prometheus:
            serving = 'swarm_run_stage_peers{state="serving"}'
            await live.until(lambda: prometheus.values(serving) == [1, 1], "both stages are seen to be served")
            assert not prometheus.firing("StageWithoutPeers")
            live.kill("1.0")
            await live.until(lambda: prometheus.firing("StageWithoutPeers"), "the alert", ALERT_S)
            assert [labels["stage"] for labels in prometheus.firing("StageWithoutPeers")] == ["1"]
            live.start(1, "newcomer")
            await live.until(lambda: not prometheus.firing("StageWithoutPeers"), "the alert's end", ALERT_S)
        raise SwarmStopped

    run_swarm(endless_manifest(), [1, 1], tmp_path, script=script, launch=with_metrics)
