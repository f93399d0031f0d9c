"""Which addresses of peers Prometheus is told to ask."""

import json
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from coordinator.watch.metrics import CoordinatorMetrics
from coordinator.watch.targets import scrape_targets
from swarm_peer.policy.leadership import Term
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.runtime.host.metrics import PeerMetrics, serve_metrics
from swarm_peer.runtime.network.peer_addresses import metrics_address

PUBLIC = "/ip4/203.0.113.5/tcp/1/p2p/x"
LOOPBACK = "/ip4/127.0.0.1/tcp/1/p2p/x"


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("127.0.0.1", [LOOPBACK], "127.0.0.1:9464"),
        ("127.0.0.1", [LOOPBACK, PUBLIC], ""),
        ("::1", [PUBLIC], ""),
        ("10.8.0.2", [PUBLIC], "10.8.0.2:9464"),
        ("0.0.0.0", [LOOPBACK, PUBLIC], "203.0.113.5:9464"),
        ("0.0.0.0", [LOOPBACK], "127.0.0.1:9464"),
        ("::", ["/ip6/2001:db8::1/tcp/1/p2p/x"], "[2001:db8::1]:9464"),
        ("0.0.0.0", ["/dns4/peer.example/tcp/1/p2p/x"], ""),
        ("peer.example", [PUBLIC], ""),
    ],
)
def test_a_peer_announces_where_others_reach_its_metrics(host, addresses, expected):
    assert metrics_address(host, 9464, addresses) == expected
    assert metrics_address(host, None, addresses) == ""


def metrics_of(output):
    return CoordinatorMetrics(
        output, SimpleNamespace(addresses=[PUBLIC], metrics=PeerMetrics(), identity=SimpleNamespace(peer_id="me"))
    )


def view_of(*addresses):
    peers = [
        PeerView(peer_id=f"p{number}", stage=0, state=PeerState.SERVING, metrics_address=address, name="n")
        for number, address in enumerate(addresses)
    ]
    return SwarmView(1, tuple(peers))


def test_targets_carry_labels_for_relabelling():
    labels = {"__meta_swarm_peer": "p1", "__meta_swarm_name": "n", "__meta_swarm_stage": "0"}
    assert scrape_targets(view_of("", "10.0.0.7:9464"), is_local=False) == [
        {"targets": ["10.0.0.7:9464"], "labels": labels}
    ]


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254:80", "0.0.0.0:80", "224.0.0.1:80", "255.255.255.255:80", "[fe80::1]:80", "[::]:80"),
        *("[::ffff:169.254.169.254]:80", "[ff02::1]:80"),
    ],
)
@pytest.mark.parametrize("is_local", [True, False])
def test_prometheus_is_not_led_to_other_services(address, is_local):
    assert scrape_targets(view_of(address), is_local=is_local) == []


@pytest.mark.parametrize("address", ["127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80"])
def test_only_where_the_whole_swarm_is_on_one_machine_is_it_asked(address):
    assert scrape_targets(view_of(address), is_local=False) == []
    assert [group["targets"] for group in scrape_targets(view_of(address), is_local=True)] == [[address]]


def test_targets_are_served_beside_the_metrics():
    pages = iter(['[{"targets": []}]'])
    port = serve_metrics(CollectorRegistry(), "127.0.0.1", 0, targets=lambda: next(pages))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/targets", timeout=5) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        assert json.load(answer) == [{"targets": []}]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.status == 200


def test_the_coordinator_counts_moves_over_its_terms(tmp_path):
    metrics = metrics_of(tmp_path)
    for in_term in (0, 2, 2, 3, 0, 1):
        metrics.count_moves(in_term)
    assert metrics.registry.get_sample_value("swarm_run_moves_total") == 4


def test_the_disk_is_shown_and_a_folder_that_is_gone_is_no_error(tmp_path):
    there, gone = metrics_of(tmp_path), metrics_of(Path("/no/such/folder"))
    assert there.registry.get_sample_value("swarm_run_disk_total_bytes") > 0
    value = gone.registry.get_sample_value("swarm_run_disk_free_bytes")
    assert value != value, "it is not known"


def test_steps_without_a_checkpoint_are_counted_from_the_first_that_this_coordinator_saw(tmp_path):
    metrics = metrics_of(tmp_path)
    watch = SimpleNamespace(lines=[], optimizer_step=0, checkpoint_step=None, coordination=None)

    def uncovered(optimizer_step, checkpoint_step=None, acts=None):
        watch.optimizer_step, watch.checkpoint_step, watch.lines = optimizer_step, checkpoint_step, [{}]
        watch.coordination = acts and (Term(1, acts), None)
        metrics._update_checkpoint(watch)
        return metrics.registry.get_sample_value("swarm_run_steps_since_checkpoint")

    metrics._update_checkpoint(watch)
    assert uncovered(1000) == 0, "it may have been started again"
    assert uncovered(1070) == 70
    assert uncovered(1110, checkpoint_step=1100) == 10
    assert uncovered(1080, checkpoint_step=1100) == 0, "the run has gone back"
    assert uncovered(1130, checkpoint_step=1100, acts="me") == 30
    assert uncovered(1900, checkpoint_step=1100, acts="another") == 0, "the other one writes them"
    assert uncovered(1950, checkpoint_step=1100, acts="me") == 50
