"""docs/metrics.md has each metric of a peer and of the coordinator, with its labels."""

import re
from types import SimpleNamespace

import pytest

from coordinator.watch.metrics import CoordinatorMetrics
from swarm_peer.runtime.host.metrics import PeerMetrics, count_logged_errors, show_disk
from tests.unit.test_docs import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()
# | `swarm_a`, `swarm_b` | counter, s | `label`: `value`, `value`; `label` |
ROW = re.compile(r"^\| (`swarm_[^|]*)\| (\w+)[^|]*\|([^|]*)\|", re.MULTILINE)
NAME = re.compile(r"`(swarm_\w+)`")
LABEL = re.compile(r"(?:^ |; )`(\w+)`")


def documented(section):
    """The metrics that a section of the page has, as {name: (type, labels)}."""
    return {
        name.removesuffix("_total"): (kind, set(LABEL.findall(labels)))
        for names, kind, labels in ROW.findall(PAGE.split(f"## {section}\n")[1].split("\n## ")[0])
        for name in NAME.findall(names)
    }


def exported(registry):
    # The library shows the labels of a metric to the public only once it has a value.
    return {metric._name: (metric._type, set(metric._labelnames)) for metric in registry._collector_to_names}


def of_a_peer(tmp_path):
    registry = PeerMetrics().registry
    show_disk(registry, "swarm", tmp_path)
    return registry


def of_the_coordinator(tmp_path):
    return CoordinatorMetrics(tmp_path, SimpleNamespace(metrics=PeerMetrics(), addresses=())).registry


@pytest.mark.parametrize(("section", "registry_of"), [("A peer", of_a_peer), ("The coordinator", of_the_coordinator)])
def test_the_page_has_each_metric_and_no_other(tmp_path, section, registry_of):
    registry = registry_of(tmp_path)
    count_logged_errors(registry)
    found = documented(section)
    assert found == exported(registry)
    assert len(found) > 15
