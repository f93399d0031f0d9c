"""The first look at a run's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML
from tiny_models import GPT2
from tiny_tokenizers import save_tokenizer

from coordinator.commands.check_data import check_data as command
from coordinator.run.data_check import check_data
from coordinator.run.resolving import resolve_manifest
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError

LENGTH = 40


def run_over(folder: Path, records: list[dict[str, Any]], **data: Any) -> dict[str, Any]:
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    special = {token: 256 + number for number, token in enumerate(CHATML.special)}
    tokenizer = save_tokenizer(
        folder / "chatml", special, CHATML.special, CHATML.eos_token, chat_template=CHATML.template
    )
    section = {"dataset": "json", "files": [f"{folder}/data.jsonl"], "tokenizer": tokenizer, "sequence_length": LENGTH}
    return {
        "name": "test",
        "model": {"config": GPT2 | {"vocab_size": 258, "n_positions": LENGTH}},
        "stages": {"count": 2},
        "data": section | data,
        "training": {"steps": 1, "global_batch_size": 1, "microbatch_size": 1},
        "optimizer": {"learning_rate": 0.1},
    }


RECORDS = [
    *({"prompt": f"{number}", "completion": "yes"} for number in range(10)),
    {"prompt": "short", "completion": "y" * 60},
    {"prompt": "x" * 60, "completion": "too late"},
    {"prompt": "", "completion": ""},
    {"prompt": "no completion"},
]


@pytest.mark.parametrize("packing", [False, True])
def test_lengths_and_what_is_cut_or_left_out(tmp_path: Path, packing: bool) -> None:
    content = run_over(tmp_path, RECORDS, format="prompt_completion", packing=packing)
    found = check_data(resolve_manifest(RunManifest.model_validate(content)), 1000, 3, None)
    assert found.counts == {"used": 11, "cut": 1, "cut_off": 1, "without_target": 1}, "one record is none of the format"
    assert (found.length_at(0.5), found.lengths[-1]) == (5, 69)
    assert (found.num_tokens, found.num_targets) == (10 * 5 + 41, 10 * 4 + 36)
    assert found.num_samples == (3 if packing else 11)
    assert found.num_without_end == 0
    assert found.shown[0] == [("0", False), ("yes<|im_end|>", True)]
    assert sum(len(text) for text, _ in found.shown[2]) <= 69


def test_answers_that_do_not_end_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\x1b[31m"}]}] * 4
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    content = run_over(tmp_path, records, format="messages", chat_template=template)
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    command(tmp_path / "run.yaml", samples=1)
    printed = capsys.readouterr().out
    assert "user: a\n[[assistant: b[31m\n]]" in printed, "and it commands no terminal"
    assert "4 documents end in a learnt token that ends no turn" in printed
    assert "data.packing=true would fill them" in printed


def test_a_sample_is_as_long_as_the_run_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A document of one token more than data.sequence_length is neither cut nor more than a full sample."""
    records = [{"input_ids": [7] * (LENGTH + 1)}] * 4
    (tmp_path / "run.yaml").write_text(json.dumps(run_over(tmp_path, records, format="tokens")))
    command(tmp_path / "run.yaml", samples=1)
    printed = " ".join(capsys.readouterr().out.split())  # its lines are as long as the terminal's
    assert f"samples: 4 of {LENGTH} tokens, 100% full" in printed
    assert f"the first token and data.sequence_length={LENGTH} more: 0 documents lose their end" in printed


def test_text_has_no_samples_that_are_cut(tmp_path: Path) -> None:
    content = run_over(tmp_path, [{"text": f"{number} " * 50} for number in range(20)])
    found = check_data(resolve_manifest(RunManifest.model_validate(content)), 10, 3, None)
    assert (found.counts["used"], found.counts["cut"], len(found.shown)) == (10, 0, 3)
    assert found.num_targets == found.num_tokens == sum(found.lengths)


def test_data_with_nothing_to_learn(tmp_path: Path) -> None:
    content = run_over(tmp_path, [{"prompt": "", "completion": ""}] * 3, format="prompt_completion")
    with pytest.raises(UserError, match=r"nothing is learnt of the first 3 documents .*\(3 without_target\)"):
        check_data(resolve_manifest(RunManifest.model_validate(content)), 10, 3, None)
