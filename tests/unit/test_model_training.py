import math

import pytest
import torch
from tiny_models import CONFIGS, GPT2, LENGTH, LLAMA, VOCABULARY
from torch.nn import functional
from transformers import AutoModelForCausalLM

from swarm_peer.codecs.floats import FP16_SCALE
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage, RoundClosed
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.gradient_norm import MAX_GRADIENT_NORM, total_norm
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.training import StageTrainer

EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


# What is not scaled down anywhere goes beyond fp32.
DEEP_AND_LARGE = {"num_hidden_layers": 28, "initializer_range": 0.3}


def make_manifest(config=LLAMA, num_stages=2, **sections):
    defaults = {
        "model": {"config": config},
        "stages": {"count": num_stages},
        "data": {"sequence_length": LENGTH},
        "training": {"steps": 10, "global_batch_size": 6, "microbatch_size": 3, "max_grad_norm": None},
        "optimizer": {"name": "sgd", "learning_rate": 0.3, "momentum": 0.9, "weight_decay": 0.01},
        "schedule": {"name": "cosine", "warmup_steps": 2},
    }
    content = {key: defaults.get(key, {}) | sections.get(key, {}) for key in defaults.keys() | sections.keys()}
    return RunManifest.model_validate({"name": "test", "seed": 3} | content)


def make_trainers(manifest):
    return [StageTrainer(ResolvedManifest.of(manifest), spec) for spec in ResolvedManifest.of(manifest).specs]


def tokens(seed, num_samples=3):
    return torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def go_forward(trainers, tokens_BS):
    passes = []
    for trainer in trainers:
        passes.append(trainer.forward(tokens_BS, passes[-1].output if passes else None))
    return passes


def go_backward(trainers, passes):
    grad_BTD = None
    for trainer, forward_pass in zip(reversed(trainers), reversed(passes), strict=True):
        grad_BTD = trainer.backward(forward_pass, grad_BTD)
    return grad_BTD


def train_step(trainers, step, num_microbatches=2):
    losses = []
    for microbatch in range(num_microbatches):
        passes = go_forward(trainers, tokens(10 * step + microbatch))
        go_backward(trainers, passes)
        losses.append(passes[-1].output)
    results = [trainer.apply(trainer.mean_gradients()) for trainer in trainers]
    return torch.cat(losses), results


def weights_of(trainers):
    return {n: v.clone() for trainer in trainers for n, v in trainer.module.state_dict().items()}


# --- the same training, however the model is cut ----------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_train_as_the_plain_model_does(config, num_stages):
    config = config | {"initializer_range": 0.02}  # at this learning rate large weights would grow without bound
    manifest = make_manifest(config, num_stages)
    trainers = make_trainers(manifest)

    model = AutoModelForCausalLM.from_config(parse_model_config(config))
    model.load_state_dict(weights_of(trainers))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
    rates = [0.1, 0.2, 0.3, 0.3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 7)) / 2)]

    for step, rate in enumerate(rates):
        batch_BS = torch.cat([tokens(10 * step), tokens(10 * step + 1)])
        logits_BTV = model(batch_BS[:, :-1]).logits
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), batch_BS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

        losses, results = train_step(trainers, step)
        assert losses.mean().item() == pytest.approx(loss.item(), abs=1e-5)
        assert [result.learning_rate for result in results] == [pytest.approx(rate)] * num_stages
        assert not any(result.skipped for result in results)
        assert [trainer.optimizer_step for trainer in trainers] == [step + 1] * num_stages

    trained = weights_of(trainers)
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(trained[name], expected, rtol=0, atol=1e-6, msg=name)


@EACH
def test_muon_updates_alike_however_the_model_is_cut(config):
    """Embedding and head are AdamW's, be they in a stage with layers or without most of them."""
    config = config | {"initializer_range": 0.02}
    optimizer = {"name": "muon", "learning_rate": 0.01, "weight_decay": 0.1}
    whole, *cuts = (make_trainers(make_manifest(config, count, optimizer=optimizer)) for count in (1, 2, 3))
    for step in range(4):
        expected, _ = train_step(whole, step)
        for trainers in cuts:
            losses, _ = train_step(trainers, step)
            assert torch.equal(losses, expected)
    layers = whole[0].module.layers
    for trainers in cuts:
        assert all(torch.equal(value, weights_of(whole)[name]) for name, value in weights_of(trainers).items())
        state = {name: value for trainer in trainers for name, value in trainer.state().items()}
        of_muon = {name.split("/")[1] for name in state if name.endswith("/momentum_buffer")}
        assert of_muon == {n for n, p in whole[0].trained.items() if n.startswith(layers) and p.ndim == 2}


@pytest.mark.parametrize("options", [{"share_layers": True}, {"activation_checkpointing": True}])
def test_training_lowers_the_loss(options):
    manifest = make_manifest(LLAMA, 2, model={"config": LLAMA} | options, optimizer={"learning_rate": 0.1})
    trainers = make_trainers(manifest)
    losses = []
    for _ in range(8):
        passes = go_forward(trainers, tokens(0))
        go_backward(trainers, passes)
        losses.append(passes[-1].output.mean().item())
        for trainer in trainers:
            trainer.apply(trainer.mean_gradients())
    assert losses[-1] < losses[0] - 0.2


# --- the accumulator --------------------------------------------------------------------------------------------------


def test_each_pass_counts_once():
    trainers = make_trainers(make_manifest())
    passes = go_forward(trainers, tokens(0))
    assert [trainer.num_samples for trainer in trainers] == [0, 0]
    assert go_backward(trainers, passes) is None
    assert [trainer.num_samples for trainer in trainers] == [3, 3]
    with pytest.raises(AssertionError, match="once"):
        trainers[1].backward(passes[1])
    assert trainers[1].num_samples == 3


def test_passes_go_backward_in_any_order():
    gradients = []
    for order in [(0, 1, 2), (2, 0, 1)]:
        trainers = make_trainers(make_manifest())
        passes = [go_forward(trainers, tokens(seed, num_samples=seed + 1)) for seed in range(3)]
        for index in order:
            go_backward(trainers, passes[index])
        assert [trainer.num_samples for trainer in trainers] == [6, 6]
        gradients.append([g for trainer in trainers for g in trainer.mean_gradients()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_the_mean_is_over_samples_and_leaves_the_accumulator():
    trainers = make_trainers(make_manifest())
    go_backward(trainers, go_forward(trainers, tokens(0)))
    once = trainers[1].mean_gradients()
    go_backward(trainers, go_forward(trainers, tokens(0)))
    twice = trainers[1].mean_gradients()
    for one, two, again in zip(once, twice, trainers[1].mean_gradients(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)
        assert torch.equal(two, again)


def test_no_samples_give_zeros_of_the_right_shapes():
    (trainer,) = make_trainers(make_manifest(num_stages=1))
    means = trainer.mean_gradients()
    assert [mean.shape for mean in means] == [p.shape for p in trainer.module.parameters()]
    assert not any(mean.any() for mean in means)


def test_discarded_gradients_leave_nothing():
    trainers = make_trainers(make_manifest())
    late = go_forward(trainers, tokens(1))
    go_backward(trainers, go_forward(trainers, tokens(0)))
    for trainer in trainers:
        trainer.discard_gradients()
        assert trainer.num_samples == 0
        assert not any(mean.any() for mean in trainer.mean_gradients())
    go_backward(trainers, late)
    assert [trainer.num_samples for trainer in trainers] == [3, 3]


def test_a_backward_pass_that_fails_half_way_leaves_nothing():
    trainers = make_trainers(make_manifest())
    go_backward(trainers, go_forward(trainers, tokens(0)))
    last = trainers[1]
    forward_pass = go_forward(trainers, tokens(1))[1]

    def out_of_memory(gradient):
        raise torch.OutOfMemoryError("no memory")

    handle = last.module.model.layers["3"].input_layernorm.weight.register_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        last.backward(forward_pass)
    handle.remove()
    assert last.num_samples == 0
    assert not any(mean.any() for mean in last.mean_gradients())


def test_passes_of_an_earlier_step_are_refused():
    trainers = make_trainers(make_manifest())
    late = go_forward(trainers, tokens(0))
    train_step(trainers, 0)
    with pytest.raises(RoundClosed, match="left the weights of optimizer step 0 and is at 1") as caught:
        trainers[1].backward(late[1])
    assert caught.value.round_number is None, "the trainer knows no rounds"
    assert trainers[1].num_samples == 0


def test_passes_before_a_rollback_are_refused_though_the_step_is_the_same():
    trainers = make_trainers(make_manifest())
    states = [trainer.state() for trainer in trainers]
    late = go_forward(trainers, tokens(0))
    for trainer, state in zip(trainers, states, strict=True):
        trainer.load_state(state, optimizer_step=0)
    with pytest.raises(RoundClosed):
        trainers[1].backward(late[1])


def test_what_is_handed_on_is_detached_from_the_graph():
    trainers = make_trainers(make_manifest())
    passes = go_forward(trainers, tokens(0))
    assert not passes[0].output.requires_grad
    assert not passes[1].output.requires_grad
    assert passes[1].output.shape == (3,)
    hidden_BTD = passes[0].output.clone()
    trainers[1].forward(tokens(0), hidden_BTD)
    assert not hidden_BTD.requires_grad


def test_evaluation_keeps_nothing_and_uses_no_dropout():
    trainers = make_trainers(make_manifest(GPT2 | {"resid_pdrop": 0.5}))
    losses = []
    for _ in range(2):
        hidden_BTD = None
        for trainer in trainers:
            hidden_BTD = trainer.evaluate(tokens(0), hidden_BTD)
            assert not hidden_BTD.requires_grad
        losses.append(hidden_BTD)
    assert torch.equal(*losses)
    assert losses[0].shape == (3,)
    assert [trainer.num_samples for trainer in trainers] == [0, 0]
    drawn = [go_forward(trainers, tokens(0))[1].output for _ in range(2)]
    assert not torch.equal(*drawn)


# --- the step ---------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("num_stages", [1, 3])
def test_predictions_are_the_plain_models_last_logits(config, num_stages):
    trainers = make_trainers(make_manifest(config, num_stages))
    plain = AutoModelForCausalLM.from_config(parse_model_config(trainers[0].manifest.model.config)).eval()
    plain.load_state_dict({k: v for trainer in trainers for k, v in trainer.module.state_dict().items()}, strict=False)
    for length in (1, 5, LENGTH):
        tokens_BT, value = tokens(0)[:, :length], None
        for trainer in trainers:
            value = trainer.predict(tokens_BT, value)
        with torch.no_grad():
            assert torch.allclose(value, plain(tokens_BT).logits[:, -1], atol=1e-5)
        assert value.dtype == torch.float32


@pytest.mark.parametrize("query", ["evaluate", "predict"])
def test_evaluation_between_a_forward_and_a_backward_pass_changes_no_gradient(query):
    config = GPT2 | {"resid_pdrop": 0.5, "embd_pdrop": 0.5}
    manifest = make_manifest(config, 1, model={"config": config, "activation_checkpointing": True})
    gradients = []
    for interrupted in (False, True):
        (trainer,) = make_trainers(manifest)
        torch.manual_seed(0)
        forward_pass = trainer.forward(tokens(0))
        if interrupted:
            getattr(trainer, query)(tokens(1)[:, :LENGTH])
        trainer.backward(forward_pass)
        gradients.append(trainer.mean_gradients())
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_clipping_is_per_stage():
    manifest = make_manifest(
        training={"max_grad_norm": 0.01}, optimizer={"momentum": 0.0, "weight_decay": 0.0}, schedule={"warmup_steps": 0}
    )
    trainers = make_trainers(manifest)
    before = weights_of(trainers)
    _, results = train_step(trainers, 0)
    after = weights_of(trainers)
    for trainer, result in zip(trainers, results, strict=True):
        moved = [(after[name] - before[name]).flatten() for name in trainer.module.state_dict()]
        assert result.grad_norm > 0.01
        assert torch.cat(moved).norm().item() == pytest.approx(0.3 * 0.01, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_step(value):
    (trainer,) = make_trainers(make_manifest(num_stages=1))
    go_backward([trainer], go_forward([trainer], tokens(0)))
    before = trainer.state()
    means = trainer.mean_gradients()
    means[2].view(-1)[5] = value
    result = trainer.apply(means)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert (trainer.optimizer_step, trainer.num_samples) == (1, 0)
    after = trainer.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("value", "is_lost"), [(float("nan"), True), (-3e38, True), (1e19, False)])
def test_what_is_accumulated_is_lost_if_it_could_not_be_added_to_that_of_others(value, is_lost):
    (trainer,) = make_trainers(make_manifest(num_stages=1))
    go_backward([trainer], go_forward([trainer], tokens(0)))
    next(iter(trainer.trained.values())).grad.view(-1)[5] = value
    assert trainer.discard_if_not_finite() == (3 if is_lost else 0)
    assert trainer.num_samples == (0 if is_lost else 3)


@pytest.mark.parametrize("value", [1e19, 1e35])
def test_a_gradient_whose_squares_are_beyond_fp32_is_clipped_like_any_other(value):
    results, weights = [], []
    for factor in (1.0, value):
        (trainer,) = make_trainers(make_manifest(num_stages=1, training={"max_grad_norm": 1.0}))
        results.append(trainer.apply([torch.full(p.shape, 0.9 * factor) for p in trainer.module.parameters()]))
        weights.append(weights_of([trainer]))
    assert results[1].skipped is False
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected)


def test_a_mean_of_no_samples_changes_nothing_but_the_step():
    """Momentum and weight decay would move the weights."""
    (trainer,) = make_trainers(make_manifest(num_stages=1))
    go_backward([trainer], go_forward([trainer], tokens(0)))
    trainer.apply(trainer.mean_gradients())
    before = trainer.state()
    assert trainer.apply(trainer.mean_gradients()).skipped, "nothing is accumulated"
    assert trainer.optimizer_step == 2
    assert all(torch.equal(before[name], value) for name, value in trainer.state().items())


def test_apply_leaves_its_arguments_alone():
    (trainer,) = make_trainers(make_manifest(num_stages=1, training={"max_grad_norm": 0.01}))
    go_backward([trainer], go_forward([trainer], tokens(0)))
    means = trainer.mean_gradients()
    copies = [mean.clone() for mean in means]
    trainer.apply(means)
    assert all(torch.equal(mean, copy) for mean, copy in zip(means, copies, strict=True))


@pytest.mark.parametrize("sections", [{"wire": {"gradients": "fp16"}}, {"model": {"precision": "fp16"}}])
def test_fp16_gradients_travel_scaled(sections):
    plain, scaled = make_trainers(make_manifest()), make_trainers(make_manifest(**sections))
    travelling = []
    for trainers in (plain, scaled):
        passes = go_forward(trainers, tokens(0))
        travelling.append(trainers[1].backward(passes[1]))
        trainers[0].backward(passes[0], travelling[-1])
    torch.testing.assert_close(travelling[1], travelling[0] * FP16_SCALE)
    for one, other in zip(plain, scaled, strict=True):
        for expected, mean in zip(one.mean_gradients(), other.mean_gradients(), strict=True):
            torch.testing.assert_close(mean, expected)


# --- what comes in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens_BS", "message"),
    [
        (torch.zeros((3, LENGTH + 1)), "tokens are torch.float32 of shape"),
        (torch.zeros(LENGTH + 1, dtype=torch.int64), "not integers of shape"),
        (torch.zeros((0, LENGTH + 1), dtype=torch.int64), "not at least one sample"),
        (torch.zeros((3, 1), dtype=torch.int64), "of 2 to 17 token ids"),
        (torch.zeros((3, 18), dtype=torch.int64), "of 2 to 17 token ids"),
        (torch.full((3, LENGTH + 1), VOCABULARY), "token ids 61 to 61 leave the vocabulary of 61"),
        (torch.full((3, LENGTH + 1), -1), "token ids -1 to -1 leave"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens_BS, message):
    first, last = make_trainers(make_manifest())
    with pytest.raises(InvalidMessage, match=message):
        first.forward(tokens_BS)
    with pytest.raises(InvalidMessage, match=message):
        last.evaluate(tokens_BS, torch.zeros((3, LENGTH, 24)))


def test_token_ids_may_be_any_integers():
    (trainer,) = make_trainers(make_manifest(num_stages=1))
    expected = trainer.evaluate(tokens(0))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(trainer.evaluate(tokens(0).to(dtype)), expected)


@pytest.mark.parametrize(
    "hidden_BTD", [torch.zeros((2, LENGTH, 24)), torch.zeros((3, LENGTH, 25)), torch.zeros((3, LENGTH, 24)).int()]
)
def test_hidden_states_that_do_not_fit_are_refused(hidden_BTD):
    last = make_trainers(make_manifest())[1]
    with pytest.raises(InvalidMessage, match="hidden state is"):
        last.forward(tokens(0), hidden_BTD)


def test_a_gradient_that_does_not_fit_is_refused_and_the_pass_goes_on():
    trainers = make_trainers(make_manifest())
    passes = go_forward(trainers, tokens(0))
    with pytest.raises(InvalidMessage, match="gradient is"):
        trainers[0].backward(passes[0], torch.zeros((3, LENGTH, 23)))
    assert trainers[0].num_samples == 0
    go_backward(trainers, passes)
    assert trainers[0].num_samples == 3


@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (1.25, True), (1.35, False), (1e20, False)])
@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_a_gradient_that_is_too_large_is_refused_and_the_pass_goes_on(share, fits, codec):
    """A member that sends such a one would have the whole stage skip its update."""
    first, last = trainers = make_trainers(make_manifest(wire={"gradients": codec}))
    passes = go_forward(trainers, tokens(0))
    large = torch.zeros((3, LENGTH, 24))
    large[1, 2, 3] = min(share * MAX_GRADIENT_NORM * 3 * first.loss_scale, 3e38)
    if fits:
        first.backward(passes[0], large)
        assert first.num_samples == 3
        return
    with pytest.raises(InvalidMessage, match="gradient has norm"):
        first.backward(passes[0], large)
    assert first.num_samples == 0
    go_backward([first, last], passes)
    assert first.apply(first.mean_gradients()).skipped is False


@pytest.mark.parametrize("zeros", ["token", "sample"])
def test_hidden_states_of_zeros_make_no_gradient_that_is_not_finite(zeros):
    """Each RMS norm makes a thousandfold of it, also inside one stage. An embedding may be zeros, or a hidden state."""
    trainers = make_trainers(make_manifest(LLAMA | DEEP_AND_LARGE))
    hidden_BTD = trainers[0].forward(tokens(0)).output
    hidden_BTD[0, 0 if zeros == "token" else slice(None)] = 0.0
    last = trainers[1].forward(tokens(0), hidden_BTD)
    gradient = trainers[1].backward(last)
    assert bool(gradient.isfinite().all())
    assert trainers[1].apply(trainers[1].mean_gradients()).skipped is False


@pytest.mark.parametrize("value", [2e12, 2.5e38])
def test_a_hidden_state_that_is_too_large_is_refused_before_anything_is_computed(value):
    """A peer that sends such a one would have the next stage lose what it has computed in the round."""
    first, last = make_trainers(make_manifest())
    hidden_BTD = first.forward(tokens(0)).output
    hidden_BTD[1, 2, 3] = -value
    with pytest.raises(InvalidMessage, match="hidden states go up to"):
        last.forward(tokens(0), hidden_BTD)
    assert last.num_samples == 0


def test_what_may_travel_in_fp16_is_what_a_backward_pass_can_take():
    first, _ = make_trainers(make_manifest(model={"config": GPT2, "precision": "fp16"}))
    forward_pass = first.forward(tokens(0))
    large = torch.full_like(forward_pass.output, 2.0**6 * first.loss_scale)
    with pytest.raises(InvalidMessage, match="gradient has norm"):
        first.backward(forward_pass, large)


@pytest.mark.parametrize("size", [1, 2**10, 2**10 + 1, 3 * 10**6])
def test_a_norm_is_right_however_many_values_it_is_of(size):
    tensors = [torch.full((size,), 1e-3), torch.full((2, 3), 2e-3), torch.zeros(5)]
    assert float(total_norm(tensors)) == pytest.approx(math.sqrt(1e-6 * size + 6 * 4e-6), rel=1e-6)


def test_a_gradient_that_has_exploded_is_handed_on_at_the_largest_norm():
    """Else an honest peer would be refused for what the model, or a later stage, has made of it."""
    trainers = make_trainers(make_manifest(num_stages=3))
    with torch.no_grad():
        for parameter in trainers[1].module.parameters():
            parameter *= 40.0
    passes = go_forward(trainers, tokens(0))
    large = torch.full((3, LENGTH, 24), 1.0)
    handed_on = trainers[1].backward(passes[1], large * (MAX_GRADIENT_NORM / large.norm()))
    assert float(handed_on.norm()) == pytest.approx(3 * MAX_GRADIENT_NORM)
    trainers[0].backward(passes[0], handed_on)
    assert trainers[0].apply(trainers[0].mean_gradients()).skipped is False


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_a_peer_that_loads_the_state_goes_on_the_same(name):
    manifest = make_manifest(optimizer={"name": name})
    trainers = make_trainers(manifest)
    for step in range(2):
        train_step(trainers, step)
    joined = make_trainers(manifest.model_copy(update={"seed": 4}))
    go_backward(joined, go_forward(joined, tokens(5)))
    for trainer, other in zip(trainers, joined, strict=True):
        other.load_state(trainer.state(), trainer.optimizer_step)
        assert (other.optimizer_step, other.num_samples) == (2, 0)
    for group in (trainers, joined):
        train_step(group, 2)
    expected, loaded = weights_of(trainers), weights_of(joined)
    assert all(torch.equal(loaded[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_restart_is_a_beginning(name, num_steps):
    manifest = make_manifest(optimizer={"name": name})
    fresh = make_trainers(manifest)
    trainers = [
        StageTrainer(ResolvedManifest.of(manifest), spec, blank=not num_steps)
        for spec in ResolvedManifest.of(manifest).specs
    ]
    for step in range(num_steps):
        train_step(trainers, step)
    passes = go_forward(trainers, tokens(5))
    for trainer in trainers:
        trainer.restart()
        assert (trainer.optimizer_step, trainer.num_samples) == (0, 0)
    with pytest.raises(RoundClosed):
        go_backward(trainers, passes)
    for group in (trainers, fresh):
        train_step(group, 0)
        train_step(group, 1)
    for trainer, other in zip(trainers, fresh, strict=True):
        state, expected = trainer.state(), other.state()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[n], expected[n]) for n in expected)


def test_who_takes_the_state_from_another_makes_no_initial_weights():
    manifest = make_manifest()
    trainers = make_trainers(manifest)
    train_step(trainers, 0)
    for trainer in trainers:
        joined = StageTrainer(ResolvedManifest.of(manifest), trainer.spec, blank=True)
        assert not any(parameter.any() for parameter in joined.module.parameters())
        joined.load_state(trainer.state(), trainer.optimizer_step)
        expected = trainer.state()
        assert all(torch.equal(value, expected[name]) for name, value in joined.state().items())


def test_the_template_describes_the_state():
    (trainer,) = make_trainers(make_manifest(num_stages=1, optimizer={"name": "adamw"}))
    train_step([trainer], 0)
    state, template = trainer.state(), trainer.state_template()
    assert state.keys() == template.keys()
    assert all((state[n].shape, state[n].dtype) == (template[n].shape, template[n].dtype) for n in state)


def test_the_state_is_a_copy():
    (trainer,) = make_trainers(make_manifest(num_stages=1))
    train_step([trainer], 0)
    state = trainer.state()
    copies = {name: value.clone() for name, value in state.items()}
    train_step([trainer], 1)
    assert all(torch.equal(state[name], copies[name]) for name in state)


def _without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def _with(name, change):
    return lambda state: state | {name: change(state[name].clone())}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("lm_head.weight"), "lacks 1 tensors, such as lm_head.weight"),
        (_without("optimizer/lm_head.weight/exp_avg"), "lacks 1 tensors, such as optimizer/lm_head.weight/exp_avg"),
        (lambda state: state | {"x": torch.zeros(1)}, "1 tensors that this stage lacks, such as 'x'"),
        (_with("lm_head.weight", lambda v: v[:-1]), r"lm_head.weight is torch.float32 of shape \(60, 24\)"),
        (_with("lm_head.weight", torch.Tensor.double), "lm_head.weight is torch.float64"),
        (_with("lm_head.weight", lambda v: v.fill_(float("nan"))), "lm_head.weight holds values that are not finite"),
        (_with("optimizer/lm_head.weight/exp_avg_sq", lambda v: v - 1), "exp_avg_sq holds values below zero"),
        (_with("optimizer/lm_head.weight/step", lambda v: v - 9), "step holds values below zero"),
        (_with("optimizer/lm_head.weight/step", lambda v: v + 2**41), "step counts more steps than a run can have"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, message):
    (trainer,) = make_trainers(make_manifest(num_stages=1, optimizer={"name": "adamw"}))
    train_step([trainer], 0)
    spoilt = spoil(trainer.state())
    train_step([trainer], 1)
    before = trainer.state()
    with pytest.raises(InvalidMessage, match=message):
        trainer.load_state(spoilt, optimizer_step=1)
    after = trainer.state()
    assert trainer.optimizer_step == 2
    assert all(torch.equal(before[name], after[name]) for name in before)
