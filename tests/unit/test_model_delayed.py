"""Updates that are delayed by one round, among the replicas of one stage, without a network.

Those of replicas that go on from their own gradient meanwhile are in test_model_eager.py.
"""

import pytest
import torch
from test_model_periodic import are_equal, compute, replicas, resolved_of, weights

from coordinator.run.baseline import end_round
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.training import StageTrainer

RESOLVED = resolved_of(averaging={"mode": "delayed", "eager_updates": False})
SYNCHRONOUS = resolved_of(averaging={"mode": "synchronous"})


def delayed(count):
    return replicas(count, RESOLVED)


def settle(trainer, averages=None):
    """End a round as a peer without stage-mates does. Returns the average that ended it."""
    own, _ = trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
    averages = own if averages is None else averages
    trainer.apply(averages)
    return averages


def test_an_update_is_the_gradient_of_the_weights_before():
    [trainer] = delayed(1)
    [reference] = replicas(1, SYNCHRONOUS)
    held_back = None
    for step in range(5):
        compute(trainer, step)
        compute(reference, step)
        gradient = reference.mean_gradients()
        end_round([trainer])
        reference.apply([torch.zeros_like(each) for each in gradient] if held_back is None else held_back)
        held_back = gradient
        assert are_equal(weights(trainer), weights(reference))
    assert trainer.strategy.pending_samples == 3


def test_the_first_round_updates_nothing():
    [trainer] = delayed(1)
    beginning = weights(trainer)
    compute(trainer, 1)
    own, _ = trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
    result = trainer.apply(own)
    assert result.skipped
    assert trainer.optimizer_step == 1
    assert are_equal(weights(trainer), beginning)


def test_the_gradient_of_the_round_is_known_ahead():
    [trainer] = delayed(1)
    compute(trainer, 1)
    gradient = trainer.mean_gradients()
    brought = trainer.strategy.contribution(gradient, 3)
    assert brought[1] == 0
    assert not any(tensor.any() for tensor in brought[0])
    assert trainer.strategy.next_contribution() == (gradient, 3)
    trainer.apply(brought[0])
    assert are_equal(trainer.strategy.contribution(trainer.mean_gradients(), 0)[0], gradient)


def test_a_state_goes_on_with_the_average_that_waits():
    first, second = delayed(2)
    for step in range(2):
        compute(first, step)
        settle(first)
    compute(first, 2)
    averages, _ = first.strategy.contribution(first.mean_gradients(), first.num_samples)
    first.strategy.expect(averages)
    state = first.state()
    assert second.load_state(state, optimizer_step=2) == 0
    compute(second, 2)
    first.apply(averages)
    expected, num_samples = second.strategy.contribution(second.mean_gradients(), second.num_samples)
    assert are_equal(expected, averages)
    assert num_samples == 0
    second.apply(expected)
    assert are_equal(weights(first), weights(second))
    assert are_equal(first.strategy.next_contribution()[0], second.strategy.next_contribution()[0])
    assert are_equal(first.state().values(), second.state().values()), "the average is used once"


def test_gradients_of_other_weights_are_lost():
    first, second = delayed(2)
    state = first.state()
    compute(second, 1)
    settle(second)
    compute(second, 2, 3)
    assert second.strategy.pending_samples == 9
    assert second.load_state(state, optimizer_step=0) == 9
    assert second.strategy.pending_samples == 0
    assert second.strategy.next_contribution()[1] == 0


def test_what_a_leaving_replica_holds_back_counts_once():
    sgd = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}
    resolved = resolved_of(averaging={"mode": "delayed", "eager_updates": False}, optimizer=sgd)
    stays, leaves = replicas(2, resolved)
    both = replicas(2, resolved)
    for pair in ((stays, leaves), both):
        compute(pair[0], 0)
        compute(pair[1], 10, 11)
        end_round(pair)
        compute(pair[0], 1)
        compute(pair[1], 12)
    given = leaves.strategy.give_away()
    assert [samples for _, samples in given] == [3, 6]
    stays.strategy.take_in(given)
    assert stays.strategy.pending_samples == 3 + 3 + 3 + 6
    for step in range(2):
        end_round([stays])
        end_round(both)
        compute(stays, 20 + step)
        compute(both[0], 20 + step)
        for one, other in zip(weights(stays), weights(both[0]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_the_last_round_is_not_kept():
    [trainer] = delayed(1)
    steps = RESOLVED.manifest.training.steps
    for step in range(steps):
        compute(trainer, step)
        assert trainer.strategy.pending_samples == (3 if step == 0 else 6)
        assert trainer.strategy.held_back_samples == (0 if step == 0 else 3)
        own, _ = trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
        assert (trainer.strategy.next_contribution() is None) == (step + 1 == steps), "nobody averages it"
        assert trainer.strategy.held_back_samples == (0 if step == 0 else 3)
        trainer.apply(own)
    assert trainer.strategy.pending_samples == 0, "a peer that leaves after the run has nothing to hand over"


def test_a_gradient_is_not_held_back_for_longer_than_a_round():
    stays, misses = delayed(2)
    for step in range(3):
        compute(stays, step)
        average, _ = stays.strategy.contribution(stays.mean_gradients(), stays.num_samples)
        if not step:
            compute(misses, 10)
            misses.strategy.contribution(misses.mean_gradients(), misses.num_samples)
        stays.apply(average)
        misses.apply(average)  # the update of a stage-mate, where it has not been in the round
        assert misses.strategy.next_contribution()[1] == (0 if step else 3)
    assert misses.strategy.pending_samples == 0
    assert are_equal(weights(stays), weights(misses))


def test_a_restart_forgets_what_was_held_back():
    [trainer] = delayed(1)
    compute(trainer, 1)
    settle(trainer)
    trainer.restart()
    assert trainer.strategy.pending_samples == 0


def test_the_memory_model_knows_what_is_held_back():
    [stage] = stage_costs(RESOLVED, "cpu")
    [synchronous] = stage_costs(SYNCHRONOUS, "cpu")
    # Three values for each parameter are kept. The average that ends the round is in a state as well.
    assert stage.memory.host_bytes - synchronous.memory.host_bytes == (3 + 1) * 4 * stage.parameters


@pytest.mark.parametrize("mode", ["synchronous", "delayed"])
def test_a_round_without_samples_updates_nothing(mode):
    resolved = resolved_of(averaging={"mode": mode, "eager_updates": False})
    trainer = StageTrainer(resolved, resolved.specs[0])
    beginning = weights(trainer)
    for _ in range(3):
        settle(trainer)
    assert are_equal(weights(trainer), beginning)


def test_an_average_that_fails_can_be_made_again():
    with pytest.raises(ValueError, match=r"averaging\.max_tries=1 is too few"):
        resolved_of(averaging={"mode": "delayed", "max_tries": 1})


def test_a_run_that_would_end_without_any_update_is_refused():
    with pytest.raises(ValueError, match=r"training\.steps=1 is too few for averaging\.mode=delayed"):
        resolved_of(averaging={"mode": "delayed"}, training={"steps": 1, "global_batch_size": 8, "microbatch_size": 2})
