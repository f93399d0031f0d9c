"""Adapters on a frozen base: a pipeline of any cut trains those of a plain loop of transformers and PEFT."""

import peft
import pytest
import torch
import transformers
from tiny_adapters import (
    adapters_of,
    as_peft_names,
    batches,
    check_alike,
    plain_model,
    resolved_of,
    train_plainly,
    trainers_of,
    write_base,
)
from tiny_models import CONFIGS, LLAMA, exactly

from coordinator.run.baseline import Baseline
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.training import StageTrainer, max_state_bytes

EACH_FAMILY = pytest.mark.parametrize("family", CONFIGS)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: write_base(config, folder / name) for name, config in CONFIGS.items()}


OPTIONS = {
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
    "targets": ({"targets": ["q_proj", "mlp.down_proj"]}, {"targets": ["q_proj", "mlp.down_proj"]}),
}
CASES = [(family, count, None) for family in CONFIGS for count in (1, 2, 3)]
CASES += [("llama", 2, option) for option in OPTIONS] + [("gpt2", 2, "dora")]


@pytest.mark.parametrize(("family", "num_stages", "option"), CASES)
def test_adapters_equal_those_of_a_plain_loop(family, num_stages, option, bases):
    ours, theirs = OPTIONS.get(option, ({}, {}))
    rate = 0.01 if "initializer_range" in CONFIGS[family] else 0.5
    optimizer = {"learning_rate": rate}
    resolved = resolved_of(
        bases[family], num_stages=num_stages, config=CONFIGS[family], adapter=ours, optimizer=optimizer
    )
    baseline = Baseline(resolved)
    model = plain_model(CONFIGS[family], bases[family], adapters_of(baseline.trainers), **theirs)
    before = as_peft_names(baseline.state())

    losses = [baseline.train_step(batch)[0] for batch in batches()]
    expected = train_plainly(model, lambda parameters: torch.optim.SGD(parameters, lr=rate))

    assert losses == pytest.approx(expected, rel=1e-5)
    after = as_peft_names(baseline.state())
    check_alike(after, peft.get_peft_model_state_dict(model))
    assert not any(torch.equal(before[name], value) for name, value in after.items()), "all have moved"


@pytest.mark.parametrize("num_stages", [1, 3])
def test_losses_under_adamw_equal_those_of_a_plain_loop(num_stages, bases):
    optimizer = {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1}
    baseline = Baseline(resolved_of(bases["llama"], num_stages=num_stages, optimizer=optimizer))
    model = plain_model(LLAMA, bases["llama"], adapters_of(baseline.trainers))
    losses = [baseline.train_step(batch)[0] for batch in batches()]
    expected = train_plainly(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1))
    assert losses == pytest.approx(expected, rel=1e-4)


@EACH_FAMILY
def test_new_adapters_are_the_same_in_each_cut_and_change_nothing(family, bases):
    config = CONFIGS[family]
    cuts = {}
    for num_stages in (1, 2, 3):
        torch.manual_seed(num_stages)
        state_before = torch.get_rng_state()
        trainers = trainers_of(resolved_of(bases[family], num_stages=num_stages, config=config))
        assert torch.equal(torch.get_rng_state(), state_before), "the dropout of others depends on it"
        cuts[num_stages] = adapters_of(trainers)
    for cut in cuts.values():
        assert cut.keys() == cuts[1].keys()
        assert all(torch.equal(cut[name], value) for name, value in cuts[1].items())
    assert {name.split(".")[2] for name in cuts[1]} == {"0", "1", "2", "3"}
    other = adapters_of(trainers_of(resolved_of(bases[family], config=config, seed=4)))
    assert {name for name, value in other.items() if not torch.equal(value, cuts[1][name])} == {
        name for name in other if "lora_A" in name
    }

    [trainer] = trainers_of(resolved_of(bases[family], config=config))
    tokens = batches()[0][0]
    model = transformers.AutoModelForCausalLM.from_pretrained(bases[family], **exactly(config))
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.detach()
    assert torch.allclose(trainer.predict(tokens[:, :-1]), logits[:, -1], atol=1e-5)


@EACH_FAMILY
@pytest.mark.parametrize("dora", [False, True])
def test_a_state_has_the_adapters_alone(family, dora, bases):
    optimizer = {"name": "adamw", "learning_rate": 0.1}
    resolved = resolved_of(
        bases[family], num_stages=2, config=CONFIGS[family], adapter={"dora": dora}, optimizer=optimizer
    )
    giver = Baseline(resolved)
    giver.train_step(batches()[0])
    for spec, trainer in zip(resolved.specs, giver.trainers, strict=True):
        state = trainer.state()
        assert all("lora_" in name for name in state)
        hollow = StageTrainer(resolved, spec, hollow=True).state_template()
        assert {name: (value.shape, value.dtype) for name, value in hollow.items()} == {
            name: (value.shape, value.dtype) for name, value in state.items()
        }
        assert sum(shape.numel() for shape in trainer.shapes) == resolved.num_trained(spec)
        assert sum(value.numel() * value.element_size() for value in state.values()) < max_state_bytes(
            resolved, spec.index
        )

        newcomer = StageTrainer(resolved, spec, blank=True)
        newcomer.load_state(state, 1)
        assert all(torch.equal(value, state[name]) for name, value in newcomer.state().items())
        base = dict(trainer.module.named_parameters())
        for name, value in newcomer.module.named_parameters():
            assert torch.equal(value, base[name]), "what is frozen is real, where no state brings it"


@pytest.mark.parametrize("dora", [False, True])
def test_a_restart_brings_back_the_initial_adapters(dora, bases, monkeypatch):
    resolved = resolved_of(bases["llama"], adapter={"dora": dora})
    baseline = Baseline(resolved)
    fresh = adapters_of(baseline.trainers)
    for batch in batches():
        baseline.train_step(batch)
    monkeypatch.setattr("swarm_peer.model.training.load_pretrained", None)  # the base is there, and stays
    [trainer] = baseline.trainers
    trainer.restart()
    assert all(torch.equal(value, fresh[name]) for name, value in adapters_of([trainer]).items())
    losses = [baseline.train_step(batch)[0] for batch in batches()]
    trainer.restart()
    assert [baseline.train_step(batch)[0] for batch in batches()] == losses


def test_a_checkpointed_stage_trains_the_same_adapters(bases):
    model = {"config": LLAMA, "pretrained": str(bases["llama"]), "adapter": {}}
    plain, sparing = (
        Baseline(resolved_of(bases["llama"], num_stages=2, model=model | {"activation_checkpointing": checkpoints}))
        for checkpoints in (False, True)
    )
    for baseline in (plain, sparing):
        baseline.train_step(batches()[0])
    check_alike(sparing.state(), plain.state(), 1e-6)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"targets": ["q_prj"]}, r"targets: 'q_prj' is no matrix of the layers of llama models: choose among .*q_proj"),
        ({"targets": ["lm_head"]}, "'lm_head' is no matrix of the layers"),
    ],
)
def test_targets_that_are_none_are_refused(adapter, message, bases):
    with pytest.raises(UserError, match=message):
        resolved_of(bases["llama"], adapter=adapter)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"config": LLAMA}, "adapter adapts pretrained weights, and there are none: give pretrained"),
        ({"pretrained": "x", "adapter": {"targets": []}}, r"targets=\[\] leaves nothing to train: name matrices"),
        ({"pretrained": "x", "adapter": {"rank": 0}}, "rank"),
    ],
)
def test_a_section_that_cannot_work_is_refused(model, message):
    sections = {"stages": {"count": 1}, "data": {"sequence_length": 4}, "optimizer": {"learning_rate": 1}}
    training = {"steps": 1, "global_batch_size": 1, "microbatch_size": 1}
    with pytest.raises(ValueError, match=message):
        RunManifest.model_validate({"name": "a", "model": {"adapter": {}} | model, "training": training} | sections)


def test_muon_is_not_for_adapters():
    sections = {
        "stages": {"count": 1},
        "data": {"sequence_length": 4},
        "optimizer": {"learning_rate": 1, "name": "muon"},
    }
    training = {"steps": 1, "global_batch_size": 1, "microbatch_size": 1}
    model = {"pretrained": "x", "adapter": {}}
    with pytest.raises(ValueError, match=r"optimizer\.name=muon is for matrices that are trained whole"):
        RunManifest.model_validate({"name": "a", "model": model, "training": training} | sections)
