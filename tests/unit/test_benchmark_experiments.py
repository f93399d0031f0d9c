"""What the experiments reckon from what they measure."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import loss as experiment
from equal_time import steps_in
from loss import ARMS, Arm, Results, manifest_of, table, validation_losses
from slow_links import SHAPES, emulated, with_averages

QUICK = (
    "model.config={model_type: gpt2, n_layer: 3, n_embd: 16, n_head: 2, vocab_size: 256, tie_word_embeddings: false}",
    "data={dataset: embedded, tokenizer: bytes, sequence_length: 16}",
    "training={steps: 2, global_batch_size: 4, microbatch_size: 2, validation_samples: 4, validation_every: 2}",
    "schedule={name: constant}",
)


@pytest.mark.parametrize("name", ARMS)
def test_all_arms_of_a_thousand_steps_fit_the_demo(name):
    settings = ("training.steps=1000", "training.validation_every=1000", "training.validation_samples=512")
    assert manifest_of(ARMS[name], 1, settings).training.steps == 1000


def test_the_loss_of_a_training_is_taken_without_codecs_on_the_wires():
    """With a learning rate of nothing, training changes nothing, and codecs show nowhere else."""
    settings = (*QUICK, "optimizer={learning_rate: 1e-30}")
    plain, rounded = (validation_losses(Arm(wires=wires), 1, 1, settings) for wires in ("none", "int4_hadamard"))
    assert plain == rounded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["reference", "control", "wires-4bit", "averaging-8bit", "delayed", "periodic-10"])
def test_a_training_on_a_gpu_learns_what_one_on_a_cpu_does(name):
    # A GPU draws other numbers for dropout.
    alike = ("model.config.embd_pdrop=0.0", "model.config.attn_pdrop=0.0", "model.config.resid_pdrop=0.0")
    twenty = ("training.steps=20", "training.validation_every=20", "optimizer={learning_rate: 1e-2}")
    settings = (*QUICK, *alike, *twenty)
    losses = [validation_losses(ARMS[name], 1, 2, settings, device)[20] for device in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0] < 5, "it has learnt: who knows nothing of 256 tokens is at 5.545"


def test_processes_with_other_seeds_and_devices_share_a_file_of_results(tmp_path, monkeypatch, capsys):
    trained = []

    def losses(arm: Arm, seed: int, num_members: int, settings: tuple[str, ...], device: str) -> dict[int, float]:
        trained.append((seed, device))
        return {2: 2.0}

    def run(first: int, device: str) -> set[tuple[int, str]]:
        """Give the trainings of a process that makes two pairs."""
        trained.clear()
        options = ("--arms", "delayed", "--seeds", "2", "--first-seed", str(first), "--device", device)
        monkeypatch.setattr(sys, "argv", ["loss.py", *options, "--results", str(tmp_path / "trainings.jsonl")])
        experiment.main()
        return set(trained)

    monkeypatch.setattr(experiment, "validation_losses", losses)
    assert run(1, "cpu") == {(1, "cpu"), (2, "cpu")}
    assert run(2, "cpu") == {(3, "cpu")}
    assert run(2, "cuda") == {(2, "cuda"), (3, "cuda")}
    assert run(1, "cpu") == set()
    assert "| delayed | 3 |" in capsys.readouterr().out.rpartition("difference")[2]


def test_trainings_are_read_again_and_pairs_are_of_the_seeds_that_both_arms_have(tmp_path):
    file = tmp_path / "trainings.jsonl"
    results = Results(file, "settings")
    for arm, seed, loss in (("reference", 1, 2.0), ("reference", 2, 4.0), ("delayed", 2, 4.4), ("delayed", 3, 9.0)):
        results.add(arm, seed, {50: 9.0, 100: loss})
    results = Results(file, "settings")
    assert ("delayed", 2) in results
    assert ("delayed", 1) not in results
    assert results.curve("delayed", 3) == {50: 9.0, 100: 9.0}
    assert results.pairs("delayed") == [(4.4, 4.0)]
    assert results.verdict("delayed").mean == pytest.approx(0.1)
    assert "| delayed | 1 | 4.4000 | 4.0000 | +10.000% |" in "\n".join(table(results, ["delayed", "control"]))
    assert ("delayed", 2) not in Results(file, "other settings")


def test_periodic_steps_in_a_share_of_the_time_are_whole_periods():
    assert steps_in(1.0, 1000, 50.0, 15.0) == 3300
    assert steps_in(1.0, 1000, 30.0, 15.0) == 2000
    assert steps_in(0.5, 1000, 50.0, 15.0) == 1650


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_emulated_has_the_ratios_of_its_shape(name):
    shape = SHAPES[name]()
    workload, bytes_per_s = emulated(shape, 65536)
    assert workload.activation_bytes() / bytes_per_s / workload.ideal_s == pytest.approx(shape.x_over_c)
    assert workload.averaging_bytes() / bytes_per_s / workload.ideal_s == pytest.approx(shape.a_over_c, rel=0.1)
    assert sum(workload.num_parameters()) < 200e6, "eight peers hold it in the memory of one machine"


def test_the_paper_s_wider_model_needs_less_of_a_link():
    narrow, wide = SHAPES["d4096-b4"](), SHAPES["d12288-b1"]()
    assert wide.microbatch_s == pytest.approx(9 / 4 * narrow.microbatch_s, rel=0.05)
    assert wide.x_over_c == pytest.approx(narrow.x_over_c / 3, rel=0.05)


def test_the_paper_s_stages_have_four_layers_each():
    """A layer has 12 weights for each pair of its width; forward, forward again and backward take four passes' time."""
    layer_flops = 2 * 12 * 4096**2 * 4 * 512
    assert SHAPES["d4096-b4"]().microbatch_s == pytest.approx(4 * 4 * layer_flops / (0.4 * 125e12), rel=0.1)


def test_periodic_rounds_get_their_share_of_the_averages_that_a_synchronous_swarm_measured():
    averaging = {"round_s": 60.0, "share": 0.5, "microbatches_per_s": 4.0, "stages": [{"averaging_s": 20.0}] * 2}
    periodic = {"round_s": 39.6, "share": 0.8, "microbatches_per_s": 8.0, "stages": [{"averaging_s": 0.0}] * 2}
    results = {
        "swarm@100": {0: averaging},
        "periodic/fp16@100": {0: periodic, 1: periodic},
        "periodic@0": {0: periodic},
    }
    found = with_averages(results)
    assert list(found) == [*results, "periodic/fp16@100, with 1/50 of an average"]
    (run,) = found["periodic/fp16@100, with 1/50 of an average"].values()
    assert (run["round_s"], run["share"], run["microbatches_per_s"]) == pytest.approx((40.0, 0.792, 7.92))
