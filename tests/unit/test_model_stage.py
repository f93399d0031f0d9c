import pytest
import torch
from tiny_models import ALIKE, CONFIGS, GPT2, LENGTH, LLAMA, LLAMA_LONG, VOCABULARY
from torch import nn
from transformers import AutoModelForCausalLM

from swarm_peer.config import ModelSection
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.families import family_class
from swarm_peer.model.partition import StageSpec, cut_stages
from swarm_peer.model.stage import StageModule, initialise

EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
EACH_ALIKE = pytest.mark.parametrize("config", ALIKE.values(), ids=ALIKE)


def layers_path(config):
    family = family_class(config["model_type"])
    return f"{family.body}.{family.layers}"


def build(config, num_stages, layers=None, seed=7, **options):
    parsed = parse_model_config(config)
    section = ModelSection(config=config, **options)
    modules = [StageModule(parsed, spec, section) for spec in cut_stages(parsed, num_stages, LENGTH, layers)]
    for module in modules:
        initialise(module, seed)
    return modules


def run(modules, tokens_BT, targets_BT=None):
    hidden_BTD = tokens_BT
    for module in modules[:-1]:
        hidden_BTD = module(hidden_BTD)
    return modules[-1](hidden_BTD, targets_BT)


def union(modules):
    return {name: value for module in modules for name, value in module.state_dict().items()}


def sample(num_samples=3, length=LENGTH):
    return torch.randint(0, VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("config", [*CONFIGS.values(), LLAMA_LONG], ids=[*CONFIGS, "llama with rope scaling"])
def test_chained_stages_are_the_hugging_face_model(config, num_stages):
    modules = build(config, num_stages)
    model = AutoModelForCausalLM.from_config(parse_model_config(config)).eval()
    assert list(union(modules)) == list(model.state_dict())
    model.load_state_dict(union(modules))
    with torch.no_grad():
        logits_BTV = run([module.eval() for module in modules], sample())
        torch.testing.assert_close(logits_BTV, model(sample()).logits, rtol=0, atol=1e-5)


@EACH
def test_a_stage_holds_its_own_layers_only(config):
    middle = build(config, 3, layers=(1, 2, 1))[1]
    prefix = layers_path(config)
    assert {name.removeprefix(f"{prefix}.").partition(".")[0] for name in middle.state_dict()} == {"1", "2"}


def test_nothing_is_real_before_it_is_initialised():
    parsed = parse_model_config(LLAMA)
    module = StageModule(parsed, StageSpec(0, 1, 0, 4), ModelSection(config=LLAMA))
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in module.buffers()} == {"cpu"}
    initialise(module, 0)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in module.parameters())


@EACH
def test_losses_are_the_hugging_face_models(config):
    modules = build(config, 2)
    model = AutoModelForCausalLM.from_config(parse_model_config(config)).eval()
    model.load_state_dict(union(modules))
    tokens_BS = sample(length=LENGTH + 1)
    losses_B = run(modules, tokens_BS[:, :-1], tokens_BS[:, 1:])
    assert losses_B.dtype == torch.float32
    for tokens_S, loss in zip(tokens_BS, losses_B, strict=True):
        torch.testing.assert_close(loss, model(tokens_S[None], labels=tokens_S[None]).loss, rtol=1e-5, atol=0)


# --- initial weights --------------------------------------------------------------------------------------------------


@EACH
def test_any_cut_has_the_same_initial_weights(config):
    whole = union(build(config, 1))
    for layers in [(2, 2), (1, 3), (1, 2, 1), (1, 1, 1, 1)]:
        cut = union(build(config, len(layers), layers=layers))
        assert cut.keys() == whole.keys()
        assert all(torch.equal(cut[name], whole[name]) for name in whole)


@EACH
def test_seed_and_name_change_the_initial_weights(config):
    weights, others = union(build(config, 1, seed=7)), union(build(config, 1, seed=8))
    matrices = [name for name, value in weights.items() if value.ndim == 2]
    assert not any(torch.equal(weights[name], others[name]) for name in matrices)
    assert len({tuple(weights[name].flatten()[:4].tolist()) for name in matrices}) == len(matrices)


@EACH
def test_initial_weights_follow_the_familys_rules(config):
    """The spread of every tensor is that of the Hugging Face model's, at a size where it can be measured."""
    config = config | ({"n_embd": 128} if config is GPT2 else {"hidden_size": 128, "intermediate_size": 128})
    config = config | {"vocab_size": 256, "initializer_range": 0.05}
    weights = union(build(config, 1))
    torch.manual_seed(0)
    # Of one model alone, the mean of a small tensor may be off by more than what is allowed here.
    models = [AutoModelForCausalLM.from_config(parse_model_config(config)).state_dict() for _ in range(8)]
    for name in models[0]:
        expected = torch.stack([model[name] for model in models])
        assert weights[name].std() == pytest.approx(float(expected.std()), rel=0.08, abs=1e-9), name
        assert weights[name].mean() == pytest.approx(float(expected.mean()), abs=0.005), name


def test_the_padding_token_has_no_embedding():
    embedding = build(LLAMA_LONG, 1)[0].model.embed_tokens.weight
    assert embedding[3].abs().max() == 0
    assert embedding[4].abs().max() > 0


# --- options ----------------------------------------------------------------------------------------------------------


@EACH_ALIKE
@pytest.mark.parametrize("num_stages", [1, 2])
def test_shared_layers_are_one_layer_applied_repeatedly(config, num_stages):
    shared = build(config, num_stages, share_layers=True)
    prefix = layers_path(config)
    unshared = build(config, num_stages)
    for one, many in zip(shared, unshared, strict=True):
        first = f"{prefix}.{one.spec.first_layer}."
        names = [name for name in one.state_dict() if name.startswith(prefix)]
        assert all(name.startswith(first) for name in names)
        copies = {f"{prefix}.{index}.{n.removeprefix(first)}": n for index in one.spec.layers for n in names}
        weights = one.state_dict()
        many.load_state_dict({name: weights[copies.get(name, name)] for name in many.state_dict()})
    with torch.no_grad():
        torch.testing.assert_close(run(shared, sample()), run(unshared, sample()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - ALIKE.keys()))
def test_layers_that_differ_cannot_share_their_weights(name):
    parsed = parse_model_config(CONFIGS[name])
    with pytest.raises(UserError, match=rf"{name} model differ \(kinds: full_attention, sliding_attention\): set"):
        cut_stages(parsed, 2, LENGTH, share_layers=True)


@EACH
def test_mixed_precision_is_close(config):
    """On a CPU, which the trainer has compute in fp32: masks and norms must have types that attention takes."""
    modules, tokens_BS = build(config, 2), sample(length=LENGTH + 1)
    expected_B = run(modules, tokens_BS[:, :-1], tokens_BS[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses_B = run(modules, tokens_BS[:, :-1], tokens_BS[:, 1:])
    losses_B.sum().backward()
    torch.testing.assert_close(losses_B, expected_B, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("config", "share_layers"),
    [*((config, False) for config in CONFIGS.values()), *((config, True) for config in ALIKE.values())],
    ids=[*CONFIGS, *(f"{name} shared" for name in ALIKE)],
)
def test_activation_checkpointing_gives_the_same_gradients(config, share_layers):
    if config is GPT2:  # what dropout drew must be drawn again
        config = GPT2 | {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    gradients = []
    tokens_BS = sample(length=LENGTH + 1)
    for activation_checkpointing in (False, True):
        options = {"share_layers": share_layers, "activation_checkpointing": activation_checkpointing}
        modules = build(config, 2, **options)
        torch.manual_seed(5)
        run(modules, tokens_BS[:, :-1], tokens_BS[:, 1:]).sum().backward()
        gradients.append([p.grad for module in modules for p in module.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        assert torch.equal(plain, checkpointed)


def test_activation_checkpointing_recomputes():
    calls = []
    tokens_BS = sample(length=LENGTH + 1)
    for activation_checkpointing in (False, True):
        (module,) = build(GPT2, 1, activation_checkpointing=activation_checkpointing)
        count = []
        for layer in module.transformer.h.values():
            layer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        module(tokens_BS[:, :-1], tokens_BS[:, 1:]).sum().backward()
        calls.append(len(count))
    assert calls == [4, 8]


def test_cpus_compute_in_fp32():
    (module,) = build(GPT2, 1, precision="bf16")
    (exact,) = build(GPT2, 1)
    assert torch.equal(module(sample()), exact(sample()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EACH
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gpus_compute_in_the_precision_asked_for(config, precision):
    config = config | {"initializer_range": 0.02}
    modules = [module.cuda() for module in build(config, 2, precision=precision)]
    dtypes = set()
    for module in modules[1].modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    tokens_BS = sample(length=LENGTH + 1).cuda()
    losses_B = run(modules, tokens_BS[:, :-1], tokens_BS[:, 1:])
    expected_B = run([m.cpu() for m in build(config, 2)], tokens_BS[:, :-1].cpu(), tokens_BS[:, 1:].cpu())
    assert dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert losses_B.dtype == torch.float32
    torch.testing.assert_close(losses_B.cpu(), expected_B, rtol=0.02, atol=0)
