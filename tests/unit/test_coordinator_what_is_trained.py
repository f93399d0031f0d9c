"""What a run trains, in words and numbers, wherever people look at it; and how much of its tokens is learnt."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tiny_adapters import resolved_of, trainers_of, write_base
from tiny_models import CONFIGS, LENGTH, LLAMA
from watched_runs import make_watch

from coordinator.commands import runs
from coordinator.config_files import load_manifest
from coordinator.dashboard.snapshot import Background, make_snapshot
from coordinator.report.page import write_report
from coordinator.run.baseline import Baseline, train
from coordinator.watch.live_view import LiveView, run_table
from coordinator.watch.metrics import CoordinatorMetrics
from coordinator.watch.metrics_file import MetricsFile
from coordinator.watch.run_file import write_run_file
from coordinator.watch.run_watch import RunWatch
from coordinator.watch.summary import summarise
from coordinator.watch.what_is_trained import (
    count_parameters,
    public_name,
    training_line,
    what_is_learnt,
    what_is_saved,
    what_is_trained,
)
from swarm_peer.config import ModelSection, RunManifest
from swarm_peer.policy.view import SwarmView
from swarm_peer.runtime.host.metrics import PeerMetrics

ADAPTERS = "adapters of rank 16 on HuggingFaceTB/SmolLM2-135M, base in nf4"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"pretrained": "HuggingFaceTB/SmolLM2-135M@" + "a" * 40, "adapter": {}, "base": "nf4"}, ADAPTERS),
        (
            {"pretrained": "/srv/anna/some/", "adapter": {"rank": 4, "dora": True}},
            "DoRA adapters of rank 4 on some, base in fp32",
        ),
        ({"pretrained": "openai-community/gpt2"}, "all weights of openai-community/gpt2"),
        ({"config": "demo"}, "all weights, which began at random"),
    ],
)
def test_the_words_for_what_is_trained(model: dict[str, Any], words: str) -> None:
    assert what_is_trained(ModelSection.model_validate(model)) == words


def test_the_words_for_what_is_saved() -> None:
    def words(**model: Any) -> str:
        return what_is_saved(ModelSection.model_validate({"pretrained": "openai-community/gpt2"} | model))

    assert words() == "Hugging Face checkpoint"
    assert words(adapter={}) == words(adapter={"begin_with": "./adapters"}) == "Adapters, as a folder of PEFT's"


def test_a_name_for_other_people_leads_to_no_place_of_a_machine() -> None:
    assert [public_name(name) for name in ("./models/base", "~/base", "org/model@main", "gpt2")] == [
        *("base", "base", "org/model", "gpt2"),
    ]
    assert public_name("org/\u202emodel" + "x" * 500).isprintable()


@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_those_of_the_modules(family: str, tmp_path: Path) -> None:
    resolved = resolved_of(write_base(CONFIGS[family], tmp_path), num_stages=2, config=CONFIGS[family])
    trained, frozen = count_parameters(resolved)
    parameters = [each for trainer in trainers_of(resolved) for each in trainer.module.parameters()]
    assert trained == sum(each.numel() for each in parameters if each.requires_grad)
    assert frozen == sum(each.numel() for each in parameters if not each.requires_grad)


def adapted(**model: Any) -> RunManifest:
    """A run of adapters whose base is nowhere."""
    manifest = resolved_of("someone/base").manifest
    return RunManifest.model_validate(manifest.model_dump() | {"model": manifest.model.model_dump() | model})


LINE = re.compile(r"adapters of rank 300 on someone/base, base in fp32: 0\.4 M trained parameters, 21,576 frozen")
MANY = {"adapter": {"rank": 300}}


def test_a_line_says_how_many_parameters_are_trained_and_frozen() -> None:
    assert LINE.fullmatch(training_line(adapted(**MANY)))
    unknown = adapted(**MANY, config={"model_type": "not of this version"})
    assert training_line(unknown) == "adapters of rank 300 on someone/base, base in fp32"


def test_wherever_people_look_they_see_what_is_trained(tmp_path: Path) -> None:
    manifest = adapted(**MANY)
    watch = RunWatch(manifest, SwarmView(1))
    console = Console(width=160, file=io.StringIO())
    console.print(run_table(watch))
    assert LINE.search(console.file.getvalue())  # type: ignore[attr-defined]
    assert summarise(watch)["trains"] == what_is_trained(manifest.model)
    assert LINE.fullmatch(make_snapshot(watch, Background(given={}, labels={}), 0.0)["run"]["trains"])
    metrics = MetricsFile(tmp_path)
    metrics.write(next(train(Baseline(at_random(tmp_path)))))
    write_run_file(tmp_path, "12D3KooWrun", manifest)
    assert LINE.search(write_report(tmp_path).read_text())


def at_random(folder: Path, **data: Any) -> Any:
    """A run of all weights."""
    manifest = resolved_of("someone/base").manifest
    sections = {"model": {"config": LLAMA | {"vocab_size": 300}}, "data": {"sequence_length": LENGTH} | data}
    return type(resolved_of("someone/base")).of(RunManifest.model_validate(manifest.model_dump() | sections))


def test_the_words_command_no_terminal() -> None:
    manifest = adapted(pretrained="some/[red]\u202ebase")
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    console.print(run_table(RunWatch(manifest, SwarmView(1))))
    assert "some/[red]" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "\u202e" not in console.file.getvalue()  # type: ignore[attr-defined]


# --- targets


def chats() -> RunWatch:
    data = {"sequence_length": 10, "format": "messages", "dataset": "someone/chats"}
    manifest = make_watch().manifest
    return RunWatch(RunManifest.model_validate(manifest.model_dump() | {"data": data}), SwarmView(2))


def test_targets_are_shown_beside_samples_once_they_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, metrics = chats(), CoordinatorMetrics(tmp_path, SimpleNamespace(addresses=[], metrics=PeerMetrics()))  # type: ignore[arg-type]
    known = Background(given={}, labels={})
    metrics.update(watch)
    share = lambda: metrics.registry.get_sample_value("swarm_run_target_share")  # noqa: E731
    assert math.isnan(share() or 0)
    assert "batch_targets" not in make_snapshot(watch, known, 0.0)["run"]
    watch.observe_work(0, 0)
    assert watch.target_share is None, "nothing has been learnt"
    watch.observe_work(8, 20)
    metrics.update(watch)
    assert share() == 0.25
    assert make_snapshot(watch, known, 0.0)["run"]["batch_targets"] == 20
    watch.begun_at = 1
    live = LiveView(10)
    live._has_seen_peers = True
    live.update(watch)
    assert "25% of tokens are targets" in capsys.readouterr().out


def test_of_text_all_is_learnt() -> None:
    watch = make_watch()
    watch.observe_work(8, 8)
    assert watch.target_share is None


def test_one_process_tells_the_targets_of_each_step(tmp_path: Path) -> None:
    texts = [[number, *range(1, LENGTH + 1)] for number in range(250)]
    records = [{"input_ids": ids, "labels": [-100] * (LENGTH - 2) + ids[LENGTH - 2 :]} for ids in texts]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"dataset": "json", "files": [str(path)], "format": "tokens"}
    lines = list(itertools.islice(train(Baseline(at_random(tmp_path, **data))), 2))
    assert [(line["samples"], line.get("targets")) for line in lines] == [(6, 18), (6, 18)]
    (text,) = itertools.islice(train(Baseline(at_random(tmp_path))), 1)
    assert "targets" not in text


def test_who_reads_what_a_short_demo_writes_is_told_how_little_it_has_learnt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = load_manifest(Path("demo"))
    learnt = "After so short a training it has learnt how words look, and no more."
    assert what_is_learnt(manifest, manifest.training.steps) == learnt
    assert what_is_learnt(manifest, 100 * manifest.training.steps) == ""
    fine_tuned = manifest.model.model_copy(update={"pretrained": "./folder"})
    assert what_is_learnt(manifest.model_copy(update={"model": fine_tuned}), 1) == ""
    monkeypatch.setattr("coordinator.query.sampling.generate", lambda *_: "Tho wis")
    watch = SimpleNamespace(lines=[{"optimizer_step": 120, "loss": 2.0}], validation_loss=None)
    service: Any = SimpleNamespace(watch=watch, manifest=manifest, resolved=None, model_folder="MODEL")
    runs._print_result(service, 300, None, None)
    assert f"\nThe model writes:\nTho wis\n\n{learnt}\n" in capsys.readouterr().out
