import json
from itertools import combinations
from math import inf

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaConfig

from swarm_peer.config import ModelSection
from swarm_peer.errors import UserError
from swarm_peer.model import architecture
from swarm_peer.model.architecture import parse_model_config, resolve_model_config
from swarm_peer.model.partition import (
    PARAMETER_WEIGHT,
    StageSpec,
    cut_stages,
    model_costs,
    stage_cost,
)
from swarm_peer.model.stage import StageModule, initialise

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_positions": 16,
    "n_embd": 24,
    "n_layer": 4,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "max_position_embeddings": 16,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VARIANTS = [
    GPT2,
    GPT2 | {"n_inner": 50},
    LLAMA,
    LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "num_key_value_heads": 1},
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
    with pytest.raises(UserError, match="is no folder: correct the path"):
        resolve_model_config(ModelSection(config=name))


def test_folder_without_config(tmp_path):
    with pytest.raises(UserError, match=r"cannot read config\.json there"):
        resolve_model_config(ModelSection(config=str(tmp_path)))


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_folder_with_broken_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="check the folder"):
        resolve_model_config(ModelSection(config=str(tmp_path)))


def test_hub_name_is_downloaded(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    asked = []

    def download(name, file):
        asked.append((name, file))
        return str(tmp_path / "config.json")

    monkeypatch.setattr(architecture, "hf_hub_download", download)
    assert resolve_model_config(ModelSection(config="openai-community/gpt2")) == GPT2
    assert asked == [("openai-community/gpt2", "config.json")]


def test_unreachable_hub_name(monkeypatch):
    def download(name, file):
        raise LocalEntryNotFoundError("cannot reach it\nand more")

    monkeypatch.setattr(architecture, "hf_hub_download", download)
    with pytest.raises(
        UserError, match=r"'nobody/nothing' is no folder here, .* \(cannot reach it\): correct"
    ) as caught:
        resolve_model_config(ModelSection(config="nobody/nothing"))
    assert "\n" not in str(caught.value)


# --- which configs work -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "config_class"),
    [(GPT2, GPT2Config), (LLAMA, LlamaConfig), (PUBLISHED_GPT2, GPT2Config), (PUBLISHED_LLAMA, LlamaConfig)],
    ids=["gpt2", "llama", "published gpt2", "published llama"],
)
def test_good_configs_pass(config, config_class):
    before = json.dumps(config)
    assert isinstance(parse_model_config(config), config_class)
    assert json.dumps(config) == before


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_what_transformers_writes_passes(config):
    written = json.loads(parse_model_config(config).to_json_string(use_diff=False))
    assert parse_model_config(written).to_dict() == parse_model_config(config).to_dict()


def test_names_common_to_all_families_pass():
    assert parse_model_config(GPT2 | {"num_hidden_layers": 7}).n_layer == 7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type='bert' is not supported; choose one of gpt2, llama"),
        ({}, "model_type=None is not supported"),
        (GPT2 | {"n_layers": 3}, "n_layers=3 is no setting of gpt2 models: remove it or correct its spelling"),
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
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True is not supported"),
        (GPT2 | {"n_head": 5}, "n_embd=24 is not a multiple of n_head=5: change one of them"),
        (GPT2 | {"n_layer": 0}, "n_layer=0 must be at least 1"),
        (GPT2 | {"activation_function": "magic"}, "activation 'magic' is unknown"),
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        (LLAMA | {"head_dim": 7}, "is no llama model: .* even rotary dimension"),
        (LLAMA | {"rope_scaling": {"rope_type": "magic"}}, "rope_type='magic' is unknown"),
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
    costs = model_costs(parsed, sequence_length=12)
    for spec in cut_stages(parsed, 2, 12, layers=(1, 3)):
        module = StageModule(parsed, spec, share_layers=share_layers)
        assert stage_cost(costs, spec, share_layers).parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("config", VARIANTS)
def test_flops_are_those_that_torch_counts(config):
    parsed = parse_model_config(config)
    parsed._attn_implementation = "eager"  # torch counts no operations of the fused attention on a CPU
    num_samples, length = 2, 12
    spec = StageSpec(0, 1, 0, parsed.num_hidden_layers)
    module = StageModule(parsed, spec)
    initialise(module, seed=0)
    tokens_BT = torch.zeros((num_samples, length), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        module(tokens_BT)
    head_dim = getattr(parsed, "head_dim", parsed.hidden_size // parsed.num_attention_heads)
    # Eager attention multiplies the half of the matrix, too, that the causal mask takes away.
    masked_half = 2 * length * parsed.num_attention_heads * head_dim * parsed.num_hidden_layers
    expected = stage_cost(model_costs(parsed, length), spec).forward_flops + masked_half
    assert counter.get_total_flops() == num_samples * length * expected


# --- where the model is cut -------------------------------------------------------------------------------------------


def test_stage_spec():
    specs = cut_stages(parse_model_config(LLAMA), 3, 12, layers=(1, 2, 1))
    assert [list(spec.layers) for spec in specs] == [[0], [1, 2], [3]]
    assert [spec.has_embedding for spec in specs] == [True, False, False]
    assert [spec.has_head for spec in specs] == [False, False, True]
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
    costs = model_costs(config, 12)

    def stage_costs(bounds):
        specs = [StageSpec(i, num_stages, bounds[i], bounds[i + 1]) for i in range(num_stages)]
        stages = [stage_cost(costs, spec, share_layers) for spec in specs]
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
