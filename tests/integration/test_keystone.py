"""The project's conscience: a swarm of any shape gives the same updates as one process fed the same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm import GEMMA3, GPT2, LLAMA, SwarmRun, run_swarm, tiny_manifest

from coordinator.run.baseline import Baseline
from swarm_peer.config import RunManifest
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.runtime.data.slices import validation_samples
from swarm_peer.token_marks import num_targets

FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "gemma3": GEMMA3}
SHAPES = [(num_stages, num_peers) for num_stages in (1, 2, 3) for num_peers in (1, 2)]
# The older families in every shape, and the one whose layers differ most in one; `make test` has one of each.
QUICK = {("gpt2", 1, 1), ("gemma3", 2, 2), ("llama", 3, 2)}
CASES = [
    pytest.param(family, *shape, marks=() if (family, *shape) in QUICK else pytest.mark.slow)
    for shape in SHAPES
    for family in FAMILIES
    if family != "gemma3" or shape == (2, 2)
]


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def check_counts(run: SwarmRun, manifest: RunManifest) -> None:
    """Every global batch is full, its samples are new ones, and what stage 0 counted is what was reported."""
    steps = manifest.training.steps
    assert sorted(run.counted) == list(range(steps))
    assert [line["optimizer_step"] for line in run.lines] == list(range(1, steps + 1))
    # By name: the same text, such as a line of dashes, may well stand in the data twice.
    seen = set()
    for round_number in range(steps):
        assert sum(map(len, run.counted[round_number])) >= manifest.training.global_batch_size
        assert sum(map(len, run.counted[round_number])) == run.lines[round_number]["samples"]
        samples = set(run.samples[round_number])
        assert len(samples) == run.lines[round_number]["samples"]
        assert seen.isdisjoint(samples), "a sample was counted twice"
        seen |= samples


def check_stage_mates(run: SwarmRun) -> None:
    """All peers of a stage hold bitwise the same state."""
    for states in run.states:
        first = states[0]
        for other in states[1:]:
            assert (other.round_number, other.history_hash) == (first.round_number, first.history_hash)
            assert other.tensors.keys() == first.tensors.keys()
            assert all(torch.equal(other.tensors[name], tensor) for name, tensor in first.tensors.items())


def check_weights(run: SwarmRun, baseline: Baseline, tolerance: float = 1e-5) -> None:
    """Every weight and moment is that of the reference, but for the rounding of sums."""
    for trainer, states in zip(baseline.trainers, run.states, strict=True):
        for name, expected in trainer.state().items():
            difference = relative_difference(states[0].tensors[name], expected)
            assert difference < tolerance, f"{name} differs by {difference:.2e}"


def check_nothing_lost(run: SwarmRun) -> None:
    logs = run.logs()
    for event in ("samples_given_up", "average_failed", "place_lost", "samples_lost"):
        assert event not in logs, f"{event} in a run without faults:\n{logs[-3000:]}"


@pytest.mark.parametrize(("family", "num_stages", "num_peers"), CASES)
def test_weights_equal_the_single_process(family: str, num_stages: int, num_peers: int, tmp_path: Path) -> None:
    manifest = tiny_manifest(
        model={"config": FAMILIES[family]},
        stages={"count": num_stages, "peers_to_start": num_peers},
        averaging={"compare_weights_every": 2},
    )
    run = run_swarm(manifest, [num_peers] * num_stages, tmp_path)

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        loss, _ = baseline.train_step(run.counted[round_number])
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-5)
    check_weights(run, baseline)


@pytest.mark.parametrize(
    ("family", "num_stages", "boundary"),
    [
        ("gpt2", 3, {"rank": 8}),
        ("llama", 2, {"rank": 8}),
        pytest.param("gpt2", 2, {"rank": 8}, marks=pytest.mark.slow),
        pytest.param("llama", 3, {"rank": 8}, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, {"maxout": 2}, marks=pytest.mark.slow),
        pytest.param("llama", 3, {"maxout": 2}, marks=pytest.mark.slow),
    ],
)
def test_few_values_at_boundaries_equal_the_single_process(
    family: str, num_stages: int, boundary: dict[str, int], tmp_path: Path
) -> None:
    manifest = tiny_manifest(
        model={"config": FAMILIES[family], "boundary": boundary},
        stages={"count": num_stages, "peers_to_start": 2},
        averaging={"compare_weights_every": 2},
    )
    run = run_swarm(manifest, [2] * num_stages, tmp_path)

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        loss, _ = baseline.train_step(run.counted[round_number])
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-5)
    check_weights(run, baseline)


def test_answers_of_unlike_lengths_equal_the_single_process(tmp_path: Path) -> None:
    """Of the answers, most have two targets and some 21, and so gradients and losses weigh by targets."""
    lengths = [1 if number % 3 else 20 for number in range(400)]
    turns = [(f"{number:03d}", "yes"[number % 3] * length) for number, length in enumerate(lengths)]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in turns]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    manifest = tiny_manifest(
        data={"dataset": "json", "files": [f"{tmp_path}/data.jsonl"], "format": "prompt_completion"},
        training={"validation_every": 5},
        stages={"count": 2, "peers_to_start": 2},
    )
    run = run_swarm(manifest, [2, 2], tmp_path)

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        counted = run.counted[round_number]
        assert len({num_targets(tokens_BS) for tokens_BS in counted}) > 1
        loss, _ = baseline.train_step(counted)
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-5)
    check_weights(run, baseline)
    expected = baseline.evaluate(validation_samples(manifest, manifest.training.validation_samples))
    assert run.lines[-1]["validation_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_losses_under_adamw_equal_the_single_process(family: str, tmp_path: Path) -> None:
    optimizer: dict[str, Any] = {"name": "adamw", "learning_rate": 3e-3, "momentum": 0.0, "weight_decay": 0.1}
    manifest = tiny_manifest(model={"config": FAMILIES[family]}, stages={"peers_to_start": 2}, optimizer=optimizer)
    run = run_swarm(manifest, [2, 2], tmp_path)

    check_counts(run, manifest)
    check_stage_mates(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        loss, _ = baseline.train_step(run.counted[round_number])
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["topk_2bit", "sign"])
def test_stage_mates_are_alike_whatever_averages_leave_over(codec: str, tmp_path: Path) -> None:
    """Replicas in one process are held to it in tests/unit/test_runtime_modes.py, which knows who computed what."""
    manifest = tiny_manifest(
        stages={"count": 2, "peers_to_start": 2},
        averaging={"compression": codec, "dense_share": 0.0, "compare_weights_every": 2},
    )
    run = run_swarm(manifest, [2, 2], tmp_path)

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    assert "leftover_dropped" not in run.logs()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_stages", "num_peers"), [("llama", 2, 2), ("gpt2", 3, 2)])
def test_muon_equals_the_single_process(family: str, num_stages: int, num_peers: int, tmp_path: Path) -> None:
    """Stage-mates are bitwise alike. Against one process, sums differ by their order, and 16 bits make more of that.

    These updates change a weight by up to a half of it, and such rounding by 5e-3 of it.
    """
    optimizer: dict[str, Any] = {"name": "muon", "learning_rate": 3e-3, "momentum": 0.95, "weight_decay": 0.1}
    manifest = tiny_manifest(
        model={"config": FAMILIES[family]},
        stages={"count": num_stages, "peers_to_start": num_peers},
        averaging={"compare_weights_every": 2},
        optimizer=optimizer,
    )
    run = run_swarm(manifest, [num_peers] * num_stages, tmp_path)

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        loss, _ = baseline.train_step(run.counted[round_number])
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-4)
    check_weights(run, baseline, tolerance=2e-2)


@pytest.mark.parametrize(
    ("num_stages", "num_peers", "optimizer"),
    [
        (2, 2, "sgd"),
        pytest.param(1, 2, "adamw", marks=pytest.mark.slow),
        pytest.param(3, 1, "sgd", marks=pytest.mark.slow),
        pytest.param(3, 2, "adamw", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_holds_one_gradient_back_equals_delayed_updates(
    num_stages: int, num_peers: int, optimizer: str, tmp_path: Path
) -> None:
    manifest = tiny_manifest(
        stages={"count": num_stages, "peers_to_start": num_peers},
        averaging={"mode": "delayed", "eager_updates": False, "compare_weights_every": 2},
        optimizer={"name": "adamw", "learning_rate": 3e-3, "momentum": 0.0} if optimizer == "adamw" else {},
    )
    run = run_swarm(manifest, [num_peers] * num_stages, tmp_path)

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        loss, _ = baseline.train_step(run.counted[round_number])
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-5 if optimizer == "sgd" else 1e-4)
    if optimizer == "sgd":
        check_weights(run, baseline)


@pytest.mark.parametrize("codec", ["int4_hadamard", pytest.param("blockwise_8bit", marks=pytest.mark.slow)])
def test_weights_equal_the_single_process_whatever_the_wires_round(codec: str, tmp_path: Path) -> None:
    """Gradients are rounded by their microbatches' ids, so the process that is told them rounds alike.

    One microbatch at a time: sums of floats that differ by their order would now and then be rounded to another step.
    """
    manifest = tiny_manifest(wire={"activations": codec, "gradients": codec}, limits={"max_in_flight": 1})
    run = run_swarm(manifest, [1, 1], tmp_path)

    check_counts(run, manifest)
    check_nothing_lost(run)
    baseline = Baseline(ResolvedManifest.of(manifest))
    for round_number in range(manifest.training.steps):
        loss, _ = baseline.train_step(run.counted[round_number], run.ids[round_number])
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=1e-5)
    check_weights(run, baseline)


# Sums on a GPU differ by their last digit, and now and then such a digit is rounded to another 16-bit number.
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3), ("fp16", 1e-3)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_8bit"])
def test_weights_equal_the_single_process_on_a_gpu(
    optimizer: str, precision: str, tolerance: float, tmp_path: Path
) -> None:
    """Two stages of two peers share the GPU."""
    config = GPT2 | {"n_embd": 96}  # bitsandbytes quantises matrices of 4096 numbers and more
    manifest = tiny_manifest(
        model={"config": config, "precision": precision, "activation_checkpointing": optimizer != "sgd"},
        stages={"peers_to_start": 2},
        optimizer={"name": optimizer, "learning_rate": 0.1 if optimizer == "sgd" else 1e-3},
        averaging={"compare_weights_every": 2},
        wire={} if optimizer == "sgd" else {"activations": "blockwise_8bit", "gradients": "int4_hadamard"},
    )
    run = run_swarm(manifest, [2, 2], tmp_path, device="cuda")

    check_counts(run, manifest)
    check_stage_mates(run)
    check_nothing_lost(run)
    baseline = Baseline(ResolvedManifest.of(manifest), "cuda")
    for round_number in range(manifest.training.steps):
        loss, _ = baseline.train_step(run.counted[round_number], run.ids[round_number])
        # Wires round to another number, too, where sums differ by their last digit.
        assert run.lines[round_number]["loss"] == pytest.approx(loss, rel=max(10 * tolerance, 1e-3))
    if optimizer == "sgd":
        check_weights(run, baseline, tolerance)
