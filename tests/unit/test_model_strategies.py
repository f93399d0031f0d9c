"""The modes of averaging where rounds are agreed, among the replicas of one stage without a network."""

import pytest
import torch
from tiny_models import LENGTH, LLAMA, VOCABULARY

from coordinator.run.baseline import Baseline, end_round
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import shared_entries
from swarm_peer.model.training import StageTrainer
from swarm_peer.runtime.state.roots import root_of

PERIOD = 3
EAGER = {"mode": "delayed", "eager_updates": True}
DELAYED = {"mode": "delayed", "eager_updates": False}
PERIODIC = {"mode": "periodic", "inner_steps": PERIOD}


def resolved_of(averaging, optimizer="adamw", **sections):
    training = {"steps": 6, "global_batch_size": 6, "microbatch_size": 3, "validation_every": 0}
    manifest = {
        "name": "test",
        "model": {"config": LLAMA},
        "stages": {"count": 1},
        "data": {"sequence_length": LENGTH},
        "training": training,
        "optimizer": {"name": optimizer, "learning_rate": 0.1},
        "averaging": averaging,
        "recovery": {"snapshot_every": 0},
    }
    return ResolvedManifest.of(RunManifest.model_validate(manifest | sections))


def replicas(count, averaging):
    resolved = resolved_of(averaging)
    return [StageTrainer(resolved, resolved.specs[0]) for _ in range(count)]


def tokens(seed):
    return torch.randint(0, VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def compute(trainer, *seeds):
    for seed in seeds:
        trainer.backward(trainer.forward(tokens(seed)))


def weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.trained.values()]


def are_equal(one, other):
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# --- delayed


def test_delayed_rounds_are_computed_from_the_weights_of_the_round_before_the_last_and_all_count():
    baseline = Baseline(resolved_of(DELAYED))
    trainer = StageTrainer(resolved := resolved_of({}), resolved.specs[0])
    made, gradients = [weights(trainer)], []  # W(0), W(1), ...; G(1), G(2), ...
    for number in range(1, 7):
        trainer.set_weights(made[max(number - 2, 0)])
        compute(trainer, number)
        gradients.append(trainer.mean_gradients())
        trainer.discard_gradients()
        trainer.set_weights(made[-1])
        if number > 1:
            trainer.apply(gradients[number - 2])
            made.append(weights(trainer))
        baseline.train_step([tokens(number)])
        if number < 6:
            assert are_equal(weights(baseline.trainers[0]), made[-1])
    trainer.apply(gradients[-1])
    assert baseline.trainers[0].optimizer_step == 6
    assert are_equal(weights(baseline.trainers[0]), weights(trainer))


@pytest.mark.parametrize("averaging", [DELAYED, EAGER], ids=["delayed", "eager"])
def test_a_delayed_baseline_is_validated_with_all_updates(averaging):
    held_out = tokens(99).numpy()
    delayed = Baseline(resolved_of(averaging))
    for number in range(6):
        delayed.train_step([tokens(number)])
        before = weights(delayed.trainers[0])
        loss = delayed.evaluate(held_out)
        assert are_equal(weights(delayed.trainers[0]), before)
        if averaging is EAGER:
            synchronous = Baseline(resolved_of({}))
            for earlier in range(number + 1):
                synchronous.train_step([tokens(earlier)])
            assert loss == pytest.approx(synchronous.evaluate(held_out), rel=1e-6)


def test_a_replica_that_tries_its_own_gradients_makes_synchronous_updates_if_it_is_alone():
    eager, synchronous = Baseline(resolved_of(EAGER)), Baseline(resolved_of({}))
    for number in range(6):
        for baseline in (eager, synchronous):
            baseline.train_step([tokens(number)])
    assert same(eager.state(), synchronous.state())


def test_a_trial_is_in_no_state_and_is_taken_back():
    tries, plain = replicas(1, EAGER) + replicas(1, DELAYED)
    for trainer in (tries, plain):
        compute(trainer, 1)
        trainer.apply(trainer.mean_gradients())
    compute(tries, 2)
    own = tries.mean_gradients()
    tries.discard_gradients()
    before = weights(tries)
    tries.strategy.try_own(own)
    tried = weights(tries)
    assert not are_equal(tried, before)
    tries.strategy.try_own(own)
    assert are_equal(weights(tries), tried), "once is enough"
    assert same(tries.state(), plain.state())
    for trainer in (tries, plain):
        compute(plain, 3)
        trainer.apply(plain.mean_gradients())
        plain.discard_gradients()
    assert same(tries.state(), plain.state())


def test_a_state_takes_the_place_of_a_trial():
    trainer, other = replicas(2, EAGER)
    compute(trainer, 1)
    trainer.strategy.try_own(trainer.mean_gradients())
    trainer.load_state(other.state(), 0)
    assert same(trainer.state(), other.state())
    assert are_equal(weights(trainer), weights(other))


# --- periodic


def in_the_middle_of_a_period():
    first, second = replicas(2, PERIODIC)
    for number in range(PERIOD + 1):
        compute(first, number)
        compute(second, 100 + number)
        end_round([first, second])
    return first, second


def test_replicas_share_their_root_in_the_middle_of_a_period_whatever_they_have_computed():
    first, second = in_the_middle_of_a_period()
    assert not are_equal(weights(first), weights(second))
    assert root_of(first.state(), b"") == root_of(second.state(), b"")
    assert set(shared_entries(first.state())) < set(first.state())
    last = root_of(first.state(), b"")
    for number in range(PERIOD - 1):
        compute(first, number)
        assert root_of(first.state(), b"") == last
        end_round([first, second])
    assert root_of(first.state(), b"") == root_of(second.state(), b"") != last


def test_whoever_takes_over_a_state_begins_with_the_outer_weights_and_no_work():
    first, second = in_the_middle_of_a_period()
    second.load_state(first.state(), first.optimizer_step)
    means, weight = second.strategy.difference()
    assert weight == 0
    assert not any(bool(mean.any()) for mean in means)
    assert are_equal(weights(second), first.strategy.weights())
    end_round([first, second])
    end_round([first, second])
    assert are_equal(weights(first), weights(second))


def test_a_difference_can_be_given_before_and_after_the_end_of_a_round_and_is_the_same():
    first, second = in_the_middle_of_a_period()
    for trainer in (first, second):
        trainer.load_state(first.state(), first.optimizer_step)
        compute(trainer, 7)
        trainer.strategy.contribution(trainer.mean_gradients(), trainer.weight)
    given = first.strategy.difference()
    again = first.strategy.difference()
    first.apply(())
    second.apply(())
    for other in (again, first.strategy.difference(), second.strategy.difference()):
        assert other[1] == given[1] == 3
        assert are_equal(other[0], given[0])


def test_work_that_is_given_up_leaves_the_outer_weights():
    first, _ = in_the_middle_of_a_period()
    first.strategy.forget_work()
    assert are_equal(weights(first), first.strategy.weights())
    assert first.strategy.difference()[1] == 0


def test_outer_weights_that_are_nearly_the_same_are_adopted_with_the_own_difference_kept():
    first, second = in_the_middle_of_a_period()
    theirs = {name: value + 1e-4 if value.is_floating_point() else value for name, value in second.state().items()}
    (before, weight), inner = first.strategy.difference(), first.state()
    first.adopt(theirs)
    after, same_weight = first.strategy.difference()
    assert same_weight == weight == 3
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert root_of(first.state(), b"") == root_of(theirs, b"")
    optimizer = {name for name in inner if name not in shared_entries(inner)}
    assert all(torch.equal(first.state()[name], inner[name]) for name in optimizer)
    with pytest.raises(InvalidMessage, match="lacks"):
        first.adopt({name: value for name, value in theirs.items() if not name.endswith("00000")})
