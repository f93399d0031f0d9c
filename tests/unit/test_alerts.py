"""Alert rules and dashboard as Prometheus and Grafana read them, without either."""

import json
import logging
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from coordinator.watch.metrics import CoordinatorMetrics
from swarm_peer.runtime.host.metrics import PeerMetrics, count_logged_errors, show_disk

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/swarm.json").read_text())

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)


@needs_promtool
@pytest.mark.parametrize(
    ("command", "file"), [("test rules", "tests/unit/alerts_test.yml"), ("check config", "docker/prometheus.yml")]
)
def test_promtool_accepts(command, file):
    path = ROOT / file
    checked = subprocess.run(
        ["promtool", *command.split(), path.name], cwd=path.parent, capture_output=True, text=True, timeout=50
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_peer_sends_prometheus_nowhere_and_does_not_speak_for_the_run():
    jobs = {job["job_name"]: job for job in yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]}
    assert jobs["peer"]["follow_redirects"] is False
    dropped = [rule["regex"] for rule in jobs["peer"]["metric_relabel_configs"] if rule["action"] == "drop"]
    assert any(re.fullmatch(regex, "swarm_run_stage_peers") for regex in dropped)
    assert not any(re.fullmatch(regex, "swarm_optimizer_step") for regex in dropped)


def rules():
    return [rule for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def test_each_alert_has_a_test():
    tests = yaml.safe_load((ROOT / "tests/unit/alerts_test.yml").read_text())["tests"]
    tested = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert tested == {rule["alert"] for rule in rules()}


@pytest.fixture
def exported(tmp_path, monkeypatch):
    """The names of all metrics of peers and coordinators."""
    peer = PeerMetrics()
    show_disk(peer.registry, "swarm", tmp_path)
    for package in ("swarm_peer", "coordinator"):  # what they log is not counted for the other tests
        monkeypatch.setattr(logging.getLogger(package), "handlers", [])
    count_logged_errors(peer.registry)
    coordinator = CoordinatorMetrics(tmp_path, SimpleNamespace(addresses=[], metrics=peer))
    families = [*peer.registry.collect(), *coordinator.registry.collect()]
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    return names | {f"{family.name}_bucket" for family in families if family.type == "histogram"}


def test_alerts_and_panels_ask_for_metrics_that_there_are(exported):
    queries = [rule["expr"] for rule in rules()]
    queries += [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    asked = set(re.findall(r"\bswarm_\w+", " ".join(queries)))
    assert len(asked) > 25
    assert asked <= exported


def test_the_dashboard_is_complete():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    provisioned = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    (datasource,) = provisioned["datasources"]
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["targets"]
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == datasource["uid"]


def test_compose_gives_prometheus_and_grafana_their_files():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            assert (DOCKER / volume.split(":")[0]).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"]), "neither asks for a password"
