"""What is published must load: config.json files as they are, and which of their keys are refused by name.

The file data/published_configs.json holds the figures of some ten models of each family, with the odd keys that they
carry.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, GEMMA3, GPT2, LLAMA, LLAMA_LONG, MISTRAL, QWEN2, SIZES
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from swarm_peer.config import ModelSection
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import parse_model_config, resolve_model_config
from swarm_peer.model.families import FAMILIES, family_of
from swarm_peer.model.partition import StageSpec, cut_stages, model_costs
from swarm_peer.model.pretrained import ModelSource, load_pretrained
from swarm_peer.model.published import as_trained
from swarm_peer.model.stage import StageModule

DATA = json.loads((Path(__file__).parent / "data" / "published_configs.json").read_text())
PUBLISHED = {
    name: own if "text_config" in own else {**family["common"], **own}
    for family in DATA.values()
    for name, own in family["models"].items()
}
REFUSED = {name: config["refused"] for name, config in PUBLISHED.items() if "refused" in config}
TAKEN = {name: config for name, config in PUBLISHED.items() if name not in REFUSED}
# Of these, a few of each family's sizes.
LARGE = ("meta-llama/Llama-2-70b-hf", "mistralai/Mistral-Large-Instruct-2407", "google/gemma-3-27b-it")


def write(folder, config):
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "refused"}))
    return str(folder)


def resolve(folder, config):
    return resolve_model_config(ModelSection(pretrained=write(folder, config)))


# --- the published models ---------------------------------------------------------------------------------------------


def test_there_are_ten_models_of_each_family():
    assert list(DATA) == list(FAMILIES)
    for family in DATA.values():
        assert sum("refused" not in config for config in family["models"].values()) >= 10


@pytest.mark.parametrize("name", TAKEN)
def test_a_published_model_is_read_as_transformers_reads_it(name, tmp_path):
    resolved = resolve(tmp_path, TAKEN[name])
    ours = parse_model_config(resolved)
    theirs = type(ours).from_dict(dict(TAKEN[name].get("text_config", TAKEN[name])))
    assert ours.tie_word_embeddings is False
    ignored = {"tie_word_embeddings", "id2label", "label2id", "architectures", *family_of(ours).passed_over}
    for key in sorted(set(type(ours).__dataclass_fields__) - ignored):
        if key != "rope_parameters":
            assert getattr(ours, key) == getattr(theirs, key), key
    if (rope := getattr(ours, "rope_parameters", None)) is not None:
        assert {**theirs.rope_parameters, **rope} == theirs.rope_parameters
    assert parse_model_config(json.loads(json.dumps(resolved))).to_dict() == ours.to_dict()


@pytest.mark.parametrize(("name", "key"), REFUSED.items())
def test_a_published_model_that_computes_otherwise_is_refused_by_that_key(name, key, tmp_path):
    with pytest.raises(UserError, match=rf"model\.pretrained=.* cannot be trained: .*{key}=") as caught:
        resolve(tmp_path, PUBLISHED[name])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_published_model_is_cut(name, tmp_path):
    config = parse_model_config(resolve(tmp_path, TAKEN[name]))
    specs = cut_stages(config, 8, 2048)
    costs = model_costs(config, 2048)
    assert sum(len(spec.layers) for spec in specs) == config.num_hidden_layers
    billions = sum(costs.of(spec).parameters for spec in specs) / 1e9
    assert billions == pytest.approx({LARGE[0]: 69, LARGE[1]: 123, LARGE[2]: 28.4}[name], rel=0.01)


# --- keys that the config class does not declare ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "extra", "is_told"),
    [
        (GPT2, {"n_special": 0, "finetuning_task": None, "pruned_heads": {}, "use_bfloat16": False}, False),
        (GPT2, {"predict_special_tokens": True}, True),
        (GPT2, {"output_past": True}, True),
        (GPT2, {"afn": "gelu"}, True),
        (GPT2, {"reorder_and_upcast_attn": True}, True),
        (GPT2, {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, True),
        (LLAMA, {"unsloth_fixed": True}, True),
        (LLAMA, {"quantization_config": None, "auto_map": None, "text_config": {}, "num_experts": 0}, False),
        (LLAMA, {"num_experts": 1}, True),
        (LLAMA, {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}, True),
        (LLAMA, {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}, True),
        (LLAMA, {"sliding_window": 16, "license": "mit", "training_run": {"id": 7}}, True),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}}, True),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 7}}, True),
        (QWEN2, {"head_dim": None}, False),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, True),
        (LLAMA, {"transformers_version": "9.0", "dtype": "bfloat16", "torch_dtype": "bfloat16"}, False),
        (LLAMA, {"bos_token_id": 10**6, "eos_token_id": [-1, 10**6]}, False),
    ],
)
def test_keys_that_transformers_ignores_are_left_out(base, extra, is_told, tmp_path, caplog):
    resolved = resolve(tmp_path, {**base, **extra})
    plain = {**base, **{key: resolved[key] for key in extra if key in resolved}}
    assert parse_model_config(resolved).to_dict() == parse_model_config(plain).to_dict()
    notes = [record.getMessage() for record in caplog.records if record.name.startswith("swarm_peer")]
    assert [note.partition(" ")[0] for note in notes] == ["config_keys_ignored"] * is_told
    assert not notes or all(key in notes[0] for key in extra)


@pytest.mark.parametrize(
    ("base", "extra", "key"),
    [
        (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        (LLAMA, {"per_layer_config": {"0": {"intermediate_size": 12}}}, "per_layer_config"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
        (MISTRAL, {"num_experts_per_tok": 2}, "num_experts_per_tok"),
        (LLAMA, {"vision_config": {"hidden_size": 8}}, "vision_config"),
        (LLAMA, {"text_config": {"hidden_size": 8}}, "text_config"),
        (LLAMA, {"text_config": "another"}, "text_config"),  # transformers takes it for the language model
        (LLAMA, {"is_causal": False}, "is_causal"),
        (LLAMA_LONG, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_LONG, {"original_max_position_embeddings": 4}, "original_max_position_embeddings"),
        (QWEN2, {"use_mrope": True}, "use_mrope"),
    ],
)
def test_keys_that_transformers_honours_are_refused_by_name(base, extra, key, tmp_path):
    """Those that its classes do not declare: whether they are asked for shows as the model is built and run."""
    with pytest.raises(UserError, match=rf"cannot be trained: .*{key}=") as caught:
        resolve(tmp_path, {**base, **extra})
    assert "\n" not in str(caught.value)


def test_a_size_of_heads_that_only_the_layers_know_is_honoured(tmp_path):
    config = parse_model_config(resolve(tmp_path, QWEN2 | {"head_dim": 10}))
    module = StageModule(config, StageSpec(0, 1, 0, 4), ModelSection(config={}))
    assert module.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (40, 24)
    assert family_of(config).shapes()["head_dim"] == 10


def test_a_config_that_is_named_is_no_stricter(tmp_path):
    """Of `model.config: NAME`, too, nobody can correct the file, nor untie what it ties."""
    config = {key: value for key, value in GPT2.items() if key != "tie_word_embeddings"}
    assert resolve_model_config(ModelSection(config=write(tmp_path, config | {"output_past": True}))) == GPT2
    with pytest.raises(UserError, match=r"model\.config=.* cannot be trained: .*quantization_config="):
        resolve_model_config(ModelSection(config=write(tmp_path, config | {"quantization_config": {"bits": 4}})))


def test_what_a_person_writes_stays_strict():
    with pytest.raises(UserError, match="output_past=True is no setting of gpt2 models"):
        parse_model_config(GPT2 | {"output_past": True})
    with pytest.raises(UserError, match="finetuning_task=None is no setting"):
        parse_model_config(GPT2 | {"finetuning_task": None})


# --- special tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("padding", "row"), [(-1, 60), (3, 3), (61, None), (10**6, None), (-62, None), (None, None)])
def test_a_padding_token_means_what_it_does_to_transformers(padding, row, tmp_path):
    """Where that cannot build the embedding, there is none."""
    config = parse_model_config(resolve(tmp_path, LLAMA | {"pad_token_id": padding}))
    module = StageModule(config, StageSpec(0, 1, 0, 4), ModelSection(config={}))
    assert module.get_submodule("model.embed_tokens").padding_idx == row


@pytest.mark.parametrize("config", [LLAMA, GEMMA3])
def test_a_padding_token_that_a_person_writes_is_one_of_the_vocabulary(config):
    with pytest.raises(UserError, match="pad_token_id=61 is outside of the vocabulary of 61: correct it, or set it to"):
        parse_model_config(config | {"pad_token_id": 61})


# --- models that also take images, and layers that know their number --------------------------------------------------


@torch.no_grad()
def assert_computes_the_same(model, folder, **manifest):
    """A model's parts that we train, from its own files."""
    for parameter in model.eval().parameters():
        parameter.normal_(std=0.2)
    model.tie_weights()
    model.save_pretrained(folder)
    section = ModelSection(pretrained=str(folder), **manifest)
    config = parse_model_config(resolve_model_config(section))
    module = StageModule(config, StageSpec(0, 1, 0, config.num_hidden_layers), section)
    load_pretrained(module, family_of(config), ModelSource(str(folder)))
    tokens_BT = torch.arange(20).view(2, 10)
    torch.testing.assert_close(module.eval()(tokens_BT), model(tokens_BT).logits, rtol=0, atol=1e-5)


VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"} | {"sliding_window": 4}


def test_of_a_gemma_that_takes_images_the_text_is_trained(tmp_path, caplog):
    config = Gemma3Config(
        text_config=TEXT | {"head_dim": 8, "num_hidden_layers": 6},
        vision_config=VISION | {"model_type": "siglip_vision_model"},
        image_token_index=60,
        mm_tokens_per_image=4,
    )
    assert_computes_the_same(Gemma3ForConditionalGeneration(config), tmp_path)
    assert "images_left_out" in caplog.text


def test_of_a_mistral_that_takes_images_the_text_is_trained(tmp_path):
    config = Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "head_dim": 8},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=60,
        tie_word_embeddings=False,
    )
    assert_computes_the_same(Mistral3ForConditionalGeneration(config), tmp_path)


def test_the_text_of_a_quantised_model_that_takes_images_is_quantised():
    config = {"model_type": "gemma3", "text_config": GEMMA3, "quantization_config": {"bits": 4}}
    with pytest.raises(UserError, match="quantization_config="):
        as_trained(config, "quantised")


@pytest.mark.parametrize("wrapper", ["gemma3", "mistral3", "llava", "qwen2_vl"])
def test_other_models_that_take_images_are_named(wrapper):
    with pytest.raises(UserError, match=f"model_type='{wrapper}' is not supported"):
        as_trained({"model_type": wrapper, "text_config": LLAMA}, "other")


def test_layers_may_scale_their_attention_by_their_number(tmp_path):
    config = AutoModelForCausalLM.from_config(parse_model_config(GPT2 | {"scale_attn_by_inverse_layer_idx": True}))
    assert_computes_the_same(config, tmp_path)
    parsed = parse_model_config(GPT2 | {"scale_attn_by_inverse_layer_idx": True})
    with pytest.raises(UserError, match=r"this gpt2 model differ \(scale_attn_by_inverse_layer_idx: true\)"):
        cut_stages(parsed, 2, 12, share_layers=True)


def test_all_families_are_asked_without_an_error(caplog):
    """The model that is built to see what transformers asks for can be built, and run."""
    caplog.set_level(logging.DEBUG, logger="swarm_peer")
    for config in CONFIGS.values():
        as_trained(config | {"an_odd_key": 7}, "odd")
    assert "model_not_tried" not in caplog.text
    assert caplog.text.count("config_keys_ignored") == len(CONFIGS)
