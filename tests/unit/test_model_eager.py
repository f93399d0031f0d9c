"""Replicas of one stage that try an update by their own gradients until the average is there, without a network."""

import pytest
import torch
from test_model_periodic import are_equal, compute, present, replicas, resolved_of, weights

from swarm_peer.model.costs import stage_costs
from swarm_peer.model.gradient_norm import total_norm
from swarm_peer.model.optimizer import optimizer_state

EAGER = {"mode": "delayed"}
RESOLVED = resolved_of(averaging=EAGER)
OPTIMIZERS = [
    {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    {"name": "adamw", "learning_rate": 0.01},
    {"name": "adamw_8bit", "learning_rate": 0.01},
    {"name": "muon", "learning_rate": 0.01},
]


def eager(count):
    return replicas(count, RESOLVED)


def try_and_apply(pair, step):
    """Have each of two replicas compute and try its own gradient, and then apply the mean; give the own norms."""
    own = []
    for number, trainer in enumerate(pair):
        compute(trainer, 10 * step + number)
        own.append(trainer.mean_gradients())
        trainer.strategy.try_own(own[-1])
    mean = [(one + other) / 2 for one, other in zip(*own, strict=True)]
    for trainer in pair:
        trainer.apply(mean)
    return [float(total_norm(gradients)) for gradients in own]


def test_a_replicas_own_gradient_is_clipped_as_the_mean_was_by_comparison(monkeypatch):
    """It is noisier than the mean, and so larger. If it were clipped for itself, it would be too short a step."""
    pair, clipped = eager(2), []
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda _, most, norm: clipped.append((most, norm)))
    own = [try_and_apply(pair, step) for step in range(4)]
    assert clipped[:2] == [(1.0, norm) for norm in own[0]], "there has been no mean yet"
    # Each of the two tries its own gradient, and then takes a step by the mean.
    for step in range(1, 4):
        mean = float(clipped[4 * step - 1][1])
        assert mean == float(clipped[4 * step - 2][1]) < min(own[step - 1])
        tried = [float(norm) for _, norm in clipped[4 * step : 4 * step + 2]]
        pairs = zip(own[step - 1], own[step], strict=True)
        assert tried == pytest.approx([mean / old * new for old, new in pairs])


def test_a_mean_is_not_compared_to_a_gradient_of_before_the_state_that_came():
    first, second = eager(2)
    for step in range(3):
        try_and_apply((first, second), step)
    ratio = first._clipper._mean_by_own
    compute(first, 5)
    own = first.mean_gradients()
    first.strategy.try_own(own)
    first.load_state(second.state(), optimizer_step=3)
    first.apply([2 * gradient for gradient in own])
    assert first._clipper._mean_by_own == ratio != 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda section: section["name"])
def test_an_update_that_is_taken_back_leaves_no_trace(optimizer):
    [trainer] = replicas(1, resolved_of(averaging={"mode": "synchronous"}, optimizer=optimizer))
    gradient = [torch.full_like(parameter, 0.1) for parameter in trainer.module.parameters()]
    for _ in range(2):  # before the optimizer has any state, and after
        before, state = weights(trainer), optimizer_state(trainer.optimizer, trainer.trained)
        kept = trainer.try_update(gradient)
        assert are_equal(kept, before)
        assert not are_equal(present(trainer), before)
        trainer.set_weights(kept)
        assert are_equal(weights(trainer), before)
        after = optimizer_state(trainer.optimizer, trainer.trained)
        assert state.keys() == after.keys()
        assert are_equal(state.values(), after.values())
        assert trainer.num_samples == 0
        trainer.apply(gradient)


def test_the_memory_model_knows_what_an_update_of_its_own_takes():
    [stage] = stage_costs(RESOLVED, "cpu")
    [without] = stage_costs(resolved_of(averaging={"mode": "delayed", "eager_updates": False}), "cpu")
    assert stage.memory.host_bytes - without.memory.host_bytes == 3 * 4 * stage.parameters, "none of it is in a state"
