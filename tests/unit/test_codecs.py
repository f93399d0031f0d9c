"""The seam of codecs: what the registry names can be chosen for a run, sent and averaged, and nobody compares names."""

import ast
from pathlib import Path

import pytest
import torch
from memory_transport import MemoryNetwork
from test_model_training import go_backward, go_forward, make_manifest, make_trainers, tokens
from test_runtime_averaging import Members, check_equals_mean
from tiny_models import LENGTH

from coordinator.planning.stage_work import stage_works
from coordinator.run.baseline import Baseline
from swarm_peer.codecs import CODECS, PLAIN, check_codec, find_codec
from swarm_peer.codecs.base import Codec
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.wire.codecs import decode, encode, encoded_bytes

ROOT = Path(__file__).parents[2]
STEP = 2.0**-8


class Steps(Codec):
    """Whole multiples of 1/256, up to 128, in 16 bits, and a byte that says nothing."""

    name = "steps"
    scale = 8.0

    def __init__(self):
        self.encoded = 0

    def num_bytes(self, num_values):
        return 2 * num_values + 1

    def encode(self, tensor, seed=None):
        self.encoded += 1
        if not bool(tensor.isfinite().all()):
            raise OverflowError("the values are not finite")
        whole = (tensor.float() / STEP).round().clamp(-(2**15), 2**15 - 1).to(torch.int16).cpu()
        return torch.cat([whole.contiguous().view(-1).view(torch.uint8), torch.zeros(1, dtype=torch.uint8)])

    def decode(self, raw, num_values):
        return raw[:-1].clone().view(torch.int16).float() * STEP


STEPS = Steps()


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    monkeypatch.setitem(CODECS, "steps", f"{__name__}:STEPS")
    monkeypatch.setattr(STEPS, "encoded", 0)


def test_a_tensor_goes_through_a_codec_of_ones_own():
    tensor = torch.randn((3, 5, 7), generator=torch.Generator().manual_seed(0))
    data = encode(tensor, "steps")
    assert len(data) == encoded_bytes(tensor.shape, "steps") == 2 * 105 + 1
    again = decode(data, tensor.shape, "steps")
    assert torch.equal(again, (tensor / STEP).round() * STEP)


async def test_an_average_goes_through_a_codec_of_ones_own():
    async with MemoryNetwork() as network:
        members = Members(network, "steps")
        await members.serve()
        check_equals_mean(await members.average(0, [0, 1, 2]), 0, 2 * STEP)
    assert STEPS.encoded >= 2 * 3, "parts and averages"


def test_a_run_chooses_a_codec_of_ones_own():
    wire = {"wire": {"activations": "steps", "gradients": "steps"}, "averaging": {"compression": "steps"}}
    manifest = make_manifest(**wire)
    trainers = make_trainers(manifest)
    assert [trainer.loss_scale for trainer in trainers] == [8.0, 8.0]
    baseline = Baseline(ResolvedManifest.of(manifest))
    loss, _ = baseline.train_step([tokens(0), tokens(1)])
    assert STEPS.encoded == 4, "activations and gradients of two microbatches"
    passes = go_forward(trainers, tokens(0))
    go_backward(trainers, passes)
    assert loss == pytest.approx(float(passes[-1].output.mean()), abs=0.2)


def test_a_codec_of_ones_own_costs_its_bytes():
    plain = make_manifest()
    manifest = make_manifest(wire={"activations": "steps"}, averaging={"compression": "steps"})
    [kept, _] = stage_costs(ResolvedManifest.of(plain), "cpu")
    [more, _] = stage_costs(ResolvedManifest.of(manifest), "cpu")
    values = 3 * LENGTH * ResolvedManifest.of(plain).hidden_size
    assert more.memory.microbatch_bytes - kept.memory.microbatch_bytes == 2 * values + 1
    first, _ = stage_works(manifest, 2)
    assert first.averaging_bytes == 2 * first.trained + 1
    assert first.activation_bytes == 2 * values / 3 + 1 + 4 * (LENGTH + 1)


def test_a_name_that_is_not_in_the_registry_is_no_codec():
    with pytest.raises(ValueError, match=r"'none', 'fp16'.* or 'steps'"):
        check_codec("int3")
    assert check_codec("steps") == "steps"


@pytest.mark.parametrize("name", CODECS)
def test_the_registry_names_each_codec_as_it_names_itself(name):
    codec = find_codec(name)
    assert isinstance(codec, Codec)
    assert codec.name == name
    assert codec is find_codec(name)
    tensor = torch.randn((3, 50), generator=torch.Generator().manual_seed(0))
    encoded = codec.encode(tensor, 1)
    assert (encoded.dtype, encoded.shape) == (torch.uint8, (codec.num_bytes(150),))
    again = codec.decode(encoded, 150)
    assert (again.dtype, again.shape) == (torch.float32, (150,))
    assert torch.equal(again.view(3, 50), tensor) is codec.is_exact


def test_one_codec_is_exact_and_the_plain_one_is_it():
    assert [name for name in CODECS if find_codec(name).is_exact] == [PLAIN]


def names_compared(source):
    """Lines that compare something of a codec with a codec's name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            patterns = (part for case in node.cases for part in ast.walk(case.pattern))
            parts = [node.subject, *(part.value for part in patterns if isinstance(part, ast.MatchValue))]
        else:
            continue
        constants = {each.value for part in parts for each in ast.walk(part) if isinstance(each, ast.Constant)}
        others = " ".join(ast.unparse(part) for part in parts)
        is_about_codecs = any(word in others for word in ("codec", "wire", "compression", "activations", "gradients"))
        unmistakable = set(CODECS) - {"none", "fp16", "bf16"}
        if constants & unmistakable or (is_about_codecs and constants & set(CODECS)):
            yield node.lineno


@pytest.mark.parametrize("folder", ["swarm_peer", "coordinator", "benchmarks", "tools"])
def test_nobody_but_a_codec_compares_names_of_codecs(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path.parent != ROOT / "swarm_peer/codecs":
            assert not list(names_compared(path.read_text())), path


@pytest.mark.parametrize(
    "line",
    [
        'codec == "none"',
        '"fp16" in (manifest.model.precision, manifest.wire.gradients)',
        'x = 1 if name in ("int4_hadamard", "int5_hadamard") else 2',
        'match codec:\n case "none" | "bf16":\n  pass',
    ],
)
def test_the_check_sees_comparisons(line):
    assert list(names_compared(line))
    assert not list(names_compared('precision == "fp16" or notice != "none"'))
