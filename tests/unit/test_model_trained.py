"""A stage of which a part is frozen: only what is trained moves, is averaged, and is in states and digests."""

import pytest
import torch
from tiny_models import CONFIGS, LENGTH, LLAMA, VOCABULARY

from coordinator.run.baseline import end_round
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage
from swarm_peer.model import training
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.stage import StageModule
from swarm_peer.model.training import StageTrainer, max_state_bytes
from swarm_peer.runtime.state.roots import root_of

MODES = {
    "synchronous": {"mode": "synchronous"},
    "periodic": {"mode": "periodic", "inner_steps": 2},
    "delayed": {"mode": "delayed", "eager_updates": False},
    "eager": {"mode": "delayed"},
}
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def is_frozen(name):
    """Embedding, head, and the matrices of attention: in front of what is trained, behind it, and in its middle."""
    return any(part in name for part in ("embed_tokens", "lm_head", "self_attn"))


class HalfFrozen(StageModule):
    """The next step's base in small: some parameters are frozen, and a buffer is among what a state dict has."""

    def __init__(self, *args):
        super().__init__(*args)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not is_frozen(name))
        self.register_buffer("scales", torch.ones(3))


@pytest.fixture(autouse=True)
def half_frozen(monkeypatch):
    monkeypatch.setattr(training, "StageModule", HalfFrozen)


def resolved_of(mode="synchronous", num_stages=1, optimizer="adamw", seed=3):
    return ResolvedManifest.of(
        RunManifest.model_validate(
            {
                "name": "test",
                "seed": seed,
                "model": {"config": LLAMA},
                "stages": {"count": num_stages},
                "data": {"sequence_length": LENGTH},
                "training": {
                    "steps": 10, "global_batch_size": 6, "microbatch_size": 3, "validation_every": 0,
                },
                "optimizer": {"name": optimizer, "learning_rate": 0.1},
                "averaging": MODES[mode],
                "recovery": {"snapshot_every": 0},
            }
        )
    )  # fmt: skip


def trainers_of(resolved, count, **options):
    return [StageTrainer(resolved, resolved.specs[0], **options) for _ in range(count)]


def compute(trainer, seed):
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    trainer.backward(trainer.forward(tokens))


def train(trainers, *steps):
    for step in steps:
        for number, trainer in enumerate(trainers):
            compute(trainer, 10 * step + number)
        end_round(trainers)


def parameters(trainer):
    return {name: value.detach().clone() for name, value in trainer.module.named_parameters()}


def differing(one, other):
    assert one.keys() == other.keys()
    return {name for name, value in one.items() if not torch.equal(value, other[name])}


@EACH_MODE
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_8bit", "muon"])
def test_only_what_is_trained_moves(mode, optimizer):
    trainers = trainers_of(resolved_of(mode, optimizer=optimizer), 2)
    before = parameters(trainers[0])
    train(trainers, 0, 1, 2, 3)
    for trainer in trainers:
        assert differing(parameters(trainer), before) == {name for name in before if not is_frozen(name)}
        assert all(trainer.module.get_parameter(name).grad is None for name in before)
        held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
        assert held == {id(parameter) for parameter in trainer.trained.values()}


@EACH_MODE
def test_what_is_averaged_is_of_the_trained_alone(mode):
    [trainer] = trainers_of(resolved_of(mode), 1)
    assert trainer.shapes == [value.shape for name, value in parameters(trainer).items() if not is_frozen(name)]
    compute(trainer, 1)
    means, _ = trainer.strategy.contribution(trainer.mean_gradients(), trainer.num_samples)
    assert [mean.shape for mean in means] in ([], trainer.shapes), "nothing yet in a period"
    if mode == "periodic":
        assert [mean.shape for mean in trainer.strategy.difference()[0]] == trainer.shapes


@EACH_MODE
@pytest.mark.parametrize("blank", [False, True])
def test_another_trainer_takes_the_state_and_goes_on_alike(mode, blank):
    giver, mate, newcomer = trainers_of(resolved_of(mode), 3, blank=blank)
    assert not differing(parameters(giver), parameters(trainers_of(resolved_of(mode), 1)[0])) or blank
    train([giver, mate], 0, 1)
    state = giver.state()
    names = {name for name in state if not name.startswith(("optimizer/", "round/"))}
    assert names == set(giver.trained) == {name for name in parameters(giver) if not is_frozen(name)}
    assert {name.split("/")[1] for name in state if name.startswith("optimizer/")} == names
    assert state.keys() == giver.state_template().keys()

    newcomer.load_state(state, giver.optimizer_step)
    assert not differing(newcomer.state(), state)
    for step in (2, 3):
        for trainer in (giver, newcomer):
            compute(trainer, step)
        end_round([giver, newcomer])
    assert not differing(newcomer.state(), giver.state())
    has_own_update = mode == "eager"  # on top of what they share
    assert has_own_update or not differing(parameters(newcomer), parameters(giver))


def test_what_is_frozen_is_real_where_the_rest_is_blank():
    [real], [blank] = trainers_of(resolved_of(), 1), trainers_of(resolved_of(), 1, blank=True)
    frozen = {name for name in parameters(real) if is_frozen(name)}
    assert not frozen & differing(parameters(real), parameters(blank)), "no state would bring it"


@pytest.mark.parametrize("make", [lambda t: t.module.state_dict(), lambda t: t.state() | {"scales": torch.ones(3)}])
def test_a_state_with_what_is_frozen_is_refused(make):
    giver, newcomer = trainers_of(resolved_of(), 2)
    with pytest.raises(InvalidMessage, match="tensors that this stage lacks"):
        newcomer.load_state(make(giver), 0)


def test_a_restart_brings_back_what_is_trained():
    [trainer], [fresh] = trainers_of(resolved_of(), 1), trainers_of(resolved_of(), 1)
    train([trainer], 0, 1)
    trainer.restart()
    assert not differing(parameters(trainer), parameters(fresh))
    assert not differing(trainer.state(), fresh.state())
    train([trainer], 0)
    train([fresh], 0)
    assert not differing(trainer.state(), fresh.state())


@EACH_MODE
def test_digests_are_of_the_trained_alone(mode):
    one, other = trainers_of(resolved_of(mode), 2)
    with torch.no_grad():
        other.module.lm_head.weight.add_(1.0)
    assert root_of(one.state(), b"") == root_of(other.state(), b"")
    other.set_weights([value + 1 for value in other.trained.values()])
    has_outer_weights = mode == "periodic"
    assert (root_of(one.state(), b"") == root_of(other.state(), b"")) is has_outer_weights


def test_gradients_pass_through_what_is_frozen():
    """A stage's own gradients do not depend on what is frozen beside them, nor does what it returns."""
    resolved = resolved_of(num_stages=2)
    first, last = (StageTrainer(resolved, spec) for spec in resolved.specs)
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    forward_pass = first.forward(tokens)
    grad_BTD = last.backward(last.forward(tokens, forward_pass.output))
    first.backward(forward_pass, grad_BTD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "StageModule", StageModule)
        whole = [StageTrainer(resolved, spec) for spec in resolved.specs]
    whole_pass = whole[0].forward(tokens)
    whole_grad_BTD = whole[1].backward(whole[1].forward(tokens, whole_pass.output))
    whole[0].backward(whole_pass, whole_grad_BTD)
    assert torch.equal(grad_BTD, whole_grad_BTD)
    for half, full in zip((first, last), whole, strict=True):
        assert set(half.trained) < set(full.trained)
        assert all(torch.equal(half.trained[name].grad, full.trained[name].grad) for name in half.trained)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_without_frozen_parameters_all_are_trained(config, monkeypatch):
    monkeypatch.undo()
    manifest = resolved_of().manifest
    resolved = ResolvedManifest.of(
        manifest.model_copy(update={"model": manifest.model.model_copy(update={"config": config})})
    )
    [trainer] = trainers_of(resolved, 1)
    assert list(trainer.trained) == list(trainer.module.state_dict()), "no family keeps a buffer in its state dict"
    assert resolved.num_trained(trainer.spec) == sum(shape.numel() for shape in trainer.shapes)


def test_gradients_averages_and_states_cost_what_is_trained(monkeypatch):
    resolved = resolved_of()
    [whole], largest = stage_costs(resolved, "cuda"), max_state_bytes(resolved, 0)
    monkeypatch.setattr(ResolvedManifest, "num_trained", lambda resolved, spec: 1000)
    [few], smallest = stage_costs(resolved, "cuda"), max_state_bytes(resolved, 0)
    assert (few.parameters, few.trained) == (whole.parameters, 1000)
    assert few.memory.weight_bytes == whole.memory.weight_bytes
    assert few.memory.weight_gradient_bytes == 4 * 1000
    assert few.memory.optimizer_bytes == 8 * 1000
    assert few.memory.update_bytes == 4 * 1000
    saved = whole.parameters - 1000
    assert whole.host_bytes - few.host_bytes == (4 + 4 + 12) * saved, "the mean gradients, the average, a state"
    assert largest - smallest == 20 * saved
