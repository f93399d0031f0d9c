"""The report of wan.py, and what the planner says of its arms."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import wan_report
from links import LinkOptions
from wan_prediction import predicted_round_s
from wan_workload import Workload

RUN = {
    "round_s": 40.0,
    "predicted_round_s": 38.0,
    "share": 0.8,
    "load": [0.5, 2.0],
    "sent_bytes_a_round": {"coordinator": 1, "peers": [2e6, 4e6]},
    "stages": [
        {"busy_share": 0.8, "barrier_s": 1.0, "averaging_s": 3.0},
        {"busy_share": 0.9, "barrier_s": 3.0, "averaging_s": 5.0},
    ],
}
PIPELINE = {name: value for name, value in RUN.items() if name != "predicted_round_s"} | {"share": 0.5}


def test_a_report_has_a_row_for_each_arm_and_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["wan.py", "--arms", "swarm@0"])
    wan_report.write_report(
        tmp_path / "report", {"swarm@0": [RUN, RUN | {"share": 0.9}], "gpipe@0": [PIPELINE]}, {"C_s": 32}
    )
    text = (tmp_path / "report" / "table.md").read_text()
    assert "`python wan.py --arms swarm@0` (C_s=32)" in text
    assert "| swarm@0 | 40.00 | 38.00 | 0.850 | 0.850 | 4.00 | 6.00 | 3.00 | 0.5 to 2.0 |" in text
    assert "| gpipe@0 | 40.00 |  | 0.500 |" in text
    assert (tmp_path / "report" / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("mode", "seconds"), [("synchronous", 34.15), ("delayed", 33.75), ("periodic", 33.55)])
def test_the_planner_knows_the_round_trips_of_each_mode(mode, seconds):
    """256 microbatches of 0.25 s in four stages of two, RTT 200 ms: 32 s; fill of 3 x (0.25 + 0.2); the round's end."""
    workload = Workload(averaging_mode=mode)
    assert predicted_round_s(workload, LinkOptions(0.1, 0.05)) == pytest.approx(seconds, abs=0.01)
    assert predicted_round_s(workload, LinkOptions()) == pytest.approx(32.75, abs=0.01)


def test_an_average_may_have_less_bandwidth_than_the_pipeline():
    workload, links = Workload(averaging="none", num_microbatches=16), LinkOptions(bytes_per_s=10_000.0)
    alike = predicted_round_s(workload, links)
    assert predicted_round_s(workload, links, 10_000.0) == pytest.approx(alike)
    of_half_the_bandwidth = predicted_round_s(workload, links, 5_000.0)
    averages_s = max(workload.num_parameters()) * 4 / 10_000
    assert of_half_the_bandwidth == pytest.approx(alike + averages_s, rel=0.01)
