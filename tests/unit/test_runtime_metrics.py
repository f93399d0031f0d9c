"""Where metrics can be read: on this machine's loopback address, unless its owner names another one."""

from __future__ import annotations

import logging
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.cli import app as coordinator_app
from coordinator.dashboard.place import parse_place
from coordinator.run.coordinator_options import NodeOptions
from swarm_peer.cli import app as peer_app
from swarm_peer.errors import UserError
from swarm_peer.peer_options import PeerOptions
from swarm_peer.runtime.host import metrics
from swarm_peer.runtime.host.metrics import PeerMetrics, count_logged_errors, serve_metrics

DOCKER = Path(__file__).parents[2] / "docker"


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The addresses that metrics are served on; each server ends with the test."""
    servers: list[Any] = []
    start = metrics.start_http_server

    def start_and_note(*args: Any, **kwargs: Any) -> Any:
        server, thread = start(*args, **kwargs)
        servers.append(server)
        addresses.append(server.socket.getsockname()[:2])
        return server, thread

    addresses: list[tuple[str, int]] = []
    monkeypatch.setattr(metrics, "start_http_server", start_and_note)
    yield addresses
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("options", [PeerOptions(initial_peers=("x",)), NodeOptions()])
def test_metrics_are_for_this_machine_alone_by_default(
    options: PeerOptions | NodeOptions, bound: list[tuple[str, int]]
) -> None:
    registry = CollectorRegistry()
    Gauge("swarm_test", "A gauge", registry=registry).set(7)
    port = serve_metrics(registry, options.metrics_host, 0)
    assert bound == [("127.0.0.1", port)]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert b"swarm_test 7.0" in answer.read()


def test_nothing_is_served_but_what_was_defined(bound: list[tuple[str, int]]) -> None:
    registry = CollectorRegistry()
    Counter("swarm_test", "A counter", registry=registry).inc()
    Histogram("swarm_test_seconds", "A histogram", registry=registry).observe(1.0)
    port = serve_metrics(registry, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        page = answer.read()
    assert b"swarm_test_total 1.0" in page
    assert b"swarm_test_seconds_count 1.0" in page
    assert b"_created" not in page


def test_errors_of_this_program_are_counted() -> None:
    registry = CollectorRegistry()
    packages = [logging.getLogger(name) for name in ("swarm_peer", "coordinator")]
    before = [list(package.handlers) for package in packages]
    try:
        count_logged_errors(registry)
        assert registry.get_sample_value("swarm_logged_errors_total") == 0.0, "else the first one would be no increase"
        for name in ("swarm_peer.runtime.data.prefetch", "coordinator.watch", "hivemind"):
            logging.getLogger(name).error("slice_cut_short slice=%s", (0, 1))
            logging.getLogger(name).warning("slice_not_read")
        assert registry.get_sample_value("swarm_logged_errors_total") == 2.0
    finally:
        for package, handlers in zip(packages, before, strict=True):
            package.handlers[:] = handlers


def test_an_address_that_cannot_be_served_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1 port {port}.*--metrics-port"):
            serve_metrics(CollectorRegistry(), "127.0.0.1", port)
    with pytest.raises(UserError, match=r"192\.0\.2\.1 port 0.*--metrics-host"):
        serve_metrics(CollectorRegistry(), "192.0.2.1", 0)  # an address for documents, which no machine has


def test_prometheus_reaches_all_that_compose_starts() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    jobs = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == {"coordinator", "peer"}
    _, bound_arguments, _ = coordinator_app.parse_args(services["coordinator"]["command"], exit_on_error=False)
    node = bound_arguments.arguments["node"]
    _, bound_arguments, _ = peer_app.parse_args(services["peer"]["command"], exit_on_error=False)
    peer = bound_arguments.arguments["options"]
    assert [(it.metrics_host, it.metrics_port) for it in (node, peer)] == [("0.0.0.0", 9464)] * 2


def test_compose_shows_the_runs_page_on_this_machine_alone() -> None:
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["coordinator"]
    _, bound_arguments, _ = coordinator_app.parse_args(service["command"], exit_on_error=False)
    host, port = parse_place(bound_arguments.arguments["dashboard"])
    assert host == "0.0.0.0", "the container's port is published"
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]


@pytest.mark.parametrize(("is_over", "level"), [(False, "ERROR"), (True, "INFO")])
def test_what_is_lost_is_no_error_when_the_run_is_over(caplog, is_over, level):
    caplog.set_level(logging.INFO)
    own = PeerMetrics()
    own.run_is_over = is_over
    own.lose(3, "there is no stage-mate", round_number=7)
    assert [record.levelname for record in caplog.records] == [level]
    assert ("the run is over" in caplog.text) == is_over
    assert own.lost_samples._value.get() == 3
