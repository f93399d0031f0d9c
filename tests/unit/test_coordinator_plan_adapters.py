"""What a fine-tuning run costs, against figures by hand: adapters on Llama 3.1 in NF4, over slow links."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.planning.peers_file import load_peers
from coordinator.planning.plan import make_report
from coordinator.planning.stage_work import stage_works, widened_layer_flops
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import resolve_model
from swarm_peer.policy.planning.resources import PeerGroup, StageWork

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "plan-70b-2026-11-30.md"
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False}
LLAMA |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 8}
LLAMA |= {"rope_scaling": ROPE | {"original_max_position_embeddings": 8192}}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_8B = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


def manifest_on(folder: Path, config: dict[str, Any], **changes: dict[str, Any]) -> RunManifest:
    """The run of the page, on a base of which there is a config alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    content = yaml.safe_load(text)
    content["model"] |= {"pretrained": str(folder)}
    for section, values in changes.items():
        content[section] = content[section] | values
    return RunManifest.model_validate(content)


def works_of(manifest: RunManifest, num_stages: int) -> tuple[StageWork, ...]:
    return stage_works(manifest.model_copy(update={"model": resolve_model(manifest.model)}), num_stages)


@pytest.fixture
def large(tmp_path: Path) -> RunManifest:
    return manifest_on(tmp_path / "llama-70b", LLAMA_70B)


def cards(mbps: float) -> list[PeerGroup]:
    """Those of the peers' file, on other links."""
    (group,) = load_peers(ROOT / "configs" / "peers" / "six-24gb.yaml", "bf16")
    by_file = 100e6 / 8
    return [
        replace(
            group,
            upload_bytes_per_s=group.upload_bytes_per_s * mbps * 1e6 / 8 / by_file,
            download_bytes_per_s=group.download_bytes_per_s * mbps * 1e6 / 8 / by_file,
        )
    ]


# --- by hand: Llama 3.1 70B, sequences of 2048

D, INNER, KEYS, VOCABULARY, LENGTH, RANK = 8192, 28672, 1024, 128256, 2048, 16
SHAPES = [(D, D), (D, KEYS), (D, KEYS), (D, D), (D, INNER), (D, INNER), (INNER, D)]
LAYER = sum(map(prod, SHAPES))
ADAPTERS = sum(RANK * (inputs + outputs) for inputs, outputs in SHAPES)
END = VOCABULARY * D


def flops_of_layer_by_hand() -> float:
    """Of a token: forward, once more for the backward pass, and gradients of inputs; those of attention are two."""
    products = 2 * LAYER * (1 + 1 + 1)
    attention = 2 * (2 * LENGTH * D) * (1 + 1 + 2)  # queries times keys and weights times values, under a mask
    adapters = 2 * ADAPTERS * (1 + 1 + 2)
    # Three times, NF4's half a byte is read, and 16 bits are written and read; 50 operations take as long as a byte.
    made_whole = 50 * 4.5 * 3 * LAYER / LENGTH
    return products + attention + adapters + made_whole


def test_compute_is_that_of_a_frozen_base(large: RunManifest) -> None:
    works = works_of(large, 6)
    assert sum(work.layers for work in works) == 80
    for work in works[:-1]:
        assert work.flops == pytest.approx(LENGTH * work.layers * flops_of_layer_by_hand(), rel=0.002)
    head = 2 * END * (1 + 1 + 1)  # all of its logits never exist at once, so it is computed again, too
    assert works[-1].flops == pytest.approx(LENGTH * (works[-1].layers * flops_of_layer_by_hand() + head), rel=0.002)
    whole = works_of(manifest_whole(large), 6)
    assert 0.75 < works[2].flops / whole[2].flops < 0.82, "there is one product less of four"


def manifest_whole(manifest: RunManifest) -> RunManifest:
    model = manifest.model.model_copy(update={"adapter": None, "base": "fp32"})
    return manifest.model_copy(update={"model": model})


def test_memory_is_that_of_the_base_as_kept(large: RunManifest) -> None:
    works = works_of(large, 6)
    bytes_of_nf4 = 0.5 + (1 + 4 / 256) / 64  # a scale of 8 bits for 64 values, one of fp32 for 256 scales
    for index, work in enumerate(works):
        end = 2 * END if index in (0, 5) else 0
        adapters = work.layers * ADAPTERS
        assert work.trained == adapters
        assert work.memory.weight_bytes == pytest.approx(
            bytes_of_nf4 * work.layers * LAYER + end + 4 * adapters, rel=0.001
        )
        assert work.memory.weight_gradient_bytes == 4 * adapters
        assert work.memory.optimizer_bytes == 8 * adapters
    # The last stage makes its logits some tokens at a time, with a head that is multiplied with as it is kept.
    assert works[5].memory.working_bytes < 1.01 * works[2].memory.working_bytes
    middle = works[2]
    hidden, mask = 4 * LENGTH * D, 2 * LENGTH**2
    assert middle.memory.microbatch_bytes == pytest.approx((middle.layers + 1) * hidden + mask, rel=0.001)
    # A layer's activations, which are computed again; its largest matrix as 16 bits; and some gradients.
    computed = LENGTH * (26 * D + 2 * (2 * D + 2 * D) + 8 * INNER)  # under a mask, keys are there for each head
    assert 2 * D * INNER + computed < middle.memory.working_bytes < 2 * D * INNER + 1.6 * computed
    # Average, initial adapters and a state of 12 bytes; mean gradients; and replies of 8 bits.
    replies = 32 * LENGTH * D * (1 + 4 / 256)
    assert middle.host_bytes == pytest.approx((4 + 4 + 12 + 4) * middle.trained + replies, rel=0.01)


def test_bytes_are_those_of_activations_and_of_adapters_alone(large: RunManifest) -> None:
    middle = works_of(large, 6)[2]
    assert middle.gradient_bytes == LENGTH * D * (1 + 4 / 256)
    assert middle.activation_bytes == middle.gradient_bytes + 4 * (LENGTH + 1)
    assert middle.averaging_bytes == pytest.approx(middle.layers * ADAPTERS * (1 + 4 / 256), rel=1e-6)


@pytest.mark.parametrize(("mbps", "limit"), [(100, "compute"), (50, "upload of activations and gradients")])
def test_six_stages_go_at_the_pace_of_cards_or_links(mbps: float, limit: str, large: RunManifest) -> None:
    report = make_report(large, cards(mbps), num_stages=6)
    layers = max(stage["layers"] for stage in report["stage_plans"][:-1])
    flops_per_s, bytes_per_s = 71e12 * 0.3, 0.65 * mbps * 1e6 / 8
    compute_s = LENGTH * layers * flops_of_layer_by_hand() / flops_per_s
    send_s = 2 * LENGTH * D * (1 + 4 / 256) / bytes_per_s
    assert report["stage_plans"][2]["limit"] == limit
    stream_s = 64 * max(compute_s, send_s)
    assert report["step"]["stream_s"] == pytest.approx(stream_s, rel=0.03)
    # While the pipeline fills and drains, a microbatch passes five other stages, and five links there and back.
    fill_s = 5 * compute_s + 5 * send_s + 5 * 0.03 + (compute_s - max(compute_s, send_s))
    assert report["step"]["fill_s"] == pytest.approx(fill_s, rel=0.1)
    assert report["step"]["averaging_s"] == 0.0, "no stage has two peers"
    assert report["tokens_per_s"] == pytest.approx(64 * LENGTH / (stream_s + fill_s), rel=0.03)


def test_the_page_says_what_the_plan_says(large: RunManifest) -> None:
    rows = re.findall(r"^\| (\d+) Mb/s \| (\d+)[^|]*\| ([\d,.]+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for mbps, stages, tokens_per_s in rows:
        report = make_report(large, cards(float(mbps)), num_stages=int(stages))
        assert f"{report['tokens_per_s']:,.0f}" == tokens_per_s


def test_a_plan_says_what_is_trained_and_what_a_peer_downloads(large: RunManifest) -> None:
    report = make_report(large, cards(100), num_stages=6)
    assert report["trains"] == "adapters of rank 16 on llama-70b, base in nf4"
    assert report["trained_parameters"] == 80 * ADAPTERS
    assert report["parameters"] - report["trained_parameters"] == pytest.approx(80 * LAYER + 2 * END, rel=1e-4)
    (note,) = [note for note in report["notes"] if note.startswith("before it serves")]
    largest = max(work.layers for work in works_of(large, 6)) * LAYER
    gigabytes, minutes = re.search(r"up to ([\d.]+) GB .* takes (\d+) min", note).groups()  # type: ignore[union-attr]
    assert 2 * largest <= float(gigabytes) * 1e9 * 1.01 <= 2 * (largest + END) * 1.02
    assert float(minutes) == pytest.approx(float(gigabytes) * 1e9 / (0.65 * 12.5e6) / 60, rel=0.01)


def test_nothing_is_known_of_the_steps_of_adapters(large: RunManifest) -> None:
    """Fewer bytes would make the run faster at 50 Mb/s, and what they cost in steps was measured for random weights."""
    own, *others = make_report(large, cards(50), num_stages=6)["ways"]
    assert own["time"] == 1.0
    assert max(row["speed"] for row in others) > 1.05
    assert all(row["steps"] is None and row["time"] is None and not row["recommended"] for row in others)
    changed = set().union(*(row["changes"] for row in others))
    assert changed == {"activations", "gradients"}, "Muon and boundaries are not for adapters, and nobody averages"


def test_masks_of_packed_samples_are_computed_with(tmp_path: Path) -> None:
    packed = manifest_on(tmp_path / "base", LLAMA_8B)
    plain = manifest_on(tmp_path / "base", LLAMA_8B, data={"packing": False})
    more, less = (works_of(manifest, 4)[1] for manifest in (packed, plain))
    assert more.flops - less.flops == pytest.approx(LENGTH * more.layers * 4 * 2 * LENGTH * 4096, rel=1e-6)
    assert more.memory.microbatch_bytes - less.memory.microbatch_bytes == 2 * LENGTH**2
    notes = [make_report(manifest, cards(100), num_stages=4)["notes"] for manifest in (packed, plain)]
    assert [any("are filled up" in note for note in each) for each in notes] == [False, True]


def test_what_does_not_fit_is_told_to_be_kept_in_fewer_bits(large: RunManifest) -> None:
    in_bf16 = large.model_copy(update={"model": large.model.model_copy(update={"base": "bf16"})})
    with pytest.raises(UserError, match=r"no number of stages makes all of them small enough: try model\.base=nf4"):
        make_report(in_bf16, [replace(cards(100)[0], memory_bytes=3e9)])


def test_a_wider_layer_of_a_frozen_base_is_compared_by_its_own_compute(large: RunManifest) -> None:
    resolved = large.model_copy(update={"model": resolve_model(large.model)})
    _, frozen = widened_layer_flops(resolved, 1)
    _, whole = widened_layer_flops(manifest_whole(resolved), 1)
    assert frozen / whole == 3 / 4


# --- averages of adapters


def test_averages_of_adapters_are_nothing_beside_activations(tmp_path: Path) -> None:
    """Of an 8 B model in 8 bit, a round of 256 sequences of 2048: below 1 % in each stage."""
    manifest = manifest_on(tmp_path / "base", LLAMA_8B, training={"global_batch_size": 256})
    works = works_of(manifest, 4)
    assert sum(work.trained for work in works) == 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    for work, following in itertools.pairwise(works):
        passing = 256 * (work.activation_bytes + following.gradient_bytes)
        assert work.averaging_bytes < 0.01 * 256 * work.activation_bytes
        # Two stage-mates send each other half of it, and half of the average.
        assert 2 * work.averaging_bytes < 0.01 * passing
