"""Questions to a model before a run and after it: `local --ask`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from chat_templates import CHATML
from peft import LoraConfig, get_peft_model
from test_runtime_examples import save
from tiny_models import LLAMA
from tiny_tokenizers import save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from coordinator.commands.asking import Asking
from coordinator.commands.runs import local
from coordinator.query.asking import MOST_TOKENS, Questions, read_questions
from coordinator.run.resolving import resolve_manifest
from swarm_peer.config import RunManifest
from swarm_peer.errors import UserError
from swarm_peer.model.resolved import ResolvedManifest

LENGTH = 200
CONFIG = LLAMA | {"vocab_size": 260, "max_position_embeddings": 512, "initializer_range": 0.5}


def write_base(folder: Path, seed: int = 0) -> Path:
    """A small model whose tokens are bytes and ChatML's, of large weights, so that it has answers of its own."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    save(folder, CHATML, CHATML.template)
    return folder


def resolved_of(base: Path | None, **data: object) -> ResolvedManifest:
    model = {"pretrained": str(base), "adapter": {}} if base else {"config": CONFIG}
    return resolve_manifest(
        RunManifest.model_validate(
            {
                "name": "test",
                "model": model,
                "stages": {"count": 1},
                "data": {"dataset": "embedded", "format": "messages", "sequence_length": LENGTH} | data,
                "training": {"steps": 1, "global_batch_size": 1, "microbatch_size": 1},
                "optimizer": {"learning_rate": 0.1},
            }
        )
    )


def plainly(model: Path, tokenizer: Path, question: str, most: int) -> str:
    """What transformers' own chat template and generation make of it."""
    loaded, theirs = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(tokenizer)
    messages = [{"role": "user", "content": question}]
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = loaded.generate(**prompt, max_new_tokens=most, do_sample=False, eos_token_id=theirs.eos_token_id)
    return theirs.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=False)


def test_a_base_and_its_adapters_answer_as_transformers_has_them_answer(tmp_path):
    base = write_base(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path / "adapters")

    questions = Questions(resolved_of(base), ["Hi?", "Ünïcode 🙂?"])
    before, after = questions.ask_base(), questions.ask(str(tmp_path / "adapters"))
    assert before != after
    for model_folder, answers in ((base, before), (tmp_path / "adapters", after)):
        for question, answer in zip(questions.texts, answers, strict=True):
            expected = plainly(model_folder, base, question, MOST_TOKENS)
            assert answer.removesuffix(" ...").strip() == expected.removesuffix("<|im_end|>").strip()


def test_an_answer_ends_where_a_turn_does_and_where_a_sequence_does(tmp_path):
    base = write_base(tmp_path)
    model = LlamaForCausalLM.from_pretrained(base)
    questions = Questions(resolved_of(base), ["Hi?"])
    with torch.no_grad():  # all logits are equal, and the first token is the likeliest
        model.lm_head.weight.zero_()
    model.save_pretrained(base)
    first = AutoTokenizer.from_pretrained(base).decode([0])
    assert questions.ask_base() == [first * MOST_TOKENS + " ..."]

    room = LENGTH - len(questions._prompts[0])
    short = Questions(resolved_of(base, sequence_length=LENGTH - room + 5), ["Hi?"])
    assert short.ask_base() == [first * 5 + " ..."]

    questions._ends = frozenset([0])
    assert questions.ask_base() == [""]


def test_what_cannot_be_asked_is_said_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="--ask: the run begins with random weights, which answer nothing"):
        Questions(resolved_of(None, format="text"), ["Hi?"])
    base = write_base(tmp_path / "base")
    with pytest.raises(UserError, match=r"--ask: the question 'aaa.* sequences have 200: write a shorter one"):
        Questions(resolved_of(base), ["Hi?", "a" * LENGTH])
    plain = tmp_path / "plain"
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(plain)
    save_tokenizer(plain, {})
    with pytest.raises(
        UserError, match=r"the run has no chat template, since data\.tokenizer=.*leave --chat and --ask out"
    ):
        Questions(resolved_of(plain, format="text"), ["Hi?"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
        (b"\n \n", "no questions"),
    ],
)
def test_a_file_without_questions_is_one_line(content, message, tmp_path):
    if content is not None:
        (tmp_path / "questions.txt").write_bytes(content)
    with pytest.raises(UserError, match=rf"--ask .*questions\.txt: .*{message}") as caught:
        read_questions(tmp_path / "questions.txt")
    assert "\n" not in str(caught.value)


def test_answers_are_shown_side_by_side(tmp_path, capsys, monkeypatch):
    base, file = write_base(tmp_path / "base"), tmp_path / "questions.txt"
    file.write_text("  Who [bold]are you?\n\nAnd now?")
    said = {"base": ["I am Sm\x1bol.", "Nothing."], "model": ["I am the guide.", "Much."]}
    monkeypatch.setattr(Questions, "ask", lambda _, model, revision="main": said[Path(model).name])
    asking = Asking(resolved_of(base), file, None)
    before = capsys.readouterr().out
    assert before.splitlines()[2:] == ["> Who [bold]are you?", "I am Smol.", "", "> And now?", "Nothing.", ""]
    asking.compare(tmp_path / "model")
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if "Who" in line)
    assert [cell.strip() for cell in row.split("   ") if cell.strip()] == [
        "Who [bold]are you?",
        "I am Smol.",
        "I am the guide.",
    ]
    assert any("And now?" in line and "Nothing." in line and "Much." in line for line in lines)


def test_local_asks_before_the_run_and_after_it(tmp_path, capsys, monkeypatch):
    base, questions, config = write_base(tmp_path / "base"), tmp_path / "questions.txt", tmp_path / "run.yaml"
    questions.write_text("Hi?")
    manifest = resolved_of(base, dataset="embedded").manifest.model_dump(mode="json", exclude_unset=True)
    config.write_text(yaml.safe_dump(manifest | {"data": {"format": "messages", "sequence_length": LENGTH}}))
    asked = []
    monkeypatch.setattr(Questions, "ask", lambda _, model, revision="main": asked.append(Path(model).name) or ["Yes."])

    def run_local(manifest: object, *_: object, **__: object) -> SimpleNamespace:
        assert asked == ["base"]
        watch = SimpleNamespace(lines=[{"optimizer_step": 1, "loss": 2.0}], validation_loss=None)
        return SimpleNamespace(watch=watch, manifest=manifest, model_folder=tmp_path / "model")

    monkeypatch.setattr("coordinator.commands.runs.configure_logging", lambda level: None)
    monkeypatch.setattr("coordinator.run.local.run_local", run_local)
    monkeypatch.setattr("coordinator.commands.runs._write_report", lambda *_: None)
    local(config, ask=questions, output=tmp_path / "output")
    assert asked == ["base", "model"]
    assert "After training" in capsys.readouterr().out

    with pytest.raises(UserError, match="--ask: the run begins with random weights"):
        local(Path("demo"), ask=questions, output=tmp_path / "other")


def test_the_demo_asks_what_it_has_not_taught():
    from swarm_peer.runtime.data.corpus import CHATS

    questions = read_questions(Path(__file__).parents[2] / "configs" / "swarm-questions.txt")
    chats = [json.loads(line)["messages"] for line in CHATS.read_text().splitlines()]
    taught = {message["content"].casefold() for chat in chats for message in chat if message["role"] == "user"}
    assert len(questions) == 3
    assert not taught & {question.casefold() for question in questions}
