"""The trainings that boundaries.py compares."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import boundaries
from boundaries import ARMS, NONE, compare, num_trained, settings_of
from muon import CONFIG, Training

from coordinator.config_files import load_manifest

LARGER = ("model.config.n_embd=384", "model.config.n_layer=6", "stages.count=3")


@pytest.mark.parametrize("common", [("stages.count=4",), LARGER], ids=["2M", "10M"])
@pytest.mark.parametrize("arm", ARMS)
def test_all_arms_train_as_many_values(arm, common):
    settings = settings_of(arm, common)
    assert num_trained(settings) == pytest.approx(num_trained(common), rel=0.002)
    manifest = load_manifest(CONFIG, settings)
    assert (manifest.model.boundary is None) == arm.startswith(NONE)
    assert manifest.wire.gradients == ("blockwise_8bit" if arm.endswith("-8bit") else "none")


def test_differences_are_those_from_whole_hidden_states_of_the_same_seed(monkeypatch):
    losses = {(False, 1, 100): 2.0, (False, 2, 100): 4.0}
    losses |= {(True, 1, 100): 2.2, (True, 2, 100): 4.2, (True, 1, 105): 1.9, (True, 2, 105): 4.0}

    class Known:
        def __init__(self, file, settings):
            self._has_rank = "model.boundary={rank: 48}" in settings

        def loss(self, training: Training) -> float:
            return losses[self._has_rank, training.seed, training.steps]

    monkeypatch.setattr(boundaries, "Trainings", Known)
    options = argparse.Namespace(
        text=None, settings=["stages.count=4"], arms=["d/4"], seeds=[1, 2], steps=100, share=1.05, rate=1e-3
    )
    options.only_equal, options.results = False, None
    rows = [line.split(" | ") for line in compare(options)][2:]
    assert [row[2:] for row in rows] == [
        ["100", "2.0000", "4.0000", "+0.00% |"],
        ["100", "2.2000", "4.2000", "+7.50% |"],
        ["105", "1.9000", "4.0000", "-2.50% |"],
    ]
