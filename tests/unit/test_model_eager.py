"""Delayed updates of replicas that go on from their own gradients, among those of one stage, without a network."""

import pytest
import torch
from test_model_delayed import settle
from test_model_periodic import are_equal, compute, replicas, resolved_of, weights

from coordinator.run.baseline import end_round
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.gradient_norm import total_norm
from swarm_peer.model.optimizer import optimizer_state

EAGER = {"mode": "delayed"}
RESOLVED = resolved_of(averaging=EAGER)
UNCLIPPED = {"steps": 9, "global_batch_size": 6, "microbatch_size": 3, "validation_every": 0, "max_grad_norm": None}
OPTIMIZERS = [
    {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
    {"name": "adamw", "learning_rate": 0.01},
    {"name": "adamw_8bit", "learning_rate": 0.01},
]


def eager(count):
    return replicas(count, RESOLVED)


def present(trainer):
    """The weights that passes go through."""
    return [parameter.detach().clone() for parameter in trainer.module.parameters()]


def load(target, source):
    target.load_state(source.state(), source.optimizer_step)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda section: section["name"])
def test_a_replica_alone_makes_the_updates_of_a_synchronous_one_a_round_later(optimizer):
    [trainer] = replicas(1, resolved_of(averaging=EAGER, optimizer=optimizer))
    [reference] = replicas(1, resolved_of(averaging={"mode": "synchronous"}, optimizer=optimizer))
    for step in range(6):
        assert are_equal(present(trainer), weights(reference))
        before = weights(reference)
        compute(trainer, step)
        compute(reference, step)
        end_round([trainer])
        end_round([reference])
        assert are_equal(weights(trainer), before)


def test_a_replicas_own_gradient_is_clipped_as_the_mean_was_by_comparison(monkeypatch):
    """It is noisier than the mean, and so larger. If it were clipped for itself, it would be too short a step."""
    pair, clipped, own = eager(2), [], []
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda _, most, norm: clipped.append((most, norm)))
    for step in range(4):
        for number, trainer in enumerate(pair):
            compute(trainer, 10 * step + number)
            own.append(float(total_norm(trainer.mean_gradients())))
        end_round(pair)
    assert clipped[:2] == [(1.0, norm) for norm in own[:2]], "there has been no mean yet"
    # Then each of the two takes a step by the mean gradient of the round before, and a trial by its own.
    for step in range(1, 4):
        before, after = own[2 * step - 2 : 2 * step], own[2 * step : 2 * step + 2]
        [mean, first, again, second] = [float(norm) for _, norm in clipped[4 * step - 2 : 4 * step + 2]]
        assert mean == again < min(before)
        assert [first, second] == pytest.approx([mean / old * new for old, new in zip(before, after, strict=True)])


def test_a_mean_is_not_compared_to_a_gradient_of_before_the_state_that_came():
    first, second = eager(2)
    for step in range(3):
        for number, trainer in enumerate((first, second)):
            compute(trainer, 10 * step + number)
        end_round([first, second])
    ratio = first._clipper._mean_by_own
    first.load_state(second.state(), optimizer_step=3)
    compute(second, 5)
    end_round([first, second])
    assert first._clipper._mean_by_own == ratio != 1


def test_stage_mates_hold_the_same_weights_and_compute_with_others():
    first, second = replicas(2, resolved_of(averaging=EAGER, training=UNCLIPPED))
    reference, scratch = replicas(2, resolved_of(averaging={"mode": "synchronous"}, training=UNCLIPPED))
    held_back = None
    for step in range(4):
        gradients = []
        for number, trainer in enumerate((first, second)):
            load(scratch, reference)
            if held_back is not None:
                scratch.apply(held_back[number])
            assert are_equal(present(trainer), weights(scratch)), "an update of its own"
            compute(trainer, 10 * step + number)
            compute(scratch, 10 * step + number)
            gradients.append(scratch.mean_gradients())
        end_round([first, second])
        if held_back is not None:
            # Of 3 samples each, added as stage-mates add them.
            reference.apply([(3 * one).add(other, alpha=3) / 6 for one, other in zip(*held_back, strict=True)])
        held_back = gradients
        assert are_equal(weights(first), weights(second))
        assert are_equal(weights(first), weights(reference))
    assert not are_equal(present(first), present(second))
    assert are_equal(first.strategy.shared_weights(), second.strategy.shared_weights())


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


def test_a_newcomer_takes_over_what_all_share_and_begins_without_a_gradient():
    first, second = eager(2)
    for step in range(3):
        compute(first, step)
        settle(first)
    assert not are_equal(present(first), weights(first))
    load(second, first)
    assert are_equal(weights(second), weights(first))
    assert are_equal(present(second), weights(first))
    compute(first, 3)
    average = settle(first)
    second.strategy.contribution(second.mean_gradients(), second.num_samples)
    second.apply(average)
    assert are_equal(weights(second), weights(first))


def test_a_state_that_comes_replaces_an_update_of_its_own():
    first, second = eager(2)
    for step in range(2):
        compute(first, step)
        settle(first)
        compute(second, 10 + step)
        settle(second)
    first.load_state(second.state(), optimizer_step=2)
    assert are_equal(present(first), weights(second))
    compute(first, 2)
    settle(first)
    assert are_equal(weights(first), weights(second)), "nothing waits that could update it"


def test_a_round_without_samples_goes_on_from_what_all_share():
    [trainer] = eager(1)
    compute(trainer, 0)
    settle(trainer)
    assert not are_equal(present(trainer), weights(trainer))
    settle(trainer)
    assert are_equal(present(trainer), weights(trainer))


def test_after_the_last_round_a_replica_holds_what_all_share():
    [trainer] = eager(1)
    for step in range(RESOLVED.manifest.training.steps):
        compute(trainer, step)
        settle(trainer)
    assert are_equal(present(trainer), weights(trainer))


def test_the_memory_model_knows_what_an_update_of_its_own_takes():
    [stage] = stage_costs(RESOLVED, "cpu")
    [without] = stage_costs(resolved_of(averaging={"mode": "delayed", "eager_updates": False}), "cpu")
    assert stage.memory.host_bytes - without.memory.host_bytes == 3 * 4 * stage.parameters, "none of it is in a state"
