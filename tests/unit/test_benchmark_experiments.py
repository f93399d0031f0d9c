"""What the experiments reckon from what they measure."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

import loss as experiment
from arms import COMMON, SIZES, Arm
from loss import Found, Results, Training, bytes_of, gather_text, last_loss, steps_factor, table
from slow_links import SHAPES, emulated, with_averages

from coordinator.planning.boundaries import num_trained
from coordinator.run.resolving import resolve_manifest
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError

QUICK = (
    "model.config={model_type: gpt2, n_layer: 3, n_embd: 16, n_head: 2, vocab_size: 256, tie_word_embeddings: false}",
    "data={dataset: embedded, tokenizer: bytes, sequence_length: 16}",
    "training.global_batch_size=4",
    "training.validation_samples=4",
    "schedule={name: constant}",
    # Dropout draws other numbers for each training, and on each kind of device.
    *(f"model.config.{name}_pdrop=0.0" for name in ("embd", "attn", "resid")),
)


def quick(name: str, steps: int = 2) -> RunManifest:
    return Arm.of(name).manifest("2M", 1, steps, QUICK)


def test_an_arm_is_parts_and_a_rate() -> None:
    manifest = Arm.of("periodic-10+muon+topk_2bit+wires-4bit+x4@0.03").manifest("2M", 7, 100)
    assert (manifest.averaging.mode, manifest.averaging.inner_steps) == ("periodic", 10)
    assert (manifest.averaging.outer_learning_rate, manifest.averaging.outer_momentum) == (1.0, 0.0)
    assert manifest.averaging.compression == "topk_2bit"
    assert (manifest.optimizer.name, manifest.optimizer.learning_rate, manifest.optimizer.momentum) == (
        "muon",
        0.03,
        0.95,
    )
    assert manifest.wire.activations == manifest.wire.gradients == "int4_hadamard"
    assert (manifest.training.global_batch_size, manifest.training.microbatch_size) == (16, 4)
    assert (manifest.training.steps, manifest.schedule.warmup_steps, manifest.seed) == (100, 10, 7)
    nesterov = Arm.of("periodic-10+nesterov").manifest("2M", 1, 100).averaging
    assert (nesterov.outer_learning_rate, nesterov.outer_momentum) == (0.7, 0.9)
    reference = Arm.of("adamw").manifest("2M", 1, 100)
    assert (reference.optimizer.learning_rate, reference.training.microbatch_size) == (1e-3, 16)


def test_a_part_that_there_is_none_of_is_told() -> None:
    with pytest.raises(UserError, match="'lion' is none of the parts adamw, muon"):
        Arm.of("delayed+lion")
    with pytest.raises(UserError, match="simulated for synchronous averages alone"):
        Arm.of("averages-8bit+delayed")


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_called_by_their_parameters(size: str) -> None:
    wanted = float(size.removesuffix("M")) * 1e6
    assert num_trained(resolve_manifest(Arm.of("adamw").manifest(size, 1, 100)).manifest) == pytest.approx(
        wanted, rel=0.1
    )


@pytest.mark.parametrize("more", [("stages.count=4",), ()])
@pytest.mark.parametrize("size", ["2M", "10M"])
@pytest.mark.parametrize("name", ["d/2", "d/4", "d/8+wires-8bit", "maxout-2", "maxout-4"])
def test_arms_with_boundaries_train_as_many_values(name: str, size: str, more: tuple[str, ...]) -> None:
    whole = resolve_manifest(Arm.of("adamw").manifest(size, 1, 100, more)).manifest
    manifest = Arm.of(name).manifest(size, 1, 100, more)
    assert manifest.model.boundary is not None
    assert num_trained(manifest) == pytest.approx(num_trained(whole), rel=0.002)


def test_bytes_are_of_all_that_passes() -> None:
    """192 values of a hidden state each way; a sixteenth of an average in each step."""
    assert bytes_of(Arm.of("adamw").manifest("2M", 1, 100)) == (2 * 4 * 192, 4.0)
    wires, averages = bytes_of(Arm.of("d/4+wires-8bit+periodic-16").manifest("2M", 1, 160))
    assert wires == pytest.approx(2 * 1.02 * 48, rel=0.01)
    assert averages == 0.25


def test_the_loss_of_a_training_is_taken_without_codecs_on_the_wires() -> None:
    """With a learning rate of nothing, training changes nothing, and codecs show nowhere else."""
    losses = [last_loss(quick(f"{wires}@1e-30"), Arm.of(wires)) for wires in ("adamw", "wires-4bit")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "is_reference"),
    [("averages-none", True), ("delayed+x1", True), ("averages-4bit", False), ("delayed", False), ("topk_2bit", False)],
)
def test_members_that_average_all_at_once_train_as_one_process_does(name: str, is_reference: bool) -> None:
    """So does one that has nobody to wait for."""
    rate = "@1e-2"
    reference, arm = (last_loss(quick(f"{each}{rate}", 20), Arm.of(each)) for each in ("adamw", name))
    assert (arm == pytest.approx(reference, abs=1e-4)) is is_reference


def test_a_training_that_diverges_has_an_infinite_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert last_loss(quick("adamw@1e30", 20), Arm.of("adamw")) == math.inf
    assert "diverged" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["adamw", "averages-none", "wires-4bit", "averages-8bit", "delayed", "periodic-10"])
def test_a_training_on_a_gpu_learns_what_one_on_a_cpu_does(name: str) -> None:
    losses = [last_loss(quick(f"{name}@1e-2", 20), Arm.of(name), device) for device in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0] < 5, "it has learnt: who knows nothing of 256 tokens is at 5.545"


def test_steps_to_the_same_loss_are_read_off_the_reference() -> None:
    """A loss that halves from 100 to 400 steps is down by the root of two after 200."""
    reference = {400: 1.0, 100: 2.0}
    assert steps_factor(300, 2 / math.sqrt(2), reference) == (pytest.approx(1.5), "")
    assert steps_factor(300, 2.0, reference) == (3.0, "")
    assert steps_factor(300, 1.0, reference) == (0.75, "")
    assert steps_factor(300, 2.1, reference) == (3.0, ">")
    assert steps_factor(300, 0.9, reference) == (0.75, "<")
    assert steps_factor(300, math.inf, reference) == (3.0, ">")
    assert steps_factor(200, 1.5, {200: 1.5}) == (1.0, "")
    assert str(Found(0.75, "<")) == "<0.75"


def test_a_table_has_the_pairs_of_the_seeds_that_both_arms_have(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results = Results(file, ["settings"])
    for arm, steps, seed, loss in (
        ("adamw", 100, 1, 2.0),
        ("adamw", 100, 2, 4.0),
        ("adamw", 50, 2, 8.0),
        ("delayed", 100, 2, 5.0),
        ("delayed", 100, 3, 9.0),
    ):
        results.add(Training(arm, "2M", steps, seed), loss, 1.0)
    with file.open("a") as out:
        out.write('{"training": ["adamw", "2M", 100')  # a process that was killed
    results = Results(file, ["settings"])
    assert Training("delayed", "2M", 100, 3) in results.losses
    assert results.pairs("delayed", "2M", 100, "adamw") == {2: (5.0, {100: 4.0, 50: 8.0})}
    (row,) = [line.split(" | ") for line in table(results, [], "adamw") if "delayed" in line]
    factor = 100 / (50 * 2 ** (math.log(8 / 5) / math.log(2)))
    assert row[5:] == ["2, 3", "7.0000", "+25.00%", "", f"{factor:.2f} |"]
    assert not Results(file, ["others"]).losses


def test_processes_share_a_folder_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []
    (tmp_path / "source.py").write_text("some text")

    def losses(manifest: RunManifest, arm: Arm, device: str) -> float:
        trained.append((arm.name, manifest.training.steps, manifest.seed))
        return 2.0

    def run(*options: str) -> list[tuple[str, int, int]]:
        trained.clear()
        text = ("--text", str(tmp_path / "*.py"))
        monkeypatch.setattr(sys, "argv", ["loss.py", str(tmp_path / "folder"), *text, *options])
        experiment.main()
        return trained.copy()

    monkeypatch.setattr(experiment, "last_loss", losses)
    arms = ("--arms", "delayed", "--steps", "20", "--reference-steps", "10", "20")
    first = [("adamw", 10, 1), ("adamw", 20, 1), ("delayed", 20, 1)]
    assert run(*arms, "--seeds", "1") == first
    assert run(*arms, "--seeds", "1", "2") == [(arm, steps, 2) for arm, steps, _ in first]
    assert run(*arms, "--set", "stages.count=1", "--seeds", "1") == first
    assert run("--table") == []
    assert "| 2M | delayed | 20 |" in capsys.readouterr().out.rpartition("difference")[2]


def test_text_is_joined_in_a_drawn_order(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.py").write_text(f"file {number}")
    texts = []
    for name in ("one", "two"):
        gather_text([str(tmp_path / "*.py")], tmp_path / name)
        texts.append([path.read_text() for path in sorted((tmp_path / name).iterdir())])
    assert texts[0] == texts[1]
    numbers = [int(word) for text in texts[0] for word in text.split() if word != "file"]
    assert sorted(numbers) == list(range(40)) != numbers
    with pytest.raises(UserError, match="names no files"):
        gather_text([str(tmp_path / "*.txt")], tmp_path / "three")


def test_all_arms_have_the_demo_s_data() -> None:
    assert all(setting.partition(".")[0] in ("training", "data") for setting in COMMON)


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
