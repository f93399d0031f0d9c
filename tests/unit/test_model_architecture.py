import json
from itertools import combinations
from math import inf, nan

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, GEMMA2, GEMMA3, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3
from torch.utils.flop_counter import FlopCounterMode

from swarm_peer.config import ModelSection
from swarm_peer.errors import UserError
from swarm_peer.model import pretrained
from swarm_peer.model.architecture import parse_model_config, resolve_model_config
from swarm_peer.model.families import FAMILIES, family_of
from swarm_peer.model.partition import (
    PARAMETER_WEIGHT,
    StageSpec,
    cut_stages,
    model_costs,
)
from swarm_peer.model.stage import StageModule, initialise

VARIANTS = [
    *CONFIGS.values(),
    GPT2 | {"n_inner": 50},
    LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "num_key_value_heads": 1},
    QWEN3 | {"attention_bias": True},
    GEMMA2 | {"attn_logit_softcapping": None, "attention_bias": True},
]

# The keys of config.json of openai-community/gpt2 and of a published Llama; values as there where they may matter.
PUBLISHED_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
    "tie_word_embeddings": False,
}
PUBLISHED_LLAMA = {
    "_name_or_path": "somewhere/llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "temperature": 0.6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
# As of Mistral-7B-v0.1, Qwen2.5-0.5B, Qwen3-0.6B, gemma-2-2b and gemma-3-1b-it, but for the tied embeddings.
PUBLISHED_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
PUBLISHED_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
PUBLISHED_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 3,
    "long_factor": [1.0] * 3,
}
PUBLISHED = [
    *(PUBLISHED_GPT2, PUBLISHED_LLAMA, PUBLISHED_MISTRAL, PUBLISHED_QWEN2, PUBLISHED_QWEN3),
    *(PUBLISHED_GEMMA2, PUBLISHED_GEMMA3),
]


# --- what a person may name -------------------------------------------------------------------------------------------


def test_inline_config_is_copied():
    config = resolve_model_config(ModelSection(config=GPT2))
    assert config == GPT2
    assert config is not GPT2


def test_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert resolve_model_config(ModelSection(config=str(tmp_path))) == LLAMA


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "~/missing", "a/b/c"])
def test_missing_folder(name):
    with pytest.raises(UserError, match="is no folder on this machine: correct the path"):
        resolve_model_config(ModelSection(config=name))


def test_folder_without_config(tmp_path):
    with pytest.raises(UserError, match=r"model\.config=.* has no config\.json: give the folder"):
        resolve_model_config(ModelSection(config=str(tmp_path)))


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_folder_with_broken_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="mend or replace that file"):
        resolve_model_config(ModelSection(config=str(tmp_path)))


def test_hub_name_is_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    asked = []

    def download(name, file, **_):
        asked.append((name, file))
        return str(tmp_path / "config.json")

    monkeypatch.setattr(pretrained, "hf_hub_download", download)
    assert resolve_model_config(ModelSection(config="openai-community/gpt2")) == GPT2
    assert asked == [("openai-community/gpt2", "config.json")]


def test_unreachable_hub_name(monkeypatch):
    def download(name, file, **_):
        raise OSError("cannot reach it\nand more")

    monkeypatch.setattr(pretrained, "hf_hub_download", download)
    with pytest.raises(UserError, match=r"'nobody/nothing' cannot be had .* \(cannot reach it\): correct") as caught:
        resolve_model_config(ModelSection(config="nobody/nothing"))
    assert "\n" not in str(caught.value)


# --- which configs work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), *PUBLISHED], ids=[*CONFIGS, *(f"{c} published" for c in CONFIGS)]
)
def test_good_configs_pass(config):
    before = json.dumps(config)
    assert isinstance(parse_model_config(config), FAMILIES[config["model_type"]].config_class)
    assert json.dumps(config) == before


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_transformers_writes_passes(config):
    written = json.loads(parse_model_config(config).to_json_string(use_diff=False))
    assert parse_model_config(written).to_dict() == parse_model_config(config).to_dict()


def test_each_family_has_a_tiny_model():
    """Which all tests of this kind then cover."""
    assert list(CONFIGS) == list(FAMILIES)


@pytest.mark.parametrize(
    "rope_scaling",
    [
        LONGROPE,
        {"type": "linear", "factor": 2},
        {"type": "linear", "factor": 0.5},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": 1.1},
    ],
)
def test_rotary_positions_that_can_be_computed_pass(rope_scaling):
    parse_model_config(LLAMA | {"rope_scaling": rope_scaling})


def test_names_common_to_all_families_pass():
    assert parse_model_config(GPT2 | {"num_hidden_layers": 7}).n_layer == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type='bert' is not supported; choose one of gpt2, llama, mistral, "),
        ({"model_type": "gemma3"}, "choose one of gpt2, llama, mistral, qwen2, qwen3, gemma2, gemma3_text$"),
        ({"model_type": []}, r"model_type=\[\] is not supported"),
        ({}, "model_type=None is not supported"),
        (GPT2 | {"n_layers": 3}, r"n_layers=3 is no setting of gpt2 models: .* correct its spelling \(n_layer\?\)$"),
        (LLAMA | {"n_layer": 3}, "n_layer=3 is no setting of llama models"),
        (LLAMA | {"quantization_config": {}}, "quantization_config={} is no setting of llama models"),
        (LLAMA | {"per_layer_config": {}}, "per_layer_config={} is no setting"),
        (LLAMA | {"hidden_size": "many"}, "is no llama model: TypeError: Field 'hidden_size' expected int"),
        (LLAMA | {"hidden_size": 25}, "is no llama model: .* not a multiple"),
        (LLAMA | {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported .*: set .*: false"),
        (
            {key: value for key, value in GPT2.items() if key != "tie_word_embeddings"},
            "tie_word_embeddings=True, which is the default of gpt2, is not supported .*: set .*: false",
        ),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        (GPT2 | {"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True is not supported"),
        (GPT2 | {"n_head": 5}, "n_embd=24 is not a multiple of n_head=5: change one of them"),
        (GPT2 | {"n_layer": 0}, "n_layer=0 must be at least 1"),
        (GPT2 | {"n_inner": 0}, "n_inner=0 must be at least 1"),
        (GPT2 | {"n_layer": 10**8}, "n_layer=100000000 must be at most 4096"),
        (QWEN2 | {"num_hidden_layers": 2**70}, "num_hidden_layers=.* must be at most 4096"),
        (LLAMA | {"hidden_size": 2**70}, "hidden_size=.* must be at most 16777216"),
        (LLAMA | {"vocab_size": 1e30}, "vocab_size=1e.30 must be at most 16777216"),
        (GPT2 | {"embd_pdrop": 1.5}, "embd_pdrop=1.5 must be 0 to 1$"),
        (GPT2 | {"attn_pdrop": 2}, "attn_pdrop=2 must be 0 to 1$"),
        (GPT2 | {"resid_pdrop": -0.1}, "resid_pdrop=-0.1 must be 0 to 1$"),
        (GPT2 | {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon=-1.0 must be 0 to 1$"),
        (GPT2 | {"initializer_range": nan}, "initializer_range=nan must be 0 to 100$"),
        (GPT2 | {"initializer_range": 1e30}, r"initializer_range=1e\+30 must be 0 to 100$"),
        (LLAMA | {"attention_dropout": 1.5}, "attention_dropout=1.5 must be 0 to 1$"),
        (LLAMA | {"attention_dropout": None}, "attention_dropout=None must be 0 to 1$"),
        (LLAMA | {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be 0 to 1$"),
        (GEMMA2 | {"final_logit_softcapping": 0.0}, r"final_logit_softcapping=0.0 must be 0.001 to 1e\+09$"),
        (LLAMA | {"temperature": nan}, "temperature=nan is no finite number, text or list: correct it"),
        (LLAMA | {"dtype": "auto"}, "is no llama model: dtype='auto' is no type of torch's, such as float32; correct"),
        (GPT2 | {"activation_function": "magic"}, "activation 'magic' is unknown"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        (LLAMA | {"head_dim": 7}, "is no llama model: .* even rotary dimension"),
        (LLAMA | {"rope_scaling": {"rope_type": "magic"}}, "rope_type='magic' is unknown"),
        (GPT2 | {"rope_theta": 1.0}, "rope_theta=1.0 is no setting of gpt2 models"),
        (LLAMA | {"rope_theta": "1e6"}, "rotary positions cannot be computed with .*rope_theta='1e6' is no number"),
        (
            LLAMA | {"rope_theta": 0},
            "rotary positions cannot be computed with .*they are not finite.: correct rope_theta",
        ),
        (LLAMA | {"rope_theta": -1e4}, "rotary positions cannot be computed .*they are not finite"),
        (LLAMA | {"rope_theta": inf}, "rotary positions cannot be computed .*rope_theta=inf is no number"),
        (LLAMA | {"rope_theta": None}, "rotary positions cannot be computed .*TypeError"),
        (
            GEMMA3 | {"rope_local_base_freq": "1e4"},
            "rotary positions cannot be computed .*rope_theta='1e4' is no number",
        ),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "Missing required keys .*factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "rotary positions .*factor='2' is no number"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0}}, "rotary positions .*they are not finite"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": -2.0}}, "rotary positions .*no positive numbers"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factr": 2.0}},
            r"rope_scaling\.factr is no setting .*\(factor\?\)",
        ),
        (LLAMA | {"rope_scaling": [2.0]}, "is no llama model: TypeError"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "rotary positions .*they turn 4 values of a head, which has 6",
        ),
        (LLAMA | {"rope_scaling": LONGROPE | {"short_factor": [1.0, 1.0]}}, "rotary positions .*must match the size"),
        (LLAMA | {"rope_scaling": LONGROPE | {"long_factor": [1.0, 1.0]}}, "rotary positions .*must match the size"),
        (LLAMA | {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 3}}, "rotary positions .*they are not finite"),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope_parameters\.full_attention is no setting of rotary positions",
        ),
        (MISTRAL | {"sliding_window": 0}, "sliding_window=0 must be at least 1, since layers have sliding attention"),
        (QWEN2 | {"use_mrope": True}, "use_mrope=True is not supported"),
        (
            QWEN2 | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 4},
            "sliding_window=None must be at least 1, since layers have sliding attention",
        ),
        (QWEN3 | {"layer_types": ["full_attention"] * 3}, "is no qwen3 model: .*layer_types"),
        (
            QWEN3 | {"layer_types": ["linear_attention"] * 4},
            "layer_types names linear_attention, and qwen3 has none but full_attention, sliding_attention: correct",
        ),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported .*: false"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be at least 1"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported .*: null"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "is no gemma3_text model: .*zero"),
        (GEMMA3 | {"rope_scaling": {"rope_type": "magic"}}, "rope_type='magic' is unknown"),
    ],
)
def test_bad_configs_are_refused_in_one_line(config, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_model_config(config)
    assert "\n" not in str(caught.value)


# --- what the parts cost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("share_layers", [False, True])
def test_parameters_are_those_of_the_modules(config, share_layers):
    parsed = parse_model_config(config)
    costs = model_costs(parsed, 12, share_layers)
    section = ModelSection(config=config, share_layers=share_layers)
    for spec in cut_stages(parsed, 2, 12, layers=(1, 3)):
        module = StageModule(parsed, spec, section)
        assert costs.of(spec).parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("config", VARIANTS)
def test_flops_are_those_that_torch_counts(config):
    parsed = parse_model_config(config)
    parsed._attn_implementation = "eager"  # torch counts no operations of the fused attention on a CPU
    num_samples, length = 2, 12
    spec = StageSpec(0, 1, 0, parsed.num_hidden_layers)
    module = StageModule(parsed, spec, ModelSection(config=config))
    initialise(module, seed=0)
    tokens_BT = torch.zeros((num_samples, length), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(tokens_BT)
    family = family_of(parsed)
    # Eager attention multiplies the half of the matrix, too, that the causal mask takes away.
    unmasked = sum(not family.is_masked(index, length) for index in range(parsed.num_hidden_layers))
    masked_half = 2 * length * family.attention_width * unmasked
    expected = model_costs(parsed, length).of(spec).forward_flops + masked_half
    assert counter.get_total_flops() == num_samples * length * expected


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_wider_model_has_more_heads_of_the_same_size(config):
    family = family_of(parse_model_config(config))
    wide = family.widened(3)
    assert wide.config.hidden_size == 3 * family.config.hidden_size
    assert (wide.head_dim, wide.attention_width) == (family.head_dim, 3 * family.attention_width)
    assert wide.layer_cost(0, 1).forward_flops == pytest.approx(9 * family.layer_cost(0, 1).forward_flops, rel=0.02)
    assert family.config.hidden_size == 24


# --- where the model is cut -------------------------------------------------------------------------------------------


def test_stage_spec():
    specs = cut_stages(parse_model_config(LLAMA), 3, 12, layers=(1, 2, 1))
    assert [list(spec.layers) for spec in specs] == [[0], [1, 2], [3]]
    assert [spec.is_first for spec in specs] == [True, False, False]
    assert [spec.is_last for spec in specs] == [False, False, True]
    assert [spec.index for spec in specs] == [0, 1, 2]
    only = cut_stages(parse_model_config(LLAMA), 1, 12)[0]
    assert only.is_first
    assert only.is_last


@settings(max_examples=60, deadline=None)
@given(
    num_layers=st.integers(1, 9),
    num_stages=st.integers(1, 5),
    vocab_size=st.sampled_from([8, 200, 3000]),
    share_layers=st.booleans(),
)
@example(num_layers=9, num_stages=3, vocab_size=228, share_layers=True)  # counting a shared layer often cuts it wrong
def test_the_cut_is_the_best_of_all(num_layers, num_stages, vocab_size, share_layers):
    num_stages = min(num_stages, num_layers)
    config = parse_model_config(GPT2 | {"n_layer": num_layers, "vocab_size": vocab_size})
    costs = model_costs(config, 12, share_layers)

    def stage_costs(bounds):
        specs = [StageSpec(i, num_stages, bounds[i], bounds[i + 1]) for i in range(num_stages)]
        stages = [costs.of(spec) for spec in specs]
        flops, parameters = sum(s.forward_flops for s in stages), sum(s.parameters for s in stages)
        return [s.forward_flops / flops + PARAMETER_WEIGHT * s.parameters / parameters for s in stages]

    best, best_squares = inf, inf
    for inner in combinations(range(1, num_layers), num_stages - 1):
        values = stage_costs([0, *inner, num_layers])
        best, best_squares = min((best, best_squares), (max(values), sum(value**2 for value in values)))

    specs = cut_stages(config, num_stages, 12, share_layers=share_layers)
    assert all(len(spec.layers) >= 1 for spec in specs)
    assert [spec.first_layer for spec in specs[1:]] == [spec.end_layer for spec in specs[:-1]]
    values = stage_costs([0, *(spec.end_layer for spec in specs)])
    assert max(values) == best
    assert sum(value**2 for value in values) == pytest.approx(best_squares)


def test_a_heavy_head_gets_fewer_layers():
    specs = cut_stages(parse_model_config(LLAMA | {"num_hidden_layers": 8, "vocab_size": 5000}), 2, 12)
    assert len(specs[1].layers) == 1


def test_a_large_model_is_cut_quickly():
    config = parse_model_config(LLAMA | {"num_hidden_layers": 128})
    assert len(cut_stages(config, 32, 12)) == 32


@pytest.mark.parametrize(
    ("num_stages", "sequence_length", "layers", "message"),
    [
        (5, 12, None, r"stages\.count=5 is more than the model's 4 layers: lower it to 4"),
        (2, 12, (1, 2), r"layers=\[1, 2\] must be 2 positive numbers that add up to .* 4 layers, and they add up to 3"),
        (2, 12, (1, 2, 1), r"layers=\[1, 2, 1\] must be 2 positive numbers"),
        (2, 12, (4, 0), r"layers=\[4, 0\] must be 2 positive numbers"),
        (2, 17, None, r"data\.sequence_length=17 is more than the model's n_positions=16: lower the one"),
    ],
)
def test_impossible_cuts_are_refused(num_stages, sequence_length, layers, message):
    with pytest.raises(UserError, match=message):
        cut_stages(parse_model_config(GPT2), num_stages, sequence_length, layers)
