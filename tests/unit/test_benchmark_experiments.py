"""What the experiments reckon from what they measure."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "experiments"))

from equal_time import first_step_at
from slow_links import SHAPES, emulated


def test_a_loss_is_reached_on_the_line_between_two_validations():
    losses = {50: 4.0, 100: 3.0, 150: 3.5, 200: 2.0}
    assert first_step_at(losses, 3.5) == 75
    assert first_step_at(losses, 3.0) == 100
    assert first_step_at(losses, 2.75) == 175
    assert first_step_at(losses, 5.0) == 50
    assert first_step_at(losses, 1.9) is None


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_emulated_has_the_ratios_of_its_shape(name):
    shape = SHAPES[name]()
    workload, bytes_per_s = emulated(shape, 64, 65536)
    assert workload.activation_bytes() / bytes_per_s / workload.ideal_s == pytest.approx(shape.x_over_c)
    assert workload.averaging_bytes() / bytes_per_s / workload.ideal_s == pytest.approx(shape.a_over_c, rel=0.1)
    assert sum(workload.num_parameters()) < 100e6, "eight peers hold it in the memory of one machine"


def test_the_paper_s_wider_model_needs_less_of_a_link():
    narrow, wide = SHAPES["d4096-b1"](), SHAPES["d12288-b1"]()
    assert wide.microbatch_s > 7 * narrow.microbatch_s
    assert wide.x_over_c < 0.45 * narrow.x_over_c
