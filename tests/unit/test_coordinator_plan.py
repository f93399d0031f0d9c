"""Planning a run: what GPUs and peers are described as, what stages ask, and the report."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from io import StringIO
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from cyclopts import CycloptsError
from rich.console import Console

from coordinator.cli import app
from coordinator.config_files import load_manifest
from coordinator.planning.gpus import find_gpu, gpus
from coordinator.planning.live_peers import LivePeers, live_groups, with_prices
from coordinator.planning.peers_file import AVERAGING_GAIN, USUAL_LINK_UTILISATION, load_peers
from coordinator.planning.plan import make_report
from coordinator.planning.plan_report import print_report
from coordinator.planning.stage_work import stage_works, widened_layer_flops
from swarm_peer.config import ModelSection, RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.architecture import parse_model_config
from swarm_peer.model.costs import stage_costs
from swarm_peer.model.families import family_of
from swarm_peer.model.partition import cut_stages
from swarm_peer.model.resolved import ResolvedManifest
from swarm_peer.model.stage import StageModule, initialise
from swarm_peer.model.training import StageTrainer
from swarm_peer.policy.planning.resources import PeerGroup
from swarm_peer.policy.stage_memory import RESERVED_BYTES
from swarm_peer.policy.view import PeerState, PeerView, SwarmView
from swarm_peer.wire.identity import Identity

ID = Identity.generate().peer_id
CONFIGS = Path(__file__).parents[2] / "configs"
PEERS = sorted((CONFIGS / "peers").glob("*.yaml"))


PERIODIC = ("averaging.mode=periodic", "averaging.inner_steps=50")


def manifest_of(name: str, *overrides: str) -> RunManifest:
    return load_manifest(CONFIGS / f"{name}.yaml", overrides)


# --- GPUs and peers


def test_the_table_of_gpus_is_complete() -> None:
    assert len(gpus()) >= 20
    for gpu in gpus():
        assert gpu.source
        assert gpu.bf16 is None or gpu.bf16 == gpu.fp16
        assert find_gpu(gpu.name) is gpu


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("t4", "T4"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("nvidia a100-sxm4-80gb", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX 1080 Ti"),
        ("NVIDIA GeForce RTX 2080", "RTX 2080"),
        ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
        ("rtx 3080 12 gb", "RTX 3080 12GB"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("RTX 4060 Ti 16GB", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070 Ti"),
        ("NVIDIA RTX A5000", "RTX A5000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A30", "A30"),
    ],
)
def test_a_gpu_is_found_by_what_drivers_call_it(name: str, found: str) -> None:
    assert find_gpu(name).name == found


def test_an_unknown_gpu_is_answered_with_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"gpu 'RTX 3095' is not in the table \(nearest are RTX 3090, .*by hand"):
        find_gpu("RTX 3095")
    with pytest.raises(UserError, match=r"\(known are P100, "):
        find_gpu("abacus")


@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.name)
def test_a_shipped_description_of_peers_loads(path: Path) -> None:
    groups = load_peers(path, "fp16")
    assert sum(group.count for group in groups) > 1
    assert all(0 < group.upload_bytes_per_s < inf for group in groups)


def test_there_are_descriptions_of_peers() -> None:
    assert {path.stem for path in PEERS} >= {"six-24gb", "spot-t4", "volunteers"}


def write(folder: Path, text: str) -> Path:
    path = folder / "peers.yaml"
    path.write_text(text)
    return path


def test_a_description_becomes_numbers(tmp_path: Path) -> None:
    text = """peers:
    - gpu: T4
      count: 3
      utilisation: 0.5
      upload_mbps: 80
      download_mbps: 160
      link_utilisation: 0.5
      latency_ms: 20
      dollars_per_gb: 0.1
    - {gpu: T4, upload_mbps: 80, download_mbps: 160}
    - {tflops: 10, memory_gb: 5, name: mine, upload_mbps: 80, download_mbps: 160, reachability: closed}
    """
    first, second, third = load_peers(write(tmp_path, text), "fp16")
    assert first == PeerGroup(
        name="T4",
        count=3,
        flops_per_s=32.5e12,
        memory_bytes=16e9 - RESERVED_BYTES,
        upload_bytes_per_s=5e6,
        download_bytes_per_s=10e6,
        averaging_gain=AVERAGING_GAIN,
        latency_s=0.02,
        dollars_per_hour=0.0,
        dollars_per_sent_byte=0.1e-9,
    )
    assert (second.name, second.flops_per_s) == ("T4 (2)", 65e12 * 0.3)
    assert second.upload_bytes_per_s == pytest.approx(10e6 * USUAL_LINK_UTILISATION)
    assert (third.name, third.flops_per_s, third.memory_bytes) == ("mine", 3e12, 5e9 - RESERVED_BYTES)
    assert (second.is_closed, third.is_closed) == (False, True)


LINK = "upload_mbps: 1, download_mbps: 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"peers: [{{gpu: T5, {LINK}}}]", "gpu 'T5' is not in the table"),
        (
            f"peers: [{{gpu: T4, {LINK}}}]",
            "gpu T4 has no bf16: choose another precision, such as --set model.precision=fp16",
        ),
        (
            f"peers: [{{gpu: GTX 1080 Ti, {LINK}}}]",
            "gpu GTX 1080 Ti has no bf16: choose another precision, such as --set model.precision=fp32",
        ),
        (f"peers: [{{tflops: 3, {LINK}}}]", "peers.0: no gpu and no memory_gb: name a gpu of the table, or give both"),
        (
            f"peers: [{{gpu: A100, cuont: 3, {LINK}}}]",
            "peers.0.cuont: unknown key: remove it or correct its spelling (count?)",
        ),
        ("peers: [{gpu: A100, upload_mbps: 1}]", "peers.0.download_mbps: missing: add it"),
        (f"peers: [{{gpu: A100, count: 0, {LINK}}}]", "peers.0.count: Input should be greater than or equal to 1"),
        ("peers: []", "peers: needs more values"),
        ("- gpu: A100", "expected `peers:` and a list of groups"),
        ("peers: [", "is no valid YAML"),
    ],
)
def test_a_description_that_cannot_work_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_peers(write(tmp_path, text), "bf16")
    assert message in str(caught.value)
    assert str(caught.value).startswith("--peers: ")
    assert "\n" not in str(caught.value)


def test_a_missing_description_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"--peers: .*nothing\.yaml: no such file, and none of that name comes with Swarm "
        r"\(six-24gb, spot-t4, volunteers\)",
    ):
        load_peers(tmp_path / "nothing.yaml", "fp32")


def test_prices_on_the_command_line_replace_those_of_the_file() -> None:
    groups = [PeerGroup(name="p", count=1, flops_per_s=1.0, dollars_per_hour=2.0, dollars_per_sent_byte=3e-9)]
    assert with_prices(groups, None, None) == groups
    (changed,) = with_prices(groups, 0.0, 5.0)
    assert (changed.dollars_per_hour, changed.dollars_per_sent_byte) == (0.0, 5e-9)


# --- what stages ask


@pytest.mark.parametrize("name", ["demo", "gpt2-124m", "llama", "swarm-1b-shared"])
def test_parameters_are_those_of_the_modules(name: str) -> None:
    manifest = manifest_of(name)
    config = parse_model_config(manifest.model.config)  # type: ignore[arg-type]
    modules = [StageModule(config, spec, manifest.model) for spec in ResolvedManifest.of(manifest).specs]
    works = stage_works(manifest, manifest.stages.count)
    assert [work.parameters for work in works] == [sum(p.numel() for p in module.parameters()) for module in modules]


TINY = {"vocab_size": 256, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = TINY | {"model_type": "gpt2", "n_positions": 64, "n_embd": 128, "n_head": 4}
GPT2 |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
LLAMA = TINY | {"model_type": "llama", "max_position_embeddings": 64, "hidden_size": 128, "intermediate_size": 384}
LLAMA |= {"num_attention_heads": 4}
LIKE_LLAMA = LLAMA | {"num_key_value_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        GPT2,
        GPT2 | {"n_inner": 192},
        LLAMA,
        LLAMA | {"num_key_value_heads": 1},
        LLAMA | {"num_key_value_heads": 2, "intermediate_size": 256},
        LIKE_LLAMA | {"model_type": "mistral", "sliding_window": 16},
        LIKE_LLAMA | {"model_type": "qwen2"},
        LIKE_LLAMA | {"model_type": "qwen3", "head_dim": 48},
        LIKE_LLAMA | {"model_type": "gemma2", "head_dim": 48},
        LIKE_LLAMA | {"model_type": "gemma2", "head_dim": 48, "attn_logit_softcapping": None, "sliding_window": 64},
        LIKE_LLAMA | {"model_type": "gemma3_text", "head_dim": 48, "sliding_window": 16},
    ],
)
def test_activations_are_those_that_autograd_keeps(config: dict[str, Any]) -> None:
    """In fp32, which is what a CPU computes in."""
    kept = [_kept_bytes(config, num_layers) for num_layers in (2, 3)]  # with a layer of each kind before the last
    family = family_of(parse_model_config(config | {"num_hidden_layers": 5}))
    predicted = family.layer_activation_bytes(3, sequence_length=32, half=False)
    assert predicted == pytest.approx(kept[1] - kept[0], rel=0.01)


def _kept_bytes(config: dict[str, Any], num_layers: int, length: int = 32) -> float:
    """Per token, of a stage in the middle."""
    parsed = parse_model_config(config | {"num_hidden_layers": num_layers + 2})
    module = StageModule(parsed, cut_stages(parsed, 3, length, [1, num_layers, 1])[1], ModelSection(config=config))
    initialise(module, 0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(torch.randn(2, length, parsed.hidden_size, requires_grad=True))
    assert output.requires_grad
    return sum(kept.values()) / (2 * length)


@pytest.mark.parametrize("optimizer", ["name=adamw", "name=sgd", "momentum=0.9", "name=muon"])
@pytest.mark.parametrize("share_layers", [False, True])
def test_optimizer_state_is_as_large_as_said(optimizer: str, share_layers: bool) -> None:
    name = () if optimizer.startswith("name") else ("optimizer.name=sgd",)
    share = f"model.share_layers={str(share_layers).lower()}"
    resolved = ResolvedManifest.of(manifest_of("demo", *name, f"optimizer.{optimizer}", share))
    for spec, costs in zip(resolved.specs, stage_costs(resolved, "cuda"), strict=True):
        state = StageTrainer(resolved, spec).state_template()
        held = sum(tensor.nbytes for entry, tensor in state.items() if entry.startswith("optimizer/"))
        assert costs.memory.optimizer_bytes == pytest.approx(held, rel=1e-3)


def test_operations_and_bytes_of_a_run() -> None:
    """Six operations per parameter of a layer and token and those of causal attention; four forward passes in all where
    activations or logits are computed again."""
    works = stage_works(manifest_of("swarm-1b-shared"), 3)
    layer, head, tokens = 12 * 4096**2, 50304 * 4096, 2048
    attention = 2048 * 4096
    assert works[1].flops == pytest.approx(16 * tokens * 8 * (layer + attention), rel=1e-3)
    assert works[2].flops - works[1].flops == pytest.approx(tokens * 8 * head, rel=1e-3)
    # The configuration's comments: 8.4 MB a hop and about 55 TFLOP; weights, gradients and moments take 4 GB.
    assert works[1].activation_bytes == pytest.approx(8.5e6, rel=0.02)
    assert works[1].flops == pytest.approx(55e12, rel=0.05)
    assert max(work.memory.held_bytes for work in works) == pytest.approx(4.2e9, rel=0.02)
    assert (works[0].gradient_bytes, works[2].activation_bytes) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["gpt2-124m", "llama"])
def test_a_layer_of_twice_the_width_costs_four_times_as_much(name: str) -> None:
    manifest = manifest_of(name, "data.sequence_length=2")
    hidden, flops = widened_layer_flops(manifest, 1)
    assert widened_layer_flops(manifest, 2) == (2 * hidden, pytest.approx(4 * flops, rel=0.01))
    assert len(stage_works(manifest, 3)) == 3


# --- the report

FAST = PeerGroup(
    name="fast",
    count=4,
    flops_per_s=20e12,
    memory_bytes=15e9,
    upload_bytes_per_s=125e6,
    download_bytes_per_s=125e6,
    latency_s=0.02,
    dollars_per_hour=1.0,
    dollars_per_sent_byte=1e-10,
)


def test_a_report_adds_up() -> None:
    manifest = manifest_of("gpt2-124m")
    report = make_report(manifest, [FAST], num_stages=2)
    assert json.loads(json.dumps(report)) == report
    step, training = report["step"], report["training"]
    assert step["seconds"] == pytest.approx(step["stream_s"] + step["fill_s"] + step["averaging_s"] + step["update_s"])
    assert report["tokens_per_s"] == pytest.approx(512 * 1024 / step["seconds"])
    assert [stage["layers"] for stage in report["stage_plans"]] == [8, 4]
    assert training["tokens"] == 2000 * 512 * 1024
    assert training["days"] == pytest.approx(training["tokens"] / report["tokens_per_s"] / 86400)
    assert training["peer_dollars"] == pytest.approx(4 * training["days"] * 24)
    assert training["traffic_dollars"] == pytest.approx(training["sent_bytes"] * 1e-10)
    assert [option["stages"] for option in report["options"]] == [1, 2, 3, 4]
    assert report["square_cube"]["rows"][0]["hidden_size"] == 768
    half = make_report(manifest, [FAST], num_stages=2, tokens=training["tokens"] // 2)
    assert half["training"]["dollars"] == pytest.approx(training["dollars"] / 2)


def test_a_report_in_words() -> None:
    for report in (
        make_report(manifest_of("gpt2-124m"), load_peers(CONFIGS / "peers" / "volunteers.yaml", "bf16")),
        make_report(manifest_of("swarm-1b-shared"), load_peers(CONFIGS / "peers" / "spot-t4.yaml", "fp16")),
    ):
        out = StringIO()
        print_report(report, Console(file=out, width=80))
        for words in (
            "What limits it: ",
            "Stages",
            "A round",
            "Numbers of stages",
            "One peer more",
            "Square-cube",
            "Ways to train, by time",
            "Way to train: ",
        ):
            assert words in out.getvalue()
        assert f"{report['tokens_per_s']:,.0f} tokens/s" in out.getvalue()
        assert "…" not in out.getvalue(), "nothing is cut off"
        for stage in report["stage_plans"]:
            assert f"{stage['parameters'] / 1e6:,.1f} M" in out.getvalue()
            assert f"{stage['tokens_per_s']:,.0f}" in out.getvalue()


def test_where_layers_share_weights_the_stages_are_part_of_the_model() -> None:
    report = make_report(manifest_of("swarm-1b-shared"), load_peers(CONFIGS / "peers" / "spot-t4.yaml", "fp16"))
    assert [option["stages"] for option in report["options"]] == [3]
    assert any("another model" in note for note in report["notes"])


def test_each_stage_has_the_peers_that_the_run_begins_with() -> None:
    report = make_report(manifest_of("gpt2-124m", "stages.peers_to_start=2"), [FAST])
    assert [option["stages"] for option in report["options"]] == [1, 2]
    assert all(min(option["peers"]) >= 2 for option in report["options"])


def test_a_round_longer_than_its_timeout_is_told() -> None:
    slow = PeerGroup(
        name="slow", count=2, flops_per_s=20e12, memory_bytes=15e9, upload_bytes_per_s=1e5, download_bytes_per_s=1e5
    )
    overrides = "stages.peers_to_start=2", "averaging.compression=fp16"
    report = make_report(manifest_of("gpt2-124m", *overrides), [slow], num_stages=1)
    (told,) = [note for note in report["notes"] if "averaging.round_timeout_s" in note]
    assert "one longer than averaging.round_timeout_s=120 fails" in told
    average_s = report["step"]["averaging_s"]
    roomy_s = int(told.rpartition("=")[2])
    assert 3 * average_s <= roomy_s < 3 * average_s + 11
    near = replace(slow, upload_bytes_per_s=1e5 * average_s / 70, download_bytes_per_s=1e5 * average_s / 70)
    for timeout_s, is_told in ((130, True), (150, False), (roomy_s, False)):
        changed = manifest_of("gpt2-124m", *overrides, f"averaging.round_timeout_s={timeout_s}")
        notes = make_report(changed, [near], num_stages=1)["notes"]
        assert any("averaging.round_timeout_s" in note for note in notes) is is_told, "70 s are more than half of 130"
    hidden = "averaging.mode=delayed", "training.global_batch_size=262144"
    delayed = make_report(manifest_of("gpt2-124m", *overrides, *hidden), [slow], num_stages=1)
    assert delayed["step"]["averaging_s"] < 120, "most of it is hidden by the next round"
    assert any("longer than averaging.round_timeout_s=120" in note for note in delayed["notes"])
    home = replace(slow, count=8, upload_bytes_per_s=2e6, download_bytes_per_s=2e6)
    busy = "averaging.mode=delayed", "training.global_batch_size=4096"
    beside = make_report(manifest_of("gpt2-124m", *busy), [home], num_stages=4)
    assert beside["step"]["stream_s"] > 1000, "microbatches need the links for longer than an average may take"
    assert not any("averaging.round_timeout_s" in note for note in beside["notes"]), "but it does not wait for them"
    periodic = make_report(manifest_of("gpt2-124m", *overrides, *PERIODIC), [slow], num_stages=1)
    assert periodic["step"]["averaging_s"] < report["step"]["averaging_s"] / 20
    assert any("averaging.round_timeout_s" in note for note in periodic["notes"]), "one round is as long as before"


@pytest.mark.parametrize("dollars", [0.0, 1.0])
def test_peers_that_the_plan_leaves_out_are_not_to_be_started(dollars: float) -> None:
    slow = replace(FAST, name="slow", count=3, upload_bytes_per_s=1e3, dollars_per_hour=9.0)
    groups = with_prices([FAST, slow], dollars, dollars)
    report = make_report(manifest_of("gpt2-124m"), groups, num_stages=2)
    (note,) = [note for note in report["notes"] if "without a stage" in note]
    assert note.startswith("3 peers without a stage (3 x slow): in none would they make a step shorter")
    assert "Do not start these for this run: `--stage auto` would put them to work" in note
    first = report["stage_plans"][0]["peers"]["fast"]
    assert note.endswith(f"with the stages of this plan, such as `--stage 0` for {first} x fast")
    assert ("the price is without them" in note) is (dollars > 0)
    assert report["training"]["peer_dollars"] == pytest.approx(4 * dollars * report["training"]["days"] * 24)
    alone = make_report(manifest_of("gpt2-124m"), [FAST], num_stages=2)
    assert not any("without a stage" in note for note in alone["notes"])


@pytest.mark.parametrize(
    ("memory", "num_stages", "overrides", "message"),
    [
        (2e9, 2, (), "gpt2-124m does not fit these peers in 2 stages: stage 0 needs 2.6 GB with one microbatch in"),
        (2.4e9, 2, (), "the largest peer has 2.4 GB; the fewest that do are 3: take --stages 3"),
        (
            1.5e9,
            None,
            (),
            "no number of stages makes all of them small enough: try optimizer.name=adamw_8bit, or model.",
        ),
        (1.7e9, None, ("training.microbatch_size=1", "model.config.n_layer=24"), "are 5: add at least 1 peer more"),
    ],
)
def test_what_does_not_fit_is_told_with_a_remedy(
    memory: float, num_stages: int | None, overrides: tuple[str, ...], message: str
) -> None:
    peers = [
        PeerGroup(
            name="small",
            count=4,
            flops_per_s=20e12,
            memory_bytes=memory,
            upload_bytes_per_s=1e7,
            download_bytes_per_s=1e7,
        )
    ]
    with pytest.raises(UserError) as caught:
        make_report(manifest_of("gpt2-124m", *overrides), peers, num_stages)
    assert message in str(caught.value)


def test_another_number_of_stages_is_planned_where_the_configured_one_cannot_be_cut() -> None:
    report = make_report(manifest_of("gpt2-124m", "stages.count=64"), [FAST], num_stages=2)
    assert (report["stages"], report["configured_stages"]) == (2, 64)


def test_peers_of_a_live_run_have_their_measured_speed() -> None:
    manifest = manifest_of("gpt2-124m")
    works = stage_works(manifest, 2)
    peers = (
        PeerView(peer_id="a", stage=0, state=PeerState.SERVING, samples_per_s=2.0),
        PeerView(peer_id="b", stage=0, state=PeerState.SERVING, samples_per_s=2.001),
        PeerView(peer_id="c", stage=1, state=PeerState.SERVING, samples_per_s=8.0),
        PeerView(peer_id="d", stage=1, state=PeerState.JOINING),
    )
    groups = live_groups(manifest, SwarmView(2, peers), LivePeers(download_bytes_per_s=1e6))
    assert sum(group.count for group in groups) == 4
    speeds = sorted((group.flops_per_s, group.count) for group in groups)
    assert speeds[0][0] == pytest.approx(2.0 * works[0].flops, rel=0.05)
    assert speeds[-1][0] == pytest.approx(8.0 * works[1].flops, rel=0.05)
    report = make_report(manifest, groups, 2)
    assert any("give --memory-gb" in note for note in report["notes"])
    assert report["groups"][0]["memory_bytes"] is None
    lent = replace(
        peers[2], samples_per_s=1.0, device_samples_per_s=8.0, upload_bytes_per_s=5e5, download_bytes_per_s=5e6
    )
    groups = live_groups(manifest, SwarmView(2, (*peers[:2], lent)), LivePeers(download_bytes_per_s=1e6))
    [thin] = [group for group in groups if group.upload_bytes_per_s < inf]
    assert (thin.upload_bytes_per_s, thin.download_bytes_per_s) == (5e5, 1e6)
    assert {group.averaging_gain for group in groups} == {1.0, AVERAGING_GAIN}
    assert thin.averaging_gain == 1.0, "it has no gaps to fill"
    assert thin.flops_per_s == pytest.approx(8.0 * works[1].flops, rel=0.05)
    cut = live_groups(manifest, SwarmView(2, (peers[0], replace(peers[1], unreached=("c",)), peers[2])), LivePeers())
    assert sum(group.count for group in cut if group.is_closed) == 2, "both ends of a way that is missing"
    with pytest.raises(UserError, match="none of the 1 peers of run gpt2-124m has measured its speed: wait"):
        live_groups(manifest, SwarmView(2, peers[3:]), LivePeers())


# --- the command


def run(*arguments: str) -> None:
    app(["plan", *arguments], exit_on_error=False, print_error=False, result_action="return_value")


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run(str(CONFIGS / "gpt2-124m.yaml"), "--peers", str(CONFIGS / "peers" / "volunteers.yaml"), "--json",
        "--stages", "2", "--tokens", "1000000000", "--dollars-per-hour", "0.5", "--dollars-per-gb", "0")  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert (report["stages"], report["training"]["tokens"]) == (2, 10**9)
    assert report["training"]["traffic_dollars"] == 0.0
    assert report["training"]["peer_dollars"] > 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan needs a run's YAML file, or --initial-peers ADDRESS"),
        (
            ["--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/{ID}", "--set", "seed=2"],
            "--set seed=2: it overrides a run's",
        ),
        *(
            (
                ["demo.yaml", "--peers", "x.yaml", option, "5"],
                f"{option} is about the peers of a live run: name that run with --initial-peers, or leave {option} out",
            )
            for option in ("--run-id", "--upload-mbps", "--download-mbps", "--latency-ms", "--memory-gb")
        ),
        (
            ["demo.yaml", "--peers", "x.yaml", "--latency-ms", "0", "--memory-gb", "inf"],
            "--peers: x.yaml: no such file",
        ),
        (["demo.yaml"], "plan needs peers: describe them with --peers FILE"),
        (["demo.yaml", "--peers", "x.yaml", "--stages", "0"], 'Invalid value "0" for --stages. Must be > 0.'),
        (["demo.yaml", "--peers", "x.yaml", "--tokens", "-5"], 'Invalid value "-5" for --tokens. Must be > 0.'),
        (
            ["demo.yaml", "--peers", "x.yaml", "--dollars-per-gb", "-1"],
            'Invalid value "-1.0" for --dollars-per-gb. Must be >= 0.',
        ),
        (["demo.yaml", "--peers", "x.yaml"], "--peers: x.yaml: no such file"),
        (
            ["demo.yaml", "--peers", "peers/volunteers.yaml", "--stages", "5"],
            "stages.count=5 is more than the model's 4",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS)
    monkeypatch.setattr(sys, "argv", ["swarm-coordinator"])
    with pytest.raises((UserError, CycloptsError)) as caught:
        run(*arguments)
    assert message in str(caught.value)


def test_a_plan_says_what_becomes_of_peers_that_choose_their_stages_themselves() -> None:
    slow = replace(FAST, name="slow", count=3, upload_bytes_per_s=1e3)
    report = make_report(manifest_of("gpt2-124m"), [FAST, slow], num_stages=2)
    automatic = report["tokens_per_s_automatic"]
    assert automatic < report["tokens_per_s"] / 10
    (note,) = [note for note in report["notes"] if "expect about" in note]
    assert note.startswith(
        f"if all of these peers join with `--stage auto`, expect about {automatic:,.0f} tokens/s: they choose"
    )
    alone = make_report(manifest_of("gpt2-124m"), [FAST], num_stages=2)
    assert alone["tokens_per_s_automatic"] == pytest.approx(alone["tokens_per_s"], rel=0.05)
    assert not any("expect about" in note for note in alone["notes"])


@pytest.mark.parametrize(
    ("overrides", "disk"),
    [
        ((), ", and 6.9 GB of disk for snapshots"),
        (("averaging.mode=delayed",), ", and 6.9 GB of disk for snapshots"),
        (("recovery.snapshot_every=0",), ""),
    ],
)
def test_a_plan_says_what_a_peer_takes_of_its_machine(overrides: tuple[str, ...], disk: str) -> None:
    report = make_report(manifest_of("gpt2-124m", *overrides), [FAST], num_stages=2)
    (note,) = [note for note in report["notes"] if "of the machine's" in note]
    largest = max(stage["parameters"] for stage in report["stage_plans"])
    most_gb = 1e-9 * largest * (32 if overrides == ("averaging.mode=delayed",) else 20)  # as docs/operating.md says
    memory_gb = float(note.partition("up to ")[2].partition(" GB")[0])
    assert memory_gb == pytest.approx(most_gb, rel=0.05)
    assert note == f"beside its GPU's memory, a peer takes up to {memory_gb:.1f} GB of the machine's{disk}"


def test_closed_peers_that_no_stage_has_room_for_are_told(tmp_path: Path) -> None:
    closed = "{gpu: T4, count: 6, name: closed, upload_mbps: 80, download_mbps: 160, reachability: closed}"
    text = f"peers: [{closed}, {{gpu: T4, count: 2, name: open, upload_mbps: 80, download_mbps: 160}}]"
    report = make_report(manifest_of("gpt2-124m"), load_peers(write(tmp_path, text), "fp16"), 2)
    (note,) = [note for note in report["notes"] if "without a stage" in note]
    assert note.startswith("4 peers without a stage (4 x closed)")
    assert "the ways that closed ones lack to each other" in note
