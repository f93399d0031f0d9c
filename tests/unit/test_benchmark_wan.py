"""The report of wan.py, and what the planner says of its arms."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import wan
import wan_report
from links import LinkOptions
from wan import Arm, Measuring, run_arms
from wan_pipeline import ThinStage
from wan_prediction import predicted_round_s
from wan_swarm import troubles
from wan_workload import Workload

from coordinator.planning.peers_file import AVERAGING_GAIN, USUAL_LINK_UTILISATION
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer

RUN = {
    "round_s": 40.0,
    "predicted_round_s": 38.0,
    "share": 0.8,
    "load": [0.5, 2.0],
    "microbatches_per_s": 6.0,
    "cores": 0.5,
    "commit": "abc1234",
    "troubles": {"average_failed": 1},
    "sent_bytes_a_round": {"coordinator": 1, "peers": [2e6, 4e6]},
    "stages": [
        {"busy_share": 0.8, "barrier_s": 1.0, "averaging_s": 3.0},
        {"busy_share": 0.9, "barrier_s": 3.0, "averaging_s": 5.0},
    ],
}
PIPELINE = {name: value for name, value in RUN.items() if name not in ("predicted_round_s", "troubles")}
PIPELINE |= {"share": 0.5, "microbatches_per_s": 3.0}


def test_a_report_has_a_row_for_each_arm_and_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["wan.py", "--arms", "swarm@0"])
    results = {
        "swarm@0": {0: RUN, 1: RUN | {"share": 0.9, "microbatches_per_s": 4.0}},
        "gpipe@0": {1: PIPELINE},
        "failed@0": {},
    }
    wan_report.write_report(tmp_path / "report", results, {"C_s": 32})
    text = (tmp_path / "report" / "table.md").read_text()
    assert "`python wan.py --arms swarm@0` (C_s=32). Runs of abc1234." in text
    assert "| 40.00 | 38.00 | 0.850 | 1.000 (1.000 to 1.000) | 0.850 | 4.00 | 6.00 | 3.00 | 0.50 | 0.5 to 2.0 |" in text
    assert "| 0.5 to 2.0 | average_failed 2 |" in text
    assert "| gpipe@0 | 40.00 |  | 0.500 | 0.750 |" in text, "to the first arm's run of the same repetition"
    assert "failed@0" not in text
    assert (tmp_path / "report" / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("mode", "seconds"), [("synchronous", 34.15), ("delayed", 33.75), ("periodic", 33.55)])
def test_the_planner_knows_the_round_trips_of_each_mode(mode, seconds):
    """256 microbatches of 0.25 s in four stages of two, RTT 200 ms: 32 s; fill of 3 x (0.25 + 0.2); the round's end."""
    workload = Workload(averaging_mode=mode)
    assert predicted_round_s(workload, LinkOptions(0.1, 0.05)) == pytest.approx(seconds, abs=0.01)
    assert predicted_round_s(workload, LinkOptions()) == pytest.approx(32.75, abs=0.01)


def test_runs_that_a_file_has_are_not_run_again_and_one_that_fails_is_left_out(tmp_path, monkeypatch):
    ran = []

    def measured(arm, workload, measuring, repetition):
        ran.append((arm.name, repetition))
        if arm.system == "gpipe":
            raise RuntimeError("no luck")
        return dict(RUN)

    monkeypatch.setattr(wan, "measure", measured)
    arms = [Arm.parse(name) for name in ("swarm@0", "gpipe@0")]
    measuring = Measuring(arms=arms, num_rounds=2, runs=tmp_path / "new" / "runs.jsonl")
    *_, results = run_arms(Workload(), measuring)
    assert (list(results["swarm@0"]), list(results["gpipe@0"])) == ([0], [])
    with measuring.runs.open("a") as file:
        file.write('{"key": ["torn')
    *_, results = run_arms(Workload(), measuring)
    assert ran == [("swarm@0", 0), ("gpipe@0", 0), ("gpipe@0", 0)], "what failed is tried again"
    assert wan.failed_arms(results, 1) == ["gpipe@0"]
    *_, results = run_arms(Workload(), replace(measuring, repeat=2))
    assert (list(results["swarm@0"]), results["swarm@0"][0]["round_s"]) == ([0, 1], 40.0)
    *_, results = run_arms(Workload(wire="none"), measuring)
    assert ran.count(("swarm@0", 0)) == 2, "once for each workload"
    assert ran.count(("swarm@0", 1)) == 1


def test_an_arm_may_have_wires_of_its_own():
    arm = Arm.parse("periodic/int4_hadamard@100+-50")
    assert (arm.system, arm.wire, arm.links) == ("periodic", "int4_hadamard", LinkOptions(0.1, 0.05))
    for text, why in (("swarm/int3@0", "int3 is no codec"), ("swam@0", "an arm is swarm|"), ("swarm", "an arm is")):
        with pytest.raises(argparse.ArgumentTypeError, match=why):
            Arm.parse(text)


@pytest.mark.parametrize(
    ("wire", "number"), [("none", 6144), ("fp16", 3072), ("blockwise_8bit", 1560), ("int4_hadamard", 816)]
)
def test_torch_s_pipelines_send_what_a_codec_makes_of_a_microbatch(wire, number):
    workload = Workload(width=64, sequence_length=96, wire=wire, num_stages=3)
    resolved = ResolvedManifest.of(workload.manifest())
    first, middle, last = (ThinStage(StageTrainer(resolved, spec).module, workload) for spec in resolved.specs)
    sent = first(torch.zeros(1, 96, dtype=torch.int64))
    assert sent.shape == (1, number)
    received = middle(sent).detach().requires_grad_()
    logits = last(received)
    assert logits.shape == (1, 96, 256)
    logits.sum().backward()
    assert received.grad.shape == (1, number), "and so many come back"


def test_troubles_are_counted_by_event():
    log = "t WARNING average_failed round=3\nt INFO place_lost peer=a\nt INFO place_lost_once x\n"
    assert troubles([log, "t WARNING average_failed round=4"]) == {"average_failed": 2, "place_lost": 1}


def test_a_prediction_is_of_the_share_of_a_link_that_is_used():
    workload = Workload(averaging="none", num_microbatches=16)
    unlimited = predicted_round_s(workload, LinkOptions())
    used_bytes_per_s = 10_000 * USUAL_LINK_UTILISATION * AVERAGING_GAIN
    averages_s = max(workload.num_parameters()) * 4 / used_bytes_per_s
    predicted_s = predicted_round_s(workload, LinkOptions(bytes_per_s=10_000.0))
    assert unlimited + averages_s < predicted_s < unlimited + AVERAGING_GAIN * averages_s
