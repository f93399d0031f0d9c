import pytest
import torch
from torch import nn

from swarm_peer.config import OptimizerSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.optimizer import (
    learning_rate,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    optimizer_state_template,
    planned_decay,
    set_learning_rate,
)
from swarm_peer.policy.decay import Decay


def make_manifest(steps=11, **schedule):
    return RunManifest.model_validate(
        {
            "name": "test",
            "model": {"config": {}},
            "stages": {"count": 1},
            "data": {"sequence_length": 8},
            "training": {"steps": steps, "global_batch_size": 1, "microbatch_size": 1},
            "optimizer": {"learning_rate": 2.0},
            "schedule": schedule,
        }
    )


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"name": "constant"}, {0: 2.0, 5: 2.0, 10: 2.0}),
        ({"name": "linear", "final_fraction": 0.0}, {0: 2.0, 5: 1.0, 10: 0.0, 20: 0.0}),
        ({"name": "linear", "final_fraction": 0.5}, {0: 2.0, 5: 1.5, 10: 1.0, 20: 1.0}),
        ({"name": "cosine", "final_fraction": 0.1}, {0: 2.0, 5: 1.1, 10: 0.2, 20: 0.2}),
        ({"name": "constant", "warmup_steps": 3}, {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0}),
        ({"name": "linear", "warmup_steps": 2, "final_fraction": 0.0}, {0: 2 / 3, 2: 2.0, 6: 1.0, 10: 0.0}),
        ({"name": "cosine", "warmup_steps": 10}, {9: 20 / 11, 10: 2.0}),
        ({"name": "cosine", "warmup_steps": 11}, {10: 22 / 12, 11: 2.0}),
        ({"name": "wsd", "decay_steps": 4, "final_fraction": 0.0}, {0: 2.0, 6: 2.0, 7: 1.5, 8: 1.0, 10: 0.0, 11: 0.0}),
        ({"name": "wsd", "warmup_steps": 3, "final_fraction": 0.1}, {0: 0.5, 3: 2.0, 7: 2.0, 8: 1.4, 9: 0.8, 10: 0.2}),
        ({"name": "wsd", "warmup_steps": 10}, {9: 20 / 11, 10: 0.2}),
    ],
)
def test_learning_rate(schedule, rates):
    manifest = make_manifest(**schedule)
    assert {step: learning_rate(manifest, step) for step in rates} == pytest.approx(rates)


def test_a_decay_that_the_run_key_has_said_takes_the_place_of_the_planned_one():
    manifest = make_manifest(name="wsd", warmup_steps=2, decay_steps=2, final_fraction=0.0)
    rates = {step: learning_rate(manifest, step, Decay(4, 5)) for step in (1, 2, 3, 4, 6, 8, 9)}
    assert rates == pytest.approx({1: 4 / 3, 2: 2.0, 3: 2.0, 4: 1.6, 6: 0.8, 8: 0.0, 9: 0.0})
    assert planned_decay(manifest) == Decay(9, 2)


def test_a_run_of_one_step_has_a_learning_rate():
    assert learning_rate(make_manifest(steps=1, name="cosine"), 0) == 2.0


class Example(nn.Module):
    """A matrix that bitsandbytes quantises (at least 4096 values), one that it does not, and a vector."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn((70, 60), generator=generator))
        self.small = nn.Parameter(torch.randn((7, 5), generator=generator))
        self.vector = nn.Parameter(torch.randn(9, generator=generator))

    @property
    def trained(self):
        return dict(self.named_parameters())

    def take_steps(self, optimizer, first, end):
        for step in range(first, end):
            generator = torch.Generator().manual_seed(step)
            for parameter in self.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()


SECTIONS = [
    OptimizerSection(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.1),
    OptimizerSection(name="sgd", learning_rate=0.1),
    OptimizerSection(name="adamw", learning_rate=0.1, weight_decay=0.1),
    OptimizerSection(name="muon", learning_rate=0.1, weight_decay=0.1),
    OptimizerSection(name="adamw_8bit", learning_rate=0.1, weight_decay=0.1),
]
ALL = pytest.mark.parametrize("section", SECTIONS, ids=["momentum", "sgd", "adamw", "muon", "adamw_8bit"])


@ALL
@pytest.mark.parametrize("num_steps_before", [0, 2], ids=["fresh", "used"])
def test_a_loaded_optimizer_goes_on_exactly(section, num_steps_before):
    module = Example()
    optimizer = make_optimizer(section, module.trained)
    module.take_steps(optimizer, 0, 3)

    other = Example()
    loaded = make_optimizer(section, other.trained)
    other.take_steps(loaded, 50, 50 + num_steps_before)
    other.load_state_dict(module.state_dict())
    load_optimizer_state(loaded, other.trained, optimizer_state(optimizer, module.trained))

    for one, opt in ((module, optimizer), (other, loaded)):
        one.take_steps(opt, 3, 6)
    for name, expected in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], expected), name
    saved, again = optimizer_state(optimizer, module.trained), optimizer_state(loaded, other.trained)
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)


@ALL
def test_an_empty_state_makes_an_optimizer_fresh(section):
    module, other = Example(), Example()
    optimizer, fresh = make_optimizer(section, module.trained), make_optimizer(section, other.trained)
    empty = optimizer_state(optimizer, module.trained)
    assert empty == {}
    module.take_steps(optimizer, 0, 2)
    load_optimizer_state(optimizer, module.trained, empty)
    module.load_state_dict(Example().state_dict())
    for one, opt in ((module, optimizer), (other, fresh)):
        one.take_steps(opt, 3, 5)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


@ALL
def test_the_template_describes_the_state(section):
    module = Example()
    optimizer = make_optimizer(section, module.trained)
    module.take_steps(optimizer, 0, 1)
    state, template = optimizer_state(optimizer, module.trained), optimizer_state_template(optimizer, module.trained)
    assert {n: (v.shape, v.dtype) for n, v in state.items()} == {n: (v.shape, v.dtype) for n, v in template.items()}
    assert {value.device.type for value in template.values()} <= {"meta"}


def test_eight_bit_states_are_small():
    module = Example()
    optimizer = make_optimizer(SECTIONS[-1], module.trained)
    module.take_steps(optimizer, 0, 1)
    state = optimizer_state(optimizer, module.trained)
    assert state["optimizer/large/state1"].dtype == torch.uint8
    assert state["optimizer/small/state1"].dtype == torch.float32
    assert not any("qmap" in name for name in state)


@ALL
def test_only_matrices_decay(section):
    module = Example()
    optimizer = make_optimizer(section, module.trained)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays[id(module.large)] == decays[id(module.small)] == section.weight_decay
    assert decays[id(module.vector)] == 0.0


def test_what_is_loaded_is_copied():
    module = Example()
    optimizer = make_optimizer(SECTIONS[2], module.trained)
    module.take_steps(optimizer, 0, 2)
    state = optimizer_state(optimizer, module.trained)
    copies = {name: value.clone() for name, value in state.items()}
    load_optimizer_state(optimizer, module.trained, state)
    module.take_steps(optimizer, 2, 4)
    assert all(torch.equal(state[name], copies[name]) for name in state)


class TwoMatrices(nn.Module):
    """A matrix of a layer, and one of an end of the model."""

    def __init__(self, values):
        super().__init__()
        self.layers = nn.ParameterList([values.clone()])
        self.head = nn.Parameter(values.clone())

    def take_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        optimizer.step()


@pytest.mark.parametrize("rate", [None, 0.04])
def test_muon_updates_matrices_of_layers_and_adamw_the_rest(rate):
    values = torch.randn((40, 60), generator=torch.Generator().manual_seed(0))
    module, alone = TwoMatrices(values), TwoMatrices(values)
    section = OptimizerSection(name="muon", learning_rate=0.02, matrix_learning_rate=rate, weight_decay=0.1)
    optimizer = make_optimizer(section, dict(module.named_parameters()), "layers.")
    of_torch = [
        torch.optim.Muon([alone.layers[0]], lr=rate or 0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([alone.head], lr=0.02, weight_decay=0.1),
    ]
    for share in (1.0, 0.5):  # of the highest rate, as a schedule has it
        set_learning_rate(optimizer, 0.02 * share)
        for each, highest in zip(of_torch, (rate or 0.02, 0.02), strict=True):
            set_learning_rate(each, highest * share)
        module.take_step(optimizer)
        for each in of_torch:
            alone.take_step(each)
    assert torch.equal(module.layers[0], alone.layers[0])
    assert torch.equal(module.head, alone.head)
    names = set(optimizer_state(optimizer, dict(module.named_parameters())))
    of_adamw = {f"optimizer/head/{entry}" for entry in ("step", "exp_avg", "exp_avg_sq")}
    assert names == {"optimizer/layers.0/momentum_buffer", *of_adamw}


def test_an_update_of_muon_is_as_long_as_one_of_adamw():
    """So the learning rate of AdamW carries over, whose updates are 0.2 to 0.4 of it in root mean square."""
    values = torch.zeros((256, 1024))
    module = TwoMatrices(values)
    optimizer = make_optimizer(SECTIONS[3], dict(module.named_parameters()), "layers.")
    module.take_step(optimizer)
    assert 0.15 < float(module.layers[0].detach().square().mean().sqrt()) / 0.1 < 0.25


def test_a_torch_without_muon_says_so(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match=r"^optimizer.name=muon needs torch 2.9 or later, and this is \S+: update"):
        make_optimizer(SECTIONS[3], Example().trained)
