"""What stages cost: that memory is predicted as it is measured, and how devices differ."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from measured_memory import CASES, KINDS, LONG, READ, Case

from swarm_peer.model.costs import stage_costs
from swarm_peer.model.stage import StageModule

ROOT = Path(__file__).parents[2]
# Of measured memory. It is about 5 % where activations dominate, and below 1 % where weights do.
TOLERANCE = 0.15


@cache
def figures(kind: str) -> dict[str, tuple[float, float]]:
    """Predicted and measured bytes of all cases of a kind, measured once."""
    command = [sys.executable, "-m", "tests.measured_memory", kind]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    titles = (case.title for case in (KINDS | {"reading": READ})[kind])
    return dict(zip(titles, json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first one of each kind measures for all
@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case, id=case.title) for kind, cases in KINDS.items() for case in cases],
)
def test_memory_is_predicted_as_it_is_measured(kind: str, case: Case) -> None:
    predicted, measured = figures(kind)[case.title]
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", READ, ids=lambda case: case.title)
def test_a_base_is_read_in_little_more_memory_than_it_is_kept_in(case: Case) -> None:
    """Whatever is read at a time, and whatever it becomes on the way from 16 bits to fewer."""
    kept, peak = figures("reading")[case.title]
    assert kept > 2e8
    assert 0.95 * kept < peak < 1.3 * kept


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
        copies = 8 * on_cpu.parameters + on_cpu.memory.optimizer_bytes
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


@pytest.mark.parametrize("case", KINDS["adapters"], ids=lambda case: case.title)
def test_what_is_frozen_costs_no_gradients_averages_and_states(case: Case) -> None:
    adapted = stage_costs(case.resolved(), "cuda")[case.stage]
    whole = stage_costs(case._replace(adapter=None, base="fp32").resolved(), "cuda")[case.stage]
    assert adapted.parameters == whole.parameters + adapted.trained
    assert adapted.memory.weight_gradient_bytes == 4 * adapted.trained
    assert adapted.memory.optimizer_bytes == 8 * adapted.trained
    # The mean gradients, the average, the initial adapters, and a state; and the replies, as they were.
    assert whole.host_bytes - 20 * whole.trained == pytest.approx(adapted.host_bytes - 24 * adapted.trained)
    bits = {"fp32": 32, "bf16": 16, "int8": 8, "nf4": 4.13}[case.base]
    if case.stage == 1 and len(case.layers) == 3:  # elsewhere embedding or head are of 16 bits
        held = adapted.memory.weight_bytes - 4 * adapted.trained
        assert held == pytest.approx(whole.memory.weight_bytes * bits / 32, rel=0.01)


def test_adapters_compute_less_than_training_all_weights() -> None:
    case = next(case for case in KINDS["adapters"] if case.base == "nf4")
    in_nf4, in_bf16, whole = (
        stage_costs(each.resolved(), "cuda")[1].flops
        for each in (case, case._replace(base="bf16"), case._replace(adapter=None, base="fp32"))
    )
    assert 0.66 * whole < in_bf16 < 0.8 * whole, "there is one product less of three"
    assert in_bf16 < in_nf4, "which is made whole"


def test_a_rounded_base_is_made_whole_once_for_all_tokens_of_a_microbatch() -> None:
    case = next(case for case in KINDS["adapters"] if case.base == "nf4")
    extra = []
    for length in (128, 256):
        rounded, whole = (
            stage_costs(case._replace(length=length, base=base).resolved(), "cuda")[1].flops for base in ("nf4", "bf16")
        )
        extra.append(rounded - whole)
    assert extra[0] == pytest.approx(2 * extra[1]), "a token of a shorter one has a larger share"
