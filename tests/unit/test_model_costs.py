"""What stages cost: that memory is predicted as it is measured, and how devices differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from measured_memory import CASES, LONG, Case

from swarm_peer.model.costs import optimizer_bytes, stage_costs
from swarm_peer.model.stage import StageModule

ROOT = Path(__file__).parents[2]
# Of measured memory. It is about 5 % where activations dominate, and below 1 % where weights do.
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[float, float]]:
    """Predicted and measured bytes of all cases."""
    command = [sys.executable, "-m", "tests.measured_memory"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    return dict(zip((case.title for case in CASES), json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first one measures for all
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_memory_is_predicted_as_it_is_measured(case: Case, figures: dict[str, tuple[float, float]]) -> None:
    predicted, measured = figures[case.title]
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_parameters_are_those_of_the_modules(case: Case) -> None:
    resolved = case.resolved()
    for spec, costs in zip(resolved.specs, stage_costs(resolved, "cpu"), strict=True):
        parameters = list(StageModule(resolved.config, spec, resolved.manifest.model).parameters())
        assert costs.parameters == sum(parameter.numel() for parameter in parameters)


def test_a_processor_computes_in_fp32_and_holds_all_that_a_peer_does() -> None:
    case = Case("half", LONG, [1, 2, 1], 1, 64, 2)
    full, half = (stage_costs(case._replace(precision=precision).resolved(), "cpu") for precision in ("fp32", "bf16"))
    assert full == half
    for on_cpu, on_gpu in zip(full, stage_costs(case.resolved(), "cuda"), strict=True):
        memory, less = on_cpu.memory, on_gpu.memory
        assert (memory.weight_bytes, memory.optimizer_bytes) == (less.weight_bytes, less.optimizer_bytes)
        # Averaging buffers, and a copy of the weights and the optimizer's state; the last microbatches' replies.
        copies = (4 + 4 + optimizer_bytes(case.resolved().manifest.optimizer)) * on_cpu.parameters
        assert (less.host_bytes, memory.host_bytes) == (0, pytest.approx(copies, rel=0.1))
        assert memory.host_bytes >= copies
        assert memory.update_bytes > less.update_bytes
    on_gpu_half = stage_costs(case._replace(precision="bf16").resolved(), "cuda")[1].memory
    assert on_gpu_half.microbatch_bytes < full[1].memory.microbatch_bytes


def test_gradients_of_whole_parameters_are_counted_beside_the_accumulator() -> None:
    """Those of a layer that is applied several times are there at once, until the last of them is added."""
    alone, shared = (
        stage_costs(Case("layers", LONG, [1, 4, 1], 1, 64, 2, share_layers=share).resolved(), "cpu")[1]
        for share in (False, True)
    )
    assert shared.memory.working_bytes - alone.memory.working_bytes == pytest.approx(4 * shared.parameters)
    vocabulary = 2**17
    for spec, costs in enumerate(
        stage_costs(Case("vocabulary", LONG | {"vocab_size": vocabulary}, [1, 1], 0, 16, 1).resolved(), "cpu")
    ):
        gradient = 4 * vocabulary * LONG["hidden_size"]
        assert costs.memory.working_bytes + costs.memory.microbatch_bytes >= gradient, f"stage {spec}"
