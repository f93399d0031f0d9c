"""What passes the boundaries between stages, where it is less than whole hidden states: which values, at what cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_models import CONFIGS, GPT2, LENGTH, LLAMA, LLAMA_LONG, VOCABULARY
from tiny_swarms import HIDDEN, SAMPLES, Swarm, assert_equal, make_call, make_manifest, make_microbatch, make_tensors
from tiny_swarms import LENGTH as SWARM_LENGTH
from tiny_swarms import reference as reference_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from coordinator.planning.stage_work import stage_works
from coordinator.run.baseline import Baseline
from swarm_peer.codecs import find_codec
from swarm_peer.config import RunManifest
from swarm_peer.errors import InvalidMessage, UserError
from swarm_peer.model.boundary import TABLE_DTYPE, TABLE_SCALE, frozen_values
from swarm_peer.model.costs import TABLE_BYTES, stage_costs
from swarm_peer.model.export import OWN_WEIGHTS_FILE, export_model
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.traffic import stage_traffic
from swarm_peer.model.training import StageTrainer
from swarm_peer.token_marks import BEGINS_DOCUMENT, NOT_LEARNT

RANK = 6
# Weights so large that a value that is left out shows, biases that learn, and layers whose products have some.
WIDE_SPREAD = {"initializer_range": 0.15}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2 | WIDE_SPREAD,
    "llama": LLAMA_LONG | WIDE_SPREAD | {"attention_bias": True, "mlp_bias": True},
}
EACH = pytest.mark.parametrize("family", FAMILIES)


def resolve(config: dict[str, Any], num_stages: int = 3, **sections: Any) -> ResolvedManifest:
    content = {
        "name": "test",
        "model": {"config": config, "boundary": {"rank": RANK}} | sections.pop("model", {}),
        "stages": {"count": num_stages},
        "data": {"sequence_length": LENGTH},
        "training": {"steps": 9, "global_batch_size": 4, "microbatch_size": 2},
        "optimizer": {"name": "sgd", "learning_rate": 0.05},
    }
    return ResolvedManifest.of(RunManifest.model_validate(content | sections))


def tokens(seed: int = 0, num_samples: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def trained(resolved: ResolvedManifest, num_steps: int = 3) -> Baseline:
    baseline = Baseline(resolved)
    for step in range(num_steps):
        baseline.train_step([tokens(step), tokens(100 + step)])
    return baseline


def logits_of(trainers: list[StageTrainer], tokens_BT: Tensor) -> Tensor:
    """logits_BV of what follows."""
    passed = None
    for trainer in trainers:
        passed = trainer.predict(tokens_BT, passed)
    assert passed is not None
    return passed


@EACH
@pytest.mark.parametrize("num_stages", [2, 3])
def test_values_that_no_stage_writes_are_those_of_the_tokens_at_each_boundary(family: str, num_stages: int) -> None:
    """After training, too: so what passes tells the next stage all that there is of the hidden states."""
    baseline = trained(resolve(FAMILIES[family], num_stages))
    hidden: list[Tensor] = []
    for trainer in baseline.trainers:
        layers = trainer.module.get_submodule(trainer.module.layers.removesuffix("."))
        last = layers.get_submodule(trainer.module.layer_names[-1])
        last.register_forward_hook(lambda layer, inputs, output: hidden.append(output))
    batch = tokens(7)
    passed = None
    outputs = []
    for trainer in baseline.trainers:
        passed = trainer.evaluate(batch, passed)
        outputs.append(passed)
    module = baseline.trainers[0].module
    expected = frozen_values(module.family, RANK, 0)[batch[:, :-1]].float()
    assert float(expected.std()) == pytest.approx(TABLE_SCALE * 0.15, rel=0.1)
    for hidden_BTD, output in zip(hidden[:-1], outputs, strict=False):
        assert hidden_BTD.shape[-1] == 24
        assert torch.equal(hidden_BTD[..., RANK:], expected)
        assert torch.equal(hidden_BTD[..., :RANK], output)
        assert float(output.std()) > 0.01
    assert not torch.equal(hidden[-1][..., RANK:], expected), "the last stage is whole"


@EACH
@pytest.mark.parametrize(("num_stages", "share_layers"), [(2, False), (3, False), (2, True)])
def test_the_exported_model_is_a_plain_one_that_computes_the_same(
    family: str, num_stages: int, share_layers: bool, tmp_path: Path
) -> None:
    resolved = resolve(FAMILIES[family], num_stages, model={"share_layers": share_layers})
    baseline = trained(resolved)
    export_model(resolved, baseline.state(), tmp_path / "model")

    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values())
    assert type(model).__name__ == resolved_class(family)
    with torch.no_grad():
        expected_BTV = model.eval()(tokens(5)).logits
    for length in (LENGTH, 5):
        logits_BV = logits_of(baseline.trainers, tokens(5)[:, :length])
        torch.testing.assert_close(logits_BV, expected_BTV[:, length - 1], rtol=0, atol=1e-5)
    assert float(expected_BTV.std()) > 0.1


def resolved_class(family: str) -> str:
    return {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[family]


@EACH
def test_gradients_of_what_passes_are_those_of_the_plain_model(family: str, tmp_path: Path) -> None:
    """The first values of the gradient of whole hidden states: the others would change nothing that is trained."""
    resolved = resolve(FAMILIES[family], 2)
    baseline = trained(resolved)
    export_model(resolved, baseline.state(), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    seen: list[Tensor] = []
    layers = model.get_submodule(baseline.trainers[0].module.layers.removesuffix("."))

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    layers[resolved.specs[0].end_layer - 1].register_forward_hook(note)
    batch = tokens(5)
    loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()

    first, last = baseline.trainers
    ahead = first.forward(batch)
    behind = last.forward(batch, ahead.output)
    grad_BTW = last.backward(behind)
    assert grad_BTW is not None
    assert grad_BTW.shape == (2, LENGTH, RANK) == ahead.output.shape
    assert seen[-1].grad is not None
    torch.testing.assert_close(grad_BTW / 2, seen[-1].grad[..., :RANK], rtol=1e-4, atol=1e-6)
    first.backward(ahead, grad_BTW)
    for name, parameter in first.trained.items():
        whole = model.get_parameter(name).grad
        assert whole is not None
        assert parameter.grad is not None
        written = whole[tuple(slice(size) for size in parameter.shape)]
        torch.testing.assert_close(parameter.grad / 2, written, rtol=1e-4, atol=1e-6)


@EACH
def test_the_same_seed_makes_the_same_frozen_values_wherever_they_are(family: str) -> None:
    resolved = resolve(FAMILIES[family])
    tables = [StageTrainer(resolved, spec).module.boundary.table for spec in resolved.specs]
    assert all(torch.equal(table, tables[0]) for table in tables)
    blank = StageTrainer(resolved, resolved.specs[1], blank=True).module.boundary
    assert torch.equal(blank.table, tables[0]), "no state has them"
    other = resolve(FAMILIES[family], seed=1)
    assert not torch.equal(StageTrainer(other, other.specs[1]).module.boundary.table, tables[0])


@EACH
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("boundary", [{"rank": RANK}, {"maxout": 2}], ids=["rank", "maxout"])
def test_a_state_that_another_trainer_loads_goes_on_alike(
    family: str, boundary: dict[str, int], optimizer: str
) -> None:
    section = {"name": optimizer, "learning_rate": 1e-3}
    resolved = resolve(FAMILIES[family], model={"boundary": boundary}, optimizer=section)
    one, other = trained(resolved), Baseline(resolved)
    for trainer, source in zip(other.trainers, one.trainers, strict=True):
        template = StageTrainer(resolved, trainer.spec, hollow=True).state_template()
        state = source.state()
        assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in template.items()}
        trainer.load_state(state, 3)
    names = [name for trainer in one.trainers for name in trainer.state()]
    assert len(names) == len(set(names)), "a checkpoint is the union of the stages' states"
    one.train_step([tokens(9)])
    other.train_step([tokens(9)])
    for name, value in one.state().items():
        assert torch.equal(value, other.state()[name])


@pytest.mark.parametrize("boundary", [{"rank": RANK}, {"maxout": 2}], ids=["rank", "maxout"])
@pytest.mark.parametrize("width", [24, RANK - 1])
def test_hidden_states_and_gradients_of_another_width_are_refused(boundary: dict[str, int], width: int) -> None:
    trainers = Baseline(resolve(GPT2, model={"boundary": boundary})).trainers
    ahead = trainers[0].forward(tokens())
    with pytest.raises(InvalidMessage, match=rf"hidden state is .*\(2, {LENGTH}, {width}\), not a float"):
        trainers[1].forward(tokens(), torch.zeros(2, LENGTH, width))
    with pytest.raises(InvalidMessage, match=rf"gradient is .*\(2, {LENGTH}, {width}\), not a float"):
        trainers[0].backward(ahead, torch.zeros(2, LENGTH, width))


def test_a_stage_in_the_middle_looks_no_token_up_that_there_is_not() -> None:
    middle = Baseline(resolve(GPT2)).trainers[1]
    with pytest.raises(InvalidMessage, match="leave the vocabulary of 61"):
        middle.forward(torch.full((2, LENGTH + 1), VOCABULARY), torch.zeros(2, LENGTH, RANK))


@EACH
def test_marks_of_tokens_change_no_frozen_values(family: str) -> None:
    """Samples of chats have marks beside their ids."""
    data = {"sequence_length": LENGTH, "format": "messages", "packing": True}
    plain, marked = (Baseline(resolve(FAMILIES[family], data=section)) for section in (data | {"packing": False}, data))
    marks = torch.zeros_like(tokens())
    marks[:, 0] = BEGINS_DOCUMENT
    marks[:, 3] = NOT_LEARNT
    results = []
    for baseline, batch in ((plain, tokens()), (marked, tokens() | marks)):
        passed = baseline.trainers[0].forward(batch).output
        results.append(baseline.trainers[1].forward(batch, passed).output)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["train", "evaluate"])
async def test_few_values_travel_both_ways_between_peers(mode: str) -> None:
    """Frames of whole hidden states are refused, and what is computed is what one process computes."""
    boundary = {"rank": 3}
    manifest = make_manifest(3, model={"config": make_manifest().model.config, "boundary": boundary})
    async with Swarm(manifest) as swarm:
        peers = [await swarm.add(name, stage) for stage, name in enumerate("abc")]
        sizes: list[tuple[str, int]] = []
        for peer in peers[:2]:
            call = peer.transport.call

            async def noting(to: str, body: Any, tensors: Any = (), *, call: Any = call, timeout_s: float) -> Any:
                reply = await call(to, body, tensors, timeout_s=timeout_s)
                sizes.extend([("sent", tensors[1].nbytes), *(("back", tensor.nbytes) for tensor in reply.tensors)])
                return reply

            peer.transport.call = noting  # type: ignore[method-assign]
        result = await peers[0].run(make_microbatch(mode=mode))
        assert result.loss_sum == pytest.approx(reference_of(manifest)[0], abs=1e-6)
        width = 4 * SAMPLES * SWARM_LENGTH * 3
        assert sizes == [("sent", width), ("back", width)] * 2 if mode == "train" else [("sent", width)] * 2
        if mode == "train":
            for peer, expected in zip(peers, reference_of(manifest)[1], strict=True):
                assert_equal(peer.gradients(), expected)
        whole = make_tensors(hidden_BTD=torch.zeros(SAMPLES, SWARM_LENGTH, HIDDEN))
        with pytest.raises(InvalidMessage, match="were expected"):
            await call_of(peers[0])(peers[1].peer_id, make_call(swarm), whole, timeout_s=20.0)


def call_of(peer: Any) -> Any:
    return type(peer.transport).call.__get__(peer.transport)


@pytest.mark.parametrize(
    ("boundary", "width"), [(None, 24), ({"rank": RANK}, RANK), ({"maxout": 3}, 8)], ids=["none", "rank", "maxout"]
)
def test_traffic_and_plans_count_what_passes(boundary: dict[str, int] | None, width: int) -> None:
    wire = {"activations": "fp16", "gradients": "blockwise_8bit"}
    resolved = resolve(GPT2, model={"boundary": boundary}, wire=wire)
    forth = find_codec("fp16").num_bytes(LENGTH * width) + 4 * (LENGTH + 1)
    back = find_codec("blockwise_8bit").num_bytes(LENGTH * width)
    middle = stage_traffic(resolved)[1]
    assert (middle.sent_bytes, middle.received_bytes) == (forth + back, forth + back)
    work = stage_works(resolved.manifest, 3)[1]
    assert (work.activation_bytes, work.gradient_bytes) == (forth, back)
    passed = Baseline(resolved).trainers[0].forward(tokens()).output
    assert passed.shape == (2, LENGTH, width)


def test_each_stage_keeps_the_frozen_values_that_it_looks_up() -> None:
    resolved = resolve(GPT2)
    for spec, costs in zip(resolved.specs, stage_costs(resolved, "cuda"), strict=True):
        module = StageTrainer(resolved, spec).module
        trained_bytes = 4 * sum(parameter.numel() for parameter in module.parameters())
        assert costs.memory.weight_bytes == trained_bytes + sum(b.nbytes for b in module.boundary.buffers())
        assert costs.trained == resolved.num_trained(spec) == trained_bytes // 4
    assert torch.empty(1, dtype=TABLE_DTYPE).nbytes == TABLE_BYTES


@EACH
def test_maxout_learns_and_has_no_plain_form(family: str, tmp_path: Path) -> None:
    resolved = resolve(FAMILIES[family], model={"boundary": {"maxout": 2}}, optimizer={"learning_rate": 0.01})
    baseline = Baseline(resolved)
    losses = [baseline.train_step([tokens()])[0] for _ in range(20)]
    assert losses[-1] < losses[0] - 0.5
    own = {name for name in baseline.state() if name.startswith("boundary.")}
    ends = [spec.end_layer for spec in resolved.specs[:-1]]
    matrices = {f"boundary.send.{end}.weight" for end in ends} | {f"boundary.receive.{end}.1.weight" for end in ends}
    assert own > matrices
    export_model(resolved, baseline.state(), tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"README.md", OWN_WEIGHTS_FILE}
    assert "no Hugging Face model has" in (tmp_path / "model" / "README.md").read_text()


def test_maxout_passes_the_largest_of_each_group() -> None:
    baseline = Baseline(resolve(LLAMA, model={"boundary": {"maxout": 3}}))
    boundary = baseline.trainers[0].module.boundary
    hidden_BTD = torch.randn(2, LENGTH, 24)
    (matrix,) = (value for name, value in boundary.named_parameters() if name.startswith("send"))
    assert float(matrix.detach().std()) == pytest.approx(24**-0.5, rel=0.1)
    mixed = hidden_BTD @ matrix.T
    expected = torch.stack([mixed[..., 3 * group : 3 * group + 3].max(dim=-1).values for group in range(8)], dim=-1)
    torch.testing.assert_close(boundary.leave(hidden_BTD), expected)


@pytest.mark.parametrize(
    ("config", "boundary", "message"),
    [
        (GPT2, {"rank": 24}, "model.boundary.rank=24 must be less than the 24 values of a hidden state"),
        (GPT2, {"maxout": 5}, "model.boundary.maxout=5 must divide the 24 values of a hidden state"),
        (LLAMA, {"maxout": 24}, "model.boundary.maxout=24 must divide the 24 values of a hidden state, and leave two"),
        (
            CONFIGS["gemma3_text"],
            {"rank": 6},
            "model.boundary.rank=6 is for gpt2 and llama, and this is a gemma3_text model",
        ),
    ],
)
def test_a_boundary_that_a_model_cannot_have_is_refused(
    config: dict[str, Any], boundary: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        resolve(config, model={"boundary": boundary})


def test_a_run_of_one_stage_has_no_boundaries() -> None:
    with pytest.raises(ValidationError, match="for what passes between stages, and stages"):
        resolve(GPT2, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_maxout_is_for_all_families(name: str) -> None:
    baseline = Baseline(resolve(CONFIGS[name], model={"boundary": {"maxout": 2}}))
    losses = [baseline.train_step([tokens()])[0] for _ in range(4)]
    assert losses[-1] < losses[0]
