"""Periodic averaging among the replicas of one stage, without a network."""

import pytest
import torch
from tiny_models import LENGTH, LLAMA, VOCABULARY

from coordinator.run.baseline import Baseline, ReplicatedBaseline, end_round
from swarm_peer.config import RunManifest
from swarm_peer.model import training
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.round_strategy import is_weight
from swarm_peer.model.training import StageTrainer

PERIOD = 3


def resolved_of(**sections):
    averaging = {"mode": "periodic", "inner_steps": PERIOD} | sections.pop("averaging", {})
    return ResolvedManifest.of(
        RunManifest.model_validate(
            {
                "name": "test",
                "model": {"config": LLAMA},
                "stages": {"count": 1},
                "data": {"sequence_length": LENGTH},
                "training": {
                    "steps": 9, "global_batch_size": 6, "microbatch_size": 3, "validation_every": 0,
                },
                "optimizer": {"name": "adamw", "learning_rate": 0.1},
                "averaging": averaging,
                "recovery": {"snapshot_every": 0},
            }
            | sections
        )
    )  # fmt: skip


RESOLVED = resolved_of()


def replicas(count, resolved=RESOLVED):
    return [StageTrainer(resolved, resolved.specs[0]) for _ in range(count)]


def tokens(seed):
    return torch.randint(0, VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def compute(trainer, *seeds):
    for seed in seeds:
        trainer.backward(trainer.forward(tokens(seed)))


def weights(trainer):
    return [value.clone() for name, value in trainer.state().items() if is_weight(name)]


def present(trainer):
    """The weights that passes go through."""
    return [parameter.detach().clone() for parameter in trainer.trained.values()]


def are_equal(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_replicas_go_alone_and_meet_at_the_end_of_a_period():
    first, second = replicas(2)
    beginning = weights(first)
    for step in range(2 * PERIOD):
        assert are_equal(present(first), present(second)) is (step % PERIOD == 0)
        assert are_equal(weights(first), weights(second))
        compute(first, step)
        compute(second, 100 + step)
        end_round([first, second])
    assert are_equal(weights(first), weights(second))
    assert not are_equal(weights(first), beginning)
    assert all(state["step"] == 2 * PERIOD for state in first.optimizer.state.values()), "its own state lasts"


def test_an_outer_step_of_rate_1_without_momentum_is_the_mean_by_samples():
    resolved = resolved_of(averaging={"outer_learning_rate": 1.0, "outer_momentum": 0.0})
    first, second = replicas(2, resolved)
    alone = replicas(2, resolved)
    for step in range(PERIOD):
        compute(first, step, 50 + step)
        compute(second, 100 + step)
        compute(alone[0], step, 50 + step)
        compute(alone[1], 100 + step)
        if step == PERIOD - 1:
            for trainer in alone:
                trainer.update(trainer.mean_gradients())
        else:
            for trainer in alone:
                end_round([trainer])
        end_round([first, second])
    for mean, one, other in zip(weights(first), present(alone[0]), present(alone[1]), strict=True):
        torch.testing.assert_close(mean, (2 * one + other) / 3, rtol=1e-5, atol=1e-6)


def test_the_outer_step_is_that_of_torch():
    [trainer] = replicas(1)
    outer = [torch.nn.Parameter(value) for value in weights(trainer)]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(3 * PERIOD):
        compute(trainer, step)
        if step % PERIOD == PERIOD - 1:
            trainer.update(trainer.mean_gradients())
            for parameter, inner in zip(outer, present(trainer), strict=True):
                parameter.grad = parameter.detach() - inner
            trainer.discard_gradients()
            optimizer.step()
        end_round([trainer])
    for ours, theirs in zip(weights(trainer), outer, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("leaves", [False, True])
def test_an_update_of_its_own_takes_no_more_memory_than_one_of_all(leaves, monkeypatch):
    [trainer] = replicas(1)
    held = []
    measure = training.total_norm

    def total_norm(copies):
        held.append(sum(parameter.grad is not None for parameter in trainer.module.parameters()))
        return measure(copies)

    monkeypatch.setattr(training, "total_norm", total_norm)
    compute(trainer, 1)
    trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
    if leaves:
        trainer.strategy.difference()
    else:
        trainer.apply(())
    assert held == [0], "the accumulator makes room for the copy of its mean"
    assert trainer.num_samples == 0
    assert all(parameter.grad is None for parameter in trainer.module.parameters())


def test_a_replica_without_samples_changes_nothing_and_weighs_nothing():
    first, idle = replicas(2)
    [alone] = replicas(1)
    beginning = weights(idle)
    for step in range(PERIOD):
        assert are_equal(weights(idle), beginning)
        compute(first, step)
        compute(alone, step)
        end_round([first, idle])
        end_round([alone])
    for mean, own in zip(weights(idle), weights(alone), strict=True):
        torch.testing.assert_close(mean, own, rtol=0, atol=1e-6)
    assert not idle.optimizer.state


def test_a_period_without_any_sample_leaves_the_weights():
    pair = replicas(2)
    for step in range(PERIOD):
        compute(pair[0], step)
        end_round(pair)
    before = weights(pair[0])
    for _ in range(PERIOD):
        end_round(pair)
    assert are_equal(weights(pair[0]), before), "the momentum moves nothing by itself"
    assert are_equal(weights(pair[1]), before)


def test_the_last_result_of_a_period_is_that_of_the_outer_step():
    """Whether it was skipped is an error in the log. A replica without samples in the last round alone makes none."""
    [trainer] = replicas(1)
    skipped = []
    for step in range(2 * PERIOD):
        if step == 0:
            compute(trainer, step)
        own, _ = trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
        skipped.append(trainer.apply(own).skipped)
    assert skipped[PERIOD - 1 :: PERIOD] == [False, True]


def test_an_average_that_is_not_finite_is_skipped():
    [trainer] = replicas(1)
    before = weights(trainer)
    for step in range(PERIOD):
        compute(trainer, step)
        own, _ = trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
        result = trainer.apply([torch.full_like(each, float("inf")) for each in own])
    assert result.skipped
    assert are_equal(weights(trainer), before)


def test_a_newcomer_goes_on_from_a_stage_mates_weights_with_no_samples():
    first, second, newcomer = replicas(3)
    compute(first, 1)
    compute(second, 2)
    end_round([first, second])
    newcomer.load_state(first.state(), 1)
    assert are_equal(weights(newcomer), weights(first))
    assert newcomer.strategy.difference()[1] == 0
    for step in range(1, PERIOD):
        for number, trainer in enumerate((first, second, newcomer)):
            compute(trainer, 10 * number + step)
        end_round([first, second, newcomer])
    assert are_equal(weights(newcomer), weights(first))
    assert are_equal(weights(newcomer), weights(second))


def test_a_newcomer_replays_rounds_without_an_average_by_leaving_the_weights():
    [trainer] = replicas(1)
    before = weights(trainer)
    result = trainer.apply(())
    assert trainer.optimizer_step == 1
    assert result.skipped
    assert are_equal(weights(trainer), before)


def test_a_rewind_gives_the_outer_weights_and_their_momentum_back():
    [trainer] = replicas(1)
    for step in range(PERIOD):
        compute(trainer, step)
        end_round([trainer])
    snapshot = trainer.state()

    def go_on():
        for step in range(PERIOD):
            compute(trainer, 10 + step)
            end_round([trainer])
        return weights(trainer)

    after = go_on()
    compute(trainer, 99)
    end_round([trainer])
    trainer.load_state(snapshot, PERIOD)
    assert are_equal(go_on(), after)


def test_one_replica_of_each_stage_is_what_one_process_computes():
    resolved = resolved_of(model={"config": LLAMA}, stages={"count": 2})
    baseline, replicated = Baseline(resolved), ReplicatedBaseline(resolved, [1, 1])
    for step in range(2 * PERIOD):
        batch = [tokens(step), tokens(50 + step)]
        assert baseline.train_step(batch) == replicated.train_step(batch, [[[0, 1]], [[0, 1]]])


def test_it_matters_which_replica_computes_a_microbatch():
    losses = []
    for shared in ([[0, 1], []], [[0], [1]]):
        replicated = ReplicatedBaseline(resolved_of(stages={"count": 2}), [1, 2])
        for step in range(PERIOD):
            loss, _ = replicated.train_step([tokens(step), tokens(50 + step)], [[[0, 1]], shared])
        losses.append(loss)
    assert losses[0] != losses[1]


def test_what_it_keeps_counts_as_memory_of_the_host():
    [periodic] = stage_costs(RESOLVED, "cpu")
    [synchronous] = stage_costs(resolved_of(averaging={"mode": "synchronous"}), "cpu")
    assert periodic.memory.host_bytes - synchronous.memory.host_bytes == (2 + 1) * 4 * periodic.parameters


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"training": {"steps": 10, "global_batch_size": 6, "microbatch_size": 3}}, "training.steps=10"),
        ({"recovery": {"snapshot_every": 50}}, "recovery.snapshot_every=50"),
    ],
)
def test_what_needs_equal_weights_happens_at_the_ends_of_periods(section, key):
    with pytest.raises(ValueError, match=rf"{key} is not a multiple of averaging\.inner_steps=3"):
        resolved_of(**section)
